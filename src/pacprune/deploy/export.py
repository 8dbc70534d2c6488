"""Files that leave the laboratory: packed and plain safetensors, ONNX, torch programs; masks of torch.nn.utils.prune.

A packed file holds, for all tensors of two or more dimensions together, one bit per weight (`mask`) and the weights
that are not zero (`kept`); everything else is stored as it is (`rest`). `layout` says which tensor lies where.
"""

import importlib
import io
import json
import logging
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.nn.utils import prune

from pacprune.deploy import slim
from pacprune.files import digest, write_atomically
from pacprune.masking import patterns, weights

FORMATS = ("safetensors", "onnx", "dense", "slim")
FORMAT, VERSION = "pacprune packed", "1"
ONNX_LIMIT = 2**31
"""Bytes of a protobuf message: an ONNX file that holds its weights is smaller."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Entry(NamedTuple):
    """One line of the layout; `kept` is None for a tensor that is stored as it is, `tied` names the first owner."""

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    kept: int | None = None
    negative: bool = False
    tied: str | None = None


def write(path: str | Path, model: nn.Module, *, format: str, example: Tensor, pattern: str | None = None) -> str:
    """Writes the model in one of FORMATS, whole or not at all; returns a sentence about what was written.

    With a `pattern`, "2:4" or "1:4", every weight is checked to follow it, and the sentence and a packed file say so.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is unknown; use one of {', '.join(FORMATS)}")
    path, said = Path(path), ""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write")
    if pattern is not None:
        _check_pattern(weights.prunable(model), pattern)
        said = f", {pattern}"
    if format == "safetensors":
        save(path, model, pattern=pattern)
    elif format == "dense":
        save_dense(path, model)
    elif format == "onnx":
        save_onnx(path, model, example)
    else:
        found = slim.slim(model, example)
        save_program(path, found.model, example)
        said = f" ({found})"  # without its dead channels, a row's groups of weights are others
    return f"{format}: {path.stat().st_size:,} bytes in {path}{said}"


# --- Packed safetensors.


def save(path: str | Path, model: nn.Module | Mapping[str, Tensor], *, pattern: str | None = None) -> None:
    """Writes a plain model or state dict packed: k values, D/8 bytes of mask, the rest, and a few hundred bytes.

    A tied tensor is stored once. A weight of -0.0 counts as pruned; where there are any, one more bit per zero says so.
    A `pattern` that all tensors of two or more dimensions follow is noted in the metadata; otherwise it is refused.
    """
    state = _state(model)
    if pattern is not None:
        _check_pattern({n: t for n, t in state.items() if t.ndim >= 2 and t.is_floating_point()}, pattern)
    parts: dict[str, list[Tensor]] = {}
    entries, owners, kept, total = [], {}, 0, 0
    for name, tensor in state.items():
        first = owners.setdefault(_place(tensor), name)
        if first != name:
            entries.append(_Entry(name, tied=first))
            continue
        entry, pieces = _packed(name, tensor.detach().cpu().contiguous())
        entries.append(entry)
        for part, values in pieces.items():
            parts.setdefault(part, []).append(values)
        if tensor.ndim >= 2 and tensor.is_floating_point():
            total, kept = total + tensor.numel(), kept + int(_nonzero(_bits(tensor)).sum())
    flat = {part: torch.cat(values) for part, values in parts.items()}
    text = json.dumps([list(entry) for entry in entries], separators=(",", ":"))
    flat["layout"] = torch.frombuffer(bytearray(zlib.compress(text.encode(), 9)), dtype=torch.uint8)
    numbers = {"kept": str(kept), "total": str(total), "sparsity": f"{1 - kept / total if total else 0.0:.6f}"}
    about = {"format": FORMAT, "version": VERSION, **numbers, "sha256": digest(state)}
    about |= {} if pattern is None else {"pattern": pattern}
    write_atomically(Path(path), to_bytes(flat, metadata=about))


def _check_pattern(plain: Mapping[str, Tensor], pattern: str) -> None:
    for name, weight in plain.items():
        patterns.check(weight, *patterns.parse(pattern), name=name)


