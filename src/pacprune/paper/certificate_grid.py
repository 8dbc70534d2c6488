"""The table of certificates: a grid of priors that is fixed before anything is certified, and the runs that fill it.

Every data set has one split seed, so that a smaller S_P is part of a larger one. A grid of K certificates (cells times
seeds) divides every share of delta by K: with probability 1 - delta all of them hold at once. A grid may also declare
headline rows, which divide a share of delta among themselves; the others divide the rest.
"""

import copy
import itertools
import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from pacprune import bounds, data, models
from pacprune.certification import drawn_networks
from pacprune.certification.certificate import RECORD, Certificate
from pacprune.data.batches import use_of
from pacprune.data.splits import Part, Split
from pacprune.files import write_atomically
from pacprune.masking import attachment, weights
from pacprune.masking.spikeslab import SpikeSlab, draw_weights
from pacprune.methods.one_shot import osp
from pacprune.methods.pbp import pbp
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import Certified, together
from pacprune.paper.frame import Job, Setting, compute_rows, dense_networks, digest, on_device
from pacprune.runs import plots, store
from pacprune.training.config import GATE_RATIO, Config
from pacprune.training.evaluate import error
from pacprune.types import Table

COLUMNS = (
    *("dataset", "model", "sparsity", "alpha", "seed", "gibbs_risk", "kl", "n", "gibbs_certificate"),
    *("q_equals_p_certificate", "single_draw_certificate", "held_out_certificate", "test_error"),
)
TEST_DRAWS = 10
"""Networks drawn to estimate the test error of P and of Q."""
_IMAGES = 4096
"""Images that are moved at once."""


