"""attention: scaled dot-product attention with grouped heads, over fresh keys or a static cache.

The kernel is csrc/infiniop/attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each query to its visible keys and average their values.

    out = softmax(scale * q k^T + mask) v for each head, in float32 with one rounding at the end; with a soft cap the
    scores scale * q k^T first become softcap * tanh(scale * q k^T / softcap). With sinks a key of score x has the
    probability e^x / (e^s + the sum of e^x over the keys), where s is the head's sink. If a sequence has L keys (T, or
    its kv_lens), a causal query t of S sees the keys j <= L - S + t: the queries are the last S tokens of the sequence.
    A query that sees no key gets zeros. On CUDA only the GPU reads kv_lens: a length out of range makes the sequence's
    rows NaN and does not raise.

    Args:
        q: [B, S, H, D] float32, bfloat16 or float16; stride 1 in the last dimension, any other strides.
        k: [B, T, Hkv, D], strides as for q; H is a multiple of Hkv, and query head h uses key head h // (H // Hkv).
        v: [B, T, Hkv, D].
        mask: Broadcastable to [B, H, S, T], with 4 dimensions: bool, where True is visible, or float32 or q's dtype,
            added to the scores. Applied in addition to `causal`. Any strides.
        kv_lens: [B] int64 or int32, 0 to T: the number of valid keys in a static cache. Later keys are never read.
        causal: Whether a query sees only the keys up to its own position.
        scale: Factor of the scores, finite in float32; None: 1 / sqrt(D).
        softcap: The bound of the scores, applied by tanh before the mask is added, as in Gemma 2; positive and finite
            in float32; 0: none.
        sinks: [H] of q's dtype, any stride: one more score in each head's softmax, without a key and a value, neither
            scaled nor capped, as in gpt-oss. -infinity is no sink; infinity and NaN make the head's results NaN.
        out: Written and returned instead of a new tensor; may be q itself.

    Returns:
        [B, S, H, D], contiguous, of q's dtype.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, stride, length, scale, softcap or sinks.

    Equivalent to:
        >>> S, T = q.shape[1], k.shape[1]
        >>> visible = torch.ones(S, T, dtype=torch.bool).tril(T - S)  # causal, without mask, kv_lens, sinks
        >>> q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        >>> y = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).transpose(1, 2)

    Source: Dao et al., FlashAttention, 2022, arXiv:2205.14135; Milakov and Gimelshein, Online normalizer calculation
        for softmax, 2018, arXiv:1805.02867; Gemma Team, Gemma 2, 2024, arXiv:2408.00118 (the soft cap); Xiao et al.,
        Efficient Streaming Language Models with Attention Sinks, 2023, arXiv:2309.17453, and OpenAI, gpt-oss-120b &
        gpt-oss-20b Model Card, 2025, arXiv:2508.10925 (sinks).
    """
    if out is None:
        return torch.ops.infini.attention.default(q, k, v, mask, kv_lens, causal, scale, softcap, sinks)
    return torch.ops.infini.attention.out(q, k, v, mask, kv_lens, causal, scale, softcap, sinks, out=out)


SPEC = OpSpec(attention, fake=like_first)
