"""Builds the site: the pages of this folder, and the reference, whose pages come from the program itself.

python docs/build.py [FOLDER]: the site is left in FOLDER/site, and what it is made of in FOLDER/pages; else in build.
Every link and every anchor is checked, and the network is not asked for anything.
"""

import ast
import base64
import html
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
SECTIONS = {
    "Prune": "pft Pruner compress layerwise osp gmp dpf imp feather rigl acdc str_ probmask l0 svd together Pruned "
    "Compressed",
    "Train and evaluate": "Config fit keep_zeros error gibbs_error reestimate_batchnorm Budget",
    "Masks": "scores top_k patterns prunable select sparsity apply_mask overlap entropy",
    "Random masks": "SpikeSlab isotropic block_isotropic score_monotone attach read resample_ unmasked harden kl",
    "Certify": "certify_held_out Certificate verify Monitor commit Commitment bounds",
    "PAC-Bayes": "pbp fit_posterior certify choose Certified Choice bounded_cross_entropy",
    "Data and networks": "data models",
    "Deploy": "export slim",
    "Several processes": "ranks",
    "Theory": "linear wide",
}
"""What is documented on which page; a name behind none of them is added to the page "More"."""
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
"""A link to a file of the checkout that is no page: it is laid beside the pages."""
NOTEBOOK = re.compile(r"\]\((\w+)\.ipynb\)")
"""A link to a notebook of this folder, which is a page of the site."""
HEADER = re.compile(r"^(Args|Returns|Raises|Yields|Example|Examples):$")
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
CALL = re.compile(r"pp\.([A-Za-z_][\w.]*)(\(.*\))?", re.DOTALL)


def main(folder: Path) -> None:
    """Writes all pages, and has them made into a site."""
    pages, site = folder / "pages", folder / "site"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("*.py", "*.toml", "*.ipynb", "__pycache__"))
    for notebook in DOCS.glob("*.ipynb"):
        write_notebook(notebook, pages)
    (pages / "reference").mkdir()
    places = write_api(pages / "reference")
    (pages / "reference" / "command-line.md").write_text(command_line())
    (pages / "reference" / "certificate.md").write_text(certificate())
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        (pages / name.lower()).write_text((ROOT / name).read_text().replace("](docs/", "]("))
    outside = set()
    for page in pages.glob("*.md"):
        text = NOTEBOOK.sub(r"](\1.md)", with_links(page.read_text(), places))
        outside |= {link.rstrip("/") for link in OUTSIDE.findall(text)}
        page.write_text(OUTSIDE.sub(beside, text))
    shutil.copy(DOCS / "zensical.toml", folder)
    program = Path(sys.executable).with_name("zensical")
    subprocess.run([program, "build", "--strict", "--clean"], cwd=folder, check=True)
    for page in site.rglob("*.html"):
        page.write_text(with_maths(page.read_text()))
    for path in sorted(outside):
        copy_beside(ROOT / path, site / "files" / path)
    print(f"{site / 'index.html'}; to search it, serve it: python -m http.server -d {site}")


# --- The library, from its docstrings.


def write_api(folder: Path) -> dict[str, str]:
    """One page per section; returns where every name is, from the folder of all pages."""
    import pacprune

    sections = {title: names.split() for title, names in SECTIONS.items()}
    known = {name for names in sections.values() for name in names}
    sections["More"] = [name for name in pacprune.__all__ if name not in known]
    places, lines = {}, ["# API reference", "", "Everything below stands behind `import pacprune as pp`.", ""]
    for title, names in sections.items():
        entries = [entry for name in names if name in pacprune.__all__ for entry in members(name)]
        if not entries:
            continue
        file = f"{title.lower().replace(' ', '-')}.md"
        parts = [f"# {title}", "", *(line for name, value in entries for line in entry_lines(name, value))]
        (folder / file).write_text("\n".join(parts) + "\n")
        places |= {name: f"reference/{file}#{anchor(name)}" for name, _ in entries}
        lines += [f"## {title}", "", "| name | what it is |", "|---|---|"]
        lines += [f"| [`pp.{n}`]({file}#{anchor(n)}) | {cell(first_sentence(v))} |" for n, v in entries]
        lines.append("")
    (folder / "index.md").write_text("\n".join(lines))
    for page in folder.glob("*.md"):
        page.write_text(with_links(page.read_text(), {name: place[10:] for name, place in places.items()}))
    return places


