"""LlamaConfig: the sizes and settings in a LLaMA-type model's config.json, in the spellings of transformers 4 and 5.

The families differ in biases, in norms of q and k, in sliding windows and in the defaults of missing entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoints import read_object
from ..nn.rotary import rotary_settings

_COMMON = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
_QWEN = {"vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32, "max_position_embeddings": 32768}
# Defaults of missing entries, by model_type: transformers may leave out entries that equal its defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": _COMMON
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _COMMON | _QWEN,
    "qwen3": _COMMON | _QWEN | {"head_dim": 128},
}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Limits lower than _MOST: these sizes decide how much memory is allocated before a file is read.
_MOST = 2**31 - 1
_LIMITS = {"num_hidden_layers": 2**16, "max_position_embeddings": 2**24}
_FLAGS = ("tie_word_embeddings", "mlp_bias", "attention_bias", "use_sliding_window")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes and settings of a model, under the names of config.json where it has them.

    Attributes:
        qkv_bias: Whether q, k and v have biases.
        out_bias: Whether attention's output projection has one.
        qk_norm: Whether the heads of q and k are normalized before they are rotated.
        windows: For each layer, the number of keys that a query attends to; 0: all.
        rope: The keyword arguments of torch_infini.nn.RotaryEmbedding.
        bos_token_id: None if there is none.
        eos_token_ids: The end-of-sequence tokens; may be empty.
        dtype: The checkpoint's; None if config.json has none.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    mlp_bias: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    rope: Mapping[str, Any]
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read the contents of a config.json.

        Args:
            config: Entries by name; those that do not concern inference are ignored.

        Returns:
            The config; missing entries have their family's defaults.

        Raises:
            ValueError: For another model_type, or entries that are not sizes, do not fit together or are not supported;
                all of them are named.
        """
        kind = config.get("model_type")
        if not isinstance(kind, str) or kind not in DEFAULTS:
            code = "; code of a model folder (auto_map) is never run" if "auto_map" in config else ""
            raise ValueError(f"{_NAME}: model_type must be one of {', '.join(DEFAULTS)}, got {kind!r}{code}")
        values = DEFAULTS[kind] | {name: value for name, value in config.items() if value is not None}
        if "sliding_window" in config:  # null means none here, not the default
            values["sliding_window"] = config["sliding_window"]
        heads, size = values["num_attention_heads"], values["hidden_size"]
        wrong = [
            f"{name} must be a positive integer, got {values[name]!r}"
            for name in _SIZES
            if values[name] is not None and not (type(values[name]) is int and values[name] > 0)
        ]
        wrong += [
            f"{name} must be at most {_LIMITS.get(name, _MOST)}, got {values[name]}"
            for name in _SIZES
            if type(values[name]) is int and values[name] > _LIMITS.get(name, _MOST)
        ]
        if not wrong:
            if values["num_key_value_heads"] is None:
                values["num_key_value_heads"] = heads
            if values["head_dim"] is None:
                if size % heads:
                    wrong.append(f"hidden_size must be a multiple of num_attention_heads, {heads}, got {size}")
                values["head_dim"] = size // heads
            if heads % values["num_key_value_heads"]:
                got = values["num_key_value_heads"]
                wrong.append(f"num_key_value_heads must be a divisor of num_attention_heads, {heads}, got {got}")
        if values["hidden_act"] not in ("silu", "swish"):
            wrong.append(f"hidden_act must be 'silu', got {values['hidden_act']!r}")
        eps = values["rms_norm_eps"]
        if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 <= eps < 1:
            wrong.append(f"rms_norm_eps must be a number from 0 to less than 1, got {eps!r}")
        wrong += [
            f"{name} must be true or false, got {values[name]!r}"
            for name in _FLAGS
            if name in values and not (isinstance(values[name], int) and values[name] in (0, 1))
        ]
        wrong += wrong_ends(values)
        if wrong:
            raise ValueError(f"{_NAME}: " + "; ".join(wrong))
        bias = bool(values["attention_bias"])
        dtype = values.get("dtype", values.get("torch_dtype"))
        return cls(
            model_type=kind,
            **{name: values[name] for name in _SIZES},
            rms_norm_eps=float(eps),
            tie_word_embeddings=bool(values["tie_word_embeddings"]),
            mlp_bias=bool(values["mlp_bias"]) and kind == "llama",
            qkv_bias=kind == "qwen2" or (bias and kind != "mistral"),
            out_bias=bias and kind in ("llama", "qwen3"),
            qk_norm=kind == "qwen3",
            windows=_windows(kind, values),
            rope=_rope(values),
            bos_token_id=values.get("bos_token_id"),
            eos_token_ids=token_ids(values.get("eos_token_id")),
            dtype=_DTYPES.get(str(dtype).removeprefix("torch.")),
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> LlamaConfig:
        """Read a model folder's config.json and, if there is one, the end tokens of generation_config.json.

        Raises:
            FileNotFoundError: If there is no config.json.
            ValueError: If a file is not readable, or as from_dict.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{_NAME}: a model folder must have a config.json, got {folder}, which has none")
        config = read_object(path, _NAME)
        generation = Path(folder) / "generation_config.json"
        try:
            read = cls.from_dict(config)
            if not generation.is_file():
                return read
            path, ends = generation, read_object(generation, _NAME)
            ends = {name: ends[name] for name in ("eos_token_id", "bos_token_id") if ends.get(name) is not None}
            return cls.from_dict(config | ends)
        except ValueError as error:
            raise ValueError(f"{_NAME}: {path}: {str(error).removeprefix(f'{_NAME}: ')}") from error


_NAME = "torch_infini.models.LlamaConfig"


def _windows(kind: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of keys that a query of each layer attends to; 0: all."""
    layers, window = values["num_hidden_layers"], values.get("sliding_window")
    if kind == "llama" or not window or (kind != "mistral" and not values.get("use_sliding_window", False)):
        return (0,) * layers
    if type(window) is not int or window < 1:
        raise ValueError(f"{_NAME}: sliding_window must be a positive integer or null, got {window!r}")
    if kind == "mistral":
        return (window,) * layers
    types = values.get("layer_types")
    if types is None:
        first = values.get("max_window_layers", 28)
        if type(first) is not int:
            raise ValueError(f"{_NAME}: max_window_layers must be an integer, got {first!r}")
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    known = {"full_attention": 0, "sliding_attention": window}
    rule = f"{_NAME}: layer_types must name full_attention or sliding_attention for each of {layers} layers"
    if not isinstance(types, (list, tuple)):
        raise ValueError(f"{rule}, got {types!r}")
    if len(types) != layers or not set(map(str, types)) <= known.keys():
        raise ValueError(f"{rule}, got {len(types)}: {', '.join(sorted(set(map(str, types))))}")
    return tuple(known[name] for name in types)


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return RotaryEmbedding's arguments; ValueError for invalid entries.

    As in transformers, these families rotate whole heads, whatever partial_rotary_factor is; if the scaling reads it,
    transformers' own models fail.
    """
    try:
        settings = rotary_settings(values)
        if settings["partial"] != 1 and settings["scaling"] is not None:
            raise ValueError(
                f"{_NAME}: partial_rotary_factor must be 1 or missing where rope_parameters scale the frequencies, got "
                f"{settings['partial']:g}"
            )
        return {**settings, "partial": 1.0}
    except (TypeError, OverflowError, ZeroDivisionError) as error:
        given = values.get("rope_scaling") or values.get("rope_parameters")
        raise ValueError(
            f"{_NAME}: rope_parameters must be those of a rotary embedding, got {given!r}: {error}"
        ) from error


def wrong_ends(values: Mapping[str, Any]) -> list[str]:
    """Return the errors in the entries for begin and end tokens."""
    wrong = []
    for name in ("bos_token_id", "eos_token_id"):
        value = values.get(name)
        ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        if not all(type(token) is int and abs(token) <= _MOST for token in ids):
            wrong.append(f"{name} must be a token id, several or null, got {value!r}")
    return wrong


def token_ids(value: int | Sequence[int] | None) -> tuple[int, ...]:
    """Convert a config's entry, an id, several or null, to a tuple."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(value)
