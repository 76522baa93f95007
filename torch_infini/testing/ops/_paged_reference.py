"""What paged attention computes, in float64 and in plain torch: reference and peer of the ops of paged_attention.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ._int8_cache import dequantized


def distances(queries: int, keys: int, window: int) -> tuple[Tensor, Tensor]:
    """[queries, keys]: a key's position - a query's, which are the last; and whether the query does not see it."""
    distance = torch.arange(keys) - torch.arange(keys - queries, keys).unsqueeze(-1)
    return distance, (distance > 0) | (distance <= -(window or keys))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, call: PagedCall) -> Tensor:
    """In float64: [queries, H, D] of one sequence with its keys [Hkv, keys, D]; the last query's is the last."""
    slopes = call.alibi_slopes
    (queries, heads, _), keys = q.shape, k.shape[1]
    group = heads // k.shape[0]
    k, v = (x.double().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("qhd,hkd->hqk", q.double(), k) * scale
    if call.softcap:
        scores = call.softcap * (scores / call.softcap).tanh()
    distance, unseen = distances(queries, keys, call.window)
    if slopes is not None:
        scores = scores + slopes.double()[:, None, None] * distance
    scores = scores.masked_fill(unseen, -torch.inf)
    if call.sinks is not None:
        scores = with_sinks(scores, call.sinks)
    return torch.einsum("hqk,hkd->qhd", scores.softmax(-1)[..., :keys], v)


def with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """[..., H, queries, keys] with each head's sink behind its keys."""
    return torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), -1)


def gathered(cache: Tensor, table: Tensor, length: int, first: int = 0) -> Tensor:
    """The keys of a sequence from `first` up to its length, [Hkv, length - first, D]."""
    size = cache.shape[2]
    blocks = table[first // size : -(-length // size)]
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, first % size :][:, : length - first]


def first_seen(length: int, queries: int, window: int) -> int:
    """The first key that any of a sequence's queries sees."""
    return max(length - queries + 1 - window, 0) if window else 0


@dataclass(frozen=True, kw_only=True)
class PagedCall:
    """The arguments of a call of paged_attention or paged_attention_prefill; only the latter has cum_seq_lens_q."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cum_seq_lens_q: Tensor | None = None
    alibi_slopes: Tensor | None = None
    scale: float | None = None
    window: int = 0
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None

    def starts(self) -> list[int]:
        """Where the queries of each sequence begin in q, and where the last ones end."""
        starts = self.cum_seq_lens_q
        return list(range(len(self.seq_lens) + 1)) if starts is None else starts.tolist()

    def caches(self) -> tuple[Tensor, Tensor]:
        """Keys and values as the numbers that they stand for."""
        return dequantized(self.k_cache, self.k_scales), dequantized(self.v_cache, self.v_scales)


def attended(call: PagedCall) -> Tensor:
    """What either op returns, in float64."""
    q = call.q
    scale = max(q.shape[-1], 1) ** -0.5 if call.scale is None else call.scale
    caches = call.caches()
    result = torch.zeros_like(q, dtype=torch.float64)
    starts = call.starts()
    for b, length in enumerate(call.seq_lens.tolist()):
        queries = slice(starts[b], starts[b + 1])
        if length > 0 and q.numel():
            first = first_seen(length, starts[b + 1] - starts[b], call.window)
            k, v = (gathered(cache, call.block_tables[b], length, first) for cache in caches)
            result[queries] = attend(q[queries], k, v, scale, call)
    return result


def attend_in_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: PagedCall) -> Tensor:
    """torch's SDPA of [..., H, queries, D], causal without a mask; with a softcap or sinks written out."""
    if not call.softcap and call.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=call.scale, enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = q @ k.transpose(-1, -2) * scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if call.sinks is not None:
        scores = with_sinks(scores, call.sinks)
    return scores.softmax(-1, dtype=torch.float32)[..., : k.shape[-2]].to(q.dtype) @ v


def decode_in_torch(call: PagedCall) -> Tensor:
    """All sequences gathered to the longest table's length, and torch's SDPA with a mask."""
    q, window, slopes = call.q, call.window, call.alibi_slopes
    caches = (cache.to(q.dtype) for cache in call.caches())
    k, v = (cache[call.block_tables.clamp(min=0)].transpose(1, 2).flatten(2, 3) for cache in caches)
    distance = (torch.arange(k.shape[2]) - call.seq_lens[:, None] + 1)[:, None, None]
    mask = (distance <= 0) & (distance > -(window or k.shape[2]))
    if slopes is not None:
        mask = (slopes[:, None, None] * distance).masked_fill(~mask, -torch.inf).to(q.dtype)
    return attend_in_torch(q.unsqueeze(2), k, v, mask, call).squeeze(2)


def prefill_in_torch(call: PagedCall) -> Tensor:
    """One sequence after the other, gathered, through torch's SDPA."""
    q, window, slopes = call.q, call.window, call.alibi_slopes
    caches = [cache.to(q.dtype) for cache in call.caches()]
    outs = [q[:0]]
    starts = call.starts()
    for b, keys in enumerate(call.seq_lens.tolist()):
        one = q[starts[b] : starts[b + 1]].transpose(0, 1)
        first = first_seen(keys, one.shape[1], window)
        k, v = (gathered(cache, call.block_tables[b], keys, first) for cache in caches)
        distance, unseen = distances(one.shape[1], keys - first, window)
        mask = ~unseen
        if slopes is not None:
            mask = (slopes[:, None, None] * distance).masked_fill(unseen, -torch.inf).to(q.dtype)
        is_causal = slopes is None and one.shape[1] == keys and not 0 < window < keys
        rows = attend_in_torch(one, k, v, None if is_causal else mask, call)
        outs.append(rows.transpose(0, 1))
    return torch.cat(outs)