@dataclass(frozen=True)
class Motion:
    """How images are moved in training: `copies` of each in all, the first as it is, the others at random."""

    copies: int = 1
    degrees: float = 0.0
    zoom: float = 0.0
    pixels: float = 0.0
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a setting of the grid declares beyond the fields of every setting.

    P is a spike and slab around a network that pft has pruned on S_P to sparsity + `margin`, so that also the single
    drawn network, whose number of weights is random, is as sparse as stated.

    Args:
        split_seed: Seed of the permutation that splits are cut from.
        margin: What is pruned beyond the sparsity.
        stds: The width of P for every alpha. A wider cloud lets Q move further, which pays where S_P is small.
        expected_risk: The risk that Catoni's constant is made for, known from the first 40 % like the rest.
        tolerance: How far Monte Carlo may be from the risk before no more networks are drawn.
        motion: How images are moved in training.
        recipe: That of pft.
    """

    split_seed: int
    margin: float
    stds: tuple[float, ...]
    expected_risk: float
    tolerance: float
    motion: Motion = Motion()
    recipe: str = "coupled"


class Cell(NamedTuple):
    """One row of the table within its setting."""

    alpha: float
    sparsity: float
    seed: int


def _name(setting: Setting[Declaration], cell: Cell) -> str:
    """What a row is called, whatever its seed."""
    return f"{setting.name}-{cell.sparsity:g}-{cell.alpha:g}"


def cells_of(setting: Setting[Declaration], seeds: Sequence[int]) -> list[Cell]:
    """Every row that is published, alpha by alpha."""
    return [Cell(*values) for values in itertools.product(setting.alphas, setting.sparsities, seeds)]


@dataclass(frozen=True)
class Grid:
    """All rows that are certified, declared beforehand; each pays delta / K, or as its part of declared shares.

    Args:
        settings: A data set and a network each.
        delta: Probability with which any certificate may fail.
        unpublished: Certificates on the same bound examples that are in no table: looking counts across runs.
        headline: Rows that get more of delta, all seeds of each, as "mnist-lenet5-0.9-0.6": setting, sparsity, alpha.
        headline_share: What these rows get of delta together.
    """

    settings: tuple[Setting[Declaration], ...]
    delta: float = 0.05
    unpublished: int = 0
    headline: tuple[str, ...] = ()
    headline_share: float = 0.0

    def __post_init__(self) -> None:
        names = {_name(setting, cell) for setting in self.settings for cell in cells_of(setting, [0])}
        if unknown := [name for name in self.headline if name not in names]:
            raise ValueError(
                f"the headline row {unknown[0]!r} is not in the grid, which has {', '.join(sorted(names))}"
            )
        if self.headline and not 0 < self.headline_share < 1:
            raise ValueError(f"the headline's share is {self.headline_share}; it must lie strictly between 0 and 1")

    def payment(self, setting: Setting[Declaration], cells: Sequence[Cell]) -> dict[str, Any]:
        """What pbp is told of the other certificates, for each of some rows of a setting."""
        if not self.headline:
            return {"grid": self.size}
        count = sum(s.seeds for s in self.settings for cell in cells_of(s, [0]) if _name(s, cell) in self.headline)
        shares = {"headline": (count, self.headline_share), "rest": (self.size - count, 1 - self.headline_share)}
        groups = ["headline" if _name(setting, cell) in self.headline else "rest" for cell in cells]
        return {"shares": shares, "group": groups}

    @cached_property
    def size(self) -> int:
        """K: cells times seeds, over all data sets and networks, and what was looked at besides."""
        return sum(len(cells_of(setting, range(setting.seeds))) for setting in self.settings) + self.unpublished

    @cached_property
    def terms(self) -> str:
        """Stands for the whole declaration."""
        headline = (self.headline, self.headline_share) if self.headline else ()
        return digest(self.settings, self.delta, self.unpublished, *headline)

    def __getitem__(self, name: str) -> Setting[Declaration]:
        """The declared setting of this name; there is no other way to certify one."""
        settings = {setting.name: setting for setting in self.settings}
        if name not in settings:
            raise ValueError(
                f"{name} is not in the grid, which has {', '.join(settings)}; declare it before it is certified"
            )
        return settings[name]


# --- The grid as a TOML text.

_STAGES = ("dense", "pruning", "prior", "posterior")
_KEYS = {
    *("data", "model", "split_seed", "alphas", "sparsities", "seeds", "margin", "eps", "std", "expected_risk", "draws"),
    *("tolerance", "motion", *_STAGES),
}


def read_grid(text: str) -> Grid:
    """The grid that a TOML text declares; the gates of P and Q stay as they are (gate_lr is None)."""
    content = tomllib.loads(text)
    headline = content.get("headline", {"rows": [], "share": 0.0})
    settings = tuple(_setting(entry) for entry in content["setting"])
    return Grid(settings, content["delta"], content.get("tried", 0), tuple(headline["rows"]), headline["share"])


def _setting(entry: Mapping[str, Any]) -> Setting[Declaration]:
    if unknown := sorted(set(entry) - _KEYS):
        raise ValueError(f"the grid has {unknown[0]!r} in a setting, but there are only {', '.join(sorted(_KEYS))}")
    if len(entry["std"]) != len(entry["alphas"]):
        raise ValueError(f"the grid has std {entry['std']} for alphas {entry['alphas']}; give one std for every alpha")
    if entry["seeds"] != list(range(len(entry["seeds"]))):
        raise ValueError(f"the grid has seeds {entry['seeds']}; they must be 0, 1, 2, ... without a gap")
    return Setting(
        data=entry["data"],
        model=entry["model"],
        seeds=len(entry["seeds"]),
        sparsities=tuple(entry["sparsities"]),
        alphas=tuple(entry["alphas"]),
        eps=entry["eps"],
        draws=entry["draws"],
        options=Declaration(
            split_seed=entry["split_seed"],
            margin=entry["margin"],
            stds=tuple(entry["std"]),
            expected_risk=entry["expected_risk"],
            tolerance=entry["tolerance"],
            motion=Motion(**entry.get("motion", {})),
        ),
        **_stages(entry),
    )


def _stages(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The stages of a setting; only pruning trains gates."""
    gates = {"dense": {}, "pruning": {}, "prior": {"gate_lr": None}, "posterior": {"gate_lr": None}}
    if "gate_lr" not in entry["pruning"]:  # as the published grid was made, however long the stage
        gates["pruning"] = {"gate_lr": GATE_RATIO * Config(**entry["pruning"]).lr}
    return {stage: Config(**entry[stage], **gates[stage]) for stage in _STAGES}


# --- Moved images.


@torch.no_grad()
def moved(part: Part, motion: Motion, *, seed: int = 0, device: torch.device | str = "cpu") -> Part:
    """Copies of all images, turned, zoomed, shifted and flipped at random; they count as the same examples.

    The `device` does the work; the part stays in main memory.
    """
    if motion.copies == 1:
        return part
    count, generator = len(part) * (motion.copies - 1), torch.Generator().manual_seed(seed)
    angle, zoom, row, column, side = (torch.rand(5, count, generator=generator) * 2 - 1).unbind()
    angle, size = torch.deg2rad(motion.degrees * angle), 1 + motion.zoom * zoom
    cos, sin = torch.cos(angle) / size, torch.sin(angle) / size
    turned = torch.where(side < 0, -1.0, 1.0) if motion.flip else torch.ones(count)
    height, width = part.x.shape[-2:]
    across, down = 2 * motion.pixels / width * column, 2 * motion.pixels / height * row
    matrix = torch.stack([cos * turned, -sin, across, sin * turned, cos, down], dim=1).view(count, 2, 3)
    images = [part.x]
    for k in range(motion.copies - 1):
        rounds = matrix[k * len(part) : (k + 1) * len(part)]
        for x, theta in zip(part.x.split(_IMAGES), rounds.split(_IMAGES), strict=True):
            grid = F.affine_grid(theta.to(device), list(x.shape), align_corners=False)
            images.append(F.grid_sample(x.to(device), grid, padding_mode="border", align_corners=False).cpu())
    raw = None if part.raw is None else part.raw.repeat(motion.copies, 1)
    y, index = part.y.repeat(motion.copies), part.index.repeat(motion.copies)
    return Part(part.name, torch.cat(images), y, index, part.source, raw, origin=part)


