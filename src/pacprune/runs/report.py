"""report.html: one file that explains a run to any reader; no script, nothing from the network."""

import base64
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table

from pacprune import bounds
from pacprune.bounds import Ledger
from pacprune.bounds.numeric import rounded_up
from pacprune.certification.bounds_table import BOUNDS
from pacprune.certification.certificate import RECORD, Certificate, test_line
from pacprune.files import write_atomically
from pacprune.methods.table import METHODS
from pacprune.runs import options as opt
from pacprune.runs import plots, store
from pacprune.runs.plots import percent, percent_up

OF_DRAWN = {
    "Sparsity": " (of a network drawn by pbp: the expected one)",
    "Test error": " (of pbp: the mean over networks drawn at random)",
}
"""What is added to MEANINGS where a network is drawn."""
COLUMNS = {
    "method": "Method",
    "sparsity": "Sparsity",
    "test_error": "Test error",
    "certificate": "Certificate",
    "held_out": "Held-out baseline",
}
MEANINGS = {
    "Sparsity": "the weights that are zero, in % of all that can be pruned",
    "Test error": "wrong answers on the test part, which is set apart from training",
    "Certificate": "a proved upper bound on the error rate on new data: it holds before any test data are seen",
    "Held-out baseline": "the simplest proof, to judge the certificate by: an exact binomial (Clopper-Pearson) bound "
    "for the prior's thresholded network on the same examples",
}


def write(folder: Path, result: dict[str, Any], *, out: Path | None = None) -> Path:
    """Draws the figures of a run folder and writes report.html beside them, in the folder itself or in `out`."""
    command, options = store.read_config(folder)
    out = folder if out is None else out
    drawn = plots.draw(folder, result, out)
    figures = {figure.name: _figure(figure) for figure in drawn}
    proof = figures.pop("certificate", "")
    certificate = plots.certificate_of(folder)
    body = [
        f"<h1>{_title(command, result)}</h1>",
        f'<p id="summary">{escape(_summary(result))}</p>',
        f'<p id="steps">{escape(METHODS[command].steps)}</p>' if _has_steps(command) else "",
        _promise(result, figures) if store.COMPRESSED in result else "",
        _table(result["rows"], result.get("test_examples")),
        figures.pop("methods", ""),
        _certificate(certificate, folder, out, result) if certificate else "",
        proof,
        *figures.values(),
        "" if all(figure.png for figure in drawn) else f"<p>{escape(plots.HINT)}</p>",
        _next(command, os.path.relpath(folder, out), folder / "model.safetensors", result),
        _reproduction(command, options, result),
    ]
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pacprune: {escape(_title(command, result))}</title>
<style>{_STYLE}</style>
</head>
<body><main>
{chr(10).join(part for part in body if part)}
</main></body>
</html>
"""
    write_atomically(out / "report.html", page.encode())
    return out / "report.html"


def _promise(result: dict[str, Any], figures: dict[str, str]) -> str:
    """The compressed network of the demo: what is proved of it, and the chain that it is the last of."""
    proved, chain = result[store.COMPRESSED], figures.pop("compression", "")
    check = "<p>A colleague checks it, in the folder of this report:</p>" if proved["passed"] else ""
    command = f'<pre id="verify-compressed">pacprune verify {store.COMPRESSED}</pre>' if proved["passed"] else ""
    return (
        f'<section><h2>As small as the promise allows</h2><blockquote id="promise">{escape(proved["statement"])}'
        f"</blockquote>{check}{command}{chain}<h2>Three ways to prune to 90 %</h2></section>"
    )


_TITLES = {
    "demo": "A network that keeps its promise, and three ways to prune",
    "compress": "The sparsest network that provably keeps its limit",
}


def _title(command: str, result: dict[str, Any]) -> str:
    if result.get("passed") == 0:
        return "No network of the chain is proved to keep the limit"
    return _TITLES[command] if command in _TITLES else METHODS[command].title


def _has_steps(command: str) -> bool:
    return command in METHODS and bool(METHODS[command].steps)


def _meaning(method: str) -> str:
    """What a row of the table is."""
    return "the network before pruning" if method == "dense" else f"{METHODS[method].title}: {METHODS[method].sentence}"


def columns(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Key and title of the columns in which at least one row has a value."""
    return {key: title for key, title in COLUMNS.items() if any(row[key] is not None for row in rows)}


