"""paged_caching: writes the keys and values of new tokens into the blocks of a paged cache.

The kernel is csrc/infiniop/paged_caching.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def paged_caching(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write each token's keys and values into its slot of a paged cache, in place.

    cache[slot // block, h, slot % block] = k[t, h] with slot = slot_mapping[t]. int8 caches store a row as round(row /
    scale), to nearest even, with its own scale max |row| / 127, in float32: 0 for a row of zeros, NaN for a row that
    holds infinity or NaN. A token with a negative slot is skipped; of two tokens with equal slots the last one wins.
    Nothing is written unless all slots are in the cache; on CUDA, where the kernel reads the slots, a token whose slot
    is outside the cache is skipped.

    Args:
        k_cache: [blocks, Hkv, block, D] float32, bfloat16, float16 or int8, written; stride 1 in the last dimension,
            any other strides: a layer's part of a larger tensor is written in place.
        v_cache: The shape and dtype of k_cache, written.
        k: [tokens, Hkv, D] of the cache's dtype, or any of the other three if the cache is int8; stride 1 in the last
            dimension, any other strides. k and v may lie in the caches: then they are copied before anything is
            written.
        v: The shape and dtype of k.
        slot_mapping: [tokens] int64 or int32.
        k_scales: [blocks, Hkv, block] float32, any strides, written: the scales of the rows of k_cache. Given if and
            only if the caches are int8, as v_scales.
        v_scales: The shape and dtype of k_scales, written.

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype or stride, slot_mapping in the caches' memory, scales
            without int8 caches, int8 caches without scales, or, on the CPU, a slot outside the cache.

    Equivalent to:
        >>> written = slot_mapping >= 0  # >>> written = slot_mapping >= 0  # distinct slots
        >>> block, row = slot_mapping[written] // k_cache.shape[2], slot_mapping[written] % k_cache.shape[2]
        >>> k_cache[block, :, row] = k[written]
        >>> v_cache[block, :, row] = v[written]
        >>>  # >>> # For int8 caches instead of the last two lines, and likewise for v:
        >>> k_scales[block, :, row] = scale = k[written].float().abs().amax(-1) / 127
        >>> k_cache[block, :, row] = (k[written] / scale.clamp(min=1e-38)[..., None]).round().to(torch.int8)

    Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, 2023,
        arXiv:2309.06180.
    """
    torch.ops.infini.paged_caching.default(k_cache, v_cache, k, v, slot_mapping, k_scales, v_scales)


SPEC = OpSpec(
    paged_caching,
    schema="(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slot_mapping, "
    "Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None) -> ()",
    fake=nothing,
)