# --- The rows.


def run(grid: Grid, name: str, job: Job) -> Table:
    """One row per cell of a declared setting: COLUMNS and what explains them.

    What an interrupted run has finished is kept. The certificate of the first seed of every cell is saved
    in certificates/; of the others the digest is kept.
    """
    setting = grid[name]
    table = compute_rows(
        cells_of(setting, job.seeds(setting.seeds)),
        lambda portion: _certificates(grid, setting, portion, job),
        path=job.out / f"{setting.name}.jsonl",
        terms=grid.terms,
        group=lambda cell: cell.alpha,
    )
    return [{"dataset": setting.data, "model": setting.model} | row for row in table]


def _certificates(grid: Grid, setting: Setting[Declaration], cells: Sequence[Cell], job: Job) -> Table:
    """Dense networks, their pruning, P, Q and certificates: every stage is one population, on one S_P."""
    (alpha,), options = {cell.alpha for cell in cells}, setting.options
    split = data.load(setting.data, prior_fraction=alpha, seed=options.split_seed, data_dir=job.data_dir)
    part = moved(split.prior, options.motion, seed=options.split_seed, device=job.device)
    results = together(
        pbp,
        _centres(grid, setting, cells, split, part, job),
        split,
        setting.prior,
        posterior=on_device(setting, job.device).posterior,
        data=part,
        sparsity=_sparsities(setting, cells),
        seed=[cell.seed for cell in cells],
        eps=setting.eps,
        std=options.stds[setting.alphas.index(alpha)],
        delta=grid.delta,
        family="catoni",
        expected_risk=options.expected_risk,
        **grid.payment(setting, cells),
        draws=setting.draws,
        tolerance=options.tolerance,
        name=setting.model,
        progress=job.progress,
    )
    return [_row(grid, setting, cell, result, split, job) for cell, result in zip(cells, results, strict=True)]


def _sparsities(setting: Setting[Declaration], cells: Sequence[Cell]) -> list[float]:
    return [cell.sparsity + setting.options.margin for cell in cells]


def _centres(
    grid: Grid, setting: Setting[Declaration], cells: Sequence[Cell], split: Split, part: Part, job: Job
) -> list[nn.Module]:
    """The pruned networks that priors are made around; they are kept in files.

    P follows from these files: a run that was interrupted goes on with the P that it had begun to certify.
    """
    folder = job.out / "networks" / grid.terms
    paths = [folder / f"{setting.name}-{cell.alpha:g}-{cell.sparsity:g}-{cell.seed}.safetensors" for cell in cells]
    if not all(path.is_file() for path in paths):
        nets = _dense(setting, split, part, f"dense-{cells[0].alpha:g}", job)
        pruned = together(
            pft,
            [copy.deepcopy(nets[cell.seed]) for cell in cells],
            part,
            on_device(setting, job.device).pruning,
            sparsity=_sparsities(setting, cells),
            seed=[cell.seed for cell in cells],
            recipe=setting.options.recipe,
            progress=job.progress,
        )
        for path, result in zip(paths, pruned, strict=True):
            store.write_model(path, result.model)
    centres = [models.build(setting.model, split, seed=cell.seed).to(job.device) for cell in cells]
    for path, centre in zip(paths, centres, strict=True):
        centre.load_state_dict(load_file(path))
    weights.take_over(centres, use_of(part))
    return centres


def _dense(setting: Setting[Declaration], split: Split, part: Part, name: str, job: Job) -> dict[int, nn.Module]:
    fast = on_device(setting, job.device)
    return dense_networks(fast, lambda seed: models.build(setting.model, split, seed=seed), part, job, name=name)


def _row(
    grid: Grid, setting: Setting[Declaration], cell: Cell, result: Certified, split: Split, job: Job
) -> dict[str, Any]:
    certificate = result.certificate
    return measures(result.model, result.prior, certificate, split) | {
        "q_equals_p_certificate": _unmoved(certificate),
        "rows_declared": grid.size,
        "digest": _save(certificate, setting, cell, job),
    }


