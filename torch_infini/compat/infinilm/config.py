"""LlamaConfig: a model's sizes and settings with InfiniLM's names; converts to torch_infini.models.LlamaConfig.

All attributes can be read and set. Defaults are InfiniLM's, which differ from transformers': use AutoConfig for the
config of a model folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from ...models import LlamaConfig as ModelConfig
from .convert import as_dtype


class Config:
    """The base class of the models' configs.

    Raises:
        TypeError: If it is instantiated itself.
    """

    def __init__(self) -> None:
        if type(self) is Config:
            raise TypeError("infinilm.Config: it must be a LlamaConfig, got the base class")


class LlamaConfig(Config):
    """A model's sizes and settings.

    Args:
        **values: Attributes that differ from their defaults.

    Attributes:
        model_type: "llama", "mistral", "qwen2" or "qwen3"; qwen3 has norms of q and k.
        vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
            head_dim, max_position_embeddings, rms_norm_eps, hidden_act, tie_word_embeddings, mlp_bias: As in a
            config.json.
        attention_bias: Whether q, k and v have biases; True unless set.
        attention_output_bias: Whether attention's output projection has a bias.
        rope_theta: Base of the rotation's angles.
        rope_scaling: None, or a dict as in a config.json: {"rope_type": "llama3", "factor": 8.0, ...}.
        bos_token_id, eos_token_id: Set as an integer, several or None; read as a list.
        pad_token_id: An integer; -1 or None: none.
        dtype: The dtype of weights and activations; set as `_dtype`, and read as an infinicore.dtype.
        sliding_window: The most keys that a query sees; None: all.
        layer_types: "sliding_attention" or "full_attention" for each layer; None: sliding_window applies to all layers.
        use_cache, attention_dropout, initializer_range, pretraining_tp, name_or_path: Stored, but without effect.
        _dtype: The dtype of weights and activations, torch's or infinicore's, or its name; None: float32.

    Raises:
        TypeError: For a value with an unknown name, or token ids that are no integers.
        ValueError: For an unsupported dtype.
    """

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope_theta: float = 1e4
    rope_scaling: Mapping[str, Any] | None = None
    attention_bias: bool = True
    attention_output_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_cache: bool = True
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    pretraining_tp: int = 1
    name_or_path: str = ""
    sliding_window: int | None = None
    layer_types: Sequence[str] | None = None
    _dtype: Any = None  # any form that convert.as_dtype accepts

    def __init__(self, **values: Any) -> None:
        unknown = values.keys() - _DEFAULTS.keys() - {"dtype"}
        if unknown:
            raise TypeError(f"{_NAME}: values must be attributes of a LlamaConfig, got {', '.join(sorted(unknown))}")
        for name, value in (_DEFAULTS | values).items():
            setattr(self, name, value)

    @property
    def bos_token_id(self) -> list[int]:
        return self._bos

    @bos_token_id.setter
    def bos_token_id(self, value: int | Sequence[int] | None) -> None:
        self._bos = token_ids("bos_token_id", value)

    @property
    def eos_token_id(self) -> list[int]:
        return self._eos

    @eos_token_id.setter
    def eos_token_id(self, value: int | Sequence[int] | None) -> None:
        self._eos = token_ids("eos_token_id", value)

    @property
    def pad_token_id(self) -> int | None:
        return self._pad

    @pad_token_id.setter
    def pad_token_id(self, value: int | None) -> None:
        if value is not None and not _is_token(value):
            raise TypeError(f"{_NAME}: pad_token_id must be a token id or None, got {value!r}")
        self._pad = None if value is None else int(value)

    @property
    def dtype(self) -> Any:
        from ..infinicore.utils import to_infinicore_dtype

        return to_infinicore_dtype(as_dtype(_NAME, self._dtype))

    @dtype.setter
    def dtype(self, value: Any) -> None:
        as_dtype(_NAME, value)
        self._dtype = value

    def kv_dim(self) -> int:
        """Columns of the keys, or of the values, of one token in one layer."""
        return self.num_key_value_heads * self.head_dim

    def validate(self) -> bool:
        """Return whether the values are consistent and supported; InferEngine's error says what is wrong."""
        try:
            self.to_model()
        except (TypeError, ValueError):
            return False
        return True

    def to_model(self) -> ModelConfig:
        """Convert to the config of torch_infini.models.Llama, without a dtype.

        Raises:
            ValueError: For values that validate() rejects; the message names all.
        """
        scaling = self.rope_scaling or {}
        if not isinstance(scaling, Mapping):
            raise ValueError(f"{_NAME}: rope_scaling must be a dict or None, got {scaling!r}")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        config = ModelConfig.from_dict(
            {
                **{name: getattr(self, name) for name in _DEFAULTS if name not in _CONVERTED},
                "rope_parameters": {**scaling, "rope_type": kind, "rope_theta": self.rope_theta},
                "sliding_window": None,
            }
        )
        return dataclasses.replace(
            config,
            qkv_bias=bool(self.attention_bias),
            out_bias=bool(self.attention_output_bias),
            mlp_bias=bool(self.mlp_bias),
            windows=self._windows(config.num_hidden_layers),
        )

    def _windows(self, layers: int) -> tuple[int, ...]:
        window, types = self.sliding_window, self.layer_types
        if window is None:
            return (0,) * layers
        if type(window) is not int or window < 1:
            raise ValueError(f"{_NAME}: sliding_window must be a positive integer or None, got {window!r}")
        types = ["sliding_attention"] * layers if types is None else types
        if (
            not isinstance(types, (list, tuple))
            or len(types) != layers
            or not set(types) <= {"sliding_attention", "full_attention"}
        ):
            raise ValueError(
                f"{_NAME}: layer_types must name sliding_attention or full_attention for each of {layers} layers, "
                f"got {types!r}"
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)

    def __repr__(self) -> str:
        values = {name: getattr(self, name) for name in _DEFAULTS}
        changed = (f"{name}={value!r}" for name, value in values.items() if value != _DEFAULTS[name])
        return f"LlamaConfig({', '.join(changed)})"


_DEFAULTS = {name: vars(LlamaConfig)[name] for name in LlamaConfig.__annotations__}
_DEFAULTS |= {"pad_token_id": -1, "bos_token_id": [1], "eos_token_id": [2]}
# Attributes that to_model() converts itself.
_CONVERTED = {"rope_theta", "rope_scaling", "sliding_window", "layer_types", "_dtype", "bos_token_id"}
_NAME = "infinilm.LlamaConfig"


def token_ids(name: str, value: Any) -> list[int]:
    """Convert an id, several or none to a list; TypeError, which names the attribute, for other types."""
    ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    if not all(map(_is_token, ids)):
        raise TypeError(f"{_NAME}: {name} must be a token id, several or None, got {value!r}")
    return list(map(int, ids))


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
