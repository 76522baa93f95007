"""Qwen 2 and 3, dense and as mixtures, and the text models of their vision-language ones.

Of those the positions of a text are alike on all axes, which makes their rotation the usual one.
"""

from __future__ import annotations

from typing import Any

from ..architecture import EXPERTS, Architecture, Metadata, decoder, experts, shared_experts, with_expert_length


def _dense(m: Metadata) -> dict[str, Any]:
    kind = str(m.architecture).removesuffix("vl")
    return {"architectures": [f"{kind.capitalize()}ForCausalLM"], **decoder(m, kind)}


def _mixture(m: Metadata, model_type: str, **more: Any) -> dict[str, Any]:
    m = with_expert_length(m)
    inner = {"moe_intermediate_size": m.size("expert_feed_forward_length"), "decoder_sparse_step": 1}
    return {**decoder(m, model_type), **experts(m), **inner, "mlp_only_layers": [], **more}


def _qwen2moe(m: Metadata) -> dict[str, Any]:
    shared = {
        "shared_expert_intermediate_size": m.size("expert_shared_feed_forward_length"),
        "qkv_bias": "blk.0.attn_q.bias" in m,
    }
    return _mixture(m, "qwen2_moe", norm_topk_prob=False, **shared)


def _qwen3moe(m: Metadata) -> dict[str, Any]:
    return _mixture(m, "qwen3_moe", norm_topk_prob=True)


_ROUTER = {"ffn_gate_inp": "mlp.gate"}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **shared_experts("mlp.shared_expert"),
}

ARCHITECTURES = (
    *(Architecture(name, _dense) for name in ("qwen2", "qwen2vl", "qwen3", "qwen3vl")),
    Architecture("qwen2moe", _qwen2moe, _ROUTER | _SHARED, parts=EXPERTS, added={"shared_expert_gate.weight": 0}),
    *(Architecture(name, _qwen3moe, _ROUTER, parts=EXPERTS) for name in ("qwen3moe", "qwen3vlmoe")),
)