def members(name: str) -> Iterator[tuple[str, Any]]:
    """A name with its value; of a module, the module and all that it holds."""
    import pacprune

    value = getattr(pacprune, name)
    yield name, value
    for inner in value.__all__ if isinstance(value, ModuleType) else ():
        member = getattr(value, inner)
        if inspect.isfunction(member) or inspect.isclass(member):
            yield f"{name}.{inner}", member


def entry_lines(name: str, value: Any) -> list[str]:
    """The lines of one name: its signature, what its docstring says, and the methods of a class."""
    if isinstance(value, ModuleType):
        tables = [n for n in value.__all__ if isinstance(getattr(value, n), dict | tuple | str | int | float)]
        listed = [f"`pp.{name}.{table}`: {table_text(getattr(value, table))}\n" for table in tables]
        return [f"## pp.{name} {{#{anchor(name)}}}", "", *text_lines(doc_of(value)), "", *listed]
    lines = [f"## pp.{name} {{#{anchor(name)}}}", "", "```python", signature(name, value), "```", ""]
    lines += docstring_lines(doc_of(value), value)
    for inner, method in vars(value).items() if inspect.isclass(value) else ():
        function = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        if inner.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        shown = inner if isinstance(method, property) else signature(inner, function)
        heading = f"### {value.__name__}.{inner} {{#{anchor(f'{name}.{inner}')}}}"
        lines += [heading, "", "```python", shown, "```", "", *docstring_lines(doc_of(function), function)]
    return lines


def table_text(value: Any) -> str:
    """What a constant holds: the keys of a table, the value of a number or a word."""
    values = list(value) if isinstance(value, dict | tuple) else [value]
    return ", ".join(f"`{entry}`" for entry in values)


def doc_of(value: Any) -> str:
    """The docstring, without its indentation."""
    return inspect.getdoc(value) or ""


