"""DeepSeek V2 and V3, and what is built like them (Kimi K2, GLM 4.7 Flash), MiniCPM3: multi-head latent attention.

Files made for its absorbed form have kv_b_proj as two tensors: keys, transposed in each head, and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..architecture import EXPERTS, Architecture, Joined, Metadata, rope, sizes
from ..method import NAME
from .mixtures import ROUTED_NAMES, routed

_SIGMOID = 2  # of expert_gating_func


def _deepseek2(m: Metadata) -> dict[str, Any]:
    rotated = m.size("rope.dimension_count")
    key, value = _head_sizes(m)
    found = {
        **sizes(m),
        "num_key_value_heads": m.heads,
        "rms_norm_eps": m["attention.layer_norm_rms_epsilon"],
        "q_lora_rank": m.get("attention.q_lora_rank"),
        "kv_lora_rank": m.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "attention_bias": "blk.0.attn_output.bias" in m,
        "rope_parameters": _rope(m),
    }
    if not m.get("expert_count"):
        raise NotImplementedError(f"{NAME}: a deepseek2 in {m.path} must have experts, got expert_count 0")
    found |= routed(m)
    if m.get("expert_gating_func", 1) == _SIGMOID:
        return {**found, "model_type": "deepseek_v3", "rope_interleave": True}
    has_groups = found["n_group"] > 1
    return {**found, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if has_groups else "greedy"}


def _minicpm3(m: Metadata) -> dict[str, Any]:
    """Its scales are the same in all files, which do not name them; nor the size of a head of v."""
    rotated, key = m.size("rope.dimension_count"), m.size("attention.key_length")
    rows = m.rows("blk.0.attn_kv_b.weight")
    value = rows // m.heads - (key - rotated)
    if value < 1 or rows % m.heads:
        raise ValueError(
            f"{NAME}: attn_kv_b.weight in {m.path} must have rows of {m.heads} heads, each with more than "
            f"{key - rotated}, got {rows}"
        )
    # The lengths that rope was trained with are those of the model.
    fields = {f"{m.architecture}.rope.scaling.original_context_length": m.size("context_length"), **m.fields}
    return {
        "model_type": "minicpm3",
        **sizes(m),
        "num_key_value_heads": m.heads,
        "rms_norm_eps": m["attention.layer_norm_rms_epsilon"],
        "q_lora_rank": m.size("attention.q_lora_rank"),
        "kv_lora_rank": m.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "head_dim": rotated,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        "rope_parameters": rope(Metadata(m.path, fields, m.infos)),
    }


def _head_sizes(m: Metadata) -> tuple[int, int]:
    """Return the columns of a head of k and v; files with two tensors for kv_b_proj have other ones for its result."""
    if m.get("attention.key_length_mla"):
        return m.size("attention.key_length_mla"), m.size("attention.value_length_mla")
    return m.size("attention.key_length"), m.size("attention.value_length")


def _rope(m: Metadata) -> dict[str, Any]:
    parameters = rope(m)
    if multiplier := m.get("rope.scaling.yarn_log_multiplier"):
        # A tenth of mscale_all_dim, without mscale: DeepSeek sets them alike.
        parameters |= {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
    return parameters


def _kv_b(m: Metadata, parts: list[Tensor]) -> Tensor:
    keys, values = parts  # [heads, rank, key], [heads, value, rank]
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


_NAMES = {
    **ROUTED_NAMES,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}

ARCHITECTURES = (
    Architecture("minicpm3", _minicpm3, _NAMES),
    Architecture(
        "deepseek2",
        _deepseek2,
        _NAMES,
        joined={"self_attn.kv_b_proj.weight": Joined(("attn_k_b.weight", "attn_v_b.weight"), _kv_b)},
        parts=EXPERTS,
    ),
)
