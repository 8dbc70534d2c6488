"""One step: clocks, densities, augmentation by counters, ways of execution, and no waiting for the device."""

import copy
import dataclasses
import math
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import pacprune as pp
from pacprune import philox
from pacprune.data.batches import crop_flip
from pacprune.masking import attachment, masks, weights
from pacprune.masking.spikeslab import ETA
from pacprune.methods import pipeline
from pacprune.training import budget, step

G = torch.Generator().manual_seed(2)
X = torch.randn(50, 5, generator=G)
Y = (X[:, 0] > 0).long()
IMAGES = torch.randn(33, 2, 6, 6, generator=G)
MARKS = torch.arange(33) % 2
CONFIG = pp.Config(epochs=4, lr=0.1, batch_size=10)  # 5 steps an epoch
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def net(k: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(k)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def attached(k: int = 0, std: float = 0.0) -> nn.Module:
    model = net(k)
    return pp.attach(model, pp.isotropic(model, sparsity=0.5, std=std), seed=k)


def thresholded(k: int = 0) -> nn.Module:
    model = net(k)
    pp.apply_mask(model, masks.all_kept(pp.prunable(model)))
    weights.notes(model).learned = {n: nn.Parameter(torch.zeros_like(w)) for n, w in pp.prunable(model).items()}
    return model


THRESHOLD = pp.Budget(0.5, control="threshold", schedule="cubic", noise=0.5)


@contextmanager
def recorded_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The clock, the rates, the batch and the words of every step, as its forward pass finds them."""
    records: list[dict[str, Any]] = []
    plain = step.Step._take

    def take(self: step.Step, batch: Any, word: Tensor | None) -> None:
        plain(self, batch, word)
        records.append(
            {
                "clock": self.clock.clone(),
                "rates": [group.rate.clone() for group in self.stage.groups],
                "x": batch[0].clone(),
                "word": word,
            }
        )

    with monkeypatch.context() as patch:
        patch.setattr(step.Step, "_take", take)
        yield records


# --- Clocks.

SCHEDULES = [
    {"schedule": "constant"},
    {"schedule": "constant", "warmup": 0.4},
    {"schedule": "cosine", "warmup": 0.1},
    {"schedule": "cosine", "span": (0.25, 0.75)},
    {"schedule": "step"},
]


def test_every_step_has_the_learning_rate_of_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = [dataclasses.replace(CONFIG, lr=0.1 / (k + 1), **options) for k, options in enumerate(SCHEDULES)]
    expected = [[config.lr * config.factor(t / 20) for config in configs] for t in range(20)]
    with recorded_steps(monkeypatch) as records:
        rows = pp.fit([net(k) for k in range(5)], (X, Y), configs)
    assert torch.stack([record["rates"][0] for record in records]) == pytest.approx(torch.tensor(expected), rel=1e-6)
    for row in rows:  # an epoch's row has the rate of its last step
        assert row["lr"] == pytest.approx(expected[5 * row["epoch"] - 1][row["member"]])
    for k, config in enumerate(configs):
        with recorded_steps(monkeypatch) as records:
            history = pp.fit(net(), (X, Y), config)
        assert [float(record["rates"][0]) for record in records] == pytest.approx([e[k] for e in expected], rel=1e-6)
        assert [row["lr"] for row in history] == [config.lr * config.factor(t / 20) for t in (4, 9, 14, 19)]


def test_gates_keep_their_rate_and_std_follows_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    pp.attach(model, pp.isotropic(model, sparsity=0.5, std=0.1), train_std=True)
    config = dataclasses.replace(CONFIG, schedule="cosine", gate_lr=3.0, std_lr=0.02)
    with recorded_steps(monkeypatch) as records:
        pp.fit(model, (X, Y), config)
    falling = [config.factor(t / 20) for t in range(20)]
    rates = torch.stack([torch.stack(record["rates"]) for record in records])
    assert rates[:, 0] == pytest.approx(0.1 * torch.tensor(falling), rel=1e-5)
    assert rates[:, 1] == pytest.approx(torch.full((20,), 3.0))
    assert rates[:, 2] == pytest.approx(0.02 * torch.tensor(falling), rel=1e-5)


def test_equal_rates_are_one_number_and_different_rates_one_per_member(monkeypatch: pytest.MonkeyPatch) -> None:
    for configs, shape in (([CONFIG] * 2, ()), ([CONFIG, dataclasses.replace(CONFIG, momentum=0.5)], (2,))):
        with recorded_steps(monkeypatch) as records:
            pp.fit([net(0), net(1)], (X, Y), configs)
        assert records[0]["rates"][0].shape == shape


@pytest.mark.parametrize("control", ["shift", "projection"])
def test_the_mean_keep_prob_follows_its_schedule_at_every_step(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [pp.Budget(0.3 + 0.3 * k, control=control, schedule="cubic", ramp=0.5, sharpen=2.0 + k) for k in range(2)]
    densities, sharp, plain = [], [], budget.hold_

    def hold(sites: list[attachment.AttachedWeight], *args: Any, **options: Any) -> None:
        plain(sites, *args, **options)
        p = torch.cat([site.keep_prob().double().flatten(1) for site in sites], 1)
        densities.append(p.mean(1))
        sharp.append(sites[0].sampler.sharpness.clone())

    monkeypatch.setattr(budget, "hold_", hold)
    config = dataclasses.replace(CONFIG, gate_lr=1.0)
    rows = pp.fit([attached(0), attached(1)], (X, Y), config, budget=plans, seed=[0, 1])
    # One hold before every step, and one after every epoch, whose row reads the densities.
    moments = [t / 20 for epoch in range(4) for t in (*range(5 * epoch, 5 * epoch + 5), 5 * epoch + 5)]
    assert len(densities) == 24
    sizes = {"size": 56, "total": 56}
    expected = [[masks.density(1 - plan.density(t), **sizes) for plan in plans] for t in moments]
    # A dense start is as near to 1 as a probability may be.
    goal = torch.tensor(expected, dtype=torch.float64).clamp_max(1 - ETA if control == "projection" else 1.0)
    assert torch.stack(densities) == pytest.approx(goal, rel=2e-6)
    assert torch.stack(sharp) == pytest.approx(torch.tensor([[p.sharpness(t) for p in plans] for t in moments]))
    ends = [[row["expected_sparsity"] for row in rows if row["member"] == k][-1] for k in range(2)]
    assert ends == pytest.approx([0.3, 0.6], abs=1e-6)


# --- Data and augmentation.


def pictures() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 2))


def test_orders_and_crops_are_functions_of_seed_step_and_position(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pp.Config(epochs=2, lr=0.0, gate_lr=None, batch_size=8, augment=True)  # 33 = 3 x 8 + 9

    def batches(seed: Any) -> list[dict[str, Any]]:
        models = pictures() if isinstance(seed, int) else [pictures() for _ in seed]
        with recorded_steps(monkeypatch) as records:
            pp.fit(models, (IMAGES, MARKS), config, seed=seed)
        return records

    alone = [batches(3), batches(8)]
    assert [len(batch["x"]) for batch in alone[0]] == [8, 8, 8, 9] * 2
    for k, seed in enumerate((3, 8)):
        for number, batch in enumerate(alone[k]):
            words = philox.words(len(batch["x"]), seed=seed, step=number, stream=philox.AUGMENT)
            assert torch.equal(batch["word"], words)
    for number, batch in enumerate(batches([3, 8])):
        for k in range(2):
            assert torch.equal(batch["x"][k], alone[k][number]["x"])
            assert torch.equal(batch["word"][k], alone[k][number]["word"])
        crops = crop_flip(batch["x"], batch["word"])
        assert torch.equal(crops[1], crop_flip(alone[1][number]["x"], alone[1][number]["word"]))
    shared = batches([8, 8])
    assert all(torch.equal(batch["x"], alone[1][number]["x"]) for number, batch in enumerate(shared))
    for batches_of_seed in alone:  # an epoch has every example once
        first = torch.cat([batch["x"] for batch in batches_of_seed[:4]]).flatten(1)
        assert torch.equal(first.sort(0).values, IMAGES.flatten(1).sort(0).values)
        assert not torch.equal(first[:8], torch.cat([batch["x"] for batch in batches_of_seed[4:]]).flatten(1)[:8])


@pytest.mark.parametrize("loaded", [False, True])
def test_two_stages_of_one_schedule_read_the_batches_of_a_single_stage(
    monkeypatch: pytest.MonkeyPatch, loaded: bool
) -> None:
    whole = pp.Config(epochs=5, lr=0.0, gate_lr=None, batch_size=8, augment=True)

    def batches(models: Any, config: Any) -> list[tuple[Tensor, Tensor]]:
        with recorded_steps(monkeypatch) as records:
            pp.fit(models, TensorDataset(IMAGES, MARKS) if loaded else (IMAGES, MARKS), config, seed=3)
        return [(record["x"], record["word"]) for record in records]

    expected, first, second = (batches(pictures(), config) for config in (whole, *pipeline.split_epochs(whole, 0.5)))
    assert all(
        torch.equal(a, b) for two in zip(expected, first + second, strict=True) for a, b in zip(*two, strict=True)
    )
    stages = [dataclasses.replace(whole, epochs=2, span=span) for span in ((0.0, 0.4), (0.6, 1.0))]
    for number, pair in enumerate([] if loaded else batches([pictures(), pictures()], stages)):
        # The members share a seed, but are at different epochs of the schedule.
        for k, member_batch in enumerate((expected[number], expected[12 + number])):
            assert all(torch.equal(value[k], alone) for value, alone in zip(pair, member_batch, strict=True))


def test_accumulation_takes_one_draw_per_micro_batch() -> None:
    for count in (1, 2, 5):
        model, population = attached(), [attached(0), attached(1)]
        config = dataclasses.replace(CONFIG, accumulate=count, gate_lr=0.5)
        pp.fit(model, (X, Y), config)
        pp.fit(population, (X, Y), config, seed=[0, 1])
        assert [int(attachment.sites(trained_model)[0].sampler.step) for trained_model in (model, *population)] == [
            20 * count
        ] * 3


def test_the_noted_loss_is_the_mean_over_all_examples() -> None:
    config = pp.Config(epochs=1, lr=0.0, gate_lr=None, batch_size=15)  # 50 = 3 x 15 + 5
    models = [net(0), net(1)]
    rows = pp.fit(models, (X, Y), config, seed=[0, 1])
    for row, model in zip(rows, models, strict=True):
        assert row["loss"] == pytest.approx(nn.functional.cross_entropy(model(X), Y).item(), rel=1e-6)


# --- Ways of execution.


def close(a: nn.Module, b: nn.Module, most: float) -> bool:
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(float((p - q).double().norm()) <= most * float(q.double().norm()) + 1e-9 for p, q in pairs)


def test_graph_execution_on_a_cpu_equals_eager() -> None:
    graph = dataclasses.replace(CONFIG, execution="graph")
    for make, plan in ((net, None), (attached, None), (thresholded, THRESHOLD)):
        eager, graph_model = make(), make()
        assert pp.fit(eager, (X, Y), CONFIG, budget=plan) == pp.fit(graph_model, (X, Y), graph, budget=plan)
        assert close(eager, graph_model, 0.0)


@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler itself
def test_compiled_execution_is_close_to_eager() -> None:
    torch._dynamo.reset()
    compiled = pp.Config(epochs=1, lr=0.1, batch_size=15, execution="compiled")  # the last 5 run uncompiled
    eager = dataclasses.replace(compiled, execution="eager")
    compiled_model, eager_model = attached(), attached()
    pp.fit(compiled_model, (X, Y), compiled)
    pp.fit(eager_model, (X, Y), eager)
    assert close(compiled_model, eager_model, 1e-4)
    compiled_models, eager_models = [net(0), net(1)], [net(0), net(1)]
    pp.fit(compiled_models, (X, Y), compiled, seed=[0, 1])
    pp.fit(eager_models, (X, Y), eager, seed=[0, 1])
    assert all(close(a, b, 1e-4) for a, b in zip(compiled_models, eager_models, strict=True))


@GPU
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("state", ["dense", "attached", "thresholded"])
def test_a_captured_step_equals_the_eager_one(state: str, count: int) -> None:
    make = {"dense": net, "attached": attached, "thresholded": thresholded}[state]
    plan = {"dense": None, "attached": pp.Budget(0.5, schedule="cubic"), "thresholded": THRESHOLD}[state]
    config = dataclasses.replace(CONFIG, schedule="cosine", gate_lr=0.5)
    runs = []
    for execution in ("eager", "graph"):
        models = [make(k).cuda() for k in range(count)]
        model_or_models = models[0] if count == 1 else models
        pp.fit(model_or_models, (X.cuda(), Y.cuda()), dataclasses.replace(config, execution=execution), budget=plan)
        runs.append(models)
    for a, b in zip(*runs, strict=True):
        assert close(b, a, 1e-6)


@pytest.mark.parametrize(
    ("device", "amp"), [("cpu", False), pytest.param("cuda", False, marks=GPU), pytest.param("cuda", True, marks=GPU)]
)
def test_attention_in_a_population_trains_as_in_single_runs(device: str, amp: bool) -> None:
    """On a GPU, fused attention has no right gradients under vmap: an error in float32, NaN in bfloat16."""
    tokens = torch.randint(65, (16, 128), generator=torch.Generator().manual_seed(0)).to(device)
    config = dataclasses.replace(CONFIG, epochs=2, lr=0.01, batch_size=8, amp=amp)
    alone = [pp.models.gpt(width=64, depth=2, heads=2, dropout=0.0, seed=k).to(device) for k in (0, 1)]
    crowd = copy.deepcopy(alone)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())

    for k, model in enumerate(alone):
        pp.fit(model, (tokens, tokens.roll(-1, 1)), config, seed=k, loss=loss)
    pp.fit(crowd, (tokens, tokens.roll(-1, 1)), config, seed=[0, 1], loss=loss)
    for a, b in zip(alone, crowd, strict=True):
        assert close(b, a, 1e-2 if amp else 1e-4)


class Counts(nn.Module):
    """Branches on its numbers, which a captured step cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (2.0 if x.sum().item() > 0 else 1.0)


@GPU
def test_a_step_that_cannot_be_captured_warns_once_and_trains_eagerly() -> None:
    plain, graph = Counts().cuda(), Counts().cuda()
    pp.fit(plain, (X.cuda(), Y.cuda()), CONFIG)
    with pytest.warns(UserWarning, match="the step could not be captured as a CUDA graph") as warnings:
        pp.fit(graph, (X.cuda(), Y.cuda()), dataclasses.replace(CONFIG, execution="graph"))
    assert len(warnings) == 1
    assert "\n" not in str(warnings[0].message)
    assert close(graph, plain, 1e-6)


# --- No waiting for the device.


@GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("stage", ["dense", "budget", "threshold", "posterior"])
def test_nothing_waits_for_the_device_inside_an_epoch(stage: str, count: int, tmp_path: Path) -> None:
    make = {"dense": net, "threshold": thresholded}.get(stage, lambda k: attached(k, 0.05))
    models = [make(k).cuda() for k in range(count)]
    model_or_models = models[0] if count == 1 else models
    split = pp.data.split(X, Y, prior_fraction=0.5, seed=0)
    config = dataclasses.replace(CONFIG, gate_lr=0.5)
    moments: list[int] = []

    def progress(name: str, done: int, total: int, row: dict) -> None:
        """The first epoch may wait for one-off work; the second may not, from its second step on."""
        moments.append(done)
        torch.cuda.set_sync_debug_mode("error" if per < done < 2 * per else "default")

    data = (X.cuda(), Y.cuda())
    per = 5 if stage != "posterior" else math.ceil(len(split.bound) / 10)
    try:
        if stage == "posterior":
            slabs = [pp.read(model) for model in models]
            priors = slabs[0] if count == 1 else slabs
            out = [tmp_path / str(k) for k in range(count)]
            out_or_outs = out[0] if count == 1 else out
            pp.fit_posterior(model_or_models, priors, split, config, out=out_or_outs, progress=progress)
        else:
            plan = {"budget": pp.Budget(0.5), "threshold": THRESHOLD}.get(stage)
            pp.fit(model_or_models, data, config, budget=plan, progress=progress)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert max(moments) == 4 * per
    assert all(copy.deepcopy(p).isfinite().all() for model in models for p in model.parameters())


# --- Fading of the gates' start.

FADING = pp.Budget(0.5, schedule="cubic", fade=True)


def started(k: int = 0) -> nn.Module:
    """A model with gates that are not zero."""
    model = net(k)
    pp.attach(model, pp.isotropic(model, sparsity=0.5), coupling=4.0, seed=k)
    generator = torch.Generator().manual_seed(k)
    return attachment.set_logits_(
        model, {s.name: torch.randn(s.mean.shape, generator=generator) for s in attachment.sites(model)}
    )


def test_the_start_of_gates_that_learn_nothing_fades_with_the_ramp(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = started(), budget.hold_
    first = [site.gate.detach().clone() for site in attachment.sites(model)]
    shares = []

    def hold(sites: list[attachment.AttachedWeight], *args: Any, **options: Any) -> None:
        shares.append(float((sites[0].gate.detach() / first[0]).mean()))
        assert all(torch.allclose(s.gate, shares[-1] * f, atol=1e-5) for s, f in zip(sites, first, strict=True))
        plain(sites, *args, **options)

    monkeypatch.setattr(budget, "hold_", hold)
    pp.fit(model, (X, Y), dataclasses.replace(CONFIG, gate_lr=0.0), budget=FADING)
    expected = [max(0.0, 1 - t / 20 / 0.8) for t in range(20)]
    at_steps = [share for k, share in enumerate(shares) if (k + 1) % 6]  # the sixth hold of an epoch is no step
    assert at_steps == pytest.approx(expected, abs=1e-5)


def test_a_member_whose_start_fades_equals_its_single_run() -> None:
    plans = [FADING, dataclasses.replace(FADING, fade=False)]
    crowd = [started(0), started(1)]
    pp.fit(crowd, (X, Y), CONFIG, budget=plans, seed=[0, 1])
    for k, (model, plan) in enumerate(zip(crowd, plans, strict=True)):
        alone = started(k)
        pp.fit(alone, (X, Y), CONFIG, budget=plan, seed=k)
        for site, lone_site in zip(attachment.sites(model), attachment.sites(alone), strict=True):
            torch.testing.assert_close(site.gate, lone_site.gate, rtol=1e-4, atol=1e-4)


def test_an_interrupted_run_resumes_its_fading(tmp_path: Path) -> None:
    whole, path = started(), tmp_path / "masks.pt"
    pp.fit(whole, (X, Y), CONFIG, budget=FADING)

    def stop(stage: str, done: int, total: int, row: Any) -> None:
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pp.fit(started(), (X, Y), CONFIG, budget=FADING, checkpoint=path, progress=stop)
    again = started()
    pp.fit(again, (X, Y), CONFIG, budget=FADING, checkpoint=path)
    for site, whole_site in zip(attachment.sites(again), attachment.sites(whole), strict=True):
        assert torch.equal(site.gate, whole_site.gate)
        assert torch.equal(site.mean, whole_site.mean)


def test_only_gates_have_a_start_that_fades() -> None:
    with pytest.raises(
        ValueError, match="fade is for gates and scores, which the control 'magnitude' has not; leave it out"
    ):
        pp.Budget(0.5, control="magnitude", fade=True)


# --- Calls within a step.


def calls_by_file(act: Callable[[], Any]) -> Counter[str]:
    """How often `act` calls into a file of the library from another file of it."""
    root, visits = Path(pp.__file__).parent, Counter[str]()

    def count(frame: Any, event: str, arg: Any) -> None:
        file, caller = frame.f_code.co_filename, frame.f_back
        if event != "call" or not file.startswith(str(root)):
            return
        while caller is not None and not caller.f_code.co_filename.startswith(str(root)):
            caller = caller.f_back
        if caller is None or caller.f_code.co_filename != file:
            visits[str(Path(file).relative_to(root))] += 1

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return visits


def test_training_a_plain_model_never_calls_the_sharding_code() -> None:
    def train() -> None:
        pp.pft(net(), (X, Y), CONFIG, sparsity=0.5)
        model = attached()
        pp.fit(model, (X, Y), CONFIG, budget=pp.Budget(0.5, control="projection"))
        pp.harden(model)

    visits = calls_by_file(train)
    assert visits["training/step.py"] > 60
    assert visits["distributed/sharded.py"] == 0


def test_a_step_makes_fewer_than_fifty_calls_from_file_to_file(monkeypatch: pytest.MonkeyPatch) -> None:
    visits: list[Counter[str]] = []
    take = step.Step.__call__

    def counted(self: step.Step, number: int, examples: Any) -> int:
        visits.append(calls_by_file(lambda: take(self, number, examples)))
        return self.count

    monkeypatch.setattr(step.Step, "__call__", counted)
    pp.pft(net(), (X, Y), CONFIG, sparsity=0.5)
    assert visits[9].total() < 50, visits[9]  # of the mask stage, which has 10 steps
