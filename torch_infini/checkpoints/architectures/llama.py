"""llama, which is also Mistral's and Mixtral's, and the architectures that differ from it by settings alone.

Their files have the rows of q and k interleaved, as the original LLaMA rotates neighbours.
"""

from __future__ import annotations

from typing import Any

from ..architecture import EXPERTS, Architecture, Metadata, decoder, experts, interleaved, present, rope


def _llama(m: Metadata) -> dict[str, Any]:
    if m.get("expert_count"):
        return {**decoder(m, "mixtral"), **experts(m)}
    return {"architectures": ["LlamaForCausalLM"], **decoder(m, "llama")}


def granite(m: Metadata, model_type: str = "granite") -> dict[str, Any]:
    multipliers = present(
        m,
        attention_multiplier="attention.scale",
        embedding_multiplier="embedding_scale",
        residual_multiplier="residual_scale",
        logits_scaling="logit_scale",
    )
    return {**decoder(m, model_type), **multipliers}


def _granitemoe(m: Metadata) -> dict[str, Any]:
    return {**granite(m, "granitemoe"), **experts(m)}


def _arcee(m: Metadata) -> dict[str, Any]:
    return decoder(m, "arcee")


def _smollm3(m: Metadata) -> dict[str, Any]:
    # llama.cpp knows the layers without rotation by their interval too.
    return {**decoder(m, "smollm3"), "no_rope_layer_interval": 4}


def _mistral3(m: Metadata) -> dict[str, Any]:
    scaling = rope(m)
    if scaling["rope_type"] == "yarn":
        # The file has the product of both as yarn_log_multiplier, which Mistral sets to 1.
        multiplier = m.get("rope.scaling.yarn_log_multiplier", 1.0)
        scaling |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    scaling["llama_4_scaling_beta"] = m.get("attention.temperature_scale", 0.0)
    scaling.setdefault("original_max_position_embeddings", m.size("context_length"))
    return {**decoder(m, "ministral3"), "rope_parameters": scaling}


_MIXTRAL = {"ffn_gate_inp": "mlp.gate"}
GRANITE_ROUTER = {"ffn_gate_inp": "block_sparse_moe.router"}
GRANITE_EXPERTS = {name.replace("mlp.", "block_sparse_moe."): parts for name, parts in EXPERTS.items()}

ARCHITECTURES = (
    Architecture("llama", _llama, _MIXTRAL, rows=interleaved, parts=EXPERTS),
    Architecture("granite", granite, rows=interleaved),
    Architecture("granitemoe", _granitemoe, GRANITE_ROUTER, rows=interleaved, parts=GRANITE_EXPERTS),
    Architecture("arcee", _arcee, rows=interleaved),
    Architecture("smollm3", _smollm3, rows=interleaved),
    Architecture("mistral3", _mistral3, rows=interleaved),
)
