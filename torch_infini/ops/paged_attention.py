"""paged_attention, paged_attention_prefill: attention over a paged cache, with one or several queries per sequence.

The rules are in csrc/infiniop/paged_attention; the kernel is that of attention.
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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from one query of each sequence to all its keys, which are stored in the blocks of a paged cache.

    out = softmax(scale * q k^T + alibi) v for each head, in float32 with one rounding at the end: decode. A sequence
    without keys gets zeros. Key t of a sequence is row t % block of the block that its table holds at t // block. With
    a window only the newest keys are visible; earlier ones are not read, and their blocks may be freed. int8 caches
    mean cache * scales, as paged_caching writes them: they are read without conversion, and a key's scales multiply its
    score and its probability. For bfloat16 q they may be multiplied as integers: elements of q are rounded to 2^-23 of
    the largest in their row, and probabilities, with the values' scales, to 2^-23 of the largest among 128 keys, which
    changes a result by at most 2^-16 of the largest value. On CUDA only the GPU reads lengths and tables: a length out
    of range, or a block outside the cache, makes the rows that depend on it NaN and does not raise.

    Args:
        q: [n, H, D], a query for each of n sequences, float32, bfloat16 or float16; D at most 1024; stride 1 in the
            last dimension, any other strides.
        k_cache: [blocks, Hkv, block, D] of q's dtype or int8, strides as for q; H is a multiple of Hkv, and query head
            h uses key head h // (H // Hkv).
        v_cache: The shape and dtype of k_cache.
        block_tables: [n, m] int64 or int32: the blocks of each sequence in order. Entries beyond its length, and
            entries of blocks whose keys no query sees any more, are never read.
        seq_lens: [n] int64 or int32, 0 to m * block: the number of keys of each sequence, including the newest.
        alibi_slopes: [H] float32: slope * (key's position - query's position) is added to the scores.
        scale: Factor of the scores, finite in float32; None: 1 / sqrt(D).
        window: The most keys that a query sees: its own and those just before; 0: no limit.
        k_scales: [blocks, Hkv, block] float32, any strides: the factors of the rows of k_cache. Given if and only if
            the caches are int8, as v_scales.
        v_scales: The shape and dtype of k_scales.
        out: Written and returned instead of a new tensor; may be q itself.

    Returns:
        [n, H, D], contiguous, of q's dtype.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, stride, length, scale or window, or a block outside the
            cache.

    Equivalent to:
        >>>  # >>> # For int8 caches first: k_cache = (k_cache * k_scales[..., None]).to(q.dtype), and likewise v_cache.
        >>> k, v = (cache[block_tables.clamp(min=0)].transpose(1, 2).flatten(2, 3) for cache in (k_cache, v_cache))
        >>> behind = seq_lens[:, None] - torch.arange(k.shape[2])  # without alibi_slopes
        >>> mask = ((behind > 0) & (behind <= (window or k.shape[2])))[:, None, None]
        >>> y = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, mask, enable_gqa=True).squeeze(2)

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023,
        arXiv:2309.06180; Press et al., Train Short, Test Long, 2021, arXiv:2108.12409, for ALiBi.
    """
    args = (q, k_cache, v_cache, block_tables, seq_lens, alibi_slopes, scale, window, k_scales, v_scales)
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
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend causally from the queries of several sequences, concatenated in q, to keys in a paged cache.

    As paged_attention, with any number of queries per sequence: they are its last tokens, whose keys are in the cache
    already, and none sees keys after its own. With a window, the query at position p sees the keys from p - window + 1
    to p. Also serves chunked prefill and batches of prefill and decode. On CUDA only the GPU reads cum_seq_lens_q too:
    if it breaks its rules, all rows become NaN; if a sequence has fewer keys than queries, its rows do.

    Args:
        q: [tokens, H, D], the queries of all sequences; otherwise as in paged_attention.
        k_cache: [blocks, Hkv, block, D], as in paged_attention.
        v_cache: The shape and dtype of k_cache.
        block_tables: [n, m] int64 or int32: the blocks of each sequence in order. Entries beyond its length, and
            entries of blocks whose keys no query sees any more, are never read.
        seq_lens: [n] int64 or int32: the number of keys of each sequence, including those of its queries.
        cum_seq_lens_q: [n + 1] int64 or int32, from 0 to tokens: sequence b has the queries from cum_seq_lens_q[b] to
            cum_seq_lens_q[b + 1]; there may be none.
        alibi_slopes: [H] float32: slope * (key's position - query's position) is added to the scores.
        scale: Factor of the scores, finite in float32; None: 1 / sqrt(D).
        window: The most keys that a query sees: its own and those just before; 0: no limit.
        k_scales: [blocks, Hkv, block] float32, any strides: the factors of the rows of k_cache. Given if and only if
            the caches are int8, as v_scales.
        v_scales: The shape and dtype of k_scales.
        out: Written and returned instead of a new tensor; may be q itself.

    Returns:
        [tokens, H, D], contiguous, of q's dtype.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, stride, length, scale or window, a block outside the cache,
            or more queries than keys in a sequence.

    Equivalent to:
        >>> outs = []  # >>> outs = []  # int8 caches first as in paged_attention
        >>> for b, keys in enumerate(seq_lens.tolist()):  # without alibi_slopes
        >>>     one = q[cum_seq_lens_q[b] : cum_seq_lens_q[b + 1]].transpose(0, 1)
        >>>     blocks = block_tables[b, : -(-keys // k_cache.shape[2])].clamp(min=0)
        >>>     k, v = (cache[blocks].transpose(0, 1).flatten(1, 2)[:, :keys] for cache in (k_cache, v_cache))
        >>>     visible = torch.ones(one.shape[1], keys, dtype=torch.bool).tril(keys - one.shape[1])
        >>>     visible = visible.triu(keys - one.shape[1] - (window or keys) + 1)
        >>>     outs.append(F.scaled_dot_product_attention(one, k, v, visible, enable_gqa=True).transpose(0, 1))
        >>> y = torch.cat(outs)

    Source: see paged_attention.
    """
    paged = (q, k_cache, v_cache, block_tables, seq_lens)
    args = (*paged, cum_seq_lens_q, alibi_slopes, scale, window, k_scales, v_scales)
    op = torch.ops.infini.paged_attention_prefill
    return op.default(*args) if out is None else op.out(*args, out=out)


SPECS = (
    OpSpec(paged_attention, fake=like_first),
    OpSpec(paged_attention_prefill, fake=like_first),
)
