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
    **dict.fromkeys(("vocab_size", "text_vocab_size", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("backbone_hidden_size", "hidden_size_global", "embedding_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_inner", "feed_forward_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_blocks"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "swa_num_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "attention_head_dim", "d_head"), 16),
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
# What the names do not determine, by type; a dict is for the entries of an inner config.
MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_groups": 2},
    "big_bird": {"attention_type": "original_full"},  # the one that a decoder may have
    "blt": {"encoder_hash_byte_group_size": [3, 4], "encoder_hash_byte_group_vocab": VOCABULARY},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "moe_top_k": 4},
    },
    "dory": {"layer_types": None, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "head_dim": 24,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "shared_experts_intermediate_size": 32,
        **{f"swa_{name}": 2 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 16 for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
        **{f"swa_{name}": 24 for name in ("q_lora_rank", "head_dim")},
    },
    "gemma3n_text": {
        "intermediate_size": [96] * LAYERS,
        "activation_sparsity_pattern": [0.95, 0.0] * (LAYERS // 2),
        "num_kv_shared_layers": LAYERS // 2,
        "laurel_rank": 8,
    },
    # As the small models of the family, and "gemma4" as the large ones.
    "gemma4_text": {"global_head_dim": 32, "num_kv_shared_layers": LAYERS // 2, "use_double_wide_mlp": True},
    "gemma4": {
        "text_config": {
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 32,
        }
    },
    "gemma4_unified_text": {"global_head_dim": 32},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2), "mamba_n_groups": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 256,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 48], "attention_head_size": 16},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
# Types that compute nothing from tokens alone.
UNFIT = dict.fromkeys(
    ("gemma4_assistant", "gemma4_unified_assistant"),
    "it continues from another model's hidden states, keys and values, not from tokens alone",
)
# Types of which the model of text alone is built: the other parts need libraries for images.
TEXT_ALONE = ("gemma3n",)


def causal_types() -> list[str]:
    """List the types for which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shrunk(kind: str, config: Any) -> dict[str, Any]:
    """Return a config's entries with small sizes."""
    values = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    layers = next((values[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if values.get(key)), -1)
    for key, value in list(values.items()):
        inner = vars(config).get(key)
        if hasattr(inner, "to_dict"):
            values[key] = shrunk(inner.model_type, inner)
        elif key == "mlp_only_layers":
            values[key] = []
        elif isinstance(value, list) and LAYERS < len(value) in (layers, layers + 1):
            kinds = list(dict.fromkeys(map(str, value)))  # one of each kind, in order
            first = [next(one for one in value if str(one) == name) for name in kinds]
            values[key] = (first * LAYERS)[: LAYERS + len(value) - layers]
        elif key == "per_layer_config":
            del values[key]  # follows from other entries
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
    for key, value in MORE.get(kind, {}).items():
        values[key] = {**(values.get(key) or {}), **value} if isinstance(value, dict) else value
    return values


def build(kind: str, seed: int = 0) -> Any:
    """Make a small model of a type, with random weights; the same at every call.

    Raises ValueError for a type that takes more than tokens.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    if kind in UNFIT:
        raise ValueError(UNFIT[kind])
    config: Any = CONFIG_MAPPING[kind]()
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    model_class = mapping[type(config)]
    if kind in TEXT_ALONE:
        config = config.text_config
        model_class = mapping[type(config)]
    elif not isinstance(config, model_class.config_class):
        config = config.get_text_config(decoder=True)
    return made(model_class, type(config)(**shrunk(config.model_type, config)), MOST, seed)


def made(model_class: Any, config: Any, most: int, seed: int = 0) -> Any:
    """Make a model of a small config in evaluation mode, with random weights; ValueError beyond `most` parameters."""
    with suppress(TypeError), torch.device("meta"):  # some configs create tensors by numpy
        shape = model_class._from_config(config)
        if (count := sum(p.numel() for p in shape.parameters())) > most:
            raise ValueError(f"its small config has {count} parameters")
    torch.manual_seed(seed)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    draw_weights(model)
    return model
