"""certificate.json: its fields are those of the types, and a certificate is the same to the byte as it was."""

import hashlib
import json
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

import pytest
import torch
from test_certify import FAST, digits, issued, network, prior_of
from torch import nn

import pacprune as pp
from pacprune.certification import decode
from pacprune.certification.record import HeldOutRecord, PacBayesRecord
from pacprune.data import trace
from pacprune.files import digest

STORED = sorted((Path(__file__).parents[2] / "results" / "certificates").iterdir())


def misfits(value: Any, kind: Any, path: str = "") -> list[str]:
    """Where a value is not of its type: fields that are missing or unknown, and values of another type."""
    if is_typeddict(kind):
        hints = get_type_hints(kind)
        missing = [f"{path}/{name} is missing" for name in kind.__required_keys__ - value.keys()]
        unknown = [f"{path}/{name} has no type" for name in value.keys() - hints.keys()]
        fields = [name for name in value if name in hints]
        return missing + unknown + [m for name in fields for m in misfits(value[name], hints[name], f"{path}/{name}")]
    if get_origin(kind) in (dict, list):
        inner = get_args(kind)[-1]
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [m for key, item in items for m in misfits(item, inner, f"{path}/{key}")]
    if get_origin(kind) is Literal:
        return [] if value in get_args(kind) else [f"{path} is {value!r}"]
    kinds = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if any(is_typeddict(inner) for inner in kinds):
        return [] if value is None else misfits(value, kinds[0], path)
    kinds = (*kinds, int) if float in kinds else kinds  # a whole number is a number, but a truth value is none
    fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
    return [] if fits else [f"{path} is {value!r}, not {kind}"]


def test_a_field_of_another_type_is_noticed() -> None:
    record = dict(issued().cert.record)
    assert misfits(record, PacBayesRecord) == []
    assert misfits(record | {"n": 1.5}, PacBayesRecord) == ["/n is 1.5, not <class 'int'>"]
    assert misfits(record | {"another": 1}, PacBayesRecord) == ["/another has no type"]
    record.pop("kl")
    assert misfits(record, PacBayesRecord) == ["/kl is missing"]


@cache
def held_out() -> pp.Certificate:
    return pp.certify_held_out(network(), digits(), declare="the weights are random numbers of the seed 0")


@cache
def sealed() -> pp.Certificate:
    """A certificate under a commitment, of Q = P."""
    trace._looks.clear()
    split = digits()
    model, prior = prior_of(split)
    commitment = pp.commit(prior, split, **FAST)
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    return pp.certify(model, prior, split, commitment=commitment.sealed(model), beacon="1111111111119f2c", **FAST)


def test_the_record_is_as_its_type_says(tmp_path: Path) -> None:
    saved = decode.load(issued().cert.save(tmp_path / "random")).record
    assert misfits(saved, PacBayesRecord) == []
    assert set(saved) == set(get_type_hints(PacBayesRecord))
    assert saved["commitment"] is None
    saved = decode.load(sealed().save(tmp_path / "sealed")).record
    assert misfits(saved, PacBayesRecord) == []
    assert saved["commitment"] is not None
    saved = decode.load(held_out().save(tmp_path / "held out")).record
    assert misfits(saved, HeldOutRecord) == []
    assert set(saved) == set(get_type_hints(HeldOutRecord))


@pytest.mark.parametrize("folder", STORED, ids=lambda folder: folder.name)
def test_published_certificates_are_as_the_type_says(folder: Path) -> None:
    assert misfits(json.loads((folder / "certificate.json").read_text()), PacBayesRecord) == []


def test_a_published_certificate_is_written_again_to_the_byte(tmp_path: Path) -> None:
    """All but the packed file, whose masks are coded by gaps since, and the two hashes that follow from it."""
    folder = STORED[-2]
    published = decode.load(folder)
    copied = published.save(tmp_path, packed=True)
    text, again = ((place / "certificate.json").read_text() for place in (folder, copied))
    hashes = [(record["files"]["packed.safetensors"], record["digest"]) for record in map(json.loads, (text, again))]
    for old, new in zip(*hashes, strict=True):
        text = text.replace(old, new)
    assert again == text
    assert (copied / "packed.safetensors").stat().st_size < 0.8 * (folder / "packed.safetensors").stat().st_size
    for file, tensors in decode.load(copied).tensors.items():
        assert list(tensors) == list(published.tensors[file])
        assert all(digest({"": t}) == digest({"": published.tensors[file][name]}) for name, t in tensors.items())


def test_a_held_out_certificate_has_no_prior() -> None:
    with pytest.raises(ValueError, match=r"a held-out certificate, which has neither P nor Q; make one by pp\.certify"):
        _ = held_out().pac_bayes


def rounded(value: Any) -> Any:
    """Floats to 9 digits: another machine may round the last ones otherwise."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_the_content_of_a_certificate_stays_what_it_was() -> None:
    """Whole numbers for weights and inputs, and no noise on weights: errors are the same on every machine."""
    grid = torch.cartesian_prod(*[torch.arange(-2.0, 3.0)] * 4)
    split = pp.data.split(grid, (grid.sum(1) > 0).long() + (grid[:, 0] > 0), unlabelled=25, standardise=False)
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[-3.0, -1, -1, -1], [0, 1, 2, -1], [4, 1, 1, 2]]))
    prior = pp.read(pp.attach(model, pp.isotropic(model, sparsity=0.5)))
    pp.fit_posterior(model, prior, split, pp.Config(epochs=0))
    record = dict(pp.certify(model, prior, split, draws=100, declare="the weights are written in this test").record)
    assert record.pop("software") == {"pacprune": pp.__version__, "torch": torch.__version__}
    content = json.dumps(rounded(record), indent=2)
    assert (
        hashlib.sha256(content.encode()).hexdigest()
        == "1909b65bb4be4006207b6b47676f243213efc2dce5ef4cb869a6f3c787048d97"
    )
