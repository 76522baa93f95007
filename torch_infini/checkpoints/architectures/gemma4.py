"""Gemma 4 (the text models): heads of two sizes, inputs for each layer, shared keys and values, experts beside an MLP.

Unlike those of Gemma 1 to 3, the weights of norms are in files as they are in the model.
"""

from __future__ import annotations

from typing import Any

from ..architecture import (
    EXPERTS,
    FREQUENCIES,
    PER_LAYER_NAMES,
    SANDWICH_NAMES,
    Architecture,
    Metadata,
    by_layer,
    decoder,
    experts,
    present,
    shared_kv_layers,
)
from ..method import NAME

_KINDS = ("full_attention", "sliding_attention")


def _rotated_share(m: Metadata) -> float:
    """Return the share of a head that full layers rotate: the others' frequencies are divided by 1e30."""
    if FREQUENCIES not in m:
        return 1.0
    return float((m.values(FREQUENCIES) == 1).double().mean())


def _gemma4(m: Metadata) -> dict[str, Any]:
    is_sliding = [bool(one) for one in by_layer(m, "attention.sliding_window_pattern", False)]
    heads, inner = by_layer(m, "attention.head_count_kv"), by_layer(m, "feed_forward_length")
    shared = shared_kv_layers(m)
    own = range(m.layers - shared)  # the layers with keys and values of their own
    full = [i for i in own if not is_sliding[i]]
    if not any(is_sliding) or all(is_sliding):
        raise ValueError(f"{NAME}: a gemma4 in {m.path} must have full and sliding layers, got {is_sliding}")
    of_layers = {"feed_forward_length": inner[0], "attention.head_count_kv": heads[is_sliding.index(True)]}
    fields = {**m.fields, **{f"{m.architecture}.{name}": value for name, value in of_layers.items()}}
    infos = {name: info for name, info in m.infos.items() if name != FREQUENCIES}  # no scaling of Llama 3
    found = decoder(Metadata(m.path, fields, infos), "gemma4_text")
    rotations = {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": float(m.get("rope.freq_base") or 1e6),
            "partial_rotary_factor": _rotated_share(m),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": float(m.get("rope.freq_base_swa") or 1e4)},
    }
    per_layer = m.get("embedding_length_per_layer_input", 0)
    found |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": m.size("attention.key_length_swa"),
        "global_head_dim": m.size("attention.key_length"),
        "num_global_key_value_heads": heads[is_sliding.index(False)],
        "layer_types": [_KINDS[one] for one in is_sliding],
        "sliding_window": m.size("attention.sliding_window"),
        "rope_parameters": rotations,
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in m for i in full),
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": m.rows("per_layer_token_embd.weight" if per_layer else "token_embd.weight"),
        "use_double_wide_mlp": inner[-1] != inner[0],
        "enable_moe_block": bool(m.get("expert_count")),
        **present(m, final_logit_softcapping="final_logit_softcapping"),
    }
    if found["enable_moe_block"]:
        inner_size = m.size("expert_feed_forward_length")
        found |= {**experts(m), "top_k_experts": m.size("expert_used_count"), "moe_intermediate_size": inner_size}
    return found


_NAMES = {
    **SANDWICH_NAMES,
    **PER_LAYER_NAMES,
    "layer_output_scale.weight": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_EXPERTS = {name.removeprefix("mlp."): parts for name, parts in EXPERTS.items()}

ARCHITECTURES = (Architecture("gemma4", _gemma4, _NAMES, parts=_EXPERTS),)
