"""Model folders with random weights: small ones of each family for tests, and the shapes that benchmarks measure.

    python -m torch_infini.testing.checkpoints 1.1B FOLDER

Weights are drawn so that tokens depend on all of the model. The command adds a tokenizer that has every id.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .new_model import draw_weights, new_model
from .shapes import LLAMAS, random_of_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# (model_type, the config's entries besides SMALL), by name.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 32, "num_key_value_heads": 4, "rope_theta": 500000.0}),
    "llama3": (
        "Llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 24}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def random_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Make a small model of transformers, with the same weights at every call.

    Args:
        name: A name in MODELS.
        dtype: The weights' dtype.
        seed: The weights' seed.
        **changes: Changed entries of its config.
    """
    classes, more = MODELS[name]
    model: PreTrainedModel = new_model(classes, {**SMALL, **more, **changes})
    draw_weights(model, seed)
    with torch.no_grad():
        embedding: Any = model.get_input_embeddings()
        embedding.weight.mul_(4.0)  # so that the next token depends on the latest ones
    return cast(model, dtype)


def cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert a model's parameters in place. `to` would also round the frequencies of its rotary embedding."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Save a byte-level tokenizer: one id per byte, then words, so that every id below `vocabulary` has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{i}" for i in range(vocabulary - len(letters))]
    vocab = {text: i for i, text in enumerate([*letters, *words][:vocabulary])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a LLaMA with random weights in bfloat16.")
    parser.add_argument("shape", choices=tuple(LLAMAS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    model = random_of_shape(arguments.shape)
    model.save_pretrained(arguments.folder)
    save_tokenizer(arguments.folder, model.config.vocab_size)


if __name__ == "__main__":
    main()
