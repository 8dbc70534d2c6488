"""`pacprune reproduce choosing`: which certificate to take, over the number of examples and of networks tried.

For every number of examples and seed: a dense network is trained and pruned on the prior part, at the end with noise on
its weights, and P is read. Several posteriors of P are trained on the bound part; `choose` takes the best, at no price.
All certificates of the cell follow from the same counts, and so does what a choice among m networks costs each of them.

Of a text, an example is one token of a document, drawn at random. Its errors of 0 and 1 have the risk that the mean
over the document has, so that the held-out certificate of these means can be compared with all others.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pacprune import bounds, data, models, philox
from pacprune.certification import bounds_table, decode, drawn_networks
from pacprune.certification.certificate import Certificate
from pacprune.certification.choose import Choice, choose
from pacprune.data.batches import device_of
from pacprune.data.splits import Part, Split
from pacprune.masking.attachment import attach, harden, read
from pacprune.masking.spikeslab import SpikeSlab, block_isotropic
from pacprune.methods.gradual import gmp
from pacprune.methods.pipeline import together
from pacprune.paper import data_scarce, documents, painting
from pacprune.paper.data_scarce import CHOSEN_ON, ORDER, Sizes
from pacprune.paper.documents import Corpus
from pacprune.paper.frame import Figure, Job, Setting, compute_rows, in_steps
from pacprune.paper.painting import Style
from pacprune.paper.statistics import groups, interval, means
from pacprune.runs import plots
from pacprune.training.evaluate import evaluating, gibbs_error
from pacprune.training.fit import fit
from pacprune.training.posterior import fit_posterior
from pacprune.types import Table

TRIED = tuple(10**power for power in range(7))
"""Numbers of networks, or of posteriors, that a choice is made among."""
LONGEST = 60_000
"""Bound examples for which the certificates of the largest cells are computed, with their risks and KL."""
KL_WEIGHTS = (0.3, 1.0, 3.0)
"""Posteriors that are tried beside Q = P: by the weight of the KL in training."""
ARMS = {
    "held_out": Style("held-out, the pruned network", plots.BLUE, "o"),
    "documents": Style("held-out, means over documents", painting.SKY, "p"),
    "q_equals_p": Style("Q = P", plots.GREY, "D"),
    "chosen": Style("Q, the best of any number (choose)", painting.RED, "^"),
    "certified": Style("Q, every one certified (certified = m)", plots.ORANGE, "v"),
    "single_draw": Style("one network drawn from Q", plots.PURPLE, "s"),
    "transfer": Style("dense network held-out, plus disagreement", plots.GREEN, "P"),
    "disagreement": Style("disagreement with the dense network (no labels)", "black", "x"),
}
"""Certificates at the same delta: of an error rate all but the last; the last two take inputs without labels.

