"""The table of certificates: nested splits, a grid declared beforehand, moved images, rows, packed folders."""

import csv
import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import pacprune as pp
from pacprune import data
from pacprune.certification import certificate, decode, verify
from pacprune.paper import certificate_grid, frame
from pacprune.paper.certificate_grid import Cell, Grid, Motion, cells_of, moved, read_grid
from pacprune.paper.error_vs_sparsity import GRID_FILE
from pacprune.paper.frame import Job, on_device

TINY = """
delta = 0.05
[[setting]]
data = "digits"
model = "mlp"
split_seed = 3
alphas = [0.4, 0.8]
sparsities = [0.9]
seeds = [0, 1]
margin = 0.002
eps = 1e-5
std = [0.01, 0.003]
expected_risk = 0.1
draws = 300
tolerance = 0.01
[setting.motion]
copies = 2
pixels = 1
[setting.dense]
epochs = 2
lr = 0.1
[setting.pruning]
epochs = 2
lr = 0.1
[setting.prior]
epochs = 1
lr = 0.01
[setting.posterior]
epochs = 2
lr = 1.0
"""


NAME = "digits-mlp"


@pytest.fixture(scope="module")
def grid() -> Grid:
    return read_grid(TINY)


@pytest.fixture(scope="module")
def table(
    grid: Grid, make_job: Callable[..., Job], tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, Any]], Job]:
    """The rows of the grid, and the job that made them."""
    job = make_job(tmp_path_factory.mktemp("table"))
    return certificate_grid.run(grid, NAME, job), job


# --- The protocol: one permutation, and a grid that is declared


def test_splits_of_one_seed_are_nested() -> None:
    cuts = [data.load("digits", prior_fraction=alpha, seed=7) for alpha in (0.4, 0.6, 0.8)]
    for smaller, larger in pairwise(cuts):
        assert torch.equal(larger.prior.index[: len(smaller.prior)], smaller.prior.index)
        assert torch.equal(smaller.bound.index[-len(larger.bound) :], larger.bound.index)
    first, last = set(cuts[0].prior.index.tolist()), set(cuts[-1].bound.index.tolist())
    assert not first & last
    assert all(first <= set(cut.prior.index.tolist()) and last <= set(cut.bound.index.tolist()) for cut in cuts)


def test_the_declared_grid_has_every_row_that_is_published() -> None:
    grid = read_grid(GRID_FILE.read_text())
    names = [setting.name for setting in grid.settings]
    assert sorted(names) == ["cifar10-resnet20", "fashion-mnist-lenet5", "mnist-lenet5", "mnist-mlp"]
    assert (
        len({(setting.data, setting.options.split_seed) for setting in grid.settings}) == 3
    )  # one permutation per data set
    for setting in grid.settings:
        cells = {(cell.sparsity, cell.alpha) for cell in cells_of(setting, range(setting.seeds))}
        assert {(0.9, 0.4), (0.9, 0.8), (0.975, 0.4), (0.975, 0.8)} <= cells
        assert setting.seeds >= 3
        assert setting.prior.gate_lr is None
        assert setting.posterior.gate_lr is None
    rows = [(setting.name, cell) for setting in grid.settings for cell in cells_of(setting, range(setting.seeds))]
    assert len(set(rows)) == len(rows) == grid.size - grid.unpublished
    others = sum(len(frame.read(path)) for path in GRID_FILE.parent.glob("data-scarce-*.csv"))
    assert grid.unpublished >= others  # on examples of the same bound sets
    assert grid.size == 3 * (len(rows) + 85)  # under three families, with the 85 priors looked at before
    assert math.log(grid.size) < 6.5  # what the whole table costs every row, in nats


def test_k_counts_cells_times_seeds(grid: Grid) -> None:
    assert grid.size == 2 * 1 * 2
    assert cells_of(grid[NAME], [0, 1])[1] == Cell(0.4, 0.9, 1)
    assert replace(grid, settings=grid.settings * 2).size == 8
    assert read_grid(TINY.replace("delta = 0.05", "delta = 0.05\ntried = 3")).size == 7


