"""qkv_rope_cache: from a layer's fused q/k/v product to rotated queries and a written cache, in one pass.

The kernel is csrc/infiniop/qkv_rope_cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def qkv_rope_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Split a layer's fused product: rotate q into a separate tensor, rotate k and write k and v into the cache.

    The bits are those of rope on the heads of q and k followed by paged_caching, also for int8 caches; qkv is read
    once, without intermediate tensors. The numbers of heads are those of q and of the caches. All results are written
    in place, so that a compiler plans q's memory too and need not clone anything.

    Args:
        q: [tokens, H, D] of qkv's dtype, written; stride 1 in the last dimension, any other strides.
        k_cache: [blocks, Hkv, block, D] of qkv's dtype or int8, written; stride 1 in the last dimension, any other
            strides.
        v_cache: The shape and dtype of k_cache, written.
        qkv: [tokens, (H + 2 Hkv) * D] float32, bfloat16 or float16: the heads of q, then those of k, then those of v;
            stride 1 in the last dimension, any row stride.
        cos: Table [P, R/2] of qkv's dtype, or float32 if that is a half type; a head's other D - R columns are not
            rotated.
        sin: The shape and dtype of cos.
        positions: [tokens] integers: the row of cos and sin for each token.
        slot_mapping: [tokens] int64 or int32: where k and v are written, as in paged_caching; negative: nowhere (q is
            still written).
        interleaved: Which columns form a pair, as in rope.
        k_scales: [blocks, Hkv, block] float32, written: the scales of the rows of k_cache as in paged_caching. Given if
            and only if the caches are int8, as v_scales.
        v_scales: The shape and dtype of k_scales, written.

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, arguments that share memory with one that is
            written, or, on the CPU, a position outside the tables or a slot outside the cache. On CUDA, where the
            kernel reads these, such a position gives NaN as in rope, and such a slot is skipped.

    Equivalent to:
        >>> (tokens, heads, size), kv_heads = q.shape, k_cache.shape[1]
        >>> new_q, k, v = qkv.view(tokens, -1, size).split([heads, kv_heads, kv_heads], 1)
        >>> q.copy_(torch_infini.ops.rope(new_q, cos, sin, positions))
        >>> k = torch_infini.ops.rope(k, cos, sin, positions)
        >>> torch_infini.ops.paged_caching(k_cache, v_cache, k, v, slot_mapping, k_scales, v_scales)

    Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021, arXiv:2104.09864; Kwon et
        al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023, arXiv:2309.06180.
    """
    torch.ops.infini.qkv_rope_cache.default(
        q, k_cache, v_cache, qkv, cos, sin, positions, slot_mapping, interleaved, k_scales, v_scales
    )


SPEC = OpSpec(
    qkv_rope_cache,
    schema="(Tensor(a!) q, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor qkv, Tensor cos, Tensor sin, "
    "Tensor positions, Tensor slot_mapping, bool interleaved=False, Tensor(d!)? k_scales=None, "
    "Tensor(e!)? v_scales=None) -> ()",
    fake=nothing,
)
