"""Files for deployment: packed and plain safetensors, ONNX, torch programs; masks of torch.nn.utils.prune.

A packed file holds, for all tensors of two or more dimensions together, which weights are not zero (`mask`) and these
weights (`kept`); everything else is stored as it is (`rest`). `layout` says which tensor lies where.
"""

import io
import json
import logging
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from torch.nn.utils import prune

from pacprune.certification import verify
from pacprune.deploy import slim
from pacprune.files import digest, mask_gaps, write_atomically
from pacprune.imports import extra
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

FORMAT, VERSION, VERSIONS = "pacprune packed", "2", ("1", "2")
"""What is written, and which versions are read: the first had bits for all masks, and kept the sign of -0.0."""
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What transformers calls a file of all weights, and the index of several files."""
MOST_LAYOUT = 2**26
"""Bytes of the layout, before it is read."""
ONNX_LIMIT = 2**31
"""Bytes of a protobuf message: an ONNX file that holds its weights is smaller."""
_UNSIGNED_ZERO = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
"""Types without -0.0, in which the sign alone means something else."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Entry(NamedTuple):
    """One line of the layout; `kept` is None for a tensor that is stored as it is, `tied` names the first owner.

    `negative` says that the signs of zeros are in `minus` (version 1), `gaps` how many bytes of `mask` have it by gaps.
    """

    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    kept: int | None = None
    negative: bool = False
    tied: str | None = None
    gaps: int | None = None


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
    save: Callable[[Path, nn.Module, slim.Inputs, str | None], str]
    sentence: str


