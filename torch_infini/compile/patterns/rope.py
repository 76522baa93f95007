"""Rotary position embedding as in transformers: q * cos + rotate_half(q) * sin, on all or the first columns.

The kernel reads only half of cos and sin, so the graph must show that their halves are equal: cos of cat((freqs,
freqs)).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

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
    last_slice,
    only_user,
    sweep,
    tensor,
    written_between,
)
from ..report import Report
from ._pattern import Pattern


@dataclass
class Site:
    """One embedding: x, the tables (before unsqueeze), the dimension of the heads, and the node of the result."""

    x: Node
    cos: Node
    sin: Node
    heads: int  # the dimension of x that cos and sin lack: 1 or 2 of four
    last: Node


def apply(graph: Graph, report: Report, wanted: frozenset[str]) -> None:
    halves: dict[Node, Node] = {}
    for node in list(graph.nodes):
        site = find(node)
        if site is None:
            continue
        reason = site if isinstance(site, str) else unsupported_reason(graph, site)
        if report.record("rope", reason, wanted) and isinstance(site, Site):
            replace(graph, site, halves)


def find(node: Node) -> Site | str | None:
    if not is_(node, "add") or len(node.args) != 2:
        return None
    for straight, turned in (node.args, node.args[::-1]):
        if not (is_(straight, "mul") and is_(turned, "mul")):
            continue
        for rotated, sin in (turned.args, turned.args[::-1]):
            x = rotated_half(rotated)
            if x is None or x not in straight.args:
                continue
            cos = straight.args[1] if straight.args[0] is x else straight.args[0]
            return tables(node, x, cos, sin)
    return None


def rotated_half(node: Any) -> Node | None:
    """Return x if the node is cat((-x[..., n/2:], x[..., :n/2]), -1)."""
    parts: Any = argument(node, 0) if is_(node, "cat") and argument(node, 1, "dim", default=0) in (-1, 3) else ()
    if len(parts) != 2:
        return None
    minus, first = parts
    if not is_(minus, "neg"):
        return None
    low, high = last_slice(first), last_slice(argument(minus, 0))
    if low is None or high is None or low[0] is not high[0]:
        return None
    size = known_tensor(low[0]).shape[-1]
    return low[0] if (low[1], low[2], high[1], high[2]) == (0, size // 2, size // 2, size) else None


def tables(last: Node, x: Node, cos: Any, sin: Any) -> Site | str:
    """Return the site, or why cos and sin cannot be used."""
    source, heads = tensor(x), set()
    if source is None or source.dim() != 4:
        return "x does not have four dimensions"
    found = []
    for table in (cos, sin):
        got = tensor(table)
        if got is None or not is_(table, "unsqueeze"):
            return "cos and sin have no separate dimension for the heads"
        dim = argument(table, 1, "dim")
        heads.add(dim if dim >= 0 else dim + got.dim())
        inner = argument(table, 0)
        stored = tensor(inner)
        if stored is None or stored.dim() != 3:
            return "cos and sin do not have the shape [batch, tokens, columns]"
        if not known_equal(got.shape[-1], source.shape[-1]):
            return "cos and x have different numbers of columns"
        found.append(inner)
    if heads not in ({1}, {2}):
        return "cos and sin have the heads in different dimensions"
    for table, function in zip(found, ("cos", "sin"), strict=True):
        if not equal_halves(table, function):
            return f"this graph does not show that the halves of {function} are equal"
    return Site(x, found[0], found[1], heads.pop(), last)


def equal_halves(node: Any, function: str) -> bool:
    """Return whether the table is cos or sin of cat((f, f), -1), possibly cast or scaled by numbers."""

    def below(node: Any) -> Any:
        while is_cast(node) or (is_(node, "mul") and is_number(argument(node, 1))):
            node = argument(node, 0)
        return node

    table = below(node)
    angles = below(argument(table, 0)) if is_(table, function) else None
    if not is_(angles, "cat"):
        return False
    parts = argument(angles, 0)
    return argument(angles, 1, "dim", default=0) in (-1, 2) and len(parts) == 2 and parts[0] is parts[1]


def unsupported_reason(graph: Graph, site: Site) -> str | None:
    x, cos, sin, last = (known_tensor(node) for node in (site.x, site.cos, site.sin, site.last))
    if x.dtype not in FLOATS or cos.dtype not in (x.dtype, torch.float32) or not alike(site.cos, site.sin):
        return f"x is {x.dtype}, cos {cos.dtype} and sin {sin.dtype}"
    if last.dtype != x.dtype:
        return f"the result is {last.dtype} and x {x.dtype}"
    tokens = x.shape[2 if site.heads == 1 else 1]
    if not known_equal(cos.shape[1], tokens) or not any(known_equal(cos.shape[0], n) for n in (1, x.shape[0])):
        return "cos does not have a row for each token"
    if not (dense_rows(x) and dense_rows(cos) and dense_rows(sin)):
        return "the last dimension of x, cos or sin has another stride than 1"
    between = list(inside(site.last, [site.x, site.cos, site.sin]))
    if written_between([site.x, site.cos, site.sin], earliest(graph, between), site.last):
        return "x, cos or sin is overwritten before the result is computed"
    return None


def replace(graph: Graph, site: Site, halves: dict[Node, Node]) -> None:
    middle = known_tensor(site.cos).shape[-1] // 2
    for table in (site.cos, site.sin):
        if table not in halves:
            with graph.inserting_after(table):
                halves[table] = insert(graph, operator.getitem, (table, (Ellipsis, slice(None, middle))))
    replaced = list(inside(site.last, [site.x, site.cos, site.sin]))
    x, last = site.x, site.last
    # cat((rotated, x[..., r:]), -1): the kernel copies the columns after the rotated ones.
    whole, user = last_slice(x), only_user(last)
    if whole is not None and whole[1] == 0 and user is not None and is_(user, "cat"):
        parts = argument(user, 0)
        rest = last_slice(parts[1]) if len(parts) == 2 and parts[0] is last else None
        size = known_tensor(whole[0]).shape[-1]
        if rest == (whole[0], whole[2], size) and argument(user, 1, "dim", default=0) in (-1, 3):
            replaced += [user, parts[1], x]
            x, last = whole[0], user
    with graph.inserting_before(last):
        turned = insert(graph, torch.transpose, (x, 1, 2)) if site.heads == 1 else x
        op = torch.ops.infini.rope.default
        result = insert(graph, op, (turned, halves[site.cos], halves[site.sin], None, False))
        if site.heads == 1:
            result = insert(graph, torch.transpose, (result, 1, 2))
    result.meta["example_value"] = tensor(last)
    last.replace_all_uses_with(result)
    sweep(graph, replaced)


PATTERN = Pattern(("rope",), apply, order=1)
