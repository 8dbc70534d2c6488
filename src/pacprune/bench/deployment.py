"""The network of a finished run, or of a folder of transformers: its file in every format, and what every form costs.

That is bytes, FLOPs and CPU latency; of a language model, bytes and the time of one window of tokens.
"""

import copy
import math
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from pacprune import models
from pacprune.bench import timing
from pacprune.data.datasets import DATA_SETS
from pacprune.deploy import export as formats
from pacprune.deploy import slim
from pacprune.imports import extra
from pacprune.integrations import pretrained
from pacprune.masking import patterns, weights
from pacprune.runs import store
from pacprune.types import Progress, check_name

BATCHES = (1, 256)
BLOCK = 4
"""Side of the blocks of the BSR form, where the layer can be divided by it."""
WINDOW = 128
"""Tokens that a language model reads at once, if it reads as many."""
NOT_MEASURED = (
    "Not measured: generation token by token, since these files return no keys and values to go on from; and GPUs, for "
    "which there is pacprune bench pattern --device cuda."
)
CPU = torch.device("cpu")

Network = Callable[[Tensor], Any]


def network(folder: Path, *, model: str | None = None) -> tuple[nn.Module, Tensor]:
    """The network of a finished run, in eval mode, and a batch of noise as its input.

    A factory that is not pacprune's own is called if `model` names it as well.
    """
    _, options = store.read_config(folder)
    store.check_code(folder, options, model=model)
    result = store.result(folder)
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ValueError(f"{folder} holds no {path.name}: name the folder of one finished run, not of the demo")
    shape, dtype, classes = _sizes(folder, options.data, result)
    x = torch.randn(max(BATCHES), *shape, generator=torch.Generator().manual_seed(0))
    net = models.build_for(options.model, shape, classes)
    store.read_model(path, net)
    return net.eval(), x if dtype == "float32" else torch.zeros_like(x, dtype=getattr(torch, dtype))


def _sizes(folder: Path, data: str, result: dict[str, Any]) -> tuple[tuple[int, ...], str, int]:
    """Shape and type of an example and the number of classes, without the data, which may not be here."""
    if "input" in result:
        return tuple(result["input"]["shape"]), result["input"]["dtype"], result["classes"]
    check_name(f"in {folder / 'config.toml'}, data", data, DATA_SETS)  # the result of an older version
    return DATA_SETS[data].shape, "float32", DATA_SETS[data].classes


def export(run: Path, *, format: str, out: Path | None = None, model: str | None = None) -> dict[str, Any]:
    """Writes the network of a finished run to `out`, or into its folder, in one of the formats of `pacprune.export`."""
    check_name("format", format, formats.FORMATS)
    path = run / formats.FORMATS[format].file if out is None else out
    if _is_pretrained(run, model):
        net, pattern = pretrained.load(run), None
        x, details = _pretrained_example(net, format)
    else:
        (net, x), details = network(run, model=model), ""
        pattern = getattr(store.read_config(run)[1], "pattern", None)  # pbp has none
    if not path.parent.is_dir():
        raise ValueError(f"{path} lies in {path.parent}, which is no folder; make it first, or choose another --out")
    sentence = formats.write(path, net, format=format, example=x, pattern=pattern) + details
    return {"run": str(run), "format": format, "file": str(path), "bytes": path.stat().st_size, "said": sentence}


def _is_pretrained(folder: Path, factory: str | None) -> bool:
    """Whether a folder is one of transformers, and no run; refused if it is neither, or needs no factory."""
    if (folder / store.CONFIG).is_file() or not folder.is_dir():  # the run's own errors say more
        return False
    if not pretrained.is_folder(folder):
        raise ValueError(
            f"{folder} holds no {store.CONFIG}, so it is not a run folder, and no {pretrained.CONFIG}, so it is none "
            "of transformers; name one, such as runs/demo"
        )
    if factory is not None:
        raise ValueError(
            f"model={factory!r} makes the network of a run, but {folder} is one of transformers, whose "
            f"{pretrained.CONFIG} says what it is; leave it out"
        )
    return True


