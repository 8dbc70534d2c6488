"""Smaller networks from pruned ones: channels that cannot matter are cut out of the weights, exactly.

A channel is one feature of a Linear or Conv layer's output, followed through everything that treats channels one by
one. It can go when every layer that reads it either has only zero weights for it or finds a constant there, which is
then added to that layer's bias. Channels that are added to each other go together or not at all.
"""

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils.flop_counter import FlopCounterMode

from pacprune.masking import weights

__all__ = ["Slim", "flops", "size", "slim"]

_LAYER = ("linear", "conv1d", "conv2d", "conv3d")
_NORM = ("batch_norm", "_native_batch_norm_legit_no_training")
_POINTWISE = (
    *("relu", "relu6", "hardtanh", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "sigmoid", "tanh"),
    *("softplus", "hardswish", "hardsigmoid", "clamp", "clamp_min", "dropout", "clone", "contiguous", "alias"),
)
_POOL = ("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
_AVERAGE = ("avg_pool1d", "avg_pool2d", "avg_pool3d")
Inputs = Tensor | Mapping[str, Tensor]
"""What a network is called with: one tensor, or tensors by the names of its parameters."""


@dataclass(frozen=True, eq=False)
class Slim:
    """The smaller network, how many channels and columns were removed, and the sizes before and after.

    Args:
        model: The smaller network, in eval mode.
        removed: Number of removed channels and columns of Linear layers.
        weights: (before, after) of the number of weights in tensors of two or more dimensions.
        bytes: (before, after) of the bytes of all parameters and buffers.
        flops: (before, after) of the floating-point operations of one example.

    Example:
        >>> print(pp.slim.slim(model, x))
        nothing could be removed: every channel and every input of a Linear layer is used
    """

    model: nn.Module
    removed: int
    weights: tuple[int, int]
    bytes: tuple[int, int]
    flops: tuple[int, int]

    def __str__(self) -> str:
        if not self.removed:
            return "nothing could be removed: every channel and every input of a Linear layer is used"
        pairs = {"weights": self.weights, "bytes": self.bytes, "FLOPs per example": self.flops}
        saved = (f"{a:,} -> {b:,} {name} (-{1 - b / a:.1%})" for name, (a, b) in pairs.items() if a)
        return f"{self.removed:,} channels and columns removed: " + ", ".join(saved)


@torch.no_grad()
def slim(model: nn.Module, example: Tensor) -> Slim:
    """A smaller module with the same outputs in eval mode.

    A column of zeros in a Linear layer is removed even if its channel must stay: the layer then selects the inputs
    that it needs. A constant passes a zero-padded convolution only if it is 0, since the padding ends it at the
    border. The channels of an unknown operation stay.

    Args:
        model: A plain model with zeros, such as `pft` leaves it; it is not changed.
        example: One batch of inputs, of any size.

    Returns:
        The smaller model and the sizes, as a Slim.

    Raises:
        ValueError: If torch.export cannot trace the model.

    Example:
        >>> with torch.no_grad():
        ...     _ = model[3].weight[:, :4].zero_()  # nothing reads the first four hidden channels
        >>> slimmed = pp.slim.slim(model, x)
        >>> slimmed.removed, slimmed.weights
        (4, (1184, 888))
    """
    weights.refuse_torch_masks(model)
    weights.warn_of_revived(model)
    example = batch(example)
    with weights.modes_kept(model):
        graph = trace(model.eval(), example).module()
        before = weights.total(model), size(model), flops(model, example[:1])
    assert isinstance(graph, GraphModule)
    network = _Network(graph)
    removed = network.cut(network.removable())
    small = network.build()
    after = sum(t.numel() for t in small.parameters() if t.ndim >= 2), size(small), flops(small, example[:1])
    return Slim(small, removed, *zip(before, after, strict=True))


def trace(model: nn.Module, example: Inputs) -> torch.export.ExportedProgram:
    """The graph of a module for batches of any size; a ValueError of one sentence if it cannot be traced.

    Whole numbers of two dimensions are tokens: their number per example is free as well, where the module allows it.
    Where the module gives a mapping, as those of transformers do, the graph gives its logits.
    """
    tensors = {"input": example} if isinstance(example, Tensor) else dict(example)
    try:
        with warnings.catch_warnings(), without_cache(model):
            warnings.simplefilter("ignore", FutureWarning)  # torch itself calls deprecated functions
            warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)  # nn.LSTM keeps its weights twice
            warnings.filterwarnings("ignore", ".*_flat_weights")  # of an LSTM or GRU, whose program is right
            net, dims = _one_output(model, example), {name: _free_dims(tensor) for name, tensor in tensors.items()}
            shapes = dims["input"] if isinstance(example, Tensor) else dims
            inputs = example if isinstance(example, Tensor) else tensors
            program = torch.export.export(net, (inputs,), dynamic_shapes=(shapes,))
            return program.run_decompositions({})  # without in-place operations, which would change their arguments
    except Exception as error:  # the tracer runs the model's own code, which may raise anything
        reason = (str(error).strip() or "no message").splitlines()[0]
        sizes = " and ".join(f"an {name} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(
            f"{type(model).__name__} cannot be traced for batches of any size with {sizes} "
            f"({type(error).__name__}: {reason}); rewrite the part of its forward that is named"
        ) from error


