"""A 2:4 weight stored dense, beside the same weight in torch's sparse kernels."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import nn

from pacprune.bench.timing import Call, Finding, alternate, cuda_graph, duration
from pacprune.masking import masks, patterns

CALLS = 50
"""In one CUDA graph: they start without Python, and starting the graph costs each of them little."""


def pattern(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """A Linear layer in inference: its 2:4 weight stored dense, beside the same weight in torch's sparse kernels.

    On a GPU every layer is measured twice: called from Python, which pays for what happens on the host before a kernel
    starts, and as a CUDA graph of CALLS calls, in which the kernels alone take time.
    """
    on_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    sizes = {"smoke": [(64, 32)], "cuda": [(1024, 8192), (4096, 32), (4096, 512), (4096, 8192), (8192, 8192)]}
    for width, inputs in sizes.get(scale, [(1024, 32)]):
        dense = nn.Linear(width, width, bias=False, device=device, dtype=dtype)
        with torch.no_grad():
            dense.weight.mul_(masks.top_k({"weight": dense.weight.float().abs()}, pattern="2:4")["weight"])
        sparse = copy.deepcopy(dense)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # sparse tensors are in beta state
            if on_cuda:
                patterns.to_semi_structured(nn.Sequential(sparse))
                library = type(sparse.weight.data).__name__.removeprefix("SparseSemiStructuredTensor")
                kernels = f"semi-structured kernels ({library})"
            else:
                sparse.weight = nn.Parameter(dense.weight.detach().to_sparse_csr(), requires_grad=False)
                kernels = "CSR"
        x = torch.randn(inputs, width, device=device, dtype=dtype)
        name = f"Linear {width:,} x {width:,}, 2:4 held dense, {inputs:,} inputs, {str(dtype).removeprefix('torch.')}"
        calls = {"dense": partial(dense, x), "sparse": partial(sparse, x)}
        yield from _compared(name, calls, device, scale=scale, kernels=kernels, graphs=on_cuda)


@torch.no_grad()
def _compared(
    name: str, calls: Mapping[str, Call], device: torch.device, *, scale: str, kernels: str, graphs: bool
) -> Iterator[Finding]:
    """The time of the dense layer relative to the sparse one, from Python and then by their kernels alone."""
    relative_to = f"2:4 in torch's {kernels}"
    times = alternate(calls, device, seconds=duration(scale, 1.0))
    yield times.row(f"{name}, called from Python" if graphs else name, "dense", "sparse", relative_to=relative_to)
    if not graphs:
        return
    try:
        recorded = {kind: cuda_graph(_repeated(call), device) for kind, call in calls.items()}
    except RuntimeError as error:
        yield f"{name}: not measured as a CUDA graph, since torch says: {str(error).splitlines()[0]}"
        return
    times = alternate(recorded, device, seconds=duration(scale, 1.0))
    label = f"{name}, {CALLS} calls in one CUDA graph"
    yield times.row(label, "dense", "sparse", relative_to=relative_to, unit="ms per call", per=CALLS)


def _repeated(call: Call) -> Call:
    """A call that calls so often as a graph holds."""

    def repeat() -> None:
        for _ in range(CALLS):
            call()

    return repeat
