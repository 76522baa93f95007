"""Writes GGUF files of each architecture from small random models, as llama.cpp's converter does: by the package's own
names of tensors and fields.

Nothing here calls torch_infini.checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from support import gguf_conversions as conversions
from support.checkpoint_writers import gguf_blocks
from torch_infini.testing.causal_types import MORE, shrunk
from torch_infini.testing.new_model import draw_weights

# Matrices that files have in full precision.
UNQUANTIZED = (
    *("_bias", "gate.weight", "gate.wg.weight", "router.weight", "router.proj.weight", "conv.conv.weight"),
    *(".A_log", ".D", "conv1d.weight", "mamba.norm.weight", "mixer.norm.weight"),
    *("in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight"),
    *("_coefs.weight", "modality_router.weight"),
    *("per_layer_input_gate.weight", "per_layer_projection.weight", "per_layer_model_projection.weight"),
)


class Case(NamedTuple):
    """An architecture.

    Attributes:
        kind: The model_type of transformers.
        fields: Fields beside those of all decoders, from the config, by name without the architecture.
        changes: Entries of the model's config.
        conversion: What becomes of tensors whose names, rows or values the file has otherwise.
        behind: Blocks behind the layers, which predict further tokens.
        of_model: Fields that are computed of the model, by their whole names.
    """

    kind: str
    fields: Callable[[Any], dict[str, Any]] = lambda c: {}
    changes: dict[str, Any] = {}
    conversion: conversions.Conversion = lambda key, tensor, config: None
    behind: int = 0
    of_model: Callable[[Any], dict[str, list[float]]] = lambda model: {}


def _window(c: Any) -> dict[str, Any]:
    return {"attention.sliding_window": c.sliding_window}


def _experts(c: Any) -> dict[str, Any]:
    inner = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
    return {
        "expert_count": getattr(c, "num_experts", None) or c.num_local_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": inner,
    }


def _yarn(c: Any) -> dict[str, Any]:
    rope = c.rope_parameters
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


def _partial(c: Any) -> dict[str, Any]:
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return {"rope.dimension_count": int(head * c.rope_parameters["partial_rotary_factor"])}


def _caps(c: Any) -> dict[str, Any]:
    return _window(c) | {
        "attn_logit_softcapping": c.attn_logit_softcapping,
        "final_logit_softcapping": c.final_logit_softcapping,
    }


_MAMBA = {"mamba_dt_rank": 32, "mamba_d_state": 16}
_TIED = {"tie_word_embeddings": True}
_CAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}
_YARN = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + 0.5 * i for i in range(4)],
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64,
}
_SCALES = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}


def _routed_sizes(c: Any) -> dict[str, Any]:
    return _experts(c) | {
        "expert_shared_count": c.n_shared_experts,
        "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_weights_norm": c.norm_topk_prob,
        "expert_gating_func": 2,
    }


def _routed(c: Any) -> dict[str, Any]:
    return _routed_sizes(c) | {"leading_dense_block_count": c.first_k_dense_replace}


def _delta(c: Any) -> dict[str, Any]:
    return _partial(c) | {
        "full_attention_interval": 4,
        "ssm.conv_kernel": c.linear_conv_kernel_dim,
        "ssm.state_size": c.linear_key_head_dim,
        "ssm.group_count": c.linear_num_key_heads,
        "ssm.time_step_rank": c.linear_num_value_heads,
        "ssm.inner_size": c.linear_num_value_heads * c.linear_value_head_dim,
    }


def _shared_expert(c: Any) -> dict[str, Any]:
    return _experts(c) | {"expert_shared_feed_forward_length": c.shared_expert_intermediate_size}


def _latent(c: Any) -> dict[str, Any]:
    return _routed(c) | {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": c.q_lora_rank,
        "attention.kv_lora_rank": c.kv_lora_rank,
        "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim,
        "attention.value_length": c.kv_lora_rank,
        "attention.key_length_mla": c.qk_nope_head_dim + c.qk_rope_head_dim,
        "attention.value_length_mla": c.v_head_dim,
        "rope.dimension_count": c.qk_rope_head_dim,
    }


def _scales(c: Any) -> dict[str, Any]:
    return {
        "attention.scale": c.attention_multiplier,
        "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier,
        "logit_scale": c.logits_scaling,
    }


def _hybrid(c: Any) -> dict[str, Any]:
    found = {
        "attention.head_count_kv": [c.num_key_value_heads * (one == "full_attention") for one in c.layer_types],
        **_scales(c),
        "expert_shared_feed_forward_length": c.shared_intermediate_size,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": c.mamba_d_conv,
        "ssm.state_size": c.mamba_d_state,
        "ssm.group_count": c.mamba_n_groups,
        "ssm.inner_size": c.mamba_n_heads * c.mamba_d_head,
        "ssm.time_step_rank": c.mamba_n_heads,
    }
    return found | (_experts(c) if c.num_local_experts else {})


def _mamba(c: Any) -> dict[str, Any]:
    return {
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.key_length": None,
        "attention.value_length": None,
        "attention.layer_norm_rms_epsilon": c.layer_norm_epsilon,
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.state_size": c.state_size,
        "ssm.inner_size": c.expand * c.hidden_size,
        "ssm.time_step_rank": c.time_step_rank,
    }


def _jamba(c: Any) -> dict[str, Any]:
    return {
        "attention.head_count_kv": [c.num_key_value_heads * (one == "attention") for one in c.layers_block_type],
        "ssm.conv_kernel": c.mamba_d_conv,
        "ssm.state_size": c.mamba_d_state,
        "ssm.inner_size": c.mamba_expand * c.hidden_size,
        "ssm.time_step_rank": c.mamba_dt_rank,
        "expert_count": c.num_experts,
        "expert_used_count": c.num_experts_per_tok,
    }


def _nemotron_h(c: Any) -> dict[str, Any]:
    has_experts = "moe" in c.layers_block_type
    kinds = [*c.layers_block_type, *["full_attention"] * has_experts]  # of the block behind the layers too
    inner = c.moe_intermediate_size if has_experts else c.intermediate_size
    found = {
        "attention.head_count_kv": [c.num_key_value_heads * (one == "full_attention") for one in kinds],
        "feed_forward_length": [inner * (one in ("moe", "mlp")) for one in kinds],
        "attention.layer_norm_epsilon": c.layer_norm_epsilon,
        "attention.layer_norm_rms_epsilon": c.layer_norm_epsilon,
        "ssm.conv_kernel": c.conv_kernel,
        "ssm.state_size": c.ssm_state_size,
        "ssm.group_count": c.n_groups,
        "ssm.inner_size": c.mamba_num_heads * c.mamba_head_dim,
        "ssm.time_step_rank": c.mamba_num_heads,
    }
    if not has_experts:
        return found
    more = {"expert_shared_feed_forward_length": c.moe_shared_expert_intermediate_size}
    return found | _routed_sizes(c) | more


def _deviations(share: float) -> float:
    return float(torch.distributions.normal.Normal(0, 1).icdf(torch.tensor(share, dtype=torch.float32)))


def _gemma4(c: Any) -> dict[str, Any]:
    is_sliding = [one == "sliding_attention" for one in c.layer_types]
    layers, full = len(is_sliding), is_sliding.index(False)
    own = c.per_layer_config[full]
    found = {
        "attention.sliding_window": c.sliding_window,
        "attention.sliding_window_pattern": is_sliding,
        "attention.shared_kv_layers": c.num_kv_shared_layers,
        "attention.key_length": own.head_dim,
        "attention.key_length_swa": c.per_layer_config[1 - full].head_dim,
        "attention.value_length": own.head_dim,
        "attention.value_length_swa": c.per_layer_config[1 - full].head_dim,
        "rope.dimension_count": own.head_dim,
        "rope.dimension_count_swa": c.per_layer_config[1 - full].head_dim,
        "embedding_length_per_layer_input": c.hidden_size_per_layer_input,
        "rope.freq_base_swa": float(c.rope_parameters["sliding_attention"]["rope_theta"]),
        "final_logit_softcapping": c.final_logit_softcapping,
    }
    if c.use_double_wide_mlp:
        first = layers - c.num_kv_shared_layers
        found["feed_forward_length"] = [c.intermediate_size * (1 + (i >= first)) for i in range(layers)]
    found["attention.head_count_kv"] = [c.per_layer_config[i].num_key_value_heads for i in range(layers)]
    if c.enable_moe_block:
        found |= {
            "expert_count": c.num_experts,
            "expert_used_count": c.top_k_experts,
            "expert_feed_forward_length": c.moe_intermediate_size,
        }
    return found


_HEADS = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "head_dim": 32}
_LATENT = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4},
    "qk_head_dim": 40,
}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0}}

CASES: dict[str, Case] = {
    "gemma": Case("gemma", changes=_TIED, conversion=conversions.with_one),
    "gemma2": Case("gemma2", _caps, {"query_pre_attn_scalar": 16, **_CAPS, **_TIED}, conversion=conversions.with_one),
    "gemma3": Case(
        "gemma3_text", _window, {"query_pre_attn_scalar": 16, "num_hidden_layers": 7}, conversion=conversions.with_one
    ),
    "phi3": Case("phi3", lambda c: _partial(c) | _window(c) | {"rope.scaling.original_context_length": 4096}),
    "phi3/long": Case(
        "phi3",
        lambda c: _partial(c) | {"rope.scaling.original_context_length": 64},
        {"rope_parameters": _LONG, "original_max_position_embeddings": 64, "sliding_window": None},
    ),
    "qwen2moe": Case(
        "qwen2_moe",
        lambda c: _experts(c) | {"expert_shared_feed_forward_length": c.shared_expert_intermediate_size},
        {"norm_topk_prob": False},
    ),
    "qwen3moe": Case("qwen3_moe", _experts, {"norm_topk_prob": True, "num_local_experts": 4}),
    "qwen3moe/fused": Case(
        "qwen3_moe", _experts, {"norm_topk_prob": True, "num_local_experts": 4}, conversions.fused_experts
    ),
    "llama": Case("mixtral", _experts, conversion=conversions.neighbours),
    "gpt-oss": Case(
        "gpt_oss",
        lambda c: _experts(c) | _window(c) | _yarn(c),
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": False, **_YARN}},
    ),
    "granite": Case(
        "granite",
        lambda c: {
            **_scales(c),
        },
        _SCALES,
        conversion=conversions.neighbours,
    ),
    "smollm3": Case("smollm3", conversion=conversions.neighbours),
    "mistral3": Case(
        "ministral3",
        lambda c: _yarn(c) | {"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                **_YARN,
            }
        },
        conversion=conversions.neighbours,
    ),
    "granitemoe": Case(
        "granitemoe",
        lambda c: {
            "expert_count": c.num_local_experts,
            "expert_used_count": c.num_experts_per_tok,
            **_scales(c),
        },
        _SCALES,
        conversion=conversions.neighbours,
    ),
    "granitehybrid": Case(
        "granitemoehybrid",
        _hybrid,
        {**MORE["granitemoehybrid"], **_SCALES, "num_experts_per_tok": 2},
        conversions.granite_hybrid,
    ),
    "granitehybrid/dense": Case(
        "granitemoehybrid",
        _hybrid,
        {**MORE["granitemoehybrid"], **_SCALES, "num_local_experts": 0, "num_experts_per_tok": 0, **_TIED},
        conversions.granite_hybrid,
    ),
    "falcon-h1": Case(
        "falcon_h1",
        lambda c: {
            "ssm.conv_kernel": c.mamba_d_conv,
            "ssm.state_size": c.mamba_d_state,
            "ssm.group_count": c.mamba_n_groups,
            "ssm.inner_size": c.mamba_d_ssm,
            "ssm.time_step_rank": c.mamba_n_heads,
        },
        {
            **dict.fromkeys(("lm_head_multiplier", "embedding_multiplier", "key_multiplier"), 1.0),
            **dict.fromkeys(("attention_out_multiplier", "attention_in_multiplier"), 1.0),
            **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
            **{"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5},
            **{"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
        },
        conversions.falcon_h1,
    ),
    "mamba": Case("mamba", _mamba, {"intermediate_size": 128, "time_step_rank": 32}, conversions.jamba),
    "mamba/falcon": Case(
        "falcon_mamba",
        lambda c: _mamba(c) | {"ssm.dt_b_c_rms": True},
        {"intermediate_size": 128, "time_step_rank": 32, "layer_norm_epsilon": 1e-6, **_TIED},
        conversions.jamba,
    ),
    "mamba2": Case(
        "mamba2",
        lambda c: _mamba(c) | {"ssm.time_step_rank": c.num_heads, "ssm.group_count": c.n_groups},
        {**MORE["mamba2"], "n_groups": 2},
        conversions.mamba2,
    ),
    "jamba": Case(
        "jamba",
        _jamba,
        {**MORE["jamba"], **_MAMBA, "expert_layer_period": 4, "num_experts_per_tok": 2},
        conversions.jamba,
    ),
    "jamba/dense": Case(
        "jamba",
        _jamba,
        {**_MAMBA, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1, "num_experts_per_tok": 1, **_TIED},
        conversions.jamba,
    ),
    "nemotron_h": Case(
        "nemotron_h",
        _nemotron_h,
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
            **{"n_groups": 2, "num_experts_per_tok": 2, "n_routed_experts": 8},
            **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), 7688),
        },
        conversions.nemotron_h,
    ),
    "nemotron_h_moe": Case(
        "nemotron_h",
        lambda c: _nemotron_h(c) | {"nextn_predict_layers": 1},
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            **_ROUTED,
            **{"n_groups": 2, "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5},
        },
        conversions.nemotron_h,
        behind=1,
    ),
    "arcee": Case("arcee", conversion=conversions.neighbours),
    "olmoe": Case("olmoe", _experts, {"norm_topk_prob": False}),
    "hunyuan-dense": Case("hunyuan_v1_dense", changes=_PLAIN),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe",
        lambda c: {
            "expert_count": c.num_experts,
            "expert_used_count": c.moe_topk,
            "expert_feed_forward_length": c.intermediate_size,
            "expert_shared_feed_forward_length": c.intermediate_size,
            "expert_shared_count": 1,
        },
        {**_PLAIN, "moe_topk": 2, "num_experts_per_tok": 2},
    ),
    "dots1": Case(
        "dots1",
        _routed,
        {
            **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2},
        },
    ),
    "exaone-moe": Case(
        "exaone_moe",
        lambda c: (
            _experts(c)
            | _window(c)
            | {
                "expert_shared_count": c.num_shared_experts,
                "expert_shared_feed_forward_length": c.moe_intermediate_size * c.num_shared_experts,
                "expert_weights_scale": float(c.routed_scaling_factor),
                "expert_weights_norm": c.norm_topk_prob,
                "expert_gating_func": 2,
                "leading_dense_block_count": c.first_k_dense_replace,
                "rope.scaling.type": "none",
                "nextn_predict_layers": 1,
            }
        ),
        {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]},
        behind=1,
    ),
    "llama4": Case(
        "llama4_text",
        lambda c: (
            _experts(c)
            | {"feed_forward_length": c.intermediate_size_mlp, "expert_feed_forward_length": c.intermediate_size}
            | {"interleave_moe_layer_step": c.interleave_moe_layer_step, "leading_dense_block_count": 0}
        ),
        {
            **{"num_experts_per_tok": 2, "intermediate_size_mlp": 160},
            **{"interleave_moe_layer_step": 2, "moe_layers": [1, 3]},
        },
        conversions.llama4,
    ),
    "lfm2moe": Case(
        "lfm2_moe",
        lambda c: (
            _experts(c)
            | {
                "shortconv.l_cache": c.conv_L_cache,
                "attention.head_count_kv": [2 if one == "full_attention" else 0 for one in c.layer_types],
                "leading_dense_block_count": c.num_dense_layers,
                "expert_gating_func": 2,
            }
        ),
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "num_dense_layers": 1,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
    ),
    "glm4moe": Case(
        "glm4_moe",
        lambda c: _routed(c) | _partial(c) | {"nextn_predict_layers": 1},
        {**_ROUTED, "use_qk_norm": True, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        behind=1,
    ),
    "minimax-m2": Case(
        "minimax_m2",
        lambda c: _experts(c) | _partial(c) | {"expert_gating_func": 2},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}},
        conversions.minimax,
    ),
    "ernie4_5-moe": Case(
        "ernie4_5_moe",
        lambda c: (
            {"expert_count": c.moe_num_experts, "expert_used_count": c.moe_k}
            | {"expert_feed_forward_length": c.moe_intermediate_size, "expert_gating_func": 1}
            | {"expert_shared_count": c.moe_num_shared_experts, "interleave_moe_layer_step": c.moe_layer_interval}
            | {"leading_dense_block_count": c.moe_layer_start_index}
            | {"expert_shared_feed_forward_length": c.moe_intermediate_size * c.moe_num_shared_experts}
        ),
        {"moe_k": 2, "moe_layer_end_index": 3, "use_bias": False, **_TIED},
        conversions.ernie_moe,
    ),
    "afmoe": Case(
        "afmoe",
        lambda c: (
            _experts(c)
            | _window(c)
            | {"expert_shared_count": c.num_shared_experts, "leading_dense_block_count": c.num_dense_layers}
            | {"expert_weights_scale": float(c.route_scale), "expert_weights_norm": True, "expert_gating_func": 2}
        ),
        {"num_experts_per_tok": 2, "num_dense_layers": 1, "route_scale": 2.5, "mup_enabled": True},
        conversions.afmoe,
    ),
    "qwen3vl": Case("qwen3", lambda c: {"rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 3}),
    "minicpm3": Case(
        "minicpm3",
        lambda c: {
            "attention.q_lora_rank": c.q_lora_rank,
            "attention.kv_lora_rank": c.kv_lora_rank,
            "attention.key_length": c.qk_nope_head_dim + c.qk_rope_head_dim,
            "attention.value_length": None,
            "rope.dimension_count": c.qk_rope_head_dim,
        },
        {
            **{"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32},
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "long_factor": [1.0 + 0.5 * i for i in range(4)],
                "short_factor": [1.0 + 0.1 * i for i in range(4)],
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "deepseek2": Case(
        "deepseek_v3",
        lambda c: _latent(c) | _yarn(c) | {"rope.scaling.yarn_log_multiplier": 0.1 * 0.707},
        {
            **_LATENT,
            **_ROUTED,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
                **_YARN,
            },
        },
        conversions.deepseek,
    ),
    "deepseek2/v2": Case(
        "deepseek_v2",
        lambda c: (
            _latent(c)
            | {"attention.key_length": 40, "attention.value_length": 32, "expert_gating_func": 1}
            | {"attention.key_length_mla": None, "attention.value_length_mla": None, "attention.head_count_kv": 4}
        ),
        {**_LATENT, **_ROUTED, "q_lora_rank": None, "topk_method": "greedy"},
    ),
    "qwen35": Case(
        "qwen3_5_text",
        lambda c: _delta(c) | {"rope.dimension_sections": [11, 11, 10, 0]},
        _HEADS,
        conversions.qwen35,
    ),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        lambda c: _delta(c) | _shared_expert(c) | {"rope.dimension_sections": [11, 11, 10, 0]},
        {**_HEADS, "num_experts_per_tok": 2},
        conversions.qwen35,
    ),
    "qwen3next": Case(
        "qwen3_next",
        lambda c: _delta(c) | _shared_expert(c),
        {**_HEADS, "num_experts_per_tok": 2},
        conversions.qwen_next,
    ),
    "gemma3n": Case(
        "gemma3n_text",
        lambda c: (
            _window(c)
            | {
                "attention.sliding_window_pattern": [one == "sliding_attention" for one in c.layer_types],
                "attention.shared_kv_layers": c.num_kv_shared_layers,
                "embedding_length_per_layer_input": c.hidden_size_per_layer_input,
                "altup.active_idx": c.altup_active_idx,
                "altup.num_inputs": c.altup_num_inputs,
                "activation_sparsity_scale": [_deviations(share) for share in c.activation_sparsity_pattern],
                "final_logit_softcapping": c.final_logit_softcapping,
            }
        ),
        {
            **MORE["gemma3n_text"],
            **_TIED,
            "laurel_rank": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        conversions.gemma3n,
    ),
    "gemma4": Case(
        "gemma4_text",
        _gemma4,
        {
            **MORE["gemma4_text"],
            **_TIED,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 15.0,
        },
        conversions.gemma4,
    ),
    "gemma4/experts": Case(
        "gemma4_text",
        _gemma4,
        {**MORE["gemma4"]["text_config"], **_TIED, "global_head_dim": 32, "top_k_experts": 2},
        conversions.gemma4,
    ),
    "nemotron": Case(
        "nemotron",
        lambda c: _partial(c) | {"attention.layer_norm_epsilon": float(c.norm_eps)},
        conversion=conversions.with_one,
    ),
    "apertus": Case(
        "apertus",
        changes={"rope_parameters": {"rope_type": "default", "rope_theta": 12e6}},
        conversion=conversions.apertus,
        of_model=lambda model: {
            f"xielu.{name}": [getattr(layer.mlp.act_fn, name).item() for layer in model.model.layers]
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        },
    ),
    "phi2": Case("phi", _partial),
    "olmo": Case(
        "olmo",
        lambda c: {"attention.clamp_kqv": c.clip_qkv, "attention.layer_norm_epsilon": 1e-5},
        {"clip_qkv": 0.5},
        conversions.neighbours,
    ),
    "jais2": Case("jais2"),
    "ernie4_5": Case("ernie4_5"),
    "olmo2": Case("olmo2"),
    "olmo2/windows": Case("olmo3", _window),
    "exaone": Case("exaone"),
    "exaone4": Case("exaone4", _window),
    "seed_oss": Case("seed_oss"),
    "starcoder2": Case("starcoder2", _window, _TIED),
    "stablelm": Case("stablelm", _partial),
    "glm4": Case("glm4", _partial),
    "command-r": Case("cohere", lambda c: {"logit_scale": c.logit_scale}, _TIED),
    "cohere2": Case("cohere2", lambda c: _window(c) | {"logit_scale": c.logit_scale}, _TIED),
    "lfm2": Case(
        "lfm2",
        lambda c: {
            "shortconv.l_cache": c.conv_L_cache,
            "attention.head_count_kv": [2 if one == "full_attention" else 0 for one in c.layer_types],
        },
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "full_attn_idxs": [1, 3],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
}


def small_model(case: Case, **changes: Any) -> Any:
    """Make a small model of a case; entries of its config that follow from others are computed anew."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = CONFIG_MAPPING[case.kind]()
    values = shrunk(case.kind, config)
    for entry in ("layer_types", "no_rope_layers"):
        values.pop(entry, None)
    config = type(config)(**{**values, **case.changes, **changes})
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    torch.manual_seed(0)
    model = mapping[type(config)]._from_config(config, dtype=torch.float32).eval()
    draw_weights(model)
    return model


