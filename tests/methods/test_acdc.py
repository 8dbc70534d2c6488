"""AC/DC: phases in turn, on one learning-rate schedule."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import pacprune as pp
from pacprune.masking import weights

G = torch.Generator().manual_seed(1)
X = torch.randn(120, 6, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
CONFIG = pp.Config(epochs=20, lr=0.1, batch_size=30, schedule="cosine")


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 3))


def lengths(result: pp.Pruned) -> list[tuple[str, int]]:
    stages = (row["stage"] for row in result.history)
    return [(name, len(list(rows))) for name, rows in itertools.groupby(stages)]


def test_phases_take_turns_as_on_cifar() -> None:
    result = pp.acdc(net(), (X, Y), CONFIG, sparsity=0.8)
    turns = [(f"{kind} {i}", 2) for i in range(1, 6) for kind in ("dense", "sparse")]
    turns[0], turns[-1] = ("dense 1", 1), ("sparse 5", 3)  # of 200 epochs: 10, 20, ..., 20, 30
    assert lengths(result) == turns
    few = pp.acdc(net(), (X, Y), dataclasses.replace(CONFIG, epochs=6), sparsity=0.8)
    assert lengths(few) == [("sparse 1", 2), ("dense 2", 1), ("sparse 2", 3)]


@pytest.mark.parametrize("warmup", [0.0, 0.05])
def test_all_phases_lie_on_one_schedule(warmup: float) -> None:
    config = dataclasses.replace(CONFIG, warmup=warmup)
    result = pp.acdc(net(), (X, Y), config, sparsity=0.8)
    whole = pp.fit(net(), (X, Y), config)
    assert [row["lr"] for row in result.history] == pytest.approx([row["lr"] for row in whole])


def test_a_sparse_phase_keeps_the_largest_weights_and_a_dense_one_trains_all() -> None:
    model, supports = net(), {}

    def progress(stage: str, step: int, steps: int, row: dict[str, Any]) -> None:
        support = torch.cat([(w != 0).reshape(-1) for w in pp.prunable(model).values()])
        supports.setdefault(stage, []).append(support)

    config = dataclasses.replace(CONFIG, lr=0.3)
    result = pp.acdc(model, (X, Y), config, sparsity=0.5, progress=progress)
    for stage, seen in supports.items():
        if stage.startswith("dense"):
            assert int(seen[-1].sum()) > 170  # of 180: all but those behind a dead unit
        else:
            assert all(torch.equal(support, seen[0]) for support in seen)
            assert int(seen[0].sum()) == 90
    masks = [seen[0] for stage, seen in supports.items() if stage.startswith("sparse")]
    assert any(not torch.equal(a, b) for a, b in itertools.pairwise(masks))
    assert torch.equal(masks[-1], torch.cat([keep.reshape(-1) for keep in result.mask.values()]))
    assert weights.masked(model)  # a later fit keeps the zeros


def test_it_learns_a_pattern() -> None:
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 4))
    data = torch.randn(60, 8), torch.arange(60) % 4
    result = pp.acdc(model, data, dataclasses.replace(CONFIG, epochs=4), pattern="2:4")
    assert (result.pattern, result.sparsity) == ("2:4", 0.5)


def test_no_round_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds is 0; at least 1 sparse phase must prune"):
        pp.acdc(net(), (X, Y), CONFIG, sparsity=0.5, rounds=0)