Only texts have documents.
"""


@dataclass(frozen=True, kw_only=True)
class Cells(Sizes):
    """The sizes of the cells, and the steps of every stage.

    Args:
        inputs: Inputs without labels, on which the pruned network is compared with the dense one.
        length: Tokens of a document of a text, of which `sizes` are the bound examples alone.
        network: The sizes of a network that reads texts.
    """

    inputs: int = 10_000
    length: int = 0
    network: Mapping[str, Any] = field(default_factory=dict)


def _setting(scale: str, draws: int, options: Cells) -> Setting[Cells]:
    """The networks of the data-scarce study at a scale, with half of all examples in the prior part."""
    base: Setting[Any] = data_scarce.SETTINGS[scale][0]
    return replace(base, alphas=(0.5,), draws=draws, options=options)


_SMALL = _setting("reduced", 3_000, Cells(sizes=(24, 100, 300, 1_000, 3_000, 10_000, 40_000)))
_LARGE = _SMALL.changed(seeds=10, draws=20_000, dense_steps=1_000, prune_steps=1_500, prior_steps=1_000)
_SPEECHES = documents.SETTINGS["reduced"][0]
_TEXT = _SMALL.changed(
    data=_SPEECHES.data,
    model=_SPEECHES.model,
    sparsities=_SPEECHES.sparsities,
    seeds=1,
    dense=_SPEECHES.dense,
    pruning=_SPEECHES.pruning,
    std=5e-3,
    draws=1_000,
    prior=replace(_SPEECHES.dense, lr=1e-3, gate_lr=None, warmup=0.0),
    posterior=replace(_SMALL.posterior, lr=0.05),
    options=Cells(
        sizes=(50, 150, 500, 1_400),
        inputs=400,
        length=64,
        network=_SPEECHES.options.network,
        dense_steps=800,
        prune_steps=300,
        prior_steps=150,
        posterior_steps=50,
    ),
)
"""A character GPT. Its prior is made from half of the speeches, whatever the number of bound examples from the rest."""
SETTINGS: dict[str, tuple[Setting[Cells], ...]] = {
    "smoke": (
        _setting(
            "smoke",
            100,
            Cells(sizes=(24, 400), inputs=200, dense_steps=20, prune_steps=20, prior_steps=10, posterior_steps=10),
        ).changed(seeds=1),
        _TEXT.changed(
            data="babble",
            seeds=1,
            draws=60,
            sizes=(30, 60),
            inputs=40,
            length=16,
            network={"width": 16, "depth": 1, "heads": 2, "dropout": 0.0, "context": 16},
            dense_steps=20,
            prune_steps=10,
            prior_steps=5,
            posterior_steps=5,
        ),
    ),
    "reduced": (_SMALL, _TEXT),
    "full": (
        _LARGE,
        _TEXT.changed(
            seeds=5, draws=20_000, posterior_steps=300, dense_steps=6_000, prune_steps=2_000, prior_steps=1_000
        ),
    ),
}


class Entry(NamedTuple):
    """One cell."""

    examples: int
    seed: int


def figures(setting: Setting[Cells], job: Job) -> Iterator[Figure]:
    """The one figure."""
    yield Figure(
        f"choosing-{setting.name}",
        f"{painting.network(setting)}: certificates at delta = {setting.options.delta:g} of networks that are "
        f"{setting.sparsities[0]:.0%} pruned, over bound examples, and over how many networks or posteriors a choice "
        f"is made among; mean and 95 % interval over {setting.seeds} seeds.",
        lambda: rows(setting, job),
        paint,
        lambda table: {
            f"{setting.name}, n = {n:g}, {tried:g} tried: {arm}": interval([row[arm] for row in part]).mean
            for (n, tried), part in groups(table, "n", "tried").items()
            for arm in ("held_out", "chosen")
            if tried in (1, 1_000)
        },
    )


def rows(setting: Setting[Cells], job: Job) -> Table:
    """One row per cell and number of networks tried; the cells of an interrupted run are kept."""
    cells = [Entry(n, seed) for n in setting.options.sizes for seed in job.seeds(setting.seeds)]
    compute: Callable[[list[Entry]], Table]
    if setting.options.length:
        cells = sorted(cells, key=lambda cell: cell.seed)  # a seed has one prior for all its cells
        compute = partial(_text_cells, setting, job=job)
    else:
        base = data.load(setting.data, seed=job.seed, data_dir=job.data_dir)
        compute = lambda portion: [_cell(setting, cell, base, job) for cell in portion]  # noqa: E731
    table = compute_rows(
        cells,
        compute,
        path=job.out / f"choosing-{setting.name}.jsonl",
        terms=setting.terms,
        group=lambda cell: cell.seed if setting.options.length else cell,
    )
    common = {"dataset": setting.data, "model": setting.model}
    return [common | line for cell in table for line in _lines(cell, setting.options)]


def _lines(cell: dict[str, Any], options: Cells) -> Iterator[dict[str, Any]]:
    """What the CSV says of a cell: its counts, and every arm for each number of networks tried."""
    counts = {name: value for name, value in cell.items() if name not in ("bounds", "computed")}
    for tried, certificates in cell["bounds"].items():
        share = options.delta / int(tried)
        differs = bounds.clopper_pearson(cell["disagreements"], n=cell["inputs"], delta=share)
        yield counts | {"computed": 0, "tried": int(tried)} | certificates | {"disagreement": differs}
    if cell["examples"] == max(options.sizes):
        yield counts | {"n": LONGEST, "computed": 1, "tried": 1} | cell["computed"] | {"disagreement": None}


# --- One cell.


def _cell(setting: Setting[Cells], cell: Entry, base: Split, job: Job) -> dict[str, Any]:
    """The counts and certificates of one subset of the examples."""
    part = _examples(base.train, cell.examples + setting.options.inputs, cell.seed)
    split = data.split(
        part.x,
        part.y,
        prior_fraction=setting.alphas[0],
        seed=cell.seed,
        test=(base.test.x, base.test.y),
        unlabelled=setting.options.inputs,
        dataset=setting.data,
        classes=base.classes,
    )
    return _certificates(setting, split, cell.seed, job)


def _examples(train: Part, count: int, seed: int) -> Part:
    """So many examples in an order of the seed, without those that the settings were chosen on."""
    order = philox.permutation(len(train), seed=ORDER + 1 + seed)
    order = order[~torch.isin(order, philox.permutation(len(train), seed=ORDER)[CHOSEN_ON])]
    if count > len(order):
        raise ValueError(f"{count} examples are asked for, but there are {len(order)}; use smaller sizes")
    return train.subset(train.index.argsort()[order[:count]])


def _certificates(setting: Setting[Cells], split: Split, seed: int, job: Job) -> dict[str, Any]:
    net = models.build(setting.model, split, seed=seed).to(job.device)
    expected, dense = _dense(setting, net, split, seed, job)
    prior = _prior(setting, net, split, seed, job)
    choice = _choice(setting, net, prior, split, expected, seed, job)
    plain = harden(copy.deepcopy(net))
    counts = _counts(choice, dense, plain, drawn_networks.thresholded(prior), split, split.unlabelled)
    return counts | {
        "bounds": {tried: arms(choice.certificate, counts, tried) for tried in TRIED},
        "computed": _computed(choice.certificate, counts),
    }


def _choice(
    setting: Setting[Cells], net: nn.Module, prior: SpikeSlab, split: Split, expected: float, seed: int, job: Job
) -> Choice:
    """The best of the posteriors, with its certificate."""
    return choose(
        _posteriors(setting, net, prior, split, seed, job),
        prior,
        split,
        delta=setting.options.delta,
        family="catoni",
        expected_risk=expected,
        draws=setting.draws,
        choosing_draws=max(20, setting.draws // 10),
        declare=_WORDS if setting.options.length else None,
        progress=job.progress,
    )


def _counts(
    choice: Choice, dense: nn.Module, plain: nn.Module, pruned: dict[str, Tensor], split: Split, inputs: Part
) -> dict[str, Any]:
    """What is counted in a cell."""
    disagreements = _disagreements(dense, plain, pruned, inputs)
    return {
        "n": len(split.bound),
        "inputs": len(inputs),
        "dense_errors": int(drawn_networks.errors(dense, {}, split.bound).sum()),
        "pruned_errors": int(drawn_networks.errors(plain, pruned, split.bound).sum()),
        "disagreements": disagreements,
        "risk_upper": choice.certificate.risk_upper,
        "kl": choice.certificate.kl,
        "posteriors": len(choice.table),
        "best": choice.name,
        "test_error": float(drawn_networks.errors(plain, pruned, split.test).double().mean()),
        "gibbs_test_error": gibbs_error(choice.model, split.test, draws=3),
    }


# --- The cells of a text.

_WORDS = (
    "the prior was trained on other speeches of the same plays alone, and short contexts repeat in new ones as often"
)


def _text_cells(setting: Setting[Cells], cells: list[Entry], job: Job) -> Table:
    """The cells of a seed: one prior from half of the documents, and so many of the other half as bound examples."""
    seed, options = cells[0].seed, setting.options
    halves = documents.speeches(setting.data, options.length, seed, job)
    dense, net, mask = documents.trained(setting, halves, seed, job)
    dense, net = models.NextToken(dense), models.NextToken(net)
    attach(net, block_isotropic(net, {f"network.{name}": t for name, t in mask.items()}, **_noise(setting)), seed=seed)
    x, y = (t.to(job.device) for t in halves.training)
    fit(
        net,
        (x, y),
        in_steps(setting.prior, options.prior_steps, len(x)),
        seed=seed,
        stage="prior",
        loss=lambda out, batch: models.next_character(out, batch[1]),
        forward=_every_token,
        progress=job.progress,
    )
    prior = read(net)
    # By documents that P was made from, and so too small: a guess, which decides Catoni's constant alone.
    expected = float(drawn_networks.errors(dense, {}, _tokens(halves.training, seed)).double().mean())
    splits = [_text_split(setting, halves, cell) for cell in cells]
    # Test examples are looked at when all posteriors are trained: some have short contexts that bound examples have.
    choices = [_choice(setting, copy.deepcopy(net), prior, split, expected, seed, job) for split, _ in splits]
    plain, pruned = harden(copy.deepcopy(net)), drawn_networks.thresholded(prior)
    table = []
    for cell, choice, (split, inputs) in zip(cells, choices, splits, strict=True):
        counts = _counts(choice, dense, plain, pruned, split, inputs)
        bound = halves.others[0][: cell.examples], halves.others[1][: cell.examples]
        tally = documents.losses(_with(plain, pruned).network, bound).tally()
        bounds_of = {
            tried: arms(choice.certificate, counts, tried) | {"documents": tally.bound(options.delta / tried)}
            for tried in TRIED
        }
        table.append(counts | {"bounds": bounds_of, "computed": _computed(choice.certificate, counts) | _NO_DOCUMENTS})
    return table


_NO_DOCUMENTS = {"documents": None}


def _every_token(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The scores after each token, and not after the last one alone."""
    return model.network(batch[0])


