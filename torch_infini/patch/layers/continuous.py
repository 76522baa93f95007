"""Attention of transformers' continuous batching (generate_batch) for patched models on the CPU, sequence by sequence.

transformers 5.23 accepts "paged|eager", "sdpa" and every name that contains "flash", for which it builds no mask and
passes the lengths of the sequences (ContinuousBatchingManager.switch_to_cb_friendly_attn). Its cache comes with them;
since 5.24 the attention module has updated it before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

CONTINUOUS_NAME = "infini_flash"


def continuous_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers for CONTINUOUS_NAME: new tokens of several sequences, concatenated.

    Args:
        module: The attention module, whose layer_idx names the layer of the cache.
        query: [1, H, tokens, D].
        key, value: [1, Hkv, tokens, D], which the cache takes; without a cache, what it returned.
        attention_mask: None.
        dropout: Of training, without effect.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        sliding_window: How many keys a query sees, its own included; None: all.
        softcap: The cap of the scores; None: none.
        s_aux: [H], attention sinks; None: none.
        cache: transformers' PagedAttentionCache, if it is to be updated.
        kwargs: cu_seq_lens_q and cu_seq_lens_k, and what the cache reads.

    Returns:
        [1, tokens, H, D], zeros in rows of no sequence; and None.

    Raises:
        RuntimeError: Outside of continuous batching.
    """
    lengths = [kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if any(x is None for x in lengths) or attention_mask is not None:
        raise RuntimeError(
            f"torch_infini: attn_implementation {CONTINUOUS_NAME!r} must be used by generate_batch alone, got a call "
            "without its cache (use 'infini')"
        )
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    columns = v.shape[-1]
    if columns < q.shape[-1]:
        v = nn.functional.pad(v, (0, q.shape[-1] - columns))
    y = q.new_zeros(q.shape)
    sinks = None if s_aux is None else s_aux.to(q.dtype)
    q_ends, k_ends = (kwargs[name].tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    scale = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    for begin, end, first, last in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False):
        if end > begin:
            mask = window_mask(end - begin, last - first, sliding_window)
            part = q[:, begin:end], k[:, first:last], v[:, first:last]
            terms = mask, None, True, scale, softcap or 0.0, sinks
            y[:, begin:end] = torch.ops.infini.attention.default(*part, *terms)
    return y[..., :columns], None


def window_mask(queries: int, keys: int, window: int | None) -> Tensor | None:
    """Return which keys the last `queries` of `keys` tokens see in a window, [1, 1, queries, keys]; None: all."""
    if window is None or keys <= window:
        return None
    positions = torch.arange(keys)
    return (positions > positions[keys - queries :, None] - window)[None, None]


def continuous_name(model: PreTrainedModel, otherwise: str) -> str:
    """Return CONTINUOUS_NAME if transformers takes it and the function above serves the model, or else `otherwise`."""
    try:
        from transformers.utils.generic import is_flash_attention_requested
    except ImportError:  # of another release
        return otherwise
    accepted = is_flash_attention_requested(requested_attention_implementation=CONTINUOUS_NAME)
    # Reading the lengths would wait for a GPU at every layer.
    return CONTINUOUS_NAME if accepted and model.device.type == "cpu" else otherwise
