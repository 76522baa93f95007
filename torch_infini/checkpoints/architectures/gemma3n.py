"""Gemma 3n (the text model): AltUp, LAuReL, inputs for each layer, shared keys and values, sparse activations.

Unlike those of Gemma 1 to 3, the weights of norms are in files as they are in the model.
"""

from __future__ import annotations

import math
from typing import Any

from ..architecture import (
    PER_LAYER_NAMES,
    SANDWICH_NAMES,
    Architecture,
    Metadata,
    by_layer,
    decoder,
    present,
    shared_kv_layers,
)
from ..method import NAME


def _sparsity(m: Metadata) -> list[float]:
    """Return the share of an MLP's columns that each layer sets to zero, of how many deviations are cut off."""
    scales = by_layer(m, "activation_sparsity_scale", -math.inf)
    if not all(isinstance(scale, float) and not math.isnan(scale) for scale in scales):
        raise ValueError(f"{NAME}: gemma3n.activation_sparsity_scale in {m.path} must be numbers, got {scales}")
    # The model computes the deviations again, of a float32.
    return [round(0.5 * (1 + math.erf(scale / 2**0.5)), 6) for scale in scales]


def _gemma3n(m: Metadata) -> dict[str, Any]:
    is_sliding = by_layer(m, "attention.sliding_window_pattern")
    if not all(isinstance(one, bool) for one in is_sliding):
        raise ValueError(
            f"{NAME}: gemma3n.attention.sliding_window_pattern in {m.path} must say of each layer whether it has a "
            f"window, got {is_sliding}"
        )
    inner = by_layer(m, "feed_forward_length")
    fields = {**m.fields, "gemma3n.feed_forward_length": inner[0]}
    found = decoder(Metadata(m.path, fields, m.infos), "gemma3n_text")
    inputs, active = m.size("altup.num_inputs"), m["altup.active_idx"]
    if not isinstance(active, int) or not 0 <= active < inputs:
        raise ValueError(
            f"{NAME}: gemma3n.altup.active_idx in {m.path} must be a number below that of inputs, {inputs}, "
            f"got {active!r}"
        )
    full = found.pop("rope_parameters")
    return {
        **found,
        "intermediate_size": inner,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention" if one else "full_attention" for one in is_sliding],
        "sliding_window": m.size("attention.sliding_window"),
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": float(m.get("rope.freq_base_swa") or 1e4)},
        },
        "num_kv_shared_layers": shared_kv_layers(m),
        "hidden_size_per_layer_input": m.size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": m.rows("per_layer_token_embd.weight"),
        "altup_num_inputs": inputs,
        "altup_active_idx": active,
        "laurel_rank": m.rows("blk.0.laurel_l.weight"),
        "activation_sparsity_pattern": _sparsity(m),
        **present(m, final_logit_softcapping="final_logit_softcapping"),  # without it, that of all models
    }


_NAMES = {
    **SANDWICH_NAMES,
    **PER_LAYER_NAMES,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_STACKED = {
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}

ARCHITECTURES = (Architecture("gemma3n", _gemma3n, _NAMES, stacked=_STACKED),)