def _noise(setting: Setting[Cells]) -> dict[str, float]:
    return {"eps": setting.eps, "std": setting.std}


def _tokens(half: tuple[Tensor, Tensor], seed: int) -> Part:
    """One token of each document."""
    x, y = data.one_token(*half, seed=seed)
    return Part("bound", x, y, torch.arange(len(x)))


def _text_split(setting: Setting[Cells], halves: Corpus, cell: Entry) -> tuple[Split, Part]:
    """One token of every document: of the first half as prior examples, of so many others as bound ones, and the rest.

    Documents of the other half that are not in any cell are inputs without labels, and test examples behind them.
    """
    first, other = (_tokens(half, cell.seed) for half in (halves.training, halves.others))
    options, used = setting.options, max(setting.options.sizes)
    if used + options.inputs >= len(other):
        raise ValueError(f"{used + options.inputs} documents are asked for, but there are {len(other)}; use fewer")
    x, y = torch.cat([first.x, other.x[: cell.examples]]), torch.cat([first.y, other.y[: cell.examples]])
    with warnings.catch_warnings():
        # A context of a few tokens is in many documents: new data repeat as often.
        warnings.filterwarnings("ignore", ".*test examples are also among")
        split = data.split(
            x,
            y,
            indices=(torch.arange(len(first)), torch.arange(len(first), len(x))),
            split_declared_random=True,
            test=(other.x[used + options.inputs :], other.y[used + options.inputs :]),
            dataset=setting.data,
            classes=halves.vocabulary,
        )
    return split, other.subset(torch.arange(used, used + options.inputs))


