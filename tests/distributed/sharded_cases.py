"""The cases that test_sharded runs: with a whole model in one process, and as a script with a sharded one on two ranks.

sharded_cases.py FOLDER CASE...
"""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_parts import checkpoints, ties
from torch import Tensor, nn

import pacprune as pp
from pacprune.distributed import ranks
from pacprune.masking import spikeslab
from pacprune.training import checkpoint
from pacprune.training.budget import Budget

__all__ = ["checkpoints", "ties"]  # the other cases are defined below

Outcome = dict[str, Any]
FIFTY = {"epochs": 5, "batch_size": 20}
"""50 steps at the default learning rate."""


def cut(model: nn.Module, *parts: nn.Module, **options: Any) -> nn.Module:
    """Applies fully_shard if there are other ranks; in a single process the model stays whole."""
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        for part in parts:
            fully_shard(part, **options)
        fully_shard(model, **options)
    return model


class Gain(nn.Module):
    """A weight of a single row: one of two ranks has nothing of it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1, size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """With an output layer of 3 rows, which two ranks cannot share evenly."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), Gain(33), nn.Linear(33, 3))
    return cut(model.to(dtype), model[0], model[2])


class Tied(nn.Module):
    """A small transformer whose embedding is also its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(1))


def tied_net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tied()
    return cut(model, *model.blocks)


def pair(n: int = 200, seed: int = 1) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] + x[:, 2] > 0.5).long()


def tokens(n: int = 200) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 11, (n, 6), generator=torch.Generator().manual_seed(1))
    return x, x.amax(1)


def attached(**options: Any) -> nn.Module:
    model = net()
    return pp.attach(model, pp.isotropic(model, sparsity=0.5), **options)


def masked(sparsity: float = 0.8, **options: Any) -> nn.Module:
    model = net()
    return pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=sparsity, **options))


def full(tensors: Any) -> dict[str, Tensor]:
    """Whole tensors, one gathered after another."""
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in tensors.items()}


def state(model: nn.Module) -> dict[str, Tensor]:
    return full(checkpoint.state(model))


def fitted(model: nn.Module, config: pp.Config, data: Any = None, **options: Any) -> Outcome:
    history = pp.fit(model, pair() if data is None else data, config, **options)
    return {"history": history, "state": state(model)}


def outcome_of(result: pp.Pruned) -> Outcome:
    return {
        "history": result.history,
        "state": state(result.model),
        "mask": full(result.mask),
        "sparsity": result.sparsity,
    }


def dense(folder: Path) -> Outcome:
    return fitted(net(), pp.Config(**FIFTY), validation=pair(60, seed=2))


def gates(folder: Path) -> Outcome:
    model = attached()
    outcome = fitted(model, pp.Config(**FIFTY), budget=Budget(0.5))
    return outcome | {"mask": full(spikeslab.top_mask(pp.read(model), sparsity=0.5))}


def uneven(folder: Path) -> Outcome:
    """Micro-batches of 7, 7 and 6, a last batch of 3 that is too small to split, clipping, Adam."""
    config = pp.Config(epochs=2, batch_size=20, accumulate=3, clip=0.5, optimizer="adam", lr=1e-3)
    return fitted(attached(coupling=1.0), config, pair(203), budget=Budget(0.5, control="projection"))


def clamped(folder: Path) -> Outcome:
    model = attached(mapping="clamp", estimator="straight-through")
    return fitted(model, pp.Config(epochs=2, batch_size=20), budget=Budget(0.5, control="projection"))


def lagrangian(folder: Path) -> Outcome:
    return fitted(attached(), pp.Config(epochs=2, batch_size=20), budget=Budget(0.5, control="lagrangian"))


def gradual(folder: Path) -> Outcome:
    budget = Budget(0.7, control="magnitude", schedule="cubic", every=4, min_per_layer=2)
    model = masked(0.0)
    return fitted(model, pp.Config(epochs=2, batch_size=20), budget=budget)


def feedback(folder: Path) -> Outcome:
    return fitted(masked(0.0), pp.Config(epochs=2, batch_size=20), budget=Budget(0.7, control="feedback", every=4))


def patience(folder: Path) -> Outcome:
    return fitted(attached(), pp.Config(epochs=3, batch_size=20, patience=1, lr=0.1), validation=pair(60, seed=2))


def osp(folder: Path) -> Outcome:
    config = pp.Config(epochs=1, batch_size=20)
    model = net()
    model(pair()[0])  # after which fully_shard would leave the outermost weights whole
    return outcome_of(pp.osp(model, pair(), config, sparsity=0.8, criterion="random", scope="erk"))


def pft(folder: Path) -> Outcome:
    config = pp.Config(epochs=5, batch_size=20)
    dense = pp.Config(epochs=1, batch_size=20)
    return outcome_of(
        pp.pft(
            net(), pair(), config, sparsity=0.8, criterion="snip", recipe="coupled", dense=dense, folder=folder / "pft"
        )
    )


def paper(folder: Path) -> Outcome:
    config = pp.Config(epochs=2, batch_size=20)
    return outcome_of(pp.pft(net(), pair(), config, sparsity=0.8, recipe="paper", min_per_layer=1))


def thresholded(folder: Path) -> Outcome:
    config = pp.Config(epochs=2, batch_size=20)  # every step asks all ranks for the threshold, again and again
    return outcome_of(pp.pft(net(), pair(), config, sparsity=0.8, recipe="thresholded", noise=0.3, min_per_layer=1))


def thirds(folder: Path) -> Outcome:
    """For three ranks, of which one has no rows of a tensor of 3, and two none of a tensor of 1."""
    config = pp.Config(epochs=4, batch_size=30)
    return outcome_of(pp.pft(net(), pair(), config, sparsity=0.8, min_per_layer=1))


def transformer(folder: Path) -> Outcome:
    model = tied_net()
    outcome = outcome_of(pp.pft(model, tokens(), pp.Config(epochs=2, batch_size=20), sparsity=0.8))
    return outcome | {"tied": model.head.weight is model.embed.weight}


def record_weights(model: nn.Module, name: str) -> list[Tensor]:
    """A list that fills with the whole weights of a layer, one entry per call."""
    weights: list[Tensor] = []
    model.get_submodule(name).register_forward_pre_hook(lambda m, _: weights.append(m.weight.detach().clone()))
    return weights


def draws(folder: Path) -> Outcome:
    """The weights that layers are called with, in training and after it, with slabs of std 0.1."""
    model = net()
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.1), seed=3)
    first, last = record_weights(model, "0"), record_weights(model, "3")
    pp.fit(model, pair(20), pp.Config(epochs=1, batch_size=20), budget=Budget(0.6))
    pp.resample_(model)
    outputs = [model(pair(20)[0]).detach() for _ in range(2)]
    error = pp.gibbs_error(model, pair(), draws=2)
    mode = model.training
    return {"first": first, "last": last, "outputs": outputs, "error": error, "training": mode}


def bfloat16(folder: Path) -> Outcome:
    """Weights gathered in bfloat16; means, gates and their gradients stay float32."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = cut(nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 3)), mp_policy=policy)
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    weights = record_weights(model, "2")
    outcome = fitted(model, pp.Config(epochs=1, batch_size=20), budget=Budget(0.5))
    return outcome | {"used": [weight.dtype for weight in weights]}


