"""Linear layers: with few rows the kernel is limited only by memory bandwidth, unlike torch's product.

With many rows of bfloat16 the op calls the same product as Inductor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import FLOATS, argument, dense_rows, insert, is_, sweep, tensor
from ..report import Report
from ._pattern import Pattern


def apply(graph: Graph, report: Report, wanted: frozenset[str]) -> None:
    for node in list(graph.nodes):
        if not is_(node, "linear"):
            continue
        inputs = [argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")]
        reason = unsupported_reason(node, *inputs)
        if not report.record("linear", reason, wanted):
            continue
        with graph.inserting_before(node):
            result = insert(graph, torch.ops.infini.linear.default, tuple(inputs), like=node)
        node.replace_all_uses_with(result)
        sweep(graph, [node])


def unsupported_reason(node: Node, x: Any, weight: Any, bias: Any) -> str | None:
    y, a, b, c = (tensor(each) for each in (node, x, weight, bias))
    if y is None or a is None or b is None or (bias is not None and c is None):
        return "its shapes are not known"
    if len({t.dtype for t in (y, a, b, c) if t is not None}) > 1 or a.dtype not in FLOATS:
        return "its dtypes differ, or are not float32, bfloat16 or float16"
    if b.dim() != 2 or not (dense_rows(a) and dense_rows(b)):
        return "the last dimension of x or of the weight has another stride than 1"
    return None


PATTERN = Pattern(("linear",), apply, order=4)
