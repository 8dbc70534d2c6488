"""The study of documents: the correlation inside a document, and how often either bound fails."""

from typing import Any

import numpy as np
import pytest
import torch

from pacprune.paper import documents

OPTIONS = documents.Passages(windows=(1,), sizes=(30,), trials=400)


@pytest.mark.parametrize("correlation", [0.0, 0.05, 0.5])
def test_the_correlation_is_that_of_two_tokens_of_a_document(correlation: float) -> None:
    rng = np.random.default_rng(0)
    both = 1 / max(correlation, 1e-9) - 1
    chances = rng.beta(0.3 * both, 0.7 * both, 20_000)
    assert documents.correlation(rng.binomial(50, chances), 50) == pytest.approx(correlation, abs=0.01)


def test_a_bound_fails_that_counts_dependent_tokens_and_the_other_does_not() -> None:
    rng = np.random.default_rng(0)
    wrong = rng.binomial(100, rng.beta(1.5, 3.5, 2_000))
    failed = documents.failures(wrong, 100, 30, OPTIONS, rng)
    assert failed["tokens_failures"] > 0.2
    assert failed["documents_failures"] <= 0.05
    error = wrong.mean() / 100
    assert error < failed["documents_bound"]
    equal = documents.failures(np.full(100, 30), 100, 30, OPTIONS, rng)
    assert equal["tokens_failures"] == 0


def test_passages_and_speeches_are_halves_of_the_text_without_an_overlap(job: Any) -> None:
    (setting,) = documents.SETTINGS["smoke"]
    halves = documents.passages(setting, 0, job)
    assert halves.training[0].shape[1] == halves.others[1].shape[1] == setting.options.length
    assert abs(len(halves.training[0]) - len(halves.others[0])) <= setting.options.windows[-1]
    for x, y in (halves.training, halves.others):
        assert torch.equal(x[:, 1:], y[:, :-1])
    speeches = documents.speeches("babble", 16, 0, job)
    assert speeches.vocabulary == halves.vocabulary
    again, other = (documents.speeches("babble", 16, seed, job).training[0] for seed in (0, 1))
    assert torch.equal(again, speeches.training[0])
    assert not torch.equal(other, again)
