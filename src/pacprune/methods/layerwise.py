"""One-shot pruning of a trained network from calibration data, layer by layer, with one block on the device at a time.

The network's own forward pass says what a block is called with. To run block i, all blocks before it are replaced: the
last of them gives what it gave when it was run itself, the others give NaN, so that nothing else can slip through.
Attention masks, positions and caches are thus made anew for every call, as the network makes them.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pacprune.data import trace
from pacprune.data.batches import device_of, isolated_rng, leaves, mapped, taken, to_device, use_of
from pacprune.distributed import refuse_sharded
from pacprune.masking import calibration, masks, patterns, weights
from pacprune.masking.calibration import Layer
from pacprune.masking.solvers import SOLVERS, Solver, Target
from pacprune.methods.pipeline import Pruned, counts_all, refuse_regrowth
from pacprune.types import Data, Diverged, Forward, Progress, check_module, check_name

__all__ = ["SOLVERS", "layerwise"]

BATCH_SIZE = 8
"""Examples that run at once, where the data are not a DataLoader with batches of its own."""
Layers = Mapping[str, Sequence[Layer]]


def layerwise(
    model: nn.Module,
    data: Data | Tensor,
    *,
    solver: str = "sparsegpt",
    sparsity: float | Mapping[str, float] | None = None,
    pattern: str | None = None,
    include: weights.Which | None = None,
    exclude: weights.Which | None = None,
    prunable: weights.Prunable = weights.prunable,
    forward: Forward | None = None,
    examples: int = 128,
    device: str | torch.device | None = None,
    damping: float = 0.01,
    progress: Progress | None = None,
) -> Pruned:
    """One-shot pruning from calibration data, in place: every layer keeps its output as well as it can.

    Weights of Linear layers and convolutions are pruned, each to the same sparsity. Embeddings, what shares a weight
    with one, and an output layer over the whole vocabulary are left alone, as is usual for language models.

    The repeated blocks of a network are pruned one after another: one at a time is on the `device`, what lies between
    two of them is on the host, and a block is calibrated on what the pruned blocks before it give. Layers outside come
    last. A network without such blocks is one block.

    Args:
        model: A trained network; it is pruned in place.
        data: Calibration data, of the kind the network was trained on: token ids as one tensor, (x, y) tensors, a part
            of a split, a Dataset or a DataLoader. Labels are not used.
        solver: What chooses weights, and what it asks for: "magnitude", "wanda", "sparsegpt" or "alps".
        sparsity: Fraction of the weights to prune, such as 0.5. Or a mapping from patterns of names to fractions.
        pattern: Keep so many of every 4 or 8 inputs, "2:4", "1:4" or "4:8"; `sparsity` follows from it.
        include: Weights that may be pruned. A pattern of names, a type of module, a module, or a list of these; see
            `pp.select`. The sparsity is then of these.
        exclude: Weights that are left alone. Given likewise.
        prunable: A function in place of these two: model -> {name: weight}. The sparsity is then of all weights.
        forward: (model, batch) -> output, for batches that are neither (x, y) nor the model's arguments; see `pp.fit`.
        examples: At most so many examples are used, from the first one on.
        device: Where a block is computed and pruned, such as "cuda"; None is where the model is.
        damping: What the solvers "sparsegpt" and "alps" add to the diagonal of the inputs' second moments, as a share
            of its mean.
        progress: Called after every block.

    Returns:
        The pruned network and its mask, without a history. `pp.fit` trains it on with its zeros kept.

    Raises:
        ValueError: If a layer cannot have the pattern, a weight has no inputs that could be recorded, or calibration
            data give none, or NaN. In the last two cases, blocks before that layer are pruned already.

    Example:
        >>> pruned = pp.layerwise(model, split.train, sparsity=0.5)
        >>> pruned
        Pruned(Sequential, sparsity 0.5000, 592 of 1,184 weights kept)
    """
    check_module(model)
    check_name("solver", solver, SOLVERS)
    refuse_sharded(model.parameters(), "solver", solver)
    if damping < 0:
        raise ValueError(f"damping is {damping}; it is a share of the mean diagonal, at least 0, such as 0.01")
    masks.asked_sparsity(sparsity, pattern)
    data = TensorDataset(data) if isinstance(data, Tensor) else data
    layers, counts = _plan(model, sparsity, pattern, include, exclude, prunable)
    targets = {
        name: Target(k, None if pattern is None else patterns.parse(pattern), damping) for name, k in counts.items()
    }
    row, home = SOLVERS[solver], device_of(model)
    target_device = home if device is None else torch.device(device)
    mask: dict[str, Tensor] = {}
    with weights.changing(model), weights.modes_kept(model), torch.no_grad():
        model.eval()
        stream = _Stream(model, _blocks(model, layers), forward, target_device)
        if row.measure:
            stream.read(data, examples)
            weights.mark_seen(model, use_of(data))
        with _of_one_type(stream), _fitting(layers, row, target_device), stream.placed():
            parts = stream.parts(layers)
            with closing(stream.walk(parts)) as walk:  # so that after an error, too, its block goes back to the host
                for done, part in enumerate(walk, 1):
                    mask |= _prune_part(stream, part, row, targets)
                    if progress is not None:
                        progress("layerwise", done, len(parts), {})
        mask = {name: mask[name] for name in layers}
        weights.note_mask(model, mask)
    trace.note(mask, weights.seen(model))
    return Pruned(model, mask, [], pattern)


# --- What is pruned, and how much.


def _plan(
    model: nn.Module,
    sparsity: float | Mapping[str, float] | None,
    pattern: str | None,
    include: weights.Which | None,
    exclude: weights.Which | None,
    prunable: weights.Prunable,
) -> tuple[Layers, dict[str, int]]:
    """The layers of the weights to prune, and how many each of these keeps; refuses before anything is changed."""
    by_function = counts_all(include=include, exclude=exclude, prunable=prunable)
    everything = weights.total(model)
    chosen = dict(
        prunable(model) if by_function else weights.choose(model, include=include, exclude=exclude, among=prunable)
    )
    if include is None and not by_function:
        vocabulary = _vocabulary(model)
        chosen = {name: weight for name, weight in chosen.items() if name not in vocabulary} or chosen
    if isinstance(sparsity, Mapping):
        chosen = {name: chosen[name] for name in masks.layer_sparsities(chosen, sparsity)}
    weights.refuse_computed(model, chosen)
    layers = calibration.layers_for(model, chosen)
    sizes = {name: readers[0].weight.numel() for name, readers in layers.items()}
    if pattern is not None:
        n, m = patterns.parse(pattern)
        _check_groups(layers, n, m)
        counts = {name: size // m * n for name, size in sizes.items()}
    else:
        goal = masks.asked_sparsity(sparsity, None) if not isinstance(sparsity, Mapping) else sparsity
        counts = masks.layer_counts(sizes, goal, total=everything if by_function else None)
    refuse_regrowth(model, (sum(sizes.values()) - sum(counts.values())) / everything)
    return layers, counts


def _vocabulary(model: nn.Module) -> set[str]:
    """The weights of embeddings, and of Linear layers with an output for every row of the largest of them."""
    names = {id(p): name for name, p in model.named_parameters()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    most = max((module.num_embeddings for module in embeddings), default=0)
    heads = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == most]
    owned = [dict(module.named_parameters(recurse=False)) for module in (*embeddings, *heads)]
    return {names[id(own["weight"])] for own in owned if "weight" in own}  # a weight that is computed is nobody's own


def _check_groups(layers: Layers, n: int, m: int) -> None:
    """Refuses weights whose rows have no groups of M."""
    for name, (layer, *_) in layers.items():
        if layer.transposed:
            raise ValueError(
                f"{name} lies in a Conv1D of transformers, which stores [inputs, outputs], so that {n}:{m} of a row "
                "would be groups of outputs; replace the layer by a Linear, or give a sparsity"
            )
        patterns.grouped(layer.weight, m, name=name)


@dataclass(frozen=True, eq=False)
class _Part:
    """What is pruned at once: the layers in a block, or (index None) those outside all blocks."""

    index: int | None
    layers: Layers


def _prune_part(stream: "_Stream", part: _Part, solver: Solver, targets: Mapping[str, Target]) -> dict[str, Tensor]:
    """Prunes the layers of a part, in place; returns their masks."""
    sums = {} if solver.measure is None or not part.layers else stream.measure(part, solver.measure)
    mask = {}
    for name, (layer, *_) in part.layers.items():
        weight = layer.weight
        matrix = layer.matrix(weight.detach()).to(torch.promote_types(weight.dtype, torch.float32))
        solved, keep = solver.solve(matrix, sums.pop(name, torch.empty(0)), targets[name])
        if not bool(torch.isfinite(solved).all()):
            raise Diverged(f"the weights of {name} were solved to NaN or infinity; take more damping, such as 0.1")
        weight.copy_(layer.stored(solved))
        mask[name] = layer.stored(keep).to(stream.home)
    return mask


@contextmanager
def _fitting(layers: Layers, solver: Solver, device: torch.device) -> Iterator[None]:
    """Says what would fit, where the device has too little memory."""
    try:
        yield
    except torch.OutOfMemoryError as failure:
        widest, (layer, *_) = max(layers.items(), key=lambda item: item[1][0].inputs)
        needs = ""
        if solver.measure is calibration.second_moments:
            size = f"{4 * layer.inputs**2 / 1e9:.1f} GB"
            needs = (
                f", where the {layer.inputs:,} inputs of {widest} take {size} and about ten times that to solve; "
                "solver='wanda' needs next to nothing"
            )
        raise ValueError(
            f"{device} has too little memory for one block, its inputs and what is measured of them{needs}; give a "
            "DataLoader with batch_size=1, another device, or leave wide layers out by exclude="
        ) from failure


@contextmanager
def _of_one_type(stream: "_Stream") -> Iterator[None]:
    """Says so where a network fails since its numbers and those of the data have different types."""
    try:
        yield
    except RuntimeError as failure:
        given = {t.dtype for t in leaves(stream.batches) if t.is_floating_point()}
        types = {p.dtype for p in stream.model.parameters() if p.is_floating_point()}
        if not given or given <= types:
            raise
        shown = [", ".join(sorted(str(dtype) for dtype in kinds)) for kinds in (given, types)]
        raise ValueError(
            f"the calibration data are {shown[0]}, but the weights of {type(stream.model).__name__} are {shown[1]} "
            f"({str(failure).strip().partition(chr(10))[0]}); give data of the weights' type"
        ) from failure


# --- Blocks, one after another.


def _blocks(model: nn.Module, layers: Layers) -> list[nn.Module]:
    """The modules of the list, of modules of one type, that holds most of the weights to prune; or the model."""
    best, most = [model], 0
    for module in model.modules():
        children = list(module) if isinstance(module, nn.ModuleList | nn.Sequential) else []
        if len(children) < 2 or len({type(child) for child in children}) > 1 or len(set(children)) < len(children):
            continue
        places = _places(children, layers)
        if any(len(where) > 1 for where in places.values()):  # a weight that two blocks share
            continue
        size = sum(layers[name][0].weight.numel() for name, where in places.items() if where != {None})
        if size > most:
            best, most = children, size
    return best


def _places(blocks: Sequence[nn.Module], layers: Layers) -> dict[str, set[int | None]]:
    """The numbers of the blocks that read a weight; None is outside."""
    home = {module: i for i, block in enumerate(blocks) for module in block.modules()}
    return {name: {home.get(reader.module) for reader in readers} for name, readers in layers.items()}


class _Reached(BaseException):
    """A block was called; carries its arguments past every `except Exception` of the network."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