def write(path: str | Path, model: nn.Module, *, format: str, example: slim.Inputs, pattern: str | None = None) -> str:
    """Writes a model in one of FORMATS, whole or not at all.

    Args:
        path: The file to write; one that exists is replaced.
        model: A plain model, such as `harden` leaves it.
        format: safetensors, onnx, dense or slim.
        example: One batch of inputs, of any size; for onnx also tensors by the names of the forward's parameters.
        pattern: "2:4", "1:4" or "4:8" checks that every weight follows the pattern. The returned sentence and a packed
            file say so.

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
        _check_pattern(weights.plain_weights(model), pattern)
    details = FORMATS[format].save(path, model, example, pattern)
    return f"{format}: {path.stat().st_size:,} bytes in {path}{details}"


def _write_packed(path: Path, model: nn.Module, example: slim.Inputs, pattern: str | None) -> str:
    save(path, model, pattern=pattern)
    return _pattern_detail(pattern)


def _write_dense(path: Path, model: nn.Module, example: slim.Inputs, pattern: str | None) -> str:
    save_dense(path, model)
    return _pattern_detail(pattern)


def _write_onnx(path: Path, model: nn.Module, example: slim.Inputs, pattern: str | None) -> str:
    content, details = _onnx(model, example)
    write_atomically(path, content)
    return f"{_pattern_detail(pattern)}{details}"


def _write_slim(path: Path, model: nn.Module, example: slim.Inputs, pattern: str | None) -> str:
    """Does not mention the pattern: without dead channels, the groups of a row change."""
    if not isinstance(example, Tensor):
        raise ValueError(
            f"slim takes networks with one input, but the example has {' and '.join(example)}; use onnx or safetensors"
        )
    slimmed = slim.slim(model, example)
    save_program(path, slimmed.model, example)
    return f" ({slimmed})"


def _pattern_detail(pattern: str | None) -> str:
    return "" if pattern is None else f", {pattern}"


FORMATS = {
    "safetensors": Format("packed.safetensors", _write_packed, "packed: which weights are kept, and their values"),
    "onnx": Format("model.onnx", _write_onnx, "for ONNX Runtime"),
    "dense": Format("dense.safetensors", _write_dense, "the plain state dict, zeros included"),
    "slim": Format("slim.pt2", _write_slim, "a torch program without its dead channels"),
}


# --- Packed safetensors.


def save(path: str | Path, model: nn.Module | Mapping[str, Tensor], *, pattern: str | None = None) -> None:
    """Writes a plain model or state dict packed: k values, which weights they are, the rest, and a short header.

    The mask of a tensor has one bit per weight, or the gaps between kept weights if that is smaller: in all some
    log2 binom(D, k) bits. A tied tensor is stored once. A weight of -0.0 counts as pruned, and comes back as 0.0.

    Args:
        path: The file to write; one that exists is replaced.
        model: A plain model, or its state dict.
        pattern: "2:4", "1:4" or "4:8" is noted in the metadata if all tensors of two or more dimensions follow it, and
            refused otherwise.

    Example:
        >>> pp.export.save("packed.safetensors", model)
        >>> pp.export.load("packed.safetensors")["1.weight"].shape
        torch.Size([16, 64])
    """
    write_atomically(Path(path), packed(model, pattern=pattern))


def packed(model: nn.Module | Mapping[str, Tensor], *, pattern: str | None = None) -> bytes:
    """What `save` writes."""
    state = _state(model)
    if pattern is not None:
        _check_pattern({name: t for name, t in state.items() if _is_matrix(t)}, pattern)
    if isinstance(model, nn.Module):
        weights.warn_of_revived(model)
    content = _packed(state, pattern, gaps=True)
    # What is almost nothing but zeros looks like a file that was made to fill its reader's memory.
    if sum(t.numel() * t.element_size() for t in state.values()) > verify.MOST_GROWTH * len(content):
        return _packed(state, pattern, gaps=False)
    return content


def _packed(state: Mapping[str, Tensor], pattern: str | None, *, gaps: bool) -> bytes:
    """With masks as bits, or by their gaps where that is smaller."""
    parts: dict[str, list[Tensor]] = {}
    entries: list[_Entry] = []
    owners: dict[tuple[Any, ...], str] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in state.items():
        owner = owners.setdefault(_place(tensor), name)
        if owner != name:
            entries.append(_Entry(name, tied=owner))
            plain[name] = plain[owner]
            continue
        plain[name] = _without_minus_zero(tensor.detach().cpu().contiguous())
        entry, pieces = _pack_tensor(name, plain[name], gaps=gaps)
        entries.append(entry)
        for part, values in pieces.items():
            parts.setdefault(part, []).append(values)
    tensors = {part: torch.cat(values) for part, values in parts.items()}
    layout = json.dumps([list(entry) for entry in entries], separators=(",", ":"))
    tensors["layout"] = _as_tensor(zlib.compress(layout.encode(), 9))
    matrices = [plain[name] for name in owners.values() if _is_matrix(plain[name])]
    metadata = {"format": FORMAT, "version": VERSION, **_counts(matrices), "sha256": digest(plain)}
    metadata |= {} if pattern is None else {"pattern": pattern}
    return to_bytes(tensors, metadata=metadata)


def _counts(matrices: list[Tensor]) -> dict[str, str]:
    """How many weights there are, how many of them are kept, and the sparsity, as metadata."""
    total = sum(matrix.numel() for matrix in matrices)
    kept = sum(int(_nonzero(matrix).sum()) for matrix in matrices)
    return {"kept": str(kept), "total": str(total), "sparsity": f"{1 - kept / total if total else 0.0:.6f}"}


def _check_pattern(tensors: Mapping[str, Tensor], pattern: str) -> None:
    for name, weight in tensors.items():
        patterns.check(weight, *patterns.parse(pattern), name=name)


def _pack_tensor(name: str, tensor: Tensor, *, gaps: bool) -> tuple[_Entry, dict[str, Tensor]]:
    """The entry of a tensor and its pieces by part; packed only if that is smaller."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    if _is_matrix(tensor):
        keep = _nonzero(tensor)
        count, length, mask = int(keep.sum()), None, np.packbits(keep.numpy()).tobytes()
        if gaps and len(code := mask_gaps(keep.numpy())) < len(mask):
            length, mask = len(code), code
        if len(mask) < (len(keep) - count) * tensor.element_size():
            kept = _bits(tensor)[keep].view(tensor.dtype)
            return _Entry(name, shape, dtype, count, gaps=length), {"mask": _as_tensor(mask), f"kept.{dtype}": kept}
    return _Entry(name, shape, dtype), {f"rest.{dtype}": tensor.reshape(-1)}


def _is_matrix(tensor: Tensor) -> bool:
    """Whether the zeros of a tensor count as pruned."""
    return tensor.ndim >= 2 and tensor.is_floating_point()


def _bits(tensor: Tensor) -> Tensor:
    """A flat view as integers: they can be compared and indexed in every type, 8-bit floats included."""
    return tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])


def _nonzero(tensor: Tensor) -> Tensor:
    """Whether any bit other than the sign is set; flat."""
    return (_bits(tensor) if tensor.dtype in _UNSIGNED_ZERO else _bits(tensor) << 1) != 0