def _free_dims(tensor: Tensor) -> dict[int, Any]:
    """The dimensions of an input that may be of any size: its batch, and the length of tokens."""
    tokens = not tensor.is_floating_point() and tensor.ndim == 2
    return {0: Dim.DYNAMIC} | ({1: Dim.AUTO} if tokens else {})


def fixed_lengths(program: torch.export.ExportedProgram) -> list[int]:
    """The lengths of tokens that a traced module does not leave free."""
    from torch.fx.experimental.symbolic_shapes import is_concrete_int  # imports sympy, as tracing has by now

    names = set(program.graph_signature.user_inputs)
    values = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder") if node.name in names]
    lengths = [value.shape[1] for value in values if 1 in _free_dims(value)]
    return sorted({int(length) for length in lengths if is_concrete_int(length)})


class _Logits(nn.Module):
    """A network that takes all inputs as one value, and gives a tensor: its logits, or else its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs) -> Any:
        outputs = self.model(inputs) if isinstance(inputs, Tensor) else self.model(**inputs)
        if not isinstance(outputs, Mapping):
            return outputs
        return outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))


def _one_output(model: nn.Module, example: Inputs) -> nn.Module:
    """The model itself, if it takes a tensor and gives no mapping."""
    if not isinstance(example, Tensor):
        return _Logits(model)
    with weights.modes_kept(model), torch.no_grad():
        return _Logits(model) if isinstance(model.eval()(example), Mapping) else model


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """While this lasts, a model of transformers does not return its keys and values."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before is None:
        yield
        return
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = before


def flops(model: nn.Module, example: Tensor) -> int:
    """Floating-point operations of one forward pass, as torch counts them: two per multiplication in a product.

    Args:
        model: Any module.
        example: One batch of inputs.

    Returns:
        The operations for the whole batch.

    Example:
        >>> pp.slim.flops(model, x[:1])
        2368
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(example)
    return counter.get_total_flops()


def size(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, a tied one once.

    Args:
        model: Any module.

    Returns:
        The number of bytes.

    Example:
        >>> pp.slim.size(model)
        4840
    """
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def batch(example: Tensor) -> Tensor:
    """A batch of two examples: with one, the tracer would fix the batch size to 1."""
    if example.ndim < 2 or len(example) == 0:
        raise ValueError(
            f"the example has shape {tuple(example.shape)}, which is no batch; give the inputs of one or more examples"
        )
    return example[[0, 0]]


