"""Mamba alone: Mamba and Falcon-Mamba, whose time steps have matrices of their own, and Mamba-2."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture, Metadata, expansion
from ..method import NAME
from .mamba2 import mamba2_names, with_log_of_decay


def _sizes(m: Metadata) -> dict[str, Any]:
    return {
        "hidden_size": m.size("embedding_length"),
        "expand": expansion(m),
        "num_hidden_layers": m.layers,
        "state_size": m.size("ssm.state_size"),
        "conv_kernel": m.size("ssm.conv_kernel"),
        "use_bias": "blk.0.ssm_in.bias" in m,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in m,
        "layer_norm_epsilon": m["attention.layer_norm_rms_epsilon"],
        "vocab_size": m.rows("token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in m,
    }


def _mamba(m: Metadata) -> dict[str, Any]:
    has_norms = bool(m.get("ssm.dt_b_c_rms", False))
    more = {"intermediate_size": m.size("ssm.inner_size"), "time_step_rank": m.size("ssm.time_step_rank")}
    return {"model_type": "falcon_mamba" if has_norms else "mamba", **_sizes(m), **more}


def _mamba2(m: Metadata) -> dict[str, Any]:
    found, heads, inner = _sizes(m), m.size("ssm.time_step_rank"), m.size("ssm.inner_size")
    if inner % heads:
        raise ValueError(
            f"{NAME}: {m.architecture}.ssm.time_step_rank in {m.path} must divide ssm.inner_size, {inner}, got {heads}"
        )
    more = {"num_heads": heads, "head_dim": inner // heads, "n_groups": m.size("ssm.group_count")}
    return {"model_type": "mamba2", **found, **more}


def mamba_names(name: str) -> dict[str, str]:
    """Return the names of a Mamba module's tensors; `name`: transformers' of the module."""
    return {
        "ssm_a": f"{name}.A_log",
        "ssm_d": f"{name}.D",
        "ssm_conv1d": f"{name}.conv1d",
        **{f"ssm_{part}": f"{name}.{part}_proj" for part in ("in", "x", "dt", "out")},
    }


_OTHERS = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "attn_norm": "norm"}
_ALONE: dict[str, Any] = {"values": with_log_of_decay, "added": {"conv1d.weight": 1}, "layers": "backbone.layers"}

ARCHITECTURES = (
    Architecture("mamba", _mamba, {**_OTHERS, **mamba_names("mixer")}, **_ALONE),
    Architecture(
        "mamba2",
        _mamba2,
        {**_OTHERS, **mamba2_names("mixer")},
        flat=("mixer.A_log", "mixer.D", "mixer.norm.weight"),
        **_ALONE,
    ),
)