HEADLINE = '\n[headline]\nshare = 0.5\nrows = ["digits-mlp-0.9-0.8"]\n'


def test_headline_rows_get_more_of_delta(make_job: Callable[..., Job], tmp_path: Path) -> None:
    text = TINY.replace("seeds = [0, 1]", "seeds = [0]").replace("delta = 0.05", "delta = 0.05\ntried = 7")
    equal, headline = read_grid(text), read_grid(text + HEADLINE)
    assert equal.payment(equal[NAME], cells_of(equal[NAME], [0])) == {"grid": 9}
    assert equal.terms != headline.terms
    shares = {"headline": (1, 0.5), "rest": (8, 0.5)}
    paid = headline.payment(headline[NAME], cells_of(headline[NAME], [0]))
    assert paid == {"shares": shares, "group": ["rest", "headline"]}
    rest, first = certificate_grid.run(headline, NAME, make_job(tmp_path))
    assert (rest["rows_declared"], first["rows_declared"]) == (9, 9)
    stated = decode.load(tmp_path / "certificates" / "digits-mlp-0.9-0.8-0").pac_bayes["shares"]
    assert stated is not None
    assert (stated["group"], stated["groups"]["rest"]) == ("headline", {"certificates": 8, "share": 0.5})


def test_a_headline_outside_the_grid_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the headline row 'digits-mlp-0.9-0.8' is not in the grid, which has"):
        read_grid(TINY.replace("alphas = [0.4, 0.8]", "alphas = [0.4, 0.7]") + HEADLINE)
    with pytest.raises(ValueError, match=r"the headline's share is 1.5"):
        read_grid(TINY + HEADLINE.replace("0.5", "1.5"))


def test_what_was_not_declared_is_not_certified(grid: Grid, job: Job) -> None:
    with pytest.raises(ValueError, match="digits-lenet5 is not in the grid, which has digits-mlp"):
        certificate_grid.run(grid, "digits-lenet5", job)
    with pytest.raises(ValueError, match="'width' in a setting"):
        read_grid(TINY.replace("margin =", "width = 3\nmargin ="))
    with pytest.raises(ValueError, match="give one std for every alpha"):
        read_grid(TINY.replace("std = [0.01, 0.003]", "std = [0.01]"))
    with pytest.raises(ValueError, match=r"seeds \[0, 2\]; they must be 0, 1, 2"):
        read_grid(TINY.replace("seeds = [0, 1]", "seeds = [0, 2]"))
    assert not list(job.out.iterdir())


@pytest.mark.parametrize("change", [("delta = 0.05", "delta = 0.1"), ("eps = 1e-5", "eps = 1e-3")])
def test_rows_of_another_grid_are_not_mixed_in(change: tuple[str, str], table: Any, job: Job) -> None:
    file = f"{NAME}.jsonl"
    (job.out / file).write_text((table[1].out / file).read_text())
    with pytest.raises(ValueError, match=r"was filled on the terms .* begin in another --out"):
        certificate_grid.run(read_grid(TINY.replace(*change)), NAME, job)


# --- Moved images


def test_moved_images_are_the_same_examples() -> None:
    split = data.load("digits", prior_fraction=0.5)
    part = moved(split.prior, Motion(copies=3, degrees=10, zoom=0.1, pixels=1), seed=1)
    assert len(part) == 3 * len(split.prior)
    assert torch.equal(part.x[: len(split.prior)], split.prior.x)
    assert torch.equal(part.y, split.prior.y.repeat(3))
    assert set(split.prior.trace.examples.tolist()) <= set(part.trace.examples.tolist())
    assert torch.equal(split.prior.trace.labelled, part.trace.labelled)
    assert not torch.equal(part.x[len(split.prior) : 2 * len(split.prior)], split.prior.x)
    again = moved(split.prior, Motion(copies=3, degrees=10, zoom=0.1, pixels=1), seed=1)
    assert torch.equal(part.x, again.x)
    assert moved(split.prior, Motion()) is split.prior


