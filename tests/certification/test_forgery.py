"""Forgeries that change no stated error and no weight, and are found all the same."""

from pathlib import Path

import pytest
import torch
from test_audit import Record, Tensors, check, consistent, forged, noisy

import pacprune as pp


def test_a_keep_bit_at_a_pruned_weight_is_refused(tmp_path: Path) -> None:
    """It would change log dQ/dP without changing any weight."""

    def flip(record: Record, tensors: Tensors) -> None:
        mask = tensors["draws.safetensors"]["single_draw/1.weight"].clone()
        mask[0] = 255
        tensors["draws.safetensors"]["single_draw/1.weight"] = mask

    assert "do not fit its mask and Q" in str(pp.verify(forged(tmp_path, flip)).failure)


def test_draws_that_agree_with_the_reference_too_well_are_refused_by_a_replay(tmp_path: Path) -> None:
    """plus = minus = 0 lowers the excess-loss bound, while the errors stay those of the reference."""

    def agree(record: Record, tensors: Tensors) -> None:
        draws = tensors["draws.safetensors"]
        rate = record["reference"]["errors"] / record["n"]
        size = len(draws["posterior/wrong"])
        draws["posterior/wrong"] = (
            torch.bernoulli(torch.full((size, 25), rate), generator=torch.Generator().manual_seed(0))
            .sum(1)
            .to(torch.int32)
        )
        draws["posterior/plus"] = draws["posterior/minus"] = torch.zeros(size, dtype=torch.int32)
        consistent(record, tensors)

    place = forged(tmp_path, agree, noisy())
    assert pp.verify(place).valid
    assert "replay: " in str(check(place, replay=True, draws=300).failure)


@pytest.mark.parametrize(("c", "words"), [(0.5, "bounds.catoni.bound"), (0.0, "null or lie in"), ("1", "is no number")])
def test_a_constant_that_does_not_give_the_stated_bound_is_refused(tmp_path: Path, c: object, words: str) -> None:
    def change(record: Record, tensors: Tensors) -> None:
        record["catoni_c"] = c

    try:
        failure = str(pp.verify(forged(tmp_path, change)).failure)
    except ValueError as error:
        failure = str(error)
    assert words in failure
