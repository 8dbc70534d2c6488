"""The sampler in C++: sampler.cpp, built at its first use by the compiler that is found, and kept in the user's cache.

Hard gates are the reference's to the bit. The one exception is the coupling's logarithm, which may differ in its last
place, and with it about one gate in a million. Relaxed gates and normals agree to some units in the last place.
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
from pacprune.kernels.law import HARD, MAPPINGS, MODES, SIGMOID, Law, Layout, SampleInputs, layout, layouts, no_branch

NAME = "cpu"
_SOURCE = Path(__file__).with_name("sampler.cpp")
# Contraction would round differently in a vector and in its remainder; the other two let loops be vectorised.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-ffp-contract=off")
_FLAGS += ("-fno-math-errno", "-fno-trapping-math")
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
        *((name, _INT32) for name in ("mapping", "mode", "log_std", "keep", "group")),
        *((name, _FLOAT) for name in ("coupling", "beta", "theta", "steepness")),
    )


class _Job(ctypes.Structure):
    """`Job` in sampler.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("mean", "gate", "std", "seed", "step", "shift", "sharpness", "noise")),
        *((name, _POINTER) for name in ("to_draw", "out", "to_gate", "to_std")),
        *((name, _INT64) for name in ("k", "n", "offset", "row", "std_row", "std_column")),
        *((name, _INT32) for name in ("seed_row", "step_row", "shift_row", "sharpness_row", "noise_row")),
        *((name, _INT32) for name in ("mean_bf16", "gate_bf16", "draw_bf16")),
    )


def _compiler() -> list[str]:
    """The C++ compiler's command: $CXX, or the first of the usual names."""
    setting = os.environ.get("CXX")
    if setting:
        return shlex.split(setting)
    for name in ("c++", "g++", "clang++"):
        path = shutil.which(name)
        if path:
            return [path]
    raise NoCompiler("there is no C++ compiler here; install g++ or clang++, or set CXX, for much faster kernels")


def _machine() -> str:
    """What decides the instructions that -march=native allows."""
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
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "cpu.so"
        for threads in (["-fopenmp"], []):  # some compilers come without OpenMP
            command = [*compiler, *_FLAGS, *threads, "-o", str(built), str(_SOURCE)]
            try:
                process = subprocess.run(command, capture_output=True, text=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise OSError(f"the C++ compiler {shlex.join(compiler)} could not be run ({error}); set CXX") from error
            if process.returncode == 0:
                built.replace(target)  # atomic: no process can load half a file
                return target
    complaint = (process.stderr or process.stdout).strip().splitlines() or ["nothing"]
    raise OSError(f"the C++ compiler {shlex.join(compiler)} failed and said {complaint[0]!r}; set CXX to another one")


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
        function.restype = _INT32
    built = Library(code, shlex.join(compiler))
    _check(built)
    return built


def _check(built: Library) -> None:
    """Refuses a library whose draws are not the reference's."""
    ramp = torch.linspace(-3, 3, 301)
    inputs = SampleInputs(ramp, ramp.flip(0), None, torch.tensor(1), torch.tensor(2), 3)
    law = Law(mode=HARD)
    if not torch.equal(_draw(built, [inputs], law)[0], reference.draw([inputs], law)[0]):
        raise OSError(f"what {built.compiler} built draws other weights than plain torch; set CXX to another compiler")


def _law(law: Law) -> _Law:
    # Groups have no mapping of their own there: they are told by their size.
    mapping = MAPPINGS[SIGMOID if law.pattern else law.mapping].number
    groups = law.pattern or (0, 0)
    return _Law(mapping, MODES[law.mode].number, law.log_std, *groups, law.coupling, law.beta, law.theta, law.steepness)


def _job(inputs: SampleInputs, rows: Layout, alive: list[Tensor], *, draw_dtype: torch.dtype) -> _Job:
    """One tensor's addresses and sizes; copies of tensors that are not contiguous go to `alive`."""

    def address(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        alive.append(tensor.contiguous())
        return alive[-1].data_ptr()

    counters = inputs.counters
    return _Job(
        *(address(t) for t in (inputs.mean, inputs.gate, rows.std, *counters)),
        *(None,) * 4,
        *(rows.k, rows.n, inputs.offset, rows.row, rows.std_row, rows.std_column),
        *(int(t is not None and t.ndim > 0) for t in counters),
        inputs.mean.dtype == torch.bfloat16,
        inputs.gate.dtype == torch.bfloat16,
        draw_dtype == torch.bfloat16,
    )


def draw(all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """`kernels.draw`."""
    return _draw(library(), all_inputs, law)


def next_scores(all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    """`kernels.next_scores`, in plain torch: a logarithm and a sum need no kernel here."""
    return reference.next_scores(all_inputs, law)


def _draw(built: Library, all_inputs: Sequence[SampleInputs], law: Law) -> list[Tensor]:
    rows, alive = layouts(all_inputs), []
    results = _room(all_inputs, rows)
    jobs = (_Job * len(rows))(
        *[_job(i, r, alive, draw_dtype=w.dtype) for i, r, w in zip(all_inputs, rows, results, strict=True)]
    )
    for job, result in zip(jobs, results, strict=True):
        job.out = result.data_ptr()
    if not built.code.pacprune_draw(jobs, len(jobs), _law(law), torch.get_num_threads()):
        raise no_branch(law, _SOURCE.name)
    return results


def _room(all_inputs: Sequence[SampleInputs], rows: Sequence[Layout]) -> list[Tensor]:
    """Room for the draws of all tensors in one buffer."""
    types = [inputs.dtype or inputs.mean.dtype for inputs in all_inputs]
    device = all_inputs[0].mean.device
    if len(rows) == 1:
        return [torch.empty(rows[0].shape, dtype=types[0], device=device)]
    sizes = [r.shape.numel() * t.itemsize for r, t in zip(rows, types, strict=True)]
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    places = zip(starts, sizes, types, rows, strict=True)
    return [memory[start : start + size].view(kind).view(r.shape) for start, size, kind, r in places]


def gradients(inputs: SampleInputs, law: Law, out: Tensor, needs: tuple[bool, bool, bool]) -> reference.Gradients:
    """`kernels.gradients`."""
    alive = [out.contiguous()]
    job = _job(inputs, layout(inputs), alive, draw_dtype=out.dtype)
    job.to_draw = alive[0].data_ptr()
    to_mean = torch.empty(inputs.mean.shape, dtype=inputs.mean.dtype) if needs[0] else None
    to_gate = torch.empty(inputs.gate.shape, dtype=inputs.gate.dtype) if needs[1] else None
    to_std = torch.empty(inputs.mean.shape) if needs[2] and inputs.std is not None else None
    for name, tensor in (("out", to_mean), ("to_gate", to_gate), ("to_std", to_std)):
        setattr(job, name, None if tensor is None else tensor.data_ptr())
    if not library().code.pacprune_gradients(ctypes.byref(job), 1, _law(law), torch.get_num_threads()):
        raise no_branch(law, _SOURCE.name)
    return to_mean, to_gate, None if to_std is None else reference.summed(to_std, inputs)
