"""paged_attention, paged_attention_prefill: attention over a paged cache, one query a sequence or several.

The rules are csrc/infiniop/paged_attention; the kernel is that of attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def paged_attention(
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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from one query of each sequence to all its keys, which lie in the blocks of a paged cache.

    out = softmax(scale * q k^T + alibi) v for each head, in float32 with one rounding at the end: decode. With a
    softcap the scores scale * q k^T become softcap * tanh(scale * q k^T / softcap) first. With sinks a key of score x
    has the probability e^x / (e^s + the sum of e^x over the keys), where s is the head's sink. A sequence without keys
    gets zeros. Key t of a sequence is row t % block of the block that its table names at t // block. With a window only
    the newest so many keys are seen; those before are not read, and their blocks may be gone. Caches of int8 stand for
    cache * scales, as paged_caching writes them: they are read as they are, and a key's scales meet its score and its
    probability. For q of bfloat16 they may be multiplied as integers: elements of q are rounded to 2^-23
    of the largest in their row, and probabilities, with the values' scales, to 2^-23 of the largest among 128 keys. So
    the latter change a result by 2^-16 of the largest value at most. On CUDA lengths and tables are only read by the
    GPU: a length out of range, or a block outside the cache, makes the rows that depend on it NaN and raises nothing.

    Args:
        q: [n, H, D], a query for each of n sequences, float32, bfloat16 or float16; D at most 1024; stride 1 in the
            last dimension, any other strides.
        k_cache: [blocks, Hkv, block, D] of q's dtype or int8, strides as for q; H is a multiple of Hkv, and query head
            h reads key head h // (H // Hkv).
        v_cache: The shape and dtype of k_cache.
        block_tables: [n, m] int64 or int32: the blocks of each sequence in order. Entries beyond its length, and of
            blocks whose keys no query sees any more, are never looked at.
        seq_lens: [n] int64 or int32, 0 to m * block: keys of each sequence, the newest included.
        alibi_slopes: [H] float32: slope * (key's position - query's position) joins the scores.
        scale: Factor of the scores, finite in float32; None: 1 / sqrt(D).
        window: How many keys a query sees at most: its own and those just before; 0: no limit.
        k_scales: [blocks, Hkv, block] float32, any strides: what the rows of k_cache are to be multiplied with. Given
            if and only if that is int8, as v_scales.
        v_scales: The shape and dtype of k_scales.
        softcap: Bound that the scores approach by tanh before ALiBi is added, as in Gemma 2; positive and finite in
            float32; 0: none.
        sinks: [H] of q's dtype, any stride: one more score in each head's softmax, without a key and a value, neither
            scaled nor capped, as in gpt-oss. -infinity is no sink; infinity and NaN make the head's results NaN.
        out: Written and returned instead of a new tensor; may be q itself.

    Returns:
        [n, H, D], contiguous, of q's dtype.

    Raises:
        RuntimeError: For a rank, shape, dtype, stride, length, scale, window or softcap that cannot be served, or a
            block outside the cache.

    Equivalent to:
        >>> # Caches of int8 first: k_cache = (k_cache * k_scales[..., None]).to(q.dtype), and so v_cache.
        >>> k, v = (cache[block_tables.clamp(min=0)].transpose(1, 2).flatten(2, 3) for cache in (k_cache, v_cache))
        >>> behind = seq_lens[:, None] - torch.arange(k.shape[2])  # without alibi_slopes, softcap, sinks
        >>> mask = ((behind > 0) & (behind <= (window or k.shape[2])))[:, None, None]
        >>> y = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, mask, enable_gqa=True).squeeze(2)

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023,
        arXiv:2309.06180; Press et al., Train Short, Test Long, 2021, arXiv:2108.12409, for ALiBi; Xiao et
        al., Efficient Streaming Language Models with Attention Sinks, 2023, arXiv:2309.17453, and OpenAI, gpt-oss-120b
        & gpt-oss-20b Model Card, 2025, arXiv:2508.10925, for sinks.
    """
    paged = (q, k_cache, v_cache, block_tables, seq_lens)
    args = (*paged, alibi_slopes, scale, window, k_scales, v_scales, softcap, sinks)
    op = torch.ops.infini.paged_attention
    return op.default(*args) if out is None else op.out(*args, out=out)


