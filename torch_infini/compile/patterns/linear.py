"""Linear layers: with few rows the kernel is limited by memory bandwidth only, which torch's product is not.

With many rows of bfloat16 the op calls the same product as Inductor.
"""

from __future__ import annotations

import torch
from torch.fx import Graph

from ..graph import FLOATS, argument, dense_rows, insert, is_, sweep, tensor
from ..report import Report

NAMES = ("linear",)


def apply(graph: Graph, report: Report, wanted: frozenset[str]) -> None:
    for node in list(graph.nodes):
        if not is_(node, "linear"):
            continue
        inputs = [argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")]
        tensors = [tensor(i) for i in inputs if i is not None]
        reason = None
        if any(t is None for t in tensors):
            reason = "its shapes are not known"
        elif len({t.dtype for t in tensors} | {tensor(node).dtype}) > 1 or tensors[0].dtype not in FLOATS:  # type: ignore[union-attr]
            reason = "its dtypes differ, or are not float32, bfloat16 or float16"
        elif tensors[1].dim() != 2 or not (dense_rows(tensors[0]) and dense_rows(tensors[1])):  # type: ignore[union-attr,arg-type]
            reason = "the last dimension of x or of the weight has another stride than 1"
        if not report.record("linear", reason, wanted):
            continue
        with graph.inserting_before(node):
            result = insert(graph, torch.ops.infini.linear.default, tuple(inputs), like=node)
        node.replace_all_uses_with(result)
        sweep(graph, [node])
