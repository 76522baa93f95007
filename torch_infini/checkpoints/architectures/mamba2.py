"""Decoders with Mamba-2 layers between those of attention, or beside them: Granite 4, Nemotron-H, Falcon-H1."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..architecture import Architecture, Joined, Metadata, decoder, experts, interleaved, log_of_decay, sizes
from ..method import NAME
from .llama import GRANITE_EXPERTS, GRANITE_ROUTER, granite
from .mixtures import routed

_KINDS = ("linear_attention", "full_attention")


def _of_layers(m: Metadata, name: str) -> list[int]:
    """Return a field that has an entry for each layer, 0 for those without what it counts."""
    values = m[name]
    if not isinstance(values, list) or len(values) < m.layers or not any(values[: m.layers]):
        raise ValueError(
            f"{NAME}: {m.architecture}.{name} in {m.path} must have an entry for each of {m.layers} layers, 0 for "
            f"those without, got {values}"
        )
    return values[: m.layers]


def _granitehybrid(m: Metadata) -> dict[str, Any]:
    kv, heads = _of_layers(m, "attention.head_count_kv"), m.size("ssm.time_step_rank")
    inner = m.size("ssm.inner_size")
    found = {
        **granite(m, "granitemoehybrid"),
        "num_key_value_heads": max(kv),
        "layer_types": [_KINDS[bool(one)] for one in kv],
        "position_embedding_type": "rope" if m.get("rope.scaling.finetuned", True) else None,
        "shared_intermediate_size": m.get("expert_shared_feed_forward_length") or m.size("feed_forward_length"),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // m.size("embedding_length"),
        "mamba_n_groups": m.size("ssm.group_count"),
        "mamba_d_state": m.size("ssm.state_size"),
        "mamba_d_conv": m.size("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in m.infos),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in m.infos),
    }
    if not m.get("expert_count"):
        return {**found, "num_local_experts": 0, "num_experts_per_tok": 0}
    return found | experts(m)


def _nemotron_h(m: Metadata) -> dict[str, Any]:
    kv, inner = _of_layers(m, "attention.head_count_kv"), _of_layers(m, "feed_forward_length")
    heads, has_experts = m.size("ssm.time_step_rank"), bool(m.get("expert_count"))
    fields = {**m.fields, f"{m.architecture}.feed_forward_length": max(inner)}
    found = {
        "model_type": "nemotron_h",
        **sizes(Metadata(m.path, fields, m.infos)),
        "num_key_value_heads": max(kv),
        "head_dim": m.head_dim,
        "layer_norm_epsilon": m.get("attention.layer_norm_rms_epsilon") or m["attention.layer_norm_epsilon"],
        "layers_block_type": [
            "full_attention" if of_k else ("moe" if has_experts else "mlp") if of_mlp else "linear_attention"
            for of_k, of_mlp in zip(kv, inner, strict=True)
        ],
        "mamba_num_heads": heads,
        "mamba_head_dim": m.size("ssm.inner_size") // heads,
        "ssm_state_size": m.size("ssm.state_size"),
        "n_groups": m.size("ssm.group_count"),
        "conv_kernel": m.size("ssm.conv_kernel"),
        "use_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in m.infos),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in m.infos),
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in m.infos),
    }
    if not has_experts:
        return found
    more = {
        "moe_shared_expert_intermediate_size": m.size("expert_shared_feed_forward_length"),
        "moe_latent_size": m.get("moe_latent_size"),
    }
    return {**found, **routed(m), **more}


def _falcon_h1(m: Metadata) -> dict[str, Any]:
    """The file's weights have the multipliers in them."""
    heads, inner = m.size("ssm.time_step_rank"), m.size("ssm.inner_size")
    one = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
    return {
        **decoder(m, "falcon_h1"),
        **{f"{name}_multiplier": 1.0 for name in one},
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": m.size("ssm.group_count"),
        "mamba_d_state": m.size("ssm.state_size"),
        "mamba_d_conv": m.size("ssm.conv_kernel"),
        "mamba_conv_bias": "blk.0.ssm_conv1d.bias" in m,
        "mamba_proj_bias": "blk.0.ssm_in.bias" in m,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in m,
        "mamba_norm_before_gate": False,  # as llama.cpp computes
    }


def with_log_of_decay(name: str, tensor: Tensor) -> Tensor:
    """Return A_log of the decay that files have; other tensors as they are."""
    return log_of_decay(tensor) if name.endswith("A_log") else tensor


# Without experts, the shared MLP has the names of a decoder's.
_GATE_AND_UP = Joined(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), others=(("ffn_gate.weight", "ffn_up.weight"),))


def mamba2_names(name: str) -> dict[str, str]:
    """Return the names of a Mamba-2 module's tensors; `name`: transformers' of the module."""
    return {
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_dt.bias": f"{name}.dt_bias",
        "ssm_conv1d": f"{name}.conv1d",
        "ssm_in": f"{name}.in_proj",
        "ssm_norm": f"{name}.norm",
        "ssm_out": f"{name}.out_proj",
    }


_GRANITE_NAMES = {
    **GRANITE_ROUTER,
    **mamba2_names("mamba"),
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}

_NEMOTRON_NAMES = {
    **mamba2_names("mixer"),
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_FALCON_NAMES = {
    **mamba2_names("mamba"),
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm.weight",  # which has no last part in files
    "ffn_norm.weight": "pre_ff_layernorm.weight",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
}
_NEMOTRON_EXPERTS = {f"mixer.experts.{part}_proj": (f"ffn_{part}_exps.weight",) for part in ("up", "down")}
_MAMBA2: dict[str, Any] = {
    "values": with_log_of_decay,
    "added": {"conv1d.weight": 1},
    "flat": tuple(f"{module}.{last}" for module in ("mamba", "mixer") for last in ("A_log", "D", "norm.weight")),
}

ARCHITECTURES = (
    Architecture("falcon-h1", _falcon_h1, _FALCON_NAMES, **_MAMBA2),
    *(
        Architecture(name, _nemotron_h, _NEMOTRON_NAMES, rows=interleaved, parts=_NEMOTRON_EXPERTS, **_MAMBA2)
        for name in ("nemotron_h", "nemotron_h_moe")
    ),
    Architecture(
        "granitehybrid",
        _granitehybrid,
        _GRANITE_NAMES,
        rows=interleaved,
        joined={"shared_mlp.input_linear.weight": _GATE_AND_UP},
        parts=GRANITE_EXPERTS,
        **_MAMBA2,
    ),
)
