"""gpt-oss: experts in MXFP4, whose gate and up alternate in transformers and are apart in files; sinks of attention."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture, Metadata, decoder, experts, rope, with_expert_length


def _gpt_oss(m: Metadata) -> dict[str, Any]:
    m = with_expert_length(m)
    config = {**decoder(m, "gpt_oss"), **experts(m), "sliding_window": m["attention.sliding_window"]}
    config["intermediate_size"] = m.size("expert_feed_forward_length")
    config["rope_parameters"] = rope(m)
    if config["rope_parameters"]["rope_type"] == "yarn":
        config["rope_parameters"]["truncate"] = False
    return config


_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
}
_PARTS = {
    "mlp.experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "mlp.experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "mlp.experts.down_proj": ("ffn_down_exps.weight",),
    "mlp.experts.down_proj_bias": ("ffn_down_exps.bias",),
}

ARCHITECTURES = (
    Architecture("gpt-oss", _gpt_oss, _NAMES, parts=_PARTS, interleaved_parts=True, transposed_experts=True),
)