def first_sentence(value: Any) -> str:
    """The first sentence of the docstring."""
    text = " ".join(doc_of(value).split("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s", text)[0].rstrip(":")


def anchor(name: str) -> str:
    """The anchor of a name: pp-fit, pp-data-digits."""
    return f"pp-{name.replace('.', '-').rstrip('_').lower()}"


def definition(value: Any) -> ast.FunctionDef | ast.ClassDef:
    """The definition as it stands in the source."""
    node = ast.parse(inspect.cleandoc("\n" + inspect.getsource(inspect.unwrap(value)))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    return node


def signature(name: str, value: Any) -> str:
    """The call with types and defaults as they stand in the source, one parameter per line where they are many."""
    node = definition(value)
    short = name.rpartition(".")[2] if inspect.isclass(value) else name
    prefix = "" if "." not in name and not hasattr(__import__("pacprune"), name) else "pp."
    if isinstance(node, ast.FunctionDef):
        arguments = [part for part in split_arguments(ast.unparse(node.args)) if part != "self"]
        result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
        result = re.sub(r"Pipeline\[(.*)\]", r"\1", result)
    else:
        arguments, result = class_arguments(node, value), ""
    shown = f"{prefix}{name if prefix else short}({', '.join(arguments)}){result}"
    if len(shown) <= 88:
        return shown
    return f"{prefix}{name if prefix else short}(\n" + "".join(f"    {part},\n" for part in arguments) + f"){result}"


def class_arguments(node: ast.FunctionDef | ast.ClassDef, value: Any) -> list[str]:
    """What a class is made with: the arguments of __init__, or the fields of a dataclass."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return [argument for argument in split_arguments(ast.unparse(part.args)) if argument != "self"]
    fields = getattr(value, "__dataclass_fields__", {})
    parts = [p for p in node.body if isinstance(p, ast.AnnAssign) and isinstance(p.target, ast.Name)]
    return [ast.unparse(p) for p in parts if p.target.id in fields and fields[p.target.id].init]  # type: ignore[attr-defined]


def split_arguments(text: str) -> list[str]:
    """The arguments of a call, cut at the commas that stand in no bracket."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    return [spaced(part) for part in (*parts, text[start:].strip()) if part]


def spaced(argument: str) -> str:
    """An argument with its default, written as people write it: `x: int = 1`, `x=1`."""
    name, equals, default = argument.partition("=")
    return f"{name} = {default}" if equals and ":" in name else argument


def docstring_lines(doc: str, value: Any) -> list[str]:
    """A docstring as Markdown: text, a table of the parameters, what is returned and raised, the example."""
    blocks: dict[str, list[str]] = {"": []}
    title = ""
    for line in doc.split("\n"):
        header = HEADER.match(line)
        title = header[1] if header else title
        blocks.setdefault(title, [])
        if not header:
            blocks[title].append(line)
    lines = text_lines("\n".join(blocks.pop("")))
    for title, body in blocks.items():
        text = inspect.cleandoc("\n" + "\n".join(body))
        lines += ["", f"**{'Parameters' if title == 'Args' else title}**", ""]
        if title in ("Args", "Raises"):
            lines += entry_table(text)
        elif title in ("Example", "Examples"):
            lines += ["```pycon", text, "```"]
        else:
            lines += text_lines(text)
    return [*lines, ""]


def entry_table(text: str) -> list[str]:
    """Lines of `name: what it is`, with their continuations, as a table."""
    rows: list[list[str]] = []
    for line in text.split("\n"):
        named = re.match(r"^(\*{0,2}[\w., ]+): (.*)$", line)
        if named:
            rows.append([named[1], named[2]])
        elif rows:
            rows[-1][1] += " " + line.strip()
    return ["| name | |", "|---|---|", *(f"| `{name}` | {cell(words)} |" for name, words in rows), ""]


def text_lines(text: str) -> list[str]:
    """Paragraphs of a docstring as Markdown; what is indented stays as it is."""
    lines = []
    for paragraph in text.strip("\n").split("\n\n"):
        if paragraph.startswith((">>>", "    ")):
            lines += ["```pycon" if paragraph.startswith(">>>") else "```text", inspect.cleandoc(paragraph), "```", ""]
        else:
            lines += [escaped(paragraph), ""]
    return lines


def cell(text: str) -> str:
    """Text for the cell of a table."""
    return escaped(" ".join(text.split())).replace("|", "\\|")


def escaped(text: str) -> str:
    """Text in which nothing but `code` is marked up."""
    pieces = re.split(r"(`[^`]+`)", text)
    return "".join(
        p if p.startswith("`") else re.sub(r"([*_\[\]])", r"\\\1", html.escape(p, quote=False)) for p in pieces
    )


# --- The command line, and the fields of a certificate.


def command_line() -> str:
    """Every command with its help, as the terminal shows it."""
    from typer.testing import CliRunner

    from pacprune.cli import app

    program, runner = app.build(), CliRunner()
    lines = ["# Command line", "", "`pacprune COMMAND --help` prints the same.", ""]
    lines += ["| command | what it does |", "|---|---|"]
    commands = app.all_commands()
    lines += [f"| [`pacprune {name}`](#pacprune-{name}) | {cell(c.summary)} |" for name, c in commands.items()]
    for name in commands:
        shown = runner.invoke(program, [name, "--help"], prog_name="pacprune", terminal_width=96)
        assert shown.exit_code == 0, shown.output
        lines += ["", f"## pacprune {name}", "", "```text", shown.stdout.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def certificate() -> str:
    """Every field of certificate.json, from the types that describe it."""
    from pacprune.certification import record

    classes = [node for node in ast.parse(inspect.getsource(record)).body if isinstance(node, ast.ClassDef)]
    names = {node.name for node in classes}
    records = [node for node in classes if node.name.endswith("Record") and inherits(node)]
    lines = ["# The certificate, field by field", ""]
    lines += ["A certificate is a folder. Tensors and draws lie in safetensors files, all else in `certificate.json`."]
    lines += ["Its fields are those of one of these:", ""]
    lines += [f"- [{node.name}](#{node.name.lower()}): {escaped(first_line(node))}" for node in records] + [""]
    for node in reversed(classes):
        lines += [f"## {node.name}", "", *text_lines(ast.get_docstring(node) or "")]
        if inherits(node):
            also = ", ".join(f"[{base}](#{base.lower()})" for base in inherits(node))
            lines += [f"It has the fields of {also}" + (", and these:" if fields(node) else "."), ""]
        if fields(node):
            lines += ["| field | type | |", "|---|---|---|"]
        for name, kind, words in fields(node):
            links = ", ".join(f"[{n}](#{n.lower()})" for n in sorted(names) if re.search(rf"\b{n}\b", kind))
            shown = f"`{kind}`".replace("|", r"\|")
            lines.append(f"| `{name}` | {links or shown} | {cell(words)} |")
        lines.append("")
    return "\n".join(lines)


def inherits(node: ast.ClassDef) -> list[str]:
    """The classes whose fields a record has as well."""
    return [name for name in map(ast.unparse, node.bases) if name != "TypedDict"]


def first_line(node: ast.ClassDef) -> str:
    """The first line of a class's docstring."""
    return (ast.get_docstring(node) or "").split("\n")[0]


def fields(node: ast.ClassDef) -> list[tuple[str, str, str]]:
    """Name, type and meaning of the fields that a class declares itself."""
    rows = []
    for part, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            words = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            rows.append((part.target.id, ast.unparse(part.annotation), str(words)))
    return rows


# --- The notebook.


def write_notebook(notebook: Path, folder: Path) -> None:
    """A notebook as a page: its text, its code, and the outputs that are stored in it."""
    lines = []
    for i, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        source = "".join(cell["source"])
        lines += [source, ""] if cell["cell_type"] == "markdown" else ["```python", source, "```", ""]
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                lines += ["```text", "".join(output["text"]).rstrip(), "```", ""]
            elif "image/png" in output["data"]:
                name = f"{notebook.stem}-{i}.png"
                (folder / name).write_bytes(base64.b64decode(output["data"]["image/png"]))
                lines += [f"![What the cell draws]({name})", ""]
    lines += [f"As a notebook: [{notebook.name}](../docs/{notebook.name})"]
    (folder / f"{notebook.stem}.md").write_text("\n".join(lines) + "\n")


# --- What holds for all pages.


def beside(link: re.Match[str]) -> str:
    """The link to a file of the checkout, or to the list of what a folder holds."""
    path = link[1].rstrip("/")
    return f"](files/{path}" + ("/index.html" if (ROOT / path).is_dir() else "")


def copy_beside(source: Path, target: Path) -> None:
    """A file; or a folder, with a page that lists what it holds."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
        return
    if not source.is_dir():
        raise FileNotFoundError(f"a page links to {source}, which does not exist")
    shutil.copytree(source, target, dirs_exist_ok=True)
    for folder in (target, *(path for path in target.rglob("*") if path.is_dir())):
        names = sorted(
            path.name + "/index.html" * path.is_dir() for path in folder.iterdir() if path.name != "index.html"
        )
        rows = "".join(f'<li><a href="{name}">{name.removesuffix("/index.html")}</a></li>' for name in names)
        (folder / "index.html").write_text(f"<title>{folder.name}</title><ul>{rows}</ul>")


def with_links(text: str, places: dict[str, str]) -> str:
    """`pp.name` in the text becomes a link to its reference; links, headings and blocks of code stay as they are."""
    pieces = re.split(
        r"(^```.*?^```$|^#[^\n]*$|!?\[[^\]]*\]\([^)]*\)|^\[[^\]]+\]: [^\n]*$)", text, flags=re.DOTALL | re.MULTILINE
    )
    return "".join(
        piece if i % 2 else CODE.sub(lambda code: linked(code, places), piece) for i, piece in enumerate(pieces)
    )


def linked(code: re.Match[str], places: dict[str, str]) -> str:
    """A piece of code, as a link where it is a name of the library or a call of it."""
    call = CALL.fullmatch(code[2])
    place = places.get(call[1]) if call else None
    return f"[{code[0]}]({place})" if place else code[0]


def with_maths(text: str) -> str:
    """TeX as MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert

    def drawn(match: re.Match[str]) -> str:
        block = match[1] == "div"
        return convert(html.unescape(match[2]), display="block" if block else "inline")

    return re.sub(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', drawn, text, flags=re.DOTALL)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build").resolve())
