"""Files for deployment: packed and plain safetensors, ONNX, torch programs; masks of torch.nn.utils.prune.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from pacprune.types import check_name

__all__ = [
    "FORMATS",
    "Format",
    "Packed",
    "from_torch_prune",
    "load",
    "save",
    "save_dense",
    "save_onnx",
    "save_program",
    "to_torch_prune",
    "write",
]

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


@dataclass(frozen=True)
class Format:
    """A row of FORMATS.

    Args:
        file: The name of such a file in the folder of a run.
        save: Called as save(path, model, example, pattern); returns details for the sentence about the file.
        sentence: What such a file holds.

    Example:
        >>> pp.export.FORMATS["onnx"].file
        'model.onnx'
    """

    file: str
    save: Callable[[Path, nn.Module, Tensor, str | None], str]
    sentence: str


def write(path: str | Path, model: nn.Module, *, format: str, example: Tensor, pattern: str | None = None) -> str:
    """Writes a model in one of FORMATS, whole or not at all.

    Args:
        path: The file to write; one that exists is replaced.
        model: A plain model, such as `harden` leaves it.
        format: safetensors, onnx, dense or slim.
        example: One batch of inputs, of any size.
        pattern: "2:4" or "1:4" checks that every weight follows the pattern. The returned sentence and a packed file
            say so.

    Returns:
        A sentence about what was written.

    Raises:
        ValueError: If the format is unknown, the path is a folder, or a weight breaks the pattern.

    Example:
        >>> pp.export.write("net.safetensors", model, format="dense", example=x)
        'dense: 5,... bytes in net.safetensors'
    """
    check_name("format", format, FORMATS)
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file to write")
    if pattern is not None:
        _check_pattern(weights.prunable(model), pattern)
    details = FORMATS[format].save(path, model, example, pattern)
    return f"{format}: {path.stat().st_size:,} bytes in {path}{details}"


def _write_packed(path: Path, model: nn.Module, example: Tensor, pattern: str | None) -> str:
    save(path, model, pattern=pattern)
    return _pattern_detail(pattern)


def _write_dense(path: Path, model: nn.Module, example: Tensor, pattern: str | None) -> str:
    save_dense(path, model)
    return _pattern_detail(pattern)


def _write_onnx(path: Path, model: nn.Module, example: Tensor, pattern: str | None) -> str:
    save_onnx(path, model, example)
    return _pattern_detail(pattern)


def _write_slim(path: Path, model: nn.Module, example: Tensor, pattern: str | None) -> str:
    """Does not mention the pattern: without dead channels, the groups of a row change."""
    slimmed = slim.slim(model, example)
    save_program(path, slimmed.model, example)
    return f" ({slimmed})"


def _pattern_detail(pattern: str | None) -> str:
    return "" if pattern is None else f", {pattern}"


FORMATS = {
    "safetensors": Format("packed.safetensors", _write_packed, "packed: one bit per weight, and the kept values"),
    "onnx": Format("model.onnx", _write_onnx, "for ONNX Runtime"),
    "dense": Format("dense.safetensors", _write_dense, "the plain state dict, zeros included"),
    "slim": Format("slim.pt2", _write_slim, "a torch program without its dead channels"),
}


# --- Packed safetensors.


def save(path: str | Path, model: nn.Module | Mapping[str, Tensor], *, pattern: str | None = None) -> None:
    """Writes a plain model or state dict packed: k values, D/8 bytes of mask, the rest, and a few hundred bytes.

    A tied tensor is stored once. A weight of -0.0 counts as pruned; where there are any, one more bit per zero says so.

    Args:
        path: The file to write; one that exists is replaced.
        model: A plain model, or its state dict.
        pattern: "2:4" or "1:4" is noted in the metadata if all tensors of two or more dimensions follow it, and
            refused otherwise.

    Example:
        >>> pp.export.save("packed.safetensors", model)
        >>> pp.export.load("packed.safetensors")["1.weight"].shape
        torch.Size([16, 64])
    """
    state = _state(model)
    matrices = {name: t for name, t in state.items() if t.ndim >= 2 and t.is_floating_point()}
    if pattern is not None:
        _check_pattern(matrices, pattern)
    if isinstance(model, nn.Module):
        weights.warn_of_revived(model)
    parts: dict[str, list[Tensor]] = {}
    entries: list[_Entry] = []
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        owner = owners.setdefault(_place(tensor), name)
        if owner != name:
            entries.append(_Entry(name, tied=owner))
            continue
        entry, pieces = _pack_tensor(name, tensor.detach().cpu().contiguous())
        entries.append(entry)
        for part, values in pieces.items():
            parts.setdefault(part, []).append(values)
    tensors = {part: torch.cat(values) for part, values in parts.items()}
    layout = json.dumps([list(entry) for entry in entries], separators=(",", ":"))
    tensors["layout"] = torch.frombuffer(bytearray(zlib.compress(layout.encode(), 9)), dtype=torch.uint8)
    first_owners = [matrices[name] for name in owners.values() if name in matrices]
    metadata = {"format": FORMAT, "version": VERSION, **_counts(first_owners), "sha256": digest(state)}
    metadata |= {} if pattern is None else {"pattern": pattern}
    write_atomically(Path(path), to_bytes(tensors, metadata=metadata))


def _counts(matrices: list[Tensor]) -> dict[str, str]:
    """How many weights there are, how many of them are kept, and the sparsity, as metadata."""
    total = sum(matrix.numel() for matrix in matrices)
    kept = sum(int(_nonzero(_bits(matrix)).sum()) for matrix in matrices)
    return {"kept": str(kept), "total": str(total), "sparsity": f"{1 - kept / total if total else 0.0:.6f}"}


def _check_pattern(tensors: Mapping[str, Tensor], pattern: str) -> None:
    for name, weight in tensors.items():
        patterns.check(weight, *patterns.parse(pattern), name=name)


def _pack_tensor(name: str, tensor: Tensor) -> tuple[_Entry, dict[str, Tensor]]:
    """The entry of a tensor and its pieces by part; packed only if that is smaller."""
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
    """Whether any bit other than the sign is set."""
    return (bits << 1) != 0


class Packed(Mapping[str, Tensor]):
    """A packed file as a read-only state dict, which reads and unpacks a tensor only when it is accessed.

    Args:
        path: A file that `save` wrote.

    Raises:
        ValueError: If the file does not exist or is not packed by pacprune.

    Example:
        >>> pp.export.save("packed.safetensors", model)
        >>> packed = pp.export.Packed("packed.safetensors")
        >>> packed.metadata["total"], len(packed)
        ('1184', 4)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path} is not a file; name one that pacprune export --format safetensors wrote")
        try:
            self._file: Any = safe_open(self.path, "pt")
            self.metadata: dict[str, str] = self._file.metadata() or {}
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error}); export it again") from None
        format, version = self.metadata.get("format"), self.metadata.get("version")
        if (format, version) != (FORMAT, VERSION):
            raise ValueError(
                f"{path} has format {format!r} version {version!r}, not {FORMAT!r} version {VERSION}; "
                "read plain files with safetensors.torch.load_file"
            )
        self._slices: dict[str, tuple[_Entry, dict[str, slice]]] = {}
        self.tied: dict[str, str] = {}
        ends: dict[str, int] = {}
        for entry in self._layout():
            if entry.tied is not None:
                self.tied[entry.name] = entry.tied
                continue
            slices = {}
            for part, length in _lengths(entry).items():
                start = ends.get(part, 0)
                ends[part] = start + length
                slices[part] = slice(start, start + length)
            self._slices[entry.name] = entry, slices
            self.tied[entry.name] = entry.name

    def _layout(self) -> list[_Entry]:
        try:
            lines = json.loads(zlib.decompress(self._file.get_tensor("layout").numpy().tobytes()))
            return [_Entry(name, tuple(shape), *rest) for name, shape, *rest in lines]
        except (SafetensorError, zlib.error, ValueError, TypeError) as error:
            raise ValueError(f"the layout of {self.path} cannot be read ({error}); export it again") from None

    def __getitem__(self, name: str) -> Tensor:
        entry, slices = self._slices[self.tied[name]]
        pieces = {part.partition(".")[0]: self._file.get_slice(part)[place] for part, place in slices.items()}
        if entry.kept is None:
            return pieces["rest"].reshape(entry.shape)
        keep = _unpack(pieces["mask"], math.prod(entry.shape))
        values = pieces["kept"]
        bits = torch.zeros(len(keep), dtype=_BITS[values.element_size()])
        bits[keep] = values.view(bits.dtype)
        if entry.negative:
            zeros = (~keep).nonzero().reshape(-1)
            minus = torch.tensor(-0.0).to(values.dtype).view(bits.dtype)
            bits[zeros[_unpack(pieces["minus"], len(zeros))]] = minus
        return bits.view(values.dtype).reshape(entry.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tied)

    def __len__(self) -> int:
        return len(self.tied)


