"""Keep probabilities: histograms that add up, maps that show the weights where they are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import pacprune as pp
from pacprune.masking.attachment import read
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.paper import keep_probs, pbp_stages
from pacprune.paper.frame import Job
from pacprune.paper.keep_probs import KeepProbs
from pacprune.paper.statistics import groups
from pacprune.runs import plots

STAGES = list(keep_probs.STAGES)
TINY = keep_probs.SETTINGS["smoke"][0].changed(
    dense=pp.Config(epochs=2, lr=0.1), prior=pp.Config(epochs=4, lr=0.1), posterior=pp.Config(epochs=1, lr=0.1)
)


@pytest.fixture(scope="module")
def networks(make_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> list[KeepProbs]:
    job = make_job(tmp_path_factory.mktemp("networks"))
    return keep_probs.keep_probs(TINY, job.seeds(TINY.seeds), job)


def test_probabilities_start_equal_and_then_spread(networks: list[KeepProbs]) -> None:
    for stages in networks:
        start, second, third = (stages[stage]["output"] for stage in STAGES)
        assert float(start.max()) == float(start.min())
        assert float(start.mean()) == pytest.approx(1 - TINY.sparsities[0], abs=1e-6)
        assert second.std() > 1e-4
        assert start.shape == third.shape == (10, 100)
        assert stages[STAGES[2]]["middle"].shape == (100, 300)


def test_histograms_add_up_and_say_how_far_the_probabilities_moved(networks: list[KeepProbs]) -> None:
    rows = keep_probs.histogram_rows(networks)
    cells = groups(rows, "layer", "stage", "run")
    assert len(cells) == 2 * 3 * TINY.seeds
    for (layer, stage, run), bins in cells.items():
        assert sum(row["share"] for row in bins) == pytest.approx(1)
        before = dict(zip(STAGES[1:], STAGES, strict=False)).get(stage, stage)
        change = networks[run][stage][layer] - networks[run][before][layer]
        assert {row["moved"] for row in bins} == {float(change.abs().mean())}
    start = [row for row in rows if row["stage"] == STAGES[0] and row["share"] > 0]
    assert {row["from"] < 0.1 < row["to"] for row in start} == {True}  # all of them within one bin


def test_maps_have_every_weight_of_the_output_layer_and_block_means_of_a_large_one(networks: list[KeepProbs]) -> None:
    rows, last = keep_probs.map_rows(networks), networks[0][STAGES[-1]]
    output = [row for row in rows if row["layer"] == "output"]
    np.testing.assert_allclose(keep_probs.matrix(output), last["output"].numpy())
    middle = [row for row in rows if row["layer"] == "middle"]
    assert {row["block"] for row in middle} == {3}  # 100 x 300 weights, shown as 100 x 100
    means = last["middle"].reshape(100, 100, 3).mean(2)
    np.testing.assert_allclose(keep_probs.matrix(middle), means.numpy(), rtol=1e-6)


def test_blocks_at_the_edge_are_means_of_what_they_have() -> None:
    wide = torch.rand(2, 250, generator=torch.Generator().manual_seed(0))
    rows = keep_probs.map_rows([{STAGES[-1]: {"output": wide[:, :5], "middle": wide}}])
    blocks = keep_probs.matrix([row for row in rows if row["layer"] == "middle"])
    assert blocks.shape == (2, 84)
    np.testing.assert_allclose(blocks[:, -1], wide[:, 249:].mean(1).numpy(), rtol=1e-6)


def test_the_numbers_follow_from_the_rows(networks: list[KeepProbs]) -> None:
    numbers = keep_probs.histogram_numbers(keep_probs.histogram_rows(networks))
    assert numbers["output: mean change after stage 2"] > 0
    assert 0 <= numbers["middle: share in (0.05, 0.95) after stage 3"] <= 1 + 1e-9


def test_rescaled_weights_have_the_dense_ones_for_their_means(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[SpikeSlab] = []
    train = pbp_stages.train_priors

    def noting(setting: Any, nets: Any, *rest: Any) -> list[SpikeSlab]:
        starts.append(read(nets[0]))
        return train(setting, nets, *rest)

    monkeypatch.setattr(pbp_stages, "train_priors", noting)
    for rescaled in (False, True):
        keep_probs.keep_probs(TINY.changed(rescaled=rescaled), [0], job)
    plain, large = (slab.mean["layers.0.weight"] for slab in starts)
    torch.testing.assert_close(large * (1 - TINY.sparsities[0]), plain)


def test_a_run_that_was_broken_off_keeps_its_networks(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    records = keep_probs.records(TINY, job)
    monkeypatch.setattr(keep_probs, "keep_probs", lambda *_: pytest.fail("again"))
    assert keep_probs.records(TINY, job) == records
    assert [bool(record["map"]) for record in records] == [True, False]
    assert {row["run"] for row in records[1]["histogram"]} == {1}


def test_the_figures_can_be_painted(networks: list[KeepProbs]) -> None:
    for paint, rows in (
        (keep_probs.paint_histogram, keep_probs.histogram_rows(networks)),
        (keep_probs.paint_maps, keep_probs.map_rows(networks)),
    ):
        assert plots.png_of(paint, rows)[:4] == b"\x89PNG"
