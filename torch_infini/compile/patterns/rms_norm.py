"""RMSNorm in all rounding modes, written out or as torch's function, alone or after the residual addition.

The search starts at 1 / sqrt(mean(x^2) + eps) and follows the products; the positions of casts tell the rounding mode.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ...ops.rms_norm import ROUNDINGS
from ..graph import (
    FLOATS,
    alike,
    argument,
    dense_rows,
    earliest,
    insert,
    inside,
    is_,
    is_cast,
    is_number,
    known_equal,
    known_tensor,
    number,
    only_user,
    same,
    sweep,
    tensor,
    without_identity,
    written_between,
)
from ..report import Report
from ._pattern import Pattern


@dataclass
class Site:
    """One norm: its input, its weight and the node of its result."""

    x: Node
    weight: Node
    eps: Any  # a number, or a node whose value is a number
    rounding: str
    last: Node


def apply(graph: Graph, report: Report, wanted: frozenset[str]) -> None:
    for node in list(graph.nodes):
        if is_(node, "rms_norm"):
            site: Site | str | None = of_function(node)
        else:
            site = of_inverse_root(node)
        if site is None:
            continue
        if isinstance(site, str):
            report.record("rms_norm", site, wanted)
            continue
        replace(graph, site, report, wanted)


def of_function(node: Node) -> Site | str:
    """Match torch.nn.functional.rms_norm, whose default eps is that of the dtype it computes in."""
    x, shape = argument(node, 0), argument(node, 1, "normalized_shape")
    weight, eps = argument(node, 2, "weight"), argument(node, 3, "eps")
    source = tensor(x)
    if weight is None:
        return "it has no weight"
    if source is None or len(shape) != 1:
        return "it normalizes over more than the last dimension"
    if eps is None:
        if source.dtype != torch.float32:
            return "its eps is not given"
        eps = torch.finfo(torch.float32).eps
    return Site(x, weight, eps, "once", node)


def squared(node: Any) -> Any:
    """Return x if the node is x^2."""
    if is_(node, "pow") and argument(node, 1, "exponent") == 2 or is_(node, "square"):
        return node.args[0]
    return node.args[0] if is_(node, "mul") and same(node.args[0], node.args[1]) else None


def of_inverse_root(node: Node) -> Site | str | None:
    """Match the norm with this node as 1 / sqrt(mean(x^2) + eps); return the reason if it cannot be replaced."""
    if not (is_(node, "rsqrt") or (is_(node, "pow") and argument(node, 1, "exponent") == -0.5)):
        return None
    total = argument(node, 0)
    if not is_(total, "add"):
        return None
    mean, eps = total.args if is_(total.args[0], "mean") else reversed(total.args)
    if not is_(mean, "mean") or not is_number(eps):
        return None
    x32 = squared(argument(mean, 0))
    dim, keepdim = argument(mean, 1, "dim"), argument(mean, 2, "keepdim", default=False)
    source = tensor(x32)
    if source is None or keepdim is not True or dim not in (-1, [-1], (-1,), source.dim() - 1):
        return None
    x = argument(x32, 0) if is_cast(x32) else x32
    normalized = only_user(node)
    if normalized is None or not is_(normalized, "mul") or not any(same(x32, a) for a in normalized.args):
        return "its result is not multiplied by x"
    return form(x, normalized, eps)


def form(x: Node, normalized: Node, eps: Any) -> Site | str:
    """Match the rounding mode, starting from x / sqrt(mean(x^2) + eps)."""
    source = known_tensor(x)
    at = normalized
    rounded = False
    while (user := only_user(at)) is not None and is_cast(user) and user.args[0] is at:
        at, rounded = user, True
    product = only_user(at)
    if product is None or not is_(product, "mul"):
        return "it has no weight"
    factor = product.args[1] if product.args[0] is at else product.args[0]
    if not isinstance(factor, Node):
        return "it is multiplied by a number, not by a weight"
    if is_(factor, "add"):
        one, weight = (argument(factor, i) for i in ((0, 1) if tensor(argument(factor, 0)) is None else (1, 0)))
        weight = argument(weight, 0) if is_cast(weight) else weight
        last = result_in(product, source.dtype)
        got = tensor(at)
        in_order = got is not None and got.dtype == torch.float32
        if not is_number(one) or number(one) != 1 or last is None or not in_order:
            return "its weight has an addend other than 1"
        return Site(x, weight, eps, "gemma", last)
    weight = factor
    got, scale = tensor(at), tensor(weight)
    if got is None or scale is None:
        return "its weight is not a tensor"
    if rounded and got.dtype == source.dtype or source.dtype == got.dtype == torch.float32:
        return Site(x, weight, eps, "llama", product)
    cast_weight = argument(weight, 0) if is_cast(weight) else weight
    last = result_in(product, source.dtype)
    if got.dtype == torch.float32 and last is not None:
        return Site(x, cast_weight, eps, "once", last)
    return f"unknown rounding mode: x is {source.dtype}, its normalized value {got.dtype}"


def result_in(node: Node, dtype: torch.dtype) -> Node | None:
    """Return the node if it has the dtype, else its only user if that casts it to the dtype."""
    found = tensor(node)
    if found is not None and found.dtype == dtype:
        return node
    user = only_user(node)
    return user if is_cast(user) and known_tensor(user).dtype == dtype else None


def unsupported_reason(graph: Graph, site: Site) -> str | None:
    x, weight, last = tensor(site.x), tensor(site.weight), tensor(site.last)
    if x is None or weight is None or last is None:
        return "its shapes are not known"
    if x.dtype not in FLOATS or weight.dtype not in (x.dtype, torch.float32):
        return f"x is {x.dtype} and the weight {weight.dtype}"
    if weight.dim() != 1 or not known_equal(weight.shape[0], x.shape[-1]):
        return "the weight is not one number a column"
    if not dense_rows(x) or not dense_rows(weight):
        return "the last dimension of x or of the weight has another stride than 1"
    expected = weight.dtype if site.rounding == "llama" else x.dtype
    if last.dtype != expected:
        return f"the result would be {expected}, not {last.dtype}"
    between = list(inside(site.last, [site.x, site.weight]))
    if written_between([site.x, site.weight], earliest(graph, between), site.last):
        return "x or the weight is overwritten before the result is computed"
    return None


def replace(graph: Graph, site: Site, report: Report, wanted: frozenset[str]) -> None:
    total = without_identity(site.x)
    joined = "add_rms_norm" in wanted and can_join(graph, total, site)
    name = "add_rms_norm" if joined else "rms_norm"
    if not report.record(name, unsupported_reason(graph, site), wanted):
        return
    eps, rounding = number(site.eps), ROUNDINGS[site.rounding]
    replaced = list(inside(site.last, [site.x, site.weight]))
    if joined:
        with graph.inserting_after(total):
            both = insert(graph, torch.ops.infini.add_rms_norm.default, (*total.args[:2], site.weight, eps, rounding))
        with graph.inserting_after(both):
            stream = insert(graph, operator.getitem, (both, 1), like=total)
        with graph.inserting_after(stream):
            result = insert(graph, operator.getitem, (both, 0), like=site.last)
        site.last.replace_all_uses_with(result)
        total.replace_all_uses_with(stream)
    else:
        with graph.inserting_before(site.last):
            op = torch.ops.infini.rms_norm.default
            result = insert(graph, op, (site.x, site.weight, eps, rounding), like=site.last)
        site.last.replace_all_uses_with(result)
    sweep(graph, [*replaced, total] if joined else replaced)


def can_join(graph: Graph, total: Any, site: Site) -> bool:
    """Return whether x sums two tensors of equal shape and dtype, and the op's inputs exist at that node."""
    if not is_(total, "add") or total.kwargs or len(total.args) != 2 or not alike(total, *total.args):
        return False
    if not all(dense_rows(known_tensor(a)) for a in total.args):
        return False
    order = {node: i for i, node in enumerate(graph.nodes)}
    return order[site.weight] < order[total] and not written_between([total], total.next, site.last)


PATTERN = Pattern(("rms_norm", "add_rms_norm"), apply, order=0)  # first, before the residual additions are replaced
