"""Files that are never half written, hashes of tensors, and masks as few bytes."""

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # commands that compute nothing write files, too
    from torch import Tensor


def write_atomically(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Writes beside the target and renames: a reader sees the old file or the new one, never a half.

    Without `replace`, a file that is there already, or comes at the same moment, stays, and FileExistsError is raised.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            part.replace(path)
        else:
            _name_once(part, path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)  # a full disk says no name, and a .part is none that a user knows
        raise


def _name_once(part: Path, path: Path) -> None:
    """Renames a file, unless there is one of that name."""
    try:
        os.link(part, path)  # one step, unlike a look and a rename
        part.unlink()
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        part.replace(path)


@contextmanager
def alone_in(folder: Path, patience: float = 10.0) -> Iterator[None]:
    """The lock on a folder for this block; waits for so many seconds, and then refuses.

    The system releases it when the process dies. Where there are no locks on folders, nothing is locked.
    """
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, PermissionError):  # such as on Windows
        yield
        return
    try:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise ValueError(
                        f"another process has been writing in {folder} for {patience:g} seconds; try again when it has "
                        "ended"
                    ) from None
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)


def digest(*parts: Mapping[str, "Tensor"], rows: "Callable[[Tensor], Tensor] | None" = None) -> str:
    """SHA-256 over names, types, shapes and bytes of tensors, part after part, each in its order.

    Of a tensor that is spread over ranks, `rows` gives the rows whose bytes count; the shape is that of the whole.
    """
    import torch

    sha = hashlib.sha256()
    for part in parts:
        for name, tensor in part.items():
            values = tensor.detach() if rows is None else rows(tensor.detach())
            sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            sha.update(values.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def mask_gaps(mask: np.ndarray) -> bytes:
    """A mask by the number of zeros before each of its ones, in Rice's code; `verify.mask_of_gaps` decodes it.

    One byte has the number r of low bits, five the number k of ones (the lowest byte first). Then follow the low r bits
    of every gap, highest bit first; then of every gap as many zeros as its other bits say, and a one. Both are filled
    with zeros to whole bytes. A random mask takes 0.4 to 2.4 % more than log2 binom(size, k) bits.
    """
    gaps = np.diff(np.flatnonzero(mask), prepend=-1) - 1
    count = len(gaps)
    r = min(range(int(gaps.sum() // max(count, 1)).bit_length() + 1), key=lambda r: r * count + int((gaps >> r).sum()))
    low = np.empty((count, r), np.uint8)
    for column in range(r):
        low[:, column] = (gaps >> (r - 1 - column)) & 1
    ends = np.cumsum((gaps >> r) + 1)
    high = np.zeros(int(ends[-1]) if count else 0, np.uint8)
    high[ends - 1] = 1
    return bytes([r]) + count.to_bytes(5, "little") + np.packbits(low).tobytes() + np.packbits(high).tobytes()
