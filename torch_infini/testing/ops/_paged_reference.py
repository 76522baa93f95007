"""What paged attention computes, in float64 and in plain torch: reference and peer of the ops of paged_attention.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ._int8_cache import dequantized


def distances(queries: int, keys: int, window: int) -> tuple[Tensor, Tensor]:
    """[queries, keys]: a key's position - a query's, which are the last; and whether the query does not see it."""
    distance = torch.arange(keys) - torch.arange(keys - queries, keys).unsqueeze(-1)
    return distance, (distance > 0) | (distance <= -(window or keys))


def attend(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, scale: float, window: int = 0) -> Tensor:
    """In float64: [queries, H, D] of one sequence with its keys [Hkv, keys, D]; the last query's is the last."""
    (queries, heads, _), keys = q.shape, k.shape[1]
    group = heads // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("qhd,hkd->hqk", q.double(), k) * scale
    distance, unseen = distances(queries, keys, window)
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * distance
    return torch.einsum("hqk,hkd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)


def gathered(cache: Tensor, table: Tensor, length: int, first: int = 0) -> Tensor:
    """The keys of a sequence from `first` up to its length, [Hkv, length - first, D]."""
    size = cache.shape[2]
    blocks = table[first // size : -(-length // size)]
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, first % size :][:, : length - first]


def first_seen(length: int, queries: int, window: int) -> int:
    """The first key that any of a sequence's queries sees."""
    return max(length - queries + 1 - window, 0) if window else 0


def prefill_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cum_seq_lens_q: Tensor,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else scale
    k_cache, v_cache = dequantized(k_cache, k_scales), dequantized(v_cache, v_scales)
    result = torch.zeros_like(q, dtype=torch.float64)
    starts = cum_seq_lens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        queries = slice(starts[b], starts[b + 1])
        if length > 0 and q.numel():
            first = first_seen(length, starts[b + 1] - starts[b], window)
            k, v = (gathered(cache, block_tables[b], length, first) for cache in (k_cache, v_cache))
            result[queries] = attend(q[queries], k, v, alibi_slopes, scale, window)
    return result


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    starts = torch.arange(len(seq_lens) + 1)
    scales = k_scales, v_scales
    return prefill_reference(q, k_cache, v_cache, block_tables, seq_lens, starts, alibi_slopes, scale, window, *scales)


def peer(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """All sequences gathered to the longest table's length, and torch's SDPA with a mask."""
    k_cache, v_cache = dequantized(k_cache, k_scales).to(q.dtype), dequantized(v_cache, v_scales).to(q.dtype)
    k, v = (cache[block_tables.clamp(min=0)].transpose(1, 2).flatten(2, 3) for cache in (k_cache, v_cache))
    distance = (torch.arange(k.shape[2]) - seq_lens[:, None] + 1)[:, None, None]
    mask = (distance <= 0) & (distance > -(window or k.shape[2]))
    if alibi_slopes is not None:
        mask = (alibi_slopes[:, None, None] * distance).masked_fill(~mask, -torch.inf).to(q.dtype)
    return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, mask, scale=scale, enable_gqa=True).squeeze(2)


def prefill_peer(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cum_seq_lens_q: Tensor,
    alibi_slopes: Tensor | None = None,
    scale: float | None = None,
    window: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """One sequence after the other, gathered, through torch's SDPA."""
    k_cache, v_cache = dequantized(k_cache, k_scales).to(q.dtype), dequantized(v_cache, v_scales).to(q.dtype)
    outs = [q[:0]]
    starts = cum_seq_lens_q.tolist()
    for b, keys in enumerate(seq_lens.tolist()):
        one = q[starts[b] : starts[b + 1]].transpose(0, 1)
        first = first_seen(keys, one.shape[1], window)
        k, v = (gathered(cache, block_tables[b], keys, first) for cache in (k_cache, v_cache))
        distance, unseen = distances(one.shape[1], keys - first, window)
        mask = ~unseen
        if alibi_slopes is not None:
            mask = (alibi_slopes[:, None, None] * distance).masked_fill(unseen, -torch.inf).to(q.dtype)
        is_causal = alibi_slopes is None and one.shape[1] == keys and not 0 < window < keys
        attended = F.scaled_dot_product_attention(
            one, k, v, None if is_causal else mask, is_causal=is_causal, scale=scale, enable_gqa=True
        )
        outs.append(attended.transpose(0, 1))
    return torch.cat(outs)
