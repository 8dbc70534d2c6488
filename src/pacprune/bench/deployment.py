"""The network of a finished run: its file in every format, and the size, FLOPs and CPU latency of every form."""

import copy
import math
import tempfile
import warnings
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
from pacprune.masking import weights
from pacprune.runs import store
from pacprune.types import Progress, check_name

BATCHES = (1, 256)
BLOCK = 4
"""Side of the blocks of the BSR form, where the layer can be divided by it."""
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
    net, x = network(run, model=model)
    path = run / formats.FORMATS[format].file if out is None else out
    if not path.parent.is_dir():
        raise ValueError(f"{path} lies in {path.parent}, which is no folder; make it first, or choose another --out")
    pattern = getattr(store.read_config(run)[1], "pattern", None)  # pbp has none
    sentence = formats.write(path, net, format=format, example=x, pattern=pattern)
    return {"run": str(run), "format": format, "file": str(path), "bytes": path.stat().st_size, "said": sentence}


def profile(
    run: Path, *, seconds: float = 5.0, model: str | None = None, progress: Progress | None = None
) -> dict[str, Any]:
    """Bytes, FLOPs per example and CPU latency of every form, next to the dense one's; `seconds` per batch size.

    A latency ratio is the median over rounds in which all forms are timed in turn, its spread their middle half.
    """
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
                low, ratio, high = np.quantile(times.seconds[name] / times.seconds["dense"], (0.25, 0.5, 0.75)).tolist()
                latency = {"batch": batch, "ms": times.median(name) * 1e3, "ratio": ratio, "spread": [low, high]}
                rows[name]["latency"].append(latency | {"gain": high < 1})
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


def render(result: dict[str, Any]) -> Iterator[Any]:
    """The machine, the table, and the notes."""
    machine = result["environment"]
    yield (
        f"{result['weights']:,} weights, sparsity {result['sparsity']:.4f}; {machine['device']}, "
        f"{machine['threads']} threads, torch {machine['torch']}; "
        "latency: median, and ratio to dense [middle half of the rounds]"
    )
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
    yield table
    yield from result["notes"]


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
        y = (self.weight @ x.T).T
        return y if self.bias is None else y + self.bias


def _csr(weight: Tensor) -> Tensor:
    return weight.to_sparse_csr()


def _bsr(weight: Tensor) -> Tensor:
    side = math.gcd(BLOCK, *weight.shape)
    return weight.to_sparse_bsr((side, side))


def _sparse(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy in which every Linear layer has a sparse weight."""
    sparse = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse tensors are in beta state
        for name, layer in list(sparse.named_modules()):
            if isinstance(layer, nn.Linear):
                owner, _, attribute = name.rpartition(".")
                setattr(sparse.get_submodule(owner), attribute, _SparseLinear(layer, convert))
    return sparse


def _skipped_flops(model: nn.Module) -> int:
    """FLOPs per example that the sparse layers skip."""
    return sum(module.skipped_flops for module in model.modules() if isinstance(module, _SparseLinear))
