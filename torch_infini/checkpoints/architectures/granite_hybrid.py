"""Granite 4 with Mamba-2 layers between those of attention, dense or with experts beside a shared MLP."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..architecture import Architecture, Joined, Metadata, experts, interleaved
from ..method import NAME
from .llama import GRANITE_EXPERTS, GRANITE_ROUTER, granite

_KINDS = ("linear_attention", "full_attention")


def _granitehybrid(m: Metadata) -> dict[str, Any]:
    kv, heads = m["attention.head_count_kv"], m.size("ssm.time_step_rank")
    if not isinstance(kv, list) or len(kv) != m.layers or not any(kv):
        raise ValueError(
            f"{NAME}: {m.architecture}.attention.head_count_kv in {m.path} must have an entry for each of {m.layers} "
            f"layers, 0 for those without attention, got {kv}"
        )
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


def _values(name: str, tensor: Tensor) -> Tensor:
    return (-tensor.float()).log() if name.endswith("A_log") else tensor


# Without experts, the shared MLP has the names of a decoder's.
_GATE_AND_UP = Joined(("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), others=(("ffn_gate.weight", "ffn_up.weight"),))
_NAMES = {
    **GRANITE_ROUTER,
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_in": "mamba.in_proj",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}

ARCHITECTURES = (
    Architecture(
        "granitehybrid",
        _granitehybrid,
        _NAMES,
        rows=interleaved,
        values=_values,
        joined={"shared_mlp.input_linear.weight": _GATE_AND_UP},
        parts=GRANITE_EXPERTS,
        added={"conv1d.weight": 1},
        flat=("mamba.A_log", "mamba.D", "mamba.norm.weight"),
    ),
)