def _packed(name: str, tensor: Tensor) -> tuple[_Entry, dict[str, Tensor]]:
    """The entry of a tensor and what it puts where; packed only when that is smaller."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if tensor.ndim >= 2 and tensor.is_floating_point():
        bits = _bits(tensor)
        keep = _nonzero(bits)
        count = int(keep.sum())
        if math.ceil(keep.numel() / 8) < (keep.numel() - count) * tensor.element_size():
            minus = bits[~keep] != 0
            pieces = {"mask": _pack(keep), f"kept.{dtype}": bits[keep].view(tensor.dtype)}
            if bool(minus.any()):
                pieces["minus"] = _pack(minus)
            return _Entry(name, shape, dtype, count, "minus" in pieces), pieces
    return _Entry(name, shape, dtype), {f"rest.{dtype}": tensor.reshape(-1)}


def _bits(tensor: Tensor) -> Tensor:
    """A flat view as integers: they can be compared and indexed in every type, 8-bit floats included."""
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


def _nonzero(bits: Tensor) -> Tensor:
    """Whether there is anything but the sign."""
    return (bits << 1) != 0


class Packed(Mapping[str, Tensor]):
    """A packed file as a read-only state dict: each tensor is read and unpacked when it is asked for, and only then."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path} is not a file; name one that pacprune export --format safetensors wrote")
        try:
            self._file: Any = safe_open(self.path, "pt")
            self.metadata: dict[str, str] = self._file.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error}); export it again") from None
        found = self.metadata.get("format"), self.metadata.get("version")
        if found != (FORMAT, VERSION):
            raise ValueError(
                f"{path} has format {found[0]!r} version {found[1]!r}, not {FORMAT!r} version {VERSION}; "
                "read plain files with safetensors.torch.load_file"
            )
        self._places: dict[str, tuple[_Entry, dict[str, slice]]] = {}
        self.tied: dict[str, str] = {}
        ends: dict[str, int] = {}
        for entry in self._layout():
            if entry.tied is not None:
                self.tied[entry.name] = entry.tied
                continue
            place = {}
            for part, length in _lengths(entry).items():
                start = ends.get(part, 0)
                ends[part] = start + length
                place[part] = slice(start, start + length)
            self._places[entry.name] = entry, place
            self.tied[entry.name] = entry.name

    def _layout(self) -> list[_Entry]:
        try:
            lines = json.loads(zlib.decompress(self._file.get_tensor("layout").numpy().tobytes()))
            return [_Entry(name, tuple(shape), *more) for name, shape, *more in lines]
        except (SafetensorError, zlib.error, ValueError, TypeError) as error:
            raise ValueError(f"the layout of {self.path} cannot be read ({error}); export it again") from None

    def __getitem__(self, name: str) -> Tensor:
        entry, place = self._places[self.tied[name]]
        read = {part.partition(".")[0]: self._file.get_slice(part)[where] for part, where in place.items()}
        if entry.kept is None:
            return read["rest"].reshape(entry.shape)
        keep = _unpack(read["mask"], math.prod(entry.shape))
        kept = read["kept"]
        bits = torch.zeros(len(keep), dtype=_BITS[kept.element_size()])
        bits[keep] = kept.view(bits.dtype)
        if entry.negative:
            zeros = (~keep).nonzero().reshape(-1)
            minus = torch.tensor(-0.0).to(kept.dtype).view(bits.dtype)
            bits[zeros[_unpack(read["minus"], len(zeros))]] = minus
        return bits.view(kept.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tied)

    def __len__(self) -> int:
        return len(self.tied)


def load(path: str | Path) -> dict[str, Tensor]:
    """The state dict of a packed file, bit for bit as it was; names of a tied tensor share one. The hash is checked."""
    packed = Packed(path)
    state: dict[str, Tensor] = {}
    try:
        for name, first in packed.tied.items():
            state[name] = packed[name] if first == name else state[first]
        found = digest(state)
    except (SafetensorError, RuntimeError, IndexError) as error:
        raise ValueError(f"{path} is damaged ({error}); export it again") from None
    if found != packed.metadata["sha256"]:
        raise ValueError(
            f"{path} is damaged: its tensors have SHA-256 {found[:12]}..., "
            f"but {packed.metadata['sha256'][:12]}... was noted; export it again"
        )
    return state


