"""Numbers in the README and in docs/ are those of the published rows in results/."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pacprune import bounds
from pacprune.methods.table import METHODS
from pacprune.paper import frame
from pacprune.paper.statistics import interval, paired
from pacprune.types import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
HEADINGS = {METHODS[name].label.split(",")[0]: name for name in METHODS if not name.startswith("pft-")}
NEW_GROUND = {
    "ViT, CIFAR-10": "cifar10-vit",
    "ConvNeXt, CIFAR-10": "cifar10-convnext",
    "wide ResNet, CIFAR-10": "cifar10-wide-resnet",
    "ResNet20, CIFAR-10": "cifar10-resnet20",
    "GPT, characters (loss)": "tinyshakespeare-gpt",
    "LSTM, Fashion-MNIST": "fashion-mnist-lstm",
    "MLP, Fashion-MNIST": "fashion-mnist-mlp",
    "LeNet-5, Fashion-MNIST": "fashion-mnist-lenet5",
    "VGG, CIFAR-10 (untouched)": "cifar10-vgg-untouched",
    "Mixer, CIFAR-10 (untouched)": "cifar10-mixer-untouched",
}
COMPRESSED = {
    "LeNet-5, MNIST": "mnist-lenet5",
    "LeNet-5, Fashion-MNIST": "fashion-mnist-lenet5",
    "ResNet20, CIFAR-10": "cifar10-resnet20",
}
ARMS = {
    "chain, paired": "chain",
    "union bound, paired": "union",
    "chain, two bounds": "separate",
    "union bound, two bounds": "ordinary",
}


def tables(page: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The tables of a page: the headings, and the rows as cells without marks."""
    for block in re.findall(r"(?:^\|.*\|\n)+", (ROOT / page).read_text(), re.MULTILINE):
        lines = [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in block.splitlines()]
        yield lines[0], lines[2:]


def table(page: str, *headings: str) -> list[dict[str, str]]:
    """The rows of the one table that has these headings."""
    (found,) = [(names, rows) for names, rows in tables(page) if set(headings) <= set(names)]
    return [dict(zip(found[0], row, strict=False)) for row in found[1]]


def new_ground(name: str) -> Table:
    return [json.loads(line) for line in (RESULTS / "new-ground" / f"{name}.jsonl").read_text().splitlines()]


def values(rows: Table, **wanted: object) -> dict[int, float]:
    """The errors by seed of the rows with these values, or the losses."""
    same = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return {row["seed"]: row["test_error"] if "test_error" in row else row["validation_loss"] for row in same}


def assert_shown(shown: str, measured: float, where: str) -> None:
    """A number in the text is the measured one, rounded to as many digits as it has."""
    digits = len(shown.partition(".")[2])
    assert abs(float(shown) - measured) <= 0.5 * 10**-digits + 1e-9, (
        f"{where}: {shown} in the text, {measured} measured"
    )


def test_methods_on_new_ground() -> None:
    network, checked = "", 0
    for row in table("docs/tables.md", "network, data", "pruned", "Feather", "AC/DC"):
        network = row["network, data"] or network
        rows, sparsity = new_ground(NEW_GROUND[network]), float(row["pruned"].rstrip(" %")) / 100
        for heading, method in HEADINGS.items():
            if heading not in row or row[heading] == "–":
                continue
            errors = list(values(rows, method=method, sparsity=sparsity).values())
            scale = 1 if "loss" in network else 100
            assert_shown(row[heading], scale * interval(errors).mean, f"{network}, {row['pruned']}, {heading}")
            checked += 1
    assert checked > 280


def test_compress_with_a_guarantee() -> None:
    network, checked = "", 0
    for row in table("docs/certificate_tables.md", "network, data", "promise", *ARMS):
        label = re.sub(r" \(.*", "", row["network, data"])
        network = label or network
        promise = re.fullmatch(r"(drop|disagreement) ≤ ([0-9.]+) %", row["promise"])
        if promise is None:  # several limits at which nothing could be proved
            continue
        rows = frame.read(RESULTS / f"compress-{COMPRESSED[network]}.csv")
        for heading, arm in ARMS.items():
            if not row[heading]:
                continue
            same = [r for r in rows if (r["risk"], r["limit"], r["arm"]) == (promise[1], float(promise[2]) / 100, arm)]
            sparsities = [r["sparsity"] or 0.0 for r in same]
            assert_shown(row[heading], 100 * interval(sparsities).mean, f"{network}, {row['promise']}, {heading}")
            checked += 1
    assert checked > 40


