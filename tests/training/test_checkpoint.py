"""A run that is killed at any step and resumed ends like an uninterrupted one, bit for bit; other runs are refused."""

import dataclasses
import io
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pacprune as pp
from pacprune.files import digest, write_atomically
from pacprune.masking import attachment, criteria, weights
from pacprune.training import budget
from pacprune.types import History

G = torch.Generator().manual_seed(1)
X = torch.randn(70, 4, generator=G)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
SPLIT = pp.data.split(X, Y, prior_fraction=0.5, seed=0)
CONFIG = pp.Config(epochs=3, lr=0.1, gate_lr=2.0, weight_decay=1e-3, batch_size=16, schedule="cosine")
STEPS = 15


class Killed(Exception):
    """Stands for a power cut: raised from the progress callback."""


class Noisy(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return X[i] + 0.1 * torch.randn(4), Y[i]


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def dense(**options: Any) -> History:
    return pp.fit(options.pop("model"), options.pop("data", (X, Y)), options.pop("config", CONFIG), **options)


def masked(**options: Any) -> History:
    pp.apply_mask(options["model"], pp.top_k(pp.scores.magnitude(options["model"]), sparsity=0.5))
    return dense(config=dataclasses.replace(CONFIG, optimizer="adamw", accumulate=2, clip=1.0), **options)


def attached(control: str, mapping: str = "sigmoid", **options: Any) -> History:
    model = options["model"]
    slab = pp.isotropic(model, sparsity=0.5, std=0.05)
    law = {"mapping": mapping, "coupling": 4.0 if mapping == "sigmoid" else 0.0}
    pp.attach(model, slab, **law, train_std=True, seed=7)
    target = pp.Budget(0.7, control, "cubic", sharpen=1.0 if mapping == "clamp" else 3.0)
    return dense(budget=target, **options)


def algorithm1(**options: Any) -> History:
    pp.attach(options["model"], pp.isotropic(options["model"], sparsity=0.5))
    return dense(config=dataclasses.replace(CONFIG, samples=3, accumulate=2), **options)


def posterior(**options: Any) -> History:
    model, path = options.pop("model"), options["checkpoint"]
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.05), train_std=True)
    # 35 bound examples: three steps an epoch
    config, out = dataclasses.replace(CONFIG, epochs=5), None if path is None else path.parent
    return pp.fit_posterior(model, pp.read(model), SPLIT, config, budget=pp.Budget(0.5), out=out, **options)


def shuffled(generator: torch.Generator | None, data: Dataset, **options: Any) -> History:
    return dense(data=DataLoader(data, 16, shuffle=True, generator=generator), **options)


def early_stop(**options: Any) -> History:
    validation = DataLoader(TensorDataset(X, Y), 16, shuffle=True)
    options["config"] = dataclasses.replace(CONFIG, lr=3.0, schedule="constant", patience=1)
    return dense(validation=validation, **options)


SCENARIOS: dict[str, Callable[..., History]] = {
    "dropout and BatchNorm": dense,
    "masked, adamw, accumulation": masked,
    **{
        f"attached, {control}": lambda control=control, **options: attached(control, **options)
        for control in budget.GATE_CONTROLS
    },
    "attached, clamp": lambda **options: attached("projection", "clamp", **options),
    "algorithm 1": algorithm1,
    "posterior": posterior,
    "random augmentation": lambda **options: dense(data=Noisy(), **options),
    "loader": lambda **options: shuffled(None, Noisy(), **options),
    "loader with a generator": lambda **options: shuffled(
        torch.Generator().manual_seed(9), TensorDataset(X, Y), **options
    ),
    "early stop": early_stop,
}


def equal(a: Any, b: Any) -> bool:
    """Equal to the bit, in any nesting."""
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def kill_at(step: int) -> Callable[..., None]:
    def progress(stage: str, done: int, total: int, row: dict[str, Any]) -> None:
        if done == step:
            raise Killed

    return progress