def own_loop(folder: Path) -> Outcome:
    """A user's loop with an optimiser of torch on model.parameters()."""
    model, (x, y) = attached(), pair(20)
    low, high = ranks.part(len(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        pp.resample_(model.train())
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[low:high]), y[low:high]).backward()
        optimizer.step()
    return {"history": [], "state": state(model)}


def pruner(folder: Path, parts: int = 1, **options: Any) -> Outcome:
    """A user's loop with clipping and a Pruner, which goes on from its state in the middle."""
    model, (x, y) = net(), pair(240)
    carried = pp.Pruner(model, sparsity=0.8, steps=24, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, index in enumerate(torch.arange(240).view(12, 20).repeat(2, 1)):
        for part in index.chunk(parts):
            low, high = ranks.part(len(part))
            (nn.functional.cross_entropy(model(x[part[low:high]]), y[part[low:high]]) / parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        carried.step()
        if number == 9:
            content = carried.state_dict()
            del carried
            carried = pp.Pruner(model, sparsity=0.8, steps=24, **options)
            carried.load_state_dict(content)
    return outcome_of(carried.finish())


def pruner_gradual(folder: Path) -> Outcome:
    return pruner(folder, method="gmp")


def pruner_parts(folder: Path) -> Outcome:
    return pruner(folder, parts=2)


def zeros_kept(folder: Path) -> Outcome:
    """A user's loop on a masked model."""
    model, (x, y) = masked(), pair(20)
    low, high = ranks.part(len(x))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    pp.keep_zeros(model, optimizer)
    for _ in range(3):
        nn.functional.cross_entropy(model(x[low:high]), y[low:high]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"history": [], "state": state(model), "sparsity": pp.sparsity(model)}


def memory(folder: Path) -> Outcome:
    """The local size of every parameter, and the bytes of the largest tensor that is still alive."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))
    model = cut(plain, plain[0], plain[2])
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    x, y = torch.randn(40, 256), torch.randint(0, 3, (40,))
    pp.fit(model, (x, y), pp.Config(epochs=1, batch_size=20), budget=Budget(0.5))
    gc.collect()
    sizes = [o.untyped_storage().nbytes() for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
    local_sizes = {
        n: p.to_local().numel() if hasattr(p, "to_local") else p.numel() for n, p in model.named_parameters()
    }
    return {"sizes": local_sizes, "largest": max(sizes)}


def export(folder: Path) -> Outcome:
    """The state dict that torch gathers at the end; a plain model takes it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    result = pp.pft(tied_net(), tokens(), pp.Config(epochs=2, batch_size=20), sparsity=0.9)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {"state": get_model_state_dict(result.model, options=options), "mask": full(result.mask)}


def note_refusal(messages: dict[str, str], name: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except ValueError as error:
        messages[name] = str(error)


def refusals(folder: Path) -> Outcome:
    from torch.distributed.fsdp import fully_shard

    messages: dict[str, str] = {}
    config, split = pp.Config(epochs=1, batch_size=20), pp.data.split(*pair(), prior_fraction=0.5, seed=0)

    def inside() -> None:
        model = nn.Sequential(nn.Linear(8, 3))
        fully_shard(model[0])
        pp.fit(model, pair(), config)

    def late() -> None:
        model = nn.Sequential(nn.Linear(8, 3))
        pp.attach(model, pp.isotropic(model, sparsity=0.5))
        pp.fit(fully_shard(model), pair(), config)

    def columns() -> None:
        from torch.distributed.tensor import Shard

        pp.fit(fully_shard(nn.Linear(8, 4), shard_placement_fn=lambda p: Shard(p.ndim - 1)), pair(), config)

    def nan() -> None:
        """NaNs in the rows of one rank; all ranks refuse."""
        model = net()
        if ranks.rank():
            model[0].weight.to_local().data.fill_(torch.nan)
        pp.pft(model, pair(), config, sparsity=0.5)

    def changed() -> None:
        model = net()
        pruner = pp.Pruner(model, sparsity=0.5, steps=2)
        with torch.no_grad():
            model[0].weight.mul_(2)
        pruner.state_dict()

    whole = nn.Sequential(nn.Linear(8, 33))
    mask = pp.top_k(pp.scores.magnitude(whole), sparsity=0.5)
    note_refusal(messages, "mask", lambda: pp.apply_mask(net(), mask))
    note_refusal(
        messages,
        "slab",
        lambda: pp.attach(whole, pp.isotropic(fully_shard(nn.Sequential(nn.Linear(8, 33))), sparsity=0.5)),
    )
    note_refusal(messages, "inside", inside)
    note_refusal(messages, "late", late)
    note_refusal(messages, "columns", columns)
    note_refusal(messages, "nan", nan)
    note_refusal(messages, "changed", changed)
    note_refusal(messages, "population", lambda: pp.fit([net(), net()], pair(), config))
    note_refusal(messages, "pbp", lambda: pp.pbp(net(), split, config, sparsity=0.5))
    note_refusal(messages, "pattern", lambda: pp.pft(net(), pair(), config, pattern="2:4"))
    note_refusal(messages, "std", lambda: attached(train_std=True))
    note_refusal(messages, "grasp", lambda: pp.pft(net(), pair(), config, sparsity=0.5, criterion="grasp"))
    note_refusal(messages, "synflow", lambda: pp.scores.synflow(net(), pair()))
    note_refusal(messages, "samples", lambda: pp.fit(attached(), pair(), pp.Config(epochs=1, batch_size=20, samples=2)))
    note_refusal(
        messages, "independent", lambda: pp.fit(attached(), pair(), pp.Config(batch_size=20, masks="independent"))
    )
    note_refusal(messages, "amp", lambda: pp.fit(net(), pair(), pp.Config(batch_size=20, amp=True)))
    note_refusal(messages, "compiled", lambda: pp.fit(net(), pair(), pp.Config(batch_size=20, execution="compiled")))
    return {"messages": messages}


def frozen(folder: Path) -> Outcome:
    """Gates of whole and of 16-bit weights; rows of 33 are left alone."""
    config = pp.Config(epochs=4, batch_size=20, gate_lr=0.2)
    options = {"recipe": "frozen", "include": "0.*", "pattern": "2:4", "distill": 0.5}
    outcome = outcome_of(pp.pft(net(), pair(), config, **options))
    whole, x, y = net(torch.bfloat16), *pair()
    before = full({name: w.detach() for name, w in whole.named_parameters()})
    half = pp.pft(whole, (x.bfloat16(), y), config, folder=folder / "half", **options)
    kept, mask = full({"": dict(half.model.named_parameters())["0.weight"].detach()})[""], full(half.mask)["0.weight"]
    exact = bool((mask.reshape(-1, 4).sum(-1) == 2).all()) and torch.equal(kept, before["0.weight"] * mask)
    return outcome | {"half": mask, "exact": exact, "loss": half.history[-1]["loss"], "before": before["0.weight"]}


def broken(folder: Path) -> Outcome:
    """pft with a checkpoint after every epoch of 10 steps; rank 1 dies in step 14 of the stage that FATAL names."""

    def progress(stage: str, done: int, *_: Any) -> None:
        if os.environ.get("FATAL") == stage and done == 14 and ranks.rank() == 1:
            os._exit(7)

    config = pp.Config(epochs=4, batch_size=20)
    return outcome_of(
        pp.pft(net(), pair(), config, sparsity=0.8, recipe="coupled", folder=folder / "broken", progress=progress)
    )


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    with ranks.joined():
        for case in cases:
            case_folder = folder / case
            if ranks.rank() == 0:
                case_folder.mkdir(parents=True, exist_ok=True)
            ranks.barrier()
            torch.save(globals()[case](case_folder), folder / f"{case}-{ranks.rank()}.result")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