def _with(plain: nn.Module, weights: dict[str, Tensor]) -> Any:
    """A copy of a network with these weights."""
    network = copy.deepcopy(plain)
    network.load_state_dict(weights, strict=False)
    return network


# --- The stages.


def _dense(setting: Setting[Cells], net: nn.Module, split: Split, seed: int, job: Job) -> tuple[float, nn.Module]:
    """Trains a network on the prior part; the risk to expect, by a fifth of it that comes later, and a copy."""
    cut = round(0.8 * len(split.prior))
    early, last = (split.prior.subset(torch.arange(*ends)) for ends in ((0, cut), (cut, len(split.prior))))
    common: dict[str, Any] = {"seed": seed, "stage": "dense", "progress": job.progress}
    fit(net, early, in_steps(setting.dense, setting.options.dense_steps, len(early)), **common)
    # Not by `error`, which notes a look: other cells, which are other experiments, have these as bound examples.
    wrong = int(drawn_networks.errors(net, {}, last).sum())
    fit(net, split.prior, in_steps(setting.dense, setting.options.dense_steps, len(split.prior)), **common)
    return (wrong + 1) / (len(last) + 2), copy.deepcopy(net)


def _prior(setting: Setting[Cells], net: nn.Module, split: Split, seed: int, job: Job) -> SpikeSlab:
    """P, around the pruned network."""
    size, options = len(split.prior), setting.options
    common: dict[str, Any] = {"seed": seed, "progress": job.progress}
    pruning = in_steps(setting.pruning, options.prune_steps, size)
    (pruned,) = together(gmp, [net], split.prior, pruning, sparsity=setting.sparsities[0], **common)
    attach(net, block_isotropic(net, pruned.mask, eps=setting.eps, std=setting.std), seed=seed)
    fit(net, split.prior, in_steps(setting.prior, options.prior_steps, size), stage="prior", **common)
    return read(net)