def load(path: str | Path) -> dict[str, Tensor]:
    """The state dict of a packed file, bit for bit as it was, once its hash is checked.

    Args:
        path: A file that `save` wrote.

    Returns:
        A state dict for `load_state_dict`; the names of a tied tensor share one tensor.

    Raises:
        ValueError: If the file is not packed by pacprune, or is damaged.

    Example:
        >>> pp.export.save("packed.safetensors", model)
        >>> model.load_state_dict(pp.export.load("packed.safetensors"))
        <All keys matched successfully>
    """
    packed = Packed(path)
    state: dict[str, Tensor] = {}
    try:
        for name, owner in packed.tied.items():
            state[name] = packed[name] if owner == name else state[owner]
        sha256 = digest(state)
    except (SafetensorError, RuntimeError, IndexError) as error:
        raise ValueError(f"{path} is damaged ({error}); export it again") from None
    if sha256 != packed.metadata["sha256"]:
        raise ValueError(
            f"{path} is damaged: its tensors have SHA-256 {sha256[:12]}..., "
            f"but {packed.metadata['sha256'][:12]}... was noted; export it again"
        )
    return state


def _lengths(entry: _Entry) -> dict[str, int]:
    """How many elements of which part belong to an entry."""
    size = math.prod(entry.shape)
    if entry.kept is None:
        return {f"rest.{entry.dtype}": size}
    lengths = {"mask": math.ceil(size / 8), f"kept.{entry.dtype}": entry.kept}
    return lengths | ({"minus": math.ceil((size - entry.kept) / 8)} if entry.negative else {})