def measures(model: nn.Module, prior: SpikeSlab, certificate: Certificate, split: Split) -> dict[str, Any]:
    """What a certificate says, and test errors of Q, of P and of the two single networks.

    Args:
        model: The network that draws from Q.
        prior: P.
        certificate: The certificate of Q.
        split: The split that it is about.
    """
    record, plain = certificate.pac_bayes, attachment.harden(copy.deepcopy(model))
    single = {name: certificate.tensors["single_draw.safetensors"][name] for name in prior.mean}
    thresholded = drawn_networks.thresholded(prior)
    return {
        "gibbs_risk": certificate.risk,
        "kl": certificate.kl,
        "n": certificate.n,
        "gibbs_certificate": certificate.bound,
        "single_draw_certificate": certificate.bounds["single_draw"],
        "held_out_certificate": certificate.bounds["held_out"],
        "test_error": _gibbs(plain, attachment.read(model), split.test),
        "prior_test_error": _gibbs(plain, prior, split.test),
        "single_test_error": _share(drawn_networks.errors(plain, single, split.test)),
        "pruned_test_error": _share(drawn_networks.errors(plain, thresholded, split.test)),
        "seeger_certificate": certificate.bounds["seeger"],
        "risk_upper": certificate.risk_upper,
        "prior_risk": record["monte_carlo"]["prior"]["risk"],
        "prior_risk_upper": record["monte_carlo"]["prior"]["risk_upper"],
        "draws": certificate.draws,
        "expected_sparsity": certificate.sparsity,
        "single_sparsity": record["single_draw"]["sparsity"],
    }


def _save(certificate: Certificate, setting: Setting[Declaration], cell: Cell, job: Job) -> str:
    """Keeps the certificate of a first seed; returns the digest of any."""
    folder = job.out / "certificates" / f"{_name(setting, cell)}-{cell.seed}"
    certificate.save(folder, packed=True)
    content = json.loads((folder / RECORD).read_text())["digest"]
    if cell.seed != job.seeds(1)[0]:
        shutil.rmtree(folder)
    return content


def _unmoved(certificate: Certificate) -> float:
    """The certificate of Q = P by the bound of the claim."""
    record, delta = certificate.pac_bayes, certificate.ledger.pac_bayes_each
    risk = record["monte_carlo"]["prior"]["risk_upper"]
    return bounds.catoni(risk, n=certificate.n, kl=0.0, delta=delta, c=record["catoni_c"])


def _gibbs(plain: nn.Module, slab: SpikeSlab, part: Part) -> float:
    """The mean error of fresh draws of a distribution."""
    errors = [_share(drawn_networks.errors(plain, draw_weights(slab, seed=0, step=t), part)) for t in range(TEST_DRAWS)]
    return sum(errors) / len(errors)


def _share(wrong: Tensor) -> float:
    return float(wrong.double().mean())


# --- The reference, and the published tables.


class SnipCell(NamedTuple):
    """One network that SNIP prunes."""

    sparsity: float
    seed: int


def snip(setting: Setting[Declaration], job: Job) -> Table:
    """Test errors of one-shot pruning by SNIP on all of S with the same epochs: a deterministic net, no certificate."""
    entries = [SnipCell(*values) for values in itertools.product(setting.sparsities, job.seeds(setting.seeds))]

    def compute(portion: list[SnipCell]) -> Table:
        seed = setting.options.split_seed
        split = data.load(setting.data, seed=seed, data_dir=job.data_dir)
        part = moved(split.train, setting.options.motion, seed=seed, device=job.device)
        nets = _dense(setting, split, part, "dense-snip", job)
        pruned = together(
            osp,
            [copy.deepcopy(nets[entry.seed]) for entry in portion],
            part,
            on_device(setting, job.device).pruning,
            sparsity=[entry.sparsity for entry in portion],
            seed=[entry.seed for entry in portion],
            criterion="snip",
            progress=job.progress,
        )
        return [{"test_error": wrong} for wrong in error([result.model for result in pruned], split.test)]

    path = job.out / f"{setting.name}-snip.jsonl"
    return compute_rows(entries, compute, path=path, terms=setting.terms, group=lambda _: "all")


def write_tables(rows: Table, out: Path) -> None:
    """certificates.csv, and what explains its rows, with the digest of every certificate; only what is new."""
    keys = ("dataset", "model", "sparsity", "alpha", "seed")
    details = keys + tuple(name for name in rows[0] if name not in COLUMNS)
    for file, columns in (("certificates.csv", COLUMNS), ("certificates-details.csv", details)):
        content = plots.csv_of([{name: row[name] for name in columns} for row in rows])
        if not (out / file).is_file() or (out / file).read_bytes() != content:
            write_atomically(out / file, content)