CERTIFICATES = {"held-out, one token": "held_out", "held-out, means": "documents", "Q, by choose": "chosen"}


def test_certificates_of_a_language_model() -> None:
    """The table, and from how many networks on `choose` is lower."""
    rows = frame.read(RESULTS / "choosing-tinyshakespeare-gpt.csv")
    n, checked = "", 0
    for row in table("docs/choosing.md", "n", "certificate", "`choose` is lower from m ="):
        n = row["n"].replace(",", "") or n
        arm = CERTIFICATES[row["certificate"].replace("`", "")]
        same = {r["tried"]: r for r in rows if r["n"] == float(n) and not r["computed"]}
        for heading in ("m = 1", "100", "1,000", "10,000", "1,000,000"):
            tried = float(heading.removeprefix("m = ").replace(",", ""))
            assert_shown(row[heading], same[tried][arm], f"n = {n}, {arm}, {heading}")
            checked += 1
        if arm == "held_out":
            crossing, count = int(row["`choose` is lower from m ="]), int(same[1.0]["pruned_errors"])
            lower, upper = (bounds.clopper_pearson(count, n=int(n), delta=0.05 / m) for m in (crossing - 1, crossing))
            assert lower < same[1.0]["chosen"] <= upper
    assert checked == 60


def test_bounds_that_count_tokens() -> None:
    rows = frame.read(RESULTS / "documents-tinyshakespeare-gpt.csv")
    for row in table("docs/documents.md", "characters of a document", "tokens counted: fails in"):
        length = float(row["characters of a document"].replace(",", ""))
        same = [r for r in rows if r["length"] == length and r["n"] == 100]
        for heading, name in (
            ("ρ", "correlation"),
            ("tokens counted: fails in", "tokens_failures"),
            ("documents: fails in", "documents_failures"),
        ):
            assert_shown(row[heading], interval([r[name] for r in same]).mean, f"{length:g}, {heading}")


def differences(name: str, other: str) -> str:
    """How far PFT is below another method at 98 %, as the README says it."""
    rows = new_ground(name)
    ours, theirs = values(rows, method="pft", sparsity=0.98), values(rows, method=other, sparsity=0.98)
    difference = paired([100 * (theirs[seed] - ours[seed]) for seed in ours])
    return f"{difference.mean:.1f} ± {difference.high - difference.mean:.1f}"


def left(network: str) -> list[str]:
    """The weights that a drop of at most 1 point leaves, in % by seed."""
    rows = frame.read(RESULTS / f"compress-{network}.csv")
    same = [r for r in rows if (r["risk"], r["limit"], r["arm"]) == ("drop", 0.01, "chain")]
    return [f"{100 * (1 - r['sparsity']):.1f}" for r in same]


README: dict[str, Callable[[], bool]] = {
    "10.7 ± 3.6": lambda: differences("cifar10-convnext", "gmp") == "10.7 ± 3.6",
    "5.1 ± 1.2": lambda: differences("cifar10-vit", "gmp") == "5.1 ± 1.2",
    "2.4 ± 1.2 points below": lambda: differences("cifar10-resnet20", "gmp") == "2.4 ± 1.2",
    "15 to 20 % of the weights of a ResNet20": lambda: {"14.9", "20.1"} == set(left("cifar10-resnet20")),
    "1.0 to 1.5 % on MNIST": lambda: {"1.0", "1.5"} == set(left("mnist-lenet5")),
    "to 5.2 % of a LeNet-5 on Fashion-MNIST": lambda: {"2.3", "3.5", "5.2"} == set(left("fashion-mnist-lenet5")),
}


@pytest.mark.parametrize("words", README)
def test_the_readme(words: str) -> None:
    assert words in " ".join((ROOT / "README.md").read_text().split())
    assert README[words]()


