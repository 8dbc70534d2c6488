"""The cases that test_ranks runs in one process and, as a script, under two ranks: `ranks_cases.py FOLDER CASE...`."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import pacprune as pp
from pacprune.distributed import ranks
from pacprune.masking import attachment, spikeslab, weights
from pacprune.training.budget import Budget

Outcome = dict[str, Any]


def net(*, norm: bool = False, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        middle = [nn.BatchNorm1d(32)] if norm else []
        return nn.Sequential(nn.Linear(8, 32), *middle, nn.ReLU(), nn.Linear(32, 3))


def pair(n: int = 200, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long() + (x[:, 1] + x[:, 2] > 0.5).long()


def attached(**options: Any) -> nn.Module:
    model = net()
    return pp.attach(model, pp.isotropic(model, sparsity=0.5), **options)


def masked(sparsity: float = 0.8) -> nn.Module:
    model = net()
    return pp.apply_mask(model, pp.top_k(pp.scores.magnitude(model), sparsity=sparsity))


FIFTY = {"epochs": 5, "batch_size": 20}
"""50 steps at the default learning rate."""


def fitted(model: nn.Module, config: pp.Config, data: Any = None, **options: Any) -> Outcome:
    history = pp.fit(model, pair() if data is None else data, config, **options)
    return {"history": history, "state": dict(model.state_dict())}


def dense(folder: Path) -> Outcome:
    return fitted(net(), pp.Config(**FIFTY), validation=pair(60, seed=2))


def gates(folder: Path) -> Outcome:
    model = attached()
    outcome = fitted(model, pp.Config(**FIFTY), budget=Budget(0.5))
    return outcome | {"mask": spikeslab.top_mask(pp.read(model), sparsity=0.5)}


def sparse(folder: Path) -> Outcome:
    model = masked()
    return fitted(model, pp.Config(**FIFTY)) | {"mask": {n: w != 0 for n, w in weights.prunable(model).items()}}


def uneven(folder: Path) -> Outcome:
    """Micro-batches of 7, 7 and 6, a last batch of 3 that is too small to split, clipping, Adam."""
    config = pp.Config(epochs=2, batch_size=20, accumulate=3, clip=0.5, optimizer="adam", lr=1e-3)
    return fitted(attached(), config, pair(203), budget=Budget(0.5))


def joined_last(folder: Path) -> Outcome:
    return fitted(net(), pp.Config(epochs=2, batch_size=20), pair(201))


def lagrangian(folder: Path) -> Outcome:
    return fitted(attached(), pp.Config(epochs=2, batch_size=20), budget=Budget(0.5, control="lagrangian"))


def algorithm1(folder: Path) -> Outcome:
    return fitted(attached(), pp.Config(epochs=1, batch_size=20, samples=3))


def feedback(folder: Path) -> Outcome:
    return fitted(masked(0.0), pp.Config(epochs=2, batch_size=20), budget=Budget(0.7, control="feedback", every=4))


def loader(folder: Path) -> Outcome:
    return fitted(net(), pp.Config(epochs=2), DataLoader(TensorDataset(*pair()), 20, shuffle=True))


def population(folder: Path) -> Outcome:
    models = [net(seed=k) for k in range(2)]
    history = pp.fit(models, pair(), pp.Config(epochs=2, batch_size=20), seed=[0, 1])
    return {
        "history": history,
        "state": {f"{k}.{n}": t for k, m in enumerate(models) for n, t in m.state_dict().items()},
    }


def images(folder: Path) -> Outcome:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x = torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    return fitted(model, pp.Config(epochs=2, batch_size=20, augment=True), (x, pair(60)[1]))


def unused(folder: Path) -> Outcome:
    """A parameter without a gradient: weight decay must not change it, and the ranks must not wait for it."""
    model = net()
    model.register_parameter("idle", nn.Parameter(torch.ones(3)))
    return fitted(model, pp.Config(epochs=1, batch_size=20, weight_decay=0.1))


def wrapped(folder: Path, **options: Any) -> Outcome:
    """A user's loop on DistributedDataParallel, with micro-batches, clipping and a Pruner."""
    model, (x, y) = net(), pair(240)
    network = nn.parallel.DistributedDataParallel(model) if ranks.world() > 1 else model
    pruner = pp.Pruner(network, sparsity=0.8, steps=24, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in torch.arange(240).view(12, 20).repeat(2, 1):
        for part in index.split(10):
            low, high = ranks.part(len(part))
            last = part[-1] == index[-1]
            with nullcontext() if last or ranks.world() == 1 else network.no_sync():
                (nn.functional.cross_entropy(network(x[part[low:high]]), y[part[low:high]]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        pruner.step()
    result = pruner.finish()
    return {"history": [], "state": dict(result.model.state_dict()), "mask": dict(result.mask)}


def wrapped_gradual(folder: Path) -> Outcome:
    return wrapped(folder, method="gmp")


def norm(folder: Path) -> Outcome:
    """BatchNorm: the ranks' statistics differ from one process's, so only the ranks are compared."""
    return fitted(net(norm=True), pp.Config(epochs=3, batch_size=20, patience=2), validation=pair(60, seed=2))


def pft(folder: Path) -> Outcome:
    model, config = net(norm=False), pp.Config(epochs=4, batch_size=20)
    result = pp.pft(model, pair(), config, sparsity=0.8, criterion="snip", folder=folder / "pft")
    return {"history": result.history, "state": dict(model.state_dict()), "mask": dict(result.mask)}


def pbp(folder: Path) -> Outcome:
    """Every rank returns its numbers; only rank 0 writes files."""
    split = pp.data.split(*pair(300), prior_fraction=0.5, seed=0, unlabelled=20)
    config = pp.Config(epochs=3, batch_size=20)
    result = pp.pbp(net(norm=True), split, config, sparsity=0.5, draws=1500, folder=folder / "pbp")
    return {"history": result.history, "posterior": result.posterior.hash, "record": result.certificate.record}


def certificate(folder: Path) -> Outcome:
    """A posterior that is the prior, so that one process and two have the same to the bit."""
    split = pp.data.split(*pair(300), prior_fraction=0.5, seed=0, unlabelled=21)
    model, words = net(), "its weights were drawn at random"
    prior = pp.block_isotropic(model, pp.top_k(pp.scores.magnitude(model), sparsity=0.5), eps=1e-2, std=2e-2)
    pp.attach(model, prior)
    prior = pp.read(model)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0), out=folder / "certificate")
    counts: list[int] = []
    cert = pp.certify(
        model,
        prior,
        split,
        draws=2600,
        tolerance=0.02,
        declare=words,
        progress=lambda stage, done, *_: counts.append(done),
    )
    return {"record": cert.record, "tensors": cert.tensors, "last": counts[-1]}


def posterior(folder: Path) -> Outcome:
    split = pp.data.split(*pair(300), prior_fraction=0.5, seed=0)
    model = net()
    mask = pp.top_k(pp.scores.magnitude(model), sparsity=0.5)
    pp.attach(model, pp.block_isotropic(model, mask, eps=1e-2, std=2e-2))
    config = pp.Config(epochs=3, batch_size=20, accumulate=2)
    history = pp.fit_posterior(model, pp.read(model), split, config, budget=Budget(0.5))
    return {"history": history, "state": dict(model.state_dict())}


def thirds(folder: Path) -> Outcome:
    """For three ranks: frozen values must not change by a bit, though no third is a binary fraction."""
    split = pp.data.split(*pair(300), prior_fraction=0.5, seed=0)
    result = pp.pbp(net(norm=True), split, pp.Config(epochs=2, batch_size=30), sparsity=0.5, draws=1100)
    return {"record": result.certificate.record} | fitted(net(), pp.Config(epochs=2, batch_size=30))


def draws(folder: Path) -> Outcome:
    """One step with shared and with independent masks: the weights that the networks were called with."""
    outcome: Outcome = {}
    for kind in ("shared", "independent"):
        model, layer_weights = attached(), []
        model.get_submodule("2").register_forward_hook(
            lambda m, *_, layer_weights=layer_weights: layer_weights.append(m.weight.detach().clone())
        )
        pp.fit(model, pair(20), pp.Config(epochs=1, batch_size=20, momentum=0.0, masks=kind))
        steps = [int(site.sampler.step) for site in attachment.sites(model)]
        outcome[kind] = {"used": layer_weights[-1], "state": dict(model.state_dict()), "steps": steps}
    return outcome


def other_prior(extra_std: float) -> None:
    split, model = pp.data.split(*pair(300), prior_fraction=0.5, seed=0), net()
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.1))
    prior = pp.isotropic(net(), sparsity=0.5, std=0.1 + extra_std)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=1, batch_size=20))


