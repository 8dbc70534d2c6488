"""The table of certificates: a grid of priors that is fixed before anything is certified, and the runs that fill it.

Every data set has one split seed, so that a smaller S_P is part of a larger one. A grid of K certificates (cells times
seeds) divides every share of delta by K: with probability 1 - delta all of them hold at once.
"""

import copy
import hashlib
import itertools
import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from pacprune.data.batches import example_hashes
from pacprune.data.splits import Part, Split
from pacprune.files import write_atomically
from pacprune.masking import attachment, weights
from pacprune.masking.spikeslab import SpikeSlab, draw_weights
from pacprune.methods.one_shot import osp
from pacprune.methods.pbp import pbp
from pacprune.methods.pft import pft
from pacprune.methods.pipeline import Certified, together
from pacprune.paper.frame import Job
from pacprune.runs import plots, store
from pacprune.training.config import GATE_RATIO, Config
from pacprune.training.evaluate import error
from pacprune.training.fit import fit

COLUMNS = (
    "dataset",
    "model",
    "sparsity",
    "alpha",
    "seed",
    "gibbs_risk",
    "kl",
    "n",
    "gibbs_certificate",
    "q_equals_p_certificate",
    "single_draw_certificate",
    "held_out_certificate",
    "test_error",
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


class Cell(NamedTuple):
    """One row of the table within its setting."""

    alpha: float
    sparsity: float
    seed: int


@dataclass(frozen=True)
class Setting:
    """A data set and a network, the cells that are certified on them, and everything that shapes P and Q.

    P is a spike and slab around a network that pft has pruned on S_P to sparsity + `margin`, so that also the single
    drawn network, whose number of weights is random, is as sparse as stated.
    """

    data: str
    model: str
    split_seed: int
    alphas: tuple[float, ...]
    sparsities: tuple[float, ...]
    seeds: tuple[int, ...]
    margin: float
    eps: float
    std: tuple[float, ...]
    """One for every alpha: a wider cloud lets Q move further, which pays where S_P is small."""
    expected_risk: float
    """What Catoni's constant is made for, from the first 40 % like the rest: the bound of the claim."""
    draws: int
    tolerance: float
    dense: Config
    pruning: Config
    prior: Config
    posterior: Config
    motion: Motion = Motion()

    @property
    def name(self) -> str:
        """How the files of this setting begin."""
        return f"{self.data}-{self.model}"

    def cells(self) -> list[Cell]:
        """Every row that is published, alpha by alpha."""
        return [Cell(*one) for one in itertools.product(self.alphas, self.sparsities, self.seeds)]

    def on_device(self, device: torch.device) -> "Setting":
        """The same setting by the fastest means of the device: what is asked stays the same."""
        if device.type != "cuda":
            return self
        means: dict[str, Any] = {"execution": "compiled" if self.model == "resnet20" else "graph", "amp": True}
        return replace(
            self,
            dense=replace(self.dense, **means),
            pruning=replace(self.pruning, **means),
            posterior=replace(self.posterior, execution="graph"),  # in float32, in which Q is evaluated
        )


@dataclass(frozen=True)
class Grid:
    """All rows that are certified, declared beforehand; each one pays delta / K."""

    settings: tuple[Setting, ...]
    delta: float = 0.05
    tried: int = 0
    """Certificates on the same bound examples that are not published: looking counts across runs."""

    @cached_property
    def size(self) -> int:
        """K: cells times seeds, over all data sets and networks, and what was tried besides."""
        return sum(len(setting.cells()) for setting in self.settings) + self.tried

    def check(self, setting: Setting) -> None:
        """Refuses a setting that was not declared as it is: its certificates would not be paid for."""
        own = [one for one in self.settings if one.name == setting.name]
        if not own:
            names = ", ".join(one.name for one in self.settings)
            raise ValueError(f"{setting.name} is not in the grid, which has {names}; declare it before it is certified")
        for field in fields(Setting):
            asked, declared = (getattr(one, field.name) for one in (setting, own[0]))
            if asked != declared:
                raise ValueError(
                    f"{field.name} of {setting.name} is {asked}, but the grid declares {declared}; "
                    "certify what was declared, or declare another grid"
                )


def read_grid(text: str) -> Grid:
    """The grid that a TOML text declares; the gates of P and Q stay as they are (gate_lr is None)."""
    content = tomllib.loads(text)
    return Grid(tuple(_setting(entry) for entry in content["setting"]), content["delta"], content.get("tried", 0))


def _setting(entry: Mapping[str, Any]) -> Setting:
    known = {field.name for field in fields(Setting)}
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"the grid has {unknown[0]!r} in a setting, but there are only {', '.join(sorted(known))}")
    stages = {name: Config(**entry[name]) for name in ("dense", "pruning")}
    if "gate_lr" not in entry["pruning"]:  # as the published grid was made, however long the stage
        stages["pruning"] = replace(stages["pruning"], gate_lr=GATE_RATIO * stages["pruning"].lr)
    stages |= {name: Config(**entry[name], gate_lr=None) for name in ("prior", "posterior")}
    lists = {name: tuple(entry[name]) for name in ("alphas", "sparsities", "seeds", "std")}
    if len(lists["std"]) != len(lists["alphas"]):
        raise ValueError(f"the grid has std {entry['std']} for alphas {entry['alphas']}; give one std for every alpha")
    return Setting(**{**entry, **stages, **lists, "motion": Motion(**entry.get("motion", {}))})


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
        own = matrix[k * len(part) : (k + 1) * len(part)]
        for x, theta in zip(part.x.split(_IMAGES), own.split(_IMAGES), strict=True):
            grid = F.affine_grid(theta.to(device), list(x.shape), align_corners=False)
            images.append(F.grid_sample(x.to(device), grid, padding_mode="border", align_corners=False).cpu())
    raw = None if part.raw is None else part.raw.repeat(motion.copies, 1)
    y, index = part.y.repeat(motion.copies), part.index.repeat(motion.copies)
    return Part(part.name, torch.cat(images), y, index, part.source, raw)