@dataclass(frozen=True, eq=False)
class _Flow:
    """The channels of one value: their dimension, a label for each, and the constant that each is, or nan."""

    dim: int
    labels: Tensor
    const: Tensor


@dataclass(frozen=True, eq=False)
class _Layer:
    """A Linear or Conv layer.

    Args:
        node: Its node in the graph.
        reads: reads[o, i] says whether output o reads input i.
        gain: gain[o, i] is the sum of the weights from input i to output o.
        source: The channels of the input, or None if they are not followed.
        const: The constant that each input is, or nan.
        out: The labels of the outputs.
    """

    node: Node
    reads: Tensor
    gain: Tensor
    source: _Flow | None
    const: Tensor
    out: Tensor


@dataclass(frozen=True, eq=False)
class _Pad:
    """A padding that adds channels.

    Args:
        node: Its node in the graph.
        place: Where the list of paddings holds those of the channels.
        before: Channels added before the others.
        after: Channels added after the others.
    """

    node: Node
    place: int
    before: int
    after: int


class _Network:
    """A traced network with a label for every channel.

    `flows` has the labels of each node. Channels that are added to each other are joined: `parent` is the forest of a
    union-find over the labels. `bound` lists labels that must stay, since an unknown operation reads them.
    """

    def __init__(self, module: GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.flows: dict[Node, _Flow] = {}
        self.layers: list[_Layer] = []
        self.pads: list[_Pad] = []
        self.parent: list[int] = []
        self.bound: list[Tensor] = []
        for node in self.graph.find_nodes(op="call_module"):
            self.graph.erase_node(node)  # the tracer's guards would require the old sizes
        self.uses: dict[int, int] = {}
        for node in self.graph.find_nodes(op="get_attr"):
            key = id(self.tensor(node))
            self.uses[key] = self.uses.get(key, 0) + len(node.users)
        for node in self.graph.nodes:
            if node.op in ("call_function", "output"):
                self._follow(node)

    # --- Labels of the channels.

    def tensor(self, node: Any) -> Tensor:
        """The parameter or buffer behind a get_attr node."""
        return operator.attrgetter(node.target)(self.module)

    def value(self, node: Any) -> Tensor:
        """The same on the CPU in double precision, in which constants are folded."""
        return self.tensor(node).detach().double().cpu()

    def fresh(self, count: int) -> Tensor:
        """New labels."""
        first = len(self.parent)
        self.parent += range(first, first + count)
        return torch.arange(first, first + count)

    def root(self, label: int) -> int:
        """The label that stands for all that are joined with this one."""
        while self.parent[label] != label:
            self.parent[label] = label = self.parent[self.parent[label]]
        return label

    def _follow(self, node: Node) -> None:
        """Gives the node its channels; if it may mix channels, marks those of its arguments as needed."""
        target: Any = node.target
        name = target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else str(node.target)
        source = self.flows.get(node.args[0]) if isinstance(node.args[0], Node) else None
        flow = None
        if name in _LAYER:
            flow = self._layer(node, name)
        elif name == "cat":
            flow = self._concatenate(node)
        elif source is not None:
            flow = self._elementwise(node, name, source)
        if flow is not None:
            self.flows[node] = flow
        elif name != "sym_size":
            self.bound += [self.flows[arg].labels for arg in node.all_input_nodes if arg in self.flows]

    def _is_untied(self, arg: Any) -> bool:
        """Whether only one layer uses this parameter; a tied one cannot be cut for one of its owners."""
        if arg is None:
            return True
        return isinstance(arg, Node) and arg.op == "get_attr" and self.uses[id(self.tensor(arg))] == 1

    def _layer(self, node: Node, name: str) -> _Flow | None:
        x, weight, bias, _, padding, _, groups = (*node.args, *[None] * 7)[:7]
        if (
            node.kwargs
            or groups not in (None, 1)
            or weight is None
            or not (self._is_untied(weight) and self._is_untied(bias))
        ):
            return None
        w = self.value(weight)
        dims: int = x.meta["val"].ndim  # type: ignore[union-attr]
        dim = dims - 1 if name == "linear" else dims - w.ndim + 1
        source = self.flows.get(x)  # type: ignore[arg-type]
        if source is not None and source.dim != dim:
            return None
        w = w.reshape(*w.shape[:2], -1)
        reads, gain = (w != 0).any(2), w.sum(2)
        const = torch.full((w.shape[1],), math.nan, dtype=torch.float64) if source is None else source.const.clone()
        if isinstance(padding, str) or any(padding or ()):  # type: ignore[arg-type]
            const[const != 0] = math.nan
        out_const = gain @ const.nan_to_num() + (0 if bias is None else self.value(bias))
        out = self.fresh(len(w))
        self.layers.append(_Layer(node, reads, gain, source, const, out))
        return _Flow(dim, out, torch.where((reads & const.isnan()).any(1), math.nan, out_const))

    def _elementwise(self, node: Node, name: str, flow: _Flow) -> _Flow | None:
        """The channels of an operation that treats them one by one; None if it may mix them."""
        args: tuple[Any, ...] = node.args
        dim, labels, const = flow.dim, flow.labels, flow.const
        if name in _POINTWISE:
            target: Any = node.target
            return _Flow(dim, labels, torch.where(const.isnan(), const, target(const, *args[1:], **node.kwargs)))
        if name in _POOL or node.target is operator.getitem:
            return flow
        if name in _AVERAGE:
            plain = len(args) < 4 and not node.kwargs
            return flow if plain else _Flow(dim, labels, torch.where(const == 0, const, math.nan))
        if name == "mean" and len(args) > 1:
            ndim = args[0].meta["val"].ndim
            return flow if all(d % ndim > dim for d in args[1]) else None
        if name == "slice":
            return flow if len(args) > 1 and args[1] % args[0].meta["val"].ndim != dim else None
        if name in _NORM:
            return self._norm(node, flow)
        if name in ("view", "reshape", "flatten", "squeeze"):
            return self._flatten(node, flow)
        if name in ("pad", "constant_pad_nd"):
            return self._pad(node, flow)
        if name in ("add", "sub", "mul"):
            return self._combine(node, flow, getattr(operator, name))
        return None

    def _norm(self, node: Node, flow: _Flow) -> _Flow | None:
        args: tuple[Any, ...] = node.args
        training = "no_training" not in str(node.target) and args[5]
        args = args if "no_training" in str(node.target) else (*args[:5], *args[6:])
        if training or flow.dim != 1 or None in args[3:5] or not all(self._is_untied(arg) for arg in args[1:5]):
            return None
        const = (flow.const - self.value(args[3])) / torch.sqrt(self.value(args[4]) + args[6])
        const = const if args[1] is None else const * self.value(args[1])
        return _Flow(1, flow.labels, const if args[2] is None else const + self.value(args[2]))

    def _flatten(self, node: Node, flow: _Flow) -> _Flow | None:
        old, new = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
        if flow.dim != 1 or len(new) != 2 or new[0] != old[0]:
            return None
        pixels = math.prod(old[2:])
        # A view would keep the old sizes.
        node.target, node.args, node.kwargs = torch.ops.aten.flatten.using_ints, (node.args[0], 1), {}
        return _Flow(1, flow.labels.repeat_interleave(pixels), flow.const.repeat_interleave(pixels))

    def _pad(self, node: Node, flow: _Flow) -> _Flow | None:
        _, pads, *rest = (*node.args, *node.kwargs.values())
        mode = next((arg for arg in rest if isinstance(arg, str)), "constant")
        value = next((float(arg) for arg in rest if isinstance(arg, int | float)), 0.0)
        if mode != "constant":
            return None
        place = 2 * (node.meta["val"].ndim - 1 - flow.dim)
        all_pads = [*pads, *[0] * 2 * node.meta["val"].ndim]  # type: ignore[misc]
        before, after = all_pads[place : place + 2]
        if before < 0 or after < 0:
            return None
        const = flow.const
        if any(pad for k, pad in enumerate(all_pads) if k not in (place, place + 1)):
            const = torch.where(const == value, const, math.nan)
        if before or after:
            self.pads.append(_Pad(node, place, before, after))
        sides = [torch.full((n,), value, dtype=torch.float64) for n in (before, after)]
        labels = torch.cat([self.fresh(before), flow.labels, self.fresh(after)])
        return _Flow(flow.dim, labels, torch.cat([sides[0], const, sides[1]]))

    def _combine(self, node: Node, flow: _Flow, combine: Callable[[Any, Any], Any]) -> _Flow | None:
        other: Any = node.args[1]
        if node.kwargs:
            return None
        if isinstance(other, int | float):
            return _Flow(flow.dim, flow.labels, combine(flow.const, other))
        second = self.flows.get(other)
        shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        if second is None or second.dim != flow.dim or other.meta["val"].shape != shape:
            return None
        for a, b in zip(flow.labels.tolist(), second.labels.tolist(), strict=True):
            self.parent[self.root(b)] = self.root(a)
        return _Flow(flow.dim, flow.labels, combine(flow.const, second.const))

    def _concatenate(self, node: Node) -> _Flow | None:
        parts: Any = node.args[0]
        dim, flows = (*node.args, 0)[1] % node.meta["val"].ndim, [self.flows.get(part) for part in parts]
        if any(flow is None or flow.dim != dim for flow in flows):
            return None
        return _Flow(dim, *(torch.cat([getattr(flow, key) for flow in flows]) for key in ("labels", "const")))

    # --- Removal of channels.

    def removable(self) -> Tensor:
        """One Boolean per label: True if nothing needs this channel or a channel joined with it."""
        root = torch.tensor([self.root(label) for label in range(len(self.parent))], dtype=torch.long)
        free = torch.ones(len(root), dtype=torch.bool)
        for labels in self.bound:
            free[root[labels]] = False
        gone = torch.zeros_like(free)
        while True:
            # A channel that only removed channels need is not needed.
            unread = free.clone()
            for layer in self.layers:
                if layer.source is not None:
                    needed = layer.reads[~gone[root[layer.out]]].any(0) & layer.const.isnan()
                    unread[root[layer.source.labels[needed]]] = False
            if torch.equal(unread, gone):
                break
            gone = unread
        for flow in self.flows.values():
            if len(flow.labels) and bool(gone[root[flow.labels]].all()):
                gone[root[flow.labels[0]]] = False  # not every operation takes a tensor without channels
        return gone[root]

    def cut(self, gone: Tensor) -> int:
        """Cuts the weights and folds constants into biases; returns the number of removed channels and columns."""
        for node, flow in self.flows.items():
            if any(str(node.target).startswith(f"aten.{name}.") for name in _NORM):
                self._cut_norm(node, ~gone[flow.labels])
        for pad in self.pads:
            keep = ~gone[self.flows[pad.node].labels]
            pads: list[int] = [*pad.node.args[1]]  # type: ignore[misc]
            pads[pad.place : pad.place + 2] = int(keep[: pad.before].sum()), int(keep[len(keep) - pad.after :].sum())
            pad.node.args = (pad.node.args[0], pads, *pad.node.args[2:])
        return sum(self._cut_layer(layer, gone) for layer in self.layers)

    def _cut_norm(self, node: Node, keep: Tensor) -> None:
        """Cuts the weight, the bias and the statistics of a BatchNorm, where it has them."""
        if not bool(keep.all()):
            for arg in node.args[1:5]:
                if arg is not None:
                    self.put(arg.target, self.tensor(arg)[keep])  # type: ignore[union-attr]

    def _cut_layer(self, layer: _Layer, gone: Tensor) -> int:
        """Cuts the rows of removed channels and the columns that nothing needs; returns how many of both."""
        weight: Any = layer.node.args[1]
        old, rows = self.tensor(weight), ~gone[layer.out]
        removed = torch.zeros(old.shape[1], dtype=torch.bool) if layer.source is None else gone[layer.source.labels]
        is_read = layer.reads[rows].any(0)
        self._fold(layer, rows, removed & is_read & ~layer.const.isnan())
        columns = ~removed
        if "linear" in str(layer.node.target):
            needed = is_read[columns].nonzero().reshape(-1) if bool(is_read[columns].any()) else torch.tensor([0])
            saved_bytes = (int(columns.sum()) - len(needed)) * int(rows.sum()) * old.element_size()
            if saved_bytes > 4 * len(needed):  # more than the index takes
                self._select_inputs(layer, needed)
                columns = torch.zeros_like(removed).index_fill(0, columns.nonzero().reshape(-1)[needed], True)
        self.put(weight.target, old[rows][:, columns])
        return int((~rows).sum()) + int((~columns & ~removed).sum())

    def _fold(self, layer: _Layer, rows: Tensor, folded: Tensor) -> None:
        """Cuts the bias to its rows, and adds the contribution of the constant inputs `folded`."""
        x, weight, bias = (*layer.node.args, None)[:3]
        contribution = (layer.gain[:, folded] @ layer.const[folded])[rows]
        old = self.tensor(weight)
        if bias is not None:
            self.put(bias.target, (self.value(bias)[rows] + contribution).to(old))  # type: ignore[union-attr]
        elif bool((contribution != 0).any()):
            target = _sibling(weight.target, "bias")  # type: ignore[union-attr]
            with self.graph.inserting_before(layer.node):
                new_bias = self.graph.get_attr(self.put(target, contribution.to(old)))
            layer.node.args = (x, weight, new_bias, *layer.node.args[3:])

    def _select_inputs(self, layer: _Layer, inputs: Tensor) -> None:
        """Lets a Linear layer read only the inputs at `inputs`."""
        x: Any = layer.node.args[0]
        weight: Any = layer.node.args[1]
        index = inputs.to(self.tensor(weight).device, torch.int32)
        with self.graph.inserting_before(layer.node):
            index_node = self.graph.get_attr(self.put(_sibling(weight.target, "inputs"), index))
            arguments = (x, x.meta["val"].ndim - 1, index_node)
            selected = self.graph.call_function(torch.ops.aten.index_select.default, arguments)
        layer.node.args = (selected, *layer.node.args[1:])

    def put(self, target: str, value: Tensor) -> str:
        """Sets a parameter or buffer of the module to a copy of `value`."""
        owner, _, name = target.rpartition(".")
        module = self.module.get_submodule(owner)
        value = value.detach().clone()
        if name in module._buffers or not value.is_floating_point():
            module.register_buffer(name, value)
        else:
            module.register_parameter(name, nn.Parameter(value))
        return target

    def build(self) -> GraphModule:
        """The remaining network as a plain module in eval mode, which shares no memory with the original."""
        self.graph.eliminate_dead_code()
        for node in self.graph.find_nodes(op="get_attr"):
            self.put(node.target, self.tensor(node))
        output = self.graph.output_node()
        (values,) = output.args
        if len(values) == 1 and self.graph._codegen.pytree_info.out_spec.is_leaf():  # type: ignore
            # A plain function of tensors: unpacking and packing its arguments would cost more than a small layer.
            output.args = tuple(values)  # type: ignore
            self.graph.set_codegen(CodeGen())
        return GraphModule(self.module, self.graph, class_name="Slim").eval()


def _sibling(target: str, name: str) -> str:
    """layers.0.weight -> layers.0.NAME; any other target -> TARGET_NAME."""
    return target[: -len("weight")] + name if target.endswith("weight") else f"{target}_{name}"
