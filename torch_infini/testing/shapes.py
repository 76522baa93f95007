"""Models with random weights in the shapes that the benchmarks measure: Llamas, and a few layers of mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .new_model import new_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Arguments of LlamaConfig. 8B is the shape of Llama 3, 1.1B that of TinyLlama; tiny is for tests.
LLAMAS: dict[str, dict[str, Any]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "1.1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
    },
    "160M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "vocab_size": 32000,
    },
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 512,
    },
}


GPT_OSS: dict[str, Any] = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_hidden_layers": 2,
    "sliding_window": 128,
}

# A few layers of mixtures of experts, and a small vocabulary, so that layers take most of a step: Qwen3-30B-A3B has 48,
# gpt-oss-20b 24.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "30B-A3B": (
        "Qwen3Moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_theta": 1e6,
            "vocab_size": 8192,
        },
    ),
    "gpt-oss-20b": (
        "GptOss",
        {
            **GPT_OSS,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_attention_heads": 64,
            "vocab_size": 8192,
        },
    ),
    "tiny-gpt-oss": (
        "GptOss",
        {
            **GPT_OSS,
            "hidden_size": 192,
            "intermediate_size": 160,
            "num_local_experts": 8,
            "num_attention_heads": 16,
            "vocab_size": 512,
        },
    ),
    "tiny-A3B": (
        "Qwen3Moe",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 256,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 512,
        },
    ),
}
PHI3 = {"sliding_window": None, "original_max_position_embeddings": 4096}
GLM4 = {"partial_rotary_factor": 0.5, "attention_bias": True}
# Dense decoders that differ from Llama: Gemma 3 1B, Granite 3 2B, OLMo 2 1B, and Phi-3 and GLM-4 with the sizes of a
# model of 1 B (of these there are only larger ones).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-1B": (
        "Gemma3",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "vocab_size": 262144,
            "tie_word_embeddings": True,
        },
    ),
    "granite-2B": (
        "Granite",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2-1B": (
        "Olmo2",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 100352,
        },
    ),
    "phi3-1B": (
        "Phi3",
        {
            **PHI3,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
        },
    ),
    "glm4-1B": (
        "Glm4",
        {
            **GLM4,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "vocab_size": 59264,
        },
    ),
    "tiny-phi3": (
        "Phi3",
        {
            **PHI3,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
    ),
    "tiny-glm4": (
        "Glm4",
        {
            **GLM4,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 512,
        },
    ),
    "tiny-gemma3": (
        "Gemma3",
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "query_pre_attn_scalar": 128,
            "sliding_window": 32,
            "vocab_size": 512,
            "tie_word_embeddings": True,
        },
    ),
}
SHAPES = {**{name: ("Llama", config) for name, config in LLAMAS.items()}, **MIXTURES, **FAMILIES}


def random_of_shape(shape: str, layers: int | None = None) -> PreTrainedModel:
    """Make a model in bfloat16, with the same random weights at every call, that generates no end token.

    Args:
        shape: A name in SHAPES.
        layers: Fewer layers than the shape has, for a quick test.
    """
    fewer = {} if layers is None else {"num_hidden_layers": layers}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    more = {"max_position_embeddings": 4096, "tie_word_embeddings": False, "dtype": torch.bfloat16}
    classes, config = SHAPES[shape]
    model: Any = new_model(classes, {**more, **config, **fewer, **ids}, seed=0)
    return model.to(torch.bfloat16)


def saved_shape(shape: str, folder: Path) -> Path:
    """Return the checkpoint of a random_of_shape in a folder; make it if there is none."""
    path, part = folder / shape, folder / f"{shape}.part"
    if not path.exists():
        random_of_shape(shape).save_pretrained(part)
        part.rename(path)
    return path


def weight_bytes(model: Any) -> int:
    """Return the bytes of weights that a step reads: parameters and buffers (integers) without the embedding."""
    embedding = model.get_input_embeddings()
    modules = [module for module in model.modules() if module is not embedding]
    packed = {module for module in modules if "weight_panels" in module._buffers}  # where rows of other layers are too
    tensors = [t for module in modules for t in module.parameters(False)]
    tensors += [t for module in modules if module not in packed for t in module.buffers(False)]
    return sum(t.numel() * t.element_size() for t in tensors) + sum(module.weight_bytes for module in packed)