def cell(name: str, value: Any) -> str:
    """One cell of the table: four decimals, certificates rounded up, a dash for None."""
    if value is None:
        return "–"
    if name in ("certificate", "held_out"):
        return rounded_up(value)
    return escape(value) if isinstance(value, str) else f"{value:.4f}"


def _summary(result: dict[str, Any]) -> str:
    rows = {row["method"]: row for row in result["rows"]}
    wrong = ", ".join(f"{name} {percent(row['test_error'])}" for name, row in rows.items())
    lines = [result["headline"]] if "headline" in result else []
    if "kept" in result:
        lines.append(f"{result['kept']:,} of {result['total']:,} weights are left.")
    lines.append(f"Wrong answers on the test part: {wrong}.")
    lines += leaked(result)
    if "pbp" in rows:
        bound = percent_up(rows["pbp"]["certificate"])
        lines.append(f"For a network drawn by pbp, the error rate on new data is certified to be at most {bound}.")
    return " ".join(lines)


def leaked(result: dict[str, Any]) -> list[str]:
    """A sentence about test examples that are among those of training; none where there are none."""
    test = result.get("test", {"copies": 0})  # which older runs do not have
    if not test["copies"]:
        return []
    words = f"{test['copies']:,} of the {test['size']:,} test examples are also among the training data"
    so = ", so that the test errors have leaked" if test["copies"] * 100 > test["size"] else ""
    return [f"{words}{so}."]


def _table(rows: list[dict[str, Any]], examples: int | None) -> str:
    titles = columns(rows)
    head = "".join(f"<th>{title}</th>" for title in titles.values())
    lines = []
    for row in rows:
        cells = "".join(f"<td>{_shown(name, row, examples)}</td>" for name in titles if name != "method")
        lines.append(f"<tr><th>{escape(row['method'])}<small>{_meaning(row['method'])}</small></th>{cells}</tr>")
    added = OF_DRAWN if any(METHODS[row["method"]].certifies for row in rows if row["method"] in METHODS) else {}
    meanings = "".join(
        f"<dt>{t}</dt><dd>{sentence(MEANINGS[t] + added.get(t, ''))}</dd>" for t in titles.values() if t in MEANINGS
    )
    chance = f"<p><small>{_CHANCE}</small></p>" if examples else ""
    return (
        f'<div class="wide"><table id="results"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>{chance}<dl>{meanings}</dl>"
    )


_CHANCE = (
    "Small below a test error: the wrong examples, and the 95 % interval (Clopper-Pearson) for the error rate on new "
    "data. Networks whose intervals overlap widely cannot be told apart by this test part."
)


def _shown(name: str, row: dict[str, Any], examples: int | None) -> str:
    """A cell of the table, in percent; a test error that counts examples has its interval."""
    value = row[name]
    if value is None:
        return "–"
    if name in ("certificate", "held_out"):
        return percent_up(value)
    drawn = row["method"] in METHODS and METHODS[row["method"]].certifies  # its error is a mean over networks
    if name != "test_error" or not examples or drawn:
        return percent(value)
    wrong = round(value * examples)
    high = bounds.clopper_pearson(wrong, n=examples, delta=0.025)
    low = 1.0 - bounds.clopper_pearson(examples - wrong, n=examples, delta=0.025)
    return f"{percent(value)}<small>{wrong:,} of {examples:,}<br>{100 * low:.1f} to {100 * high:.1f} %</small>"


def _certificate(c: Certificate, folder: Path, out: Path, result: dict[str, Any]) -> str:
    place = os.path.relpath(folder / store.CERTIFICATE, out)
    record = _attached(RECORD, "application/json", (folder / store.CERTIFICATE / RECORD).read_bytes(), RECORD)
    facts = [*_facts(c), *([sentence(result["tries"]["text"])] if "tries" in result else [])]
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    assumed = "".join(f"<li>{escape(sentence(line))}</li>" for line in c.record["assumptions"])
    return (
        f'<section><h2>The certificate</h2><blockquote id="statement">{escape(c.statement)}</blockquote>'
        f'{_bounds(c) if c.record["kind"] == "pac-bayes" else ""}<ul id="facts">{items}</ul>'
        f'<h3>What is assumed</h3><ul id="assumptions">{assumed}</ul>'
        "<h3>How to check it</h3><p>In the folder of this report:</p>"
        f'<pre id="verify">pacprune verify {escape(place)}</pre>'
        f"<p>All numbers and hashes: {record}</p></section>"
    )


