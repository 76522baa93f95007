"""The attention implementation "infini" of transformers, with the mask function that belongs to it.

Patched attention modules call the kernel directly; they reach this only through a fallback to the original forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from ..checks.conditions import carries_tangents, dense_last, has_kernels
from .continuous import CONTINUOUS_NAME, continuous_attention_forward
from .paged import PAGED_NAME, paged_attention_forward

NAME = "infini"
IMPLEMENTATION = "_attn_implementation_internal"  # attribute of a config of transformers: the attention's name
attention = torch.ops.infini.attention.default


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention over [B, S, H, D], interpreting a missing mask as transformers does.

    The mask function omits the mask where it is plainly causal: S = 1 (all keys are visible), T = S, or the first
    tokens of a static cache, whose buffer is longer than its contents: the keys of this call are its first S.
    Any other mask includes causality. `bias`, broadcastable to [B, H, S, T], joins the scores, as that of relative
    positions in T5. Values that are narrower than keys, as those of multi-head latent attention, get columns of zeros:
    the kernel has one width (a copy of them; SDPA takes 1.1 to 7.8 times as long, docs/patching.md).
    """
    if v.shape[-1] < k.shape[-1]:
        wide = nn.functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
        return attend(q, k, wide, mask, scale, causal, softcap, sinks, bias)[..., : v.shape[-1]]
    sinks = None if sinks is None else sinks.to(q.dtype)
    if mask is not None:
        return attention(q, k, v, joined(mask, bias), None, False, scale, softcap, sinks)
    length = q.shape[1]
    if causal and 1 < length < k.shape[1]:
        k, v = k[:, :length], v[:, :length]
        bias = None if bias is None else bias[..., :length]
    return attention(q, k, v, bias, None, causal, scale, softcap, sinks)


def joined(mask: Tensor, bias: Tensor | None) -> Tensor:
    """Return the mask that adds the bias where the given one lets keys through."""
    if bias is None:
        return mask
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else mask + bias


def attention_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    dropout: float,
    softcap: float,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over [B, H, S, D] in plain torch and return the weights, which the kernel never stores.

    `sinks` [H] are scores that take part in each head's softmax and have no value; `bias` joins the scores.
    """
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    if mask is None and causal and length > 1:
        k, v = k[:, :, :length], v[:, :, :length]
        bias = None if bias is None else bias[..., :length]
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(q.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    weights = nn.functional.dropout(weights, dropout)
    return (weights @ v.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), weights


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function that transformers calls where config._attn_implementation is "infini".

    The kernel has no backward, dropout or autocast. Such calls use SDPA, which takes the same masks, or plain torch
    where the scores have a softcap or sinks (`s_aux`, [H]), which SDPA lacks.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = kwargs.get("softcap") or 0.0
    inputs = (query, key, value, s_aux, position_bias)
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    fallback = wants_grad or kwargs.get("cache") is not None or dropout or not has_kernels(query)
    # SDPA has no forward-mode derivative on the CPU.
    written_out = fallback and (softcap or s_aux is not None)
    if kwargs.get("output_attentions") or written_out or carries_tangents():
        terms = scale, causal, dropout, softcap, s_aux, position_bias
        return attention_with_weights(query, key, value, attention_mask, *terms)
    if fallback:
        kwargs["position_bias"] = position_bias
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=is_causal, **kwargs
        )
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        query, key, value = dense_last(query), dense_last(key), dense_last(value)
    return attend(query, key, value, attention_mask, scale, causal, softcap, s_aux, position_bias), None


def register() -> None:
    """Register "infini" with transformers: both functions, because without the second every mask would be None.

    Also PAGED_NAME, without a mask function: its backend knows which keys a query sees; and CONTINUOUS_NAME, whose
    function has the lengths of the sequences.
    """
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(PAGED_NAME, paged_attention_forward)
    AttentionInterface.register(CONTINUOUS_NAME, continuous_attention_forward)
    AttentionMaskInterface.register(CONTINUOUS_NAME, flash_attention_mask)