def _pack(bits: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(bits.numpy()))


def _unpack(packed: Tensor, count: int) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).bool()


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two names of one tensor; a tensor without elements is never shared."""
    if tensor.numel() == 0:
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _state(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        return dict(model)
    weights.prunable(model)  # refuses stochastic masks and computed weights, which a state dict does not hold
    return dict(model.state_dict())


# --- The other formats.


def save_dense(path: str | Path, model: nn.Module) -> None:
    """Writes the plain state dict, zeros included; a tied tensor under each of its names, for `load_state_dict`.

    Args:
        path: The file to write; `safetensors.torch.load_file` reads it.
        model: A plain model.

    Example:
        >>> pp.export.save_dense("dense.safetensors", model)
    """
    state = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in _state(model).items()}
    weights.warn_of_revived(model)
    write_atomically(Path(path), to_bytes(state))


def save_program(path: str | Path, model: nn.Module, example: Tensor) -> None:
    """Writes the module as a torch program: `torch.export.load(path).module()` runs it, without pacprune.

    Args:
        path: The file to write, such as net.pt2.
        model: A plain model in eval mode.
        example: One batch of inputs, of any size.

    Example:
        >>> pp.export.save_program("net.pt2", model.eval(), x)
        >>> torch.export.load("net.pt2").module()(x[:3]).shape
        torch.Size([3, 10])
    """
    program = slim.trace(model, torch.zeros_like(slim.batch(example)))
    for node in program.graph.nodes:
        # Stack traces are half of a small file, and name folders of this machine.
        node.meta = {key: value for key, value in node.meta.items() if key in ("val", "tensor_meta")}
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    write_atomically(Path(path), buffer.getvalue())


def save_onnx(path: str | Path, model: nn.Module, example: Tensor) -> None:
    """Writes one ONNX file for batches of any size, with the input `input` and the output `output`.

    Args:
        path: The file to write, such as net.onnx.
        model: A plain model of less than 2 GiB.
        example: One batch of inputs, of any size.

    Raises:
        ValueError: If the extra `export` is not installed, or the model is too large for one file.

    Example:
        >>> pp.export.save_onnx("net.onnx", model, x)  # doctest: +SKIP
    """
    for name in ("onnx", "onnxscript"):
        extra(name, "export")
    if slim.size(model) >= ONNX_LIMIT:
        raise ValueError(
            f"the model has {slim.size(model):,} bytes, but one ONNX file holds less than {ONNX_LIMIT:,}; "
            "use --format safetensors"
        )
    weights.warn_of_revived(model)
    with weights.modes_kept(model):
        program = slim.trace(model.eval(), slim.batch(example))
    log = logging.getLogger("torch.onnx")
    before = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings and logs here are about the exporter itself
        log.setLevel(logging.ERROR)
        try:
            exported = torch.onnx.export(
                program, dynamo=True, input_names=["input"], output_names=["output"], verbose=False, optimize=True
            )
        finally:
            log.setLevel(before)
    assert exported is not None
    write_atomically(Path(path), exported.model_proto.SerializeToString())


def extra(name: str, group: str) -> Any:
    """An optional package; a ValueError that says how to install it if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f'{name} cannot be imported ({error}); pip install "pacprune[{group}]"') from None


