"""Qwen 3.5 (also 3.6), dense and as a mixture, and Qwen3-Next: gated delta rules between layers of attention.

Files of Qwen 3.5 have value heads in another order, so that ggml repeats key heads without a gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..architecture import (
    EXPERTS,
    Architecture,
    Joined,
    Metadata,
    decoder,
    experts,
    last_module,
    log_of_decay,
    rope,
    shared_experts,
    with_expert_length,
    without_one,
)
from ..method import NAME
from ..order import Order


def _linear(m: Metadata, model_type: str) -> dict[str, Any]:
    """Return the values that all of them have."""
    m = with_expert_length(m)
    heads = m.size("ssm.time_step_rank")
    interval = 4 if m.get("full_attention_interval") is None else m.size("full_attention_interval")
    kinds = ("linear_attention", "full_attention")
    return {
        **decoder(m, model_type),
        "rope_parameters": rope(m, partial=True),
        "layer_types": [kinds[(i + 1) % interval == 0] for i in range(m.layers)],
        "linear_conv_kernel_dim": m.size("ssm.conv_kernel"),
        "linear_key_head_dim": m.size("ssm.state_size"),
        "linear_num_key_heads": m.size("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": m.size("ssm.inner_size") // heads,
    }


def _mixture(m: Metadata, model_type: str) -> dict[str, Any]:
    inner = {
        "moe_intermediate_size": m.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": m.size("expert_shared_feed_forward_length"),
    }
    return {**_linear(m, model_type), **experts(m), **inner}


def _sections(m: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """Add the sections of a head by axis of an image's positions; those of a text are alike."""
    found = m["rope.dimension_sections"]
    if not isinstance(found, list) or len(found) < 3:
        raise ValueError(
            f"{NAME}: {m.architecture}.rope.dimension_sections in {m.path} must be at least 3 numbers, got {found!r}"
        )
    sections = {"mrope_section": found[:3], "mrope_interleaved": True}
    return {**config, "rope_parameters": config["rope_parameters"] | sections}


def _qwen35(m: Metadata) -> dict[str, Any]:
    return _sections(m, _linear(m, "qwen3_5_text"))


def _qwen35moe(m: Metadata) -> dict[str, Any]:
    return _sections(m, _mixture(m, "qwen3_5_moe_text"))


def _qwen3next(m: Metadata) -> dict[str, Any]:
    return {**_mixture(m, "qwen3_next"), "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _value_heads(m: Metadata, size: int, first: int = 0) -> Order | None:
    """Return the order of value heads of `size` rows: those of a key head follow each other in the model alone."""
    keys, values = m.size("ssm.group_count"), m.size("ssm.time_step_rank")
    if values % keys:
        raise ValueError(
            f"{NAME}: {m.architecture}.ssm.time_step_rank in {m.path} must be a multiple of ssm.group_count, {keys}, "
            f"got {values}"
        )
    return None if keys == values else Order(keys, values // keys, size, first)


def _rows(m: Metadata, name: str, n: int) -> Order | None:
    module, last = last_module(name), name.rpartition(".")[2]
    size = m.size("ssm.inner_size") // m.size("ssm.time_step_rank")
    if module in ("in_proj_qkv", "conv1d"):
        return _value_heads(m, size, 2 * m.size("ssm.group_count") * m.size("ssm.state_size"))
    if module == "in_proj_z":
        return _value_heads(m, size)
    return _value_heads(m, 1) if module in ("in_proj_a", "in_proj_b") or last in ("A_log", "dt_bias") else None


def _columns(m: Metadata, name: str, n: int) -> Order | None:
    is_out = name.endswith("linear_attn.out_proj.weight")
    return _value_heads(m, m.size("ssm.inner_size") // m.size("ssm.time_step_rank")) if is_out else None


def _values(name: str, tensor: Tensor) -> Tensor:
    if name.endswith("A_log"):
        return log_of_decay(tensor)
    return tensor if name.endswith("linear_attn.norm.weight") else without_one(name, tensor)


def _qkvz(m: Metadata, parts: list[Tensor]) -> Tensor:
    """Return the rows of q, k, v and z of the first key head, then those of the next."""
    qkv, z = parts
    keys, rows = m.size("ssm.group_count"), m.size("ssm.group_count") * m.size("ssm.state_size")
    of_heads = [part.unflatten(0, (keys, -1)) for part in (qkv[:rows], qkv[rows : 2 * rows], qkv[2 * rows :], z)]
    return torch.cat(of_heads, 1).flatten(0, 1)


_LINEAR_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_NAMES = {
    **_LINEAR_NAMES,
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}
_MIXTURE_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **shared_experts("mlp.shared_expert"),
}
_ADDED = {"conv1d.weight": 1, "shared_expert_gate.weight": 0}

ARCHITECTURES = (
    Architecture("qwen35", _qwen35, _NAMES, rows=_rows, columns=_columns, values=_values, added=_ADDED),
    Architecture(
        "qwen35moe",
        _qwen35moe,
        _NAMES | _MIXTURE_NAMES,
        rows=_rows,
        columns=_columns,
        values=_values,
        parts=EXPERTS,
        added=_ADDED,
    ),
    Architecture(
        "qwen3next",
        _qwen3next,
        {**_LINEAR_NAMES, **_MIXTURE_NAMES, "ssm_ba": "linear_attn.in_proj_ba"},
        values=_values,
        joined={"linear_attn.in_proj_qkvz.weight": Joined(("attn_qkv.weight", "attn_gate.weight"), _qkvz)},
        parts=EXPERTS,
        added=_ADDED,
    ),
)
