"""Small models of every causal type of transformers: its default config with small sizes, and random weights."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from .new_model import draw_weights

LAYERS, VOCABULARY = 4, 128
MOST = 20_000_000  # parameters
# Sizes by their names in configs. A mixture sends each token to all experts: a token that rounding sends to other
# experts would differ by more than all roundings.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), 256),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("sliding_window", "local_attention"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "ssm_num_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_head", "mamba_head_dim"), 16),
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_dt_rank": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "dropout": 0.0,
    "tie_word_embeddings": False,
}
# Sizes that are also set if a config has None, which means another entry.
FILLED = {"head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_group", "topk_group"}
# What the names do not determine, by type.
MORE: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "gptj": {"rotary_dim": 8},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}


def causal_types() -> list[str]:
    """List the types for which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shrunk(kind: str, config: Any) -> dict[str, Any]:
    """Return a config's entries with small sizes."""
    values = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    layers = next((values[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if values.get(key)), -1)
    for key, value in list(values.items()):
        inner = getattr(config, key, None)
        if hasattr(inner, "to_dict"):
            values[key] = shrunk("", inner)
        elif key == "mlp_only_layers":
            values[key] = []
        elif isinstance(value, list) and LAYERS < len(value) in (layers, layers + 1):
            kinds = list(dict.fromkeys(map(str, value)))  # one of each kind, in order
            first = [next(one for one in value if str(one) == name) for name in kinds]
            values[key] = (first * LAYERS)[: LAYERS + len(value) - layers]
        elif key == "per_layer_config" and isinstance(value, dict):
            values[key] = {layer: one for layer, one in value.items() if int(layer) < LAYERS}
        elif key in SIZES and (value is not None or key in FILLED or key.endswith("_token_id")):
            values[key] = SIZES[key]
        elif isinstance(value, dict) and "mrope_section" in value:
            values[key] = {**value, "mrope_section": [2, 3, 3]}
    if values.get("kv_lora_rank") is not None:
        values["num_key_value_heads"] = values["num_attention_heads"]
        if "head_dim" in values:
            values["head_dim"] = values["qk_rope_head_dim"]
    if "is_decoder" in values:
        values["is_decoder"] = True
    return values | MORE.get(kind, {})


def build(kind: str, seed: int = 0) -> Any:
    """Make a small model of a type, with random weights; the same at every call."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config_class = CONFIG_MAPPING[kind]
    config = config_class(**shrunk(kind, config_class()))
    with suppress(TypeError), torch.device("meta"):  # some configs create tensors by numpy
        shape = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if (count := sum(p.numel() for p in shape.parameters())) > MOST:
            raise ValueError(f"its small config has {count} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    draw_weights(model)
    return model