def _bounds(c: Certificate) -> str:
    """Which certificate wins, and the table of all of them."""
    rows = []
    for name, bound in BOUNDS.items():
        if name in c.bounds:
            claimed = name == c.record["claim"]["family"]
            head = f"<strong>{bound.label}</strong><small>the claim</small>" if claimed else bound.label
            spent = str(Ledger.from_dict(c.record["bounds"][name]["ledger"])).partition(" = ")[2]
            if name == "held_out":
                spent = spent.replace("PAC-Bayes", "Clopper-Pearson")
            rows.append(f"<tr><th>{head}</th><td>{percent_up(c.bounds[name])}</td><td>{spent}</td></tr>")
    return (
        f'<p id="winner"><strong>{escape(sentence(c.winner))}</strong></p>'
        '<div class="wide"><table id="bounds"><thead><tr><th>Bound</th><th>Error rate on new data, at most</th>'
        f"<th>What its delta of {c.ledger.delta:g} pays for</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"</div><p><small>{_CHOICE}</small></p>"
    )


_CHOICE = (
    "The claim was declared before the bound examples were counted. Each other bound is valid by itself, with the same "
    "probability, if it was declared beforehand. They do not hold all at once: to choose the lowest one afterwards, "
    "divide delta among them first."
)


def _facts(c: Certificate) -> Iterator[str]:
    record, split = c.record, c.record["split"]
    if record["kind"] == "risk":
        yield from (sentence(test_line(test)) for test in record["tests"])
    elif record["kind"] == "held-out":
        yield (
            f"{record['reference']['errors']} mistakes on the {c.n:,} bound examples, which no training has seen; by "
            f"Clopper and Pearson's bound, at delta {c.ledger.delta_each:g}."
        )
    else:
        estimate, single, flat = record["monte_carlo"]["posterior"], record["single_draw"], record["thresholded"]
        yield (
            f"Empirical risk {c.risk:.4f}: the mean error of {c.draws:,} networks drawn from Q, each on its own random "
            f"{record['monte_carlo']['batch']} of the {c.n:,} bound examples; with Monte-Carlo uncertainty, at most "
            f"{rounded_up(c.risk_upper)} (by Chernoff's bound, {rounded_up(estimate['chernoff'])})."
        )
        yield (
            f"KL(Q||P) = {c.kl:.3f} nats: how far the posterior Q moved from the prior P. P was made from "
            f"{split['sizes']['prior']:,} other examples and written to disk before the bound examples were read."
        )
        yield (
            f"Held-out baseline: {record['reference']['errors']} mistakes of the thresholded prior on the same "
            f"{c.n:,} examples."
        )
        yield (
            f"Networks to deploy, with ordinary weights: single_draw.safetensors (sparsity {single['sparsity']:.4f}, "
            f"{single['errors']} mistakes on the bound examples) and thresholded.safetensors (sparsity "
            f"{flat['sparsity']:.4f}, {flat['errors']} mistakes; it differs from draws of Q on {flat['disagreements']} "
            f"of {flat['inputs']} unlabelled inputs)."
        )
    yield (
        f"{split['duplicates']} bound examples also occur among the {split['sizes']['prior']:,} of S_P, and "
        f"{split['repeats']} are copies of others."
    )


def sentence(words: str) -> str:
    """The words with a capital letter and a full stop."""
    return words[0].upper() + words[1:] + "."


def _figure(figure: plots.Figure) -> str:
    image = ""
    if figure.png is not None:
        content = base64.b64encode(figure.png.read_bytes()).decode()
        image = f'<img alt="{escape(figure.caption)}" src="data:image/png;base64,{content}">'
    link = _attached(figure.csv.name, "text/csv", figure.csv.read_bytes(), "data (CSV)")
    caption = f"<figcaption>{escape(figure.caption)} {link}</figcaption>"
    return f'<figure id="{figure.name}"><div class="wide">{image}</div>{caption}</figure>'


