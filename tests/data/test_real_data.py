"""Short runs on the real Fashion-MNIST files: a pruned network and a certified one, each in well under a minute."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import pacprune as pp
from pacprune import bounds


@pytest.fixture(scope="module")
def fashion(real_data: Callable[[str], Path]) -> pp.data.Split:
    return pp.data.fashion_mnist(prior_fraction=0.4, seed=0, data_dir=real_data("fashion-mnist"))


def test_a_short_pft_run(fashion: pp.data.Split) -> None:
    model = pp.models.build("lenet5", fashion)
    examples = fashion.train.subset(torch.arange(20_000))
    config = pp.Config(epochs=2, lr=0.1, schedule="cosine")
    outcome = pp.pft(model, examples, config, sparsity=0.9, dense=pp.Config(epochs=1, lr=0.05))
    assert sum(int(m.sum()) for m in outcome.mask.values()) == round(0.1 * 61_470)
    assert outcome.sparsity == pytest.approx(0.9, abs=1e-5)
    assert [row["stage"] for row in outcome.history] == ["dense", "masks", "masks"]
    assert outcome.history[-1]["sparsity"] == pytest.approx(0.9, abs=1e-4)
    assert pp.error(model, fashion.test) < 0.22
    pp.models.build("lenet5", fashion).load_state_dict(model.state_dict(), strict=True)


def test_a_short_pbp_run(fashion: pp.data.Split, tmp_path: Path) -> None:
    model = pp.models.build("lenet5", fashion)
    config, posterior = pp.Config(epochs=1, lr=0.05), pp.Config(epochs=1, lr=0.02, batch_size=512)
    outcome = pp.pbp(
        model, fashion, config, sparsity=0.8, dense=config, posterior=posterior, draws=1500, folder=tmp_path
    )
    cert = outcome.certificate
    assert (cert.n, cert.record["data"]["dataset"], len(fashion.prior)) == (36_000, "fashion-mnist", 24_000)
    assert cert.sparsity == pytest.approx(0.8, abs=1e-6)
    test = pp.gibbs_error(model, fashion.test, draws=3)
    assert test == pytest.approx(cert.risk, abs=0.02)
    assert test < cert.bound <= cert.bounds["paper"] < 0.28
    assert cert.bound == bounds.seeger(cert.risk_upper, n=cert.n, kl=cert.kl, delta=cert.ledger.pac_bayes)
    assert cert.bounds["held_out"] < cert.bound  # thousands of examples for one fixed network are hard to beat
    assert set(cert.record["data"]["files"]) == {
        f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
    }
    report = pp.verify(
        cert.save(tmp_path / "certificate"), split=fashion, model=lambda: pp.models.build("lenet5", fashion)
    )
    assert report.valid, report.failure
