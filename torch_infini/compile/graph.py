"""Reads and changes the graphs that Dynamo captures: torch calls as written, before any lowering.

The patterns use this module: one name for all spellings of an operation (x * y, torch.mul, x.mul), arguments by name,
looking through casts and views, and aliasing.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, Node

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})
# The results of these may alias their first argument.
VIEWS = frozenset(
    {"view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "expand", "expand_as", "getitem", "chunk",
     "split", "t", "T", "contiguous", "flatten", "unflatten", "narrow", "select", "detach", "view_as", "unbind", *CASTS}
)  # fmt: skip
MODULES = ("torch", "torch.functional", "torch.nn.functional", "torch._C._nn", "_operator", "math", "builtins")
SPELLINGS = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "concat": "cat",
             "concatenate": "cat", "negative": "neg", "scaled_dot_product_attention": "sdpa"}  # fmt: skip


# Names of the arguments that the patterns read by position.
LEADING = {
    **dict.fromkeys(("add", "div", "matmul", "mul"), ("input", "other")),
    **dict.fromkeys(("mean", "neg", "rms_norm", "rsqrt", "sigmoid", "silu", "softmax", "square", "tanh"), ("input",)),
    "cat": ("tensors",),
    "pow": ("input", "exponent"),
    "transpose": ("input",),
    "unsqueeze": ("input",),
}


# Keyword arguments that change the operation: x + alpha * y, a rounded quotient, a result written to `out`.
CHANGERS = frozenset({"alpha", "rounding_mode", "out"})


def name_of(node: Any) -> str | None:
    """Return torch's name of the operation of a node, for any spelling; None if it is not a known call."""
    if not isinstance(node, Node):
        return None
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        target: Any = node.target
        if isinstance(target, torch._ops.OpOverload):
            return None
        module = getattr(target, "__module__", None) or getattr(getattr(target, "__objclass__", None), "__module__", "")
        name = getattr(target, "__name__", "")
        known = module in MODULES or module is None or getattr(torch, name, None) is target
        if not (known or getattr(torch._C._nn, name, None) is target):
            return None
    else:
        return None
    name = SPELLINGS.get(name, name)
    if CHANGERS & node.kwargs.keys():
        return None
    return name if len(node.args) >= len(LEADING.get(name, ())) else None


def make_positional(graph: Graph) -> None:
    """Convert the keyword arguments of LEADING to positional ones: torch.mul(input=a, other=b) to torch.mul(a, b)."""
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method") or not node.kwargs:
            continue
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        wanted = LEADING.get(SPELLINGS.get(name, name), ())[len(node.args) :]
        if wanted and all(key in node.kwargs for key in wanted) and not isinstance(node.target, torch._ops.OpOverload):
            kwargs = dict(node.kwargs)
            node.args = (*node.args, *(kwargs.pop(key) for key in wanted))
            node.kwargs = kwargs


def is_(node: Any, *names: str) -> TypeGuard[Node]:
    return name_of(node) in names


def argument(node: Node, position: int, *names: str, default: Any = None) -> Any:
    """Return an argument by position, or by any of its names; Any, because fx arguments are nodes or constants."""
    if len(node.args) > position:
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def node_argument(node: Node, position: int, *names: str) -> Node | None:
    found = argument(node, position, *names)
    return found if isinstance(found, Node) else None


