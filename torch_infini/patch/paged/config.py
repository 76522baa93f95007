"""PagedConfig: what the engine reads of the config of a model of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..decoder import table_of
from .sites import value_of

_POSITIONS = 1 << 17  # of a model whose config names none


@dataclass(frozen=True)
class PagedConfig:
    """The values of a model's config that the engine reads.

    Attributes:
        model_type: The model's type in transformers.
        vocab_size: Columns of the logits.
        max_position_embeddings: The longest sequence that is served.
        num_attention_heads, num_key_value_heads: Heads of the first layer.
        bos_token_id: None if there is none.
        eos_token_ids: The end-of-sequence tokens; may be empty.
    """

    model_type: str
    vocab_size: int
    max_position_embeddings: int
    num_attention_heads: int
    num_key_value_heads: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def positions_of(model: Any) -> int:
    """Return the longest sequence of a causal language model of transformers."""
    config = model.config.get_text_config()
    names = ("max_position_embeddings", "max_seq_len")  # the second is MPT's, whose ALiBi ends there
    return int(next(filter(None, (getattr(config, name, None) for name in names)), _POSITIONS))


def vocabulary_of(model: Any) -> int:
    """Return the number of ids that a causal language model of transformers takes."""
    return int(getattr(model.config.get_text_config(), "vocab_size", 0)) or table_of(model.get_input_embeddings()).rows


def config_of(model: Any, logits: Tensor, positions: int, kv_heads: int) -> PagedConfig:
    """Return the config of a causal language model of transformers.

    Args:
        model: The model.
        logits: Of a call, with a column for each id.
        positions: The longest sequence that is served.
        kv_heads: Of its first layer.
    """
    text = model.config.get_text_config()
    ends = model.generation_config.eos_token_id
    return PagedConfig(
        text.model_type,
        logits.shape[-1],
        positions,
        value_of(text, "num_attention_heads", kv_heads),
        kv_heads,
        model.generation_config.bos_token_id,
        () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends),
    )
