"""Files that are never half written, and hashes of tensors."""

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside the target and renames: a reader sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def digest(*parts: Mapping[str, Tensor], rows: Callable[[Tensor], Tensor] | None = None) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors, part after part, each in its order.

    Of a tensor that is spread over ranks, `rows` gives the rows whose bytes count; the shape is that of the whole.
    """
    sha = hashlib.sha256()
    for part in parts:
        for name, tensor in part.items():
            values = tensor.detach() if rows is None else rows(tensor.detach())
            sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            sha.update(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