def paged_attention_prefill(
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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend causally from the queries of several sequences, one behind the other in q, to keys in a paged cache.

    As paged_attention, with any number of queries a sequence: they are its last tokens, whose keys are in the cache
    already, and none sees the keys behind its own. With a window, the query at position p sees the keys from
    p - window + 1 to p. Also serves prefill in chunks and batches of prefill and decode. On CUDA cum_seq_lens_q, too,
    is only read by the GPU: where it breaks its rules all rows become NaN; where a sequence has fewer keys than
    queries, its own do.

    Args:
        q: [tokens, H, D], the queries of all sequences; otherwise as in paged_attention.
        k_cache: [blocks, Hkv, block, D], as in paged_attention.
        v_cache: The shape and dtype of k_cache.
        block_tables: [n, m] int64 or int32: the blocks of each sequence in order. Entries beyond its length, and of
            blocks whose keys no query sees any more, are never looked at.
        seq_lens: [n] int64 or int32: keys of each sequence, those of its queries included.
        cum_seq_lens_q: [n + 1] int64 or int32, from 0 to tokens: sequence b has the queries from cum_seq_lens_q[b] to
            cum_seq_lens_q[b + 1]; there may be none.
        alibi_slopes: [H] float32: slope * (key's position - query's position) joins the scores.
        scale: Factor of the scores, finite in float32; None: 1 / sqrt(D).
        window: How many keys a query sees at most: its own and those just before; 0: no limit.
        k_scales: [blocks, Hkv, block] float32, any strides: what the rows of k_cache are to be multiplied with. Given
            if and only if that is int8, as v_scales.
        v_scales: The shape and dtype of k_scales.
        softcap: Bound that the scores approach by tanh before ALiBi is added, as in Gemma 2; positive and finite in
            float32; 0: none.
        sinks: [H] of q's dtype, any stride: one more score in each head's softmax, without a key and a value, neither
            scaled nor capped, as in gpt-oss. -infinity is no sink; infinity and NaN make the head's results NaN.
        out: Written and returned instead of a new tensor; may be q itself.

    Returns:
        [tokens, H, D], contiguous, of q's dtype.

    Raises:
        RuntimeError: For a rank, shape, dtype, stride, length, scale, window or softcap that cannot be served, a
            block outside the cache, or more queries than keys in a sequence.

    Equivalent to:
        >>> outs = []  # caches of int8 first as in paged_attention
        >>> for b, keys in enumerate(seq_lens.tolist()):  # without alibi_slopes, softcap, sinks
        >>>     one = q[cum_seq_lens_q[b] : cum_seq_lens_q[b + 1]].transpose(0, 1)
        >>>     blocks = block_tables[b, : -(-keys // k_cache.shape[2])].clamp(min=0)
        >>>     k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :keys] for cache in (k_cache, v_cache))
        >>>     visible = torch.ones(one.shape[1], keys, dtype=torch.bool).tril(keys - one.shape[1])
        >>>     visible = visible.triu(keys - one.shape[1] - (window or keys) + 1)
        >>>     outs.append(F.scaled_dot_product_attention(one, k, v, visible, enable_gqa=True).transpose(0, 1))
        >>> y = torch.cat(outs)

    Source: As paged_attention.
    """
    paged = (q, k_cache, v_cache, block_tables, seq_lens)
    args = (*paged, cum_seq_lens_q, alibi_slopes, scale, window, k_scales, v_scales, softcap, sinks)
    op = torch.ops.infini.paged_attention_prefill
    return op.default(*args) if out is None else op.out(*args, out=out)


SPECS = (
    OpSpec(paged_attention, fake=like_first),
    OpSpec(paged_attention_prefill, fake=like_first),
)