def test_a_network_trained_on_moved_bound_examples_is_refused() -> None:
    split = data.load("digits", prior_fraction=0.5)
    net = pp.models.build("mlp", split)
    pp.fit(net, moved(split.bound, Motion(copies=2, pixels=1)), pp.Config(epochs=1))
    with pytest.raises(ValueError, match="has seen the bound set"):
        pp.certify_held_out(net, split)


def test_an_image_moves_as_asked() -> None:
    part = data.load("digits").prior
    still = moved(part, Motion(copies=2))
    assert torch.allclose(still.x[len(part) :], part.x, atol=1e-5)
    flipped = moved(part, Motion(copies=2, flip=True)).x[len(part) :]
    close = [(flipped - x).flatten(1).abs().amax(1) < 1e-4 for x in (part.x, part.x.flip(-1))]
    assert bool((close[0] | close[1]).all())
    assert 0.4 < float(close[1].double().mean()) < 0.6


# --- Rows


def test_every_row_is_certified_at_its_share_of_delta(grid: Grid, table: Any) -> None:
    rows, _ = table
    assert [Cell(row["alpha"], row["sparsity"], row["seed"]) for row in rows] == cells_of(grid[NAME], [0, 1])
    for row in rows:
        assert set(certificate_grid.COLUMNS) <= set(row)
        assert row["rows_declared"] == grid.size == 4
        assert row["n"] == 1437 - round(row["alpha"] * 1437)
        assert row["expected_sparsity"] >= row["sparsity"]
        assert row["single_sparsity"] >= row["sparsity"]
        assert row["kl"] > 0
        assert row["gibbs_risk"] < row["gibbs_certificate"] < 1
        delta = pp.bounds.Ledger.split(0.05, grid=4).pac_bayes_each
        common = {"n": row["n"], "delta": delta}
        assert row["seeger_certificate"] == pytest.approx(pp.bounds.seeger(row["risk_upper"], kl=row["kl"], **common))
        c = pp.bounds.catoni_constant(grid[NAME].options.expected_risk, kl=0.0, **common)
        unmoved = pp.bounds.catoni(row["prior_risk_upper"], kl=0.0, c=c, **common)
        assert row["q_equals_p_certificate"] == pytest.approx(unmoved)
        bound = pp.bounds.catoni(row["risk_upper"], kl=row["kl"], c=c, **common)
        assert row["gibbs_certificate"] == pytest.approx(bound, rel=1e-6)


def test_first_seeds_leave_a_folder_that_verifies_and_the_others_a_digest(table: Any) -> None:
    rows, job = table
    folders = sorted((job.out / "certificates").iterdir())
    assert [folder.name for folder in folders] == ["digits-mlp-0.9-0.4-0", "digits-mlp-0.9-0.8-0"]
    for folder, row in zip(folders, (rows[0], rows[2]), strict=True):
        report = pp.verify(folder, recount=True)
        assert report.valid, report.failure
        assert json.loads((folder / "certificate.json").read_text())["digest"] == row["digest"]
    assert len({row["digest"] for row in rows}) == len(rows)


