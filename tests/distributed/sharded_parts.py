"""Cases of test_sharded without training: top-k of many equal scores, and partly written checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pacprune as pp
from pacprune.distributed import ranks
from pacprune.masking import masks

Outcome = dict[str, Any]


def ties(folder: Path) -> Outcome:
    """Compares top_k of sharded scores that have few different values with top_k of whole ones; counts differences."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (ranks.world(),))

    def spread(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for n, t in tensors.items()}

    wrong = count = 0
    shapes = {"a": (5, 4), "b": (1, 7), "c": (8, 3), "d": (2, 2, 2)}
    for seed in range(2):
        source = torch.Generator().manual_seed(seed)
        kinds = [torch.float32, torch.float64] if seed % 2 else [torch.float32]
        scores = {
            n: torch.randint(-2, 3, s, generator=source).to(kinds[i % len(kinds)]) * 0.3
            for i, (n, s) in enumerate(shapes.items())
        }
        scores["c"][0, 0], scores["a"][4, 3], scores["a"][0] = torch.inf, -torch.inf, -0.0
        second = {n: torch.randint(0, 2, s, generator=source).float() for n, s in shapes.items()}
        for sparsity in (0.0, 0.13, 0.5, 0.9):
            for options in ({}, {"min_per_layer": 2}, {"scope": "layer"}, {"scope": "erk", "min_per_layer": 1}):
                if sparsity == 0.9 and "min_per_layer" in options:
                    continue
                for tie in (None, second):
                    mask = pp.top_k(scores, sparsity=sparsity, ties=tie, **options)
                    sharded_mask = pp.top_k(spread(scores), sparsity=sparsity, ties=tie and spread(tie), **options)
                    assert all(isinstance(m, DTensor) for m in sharded_mask.values())
                    count += 1
                    wrong += any(not torch.equal(m, sharded_mask[n].full_tensor()) for n, m in mask.items())
    keep = {n: torch.rand(s, generator=torch.Generator().manual_seed(9)) for n, s in shapes.items()}
    pairs = [(f(keep), f(spread(keep))) for f in (masks.entropy, lambda p: masks.sparsity(pp.top_k(p, sparsity=0.3)))]
    return {"wrong": wrong, "count": count, "pairs": pairs}


def checkpoints(folder: Path) -> Outcome:
    """Parts of checkpoints as a death at any moment leaves them: the epoch to resume from, or the refusal."""
    from pacprune.training.checkpoint import load_shards, save, save_shards

    path, rank, outcome = folder / "cut.pt", ranks.rank(), {}
    own_part = folder / f"cut.pt.{rank}-of-{ranks.world()}"
    next_part = folder / f"{own_part.name}.next"

    def read(name: str) -> None:
        try:
            part = load_shards(path, "run")
            outcome[name] = None if part is None else (part["epoch"], part["rank"])
        except ValueError as error:
            outcome[name] = str(error)
        ranks.barrier()

    read("none")
    save_shards(path, identity="run", epoch=1, batch=0, rank=rank)
    (folder / f"{next_part.name}.7.part").write_bytes(b"what a writer that was killed leaves")
    read("whole")
    if rank == 0:
        save(next_part, identity="run", epoch=2, batch=0, rank=rank)
    read("one has written")
    if rank == 1:
        save(own_part, identity="run", epoch=2, batch=0, rank=rank)
    read("one has renamed")
    if rank == 1:
        own_part.unlink()
    ranks.barrier()
    read("one is lost")
    if rank == 0:
        (folder / "cut.pt.0-of-3").write_bytes(b"")
    ranks.barrier()
    read("three ranks")
    return outcome