def _posteriors(
    setting: Setting[Cells], net: nn.Module, prior: SpikeSlab, split: Split, seed: int, job: Job
) -> dict[str, nn.Module]:
    """Networks that draw from posteriors of P, with Q = P among them."""
    config = in_steps(setting.posterior, setting.options.posterior_steps, len(split.bound))
    networks = {f"kl_weight {weight:g}": copy.deepcopy(net) for weight in KL_WEIGHTS}
    fit_posterior(
        list(networks.values()),
        [prior] * len(networks),
        split,
        config,
        delta=setting.options.delta,
        kl_weight=list(KL_WEIGHTS),
        seed=[seed] * len(networks),
        progress=job.progress,
    )
    fit_posterior(net, prior, split, replace(config, epochs=0), seed=seed)
    return {"Q = P": net, **networks}


def _disagreements(dense: nn.Module, plain: nn.Module, pruned: dict[str, Tensor], part: Part) -> int:
    """On how many inputs of a part the pruned network gives another class than the dense one."""
    with evaluating(dense):
        classes = torch.cat([dense(x.to(device_of(dense))).argmax(-1).cpu() for x in part.x.split(1000)])
    return int(drawn_networks.errors(plain, pruned, Part(part.name, part.x, classes, part.index)).sum())


def arms(certificate: Certificate, counts: dict[str, Any], tried: int) -> dict[str, float]:
    """Every certificate of a cell, had its network or posterior been the best of so many."""
    record, drawn = certificate.pac_bayes, decode.counts(certificate, "posterior")
    delta, n = certificate.ledger.delta, certificate.n
    paid = bounds_table.all_bounds(record, drawn, delta=delta, certified=tried)
    return {
        "held_out": bounds.clopper_pearson(counts["pruned_errors"], n=n, delta=delta / tried),
        "q_equals_p": _q_equals_p(certificate),
        "chosen": certificate.bound,
        "certified": bounds_table.claimed_bound(record, drawn, delta=delta, certified=tried),
        "single_draw": paid["single_draw"]["bound"],
        "transfer": _transfer(counts["dense_errors"], n, counts["disagreements"], counts["inputs"], delta, tried),
    }


def _q_equals_p(certificate: Certificate) -> float:
    """The certificate of Q = P by the bound of the claim."""
    record, delta = certificate.pac_bayes, certificate.ledger.pac_bayes_each
    risk = record["monte_carlo"]["prior"]["risk_upper"]
    return bounds.catoni(risk, n=certificate.n, kl=0.0, delta=delta, c=record["catoni_c"])


def _transfer(errors: int, n: int, disagreements: int, inputs: int, delta: float, tried: int) -> float:
    """R(pruned) <= R(dense) + Pr[they disagree]: labels for the dense network alone, and the choice on inputs."""
    dense = bounds.clopper_pearson(errors, n=n, delta=delta / 2)
    return min(1.0, dense + bounds.clopper_pearson(disagreements, n=inputs, delta=delta / (2 * tried)))


