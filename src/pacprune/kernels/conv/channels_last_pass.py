"""A pass over the graphs of torch.compile that moves elementwise operations to before the views around them.

vmap computes relu(conv(x)) of K members on a view [K, n, channels, height, width] of what the grouped convolution wrote
as [n, K * channels, height, width], channels last. The compiler lays its result out as the view's shape says, which is
another order in memory, and the next convolution has to bring it back. An elementwise operation gives the same numbers
before a view as after it: moved before it, and taken on [n * height * width, K * channels], which is the order in
memory, everything between two convolutions stays as they use it. Two dimensions, since of four the compiler would think
that the second one holds the channels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
_SHAPES = {_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default}
_VIEWS = {*_SHAPES, _ATEN.permute.default, _ATEN.transpose.int}
_CONVOLUTIONS = ("convolution", "convolution_backward", "convolution_gradient")
_LAST, _SECOND = [0, 2, 3, 1], [0, 3, 1, 2]
"""Where the channels go, and back."""
_CONVERT, _COPY = torch.ops.prims.convert_element_type.default, _ATEN.clone.default


class _View(NamedTuple):
    """A node that is a view of `base`: the operations that lead there, and the place in `base` of each number."""

    base: Node
    steps: list[tuple[Any, tuple[Any, ...]]]
    places: Tensor

    def same(self, other: "_View") -> bool:
        """Whether the two look at tensors of one shape in the same way."""
        one, two = self.base.meta["val"], other.base.meta["val"]
        return one.shape == two.shape and _equal(self.places, other.places)


def elementwise_first(graph: Graph) -> None:
    """relu(permute(view(x))) becomes permute(view(relu(x))), and views that undo each other are gone."""
    if not any(getattr(node.target, "_opname", "") in _CONVOLUTIONS for node in graph.nodes):
        return
    views: dict[Node, _View] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        if node.target in _VIEWS:
            _look(graph, node, views)
        elif node.target is _CONVERT or (node.target is not _COPY and torch.Tag.pointwise in _tags(node)):
            _move(graph, node, views)
    graph.eliminate_dead_code()


def compiler_pass() -> Any:
    """elementwise_first for torch.compile, which keeps what it compiles only with passes that have a name."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # slow to import

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            elementwise_first(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    return Pass()


def _look(graph: Graph, node: Node, views: dict[Node, _View]) -> None:
    """Notes what a view is a view of; one that shows images as they are gives way to them."""
    source, rest = node.args[0], node.args[1:]
    assert isinstance(source, Node)
    if source not in views:
        if source.meta["val"].ndim != 4:
            return
        with graph.inserting_before(node):
            last = _call(graph, _ATEN.permute.default, (source, _LAST), {})
            shape = list(last.meta["val"].shape)
            base = _call(graph, _ATEN.reshape.default, (last, [-1, shape[-1]]), {})
        steps = [(_ATEN.view.default, (shape,)), (_ATEN.permute.default, (_SECOND,))]
        views[source] = _View(base, steps, _fresh(last).permute(_SECOND))
    base, steps, places = views[source]
    try:
        places = (_ATEN.view.default if node.target in _SHAPES else node.target)(places, *rest)  # type: ignore[operator]
    except RuntimeError:  # this one needs a copy
        return
    first = steps[:2]
    if _equal(places, _fresh(base).view(first[0][1][0]).permute(_SECOND)):
        with graph.inserting_before(node):
            plain = _taken(graph, base, first)
        node.replace_all_uses_with(plain)
        views[plain] = _View(base, first, places)
    else:
        views[node] = _View(base, [*steps, (node.target, rest)], places)


def _move(graph: Graph, node: Node, views: dict[Node, _View]) -> None:
    """Replaces an operation on equal views by the view of the operation."""
    seen = [views[arg] for arg in node.args if isinstance(arg, Node) and _whole(arg, node) and arg in views]
    if not seen or not all(seen[0].same(other) for other in seen):
        return
    if any(isinstance(value, Node) for value in node.kwargs.values()):
        return
    with graph.inserting_before(node):
        bases = [_based(graph, arg, node, seen[0], views) for arg in node.args]
        moved = _call(graph, node.target, tuple(bases), dict(node.kwargs))
        found = _taken(graph, moved, seen[0].steps)
    node.replace_all_uses_with(found)
    views[found] = _View(moved, seen[0].steps, seen[0].places)


def _whole(arg: Node, node: Node) -> bool:
    return arg.meta["val"].shape == node.meta["val"].shape


def _based(graph: Graph, arg: Any, node: Node, view: _View, views: dict[Node, _View]) -> Any:
    """An argument in the shape and order of the view's base."""
    if not isinstance(arg, Node) or arg.meta["val"].ndim == 0:
        return arg
    if _whole(arg, node) and arg in views:
        return views[arg].base
    if not _whole(arg, node):  # one number for many, such as a channel's
        arg = _call(graph, _ATEN.expand.default, (arg, list(node.meta["val"].shape)), {})
    order = sorted(range(view.places.ndim), key=lambda axis: -view.places.stride(axis))
    ordered = _call(graph, _ATEN.permute.default, (arg, order), {})
    return _call(graph, _ATEN.reshape.default, (ordered, list(view.base.meta["val"].shape)), {})


def _taken(graph: Graph, node: Node, steps: list[tuple[Any, tuple[Any, ...]]]) -> Node:
    """The view that the steps lead to."""
    for target, rest in steps:
        node = _call(graph, target, (node, *rest), {})
    return node


def _tags(node: Node) -> Any:
    return getattr(node.target, "tags", ())


def _call(graph: Graph, target: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Node:
    node = graph.call_function(target, args, options)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, Node) else arg for arg in args), **options)
    return node


def _fresh(node: Node) -> Tensor:
    return torch.empty(node.meta["val"].shape, device="meta")


def _equal(one: Tensor, two: Tensor) -> bool:
    """Whether two views show the same places; the step along an axis of one place does not matter."""
    if one.shape != two.shape:
        return False
    return all(a == b or n == 1 for a, b, n in zip(one.stride(), two.stride(), one.shape, strict=True))