def run(grid: Grid, setting: Setting, job: Job) -> list[dict[str, Any]]:
    """One row per cell of a declared setting: COLUMNS and what explains them. What a broken run has finished is kept.

    The certificate of the first seed of every cell is saved in certificates/; of the others the digest is kept.
    """
    grid.check(setting)
    path, declared = job.out / f"{setting.name}.jsonl", _digest(grid)
    known = _known(path, declared)
    for alpha in setting.alphas:
        cells = [cell for cell in setting.cells() if cell.alpha == alpha]
        if all(cell in known for cell in cells):
            continue
        known |= zip(cells, _certified(grid, setting, alpha, cells, job), strict=True)
        lines = [json.dumps({"grid": declared, **known[cell]}) for cell in setting.cells() if cell in known]
        write_atomically(path, ("\n".join(lines) + "\n").encode())
    return [known[cell] for cell in setting.cells()]


def _digest(grid: Grid) -> str:
    return hashlib.sha256(repr(grid).encode()).hexdigest()


def _known(path: Path, declared: str) -> dict[Cell, dict[str, Any]]:
    """The rows of an earlier run under the same declaration."""
    known = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        row = json.loads(line)
        if (of := row.pop("grid")) != declared:
            raise ValueError(
                f"{path} was filled under the grid {of[:12]}, but the one declared now is {declared[:12]}; "
                "put the declared grid back, or begin in another --out"
            )
        known[Cell(row["alpha"], row["sparsity"], row["seed"])] = row
    return known


def _certified(grid: Grid, setting: Setting, alpha: float, cells: Sequence[Cell], job: Job) -> list[dict[str, Any]]:
    """Dense networks, their pruning, P, Q and certificates: every stage is one population, on one S_P."""
    split = data.load(setting.data, prior_fraction=alpha, seed=setting.split_seed, data_dir=job.data_dir)
    fast = setting.on_device(job.device)
    part = moved(split.prior, setting.motion, seed=setting.split_seed, device=job.device)
    each = {
        "sparsity": [cell.sparsity + setting.margin for cell in cells],
        "seed": [cell.seed for cell in cells],
        "progress": job.progress,
    }
    # P follows from these files: a run that was broken off goes on with the P that it had begun to certify.
    folder = job.out / "networks" / _digest(grid)[:12]
    paths = [folder / f"{setting.name}-{cell.alpha:g}-{cell.sparsity:g}-{cell.seed}.safetensors" for cell in cells]
    if not all(path.is_file() for path in paths):
        nets = _dense(fast, split, part, job)
        pruned = together(pft, [copy.deepcopy(nets[cell.seed]) for cell in cells], part, fast.pruning, **each)
        for path, one in zip(paths, pruned, strict=True):
            store.write_model(path, one.model)
    centres = [models.build(setting.model, split, seed=cell.seed).to(job.device) for cell in cells]
    for path, centre in zip(paths, centres, strict=True):
        centre.load_state_dict(load_file(path))
    weights.mark_seen(centres, example_hashes(part))
    found = together(
        pbp,
        centres,
        split,
        setting.prior,
        posterior=fast.posterior,
        data=part,
        eps=setting.eps,
        std=setting.std[setting.alphas.index(alpha)],
        delta=grid.delta,
        family="catoni",
        expected_risk=setting.expected_risk,
        grid=grid.size,
        draws=setting.draws,
        tolerance=setting.tolerance,
        name=setting.model,
        **each,
    )
    return [_row(setting, cell, one, split, job) for cell, one in zip(cells, found, strict=True)]


