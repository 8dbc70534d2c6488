"""The character GPT: the network, its text, and a contest whose validation text is looked at once."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pacprune as pp
from pacprune import models
from pacprune.data import datasets
from pacprune.masking import weights
from pacprune.paper import characters, comparison, frame
from pacprune.paper.frame import Job
from pacprune.training import evaluate

(SMOKE,) = characters.SETTINGS["smoke"]
(REDUCED,) = characters.SETTINGS["reduced"]
TINY = SMOKE.changed(
    context=16,
    stride=64,
    network={"width": 16, "depth": 1, "heads": 2, "dropout": 0.0},  # whose draws a population makes otherwise
    sparsities=(0.8, 0.9),
    dense=pp.Config(epochs=1, lr=3e-3, optimizer="adamw"),
    pruning=pp.Config(epochs=2, optimizer="adamw", schedule="cosine", batch_size=32),
)


# --- The network


def small(seed: int = 0, **changes: Any) -> pp.models.GPT:
    options: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "context": 8, "dropout": 0.0}
    return pp.models.gpt(20, **(options | changes), seed=seed)


def test_the_default_gpt_has_ten_million_weights_and_one_embedding() -> None:
    model = pp.models.gpt()
    assert weights.total(model) == 10_740_096
    assert model.head.weight is model.tokens.weight
    assert [name for name in pp.prunable(model) if "head" in name] == []


def test_a_gpt_follows_from_its_seed_and_leaves_the_global_one() -> None:
    before = torch.get_rng_state()
    first, again, second = (small(seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens.weight"], second["tokens.weight"])


def test_a_gpt_sees_no_token_before_it_has_predicted_it() -> None:
    model = small().eval()
    x = torch.randint(20, (3, 8), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 20
    before, after = model(x), model(changed)
    assert before.shape == (3, 8, 20)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()
    torch.testing.assert_close(model(x[:, :3]), before[:, :3])


def test_dropout_is_for_training_alone() -> None:
    model, x = small(dropout=0.5), torch.zeros(1, 8, dtype=torch.long)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_a_gpt_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="width 16 cannot be cut into 3 heads"):
        small(heads=3)
    with pytest.raises(ValueError, match="reads 8 tokens at most but the batch has 9"):
        small()(torch.zeros(1, 9, dtype=torch.long))


def test_a_population_of_gpts_ends_as_each_would_alone() -> None:
    x = torch.randint(20, (32, 8), generator=torch.Generator().manual_seed(0))
    data, config = (x, x.roll(-1, dims=1)), pp.Config(epochs=2, lr=1e-2, optimizer="adamw", batch_size=16)
    options = {"loss": models.next_character}
    many = pp.together(pp.pft, [small(k) for k in range(2)], data, config, sparsity=[0.8, 0.9], seed=[0, 1], **options)
    for k, sparsity in enumerate((0.8, 0.9)):
        alone = pp.pft(small(k), data, config, sparsity=sparsity, seed=k, **options)
        for name, value in alone.model.state_dict().items():
            torch.testing.assert_close(many[k].model.state_dict()[name], value, rtol=1e-4, atol=1e-5)


# --- The text


def test_windows_are_the_text_and_its_successors() -> None:
    x, y = characters.windows(torch.arange(20), 4, 3)
    assert x[:2].tolist() == [[0, 1, 2, 3], [3, 4, 5, 6]]
    assert torch.equal(y, x + 1)
    assert len(x) == (20 - 5) // 3 + 1


def test_babble_has_words_that_repeat() -> None:
    words = characters.babble(2000).split(b" ")
    assert characters.babble(2000).split(b" ") == words
    assert len(words) == 2000
    assert len(set(words)) <= 50


def test_a_missing_text_is_one_sentence(job: Job) -> None:
    with pytest.raises(ValueError, match=r"input\.txt of tinyshakespeare is neither in .* `pacprune data fetch tiny"):
        characters.rows(REDUCED, replace(job, data_dir=job.out))
    assert list(job.out.iterdir()) == []


def test_the_real_text_has_65_characters(job: Job) -> None:
    root = Path(os.environ.get("PACPRUNE_DATA", str(job.out)))
    if not (root / "tinyshakespeare").is_dir():
        pytest.skip("PACPRUNE_DATA holds no tinyshakespeare")
    text, vocabulary = characters.encoded(REDUCED, replace(job, data_dir=root))
    assert (len(text), vocabulary) == (1_115_394, 65)
    assert datasets.fetch("tinyshakespeare", root) == root / "tinyshakespeare"  # complete: nothing is downloaded


# --- The contest


@pytest.fixture(scope="module")
def contest(make_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, list[dict[str, Any]]]:
    """A job, and the rows that it made."""
    job = make_job(tmp_path_factory.mktemp("characters"))
    return job, characters.rows(TINY, job)


def test_one_row_per_network_with_exactly_k_weights(contest: tuple[Job, list[dict[str, Any]]]) -> None:
    _, rows = contest
    assert all(tuple(row) == characters.COLUMNS for row in rows)
    assert [row["method"] for row in rows[:2]] == ["dense"] * 2
    pruned, total = rows[2:], rows[0]["total"]
    assert len({(row["method"], row["sparsity"], row["seed"]) for row in pruned}) == len(pruned) == 3 * 2 * 2
    assert all(row["kept"] == total - round(row["sparsity"] * total) for row in pruned)
    assert all(row["epochs"] == 2 and row["lr"] in TINY.options.rates and row["validation_loss"] > 0 for row in pruned)


def test_the_rates_come_from_text_that_is_not_reported(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = characters.encoded(TINY, job)
    judges, lessons, together = [], [], comparison.together

    def judge(net: Any, part: characters.Windows, *, loss: Any) -> float:
        judges.append(part[0])
        return 1.0

    def teach(verb: Any, nets: Any, part: characters.Windows, *args: Any, **options: Any) -> Any:
        lessons.append(part[0])
        return together(verb, nets, part, *args, **options)

    monkeypatch.setattr(characters, "mean_loss", judge)
    monkeypatch.setattr(comparison, "together", teach)
    rows = characters.rows(TINY, job)
    assert {row["lr"] for row in rows[2:]} == {min(TINY.options.rates)}  # all equal: the smaller rate
    first, second = round(0.8 * len(text)), round(0.9 * len(text))
    tuning, validation = (characters.windows(part, 16, 16)[0] for part in (text[first:second], text[second:]))
    networks = 3 * len(TINY.options.rates)
    assert all(torch.equal(x, tuning) for x in judges[:networks])
    assert all(torch.equal(x, validation) for x in judges[networks:])
    assert len(judges) == networks + len(rows)  # every reported network once
    for x, end in ((lessons[0], first), (lessons[-1], second)):
        windows = characters.windows(text[:end], 16, 64)[0]
        assert len(windows) - TINY.pruning.batch_size < len(x) <= len(windows)
        assert len(x) % TINY.pruning.batch_size == 0
        assert torch.equal(x, windows[: len(x)])
    assert {len(x) for x in lessons} == {len(lessons[0]), len(lessons[-1])}


def test_finished_networks_are_not_trained_again(
    contest: tuple[Job, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, rows = contest
    path = job.out / "characters.jsonl"
    lines = path.read_text().splitlines()
    assert len(lines) == len(rows) - 2
    path.write_text("\n".join(lines[:-1]) + "\n")
    seeds, together = [], comparison.together
    monkeypatch.setattr(comparison, "together", lambda *a, **k: seeds.extend(k["seed"]) or together(*a, **k))
    monkeypatch.setattr(frame, "fit", lambda *a, **k: pytest.fail("the dense networks are there"))
    again = characters.rows(TINY, job)
    assert len(seeds) == 1
    assert again[:-1] == rows[:-1]
    assert again[-1]["validation_loss"] == pytest.approx(rows[-1]["validation_loss"], rel=1e-4)


def test_a_network_that_diverges_has_no_loss_and_is_not_chosen(job: Job) -> None:
    wild = TINY.changed(methods=("osp",), rates=(1e-3, 1e30), seeds=1, sparsities=(0.9,))
    rows = characters.rows(wild, job)
    assert rows[-1]["lr"] == 1e-3
    trials = [json.loads(line) for line in (job.out / "tuning.jsonl").read_text().splitlines()]
    assert [row["validation_loss"] == float("inf") for row in trials] == [False, True]


def test_margins_are_differences_of_means(contest: tuple[Job, list[dict[str, Any]]]) -> None:
    _, rows = contest
    margins = characters.margins(rows)
    losses = {
        m: [r["validation_loss"] for r in rows if (r["method"], r["sparsity"]) == (m, 0.9)] for m in ("pft", "osp")
    }
    assert margins["one-shot - PFT at 0.9"] == pytest.approx((sum(losses["osp"]) - sum(losses["pft"])) / 2)
    assert len(margins) == 1 + 2 * 3


def test_scales_differ_in_size_alone() -> None:
    (full,) = characters.SETTINGS["full"]
    assert (full.dense.epochs, full.pruning.epochs) == (3 * REDUCED.dense.epochs, 3 * REDUCED.pruning.epochs)
    assert full.options.rates == REDUCED.options.rates
    for setting in (SMOKE, REDUCED, full):
        assert setting.sparsities == (0.8, 0.9, 0.95)
        assert setting.options.tuned_at in setting.sparsities


def test_the_loss_is_that_of_every_character() -> None:
    model, x = small().eval(), torch.randint(20, (6, 8), generator=torch.Generator().manual_seed(0))
    y = x.roll(-1, dims=1)
    with torch.no_grad():
        loss = -torch.log_softmax(model(x), dim=-1).gather(-1, y[..., None]).mean()
    assert evaluate.mean_loss(model, (x, y), loss=models.next_character) == pytest.approx(float(loss), rel=1e-5)
