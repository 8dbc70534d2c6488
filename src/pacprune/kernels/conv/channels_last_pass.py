"""A pass over the graphs of torch.compile that moves elementwise operations to before the views around them.

A grouped convolution of K members writes [n, K * channels, height, width], channels last. vmap computes relu on a view
[K, n, channels, height, width] of it. The compiler lays the result out as the view's shape says: another order in
memory, which the next convolution has to undo.

An elementwise operation gives the same numbers before a view as after it. This pass moves it before the view, and
applies it to [n * height * width, K * channels]. That is the order in memory, so everything between two convolutions
stays as they use it. The shape has two dimensions: of four, the compiler would take the second one for the channels.
"""

import logging
import math
import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

_LOG = logging.getLogger(__name__)
_ATEN = torch.ops.aten
_RESHAPE, _STRICT = _ATEN.reshape.default, {_ATEN.view.default, _ATEN._unsafe_view.default}
_VIEWS = {_RESHAPE, _ATEN.permute.default, _ATEN.transpose.int}
_CONVOLUTIONS = ("convolution", "convolution_backward", "convolution_gradient")
_LAST, _SECOND = [0, 2, 3, 1], [0, 3, 1, 2]
"""Where the channels go, and back."""
_CONVERT, _COPY = torch.ops.prims.convert_element_type.default, _ATEN.clone.default


class _View(NamedTuple):
    """A node that is a view of `base`.

    Args:
        base: The node under the view.
        steps: The operations that lead from `base` to the node.
        places: Where each number of the node lies in `base`.
    """

    base: Node
    steps: list[tuple[Any, tuple[Any, ...]]]
    places: Tensor

    def same(self, other: "_View") -> bool:
        """Whether both are the same view of tensors of equal shape."""
        shapes = [view.base.meta["val"].shape for view in (self, other)]
        return shapes[0] == shapes[1] and _equal(self.places, other.places)


def elementwise_first(graph: Graph) -> None:
    """Turns relu(permute(view(x))) into permute(view(relu(x))), and removes views that undo each other.

    A graph that this cannot be done to stays as it was.
    """
    names = {getattr(node.target, "_opname", "") for node in graph.nodes}
    if names.isdisjoint(_CONVOLUTIONS) or "as_strided" in names:  # as_strided depends on the order in memory
        return
    trial = Graph()
    trial.graph_copy(graph, {})
    try:
        _rewrite(trial)
    except Exception:  # what a network may hold is not for this pass to know: it is slower then, and right
        _LOG.debug("elementwise operations stay behind their views", exc_info=True)
        return
    _rewrite(graph)
    graph.eliminate_dead_code()


def _rewrite(graph: Graph) -> None:
    """elementwise_first, which leaves the graph half done if it fails."""
    views: dict[Node, _View] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
            continue
        if node.target in _STRICT:  # what it views may now lie in another order
            node.target = _RESHAPE
        if node.target in _VIEWS:
            _note_view(graph, node, views)
        elif node.target is _CONVERT or (node.target is not _COPY and torch.Tag.pointwise in _tags(node)):
            _move(graph, node, views)


def compiler_pass() -> Any:
    """elementwise_first for torch.compile, which caches compiled code only if its passes have a uuid."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files  # slow to import

    class Pass(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            elementwise_first(graph)

        def uuid(self) -> bytes:
            return get_hash_for_files((__file__,))

    return Pass()


def _note_view(graph: Graph, node: Node, views: dict[Node, _View]) -> None:
    """Notes the base of a view. A view that shows the images as they are is replaced by them."""
    source, rest = node.args[0], node.args[1:]
    assert isinstance(source, Node)
    if source not in views:
        if not _is_image(source):
            return
        with graph.inserting_before(node):
            last = _call(graph, _ATEN.permute.default, (source, _LAST), {})
            shape = list(last.meta["val"].shape)
            base = _call(graph, _RESHAPE, (last, [math.prod(shape[:-1]), shape[-1]]), {})
        steps = [(_RESHAPE, (shape,)), (_ATEN.permute.default, (_SECOND,))]
        views[source] = _View(base, steps, _fresh(last).permute(_SECOND))
    base, steps, places = views[source]
    try:
        places = (_ATEN.view.default if node.target is _RESHAPE else node.target)(places, *rest)  # type: ignore[operator]
    except (RuntimeError, ValueError):  # this view needs a copy, say torch and its fake tensors
        return
    first = steps[:2]
    if _equal(places, _fresh(base).view(first[0][1][0]).permute(_SECOND)):
        with graph.inserting_before(node):
            plain = _apply_steps(graph, base, first)
        node.replace_all_uses_with(plain)
        views[plain] = _View(base, first, places)
    else:
        views[node] = _View(base, [*steps, (node.target, rest)], places)


def _is_image(node: Node) -> bool:
    """Whether a convolution made it, it comes from another graph, or its channels are innermost in memory."""
    image = node.meta["val"]
    source: Any = node.args[0] if node.target is operator.getitem else node
    known = node.op == "placeholder" or getattr(source.target, "_opname", "") in _CONVOLUTIONS
    return image.ndim == 4 and (known or image.is_contiguous(memory_format=torch.channels_last))


def _move(graph: Graph, node: Node, views: dict[Node, _View]) -> None:
    """Replaces an operation on equal views by the view of the operation."""
    arg_views = [views[arg] for arg in node.args if isinstance(arg, Node) and _whole(arg, node) and arg in views]
    if not arg_views or not all(arg_views[0].same(other) for other in arg_views):
        return
    if any(isinstance(value, Node) for value in node.kwargs.values()):
        return
    with graph.inserting_before(node):
        bases = [_based(graph, arg, node, arg_views[0], views) for arg in node.args]
        moved = _call(graph, node.target, tuple(bases), dict(node.kwargs))
        view = _apply_steps(graph, moved, arg_views[0].steps)
    node.replace_all_uses_with(view)
    views[view] = _View(moved, arg_views[0].steps, arg_views[0].places)


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
    return _call(graph, _RESHAPE, (ordered, list(view.base.meta["val"].shape)), {})


def _apply_steps(graph: Graph, node: Node, steps: list[tuple[Any, tuple[Any, ...]]]) -> Node:
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


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two views show the same places; the stride along an axis of size 1 does not matter."""
    if first.shape != second.shape:
        return False
    return all(a == b or n == 1 for a, b, n in zip(first.stride(), second.stride(), first.shape, strict=True))
