"""AutoConfig: the LlamaConfig of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checkpoints import read_object
from ...models import LlamaConfig as ModelConfig
from .config import LlamaConfig

# Entries that are copied. torch_infini.models, which knows each family's defaults, reads the others.
_COPIED = (
    "use_cache",
    "attention_dropout",
    "initializer_range",
    "pretraining_tp",
    "pad_token_id",
    "hidden_act",
)
_READ = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "mlp_bias",
    "bos_token_id",
)


class AutoConfig:
    """Reads config.json of llama, mistral, qwen2 and qwen3 models, in the forms of transformers 4 and 5."""

    @staticmethod
    def from_pretrained(model_path: str | Path) -> LlamaConfig:
        """Read a model folder's config.json and, if there is one, the end tokens of generation_config.json.

        Args:
            model_path: A Hugging Face folder on this machine.

        Returns:
            The config; `_dtype` is the checkpoint's, if the folder states it.

        Raises:
            FileNotFoundError: If there is no config.json.
            ValueError: If it is not readable, or the model is not supported.
        """
        model = ModelConfig.from_pretrained(model_path)
        entries = read_object(Path(model_path) / "config.json")
        config = LlamaConfig(
            **{name: getattr(model, name) for name in _READ},
            **{name: entries[name] for name in _COPIED if entries.get(name) is not None},
            name_or_path=str(model_path),
            attention_bias=model.qkv_bias,
            attention_output_bias=model.out_bias,
            eos_token_id=model.eos_token_ids,
            _dtype=model.dtype,
            **_rope(entries),
        )
        if any(model.windows):
            config.sliding_window = max(model.windows)
            config.layer_types = ["sliding_attention" if window else "full_attention" for window in model.windows]
        return config


def _rope(entries: dict[str, Any]) -> dict[str, Any]:
    """Return rope_theta and rope_scaling. transformers 5 has both in rope_parameters."""
    scaling = dict(entries.get("rope_parameters") or entries.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or entries.get("rope_theta") or 1e4
    if entries.get("partial_rotary_factor") is not None:
        scaling.setdefault("partial_rotary_factor", entries["partial_rotary_factor"])
    plain = scaling.keys() <= {"rope_type", "type"} and set(scaling.values()) <= {"default"}
    return {"rope_theta": float(theta), "rope_scaling": None if plain else scaling}
