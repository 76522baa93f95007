"""Phi-3 and 4, whose q, k and v, and gate and up, are one layer each, in files as in transformers."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture, Metadata, decoder, present, rope


def _phi3(m: Metadata) -> dict[str, Any]:
    config = {**decoder(m, "phi3"), "rope_parameters": rope(m, partial=True)}
    original = m.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = present(m, sliding_window="attention.sliding_window")
    return {**config, "original_max_position_embeddings": original, **window}


_NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

ARCHITECTURES = (Architecture("phi3", _phi3, _NAMES),)
