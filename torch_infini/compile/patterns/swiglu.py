"""The gated activations silu(gate) * up and gelu(gate) * up, with gate and up from two projections or halves of one.

For gelu only the tanh approximation, as an argument of torch's function.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import FLOATS, alike, argument, insert, is_, node_argument, only_user, sweep, tensor, written_between
from ..report import Report
from ._pattern import Pattern


def apply(graph: Graph, report: Report, wanted: frozenset[str]) -> None:
    for node in list(graph.nodes):
        name = "swiglu"
        gate = silu_of(node)
        if gate is None:
            name, gate = "geglu", gelu_of(node)
        product = only_user(node) if gate is not None else None
        if gate is None or product is None or not is_(product, "mul") or product.args[0] is product.args[1]:
            continue
        up = product.args[1] if product.args[0] is node else product.args[0]
        if tensor(up) is None:
            continue
        found = tensor(gate)
        reason = None
        if not alike(gate, up, product):
            reason = "gate, up and the result differ in shape or dtype"
        elif found is None or found.dtype not in FLOATS:
            reason = "its dtype is not float32, bfloat16 or float16"
        elif written_between([gate, up], node, product):
            reason = "gate or up is overwritten before the result is computed"
        if not report.record(name, reason, wanted):
            continue
        with graph.inserting_before(product):
            result = insert(graph, getattr(torch.ops.infini, name).default, (gate, up), like=product)
        product.replace_all_uses_with(result)
        sweep(graph, [product, node, *node.all_input_nodes])  # including the sigmoid, if it was written out


def gelu_of(node: Any) -> Node | None:
    """Return x if the node is the tanh approximation of gelu(x)."""
    if is_(node, "gelu") and argument(node, 1, "approximate", default="none") == "tanh":
        return node_argument(node, 0, "input")
    return None


def silu_of(node: Any) -> Node | None:
    """Return x if the node is silu(x), or x * sigmoid(x)."""
    if is_(node, "silu") and argument(node, 1, "inplace", default=False) is False:
        return node_argument(node, 0, "input")
    if is_(node, "mul") and len(node.args) == 2:
        for x, gate in (node.args, node.args[::-1]):
            if is_(gate, "sigmoid") and gate.args[0] is x and isinstance(x, Node):
                return x
    return None


PATTERN = Pattern(("swiglu", "geglu"), apply, order=3)