def _lengths(entry: _Entry) -> dict[str, int]:
    """How many elements of which part belong to an entry."""
    size = math.prod(entry.shape)
    if entry.kept is None:
        return {f"rest.{entry.dtype}": size}
    found = {"mask": math.ceil(size / 8), f"kept.{entry.dtype}": entry.kept}
    return found | ({"minus": math.ceil((size - entry.kept) / 8)} if entry.negative else {})


def _pack(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.numpy()))


def _unpack(packed: Tensor, count: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).bool()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two names of one tensor; a tensor without elements has no place that it could share."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _state(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        return dict(model)
    weights.prunable(model)  # refuses stochastic masks and computed weights: their state dict is not the network's
    return dict(model.state_dict())


# --- The other formats.


def save_dense(path: str | Path, model: nn.Module) -> None:
    """Writes the plain state dict, zeros included; a tied tensor under each of its names, as `load_state_dict` asks."""
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in _state(model).items()}
    write_atomically(Path(path), to_bytes(state))


def save_program(path: str | Path, model: nn.Module, example: Tensor) -> None:
    """Writes the module as a torch program: `torch.export.load(path).module()` runs it, without pacprune."""
    program = slim.traced(model, torch.zeros_like(slim.batch(example)))
    for node in program.graph.nodes:
        # Stack traces are half of a small file, and name folders of this machine.
        node.meta = {key: value for key, value in node.meta.items() if key in ("val", "tensor_meta")}
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    write_atomically(Path(path), buffer.getvalue())


def save_onnx(path: str | Path, model: nn.Module, example: Tensor) -> None:
    """Writes one ONNX file for batches of any size, with the input `input` and the output `output`."""
    for name in ("onnx", "onnxscript"):
        extra(name, "export")
    if slim.size(model) >= ONNX_LIMIT:
        raise ValueError(
            f"the model has {slim.size(model):,} bytes, but one ONNX file holds less than {ONNX_LIMIT:,}; "
            "use --format safetensors"
        )
    with weights.modes_kept(model):
        program = slim.traced(model.eval(), slim.batch(example))
    log = logging.getLogger("torch.onnx")
    before = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter's own parts, as is what it logs
        log.setLevel(logging.ERROR)
        try:
            found = torch.onnx.export(
                program, dynamo=True, input_names=["input"], output_names=["output"], verbose=False, optimize=True
            )
        finally:
            log.setLevel(before)
    assert found is not None
    write_atomically(Path(path), found.model_proto.SerializeToString())


def extra(name: str, group: str) -> Any:
    """An optional package, or the sentence that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f'{name} cannot be imported ({error}); pip install "pacprune[{group}]"') from None


# --- Masks of torch.nn.utils.prune.


def to_torch_prune(model: nn.Module) -> nn.Module:
    """Hands the zeros of a plain model to torch.nn.utils.prune, in place: NAME becomes NAME_orig and NAME_mask."""
    plain = weights.prunable(model)
    noted = {}
    for module, mask in weights.noted_masks(model):
        own = dict(module.named_parameters())
        noted |= {id(own[name]): keep for name, keep in mask.items()}
        weights.apply_mask(module, None)
    for weight in plain.values():
        keep = noted.get(id(weight), weight != 0)
        owners = [(m, n) for m in model.modules() for n, p in m._parameters.items() if p is weight]
        for module, attribute in owners:
            prune.custom_from_mask(module, attribute, keep)
    return model


def from_torch_prune(model: nn.Module) -> dict[str, Tensor]:
    """Takes the masks of torch.nn.utils.prune over, in place: a plain model whose zeros `fit` keeps; returns them."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        names = [name.removesuffix("_mask") for name in module._buffers if name.endswith("_mask")]
        names = [name for name in names if f"{name}_orig" in module._parameters]
        for name in names:
            keep = getattr(module, f"{name}_mask").bool()
            prune.remove(module, name)
            found[id(module._parameters[name])] = keep
        rest = [name for name in module._parameters if name not in names]
        for name in (*names, *rest) if names else ():  # a parameter put back is the last; weights come first
            module._parameters[name] = module._parameters.pop(name)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no masks of torch.nn.utils.prune among its {sum(1 for _ in model.buffers())} "
            "buffers; prune it first, or use pp.apply_mask"
        )
    mask = {name: found[id(w)] for name, w in weights.prunable(model).items() if id(w) in found}
    weights.apply_mask(model, mask)
    return mask
