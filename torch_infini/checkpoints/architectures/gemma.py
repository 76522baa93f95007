"""Gemma 1, 2 and 3 (the text models). The weights of their norms have 1 added in files."""

from __future__ import annotations

from typing import Any

from ..architecture import SANDWICH_NAMES, Architecture, Metadata, decoder, present, rope, without_one

_GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma(m: Metadata) -> dict[str, Any]:
    return {**decoder(m, "gemma"), **_GELU}


def _capped(m: Metadata, model_type: str, layers_of_27b: int) -> dict[str, Any]:
    """Return the values of Gemma 2 and 3. Without a scale in the file, it is that of a head, but in 27B models."""
    config = {**decoder(m, model_type), **_GELU}
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    is_27b = config["num_hidden_layers"] == layers_of_27b
    config["query_pre_attn_scalar"] = hidden // heads if is_27b else config["head_dim"]
    if scale := m.get("attention.scale"):
        config["query_pre_attn_scalar"] = scale**-2
    config["sliding_window"] = m["attention.sliding_window"]
    caps = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    return config | present(m, **caps)


def _gemma2(m: Metadata) -> dict[str, Any]:
    return _capped(m, "gemma2", 46)


def _gemma3(m: Metadata) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": float(m.get("rope.freq_base_swa") or 10000.0)}
    theta = float(m.get("rope.freq_base") or 1000000.0)
    parameters = {"sliding_attention": local, "full_attention": {**rope(m), "rope_theta": theta}}
    return {**_capped(m, "gemma3_text", 62), "rope_parameters": parameters}


ARCHITECTURES = (
    Architecture("gemma", _gemma, values=without_one),
    Architecture("gemma2", _gemma2, SANDWICH_NAMES, values=without_one),
    Architecture("gemma3", _gemma3, SANDWICH_NAMES, values=without_one),
)
