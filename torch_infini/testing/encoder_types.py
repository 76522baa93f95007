"""Small encoders of every type of transformers with a masked language model, as causal_types.py has decoders."""

from __future__ import annotations

from typing import Any

from .causal_types import MOST, VOCABULARY, made, shrunk

# As causal_types.MORE.
MORE: dict[str, dict[str, Any]] = {
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 2, "position_embedding_type": "rotary"},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "squeezebert": {"embedding_size": 64},
}


def encoder_types() -> list[str]:
    """List the types for which transformers has a masked language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES)


def build(kind: str, seed: int = 0) -> Any:
    """Make a small encoder of a type without a head, with random weights; the same at every call.

    Raises ValueError for a type whose small config has too many parameters.
    """
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    config: Any = CONFIG_MAPPING[kind]()
    mapping: Any = MODEL_MAPPING
    model_class = mapping[type(config)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    values = {**shrunk(kind, config), **MORE.get(kind, {})}
    if "is_decoder" in values:
        values["is_decoder"] = False
    return made(model_class, type(config)(**values), MOST, seed)