def write(path: Path, name: str, kinds: Callable[[str], str] = lambda name: "Q8_0", **changes: Any) -> Any:
    """Write a file; returns the dense model in float32 with the stored values.

    Args:
        path: The file.
        name: A key of CASES.
        kinds: The type of each matrix by its name in the model.
        **changes: Entries of the model's config.
    """
    import gguf

    case = CASES[name]
    model = small_model(case, **changes)
    config, architecture = model.config, name.partition("/")[0]
    kind = next(one for one, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    _write_fields(writer, config, case.fields(config) | {"block_count": config.num_hidden_layers + case.behind})
    for field, values in case.of_model(model).items():
        writer.add_array(field, values)
    rope = getattr(config, "rope_parameters", None) or {}
    if case.kind == "gemma4_text":
        half, full = config.per_layer_config[len(config.layer_types) - 1].head_dim // 2, rope["full_attention"]
        rotated = int(half * full["partial_rotary_factor"])
        writer.add_tensor("rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (half - rotated)).numpy())
    if "long_factor" in rope:
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"]).numpy())
    found: dict[str, list[tuple[conversions.Stored, str]]] = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        own = case.conversion(key, tensor, config)
        for stored in conversions.usual(key, tensor, config) if own is None else own:
            found.setdefault(_name_of(stored.name, names), []).append((stored, key))
    for tensor_name, several in found.items():
        stored, key = several[0]
        if len(several) > 1:  # one tensor of the file
            pieces = [piece for one, _ in several for piece in one.pieces]
            stored = stored._replace(pieces=pieces, shape=(len(pieces), *pieces[0].shape))
        _write_tensor(writer, tensor_name, stored, kinds(key), key)
    for block in range(config.num_hidden_layers, config.num_hidden_layers + case.behind):
        writer.add_tensor(f"blk.{block}.nextn.eh_proj.weight", torch.zeros(8, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_fields(writer: Any, config: Any, more: dict[str, Any]) -> None:
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_context_length(getattr(config, "max_position_embeddings", 1 << 20))
    writer.add_embedding_length(config.hidden_size)
    if "attention.head_count" not in more:
        writer.add_head_count(config.num_attention_heads)
    usual = {
        "feed_forward_length": "intermediate_size",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
    }
    more = {name: getattr(config, entry, None) for name, entry in usual.items() if name not in more} | more
    for entry in ("rms_norm_eps", "norm_eps"):
        if hasattr(config, entry):
            writer.add_layer_norm_rms_eps(getattr(config, entry))
    for entry in ("layer_norm_eps", "norm_epsilon"):
        if hasattr(config, entry):
            writer.add_layer_norm_eps(getattr(config, entry))
    if rope:
        writer.add_rope_freq_base(float((rope.get("full_attention") or rope)["rope_theta"]))
    for field, value in more.items():
        field = f"{writer.arch}.{field}"
        if isinstance(value, str):
            writer.add_string(field, value)
        elif isinstance(value, list):
            writer.add_array(field, value)
        elif isinstance(value, bool):
            writer.add_bool(field, value)
        elif isinstance(value, float):
            writer.add_float32(field, value)
        elif value is not None:
            writer.add_uint32(field, value)


def _name_of(name: str, names: Any) -> str:
    if name.startswith("blk."):
        return name
    name = f"{name}.weight" if name.endswith(".sinks") else name
    stem, _, last = name.rpartition(".")
    whole = names.get_name(name)  # some are known with their last part, and have none in the file
    mapped = names.get_name(stem) if whole is None else whole
    assert mapped is not None, name
    return mapped if whole is not None else f"{mapped}.{last}"


def _write_tensor(writer: Any, name: str, stored: conversions.Stored, kind: str, key: str) -> None:
    import gguf

    shape = stored.shape or tuple(stored.pieces[0].shape)
    if len(shape) == 1 or key.endswith(UNQUANTIZED):
        values = torch.cat([piece.reshape(-1) for piece in stored.pieces]).view(shape)
        writer.add_tensor(name, values.float().numpy())
        return
    rows = [piece.reshape(-1, shape[-1]) for piece in stored.pieces]
    data, values = gguf_blocks(kind, torch.cat(rows))
    writer.add_tensor(name, data.reshape(*shape[:-1], -1), raw_dtype=gguf.GGMLQuantizationType[kind])
    for piece, back in zip(stored.pieces, values.split([len(one) for one in rows]), strict=True):
        piece.copy_(back.view(piece.shape))