def _computed(certificate: Certificate, counts: dict[str, Any]) -> dict[str, float | None]:
    """The certificates of LONGEST bound examples with the same risks and the same KL."""
    n, ledger, record = LONGEST, certificate.ledger, certificate.pac_bayes
    scale, delta = n / certificate.n, ledger.delta
    errors, dense = round(counts["pruned_errors"] * scale), round(counts["dense_errors"] * scale)
    drawn = record["single_draw"]
    common = {"n": n, "delta": ledger.pac_bayes_each}
    risks = {
        "q_equals_p": (record["monte_carlo"]["prior"]["risk_upper"], 0.0),
        "chosen": (certificate.risk_upper, certificate.kl),
    }
    gibbs = {
        arm: bounds.catoni(
            risk, kl=kl, c=bounds.catoni_constant(risk, n=n, kl=kl, delta=ledger.pac_bayes_each), **common
        )
        for arm, (risk, kl) in risks.items()
    }
    return {
        "held_out": bounds.clopper_pearson(errors, n=n, delta=delta),
        **gibbs,
        "certified": None,
        "single_draw": bounds.disintegrated(
            round(drawn["errors"] * scale), n=n, log_ratio=drawn["log_ratio"], delta=delta
        ),
        "transfer": _transfer(dense, n, counts["disagreements"], counts["inputs"], delta, 1),
    }


# --- The picture.


def paint(canvas: Any, table: Table) -> None:
    """Certificates over bound examples, and over what is tried at a small and at a large number of examples."""
    canvas.set_size_inches(13, 4.6)
    over_n, *over_tried = canvas.subplots(1, 3)
    _paint_over_n(over_n, table)
    sizes = sorted({row["examples"] for row in table})
    for axes, size in zip(over_tried, (sizes[len(sizes) // 2], sizes[-1]), strict=True):
        part = [row for row in table if row["examples"] == size and not row["computed"]]
        present = [arm for arm in ARMS if part[0].get(arm) is not None]
        for number, arm in enumerate(
            present
        ):  # without intervals: seeds differ more than arms, and all arms share a seed
            values = means(part, arm, "tried")
            x = sorted(tried for (tried,) in values)
            y = [values[tried,] for tried in x]
            style, where = ARMS[arm], painting.moved_aside(axes, number, len(present))
            look = {"color": style.colour, "marker": style.marker, "ls": painting.dash_of(number)}
            axes.plot(x, y, ms=5, lw=1.8, label=style.label, transform=where, **look)
            axes.update_datalim(list(zip(x, y, strict=True)))
        axes.margins(x=0.08)
        axes.set_xscale("log")
        painting.error_axis(axes, [float(y) for line in axes.get_lines() for y in line.get_ydata()], "")
        axes.set_xlabel(f"networks or posteriors tried (n = {part[0]['n']:,.0f})")
    over_n.set_ylabel("certificate in %")
    canvas.legend(*over_tried[0].get_legend_handles_labels(), ncols=3, loc="outside lower center", fontsize=8)
    what = f"{painting.subject(table)}: what choosing costs"
    seeds = painting.seed_count(table)
    over = f"left, 95 % intervals over {seeds} seeds, else means" if seeds > 1 else "one seed"
    plots.title(canvas, what, f"examples, split, weights, order, draws; {over}")


def _long(table: Table) -> Table:
    """A row for every arm."""
    present = ((row, arm) for row in table for arm in ARMS)
    return [row | {"arm": arm, "bound": row[arm]} for row, arm in present if row.get(arm) is not None]


def _paint_over_n(axes: Any, table: Table) -> None:
    part = [row for row in _long(table) if row["tried"] == 1 and row["arm"] != "certified"]
    measured, computed = ([row for row in part if row["computed"] == flag] for flag in (0, 1))
    painting.lines(axes, measured, x="n", y="bound", by="arm", styles=ARMS, side_by_side=True)
    largest = max(row["n"] for row in measured)
    for arm in sorted({row["arm"] for row in computed}):
        ends = [
            (n, interval([row["bound"] for row in part if row["arm"] == arm and row["n"] == n]).mean)
            for n in (largest, LONGEST)
        ]
        axes.plot(*zip(*ends, strict=True), color=ARMS[arm].colour, lw=1.2, ls=":")
    axes.margins(x=0.08)
    axes.set_xscale("log")
    painting.error_axis(axes, [float(y) for line in axes.get_lines() for y in line.get_ydata()], "")
    axes.set_xlabel("bound examples (dotted: computed)")