def value(node: Any) -> Any:
    """Return Dynamo's example value of the node: a fake tensor with shape, strides and dtype, or None."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def tensor(node: Any) -> Tensor | None:
    found = value(node)
    return found if isinstance(found, Tensor) else None


def known_tensor(node: Any) -> Tensor:
    found = tensor(node)
    assert found is not None, f"{node} is not a tensor"
    return found


def is_number(node: Any) -> bool:
    """Return whether the node is a number, or has a symbolic one as its value (an eps with dynamic=True)."""
    found = value(node) if isinstance(node, Node) else node
    return isinstance(found, float | int | torch.SymFloat) and not isinstance(found, bool)


def number(node: Any) -> float:
    """Return the number; guard a symbolic one, which specializes the compiled graph to it."""
    found = value(node) if isinstance(node, Node) else node
    return found.node.guard_float("", 0) if isinstance(found, torch.SymFloat) else float(found)


def alike(*nodes: Any) -> bool:
    """Return whether the nodes are tensors of equal shape and dtype; symbolic sizes must be the same symbol."""
    tensors = [tensor(node) for node in nodes]
    first = tensors[0]
    if first is None or any(t is None for t in tensors):
        return False
    return all(t is not None and t.dtype == first.dtype and same_shape(t.shape, first.shape) for t in tensors)


def known_equal(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal for all inputs the graph is valid for."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def same_shape(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(known_equal(x, y) for x, y in zip(a, b, strict=True))


def dense_rows(t: Tensor) -> bool:
    """Return whether the last dimension has stride 1, as most kernels require."""
    return t.dim() > 0 and (known_equal(t.stride(-1), 1) or known_equal(t.shape[-1], 1))


def is_cast(node: Any) -> TypeGuard[Node]:
    """Return whether the node converts its first argument to a dtype, on the same device."""
    if not is_(node, *CASTS) or not node.args:
        return False
    source, result = tensor(node.args[0]), tensor(node)
    return source is not None and result is not None and source.device == result.device and alike_shape(node)


def alike_shape(node: Node) -> bool:
    source, result = tensor(node.args[0]), tensor(node)
    return source is not None and result is not None and same_shape(source.shape, result.shape)


def same(a: Any, b: Any) -> bool:
    """Return whether two nodes have the same value: the same node, or casts of one node to the same dtype."""
    return a is b or (is_cast(a) and is_cast(b) and alike(a, b) and same(a.args[0], b.args[0]))


def without_identity(node: Any) -> Any:
    """Skip casts to the same dtype, and dropout with p = 0 or outside of training."""
    while True:
        if is_cast(node) and alike(node, node.args[0]):
            node = node.args[0]
        elif is_(node, "dropout") and (
            argument(node, 1, "p", default=0.5) == 0 or argument(node, 2, "training", default=True) is False
        ):
            node = node.args[0] if node.args else node.kwargs["input"]
        else:
            return node


def only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def last_slice(node: Any) -> tuple[Node, int, int] | None:
    """Return (x, begin, end) if the node is x[..., begin:end], with a size that is not symbolic."""
    if not is_(node, "getitem") or not isinstance(node.args[1], tuple) or tensor(node.args[0]) is None:
        return None
    x, index = argument(node, 0), argument(node, 1)
    source = known_tensor(x)
    full = (Ellipsis, slice(None))
    one_slice = len(index) >= 1 and isinstance(index[-1], slice) and all(i in full for i in index[:-1])
    whole = len(index) == 2 and index[0] is Ellipsis or len(index) == source.dim() and Ellipsis not in index
    size = source.shape[-1]
    if not (one_slice and whole and isinstance(size, int)):
        return None
    if not all(i is None or isinstance(i, int) for i in (index[-1].start, index[-1].stop, index[-1].step)):
        return None
    begin, end, step = index[-1].indices(size)
    return (x, begin, end) if step == 1 else None


def base(node: Any) -> Any:
    """Return the node whose memory this node's result may alias."""
    while isinstance(node, Node) and is_(node, *VIEWS) and node.args:
        node = node.args[0]
    return node


def written(node: Node) -> list[Any]:
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema.arguments
        pairs = zip(schema, node.args, strict=False)
        named = [(a, node.kwargs[a.name]) for a in schema if a.name in node.kwargs]
        return [v for a, v in (*pairs, *named) if a.alias_info is not None and a.alias_info.is_write]
    if node.target is operator.setitem:
        return [node.args[0]]
    if node.op not in ("call_function", "call_method"):
        return []
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True
    if isinstance(node.target, str) and name.startswith("__i") or node.target in INPLACE_OPERATORS:
        in_place = True
    found = [node.kwargs["out"]] if node.kwargs.get("out") is not None else []
    return [*found, *([node.args[0]] if in_place and node.args else [])]


INPLACE_OPERATORS = frozenset(
    getattr(operator, name) for name in dir(operator) if name.startswith("i") and name[1:] in dir(operator)
) - {operator.index, operator.indexOf, operator.inv, operator.invert, operator.is_, operator.is_not}


def written_between(inputs: list[Any], first: Node, last: Node) -> Node | None:
    """Return a node from `first` up to `last` that may write to the memory of an input; None if there is none."""
    bases = {base(i) for i in inputs if isinstance(i, Node)}
    node = first
    while node is not last:
        if any(base(w) in bases for w in written(node)):
            return node
        node = node.next
    return None


def earliest(graph: Graph, nodes: list[Node]) -> Node:
    wanted = set(nodes)
    return next(node for node in graph.nodes if node in wanted)


def inside(last: Node, inputs: list[Any]) -> Iterator[Node]:
    """Yield the nodes that compute `last` from `inputs`, excluding the inputs."""
    seen, todo = set(inputs), [last]
    while todo:
        node = todo.pop()
        if node in seen or node.op in ("placeholder", "get_attr"):
            continue
        seen.add(node)
        yield node
        todo += node.all_input_nodes


def sweep(graph: Graph, nodes: list[Node]) -> None:
    """Erase the nodes that have no users. (Graph.eliminate_dead_code would also erase x.add_(1).)"""
    erased = True
    while erased:
        erased = False
        for node in nodes:
            if not node._erased and not node.users and not written(node):
                graph.erase_node(node)
                erased = True


def insert(graph: Graph, target: Any, args: tuple[Any, ...], like: Any = None) -> Node:
    """Insert a call at the graph's insertion point; `like`: a node with the shape and dtype of the result."""
    node = graph.call_function(target, args)
    if like is not None and value(like) is not None:
        node.meta["example_value"] = value(like)
    return node