def test_finished_portions_are_not_done_again(
    grid: Grid, table: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, first = table
    lines = (first.out / f"{NAME}.jsonl").read_text().splitlines()
    (job.out / f"{NAME}.jsonl").write_text("\n".join(lines[:2]) + "\n")
    alphas = []
    monkeypatch.setattr(
        certificate_grid, "_certificates", lambda _g, _s, cells, _j: [alphas.append(c.alpha) or rows[2] for c in cells]
    )
    assert certificate_grid.run(grid, NAME, job)[:2] == rows[:2]
    assert alphas == [0.8, 0.8]


def test_a_run_that_was_broken_off_goes_on_with_the_same_priors(
    grid: Grid, table: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, first = table
    shutil.copytree(first.out / "networks", job.out / "networks")
    monkeypatch.setattr(certificate_grid, "_dense", lambda *_: pytest.fail("the networks were trained again"))
    again = certificate_grid.run(grid, NAME, job)
    assert [row["prior_risk"] for row in again] == [row["prior_risk"] for row in rows]
    assert [row["gibbs_certificate"] for row in again] == [row["gibbs_certificate"] for row in rows]


def test_the_tables_have_the_columns_of_the_results(table: Any, tmp_path: Path) -> None:
    rows, _ = table
    certificate_grid.write_tables(rows, tmp_path)
    before = (tmp_path / "certificates.csv").stat().st_mtime_ns
    certificate_grid.write_tables(rows, tmp_path)
    assert (tmp_path / "certificates.csv").stat().st_mtime_ns == before
    with (tmp_path / "certificates.csv").open() as file:
        assert [tuple(row) for row in csv.DictReader(file)] == [certificate_grid.COLUMNS] * len(rows)
    with (tmp_path / "certificates-details.csv").open() as file:
        assert [row["digest"] for row in csv.DictReader(file)] == [row["digest"] for row in rows]


# --- What is published

RESULTS = GRID_FILE.parent
FOLDERS = sorted((RESULTS / "certificates").iterdir())


def test_every_published_row_was_declared() -> None:
    grid = read_grid(GRID_FILE.read_text())
    declared = {
        (setting.data, setting.model, *cell)
        for setting in grid.settings
        for cell in cells_of(setting, range(setting.seeds))
    }
    rows = frame.read(RESULTS / "certificates.csv")
    cells = [(row["dataset"], row["model"], row["alpha"], row["sparsity"], row["seed"]) for row in rows]
    assert tuple(rows[0]) == certificate_grid.COLUMNS
    assert len(set(cells)) == len(cells)
    assert set(cells) <= declared
    details = frame.read(RESULTS / "certificates-details.csv")
    assert [(row["dataset"], row["model"], row["alpha"], row["sparsity"], row["seed"]) for row in details] == cells
    assert {row["rows_declared"] for row in details} == {grid.size}


def test_the_published_folders_are_small() -> None:
    assert sum(file.stat().st_size for folder in FOLDERS for file in folder.iterdir()) <= 8_000_000


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_published_certificate_is_valid_and_is_the_one_of_its_row(folder: Path) -> None:
    assert verify.verify(folder).valid
    record = json.loads((folder / "certificate.json").read_text())
    (details,) = (row for row in frame.read(RESULTS / "certificates-details.csv") if row["digest"] == record["digest"])
    (row,) = (
        row
        for row in frame.read(RESULTS / "certificates.csv")
        if all(row[key] == details[key] for key in ("dataset", "model", "sparsity", "alpha", "seed"))
    )
    assert folder.name == "{dataset}-{model}-{sparsity:g}-{alpha:g}-{seed:g}".format(**row)
    assert record["claim"] == {"family": "catoni", "bound": row["gibbs_certificate"]}
    assert (record["n"], record["kl"]) == (row["n"], row["kl"])


# --- P and Q of frozen gates, and their packed form


@pytest.fixture(scope="module")
def proved() -> pp.Certified:
    split = data.load("digits", prior_fraction=0.5, seed=0)
    net = pp.models.build("mlp", split)
    pp.pft(net, split.prior, pp.Config(epochs=2, lr=0.1), sparsity=0.902)
    still = pp.Config(epochs=1, lr=0.1, gate_lr=None)
    return pp.pbp(net, split, still, posterior=replace(still, lr=1.0), sparsity=0.902, eps=1e-5, std=0.01, draws=300)


def test_frozen_gates_leave_two_keep_probabilities_and_zeros(proved: pp.Certified) -> None:
    p, q = proved.prior, proved.posterior
    for name, keep in p.keep_prob.items():
        likely = keep > 0.5
        assert len(keep.unique()) <= 2
        assert torch.equal(keep, q.keep_prob[name])
        assert not p.mean[name][~likely].any()
        assert not q.mean[name][~likely].any()
    assert any(not torch.equal(p.mean[name], q.mean[name]) for name in p.mean)
    assert proved.certificate.kl > 0


def test_a_packed_certificate_is_small_and_the_same_to_the_bit(proved: pp.Certified, tmp_path: Path) -> None:
    full, packed = proved.certificate.save(tmp_path / "full"), proved.certificate.save(tmp_path / "packed", packed=True)
    before, after = decode.load(full), decode.load(packed)
    assert before.tensors.keys() == after.tensors.keys()
    for file, tensors in before.tensors.items():
        assert tensors.keys() == after.tensors[file].keys()
        for name, tensor in tensors.items():
            unpacked = after.tensors[file][name]
            assert (tensor.dtype, tensor.shape) == (unpacked.dtype, unpacked.shape)
            assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (tensor, unpacked)))
    sizes = [sum(file.stat().st_size for file in folder.iterdir()) for folder in (full, packed)]
    assert sizes[1] < 0.12 * sizes[0]
    split = data.load("digits", prior_fraction=0.5, seed=0)
    model = pp.models.build("mlp", split)
    for folder in (full, packed):
        assert pp.verify(folder, split=split, model=model, replay=True, draws=300).valid


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.tensor(2.5), torch.arange(300), -torch.zeros(40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_packing_loses_nothing(tensor: torch.Tensor, dtype: torch.dtype, tmp_path: Path) -> None:
    dense, sparse = tensor.to(dtype), torch.zeros(64, 9, dtype=dtype)
    sparse[3, 1:5] = 1
    (tmp_path / "x").write_bytes(
        certificate.pack({"f.safetensors": {"dense": dense, "sparse": sparse, "again": sparse.clone()}})
    )
    unpacked = {n: decode._tensor(a) for n, a in verify.unpack((tmp_path / "x").read_bytes(), ("f",))["f"].items()}
    assert unpacked["dense"].shape == dense.shape
    assert repr(unpacked["dense"].tolist()) == repr(dense.tolist())  # which tells -0 from 0
    assert torch.equal(unpacked["sparse"], sparse)
    assert torch.equal(unpacked["again"], sparse)
    assert {t.dtype for t in unpacked.values()} == {dtype}


def test_a_changed_or_broken_packed_file_is_refused(proved: pp.Certified, tmp_path: Path) -> None:
    folder = proved.certificate.save(tmp_path, packed=True)
    path = folder / certificate.PACKED
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "files.packed.safetensors" in (verify.verify(folder).failure or "")
    # A forger brings the hashes up to date: what the tensors say is still checked.
    save_file(load_file(path), path)  # the index is lost
    record = json.loads((folder / "certificate.json").read_text())
    _forge(folder, record)
    with pytest.raises(ValueError, match=r"packed.safetensors cannot be read"):
        verify.verify(folder)
    tensors = {file: dict(content) for file, content in proved.certificate.tensors.items()}
    name = "posterior/mean/layers.0.weight"
    tensors["distributions.safetensors"][name] = tensors["distributions.safetensors"][name] * 1.5
    path.write_bytes(certificate.pack(tensors))
    _forge(folder, record)
    assert "hashes.posterior" in (verify.verify(folder).failure or "")


def _forge(folder: Path, record: dict[str, Any]) -> None:
    record["files"] = {certificate.PACKED: hashlib.sha256((folder / certificate.PACKED).read_bytes()).hexdigest()}
    record["digest"] = certificate.digest(record)
    (folder / "certificate.json").write_text(json.dumps(record, indent=2) + "\n")


def test_a_setting_is_run_by_the_fastest_means_of_the_device(grid: Grid) -> None:
    setting, cuda = grid[NAME], torch.device("cuda")
    assert on_device(setting, torch.device("cpu")) is setting
    fast = on_device(setting, cuda)
    assert fast.dense.execution == fast.pruning.execution == fast.posterior.execution == "graph"
    assert (fast.dense.amp, fast.pruning.amp, fast.posterior.amp) == (True, True, False)
    assert not on_device(replace(setting, amp=False), cuda).dense.amp
    resnet = on_device(replace(setting, model="resnet20"), cuda)
    assert (resnet.dense.execution, resnet.posterior.execution) == ("compiled", "graph")