def content(path: Path) -> dict[str, Any]:
    """Everything that the checkpoint holds: model, draw counters, history, optimiser, random states."""
    return torch.load(io.BytesIO(path.read_bytes()[32:]), weights_only=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_any_step_and_resumed_ends_bit_identical(name: str, tmp_path: Path) -> None:
    run, whole = SCENARIOS[name], net()
    history = run(model=whole, checkpoint=tmp_path / "whole" / "run.pt", every=3)
    without = net()
    assert run(model=without, checkpoint=None) == history
    assert equal(whole.state_dict(), without.state_dict())
    for step in (1, 4, 8, 10, STEPS):  # first, mid-epoch, the end of an epoch, last
        path = tmp_path / str(step) / "run.pt"
        torch.randn(step)  # the resuming process has another global random state
        if name == "early stop" and step > 5 * len(history):
            continue
        with pytest.raises(Killed):
            run(model=net(), checkpoint=path, every=3, progress=kill_at(step))
        assert path.exists() == (step > 3)
        model = net()
        assert run(model=model, checkpoint=path, every=3) == history, step
        assert equal(model.state_dict(), whole.state_dict()), step
        counters = [[int(site.sampler.step) for site in attachment.sites(m)] for m in (model, whole)]
        assert counters[0] == counters[1]
        assert equal(content(path), content(tmp_path / "whole" / "run.pt")), step
        assert list(path.parent.glob("*.part")) == []
    assert len(history) == (2 if name == "early stop" else 5 if name == "posterior" else 3)


def test_a_run_killed_several_times_ends_bit_identical(tmp_path: Path) -> None:
    whole, path = net(), tmp_path / "run.pt"
    attached("shift", model=whole)
    for step in (4, 5, 9, 12, 14, 15):
        with pytest.raises(Killed):
            attached("shift", model=net(), checkpoint=path, every=2, progress=kill_at(step))
    model = net()
    attached("shift", model=model, checkpoint=path, every=2)
    assert equal(model.state_dict(), whole.state_dict())


def test_a_finished_stage_returns_at_once(tmp_path: Path) -> None:
    path, steps = tmp_path / "run.pt", []
    first, second = net(), net()
    history = dense(model=first, checkpoint=path)
    stamp = path.stat().st_mtime_ns
    again = dense(model=second, checkpoint=path, progress=lambda *call: steps.append(call))
    assert (again, steps, path.stat().st_mtime_ns) == (history, [], stamp)
    assert equal(first.state_dict(), second.state_dict())
    assert not second.training


SCRIPT = """
    import os, signal, sys, torch, pacprune as pp
    from torch import nn

    def progress(stage, done, total, row):
        if done == 8 and sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    x, y = torch.randn(70, 4), torch.randint(0, 3, (70,))
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.05))
    config = pp.Config(epochs=3, lr=0.1, batch_size=16)
    pp.fit(model, (x, y), config, budget=pp.Budget(0.7), checkpoint=sys.argv[1], every=3, progress=progress)
    print(pp.read(model).hash)
"""


def test_a_killed_process_is_resumed_by_another(tmp_path: Path) -> None:
    def python(folder: str, mode: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / folder / "run.pt"), mode]
        return subprocess.run(command, capture_output=True, text=True, timeout=600)

    killed = python("a", "kill")
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "a" / "run.pt").exists()
    resumed, whole = python("a", "resume"), python("b", "whole")
    assert resumed.returncode == whole.returncode == 0, resumed.stderr + whole.stderr
    assert resumed.stdout == whole.stdout


def test_a_run_may_resume_with_another_execution(tmp_path: Path) -> None:
    path, whole, model = tmp_path / "run.pt", net(), net()
    history = dense(model=whole)
    with pytest.raises(Killed):
        dense(model=net(), checkpoint=path, every=3, progress=kill_at(8))
    graph = dataclasses.replace(CONFIG, execution="graph")  # falls back to eager on a CPU
    assert dense(model=model, checkpoint=path, every=3, config=graph) == history
    assert equal(model.state_dict(), whole.state_dict())


OTHERS: dict[str, dict[str, Any]] = {
    "config": {"config": dataclasses.replace(CONFIG, lr=0.2)},
    "epochs": {"config": dataclasses.replace(CONFIG, epochs=4)},
    "data": {"data": (X + 1, Y)},
    "labels": {"data": (X, 2 - Y)},
    "seed": {"seed": 1},
    "stage": {"stage": "tune"},
    "loss": {"loss": lambda out, y: nn.functional.cross_entropy(out, y, label_smoothing=0.1)},
    "validation": {"validation": (X, Y)},
}


