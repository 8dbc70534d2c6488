"""The sampler in C++: sampler.cpp, built at its first use by the compiler that is found, and kept in the user's cache.

Hard gates are the reference's to the bit, but for the coupling's logarithm, which may differ in its last place and with
it about one gate in a million; relaxed gates and normals agree to some units in the last place.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pacprune.kernels import reference
from pacprune.kernels.law import (
    CLAMP,
    GIVEN,
    HARD,
    NOISELESS,
    SIGMOID,
    SOFT,
    STRAIGHT_THROUGH,
    STRETCHED,
    Law,
    SampleInputs,
    layout,
    shape,
)

NAME = "cpu"
_SOURCE = Path(__file__).with_name("sampler.cpp")
# Contraction would round differently in a vector and in its remainder; the other two let loops be vectorised.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off")
_FLAGS += ("-fno-math-errno", "-fno-trapping-math")
_MAPPINGS, _MODES = (SIGMOID, CLAMP, GIVEN), (SOFT, STRAIGHT_THROUGH, HARD, STRETCHED, NOISELESS)
_ALIGNED = 64
_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class NoCompiler(OSError):
    """There is nothing to build the library with."""


class Library(NamedTuple):
    """The loaded library and the command that built it."""

    code: ctypes.CDLL
    compiler: str


class _Law(ctypes.Structure):
    """`Law` in sampler.cpp."""

    _fields_ = (
        *((name, _INT32) for name in ("mapping", "mode", "log_std")),
        *((name, _FLOAT) for name in ("coupling", "beta")),
    )


class _Job(ctypes.Structure):
    """`Job` in sampler.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("mean", "gate", "std", "seed", "step", "shift", "sharpness")),
        *((name, _POINTER) for name in ("given", "out", "to_gate", "to_std")),
        *((name, _INT64) for name in ("k", "n", "offset", "row", "std_row", "std_column")),
        *((name, _INT32) for name in ("seed_row", "step_row", "shift_row", "sharpness_row")),
        *((name, _INT32) for name in ("mean_bf16", "draw_bf16")),
    )


def _compiler() -> list[str]:
    """The C++ compiler's command: $CXX, or the first of the usual names."""
    asked = os.environ.get("CXX")
    if asked:
        return shlex.split(asked)
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found:
            return [found]
    raise NoCompiler("there is no C++ compiler here; install g++ or clang++, or set CXX, for much faster kernels")


def _machine() -> str:
    """What the instructions of -march=native follow from."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return "\n".join([platform.machine(), platform.processor(), *sorted({x for x in lines if x.startswith("flags")})])


def _build(compiler: list[str], folder: Path) -> Path:
    """The shared library in `folder`, built if it is not there; safe when several processes do so at once."""
    key = "\0".join([_SOURCE.read_text(), *compiler, *_FLAGS, _machine()])
    target = folder / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = Path(own) / "cpu.so"
        for threads in (["-fopenmp"], []):  # some compilers come without OpenMP
            command = [*compiler, *_FLAGS, *threads, "-o", str(built), str(_SOURCE)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise OSError(f"the C++ compiler {shlex.join(compiler)} could not be run ({error}); set CXX") from error
            if done.returncode == 0:
                built.replace(target)  # at once: nobody can load a half
                return target
    said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
    raise OSError(f"the C++ compiler {shlex.join(compiler)} failed and said {said[0]!r}; set CXX to another one")


@functools.cache
def library() -> Library:
    """The library, built at the first call; an OSError with one sentence where that cannot be done."""
    compiler = _compiler()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pacprune" / "kernels"
    try:
        path = _build(compiler, cache)
    except PermissionError:
        path = _build(compiler, Path(tempfile.mkdtemp(prefix="pacprune-")))
    code = ctypes.CDLL(str(path))
    for function in (code.pacprune_draw, code.pacprune_gradients):
        function.argtypes = [ctypes.POINTER(_Job), _INT64, ctypes.POINTER(_Law), ctypes.c_int]
        function.restype = None
    found = Library(code, shlex.join(compiler))
    _check(found)
    return found


def _check(found: Library) -> None:
    """Refuses a library whose draws are not the reference's."""
    ramp = torch.linspace(-3, 3, 301)
    part = SampleInputs(ramp, ramp.flip(0), None, torch.tensor(1), torch.tensor(2), 3)
    law = Law(mode=HARD)
    if not torch.equal(_draw(found, [part], law)[0], reference.draw(part, law)):
        raise OSError(f"what {found.compiler} built draws other weights than plain torch; set CXX to another compiler")


def _law(law: Law) -> _Law:
    return _Law(_MAPPINGS.index(law.mapping), _MODES.index(law.mode), law.log_std, law.coupling, law.beta)


def _job(part: SampleInputs, kept: list[Tensor], *, draw_dtype: torch.dtype) -> _Job:
    """A part's addresses and sizes; copies of tensors that are not contiguous go to `kept`."""
    rows, std = layout(part)

    def address(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        kept.append(tensor.contiguous())
        return kept[-1].data_ptr()

    counters = (part.seed, part.step, part.shift, part.sharpness)
    return _Job(
        *(address(t) for t in (part.mean, part.gate, std, *counters)),
        *(None,) * 4,
        *(rows.k, rows.n, part.offset, rows.row, rows.std_row, rows.std_column),
        *(int(t is not None and t.ndim > 0) for t in counters),
        part.mean.dtype == torch.bfloat16,
        draw_dtype == torch.bfloat16,
    )


def draw(parts: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """`kernels.draw`."""
    return _draw(library(), parts, law)


def _draw(found: Library, parts: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    kept, results = [], flat(parts)
    jobs = (_Job * len(parts))(*[_job(p, kept, draw_dtype=w.dtype) for p, w in zip(parts, results, strict=True)])
    for job, result in zip(jobs, results, strict=True):
        job.out = result.data_ptr()
    found.code.pacprune_draw(jobs, len(parts), _law(law), torch.get_num_threads())
    return results


def flat(parts: Sequence[SampleInputs]) -> list[Tensor]:
    """Room for the draws of all parts in one buffer."""
    types = [part.dtype or part.mean.dtype for part in parts]
    shapes = [shape(part) for part in parts]
    if len(parts) == 1:
        return [torch.empty(shapes[0], dtype=types[0], device=parts[0].mean.device)]
    sizes = [s.numel() * t.itemsize for s, t in zip(shapes, types, strict=True)]
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    memory = torch.empty(end, dtype=torch.uint8, device=parts[0].mean.device)
    room = zip(starts, sizes, types, shapes, strict=True)
    return [memory[start : start + size].view(kind).view(form) for start, size, kind, form in room]


def gradients(part: SampleInputs, law: Law, out: Tensor, needs: tuple[bool, bool, bool]) -> reference.Gradients:
    """`kernels.gradients`."""
    kept = [out.contiguous()]
    job = _job(part, kept, draw_dtype=out.dtype)
    job.given = kept[0].data_ptr()
    to_mean = torch.empty(part.mean.shape, dtype=part.mean.dtype) if needs[0] else None
    to_gate = torch.empty(part.gate.shape) if needs[1] else None
    to_std = torch.empty(part.mean.shape) if needs[2] and part.std is not None else None
    for name, tensor in (("out", to_mean), ("to_gate", to_gate), ("to_std", to_std)):
        setattr(job, name, None if tensor is None else tensor.data_ptr())
    library().code.pacprune_gradients(ctypes.byref(job), 1, _law(law), torch.get_num_threads())
    return to_mean, to_gate, None if to_std is None else reference.summed(to_std, part)
