"""What torch.distributed is asked: who takes which part, sums of gradients, and whether all ranks hold the same.

Without a process group, or in one of a single process, every function here gives back what it was given.
"""

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["barrier", "gathered", "joined", "on_rank0", "part", "rank", "world"]

_T = TypeVar("_T")
_BUCKET = 2**22
"""About how many numbers are summed over the ranks in one exchange."""
_PATIENCE = timedelta(minutes=10)
"""How long the ranks wait for each other where a stage starts: they have done the same work up to there."""
_host_group: list[tuple[Any, Any]] = []
"""(the process group, its gloo group for messages between the hosts); empty until one is asked for."""


@contextmanager
def joined(device: str = "cpu") -> Iterator[torch.device]:
    """Joins the ranks that torchrun started, for as long as the `with` block lasts.

    The ranks exchange messages by gloo on a CPU and by nccl on GPUs, of which every rank takes its own by LOCAL_RANK. A
    process that was not started by torchrun has nothing to join.

    Args:
        device: "cpu", or "cuda" for one GPU per rank.

    Returns:
        A context that gives this rank's device.

    Example:
        >>> with pp.ranks.joined("cpu") as device:  # torchrun --nproc-per-node 2 script.py
        ...     pruned = pp.osp(model.to(device), (x, y), pp.Config(epochs=1), sparsity=0.9)
        >>> device
        device(type='cpu')
    """
    try:
        rank_device = torch.device(device)
    except RuntimeError as failure:
        reason = str(failure).partition("\n")[0]
        raise ValueError(f"the device {device!r} cannot be used here ({reason}); use --device cpu") from None
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield rank_device
        return
    if rank_device.type == "cuda":
        number = int(os.environ["LOCAL_RANK"]) if rank_device.index is None else rank_device.index
        rank_device = torch.device("cuda", number)
        torch.cuda.set_device(rank_device)
    dist.init_process_group("nccl" if rank_device.type == "cuda" else "gloo")
    yield rank_device
    # Not after a failure: the other ranks may wait in an exchange that leaving in order would wait for, too.
    _host_group.clear()
    # A model that fully_shard has cut holds the group in a cycle; only once nobody does are the group's threads ended,
    # and one that let go of a tensor while the interpreter shuts down would abort a job that is done.
    gc.collect()
    dist.destroy_process_group()


def world() -> int:
    """How many processes train together.

    Returns:
        Their number; 1 outside torchrun.

    Example:
        >>> pp.ranks.world()
        1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0.

    Returns:
        A number below `world()`; 0 outside torchrun.

    Example:
        >>> if pp.ranks.rank() == 0:
        ...     print("said once")
        said once
    """
    return dist.get_rank() if world() > 1 else 0


def part(count: int) -> tuple[int, int]:
    """The contiguous range of `count` things that this rank takes; sizes differ by one at most.

    Args:
        count: How many there are, for all ranks together.

    Returns:
        (first, end) of this rank's range.

    Example:
        >>> pp.ranks.part(1437)
        (0, 1437)
    """
    return count * rank() // world(), count * (rank() + 1) // world()


def check_batch(size: int) -> None:
    """Refuses a global batch that is no multiple of the number of ranks."""
    if size % world():
        raise ValueError(
            f"batch_size {size} cannot be split over {world()} ranks; choose a multiple of {world()}, "
            "or start another number of ranks"
        )


@contextmanager
def contact(*, sure: bool = True) -> Iterator[None]:
    """Says in words that another rank is gone; torch's own message names a socket.

    Around more than exchanges it is not `sure` that a failure is theirs: then its text has to name their library.
    """
    try:
        yield
    except RuntimeError as failure:
        if not sure and not any(word in str(failure).lower() for word in ("gloo", "nccl", "connection")):
            raise
        reason = str(failure).partition("\n")[0]
        raise ConnectionError(
            f"rank {rank()} of {world()} lost contact with the others, of which one has ended or hangs ({reason}); "
            "see what that one said, and start all ranks again: with a checkpoint they go on from the last one"
        ) from failure


def _hosts() -> Any:
    """A group that takes CPU tensors and Python values: the ranks' own if it is gloo, else one beside it."""
    world_group = dist.group.WORLD
    if not _host_group or _host_group[0][0] is not world_group:
        group = world_group if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        _host_group[:] = [(world_group, group)]
    return _host_group[0][1]


def barrier() -> None:
    """Waits for all ranks, and says which did not come.

    Example:
        >>> pp.ranks.barrier()
    """
    if world() > 1:
        with contact():
            dist.monitored_barrier(_hosts(), timeout=_PATIENCE, wait_all_ranks=True)


def gathered(value: _T) -> list[_T]:
    """What every rank gave, by rank; all ranks have to call it.

    Args:
        value: This rank's, which must be picklable.

    Returns:
        One value per rank.

    Example:
        >>> pp.ranks.gathered("of rank 0")
        ['of rank 0']
    """
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    with contact():
        dist.all_gather_object(values, value, group=_hosts())
    return values


