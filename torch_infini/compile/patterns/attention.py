"""Attention: scaled_dot_product_attention, or scores, softmax and the product with V written out.

Scores may have a softcap by tanh, as in Gemma 2. If keys and values are repeated for the query heads of a group, the op
gets them without the repetition.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..graph import (
    FLOATS,
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
    same_shape,
    sweep,
    tensor,
    without_identity,
    written_between,
)
from ..report import Report
from ._pattern import Pattern


@dataclass
class Site:
    """One attention over [batch, heads, tokens, columns]."""

    q: Node
    k: Node
    v: Node
    mask: Node | None
    causal: bool
    scale: float | None
    last: Node
    softcap: float = 0.0  # 0: none


def apply(graph: Graph, report: Report, wanted: frozenset[str]) -> None:
    for node in list(graph.nodes):
        site = of_function(node) if is_(node, "sdpa") else of_softmax(node) if is_(node, "softmax") else None
        if site is None:
            continue
        reason = site if isinstance(site, str) else unsupported_reason(graph, site)
        if report.record("attention", reason, wanted) and isinstance(site, Site):
            replace(graph, site)


def of_function(node: Node) -> Site | str:
    q, k, v = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    if argument(node, 4, "dropout_p", default=0.0) != 0:
        return "it has dropout"
    scale = argument(node, 6, "scale")
    if not (scale is None or is_number(scale)):
        return "its scale is not a number"
    mask, causal = argument(node, 3, "attn_mask"), argument(node, 5, "is_causal", default=False)
    queries, keys = tensor(q), tensor(k)
    if queries is None or keys is None:
        return "its shapes are not known"
    # torch aligns the causal mask at the first key, the kernel at the last: they agree only for equal lengths.
    if not isinstance(causal, bool) or (causal and not known_equal(queries.shape[-2], keys.shape[-2])):
        return "its causal mask is aligned at the first key, with more keys than queries"
    return Site(q, k, v, mask, causal, None if scale is None else number(scale), node)


def of_softmax(node: Node) -> Site | str | None:
    """Match softmax(q k^T * scale + mask) v, with softcap * tanh(q k^T * scale / softcap) as optional scores.

    Return None if this softmax is not part of that formula.
    """
    weights, product = node, only_user(node)
    while product is not None and argument(product, 0) is weights:
        if not (is_cast(product) or without_identity(product) is not product):
            break
        weights, product = product, only_user(product)
    if product is None or not is_(product, "matmul") or argument(product, 0) is not weights:
        return None
    scores, mask, softcap = without_identity(argument(node, 0)), None, None
    if is_(scores, "add") and all(tensor(a) is not None for a in scores.args):
        mask = argument(scores, 1)
        scores = without_identity(argument(scores, 0))
    scores, scale = without_factors(scores)
    if is_(scores, "tanh"):
        softcap = scale
        scores, scale = without_factors(argument(scores, 0))
        scale *= softcap
    if not is_(scores, "matmul"):
        return None
    q, transposed = argument(scores, 0), argument(scores, 1)
    if not is_(transposed, "transpose") or {argument(transposed, 1, "dim0"), argument(transposed, 2, "dim1")} not in (
        {2, 3},
        {-1, -2},
    ):
        return "its keys are not transposed for the product"
    if argument(node, 1, "dim") not in (-1, 3):
        return None
    largest = torch.finfo(torch.float32).max
    if not abs(scale) <= largest:
        return "its scale is not finite"
    if softcap is not None and not 0 < softcap <= largest:
        return "its softcap is not positive and finite"
    k, v = argument(transposed, 0), argument(product, 1)
    return Site(q, k, v, mask, False, scale, product, softcap or 0.0)


def without_factors(node: Any) -> tuple[Any, float]:
    """Return (x, f) of x * f, where f may be the product of several numbers, or 1."""
    node, factor = without_identity(node), 1.0
    while is_(node, "mul", "div") and is_number(argument(node, 1)):
        by = number(argument(node, 1))
        factor *= by if is_(node, "mul") else 1 / by if by else math.nan
        node = without_identity(argument(node, 0))
    return node, factor


def unrepeated(node: Node) -> Node:
    """Return x [b, h, t, d] if the node is x[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)."""
    expanded = argument(node, 0) if is_(node, "reshape") else None
    inserted = argument(expanded, 0) if is_(expanded, "expand") else None
    if not is_(inserted, "getitem"):
        return node
    x: Node = argument(inserted, 0)
    index = argument(inserted, 1)
    source, spread, result = tensor(x), tensor(expanded), tensor(node)
    whole = slice(None)
    if index not in ((whole, whole, None, whole, whole), (whole, whole, None)):
        return node
    if source is None or spread is None or result is None or source.dim() != 4 or result.dim() != 4:
        return node
    b, h, t, d = source.shape
    repeated = spread.shape[2]
    grouped = same_shape(spread.shape, (b, h, repeated, t, d)) and same_shape(result.shape, (b, h * repeated, t, d))
    return x if grouped else node


def unsupported_reason(graph: Graph, site: Site) -> str | None:
    q, k, v, last = tensor(site.q), tensor(site.k), tensor(site.v), tensor(site.last)
    if q is None or k is None or v is None or last is None or not q.dim() == k.dim() == v.dim() == 4:
        return "its tensors do not have four dimensions"
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype == last.dtype:
        return f"q is {q.dtype}, k {k.dtype}, v {v.dtype} and the result {last.dtype}"
    if not known_equal(v.shape[-1], q.shape[-1]):
        return "v and q have different numbers of columns"
    if not all(dense_rows(t) for t in (q, k, v)):
        return "the last dimension of q, k or v has another stride than 1"
    heads, groups = q.shape[1], known_tensor(unrepeated(site.k)).shape[1]
    if not (isinstance(heads, int) and isinstance(groups, int)) or heads % groups:
        return "its numbers of heads are symbolic, or not multiples"
    if site.mask is not None:
        mask = tensor(site.mask)
        if mask is None or mask.dtype not in (torch.bool, torch.float32, q.dtype) or mask.dim() not in (2, 4):
            return "the kernel does not take the dtype or rank of its mask"
    inputs = [site.q, site.k, site.v, site.mask]
    between = list(inside(site.last, [i for i in inputs if i is not None]))
    if written_between(inputs, earliest(graph, between), site.last):
        return "an input is overwritten before the result is computed"
    return None


def replace(graph: Graph, site: Site) -> None:
    # For both or neither, because the kernel takes one number of key heads.
    k, v = unrepeated(site.k), unrepeated(site.v)
    if known_tensor(k).shape[1] != known_tensor(v).shape[1]:
        k, v = site.k, site.v
    inputs = [i for i in (site.q, k, v, site.mask) if i is not None]
    replaced = list(inside(site.last, inputs))
    with graph.inserting_before(site.last):
        q, k, v = (insert(graph, torch.transpose, (t, 1, 2)) for t in (site.q, k, v))
        mask = site.mask
        if mask is not None and known_tensor(mask).dim() == 2:
            for _ in range(2):
                mask = insert(graph, torch.unsqueeze, (mask, 0))
        op = torch.ops.infini.attention.default
        result = insert(graph, op, (q, k, v, mask, None, site.causal, site.scale, site.softcap))
        result = insert(graph, torch.transpose, (result, 1, 2), like=site.last)
    site.last.replace_all_uses_with(result)
    sweep(graph, replaced)


PATTERN = Pattern(("attention",), apply, order=2)  # after rope, whose results it reads
