"""Attention over a static cache and over a paged one."""

from __future__ import annotations

from .._arguments import raw, raw_or_none
from ..lib import _infinicore
from ..tensor import Tensor


def attention(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, pos: int, *, out: Tensor | None = None
) -> Tensor:
    """Write k and v to the caches at `pos`, and return the causal attention of q over the caches' tokens.

    Args:
        q: [heads, n, d], n new tokens.
        k, v: [kv_heads, n, d]; heads is a multiple of kv_heads.
        k_cache, v_cache: [kv_heads, length, d], length at least pos + n; written at [:, pos : pos + n].
        pos: The number of tokens already in the caches.
        out: [n, heads, d], like the result.
    """
    function = "infinicore.attention"
    tensors = (
        raw(q, function, "q"),
        raw(k, function, "k"),
        raw(v, function, "v"),
        raw(k_cache, function, "k_cache"),
        raw(v_cache, function, "v_cache"),
    )
    if out is None:
        return Tensor(_infinicore.attention(*tensors, pos))
    _infinicore.attention_(raw(out, function, "out"), *tensors, pos)
    return out


def paged_caching(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write tokens' keys and values to the slots of a paged cache; return (k_cache, v_cache).

    Args:
        k_cache, v_cache: [blocks, kv_heads, block_size, d].
        k, v: [tokens, kv_heads, d].
        slot_mapping: int64 [tokens]; slot s is row s % block_size of block s // block_size.
    """
    function = "infinicore.paged_caching"
    _infinicore.paged_caching_(
        raw(k_cache, function, "k_cache"),
        raw(v_cache, function, "v_cache"),
        raw(k, function, "k"),
        raw(v, function, "v"),
        raw(slot_mapping, function, "slot_mapping"),
    )
    return k_cache, v_cache


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cache_lens: Tensor,
    alibi_slopes: Tensor | None = None,
    scale: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the attention of one token of each sequence over its part of a paged cache (decode).

    Args:
        q: [sequences, heads, d].
        k_cache, v_cache: [blocks, kv_heads, block_size, d].
        block_tables: int64 [sequences, most blocks of a sequence].
        cache_lens: int64 [sequences], tokens in the cache, including the new one.
        alibi_slopes: float32 [heads].
        scale: Factor of the products of queries and keys.
        out: [sequences, heads, d], like the result. The rows of a sequence without tokens are not written; without out,
            they are zeros.
    """
    function = "infinicore.paged_attention"
    tensors = (
        raw(q, function, "q"),
        raw(k_cache, function, "k_cache"),
        raw(v_cache, function, "v_cache"),
        raw(block_tables, function, "block_tables"),
        raw(cache_lens, function, "cache_lens"),
    )
    slopes = raw_or_none(alibi_slopes, function, "alibi_slopes")
    if out is None:
        return Tensor(_infinicore.paged_attention(*tensors, slopes, scale))
    _infinicore.paged_attention_(raw(out, function, "out"), *tensors, slopes, scale)
    return out


def paged_attention_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    history_lens: Tensor,
    cu_seqlens_q: Tensor,
    alibi_slopes: Tensor | None = None,
    scale: float = 1.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the causal attention of several tokens of each sequence over its part of a paged cache.

    Args:
        q: [tokens, heads, d], the sequences' tokens, concatenated.
        k_cache, v_cache: [blocks, kv_heads, block_size, d].
        block_tables: int64 [sequences, most blocks of a sequence].
        history_lens: int64 [sequences], tokens in the cache: despite the name *including* the new ones.
        cu_seqlens_q: int64 [sequences + 1], where each sequence's tokens start in q, and the total number.
        alibi_slopes: float32 [heads].
        scale: Factor of the products of queries and keys.
        out: [tokens, heads, d], like the result.
    """
    function = "infinicore.paged_attention_prefill"
    tensors = (
        raw(q, function, "q"),
        raw(k_cache, function, "k_cache"),
        raw(v_cache, function, "v_cache"),
        raw(block_tables, function, "block_tables"),
        raw(history_lens, function, "history_lens"),
        raw(cu_seqlens_q, function, "cu_seqlens_q"),
    )
    slopes = raw_or_none(alibi_slopes, function, "alibi_slopes")
    if out is None:
        return Tensor(_infinicore.paged_attention_prefill(*tensors, slopes, scale))
    _infinicore.paged_attention_prefill_(raw(out, function, "out"), *tensors, slopes, scale)
    return out
