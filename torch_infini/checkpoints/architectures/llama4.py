"""Llama 4: chunked windows, layers without positions, and a mixture in every layer or every second one."""

from __future__ import annotations

from typing import Any

from ..architecture import Architecture, Metadata, decoder, experts, parts_of_experts, shared_experts
from ..method import NAME

_WITHOUT_NORMS = 128  # experts of the model whose q and k have no norms


def _llama4(m: Metadata) -> dict[str, Any]:
    """Windows, layers without positions and the temperature are the same in all files, which do not name them."""
    if m.get("attention.sliding_window", 1) == 0:
        raise NotImplementedError(
            f"{NAME}: a llama4 in {m.path} must have chunked windows, got attention.sliding_window 0"
        )
    return {
        **decoder(m, "llama4_text"),
        **experts(m),
        "intermediate_size": m.size("expert_feed_forward_length"),
        "intermediate_size_mlp": m.size("feed_forward_length"),
        "interleave_moe_layer_step": m.size("interleave_moe_layer_step"),
        "use_qk_norm": m.size("expert_count") != _WITHOUT_NORMS,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


_NAMES = {
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "feed_forward.router",
    **shared_experts("feed_forward.shared_expert"),
}

ARCHITECTURES = (
    Architecture("llama4", _llama4, _NAMES, parts=parts_of_experts("feed_forward.experts"), transposed_experts=True),
)
