"""A 2:4 weight stored dense, beside the same weight in torch's sparse kernels."""

import copy
import warnings
from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from pacprune.bench.timing import Finding, alternate, duration
from pacprune.masking import masks, patterns


def pattern(device: torch.device, *, scale: str) -> Iterator[Finding]:
    """A Linear layer in inference: its 2:4 weight stored dense, beside the same weight in torch's sparse kernels."""
    on_cuda = device.type == "cuda"
    dtype, sparse_kernels = (torch.bfloat16, "semi-structured kernels") if on_cuda else (torch.float32, "CSR")
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
            else:
                sparse.weight = nn.Parameter(dense.weight.detach().to_sparse_csr(), requires_grad=False)
        x = torch.randn(inputs, width, device=device, dtype=dtype)
        calls = {"dense": partial(dense, x), "sparse": partial(sparse, x)}
        with torch.no_grad():
            times = alternate(calls, device, seconds=duration(scale, 1.0))
        name = f"Linear {width:,} x {width:,}, 2:4 held dense, {inputs:,} inputs, {str(dtype).removeprefix('torch.')}"
        yield times.row(name, "dense", "sparse", relative_to=f"2:4 in torch's {sparse_kernels}")
