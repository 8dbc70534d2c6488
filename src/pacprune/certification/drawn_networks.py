"""Errors of networks drawn from a SpikeSlab, many draws at a time: a population of K networks in one call."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from pacprune import philox
from pacprune.data.batches import device_of
from pacprune.data.splits import Part
from pacprune.distributed import ranks
from pacprune.masking.spikeslab import SpikeSlab, draw_weights, top_mask
from pacprune.training.evaluate import answers, evaluating, mistakes
from pacprune.types import Progress

MACHINES = 4
"""How much larger another machine's rounding errors may be than those that are measured on this one."""
WEIGHTS_AT_ONCE = {"cpu": 2**20, "cuda": 2**28}
"""About how many weights are drawn at once: what a cache holds, or what keeps a GPU busy while Python prepares more."""


@dataclass(frozen=True, eq=False)
class Counts:
    """Per draw, out of `batch` examples: where it errs; where it errs and the reference does not; and the reverse.

    `first` is the number of the first draw, so that the counts of several workers can be put together.
    """

    batch: int
    wrong: Tensor
    plus: Tensor
    minus: Tensor
    first: int = 0

    def __len__(self) -> int:
        return len(self.wrong)

    @property
    def risk(self) -> float:
        """Mean error rate of the draws."""
        return int(self.wrong.sum()) / (len(self) * self.batch)


def outputs(plain: nn.Module, slab: SpikeSlab, x: Tensor, *, seed: int, steps: Tensor) -> Tensor:
    """Outputs of draw number steps[k] on its own inputs x[k], for all k in one call where vmap can."""
    networks = draw_weights(slab, seed=seed, step=steps)

    def call(network: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return answers(plain, inputs, network)

    if not any(isinstance(module, nn.RNNBase) for module in plain.modules()):  # vmap has no rule for them
        try:
            with warnings.catch_warnings():
                # Attention has no rule either, but vmap then loops over that one operation alone, which is fast.
                warnings.filterwarnings("ignore", message="There is a performance drop")
                return torch.vmap(call)(networks, x)
        except torch.OutOfMemoryError:
            raise  # a loop would need less memory, but take many times as long
        except RuntimeError:
            pass  # vmap cannot serve a network that looks at its own numbers; an error of its own comes again below
    return torch.stack([call({name: w[k] for name, w in networks.items()}, x[k]) for k in range(len(steps))])


def thresholded(slab: SpikeSlab) -> dict[str, Tensor]:
    """Weights of the deterministic network behind a distribution: mean where keep_prob is among the top k, else 0.

    k is the expected number of kept weights; ties go by magnitude.
    """
    return {name: torch.where(keep, slab.mean[name], 0.0) for name, keep in top_mask(slab).items()}


def errors(plain: nn.Module, weights: dict[str, Tensor], part: Part) -> Tensor:
    """Which examples of a part the network with these weights gets wrong, as a bool tensor on the model's device."""
    device = device_of(plain)
    weights = {name: w.to(device) for name, w in weights.items()}
    with evaluating(plain):
        wrong = [
            mistakes(answers(plain, x, weights), y.to(device))
            for x, y in zip(part.x.split(1000), part.y.split(1000), strict=True)
        ]
    return torch.cat(wrong)


def minibatches(n: int, batch: int, *, seed: int, steps: Tensor, device: torch.device) -> Tensor:
    """The examples of each draw: `batch` indices below n, independent and with replacement, from (seed, step)."""
    word = philox.words(2 * batch, seed=seed, step=steps, stream=philox.BATCH, device=device)
    return philox.below(n, word)


def monte_carlo(
    plain: nn.Module,
    slab: SpikeSlab,
    part: Part,
    reference: Tensor,
    *,
    seed: int,
    batch: int,
    draws: int,
    first: int = 0,
    watch: Callable[[Counts], tuple[bool, dict[str, float]]] | None = None,
    stage: str = "draws",
    progress: Progress | None = None,
    over_ranks: bool = False,
) -> Counts:
    """Counts of `draws` draws t = first, first + 1, ... of `slab`, each on its own minibatch of `part`.

    `reference` says which examples of the part the reference network gets wrong. `watch` sees the counts now and
    then and returns whether they are enough, and what to show. Draw t is a function of (seed, t), so any worker can
    make it; draws are kept in order, and none is left out: see `merge`. `over_ranks`: all ranks call this, each makes a
    contiguous part of the draws up to the next look, and all see, and end with, the counts of all.
    """
    if draws < 1:
        raise ValueError(f"draws is {draws}; at least 1 is needed")
    device = device_of(plain)
    chunk, count = chunk_size(slab, device), draw_counter(plain, slab, part, reference, seed=seed, batch=batch)
    pieces: list[Counts] = []
    row: dict[str, float] = {}

    def count_range(low: int, high: int) -> Counts | None:
        """Counts of draws low to high - 1, a chunk at a time; None when there are none."""
        table: list[Tensor] = []
        for start in range(low, high, chunk):
            table.append(count(torch.arange(start, min(start + chunk, high), device=device) + first))
            if progress and start + chunk < high:
                progress(stage, start + chunk, draws, row)
        return _counts(table, batch, first + low) if table else None

    done, check_at = 0, 1000  # and then at a quarter more each time, whatever the chunk is on this device
    enough = False
    while done < draws and not enough:
        end = min(check_at, draws)
        low, high = (done + offset for offset in ranks.part(end - done)) if over_ranks else (done, end)
        piece = count_range(low, high)
        pieces += [counts for counts in (ranks.gathered(piece) if over_ranks else [piece]) if counts is not None]
        done = end
        if done == check_at:
            check_at += check_at // 4
            if watch is not None:
                enough, row = watch(merge(pieces))
        if progress:
            progress(stage, done, draws, row)
    return merge(pieces)


def draw_counter(
    plain: nn.Module, slab: SpikeSlab, part: Part, reference: Tensor, *, seed: int, batch: int
) -> Callable[[Tensor], Tensor]:
    """A function of the numbers of some draws: rows of (wrong, plus, minus), one for each, on its own minibatch."""
    device = device_of(plain)
    x, y, reference = part.x.to(device), part.y.to(device), reference.to(device)

    def count(steps: Tensor) -> Tensor:
        with evaluating(plain):
            index = minibatches(len(part), batch, seed=seed, steps=steps, device=device)
            wrong = mistakes(outputs(plain, slab, x[index], seed=seed, steps=steps), y[index])
        expected = reference[index]
        return torch.stack([wrong.sum(1), (wrong & ~expected).sum(1), (~wrong & expected).sum(1)], dim=1).cpu()

    return count


def close_calls(plain: nn.Module, networks: dict[str, Tensor], x: Tensor) -> Tensor:
    """Which answers of a network rounding can turn: another machine may count these otherwise.

    Two classes lie closer together, in float64, than `MACHINES` times the largest rounding error of a float32 output
    on these inputs, on both sides. A K-fold leading dimension of `networks` and `x` is K networks, each on its inputs.
    """
    exact = copy.deepcopy(plain).double()
    with evaluating(plain), evaluating(exact):
        rough = _call(plain, networks, x).double()
        fine = _call(exact, {name: w.double() for name, w in networks.items()}, in_float64(x))
    rounding = distance(rough, fine).flatten(-2).amax(-1)[..., None]
    best = fine.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1] <= 2 * MACHINES * rounding