@dataclass(eq=False)
class _Stream:
    """Calibration batches on their way through the blocks of a network.

    Args:
        model: The network.
        blocks: Its blocks, or the network alone.
        forward: (model, batch) -> output, or None.
        device: Where a block runs.
        batches: The calibration batches, on the host.
        outputs: What the last block that was run gave for each batch, on the host.
    """

    model: nn.Module
    blocks: list[nn.Module]
    forward: Forward | None
    device: torch.device
    batches: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.home = device_of(self.model)

    def read(self, data: Data, examples: int) -> None:
        """Takes the first examples."""
        host = torch.device("cpu")
        with isolated_rng(host, data, seed=0):
            self.batches = list(calibration.first_batches(data, BATCH_SIZE, examples, device=host))
        self.outputs = [None] * len(self.batches)

    @contextmanager
    def placed(self) -> Iterator[None]:
        """Has what lies outside of the blocks on the device meanwhile; takes the model for one block if need be."""
        inside = {module for block in self.blocks for module in block.modules()}
        with ExitStack() as stack:
            for module in self.model.modules():
                if module not in inside:
                    stack.enter_context(_on(module, self.device, self.home, recurse=False))
            if self.batches and len(self.blocks) > 1 and not self._is_chain():
                stack.enter_context(_on(self.model, self.device, self.home))
                self.blocks = [self.model]
            yield

    def parts(self, layers: Layers) -> list[_Part]:
        """What is pruned one after another."""
        places = _places(self.blocks, layers)
        parts = [
            _Part(i, {name: layers[name] for name in layers if places[name] == {i}}) for i in range(len(self.blocks))
        ]
        rest = {name: layers[name] for name in layers if places[name] == {None}}
        return [*parts, _Part(None, rest)] if rest else parts

    def walk(self, parts: Sequence[_Part]) -> Generator[_Part, None, None]:
        """Part after part, on the device; when the next one is asked for, the last one is run as it is now."""
        for part in parts:
            if part.index is None:
                yield part
                continue
            with _on(self.blocks[part.index], self.device, self.home):
                yield part
                if self.batches and part is not parts[-1]:
                    for k in range(len(self.batches)):
                        self.outputs[k] = _on_host(self._run(part.index, k))

    def measure(self, part: _Part, measure: calibration.Measure) -> dict[str, Tensor]:
        """What is measured of the inputs of a part's layers."""
        with calibration.recorded(part.layers, measure) as sums:
            for k in range(len(self.batches)):
                self._run(part.index, k)
        calibration.check_sums(sums, part.layers)
        return sums

    def _run(self, index: int | None, k: int) -> Any:
        """Runs a block, or with None what comes before and after all of them, on a batch."""
        if self.blocks == [self.model]:
            return self._forward(k)
        if index is None:
            with self._replaced(len(self.blocks), k):
                return self._forward(k)
        args, kwargs = self._arguments(index, k)
        return self.blocks[index](*args, **kwargs)

    def _name(self, index: int) -> str:
        """A block in words; blocks count from 0."""
        return f"block {index} (of 0 to {len(self.blocks) - 1}) of {type(self.model).__name__}"

    def _forward(self, k: int) -> Any:
        return calibration.outputs(self.model, to_device(self.batches[k], self.device), self.forward)

    def _arguments(self, index: int, k: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the network calls a block with."""
        with self._replaced(index, k):
            try:
                self._forward(k)
            except _Reached as reached:
                args, kwargs = reached.arguments
            else:
                raise ValueError(
                    f"{self._name(index)} was not reached by the calibration data; give other examples, or use pp.osp "
                    "with criterion='wanda'"
                )
        if not _has_nan((args, kwargs)) or _has_nan(self.outputs[k]):  # which the solver refuses, by its layer
            return args, kwargs
        if index == 0 or _has_nan(self.batches[k]):
            where = "the calibration data hold NaN" if _has_nan(self.batches[k]) else "what it is given holds NaN"
            raise Diverged(
                f"{self._name(index)} cannot be calibrated, since {where} in batch {k}; check the data, and the "
                "weights before this block"
            )
        raise ValueError(
            f"{self._name(index)} reads more than what the block before it gives, so that blocks cannot be pruned one "
            "by one; use pp.osp with criterion='wanda'"
        )

    @contextmanager
    def _replaced(self, index: int, k: int) -> Iterator[None]:
        """Meanwhile the blocks before this one do not run: the last of them gives what it gave for this batch."""

        def reach(*args: Any, **kwargs: Any) -> NoReturn:
            raise _Reached(args, kwargs)

        def nothing(*args: Any, **kwargs: Any) -> Any:
            return _nan(to_device(self.outputs[k], self.device))

        def last(*args: Any, **kwargs: Any) -> Any:
            return to_device(self.outputs[k], self.device)

        stubs = [*[nothing] * (index - 1), *[last] * min(index, 1), reach][: len(self.blocks)]
        with _forwards(self.blocks, stubs):
            yield

    def _is_chain(self) -> bool:
        """Whether the network calls its blocks in their order, once each, as far as one example shows."""
        calls: list[int] = []
        first = taken(self.batches[0], torch.arange(1))

        def run() -> None:
            calibration.outputs(self.model, to_device(first, self.device), self.forward)

        def reach(*args: Any, **kwargs: Any) -> NoReturn:
            raise _Reached(args, kwargs)

        with _forwards(self.blocks, [reach] * len(self.blocks)):
            try:
                run()
            except _Reached as reached:
                args, kwargs = reached.arguments
            else:
                return False
        with _on(self.blocks[0], self.device, self.home):
            output = self.blocks[0](*args, **kwargs)

        def stub(i: int) -> Callable[..., Any]:
            def note(*args: Any, **kwargs: Any) -> Any:
                calls.append(i)
                return output

            return note

        expected, all_called = list(range(len(self.blocks))), False
        with _forwards(self.blocks, [stub(i) for i in expected]), suppress(Exception):
            run()  # what follows may fail on the outputs of another block
            all_called = True
        return calls == (expected if all_called else expected[: len(calls)])


@contextmanager
def _on(module: nn.Module, device: torch.device, home: torch.device, *, recurse: bool = True) -> Iterator[None]:
    """Has a module on a device meanwhile, with or without the modules in it."""
    module._apply(lambda t: t.to(device), recurse=recurse)
    try:
        yield
    finally:
        module._apply(lambda t: t.to(home), recurse=recurse)


@contextmanager
def _forwards(modules: Sequence[nn.Module], functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Has these functions in place of the first modules' forward meanwhile."""
    pairs = list(zip(modules, functions, strict=False))
    before = [module.__dict__.get("forward") for module, _ in pairs]
    for module, function in pairs:
        module.__dict__["forward"] = function
    try:
        yield
    finally:
        for (module, _), old in zip(pairs, before, strict=True):
            del module.__dict__["forward"]
            if old is not None:
                module.__dict__["forward"] = old


def _on_host(output: Any) -> Any:
    """The tensors of a block's output, on the host; anything else, such as a cache, is None."""
    host = torch.device("cpu")
    return mapped(lambda part: part.to(host) if isinstance(part, Tensor) else None, output)


def _nan(output: Any) -> Any:
    """The same output, but unknown: NaN for every number that can be NaN."""

    def unknown(part: Any) -> Any:
        is_number = isinstance(part, Tensor) and part.is_floating_point()
        return torch.full_like(part, torch.nan) if is_number else part

    return mapped(unknown, output)


def _has_nan(arguments: Any) -> bool:
    """Whether a number among them is NaN."""
    return any(bool(t.isnan().any()) for t in leaves(arguments) if t.is_floating_point())
