"""METHODS, the one table of methods: a new method is its own file and one row here.

The command line, runs, reports, figures, comparisons and sweeps read it. Its flags are parameters of the verb: their
types and defaults are those of the signature, their help is the first sentence under `Args:`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pacprune import imports


@dataclass(frozen=True, eq=False)
class Method:
    """One method, or one variant of it that tables and figures name apart.

    Args:
        pipeline: The verb, a function (model, data, config, *, sparsity, seed, folder, progress, ...) -> Pruned, or
            where it lies: a list of methods is shown without torch.
        title: Its name in full.
        sentence: What is special about it; with the title it must fit in one line of `pacprune --help`.
        label: Its name in a figure's legend.
        colour: Its colour in figures, which no other method has.
        marker: Its marker in figures.
        options: Arguments of the verb that make it this method.
        steps: What it does, one step after another; the second paragraph of its help.
        flags: Parameters of the verb that the command line offers, and `gate_lr` where it has gates. None: it has no
            command of its own, and is a run of the command with the same verb that was given its `options`.
        defaults: Defaults of flags, where they differ from the verb's.
        rates: (data set, network) -> the learning rate that was best on validation data
            (results/pft-vs-osp-tuning.csv).
        examples: Flags of the examples in its help.
        tunes_gates: Whether a comparison tunes gate_lr / lr as well.
        certifies: Whether the verb takes a split and leaves a certificate.
        names_runs: Whether a run of the command with the same verb that was given its `options` is called by its name.
        begin: The place of (request, **options) -> Start: how it begins in a loop that it does not own
            (`pp.Pruner`). None: it can not.
    """

    pipeline: Callable[..., Any] | str
    title: str
    sentence: str
    label: str
    colour: str
    marker: str
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: str = ""
    flags: tuple[str, ...] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    examples: tuple[str, ...] = ("--sparsity 0.95",)
    tunes_gates: bool = False
    certifies: bool = False
    names_runs: bool = True
    begin: str | None = None

    @cached_property
    def verb(self) -> Callable[..., Any]:
        """The pipeline that runs it."""
        return imports.function(self.pipeline) if isinstance(self.pipeline, str) else self.pipeline

    def takes(self, parameter: str) -> bool:
        """Whether the verb has such a parameter, say a criterion or a mask_share."""
        return parameter in inspect.signature(self.verb).parameters


_SETTINGS = (("mnist", "mlp"), ("fashion-mnist", "mlp"), ("fashion-mnist", "lenet5"), ("cifar10", "resnet20"))


def _rates(*best: float) -> dict[tuple[str, str], float]:
    return dict(zip(_SETTINGS, best, strict=True))


_WHICH = ("scope", "include", "exclude")
"""Flags that every method has: which weights are pruned, and where."""

# The colours of Okabe and Ito, and two more: a test sees to it that colour-blind readers can tell them apart.
METHODS: dict[str, Method] = {
    "osp": Method(
        "pacprune.methods.one_shot:osp",
        "One-shot pruning",
        "rank the weights once, drop the rest",
        "one-shot",
        "#000000",
        "o",
        steps="Dense training, the top k of the criterion's scores, sparse fine-tuning.",
        flags=("criterion", "min_per_layer", "pattern", *_WHICH),
        rates=_rates(0.2, 0.2, 0.1, 0.2),
        examples=("--sparsity 0.95", "--data mnist --criterion snip --device cuda"),
        begin="pacprune.methods.one_shot:begin",
    ),
    "pft": Method(
        "pacprune.methods.pft:pft",
        "Probabilistic fine-tuning",
        "learn which weights to keep",
        "PFT",
        "#D55E00",
        "s",
        steps="Dense training, then all weights and their scores are trained while the network has only the weights "
        "with the k best scores, shrunk towards a threshold. The mask moves to the end.",
        flags=(
            "criterion",
            "gate_lr",
            "recipe",
            "mask_share",
            "eps",
            "mapping",
            "noise",
            "theta",
            "min_per_layer",
            "pattern",
            *_WHICH,
        ),
        rates=_rates(0.1, 0.1, 0.05, 0.2),
        examples=("--sparsity 0.95", "--data cifar10 --device cuda --out runs/cifar"),
        begin="pacprune.methods.pft:begin",
    ),
    "pft-coupled": Method(
        "pacprune.methods.pft:pft",
        "Probabilistic fine-tuning by random masks",
        "keep probabilities tied to the weights' sizes",
        "PFT, random masks",
        "#A0522D",
        "x",
        options={"recipe": "coupled"},
        rates=_rates(0.1, 0.1, 0.05, 0.2),
        tunes_gates=True,
    ),
    "pft-paper": Method(
        "pacprune.methods.pft:pft",
        "Probabilistic fine-tuning, the paper's recipe",
        "keep probabilities from a criterion, without a budget",
        "PFT, the paper's recipe",
        "#E69F00",
        "D",
        options={"recipe": "paper"},
    ),
    "pft-still": Method(
        "pacprune.methods.pft:pft",
        "Probabilistic fine-tuning without noise",
        "scale the weights instead of drawing masks",
        "PFT without noise",
        "#8B4513",
        "d",
        options={"recipe": "coupled", "noise": 0.0},
        tunes_gates=True,
        names_runs=False,
    ),
    "gmp": Method(
        "pacprune.methods.gradual:gmp",
        "Gradual magnitude pruning",
        "prune while training",
        "GMP",
        "#0072B2",
        "^",
        steps="Dense training, the smallest weights set to zero a few at a time, sparse fine-tuning.",
        flags=("mask_share", "every", "min_per_layer", "pattern", *_WHICH),
        defaults={"every": 16},
        rates=_rates(0.1, 0.2, 0.1, 0.2),
        examples=("--sparsity 0.95", "--data fashion-mnist --device cuda"),
        begin="pacprune.methods.gradual:begin",
    ),
    "dpf": Method(
        "pacprune.methods.gradual:gmp",
        "Gradual pruning with feedback",
        "pruned weights can come back",
        "DPF",
        "#56B4E9",
        "v",
        options={"feedback": True},
        steps="Like gmp, but pruned weights are still trained, by the sparse network's gradient, until the masks are "
        "final.",
        flags=("mask_share", "every", "min_per_layer", "pattern", *_WHICH),
        defaults={"every": 1},
        rates=_rates(0.1, 0.1, 0.02, 0.05),
        examples=("--sparsity 0.9",),
        begin="pacprune.methods.gradual:begin",
    ),
    "feather": Method(
        "pacprune.methods.feather:feather",
        "Feather",
        "train all weights under a threshold",
        "Feather",
        "#F0E442",
        "h",
        steps="Dense training, then all weights are trained while the network has only those above a threshold, shrunk "
        "towards it. The mask moves to the end.",
        flags=("theta", "min_per_layer", *_WHICH),
        examples=("--sparsity 0.95",),
        begin="pacprune.methods.feather:begin",
    ),
    "acdc": Method(
        "pacprune.methods.acdc:acdc",
        "AC/DC",
        "dense and sparse phases take turns",
        "AC/DC",
        "#117733",
        "p",
        steps="Dense training, then phases in which the largest weights are trained and phases in which all are. The "
        "last phase is sparse.",
        flags=("rounds", "min_per_layer", "pattern", *_WHICH),
        examples=("--sparsity 0.95 --rounds 4",),
    ),
    "rigl": Method(
        "pacprune.methods.rigl:rigl",
        "RigL",
        "small weights make room for new ones",
        "RigL",
        "#882255",
        "<",
        steps="Dense training, a mask with the final sparsity, then training in which the smallest weights of every "
        "layer lose their places to those with the largest gradients.",
        flags=("start", "exchange", "every", "min_per_layer", *_WHICH),
        examples=("--sparsity 0.95", "--start random --dense-epochs 0 --epochs 40"),
    ),
    "str": Method(
        "pacprune.methods.str_:str_",
        "Soft threshold reparameterisation",
        "layers learn thresholds",
        "STR",
        "#44AA99",
        "H",
        steps="Dense training, then training of all weights and of a threshold for every layer, by which its weights "
        "are shrunk. The mask moves to the end.",
        flags=("ramp", "min_per_layer", *_WHICH),
    ),
    "imp": Method(
        "pacprune.methods.iterative:imp",
        "Iterative magnitude pruning",
        "prune and train again, in rounds",
        "IMP, rewinding",
        "#009E73",
        "P",
        steps="Dense training, then rounds of pruning the smallest weights and training with the whole learning-rate "
        "schedule again.",
        flags=("rounds", "min_per_layer", "pattern", *_WHICH),
        rates=_rates(0.2, 0.2, 0.05, 0.1),
        examples=("--sparsity 0.95 --rounds 4",),
    ),
    "l0": Method(
        "pacprune.methods.l0:l0",
        "L0 regularisation",
        "hard-concrete gates at a price",
        "L0, hard concrete",
        "#CC79A7",
        "X",
        steps="Dense training, weights and gates trained together, the most open gates, sparse fine-tuning.",
        flags=("gate_lr", "mask_share", "min_per_layer", *_WHICH),
        rates=_rates(0.2, 0.2, 0.1, 0.2),
    ),
    "probmask": Method(
        "pacprune.methods.probmask:probmask",
        "ProbMask",
        "probabilities projected onto a budget",
        "ProbMask",
        "#999933",
        ">",
        steps="Dense training, weights and keep probabilities trained together while the latter are projected onto a "
        "falling budget, the likeliest weights, sparse fine-tuning.",
        flags=("mask_share", "min_per_layer", *_WHICH),
    ),
    "svd": Method(
        "pacprune.methods.svd:svd",
        "Sparse variational dropout",
        "weights learn how much noise they stand",
        "SVD, variational dropout",
        "#888888",
        "8",
        steps="Dense training, weights and the width of their noise trained together at a price for little noise, the "
        "least noisy weights for their sizes, sparse fine-tuning.",
        flags=("mask_share", "min_per_layer", *_WHICH),
    ),
    "pbp": Method(
        "pacprune.methods.pbp:pbp",
        "PAC-Bayes pruning",
        "a certificate for new data",
        "PBP",
        "#332288",
        "*",
        steps="A prior over sparse networks is trained on a part S_P of the training data; a posterior, on a bound "
        "that the rest of the training data gives; the certificate holds for networks drawn from the posterior.",
        flags=(
            *("criterion", "gate_lr", "recipe", "eps", "std", "delta", "objective", "family", "expected_risk", "grid"),
            *("draws", "tolerance", *_WHICH),
        ),
        defaults={"draws": 4000, "tolerance": 0.005},
        examples=("", "--data mnist --prior-fraction 0.7 --json"),
        certifies=True,
    ),
}
"""Name -> method; the name is the one in commands, CSVs and reports."""


def pruning_methods() -> dict[str, Method]:
    """The methods that leave a plain sparse network, as a comparison wants them."""
    return {name: method for name, method in METHODS.items() if not method.certifies}