def _attached(name: str, kind: str, content: bytes, words: str) -> str:
    """A link to a file that is in the page itself, so that the page can be mailed alone."""
    return f'<a download="{name}" href="data:{kind};base64,{base64.b64encode(content).decode()}">{words}</a>'


def _next(command: str, place: str, network: Path, result: dict[str, Any]) -> str:
    """How large the network is, and what can be done with it; for the command of a method."""
    if command not in METHODS or not network.exists() or "kept" not in result:
        return ""
    lines = [
        f"pacprune export {escape(place)} --out small.safetensors",
        f"pacprune profile {escape(place)}",
    ]
    return (
        f"<section><h2>What to do with it</h2><p>model.safetensors has {network.stat().st_size:,} bytes, zeros "
        "included. The first command writes the weights that are left alone; the second measures what each form of the "
        f'network takes in bytes and time. In the folder of this report:</p><pre id="next">{chr(10).join(lines)}</pre>'
        "</section>"
    )


def _reproduction(command: str, options: Any, result: dict[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{name}</th><td>{escape(str(value))}</td></tr>"
        for name, value in opt.identity(options).items()
        if value is not None
    )
    for name, key in (
        ("network (SHA-256 of its state dict's shapes)", "architecture"),
        ("data files (SHA-256)", "files"),
    ):
        if key in result:
            rows += f"<tr><th>{name}</th><td>{escape(_hashes(result[key]))}</td></tr>"
    return (
        "<section><h2>How to do it again</h2>"
        f'<pre id="command">{escape(opt.command_line(command, options))}</pre>'
        f"<details><summary>Every option of this run</summary><table>{rows}</table></details>"
        f"<p><small>pacprune {escape(result['version'])}, torch {escape(result['torch'])}</small></p></section>"
    )


def _hashes(value: str | dict[str, str]) -> str:
    return value if isinstance(value, str) else ", ".join(f"{name} {digest}" for name, digest in value.items())


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #5b6675; --paper: #ffffff; --line: #d8dee6; --tint: #f3f6fa;
  --mark: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #a3adba; --paper: #15191f; --line: #343c47;
  --tint: #1e242c; --mark: #6cb8e6; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 52rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .75rem; } h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
a { color: var(--mark); } small { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .75rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child { text-align: left; } #bounds th { font-weight: normal; } #bounds td:last-child { color: var(--soft); }
#bounds thead th { font-weight: 600; } tbody small { display: block; font-weight: normal; max-width: 22rem; }
#summary { font-size: 1.1rem; } #results td { white-space: nowrap; }
@media (max-width: 600px) { th, td { padding: .4rem .35rem; } #results { font-size: .85rem; } }
thead th { border-bottom: 2px solid var(--ink); }
details table { width: auto; } details td { text-align: left; } details th { font-weight: normal; color: var(--soft); }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; color: var(--soft); }
blockquote { margin: 0; padding: .9rem 1.1rem; background: var(--tint); border-left: 4px solid var(--mark); }
figure { margin: 2.25rem 0; } figcaption { color: var(--soft); margin-top: .5rem; }
img { display: block; max-width: 100%; min-width: 34rem; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; padding: 8px; box-sizing: border-box; }
pre { background: var(--tint); padding: .8rem 1rem; overflow-x: auto; border-radius: 6px; }
"""


def console_output(result: dict[str, Any]) -> Iterator[Any]:
    """The table of a run, the statement of its certificate with the count of tries, and the path of its report."""
    names = columns(result["rows"])
    table = Table(*names.values())
    for row in result["rows"]:
        table.add_row(*(cell(name, row[name]) for name in names))
    yield table
    yield from leaked(result)
    if "headline" in result:
        yield result["headline"]
    if "statement" in result:
        tries = [result["tries"]["text"]] if "tries" in result else []
        winner = [sentence(result["winner"])] if "winner" in result else []
        statement = [result["statement"]] if result["statement"] != result.get("headline") else []
        yield "\n".join([*statement, *tries, *winner])
    folder = Path(result["folder"])
    yield f"Report: {folder / 'report.html'}"
    if not list(folder.glob("figures/*.png")):
        yield plots.HINT