def _pretrained_example(model: Any, format: str) -> tuple[formats.slim.Inputs, str]:
    """What the network is traced with, and what the sentence about its file adds; ONNX gets a mask of padding, too."""
    if format not in ("onnx", "slim"):
        return torch.zeros(1, 1), ""
    tokens = pretrained.example(model, length=WINDOW)
    if format == "slim":
        return tokens, ""
    details = ""
    if any(parameter.dtype == torch.bfloat16 for parameter in model.parameters()):
        model.float()
        details = ", in float32, since onnxruntime has no bfloat16 on a CPU"
    return {pretrained.TOKENS: tokens, pretrained.MASK: torch.ones_like(tokens)}, details


def profile(
    run: Path, *, seconds: float = 5.0, model: str | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Bytes, FLOPs per example and CPU latency of every form, next to the dense one's; `seconds` per batch size.

    A latency ratio is the median over rounds in which all forms are timed in turn, its spread their middle half.
    """
    if _is_pretrained(run, model):
        return _profile_tokens(run, seconds=seconds, progress=progress)
    net, x = network(run, model=model)
    rows, notes, forms = _forms(net, x)
    with torch.inference_mode():
        expected = net(x)
        for name, form in forms.items():
            rows[name]["difference"] = float((torch.as_tensor(form(x)) - expected).abs().max())
        for number, batch in enumerate(BATCHES):
            if progress:
                progress("profile", number, len(BATCHES), {})
            calls = {name: partial(form, x[:batch]) for name, form in forms.items()}
            times = timing.alternate(calls, CPU, seconds=seconds)
            for name in forms:
                rows[name]["latency"].append({"batch": batch} | _compared(times, name))
    if progress:
        progress("profile", len(BATCHES), len(BATCHES), {})
    return {
        "run": str(run),
        "sparsity": weights.sparsity(net),
        "weights": weights.total(net),
        "environment": timing.environment(CPU),
        "rows": list(rows.values()),
        "notes": notes,
    }


def _compared(times: timing.Times, name: str) -> dict[str, Any]:
    """The time of a form, and its ratio to the dense one's in the same round."""
    low, ratio, high = np.quantile(times.seconds[name] / times.seconds["dense"], (0.25, 0.5, 0.75)).tolist()
    return {"ms": times.median(name) * 1e3, "ratio": ratio, "spread": [low, high], "gain": high < 1}


def render(result: dict[str, Any]) -> Iterator[Any]:
    """The machine, the table, and the notes."""
    machine = result["environment"]
    yield (
        f"{result['weights']:,} weights, sparsity {result['sparsity']:.4f}; {machine['device']}, "
        f"{machine['threads']} threads, torch {machine['torch']}; "
        "latency: median, and ratio to dense [middle half of the rounds]"
    )
    yield _tokens_table(result) if "window" in result else _table(result)
    yield from result["notes"]


def _table(result: dict[str, Any]) -> Table:
    dense = result["rows"][0]
    table = Table("Form", "Bytes on disk", "FLOPs", *(f"Latency, batch {batch}" for batch in BATCHES))
    for row in result["rows"]:
        times = [_latency(latency, row is dense) for latency in row["latency"]]
        table.add_row(
            row["form"],
            _number(row["bytes"], dense["bytes"], row is dense),
            _number(row["flops"], dense["flops"], row is dense),
            *(times or ["" for _ in BATCHES]),
        )
    return table


def _tokens_table(result: dict[str, Any]) -> Table:
    dense = result["rows"][0]
    table = Table("Form", "Bytes on disk", f"Latency, 1 x {result['window']} tokens", "Tokens per second")
    for row in result["rows"]:
        (latency,) = row["latency"] or [None]
        table.add_row(
            row["form"],
            _number(row["bytes"], dense["bytes"], row is dense),
            "" if latency is None else _latency(latency, row is dense),
            "" if latency is None else f"{latency['tokens_per_second']:,.0f}",
        )
    return table


def _number(value: int | None, dense: int, is_dense: bool) -> str:
    if value is None or is_dense:
        return "" if value is None else f"{value:,}"
    return f"{value:,}, " + (f"{value / dense:.1%}" if value < dense else "no gain")


def _latency(latency: dict[str, Any], is_dense: bool) -> str:
    if is_dense:
        return f"{latency['ms']:.3g} ms"
    low, high = latency["spread"]
    text = f"{latency['ms']:.3g} ms, {latency['ratio']:.2f} [{low:.2f}, {high:.2f}]"
    return text if latency["gain"] else f"{text}, no gain"


def _forms(model: nn.Module, x: Tensor) -> tuple[dict[str, dict[str, Any]], list[str], dict[str, Network]]:
    """Rows without latencies, notes, and the networks to time, dense first."""
    forms: dict[str, Network] = {"dense": model}
    rows, notes = {}, []
    dense_flops = slim.flops(model, x[:1])
    slimmed = slim.slim(model, x)
    notes.append(f"slim: {slimmed}.")

    def add_row(form: str, size: int | None, flops: int | None) -> None:
        rows[form] = {"form": form, "bytes": size, "flops": flops, "latency": []}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        formats.save_dense(path, model)
        add_row("dense", path.stat().st_size, dense_flops)
        formats.save(path, model)
        add_row("packed", path.stat().st_size, None)
        for name, convert in (("CSR", _csr), ("BSR", _bsr)):
            try:
                forms[name] = sparse = _sparse(model, convert)
                sparse(x[:2])
                add_row(name, None, dense_flops - _skipped_flops(sparse))
            except (RuntimeError, NotImplementedError) as error:
                forms.pop(name, None)
                notes.append(f"{name}: not here, since torch says: {str(error).splitlines()[0]}")
        formats.save_program(path, slimmed.model, x)
        add_row("slim", path.stat().st_size, slimmed.flops[1])
        forms["slim"] = slimmed.model
        try:
            for name, form in (("ONNX", model), ("slim ONNX", slimmed.model)):
                formats.save_onnx(path, form, x)
                forms[name] = _session(path)
                add_row(name, path.stat().st_size, None)
        except ValueError as error:
            notes.append(f"ONNX: not measured: {error}")
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
        notes.append("CSR and BSR: in Linear layers alone; torch has no sparse convolution, so these stay dense.")
    return rows, notes, forms


def _session(path: Path) -> Network:
    """onnxruntime on as many threads as torch has."""
    runtime = extra("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(["output"], {"input": x.numpy()})[0]


class _SparseLinear(nn.Module):
    """y = x W^T + b with a sparse W, as W x^T: torch multiplies sparse by dense, not dense by sparse."""

    def __init__(self, layer: nn.Linear, convert: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.bias = convert(layer.weight.detach()), layer.bias
        stored = self.weight.values().numel()
        self.skipped_flops = 2 * (layer.weight.numel() - stored)

    def forward(self, x: Tensor) -> Tensor:
        y = (self.weight @ x.reshape(-1, x.shape[-1]).T).T
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], -1)


def _csr(weight: Tensor) -> Tensor:
    return weight.to_sparse_csr()


def _bsr(weight: Tensor) -> Tensor:
    side = math.gcd(BLOCK, *weight.shape)
    return weight.to_sparse_bsr((side, side))


def _sparse(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy in which every Linear layer that has zeros has a sparse weight."""
    sparse = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse tensors are in beta state
        for name, layer in list(sparse.named_modules()):
            if isinstance(layer, nn.Linear) and not bool(layer.weight.all()):
                owner, _, attribute = name.rpartition(".")
                setattr(sparse.get_submodule(owner), attribute, _SparseLinear(layer, convert))
    return sparse


def _skipped_flops(model: nn.Module) -> int:
    """FLOPs per example that the sparse layers skip."""
    return sum(module.skipped_flops for module in model.modules() if isinstance(module, _SparseLinear))


# --- A language model.


def _profile_tokens(folder: Path, *, seconds: float, progress: Progress | None) -> dict[str, Any]:
    """Bytes of every form of the network in a folder, and the time of one window of tokens."""
    model = pretrained.load(folder)
    x = pretrained.example(model, length=WINDOW)
    result = {
        "run": str(folder),
        "sparsity": weights.sparsity(model),
        "weights": weights.total(model),
        "window": x.shape[1],
        "environment": timing.environment(CPU),
    }
    stored = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    notes = [_pattern_note(model)]
    if stored != {"float32"}:
        notes.append(f"The files hold {' and '.join(sorted(stored))}; timed, and written as ONNX, in float32.")
    rows, forms = _token_forms(folder, model, x, notes)
    if progress:
        progress("profile", 0, 1, {})
    with torch.inference_mode():
        expected = forms["dense"](x)
        for name, form in forms.items():
            rows[name]["difference"] = float((torch.as_tensor(form(x)) - expected).abs().max())
        times = timing.alternate({name: partial(form, x) for name, form in forms.items()}, CPU, seconds=seconds)
    for name in forms:
        speed = {"batch": 1, "tokens_per_second": x.shape[1] / times.median(name)}
        rows[name]["latency"].append(speed | _compared(times, name))
    if progress:
        progress("profile", 1, 1, {})
    return result | {"rows": list(rows.values()), "notes": [*notes, NOT_MEASURED]}


def _token_forms(
    folder: Path, model: Any, x: Tensor, notes: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, Network]]:
    """Rows without latencies, and the networks to time, dense first; says in `notes` what is not there."""
    files = _weight_files(folder)
    sizes = {"dense": sum(file.stat().st_size for file in files), "dense, gzip": _gzipped(files)}
    forms: dict[str, Network] = {}
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "file"
        formats.save(path, model)
        sizes["packed"] = path.stat().st_size
        model.float()
        forms["dense"] = partial(_first_output, model)
        try:
            sparse = _sparse(model, _csr)
            if any(isinstance(module, _SparseLinear) for module in sparse.modules()):
                forms["CSR"] = partial(_first_output, sparse)
                notes.append("CSR: in Linear layers alone, in torch.")
        except (RuntimeError, NotImplementedError) as error:
            notes.append(f"CSR: not here, since torch says: {str(error).splitlines()[0]}")
        try:
            formats.save_onnx(path, model, x)
            sizes["ONNX"], forms["ONNX"] = path.stat().st_size, _session(path)
        except ValueError as error:
            notes.append(f"ONNX: not measured: {error}")
    names = dict.fromkeys([*sizes, *forms])
    return {name: {"form": name, "bytes": sizes.get(name), "latency": []} for name in names}, forms


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights; others may lie beside them, such as exports."""
    return sorted([*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")])


def _gzipped(files: list[Path]) -> int:
    """Bytes of files that gzip compresses, at its usual level."""
    total = 0
    for file in files:
        packer = zlib.compressobj(wbits=31)
        with file.open("rb") as content:
            while chunk := content.read(2**20):
                total += len(packer.compress(chunk))
        total += len(packer.flush())
    return total


def _first_output(model: nn.Module, x: Tensor) -> Tensor:
    """The scores that a network of transformers gives for tokens, without keys and values."""
    with slim.without_cache(model):
        return next(iter(model(x).values()))


def _pattern_note(model: nn.Module) -> str:
    """How many layers a GPU's sparse kernels could take."""
    n, m = patterns.KERNEL
    rows = {}  # of a Linear layer and of GPT-2's Conv1D, which has them as columns
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            rows[name] = module.weight
        elif type(module).__name__ == "Conv1D":
            rows[name] = module.weight.T
    fitting = sum(weight.shape[1] % m == 0 and patterns.follows(weight, n, m) for weight in rows.values())
    return f"2:4: {fitting} of {len(rows)} linear layers follow it."