def refusals(folder: Path) -> Outcome:
    """Calls that all ranks refuse in the same words; a single process refuses none of them."""
    rank, messages = ranks.rank(), {}

    def note_refusal(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
        except ValueError as error:
            messages[name] = str(error)

    config = pp.Config(epochs=1, batch_size=20)
    note_refusal(
        "batch", lambda: pp.fit(net(), pair(), pp.Config(epochs=1, batch_size=25), checkpoint=folder / "no.pt")
    )
    note_refusal("data", lambda: pp.fit(net(), pair(seed=1 + rank), config, checkpoint=folder / "no.pt"))
    note_refusal("masks", lambda: pp.fit(masked(0.8 - 0.1 * rank), pair(), config, checkpoint=folder / "no.pt"))
    note_refusal("weights", lambda: pp.fit(net(seed=rank), pair(), config, checkpoint=folder / "no.pt"))
    note_refusal("prior", lambda: other_prior(0.1 * rank))
    note_refusal("settings", lambda: pp.fit(net(), pair(), config, seed=rank, checkpoint=folder / "no.pt"))
    note_refusal("checkpoint", lambda: pp.fit(net(), pair(), config, checkpoint=folder / f"{rank}.pt"))
    note_refusal("checkpoint again", lambda: pp.fit(net(), pair(), config, checkpoint=folder / f"{rank}.pt"))
    note_refusal("pruner", lambda: pp.Pruner(net(seed=rank), sparsity=0.5, steps=1))
    if ranks.world() > 1:
        x, y = pair()
        sampled = DataLoader(TensorDataset(x, y), 20, sampler=DistributedSampler(TensorDataset(x, y)))
        note_refusal("sampler", lambda: pp.fit(net(), sampled, config))
    return {"messages": messages, "written": sorted(path.name for path in folder.iterdir())}


def broken(folder: Path) -> Outcome:
    """Stochastic masks and BatchNorm with checkpoints every 3 steps; with FATAL set, rank 1 dies in step 17."""

    def progress(stage: str, done: int, *_: Any) -> None:
        if os.environ.get("FATAL") and done == 17 and ranks.rank() == 1:
            os._exit(7)

    model = net(norm=True)
    pp.attach(model, pp.isotropic(model, sparsity=0.5))
    config = pp.Config(epochs=3, batch_size=20)
    fit_options = {"checkpoint": folder / "broken.pt", "every": 3, "progress": progress}
    return fitted(model, config, budget=Budget(0.5), **fit_options)


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    with ranks.joined():
        for case in cases:
            case_folder = folder / case
            if ranks.rank() == 0:
                case_folder.mkdir(parents=True, exist_ok=True)
            ranks.barrier()
            outcome = globals()[case](case_folder)
            torch.save(outcome, folder / f"{case}-{ranks.rank()}.result")
            ranks.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