@pytest.mark.parametrize("case", [*OTHERS, "weights", "mask", "attached", "estimator", "draws"])
def test_a_checkpoint_of_another_run_is_refused(case: str, tmp_path: Path) -> None:
    path, model = tmp_path / "run.pt", net()
    changes = OTHERS.get(case, {})
    if case in ("estimator", "draws"):
        first = net()
        pp.attach(first, pp.isotropic(first, sparsity=0.5))
        dense(model=first, checkpoint=path)
        estimator = "straight-through" if case == "estimator" else "concrete"
        pp.attach(model, pp.isotropic(model, sparsity=0.5), estimator=estimator, seed=int(case == "draws"))
    else:
        dense(model=net(), checkpoint=path)
    if case == "weights":
        torch.nn.init.zeros_(model[0].weight)
    elif case == "mask":
        pp.apply_mask(model, {"0.weight": torch.ones(8, 4, dtype=torch.bool)})
    elif case == "attached":
        pp.attach(model, pp.isotropic(model, sparsity=0.5))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="belongs to another run") as error:
        dense(model=model, checkpoint=path, **changes)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == before


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    dense(model=net(), checkpoint=path)
    good = path.read_bytes()
    flipped = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good), len(good) // 20)]
    for bad in (b"", b"not a checkpoint", good[: len(good) // 2], good[:-1], good + b"\0", *flipped):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="is damaged") as error:
            dense(model=net(), checkpoint=path)
        assert "\n" not in str(error.value)
        assert path.read_bytes() == bad
    torch.save({"weight": torch.ones(2)}, path)  # no checkpoint of pacprune
    with pytest.raises(ValueError, match="is damaged"):
        dense(model=net(), checkpoint=path)


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "file.bin"
    write_atomically(path, b"old")

    def full(handle: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, b"new")
    assert [(p.name, p.read_bytes()) for p in path.parent.iterdir()] == [("file.bin", b"old")]


def test_written_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "certificate.json", b"{}")
    finally:
        os.umask(before)
    assert (tmp_path / "certificate.json").stat().st_mode & 0o777 == 0o644


def test_a_digest_depends_on_names_shapes_and_types() -> None:
    a = torch.zeros(4)
    variants = [{"a": a}, {"b": a}, {"a": a.reshape(2, 2)}, {"a": a.int()}, {"a": a + 1}, {"a": a[:2], "b": a[2:]}, {}]
    assert len({digest(v) for v in variants}) == len(variants)


@pytest.mark.parametrize(
    "make", [lambda s: nn.CrossEntropyLoss(label_smoothing=s), lambda s: lambda out, y: (1 + s) * out.square().mean()]
)
def test_losses_of_one_name_but_other_values_are_different_runs(make: Callable[[float], Any], tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    history = dense(model=net(), checkpoint=path, loss=make(0.0))
    assert dense(model=net(), checkpoint=path, loss=make(0.0)) == history
    with pytest.raises(ValueError, match="belongs to another run"):
        dense(model=net(), checkpoint=path, loss=make(0.1))


@pytest.mark.parametrize("case", ["frozen", "labels of a Dataset"])
def test_frozen_parameters_and_labels_identify_a_run(case: str, tmp_path: Path) -> None:
    path, model = tmp_path / "run.pt", net()
    dense(model=net(), data=TensorDataset(X, Y), checkpoint=path)
    if case == "frozen":
        model[0].requires_grad_(False)
    with pytest.raises(ValueError, match="belongs to another run"):
        dense(model=model, data=TensorDataset(X, Y if case == "frozen" else 2 - Y), checkpoint=path)


def test_masks_from_scores_that_do_not_repeat_to_the_bit_are_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = criteria.score, []

    def score(*arguments: Any, **options: Any) -> dict[str, Tensor]:  # as on a GPU
        calls.append(1)
        return {name: s * (1 + 1e-7 * len(calls)) for name, s in real(*arguments, **options).items()}

    def run(model: nn.Module, criterion: str = "snip", **options: Any) -> pp.Pruned:
        return pp.pft(
            model,
            (X, Y),
            pp.Config(epochs=4, batch_size=CONFIG.batch_size),
            sparsity=0.5,
            criterion=criterion,
            **options,
        )

    monkeypatch.setattr(criteria, "score", score)
    whole, resumed = net(), net()
    run(whole)
    calls.clear()
    with pytest.raises(Killed):
        run(net(), folder=tmp_path, progress=kill_at(8))
    run(resumed, folder=tmp_path)
    assert len(calls) == 1
    assert equal(resumed.state_dict(), whole.state_dict())
    assert weights.seen(resumed).equal(weights.seen(whole))
    for other in ({"criterion": "random"}, {"seed": 1}):
        with pytest.raises(ValueError, match="belongs to another run"):
            run(net(), folder=tmp_path, **other)
