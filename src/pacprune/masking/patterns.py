"""N:M patterns: of every M consecutive weights of a row, N are kept, which is what fast sparse kernels ask for.

A row is all that one output is made from: the inputs of a Linear [out, in], the in * height * width numbers of a
convolution. For training, every weight has a gate, and the gates of a group of M share what they keep (see
`kernels.law.PATTERNS`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pacprune.data import trace
from pacprune.distributed import like, local
from pacprune.kernels.law import PATTERNS
from pacprune.types import check_name

__all__ = ["KERNEL", "PATTERNS", "check", "sparsity", "to_semi_structured", "top"]

KERNEL = PATTERNS["2:4"]
"""What the sparse kernels of GPUs multiply with; 1:4 is a special case of it."""
_KERNEL_TYPES = (torch.float16, torch.bfloat16)


def parse(pattern: str) -> tuple[int, int]:
    """(N, M) of a pattern, which is a key of `PATTERNS`."""
    check_name("pattern", pattern, PATTERNS)
    return PATTERNS[pattern]


def sparsity(pattern: str) -> float:
    """The fraction that a pattern prunes, 1 - N / M.

    Args:
        pattern: A key of `PATTERNS`, such as "2:4".

    Returns:
        A fraction in (0, 1).

    Raises:
        ValueError: If the pattern is unknown.

    Example:
        >>> pp.patterns.sparsity("2:4")
        0.5
    """
    n, m = parse(pattern)
    return 1 - n / m


def grouped(weight: Tensor, m: int, *, name: str = "the weight", members: bool = False) -> Tensor:
    """[rows, groups, M]: a row's weights in groups; with `members`, the first dimension is K models."""
    lead = 2 if members else 1
    inner = weight.shape[lead:].numel()
    if weight.ndim <= lead or inner % m:
        raise ValueError(
            f"{name} has rows of {inner} weights, which cannot be cut into groups of {m}; "
            "leave this layer out by exclude="
        )
    return weight.reshape(*weight.shape[:lead], inner // m, m)


def top(scores: Mapping[str, Tensor], pattern: str, ties: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The mask that keeps the N largest scores of every group of M.

    Args:
        scores: One number per weight, larger = keep.
        pattern: A key of `PATTERNS`, such as "2:4".
        ties: What decides between equal scores, larger = keep; then, and without it, the first ones are kept.

    Returns:
        A mask: True where a weight is kept.

    Raises:
        ValueError: If the pattern is unknown, or a tensor cannot be cut into groups of M.

    Example:
        >>> mask = pp.patterns.top(pp.scores.magnitude(model), "2:4")
        >>> sum(int(m.sum()) for m in mask.values())
        592
    """
    n, m = parse(pattern)
    mask = {}
    for name, score in scores.items():
        groups = grouped(local(score.detach()), m, name=name)
        order = ranked(groups, None if ties is None else grouped(local(ties[name].detach()), m, name=name))
        keep = torch.zeros(groups.shape, dtype=torch.bool, device=score.device)
        mask[name] = like(keep.scatter_(-1, order[..., :n], True).reshape(local(score).shape), score)
    trace.note(mask, trace.noted([*scores.values(), *({} if ties is None else ties).values()]))
    return mask


def ranked(score: Tensor, ties: Tensor | None = None) -> Tensor:
    """The places along the last dimension, the best first; equals by `ties`, then by position."""
    order = torch.arange(score.shape[-1], device=score.device).expand_as(score)
    for key in (score,) if ties is None else (ties, score):
        # From the last key to the first, since a stable sort leaves equals as the sort before put them.
        order = order.gather(-1, torch.argsort(key.gather(-1, order), dim=-1, descending=True, stable=True))
    return order


def protected_scores(scores: Mapping[str, Tensor], pattern: str) -> dict[str, Tensor]:
    """The scores, infinite where the pattern keeps a weight: pruned by these step by step, a model ends in it."""
    mask = top(scores, pattern)
    protected = {name: torch.where(mask[name], torch.inf, score) for name, score in scores.items()}
    trace.note(protected, trace.noted(mask.values()))
    return protected


def check(weight: Tensor, n: int, m: int, *, name: str = "the weight") -> None:
    """Refuses a weight with more than N nonzeros in a group of M, or a mask with other than N.

    Args:
        weight: A weight of shape [out, ...], or a mask of type bool.
        n: How many of a group are kept.
        m: The size of a group.
        name: What the error calls the weight.

    Raises:
        ValueError: If a group does not fit.

    Example:
        >>> pp.patterns.check(torch.tensor([[1.0, 0.0, 0.0, 2.0]]), 2, 4)
        >>> pp.patterns.check(torch.ones(1, 4), 2, 4, name="fc.weight")
        Traceback (most recent call last):
            ...
        ValueError: fc.weight is not 2:4: 1 of its 1 groups differ, and group 0 of row 0 keeps 4 of 4; ...
    """
    counts = (grouped(local(weight.detach()), m, name=name) != 0).sum(-1)
    wrong = (counts != n) if weight.dtype == torch.bool else (counts > n)
    if bool(wrong.any()):
        row, group = (int(i) for i in torch.nonzero(wrong)[0])
        raise ValueError(
            f"{name} is not {n}:{m}: {int(wrong.sum())} of its {counts.numel()} groups differ, and group {group} of "
            f"row {row} keeps {int(counts[row, group])} of {m}; prune with pattern='{n}:{m}'"
        )


def to_semi_structured(model: nn.Module) -> list[str]:
    """Hands the Linear weights that are 2:4, in place, to torch's semi-structured kernels.

    For inference alone, on CUDA, in float16 or bfloat16. Layers that are not 2:4, and shapes that the kernels do not
    take, stay as they are.

    Args:
        model: A pruned model; it is changed in place.

    Returns:
        The names of the weights that were handed over.

    Raises:
        ValueError: If a weight is not on CUDA in float16 or bfloat16, or no weight can be handed over.

    Example:
        >>> layers = torch.nn.Flatten(), torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)
        >>> net = torch.nn.Sequential(*layers)
        >>> pruned = pp.osp(net, split.train, pp.Config(epochs=1), pattern="2:4")
        >>> pp.patterns.to_semi_structured(net.to("cuda", torch.bfloat16))  # doctest: +SKIP
        ['1.weight']
    """
    layers = {f"{n}.weight".lstrip("."): m for n, m in model.named_modules() if type(m) is nn.Linear}
    for name, layer in layers.items():
        if layer.weight.device.type != "cuda" or layer.weight.dtype not in _KERNEL_TYPES:
            raise ValueError(
                f"{name} is {layer.weight.dtype} on {layer.weight.device}, but semi-structured kernels take "
                "float16 or bfloat16 on CUDA; call model.to('cuda', torch.bfloat16) first"
            )
    handed_over = []
    for name, layer in layers.items():
        if _fits_kernel(layer.weight.detach()):
            sparse = torch.sparse.to_sparse_semi_structured(layer.weight.detach())
            layer.weight = nn.Parameter(sparse, requires_grad=False)
            handed_over.append(name)
    if not handed_over:
        raise ValueError(
            f"none of the {len(layers)} Linear layers has a 2:4 weight with rows in multiples of 32 and columns in "
            "multiples of 64; prune with pattern='2:4' or '1:4' first"
        )
    return handed_over


def _fits_kernel(weight: Tensor) -> bool:
    """Whether a weight is 2:4, in a shape that the kernels of both of torch's libraries take."""
    rows, columns = weight.shape
    if rows % 32 or columns % 64:
        return False
    return follows(weight, *KERNEL)


def follows(weight: Tensor, n: int, m: int) -> bool:
    """Whether no group of M has more than N nonzeros."""
    return not bool(((grouped(weight, m) != 0).sum(-1) > n).any())
