"""Keep probabilities: entropy in bits, histograms that add up, maps that show the weights where they are."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import pacprune as pp
from pacprune.masking.spikeslab import SpikeSlab
from pacprune.paper import keep_probs
from pacprune.paper.frame import Job
from pacprune.paper.keep_probs import KeepProbs
from pacprune.paper.statistics import groups
from pacprune.runs import plots

TINY = keep_probs.SETTINGS["smoke"][0].changed(
    eps_grid=(1e-3, 1e-2),
    seeds=2,
    dense=pp.Config(epochs=2, lr=0.1),
    prior=pp.Config(epochs=2, lr=0.1),
    posterior=pp.Config(epochs=1, lr=0.1),
    draws=50,
)


def slab(*values: float) -> SpikeSlab:
    p = torch.tensor([values])
    return SpikeSlab({"w": p}, {"w": torch.ones_like(p)}, {"w": torch.tensor(0.0)}, {}, p.numel())


@pytest.fixture(scope="module")
def networks(make_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory) -> list[KeepProbs]:
    return keep_probs.keep_probs(TINY, make_job(tmp_path_factory.mktemp("networks")))


@pytest.mark.parametrize(
    ("values", "bits"), [((0.5, 0.5), 1.0), ((0.0, 1.0), 0.0), ((0.5, 1.0), 0.5), ((0.25,), 0.811278124459)]
)
def test_entropy_is_in_bits_and_a_mean_over_weights(values: tuple[float, ...], bits: float) -> None:
    assert keep_probs.entropy(slab(*values)) == pytest.approx(bits)


def test_a_larger_eps_has_more_entropy_and_all_priors_are_paid_for(job: Job) -> None:
    rows = keep_probs.entropy_rows(TINY, job)
    assert len(rows) == len(TINY.sparsities) * len(TINY.options.eps_grid) * TINY.seeds
    for seed in job.seeds(TINY.seeds):
        small, large = (row for row in rows if row["seed"] == seed)
        assert small["eps"] < large["eps"]
        assert small["entropy"] < large["entropy"]
        assert 0 <= small["bound"] <= 1


def test_probabilities_start_equal_and_then_spread(networks: list[KeepProbs]) -> None:
    for stages in networks:
        start, second, third = (stages[stage]["output"] for stage in keep_probs.STAGES)
        assert float(start.max()) == float(start.min())
        assert float(start.mean()) == pytest.approx(1 - TINY.options.maps_sparsity, abs=1e-6)
        assert second.std() > 1e-4
        assert start.shape == third.shape == (10, 100)
        assert stages[keep_probs.STAGES[2]]["middle"].shape == (100, 300)


def test_histograms_add_up_and_say_how_far_the_probabilities_moved(networks: list[KeepProbs]) -> None:
    rows = keep_probs.histogram_rows(networks)
    cells = groups(rows, "layer", "stage", "run")
    assert len(cells) == 2 * 3 * TINY.seeds
    for (layer, stage, run), bins in cells.items():
        assert sum(row["share"] for row in bins) == pytest.approx(1)
        before = dict(zip(keep_probs.STAGES[1:], keep_probs.STAGES, strict=False)).get(stage, stage)
        change = networks[run][stage][layer] - networks[run][before][layer]
        assert {row["moved"] for row in bins} == {float(change.abs().mean())}
    start = [row for row in rows if row["stage"] == keep_probs.STAGES[0] and row["share"] > 0]
    assert {row["from"] < 0.1 < row["to"] for row in start} == {True}  # all of them within one bin


def test_maps_have_every_weight_of_the_output_layer_and_block_means_of_a_large_one(networks: list[KeepProbs]) -> None:
    rows, last = keep_probs.map_rows(networks), networks[0][keep_probs.STAGES[-1]]
    output = [row for row in rows if row["layer"] == "output"]
    np.testing.assert_allclose(keep_probs.matrix(output), last["output"].numpy())
    middle = [row for row in rows if row["layer"] == "middle"]
    assert {row["block"] for row in middle} == {3}  # 100 x 300 weights, shown as 100 x 100
    means = last["middle"].reshape(100, 100, 3).mean(2)
    np.testing.assert_allclose(keep_probs.matrix(middle), means.numpy(), rtol=1e-6)


def test_blocks_at_the_edge_are_means_of_what_they_have() -> None:
    wide = torch.rand(2, 250, generator=torch.Generator().manual_seed(0))
    rows = keep_probs.map_rows([{keep_probs.STAGES[-1]: {"output": wide[:, :5], "middle": wide}}])
    blocks = keep_probs.matrix([row for row in rows if row["layer"] == "middle"])
    assert blocks.shape == (2, 84)
    np.testing.assert_allclose(blocks[:, -1], wide[:, 249:].mean(1).numpy(), rtol=1e-6)


def test_the_numbers_follow_from_the_rows(networks: list[KeepProbs]) -> None:
    entropies = [{"entropy": e, "bound": 0.1 + e} for e in (0.1, 0.2, 0.4)]
    assert keep_probs.entropy_numbers(entropies)["r of entropy and bound"] == pytest.approx(1)
    numbers = keep_probs.histogram_numbers(keep_probs.histogram_rows(networks))
    assert numbers["output: mean change after stage 2"] > 0
    assert 0 <= numbers["middle: share in (0.05, 0.95) after stage 3"] <= 1 + 1e-9


def test_the_figures_can_be_painted(networks: list[KeepProbs]) -> None:
    for paint, rows in (
        (keep_probs.paint_histogram, keep_probs.histogram_rows(networks)),
        (keep_probs.paint_maps, keep_probs.map_rows(networks)),
    ):
        assert plots.png_of(paint, rows)[:4] == b"\x89PNG"