def pruned(network: str, arm: str) -> str:
    """The weights pruned at a drop of at most 1 point, in %, mean over the seeds."""
    rows = frame.read(RESULTS / f"compress-{network}.csv")
    same = [r for r in rows if (r["risk"], r["limit"], r["arm"]) == ("drop", 0.01, arm)]
    return f"{100 * interval([r['sparsity'] or 0.0 for r in same]).mean:.1f}"


def certified(dataset: str, model: str, alpha: float, column: str) -> str:
    """A certificate at 90 % pruned, in %, mean over the seeds."""
    rows = frame.read(RESULTS / "certificates.csv")
    where = {"dataset": dataset, "model": model, "sparsity": 0.9, "alpha": alpha}
    same = [row[column] for row in rows if all(row[key] == value for key, value in where.items())]
    return f"{100 * interval(same).mean:.2f}"


def ends(method: str) -> str:
    """The least and the largest mean test error at 98 % on CIFAR-10, over the criteria that a method starts from."""
    rows = frame.read(RESULTS / "pft-vs-osp.csv")
    rows = [r for r in rows if (r["dataset"], r["method"], r["sparsity"]) == ("cifar10", method, 0.98)]
    criteria = {row["criterion"] for row in rows}
    means = [interval([100 * r["test_error"] for r in rows if r["criterion"] == c]).mean for c in criteria]
    return f"{min(means):.1f} and {max(means):.1f}"


NETWORKS = ("cifar10-resnet20", "fashion-mnist-lenet5", "mnist-lenet5")
BEST = (("mnist", "lenet5", 0.6), ("fashion-mnist", "lenet5", 0.8), ("cifar10", "resnet20", 0.8))
FINDINGS: dict[str, Callable[[], list[str]]] = {
    r"(10\.7 ± 3\.6) points less .* (5\.1 ± 1\.2) on a ViT and (2\.4 ± 1\.2)": lambda: [
        differences(f"cifar10-{network}", "gmp") for network in ("convnext", "vit", "resnet20")
    ],
    r"with ([\d.]+) % of the weights of a ResNet20 .* ([\d.]+) % of a LeNet-5 .* and ([\d.]+) % on MNIST": lambda: [
        pruned(network, "chain") for network in NETWORKS
    ],
    r"allows ([\d.]+), ([\d.]+) and ([\d.]+) %": lambda: [pruned(network, "ordinary") for network in NETWORKS],
    r"at most ([\d.]+) % on MNIST \(LeNet-5\), ([\d.]+) % on Fashion.* and ([\d.]+) % on CIFAR-10": lambda: [
        certified(*cell, "held_out_certificate") for cell in BEST
    ],
    r"Those of PAC-Bayes are ([\d.]+), ([\d.]+) and ([\d.]+) %": lambda: [
        certified(*cell, "gibbs_certificate") for cell in BEST
    ],
    r"ends between ([\d.]+ and [\d.]+) % test error.* ends between ([\d.]+ and [\d.]+) %": lambda: [
        ends("osp"),
        ends("pft-coupled"),
    ],
}


@pytest.mark.parametrize("words", FINDINGS)
def test_the_findings(words: str) -> None:
    text = " ".join((ROOT / "docs" / "results.md").read_text().split())
    match = re.search(words, text)
    assert match is not None, words
    assert list(match.groups()) == FINDINGS[words]()


def test_the_comparison_with_other_libraries() -> None:
    rows, checked = frame.read(RESULTS / "peers.csv"), 0
    names = {"torch.nn": "torch.nn.utils.prune", "NNCF": "nncf", "pacprune": "pft"}
    for row in table("docs/peers.md", "method", "LeNet-5"):
        method = next((method for label, method in names.items() if row["method"].startswith(label)), "")
        for heading, network in (("MLP 784-300-100-10", "mlp"), ("LeNet-5", "lenet5")):
            same = [r for r in rows if (r["network"], r["method"], r["judged_on"]) == (network, method, "test")]
            if same:
                errors = interval([100 * r["error"] for r in same])
                assert row[heading] == f"{errors.mean:.2f} ± {errors.high - errors.mean:.2f}"
                checked += 1
    assert checked == 6