def _dense(setting: Setting, split: Split, part: Part, job: Job) -> dict[int, nn.Module]:
    """The dense networks by seed, trained as one population."""
    nets = {seed: models.build(setting.model, split, seed=seed).to(job.device) for seed in setting.seeds}
    fit(list(nets.values()), part, setting.dense, seed=list(nets), stage="dense", progress=job.progress)
    return nets


def _row(setting: Setting, cell: Cell, found: Certified, split: Split, job: Job) -> dict[str, Any]:
    certificate, record = found.certificate, found.certificate.pac_bayes
    plain = attachment.harden(copy.deepcopy(found.model))
    single = {name: certificate.tensors["single_draw.safetensors"][name] for name in found.prior.mean}
    folder = job.out / "certificates" / f"{setting.name}-{cell.sparsity:g}-{cell.alpha:g}-{cell.seed}"
    certificate.save(folder, packed=True)
    digest = json.loads((folder / RECORD).read_text())["digest"]
    if cell.seed != setting.seeds[0]:
        shutil.rmtree(folder)
    return {
        "dataset": setting.data,
        "model": setting.model,
        **cell._asdict(),
        "gibbs_risk": certificate.risk,
        "kl": certificate.kl,
        "n": certificate.n,
        "gibbs_certificate": certificate.bound,
        "q_equals_p_certificate": _unmoved(certificate),
        "single_draw_certificate": certificate.bounds["single_draw"],
        "held_out_certificate": certificate.bounds["held_out"],
        "test_error": _gibbs(plain, found.posterior, split.test),
        "prior_test_error": _gibbs(plain, found.prior, split.test),
        "single_test_error": _share(drawn_networks.errors(plain, single, split.test)),
        "pruned_test_error": _share(drawn_networks.errors(plain, drawn_networks.thresholded(found.prior), split.test)),
        "seeger_certificate": certificate.bounds["seeger"],
        "risk_upper": certificate.risk_upper,
        "prior_risk": record["monte_carlo"]["prior"]["risk"],
        "prior_risk_upper": record["monte_carlo"]["prior"]["risk_upper"],
        "draws": certificate.draws,
        "expected_sparsity": certificate.sparsity,
        "single_sparsity": record["single_draw"]["sparsity"],
        "rows_declared": certificate.ledger.grid,
        "digest": digest,
    }


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


def snip(setting: Setting, job: Job) -> list[dict[str, Any]]:
    """Test errors of one-shot pruning by SNIP on all of S with the same epochs: a deterministic net, no certificate."""
    path = job.out / f"{setting.name}-snip.json"
    if path.is_file():
        return json.loads(path.read_text())
    split = data.load(setting.data, seed=setting.split_seed, data_dir=job.data_dir)
    fast = setting.on_device(job.device)
    part = moved(split.train, setting.motion, seed=setting.split_seed, device=job.device)
    nets = _dense(fast, split, part, job)
    cells = list(itertools.product(setting.sparsities, setting.seeds))
    pruned = together(
        osp,
        [copy.deepcopy(nets[seed]) for _, seed in cells],
        part,
        fast.pruning,
        sparsity=[sparsity for sparsity, _ in cells],
        seed=[seed for _, seed in cells],
        criterion="snip",
        progress=job.progress,
    )
    errors = error([one.model for one in pruned], split.test)
    rows = [
        {"sparsity": sparsity, "seed": seed, "test_error": wrong}
        for (sparsity, seed), wrong in zip(cells, errors, strict=True)
    ]
    write_atomically(path, json.dumps(rows).encode())
    return rows


def write_tables(rows: Sequence[Mapping[str, Any]], out: Path) -> None:
    """certificates.csv, and what explains its rows, with the digest of every certificate; only what is new."""
    keys = ("dataset", "model", "sparsity", "alpha", "seed")
    details = keys + tuple(name for name in rows[0] if name not in COLUMNS)
    for file, columns in (("certificates.csv", COLUMNS), ("certificates-details.csv", details)):
        content = plots.csv_of([{name: row[name] for name in columns} for row in rows])
        if not (out / file).is_file() or (out / file).read_bytes() != content:
            write_atomically(out / file, content)