# --- Masks of torch.nn.utils.prune.


def to_torch_prune(model: nn.Module) -> nn.Module:
    """Hands the zeros of a plain model to torch.nn.utils.prune, in place: NAME becomes NAME_orig and NAME_mask.

    Args:
        model: A plain model; its mask is that of `apply_mask`, or else its nonzero weights.

    Returns:
        The same model.

    Example:
        >>> pp.osp(model, split.train, pp.Config(epochs=1), sparsity=0.9).sparsity
        0.9003...
        >>> sorted(pp.export.to_torch_prune(model).state_dict())[1:3]
        ['1.weight_mask', '1.weight_orig']
    """
    plain = weights.prunable(model)
    masks = {}
    for module, mask in weights.noted_masks(model):
        parameters = dict(module.named_parameters())
        masks |= {id(parameters[name]): keep for name, keep in mask.items()}
        weights.apply_mask(module, None)
    for weight in plain.values():
        keep = masks.get(id(weight), weight != 0)
        owners = [(m, n) for m in model.modules() for n, p in m._parameters.items() if p is weight]
        for module, attribute in owners:
            prune.custom_from_mask(module, attribute, keep)
    return model


def from_torch_prune(model: nn.Module) -> dict[str, Tensor]:
    """Takes over the masks of torch.nn.utils.prune, in place: a plain model whose zeros `fit` keeps.

    Args:
        model: A model that torch.nn.utils.prune masked.

    Returns:
        The mask: True where a weight is kept.

    Raises:
        ValueError: If the model has no such masks.

    Example:
        >>> from torch.nn.utils import prune
        >>> _ = prune.l1_unstructured(model[1], "weight", amount=0.5)
        >>> mask = pp.export.from_torch_prune(model)
        >>> int(mask["1.weight"].sum())
        512
    """
    masks: dict[int, Tensor] = {}
    for module in model.modules():
        names = [name.removesuffix("_mask") for name in module._buffers if name.endswith("_mask")]
        names = [name for name in names if f"{name}_orig" in module._parameters]
        for name in names:
            keep = getattr(module, f"{name}_mask").bool()
            prune.remove(module, name)
            masks[id(module._parameters[name])] = keep
        rest = [name for name in module._parameters if name not in names]
        for name in (*names, *rest) if names else ():  # prune.remove puts a weight last; it belongs first
            module._parameters[name] = module._parameters.pop(name)
    if not masks:
        raise ValueError(
            f"{type(model).__name__} has no masks of torch.nn.utils.prune among its {sum(1 for _ in model.buffers())} "
            "buffers; prune it first, or use pp.apply_mask"
        )
    mask = {name: masks[id(w)] for name, w in weights.prunable(model).items() if id(w) in masks}
    weights.apply_mask(model, mask)
    return mask