def in_float64(x: Tensor) -> Tensor:
    """Inputs for a network in float64; tokens stay whole numbers."""
    return x.double() if x.is_floating_point() else x


def distance(rough: Tensor, fine: Tensor) -> Tensor:
    """How far outputs lie apart; those that are infinite alike do not."""
    return torch.where(rough == fine, 0.0, (rough - fine).abs())


def _call(plain: nn.Module, networks: dict[str, Tensor], x: Tensor) -> Tensor:
    """Outputs of one network on x, or of networks[k] on x[k]."""
    one = next(iter(networks.values()), None)
    if one is None or one.ndim == dict(plain.named_parameters())[next(iter(networks))].ndim:
        return answers(plain, x, networks)
    return torch.stack([answers(plain, x[k], {name: w[k] for name, w in networks.items()}) for k in range(len(x))])


def merge(parts: Sequence[Counts]) -> Counts:
    """The counts of several workers in the order of their draws; a gap is refused, since no draw may be dropped."""
    ordered = sorted(parts, key=lambda part: part.first)
    for before, after in pairwise(ordered):
        last = before.first + len(before) - 1
        if last + 1 != after.first or before.batch != after.batch:
            raise ValueError(
                f"draws {before.first} to {last} (batch {before.batch}) are followed by draw {after.first} "
                f"(batch {after.batch}); do the missing draws again"
            )
    table = [torch.stack([part.wrong, part.plus, part.minus], dim=1) for part in ordered]
    return _counts(table, ordered[0].batch, ordered[0].first)


def chunk_size(slab: SpikeSlab, device: torch.device) -> int:
    """How many networks to draw at once."""
    size = sum(p.numel() for p in slab.keep_prob.values())
    return max(1, min(WEIGHTS_AT_ONCE.get(device.type, WEIGHTS_AT_ONCE["cuda"]) // size, 256))


def _counts(pieces: list[Tensor], batch: int, first: int) -> Counts:
    table = torch.cat(pieces).to(torch.int32)
    return Counts(batch, table[:, 0], table[:, 1], table[:, 2], first)


def one_draw_each(
    plain: nn.Module, slab: SpikeSlab, x: Tensor, *, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Independent draws, one for each input, some at a time: (numbers of the draws, their inputs, their outputs)."""
    device = device_of(plain)
    chunk = chunk_size(slab, device)
    for start in range(0, len(x), chunk):
        inputs = x[start : start + chunk].to(device)
        steps = torch.arange(start, start + len(inputs), device=device)
        with evaluating(plain):
            drawn = outputs(plain, slab, inputs[:, None], seed=seed, steps=steps).squeeze(1)
        yield steps, inputs, drawn


def disagreements(plain: nn.Module, slab: SpikeSlab, weights: dict[str, Tensor], x: Tensor, *, seed: int) -> Tensor:
    """On which inputs an independent draw of `slab` predicts another class than the fixed network does."""
    differs = [torch.empty(0, dtype=torch.bool)]
    for _, inputs, drawn in one_draw_each(plain, slab, x, seed=seed):
        with evaluating(plain):
            fixed = answers(plain, inputs, weights).argmax(dim=-1)
        differs.append((fixed != drawn.argmax(dim=-1)).cpu())
    return torch.cat(differs)