def _without_minus_zero(tensor: Tensor) -> Tensor:
    """A matrix with 0.0 for -0.0, which masks of torch.nn.utils.prune leave wherever a negative weight was."""
    if not _is_matrix(tensor):
        return tensor
    bits, keep = _bits(tensor), _nonzero(tensor)
    return bits.masked_fill(~keep, 0).view(tensor.dtype).reshape(tensor.shape)


def _as_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))


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
        if format != FORMAT or version not in VERSIONS:
            raise ValueError(
                f"{path} has format {format!r} version {version!r}, not {FORMAT!r} version {' or '.join(VERSIONS)}; "
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
        self._check_sizes(ends)

    def _layout(self) -> list[_Entry]:
        try:
            reader = zlib.decompressobj()
            text = reader.decompress(self._file.get_tensor("layout").numpy().tobytes(), MOST_LAYOUT)
            if not reader.eof:
                raise ValueError(f"it does not end within {MOST_LAYOUT:,} bytes")
            return [_entry(*line) for line in json.loads(text)]
        except (SafetensorError, zlib.error, ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"the layout of {self.path} cannot be read ({error}); export it again") from None

    def _check_sizes(self, ends: Mapping[str, int]) -> None:
        """Before memory is asked for: the parts are as long as the layout says, and not much less than the tensors."""
        entries = [entry for entry, _ in self._slices.values()]
        size = sum(math.prod(entry.shape) * getattr(torch, entry.dtype).itemsize for entry in entries)
        packed_size = self.path.stat().st_size
        if size > verify.MOST_GROWTH * packed_size:
            raise ValueError(
                f"{self.path} is damaged: its {packed_size:,} bytes would become {size:,}; export it again"
            )
        parts = [part for part in self._file.keys() if part != "layout"]  # noqa: SIM118, it is no dictionary
        shapes = {part: self._file.get_slice(part).get_shape() for part in parts}
        if shapes != (expected := {part: [end] for part, end in ends.items()}):
            raise ValueError(f"{self.path} is damaged: its parts are {shapes}, not {expected}; export it again")

    def __getitem__(self, name: str) -> Tensor:
        entry, slices = self._slices[self.tied[name]]
        pieces = {part.partition(".")[0]: self._file.get_slice(part)[place] for part, place in slices.items()}
        if entry.kept is None:
            return pieces["rest"].reshape(entry.shape)
        size, values = math.prod(entry.shape), pieces["kept"]
        if entry.gaps is None:
            keep = _unpack(pieces["mask"], size)
        else:
            keep = torch.from_numpy(verify.mask_of_gaps(pieces["mask"].numpy(), size))
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
    """The state dict of a packed file, bit for bit as it was but for the sign of zeros, once its hash is checked.

    Of a folder, it is that of the plain safetensors which `save_pretrained` of transformers writes, in one file or in
    several with an index.

    Args:
        path: A file that `save` wrote, or a folder with model.safetensors or model.safetensors.index.json.

    Returns:
        A state dict for `load_state_dict`; the names of a tied tensor share one tensor. In a folder, transformers
        leaves all names of a tied tensor out but one.

    Raises:
        ValueError: If the file is not packed by pacprune, or is damaged; if the folder lacks a file or a tensor.

    Example:
        >>> pp.export.save("packed.safetensors", model)
        >>> model.load_state_dict(pp.export.load("packed.safetensors"))
        <All keys matched successfully>
    """
    if Path(path).is_dir():
        return _load_folder(Path(path))
    packed = Packed(path)
    state: dict[str, Tensor] = {}
    try:
        for name, owner in packed.tied.items():
            state[name] = packed[name] if owner == name else state[owner]
        sha256 = digest(state)
    except (SafetensorError, RuntimeError, IndexError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); export it again") from None
    if sha256 != (noted := packed.metadata.get("sha256", "nothing")):
        raise ValueError(
            f"{path} is damaged: its tensors have SHA-256 {sha256[:12]}..., "
            f"but {noted[:12]}... was noted; export it again"
        )
    return state


def _load_folder(folder: Path) -> dict[str, Tensor]:
    """The state dict in plain safetensors, which may be several files with an index of what lies where."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / WHOLE).is_file():
            raise ValueError(f"{folder} holds neither {WHOLE} nor {INDEX}; name a folder that save_pretrained wrote")
        return _load_plain(folder / WHOLE)
    try:
        files = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} cannot be read ({type(error).__name__}: {error}); write the model again") from None
    shards = {}
    for file in sorted(set(files.values())):
        if Path(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is no file of its folder; write the model again")
        shards[file] = _load_plain(folder / file)
    lacking = [name for name, file in files.items() if name not in shards[file]]
    if lacking:
        raise ValueError(f"{folder / files[lacking[0]]} lacks {lacking[0]}, which {INDEX} has there; write it again")
    return {name: shards[file][name] for name, file in files.items()}


def _load_plain(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"{path} is missing, although {INDEX} names it; write the model again")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}); write the model again") from None


def _entry(name: str, shape: list[int], dtype: str, *rest: Any) -> _Entry:
    """A line of the layout, once it can be one."""
    entry = _Entry(name, tuple(shape), dtype, *rest)
    counts = [*entry.shape, entry.kept or 0, entry.gaps or 0]
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"{name!r:.80} has the sizes {counts!r:.80}")
    if entry.tied is None and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"{name!r:.80} has the type {dtype!r:.80}")
    return entry


def _lengths(entry: _Entry) -> dict[str, int]:
    """How many elements of which part belong to an entry."""
    size = math.prod(entry.shape)
    if entry.kept is None:
        return {f"rest.{entry.dtype}": size}
    lengths = {"mask": math.ceil(size / 8) if entry.gaps is None else entry.gaps, f"kept.{entry.dtype}": entry.kept}
    return lengths | ({"minus": math.ceil((size - entry.kept) / 8)} if entry.negative else {})


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
    weights.refuse_torch_masks(model)  # and stochastic masks; the tensors of weight norm are in the state dict
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


def save_onnx(path: str | Path, model: nn.Module, example: slim.Inputs) -> None:
    """Writes one ONNX file for batches of any size, with the input `input` and the output `output`.

    Whole numbers of two dimensions are tokens, and a sequence may have any length. Of a model of transformers, the
    output is its logits, without keys and values to go on from. The weights keep their type; onnxruntime has no
    bfloat16 on a CPU, so call `model.float()` before.

    Args:
        path: The file to write, such as net.onnx.
        model: A plain model of less than 2 GiB.
        example: One batch of inputs, of any size. A mapping of tensors by the names of the forward's parameters, such
            as input_ids and attention_mask, gives the file inputs of these names.

    Raises:
        ValueError: If the extra `export` is not installed, or the model is too large for one file, or has an
            operation that ONNX has not.

    Example:
        >>> pp.export.save_onnx("net.onnx", model, x)  # doctest: +SKIP
    """
    content, _ = _onnx(model, example)
    write_atomically(Path(path), content)


def _onnx(model: nn.Module, example: slim.Inputs) -> tuple[bytes, str]:
    """What `save_onnx` writes, and what the sentence about it adds: the length of sequences, if they have only one."""
    for name in ("onnx", "onnxscript"):
        extra(name, "export")
    if slim.size(model) >= ONNX_LIMIT:
        raise ValueError(
            f"the model has {slim.size(model):,} bytes, but one ONNX file holds less than {ONNX_LIMIT:,}; "
            "use --format safetensors"
        )
    weights.warn_of_revived(model)
    names = ["input"] if isinstance(example, Tensor) else list(example)
    if isinstance(example, Tensor):
        inputs = slim.batch(example)
    else:
        inputs = {name: slim.batch(tensor) for name, tensor in example.items()}
    with weights.modes_kept(model):
        program = slim.trace(model.eval(), inputs)
    try:
        with _quiet_exporter():
            exported = torch.onnx.export(
                program, dynamo=True, input_names=names, output_names=["output"], verbose=False, optimize=True
            )
    except Exception as error:  # the exporter lets through whatever its many parts raise
        raise ValueError(
            f"{type(model).__name__} cannot be written as ONNX ({type(error).__name__}: {_first_cause(error)}); "
            "rewrite the part of its forward that is named, or use --format slim"
        ) from error
    assert exported is not None
    lengths = slim.fixed_lengths(program)
    details = f", for sequences of {' and '.join(map(str, lengths))} alone" if lengths else ""
    return exported.model_proto.SerializeToString(), details


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Warnings and logs here are about the exporter itself."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            log.setLevel(before)


def _first_cause(error: BaseException) -> str:
    """The first line of what was wrong in the first place."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or "no message").splitlines()[0]


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
    plain = weights.plain_weights(model)
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
    mask = {name: masks[id(w)] for name, w in weights.all_weights(model).items() if id(w) in masks}
    weights.apply_mask(model, mask)
    return mask