def on_rank0(make: Callable[[], _T]) -> _T:
    """What rank 0 makes, on all ranks; only rank 0 calls `make`, and where it fails all ranks fail.

    Args:
        make: A function without arguments, such as one that reads or writes a file; its result must be picklable.

    Returns:
        What it returned on rank 0.

    Example:
        >>> pp.ranks.on_rank0(lambda: "written by one rank alone")
        'written by one rank alone'
    """
    if world() == 1:
        return make()
    message: list[Any] = [None, ""]
    failure: Exception | None = None
    if rank() == 0:
        try:
            message[0] = make()
        except Exception as raised:
            failure, message[1] = raised, f"{type(raised).__name__}: {raised}"
    with contact():
        dist.broadcast_object_list(message, src=0, group=_hosts())
    if failure is not None:
        raise failure
    result, reason = message
    if reason:
        raise ConnectionError(f"rank 0 failed, and rank {rank()} ends with it; its reason was {reason}")
    return result


def require_equal(digests: Mapping[str, tuple[str, str]]) -> None:
    """Refuses when a rank holds something else than rank 0: {what: (its digest, what to do)}, the first one named."""
    if world() == 1:
        return
    by_rank = gathered({what: digest for what, (digest, _) in digests.items()})
    for what, (_, advice) in digests.items():
        differing = [r for r, theirs in enumerate(by_rank) if theirs[what] != by_rank[0][what]]
        if differing:
            alone = f"rank {differing[0]} differs from rank 0 in its"
            several = f"ranks {', '.join(map(str, differing))} differ from rank 0 in their"
            both = f"{by_rank[differing[0]][what][:20]} and {by_rank[0][what][:20]}"
            raise ValueError(f"{several if differing[1:] else alone} {what} ({both}); {advice}")


def sum_(value: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    if world() > 1:
        with contact():
            dist.all_reduce(value)
    return value


def least_(value: Tensor) -> Tensor:
    """The minimum over all ranks, in place."""
    if world() > 1:
        with contact():
            dist.all_reduce(value, op=dist.ReduceOp.MIN)
    return value


def mean(value: Tensor, share: float) -> Tensor:
    """sum over ranks of share * value, where the shares add up to 1; its derivative in this rank's value is 1.

    So a function f of the mean of all ranks has gradients share * f' * d value, whose sum over ranks is that of f.
    """
    if world() == 1:
        return value
    return sum_(value.detach() * share) + (value - value.detach())


@torch.no_grad()
def average_(buffers: Sequence[Tensor]) -> None:
    """Makes floating-point buffers the mean over all ranks, in place; what is equal already stays so to the bit."""
    if world() == 1:
        return
    for buffer in buffers:
        if not buffer.is_floating_point():
            continue
        with contact():
            base = buffer.clone()
            dist.broadcast(base, src=0)
            # Not the plain mean: (x + x + x) / 3 need not be x, and of an infinite x there is no difference.
            difference = torch.where(buffer == base, 0, buffer - base)
            dist.all_reduce(difference)
            buffer.copy_(torch.where(difference == 0, base, base + difference / world()))


class Gradients:
    """Sums of the gradients of all ranks, a bucket at a time, while the backward pass still computes the others.

    Buckets are sent in the same order everywhere, the last parameters first, since theirs are ready first. A number per
    parameter says whether a rank has its gradient: what no rank has stays None.
    """

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._buckets: list[list[nn.Parameter]] = []
        self._sent: list[tuple[Tensor, Any]] = []
        if world() == 1:
            return
        for p in reversed([p for p in params if p.requires_grad]):
            last = self._buckets[-1] if self._buckets else []
            alike = last and (last[0].dtype, last[0].device) == (p.dtype, p.device)
            if alike and sum(q.numel() for q in last) + p.numel() <= _BUCKET:
                last.append(p)
            else:
                self._buckets.append([p])
        self._ones = [
            torch.ones(len(bucket), dtype=bucket[0].dtype, device=bucket[0].device) for bucket in self._buckets
        ]

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Around the last backward pass of a step: a bucket is sent as soon as its gradients are complete."""
        ready: set[int] = set()

        def note(p: Tensor) -> None:
            ready.add(id(p))
            while len(self._sent) < len(self._buckets) and all(id(q) in ready for q in self._buckets[len(self._sent)]):
                self._send()

        handles = [p.register_post_accumulate_grad_hook(note) for bucket in self._buckets for p in bucket]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _send(self) -> None:
        number = len(self._sent)
        bucket, flags = self._buckets[number], self._ones[number]
        has_gradient = [p.grad is not None for p in bucket]
        if not all(has_gradient):
            flags = torch.tensor(has_gradient, dtype=flags.dtype, device=flags.device)
        flat = torch.cat([flags, *((torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in bucket)])
        with contact():
            self._sent.append((flat, dist.all_reduce(flat, async_op=True)))

    @torch.no_grad()
    def sum_(self) -> None:
        """Sends what is left, waits, and puts the sums where the gradients were."""
        while len(self._sent) < len(self._buckets):
            self._send()
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            with contact():
                work.wait()
            flags, *sums = flat.split([len(bucket), *(p.numel() for p in bucket)])
            for k, (p, total) in enumerate(zip(bucket, sums, strict=True)):
                if p.grad is not None:
                    p.grad.copy_(total.view_as(p))
                elif bool(flags[k] > 0):
                    p.grad = total.view_as(p).clone()
        self._sent = []
