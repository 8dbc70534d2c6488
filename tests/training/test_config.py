"""The Config: its refusals, its learning rates, and the tables of its options."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pacprune as pp
from pacprune.training.config import EXECUTIONS, GATE_STEPS, MASKS, SCHEDULES
from pacprune.training.optim import OPTIMIZERS, Group, State

X = torch.randn(70, 4, generator=torch.Generator().manual_seed(1))
Y = (X[:, 0] > 0).long()
TABLES: dict[str, dict[str, Any]] = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "execution": EXECUTIONS,
    "masks": MASKS,
}


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def test_gate_lr_is_a_hundred_times_lr_by_default() -> None:
    assert pp.Config(lr=0.02).gate_lr == pytest.approx(2.0)
    assert pp.Config(lr=0.02, gate_lr=0.5).gate_lr == 0.5
    assert pp.Config(lr=0.02, gate_lr=None).gate_lr is None
    for steps, rate in ((1, 2.0), (GATE_STEPS, 2.0), (4 * GATE_STEPS, 0.5)):
        assert pp.Config(lr=0.02).paced(steps).gate_lr == pytest.approx(rate)
    for gate_lr in (2.0, None):  # an explicit gate_lr is never paced
        assert pp.Config(lr=0.02, gate_lr=gate_lr).paced(10 * GATE_STEPS).gate_lr == gate_lr


def test_a_gate_lr_that_follows_lr_is_another_setting_than_a_number_that_equals_it() -> None:
    follows, given = pp.Config(lr=0.1), pp.Config(lr=0.1, gate_lr=10.0)
    assert follows.gate_lr == given.gate_lr
    assert follows != given
    assert follows.identity() != given.identity()
    assert (repr(follows), repr(given)) == ("Config(epochs=10, lr=0.1)", "Config(epochs=10, lr=0.1, gate_lr=10.0)")
    assert follows == pp.Config(lr=0.1, gate_lr="auto")
    assert hash(follows) == hash(pp.Config(lr=0.1, gate_lr="auto"))
    assert dataclasses.replace(follows, lr=0.2) == pp.Config(lr=0.2)
    assert dataclasses.replace(given, lr=0.2) == pp.Config(lr=0.2, gate_lr=10.0)


def test_checkpoints_are_named_as_they_were() -> None:
    plain = {
        "epochs": 10, "lr": 0.01, "gate_lr": 1.0, "std_lr": None, "momentum": 0.9, "weight_decay": 0.0,
        "batch_size": 128, "optimizer": "sgd", "schedule": "constant", "warmup": 0.0, "span": (0.0, 1.0),
        "accumulate": 1, "amp": False, "augment": False, "clip": None, "samples": 0, "patience": 0,
        "execution": "eager", "masks": "shared",
    }  # fmt: skip
    assert pp.Config().identity() == plain
    assert pp.Config(gate_lr=2.5, execution="graph").identity() == plain | {"gate_lr": 2.5}
    assert pp.Config(gate_lr=None).identity() == plain | {"gate_lr": None}


def test_repr_shows_what_is_not_default_and_always_epochs_and_lr() -> None:
    assert repr(pp.Config()) == "Config(epochs=10, lr=0.01)"
    shown = pp.Config(epochs=5, lr=0.1, gate_lr=None, span=(0, 0.5), schedule="cosine")
    assert repr(shown) == "Config(epochs=5, lr=0.1, gate_lr=None, schedule='cosine', span=(0, 0.5))"
    assert eval(repr(shown), {"Config": pp.Config}) == shown


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epochs": -1}, "epochs is -1"),
        ({"epochs": 1.5}, r"epochs is 1\.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"lr": -0.1}, r"lr is -0\.1"),
        ({"lr": math.nan}, "lr is nan"),
        ({"gate_lr": "fast"}, "gate_lr is 'fast'"),
        ({"clip": math.inf}, "clip is inf"),
        ({"epochs": "3"}, "epochs is '3'"),
        ({"lr": "0.1"}, r"lr is '0\.1'"),
        ({"lr": None}, "lr is None"),
        ({"warmup": 5}, "warmup is 5"),
        ({"span": (0.5, 0.2)}, r"span is \(0\.5, 0\.2\)"),
        ({"span": 0.5}, r"span is 0\.5"),
        ({"optimizer": "lion"}, "optimizer 'lion' is unknown; use one of sgd, adam, adamw"),
        ({"schedule": "linear"}, "schedule 'linear' is unknown; use one of constant, cosine, step"),
        ({"execution": "fast"}, "execution 'fast' is unknown; use one of eager, graph, compiled"),
        ({"masks": "own"}, "masks 'own' is unknown; use one of shared, independent"),
        ({"schedule": lambda share: 0.5 - share}, r"the schedule gives -0\.0625 at the share 0\.5625"),
        ({"schedule": lambda share: None}, r"the schedule gives None at the share 0\.0"),
    ],
)
def test_bad_settings_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pp.Config(**wrong)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, (1, 1, 1, 1)),
        ({"schedule": "cosine"}, (1, 0.5, (1 - math.sqrt(0.5)) / 2, 0)),
        ({"schedule": "step"}, (1, 0.1, 0.01, 0.01)),
        (
            {"schedule": "cosine", "span": (0.5, 1.0)},
            (0.5, (1 - math.sqrt(0.5)) / 2, (1 + math.cos(math.pi * 0.875)) / 2, 0),
        ),
        ({"schedule": "step", "span": (0.0, 0.5)}, (1, 1, 1, 0.1)),
        ({"warmup": 0.75}, (0, 2 / 3, 1, 1)),
        ({"schedule": lambda share: 1 - share}, (1, 0.5, 0.25, 0)),
        ({"schedule": lambda share: 1 - share, "span": (0.5, 1.0)}, (0.5, 0.25, 0.125, 0)),
    ],
)
def test_schedules_have_the_documented_factors(options: dict, values: tuple[float, ...]) -> None:
    config = pp.Config(**options)
    assert [config.factor(t) for t in (0, 0.5, 0.75, 1)] == pytest.approx(values, abs=1e-6)


def test_two_stages_can_share_one_cosine() -> None:
    whole = pp.Config(epochs=4, lr=0.1, schedule="cosine", batch_size=70)
    halves = [dataclasses.replace(whole, epochs=2, span=span) for span in ((0.0, 0.5), (0.5, 1.0))]
    rates = [row["lr"] for row in pp.fit(net(), (X, Y), whole)]
    model = net()
    assert [row["lr"] for half in halves for row in pp.fit(model, (X, Y), half)] == pytest.approx(rates)


# --- The tables.


@pytest.mark.parametrize(("field", "name"), [(field, name) for field, table in TABLES.items() for name in table])
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler itself
def test_every_row_of_a_table_trains(field: str, name: str) -> None:
    rows = pp.fit(net(), (X, Y), pp.Config(epochs=8, lr=0.02, batch_size=16, **{field: name}))
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("field", TABLES)
def test_an_unknown_name_is_refused_with_the_names_of_the_table(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} 'none' is unknown; use one of {', '.join(TABLES[field])}"):
        pp.Config(**{field: "none"})
    with pytest.raises(ValueError, match=r"\['sgd'\] is unknown"):
        pp.Config(**{field: ["sgd"]})


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_begins_with_the_whole_rate_and_never_rises(name: str) -> None:
    factors = [SCHEDULES[name](k / 100) for k in range(101)]
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] >= 0.0


def test_a_new_schedule_needs_only_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "linear", lambda share: 1 - share)
    rows = pp.fit(net(), (X, Y), pp.Config(epochs=4, lr=1.0, batch_size=70, schedule="linear"))
    assert [row["lr"] for row in rows] == [1.0, 0.75, 0.5, 0.25]


class Signs:
    """p <- p - rate * sign(grad)."""

    def new_state(self, p: Tensor, group: Group) -> State:
        return {}

    def step_together(self, group: Group, params: list[Tensor], grads: list[Tensor], states: list[State]) -> None:
        for p, grad in zip(params, grads, strict=True):
            p.sub_(group.rate * grad.sign())

    def step_members(self, group: Group, p: Tensor, grad: Tensor, state: State) -> None:
        p.sub_(group.columns(p)[0] * grad.sign())

    def reach(self, rate: Tensor, momentum: Tensor, state: State) -> Tensor:
        return rate


def test_a_new_optimiser_needs_only_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "signs", Signs())
    config = pp.Config(epochs=1, lr=0.125, batch_size=70, optimizer="signs")
    model, members, start = net(), [net(), net()], net()
    pp.fit(model, (X, Y), config)
    pp.fit(members, (X, Y), [config, dataclasses.replace(config, lr=0.25)])
    for before, *after in zip(start.parameters(), *(m.parameters() for m in (model, *members)), strict=True):
        for p, rate in zip(after, (0.125, 0.125, 0.25), strict=True):
            assert set((p - before).abs().detach().unique().round(decimals=5).tolist()) <= {0.0, rate}
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), start.parameters(), strict=True))


def test_runs_with_different_schedule_functions_are_different(tmp_path: Path) -> None:
    def run(power: int) -> None:
        config = pp.Config(epochs=1, schedule=lambda share: (1 - share) ** power)
        json.dumps(config.identity())
        pp.fit(net(), (X, Y), config, checkpoint=tmp_path / "run")

    run(1)
    run(1)  # resumes it
    with pytest.raises(ValueError, match="belongs to another run"):
        run(2)
