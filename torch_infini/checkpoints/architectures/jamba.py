"""Jamba: Mamba layers between those of attention, without positions; a mixture in some layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..architecture import Architecture, Metadata, expansion, experts, parts_of_experts, sizes
from ..method import NAME
from .mamba import mamba_names
from .mamba2 import with_log_of_decay


def _jamba(m: Metadata) -> dict[str, Any]:
    kv = m["attention.head_count_kv"]
    if not isinstance(kv, list) or [type(heads) for heads in kv] != [int] * m.layers:
        raise ValueError(
            f"{NAME}: {m.architecture}.attention.head_count_kv in {m.path} must have an entry for each of {m.layers} "
            f"layers, a number, got {kv}"
        )
    attention = [bool(heads) for heads in kv]
    mixtures = [f"blk.{i}.ffn_gate_inp.weight" in m for i in range(m.layers)]
    dense = {"num_experts": 1, "num_experts_per_tok": 1}
    return {
        "model_type": "jamba",
        **sizes(m),
        "num_key_value_heads": max(kv),
        "rms_norm_eps": m["attention.layer_norm_rms_epsilon"],
        **_distances(m, attention, "attn_layer", "attention"),
        **(experts(m) | _distances(m, mixtures, "expert_layer", "experts") if any(mixtures) else dense),
        "mamba_d_state": m.size("ssm.state_size"),
        "mamba_d_conv": m.size("ssm.conv_kernel"),
        "mamba_expand": expansion(m),
        "mamba_dt_rank": m.size("ssm.time_step_rank"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in m.infos),
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in m.infos),
    }


def _distances(m: Metadata, chosen: Sequence[bool], entry: str, what: str) -> dict[str, int]:
    """Return the config's period and offset of the layers that have something, which are at equal distances."""
    layers = [i for i, one in enumerate(chosen) if one]
    first = layers[0] if layers else 0
    period = layers[1] - first if len(layers) > 1 else len(chosen)
    if layers != list(range(first, len(chosen), period)) or first >= period:
        raise NotImplementedError(
            f"{NAME}: layers with {what} in {m.path} must be at equal distances, and the first of them no later, got "
            f"{layers} of {len(chosen)}"
        )
    return {f"{entry}_period": period, f"{entry}_offset": first}


_NAMES = {
    "output_norm": "model.final_layernorm",
    "ffn_norm": "pre_ff_layernorm",
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
    **mamba_names("mamba"),
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
}

ARCHITECTURES = (
    Architecture(
        "jamba",
        _jamba,
        _NAMES,
        values=with_log_of_decay,
        parts=parts_of_experts("feed_forward.experts"),
        added={"conv1d.weight": 1},
    ),
)
