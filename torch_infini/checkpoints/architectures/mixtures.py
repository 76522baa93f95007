"""Mixtures of experts whose files name their parts alike.

OLMoE, Hunyuan, dots1, EXAONE, GLM 4.5, MiniMax M2, ERNIE 4.5, AFMoE, LFM2.
"""

from __future__ import annotations

from typing import Any

from ..architecture import EXPERTS, Architecture, Metadata, decoder, experts, rope, shared_experts, with_expert_length
from ..method import NAME
from .others import LFM2_NAMES, lfm2

_BIAS = "exp_probs_b.bias"  # of the scores, for the choice alone


def _olmoe(m: Metadata) -> dict[str, Any]:
    m = with_expert_length(m)
    inner = m.size("expert_feed_forward_length")
    return {**decoder(m, "olmoe"), **experts(m), "intermediate_size": inner, "norm_topk_prob": False}


def _hunyuan(m: Metadata) -> dict[str, Any]:
    m = with_expert_length(m)
    found = {**decoder(m, "hunyuan_v1_moe"), **experts(m), "num_shared_expert": 1}
    found["intermediate_size"] = m.size("expert_feed_forward_length")
    return {**found, "moe_topk": m.size("expert_used_count"), "moe_intermediate_size": found["intermediate_size"]}


def routed(m: Metadata) -> dict[str, Any]:
    """Return the values of mixtures with shared experts and a bias for the choice alone, as DeepSeek V3's."""
    return {
        **experts(m),
        "n_routed_experts": m.size("expert_count"),
        "n_shared_experts": m.size("expert_shared_count"),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "first_k_dense_replace": m.get("leading_dense_block_count", 0),
        "routed_scaling_factor": m.get("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(m.get("expert_weights_norm", False)),
        "n_group": m.get("expert_group_count", 1),
        "topk_group": m.get("expert_group_used_count", 1),
    }


def _dots1(m: Metadata) -> dict[str, Any]:
    return {**decoder(m, "dots1"), **routed(m), "sliding_window": None}


def _exaone_moe(m: Metadata) -> dict[str, Any]:
    """Its windows are in three layers of four, in which alone positions turn q and k."""
    types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(m.layers)]
    more = {"num_shared_experts": m.size("expert_shared_count"), "sliding_window": m["attention.sliding_window"]}
    dense = m.get("leading_dense_block_count", 0)
    kinds = ["dense" if i < dense else "sparse" for i in range(m.layers)]
    return {**decoder(m, "exaone_moe"), **routed(m), **more, "layer_types": types, "mlp_layer_types": kinds}


def _glm4moe(m: Metadata) -> dict[str, Any]:
    more = {"use_qk_norm": "blk.0.attn_q_norm.weight" in m, "rope_parameters": rope(m, partial=True)}
    return {**decoder(m, "glm4_moe"), **routed(m), **more}


def _minimax_m2(m: Metadata) -> dict[str, Any]:
    more = {"intermediate_size": m.size("expert_feed_forward_length"), "rope_parameters": rope(m, partial=True)}
    return {**decoder(with_expert_length(m), "minimax_m2"), **experts(m), **more}


def _ernie4_5_moe(m: Metadata) -> dict[str, Any]:
    return {
        **decoder(m, "ernie4_5_moe"),
        "use_bias": "blk.0.attn_q.bias" in m,
        "moe_num_experts": m.size("expert_count"),
        "moe_k": m.size("expert_used_count"),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "moe_num_shared_experts": m.get("expert_shared_count", 0),
        "moe_layer_start_index": m.get("leading_dense_block_count", 0),
        "moe_layer_interval": m.get("interleave_moe_layer_step", 1),
    }


def _afmoe(m: Metadata) -> dict[str, Any]:
    if not m.get("expert_weights_norm", True):
        raise NotImplementedError(f"{NAME}: an afmoe in {m.path} must have expert_weights_norm, got False")
    return {
        **decoder(m, "afmoe"),
        "num_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "num_shared_experts": m.get("expert_shared_count", 0),
        "num_dense_layers": m.get("leading_dense_block_count", 0),
        "route_scale": m.get("expert_weights_scale", 1.0),
        "sliding_window": m["attention.sliding_window"],
        "global_attn_every_n_layers": 4,
        "mup_enabled": True,
    }


def _lfm2moe(m: Metadata) -> dict[str, Any]:
    return {
        **lfm2(m, "lfm2_moe"),
        **experts(m),
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "num_dense_layers": m.get("leading_dense_block_count", 0),
        "use_expert_bias": any(name.endswith(_BIAS) for name in m.infos),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_HUNYUAN_NAMES = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
    "ffn_gate_inp": "mlp.gate.wg",
    **shared_experts("mlp.shared_mlp"),
}
ROUTED_NAMES = {_BIAS: "mlp.gate.e_score_correction_bias", **_ROUTER, **shared_experts("mlp.shared_experts")}
_GLM4MOE_NAMES = {**ROUTED_NAMES, "post_attention_norm": "post_attention_layernorm"}
_MINIMAX_NAMES = {**_ROUTER, _BIAS: "mlp.e_score_correction_bias"}
_ERNIE_NAMES = {**ROUTED_NAMES, _BIAS: "mlp.gate.moe_statics.e_score_correction_bias"}
_AFMOE_NAMES = {
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
    _BIAS: "mlp.expert_bias",
    **shared_experts("mlp.shared_experts"),
}
_LFM2MOE_NAMES = {**LFM2_NAMES, _BIAS: "feed_forward.expert_bias", "ffn_gate_inp": "feed_forward.gate"}
_LFM2MOE_PARTS = {name.replace("mlp.", "feed_forward."): parts for name, parts in EXPERTS.items()}

ARCHITECTURES = (
    Architecture("olmoe", _olmoe, _ROUTER, parts=EXPERTS),
    Architecture("hunyuan-moe", _hunyuan, _HUNYUAN_NAMES, parts=EXPERTS),
    Architecture("dots1", _dots1, ROUTED_NAMES, parts=EXPERTS),
    Architecture("exaone-moe", _exaone_moe, ROUTED_NAMES, parts=EXPERTS),
    Architecture("glm4moe", _glm4moe, _GLM4MOE_NAMES, parts=EXPERTS),
    Architecture("ernie4_5-moe", _ernie4_5_moe, _ERNIE_NAMES, parts=EXPERTS, added={"e_score_correction_bias": 0}),
    Architecture("afmoe", _afmoe, _AFMOE_NAMES, parts=EXPERTS),
    Architecture("minimax-m2", _minimax_m2, _MINIMAX_NAMES, parts=EXPERTS),
    Architecture("lfm2moe", _lfm2moe, _LFM2MOE_NAMES, parts=_LFM2MOE_PARTS, added={"conv.conv.weight": 1}),
)
