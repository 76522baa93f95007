"""Small models of every type of transformers that reads images and text, as causal_types.py has those of text alone."""

from __future__ import annotations

from typing import Any

from .causal_types import causal_types, made, shrunk

MOST = 60_000_000  # parameters: towers have sizes that their patches and each other determine


def axes(*sections: int) -> dict[str, Any]:
    """Return the sections of rotations on several axes, which default configs say by being without."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}}


AXES = axes(2, 3, 3)
# As causal_types.MORE.
MORE: dict[str, dict[str, Any]] = {
    **{kind: {"text_config": AXES} for kind in ("qwen2_5_vl", "glm4v", "glm46v", "glm_ocr")},
    **{kind: {"text_config": AXES} for kind in ("glmga", "paddleocr_vl", "qwen2_5_omni_thinker")},
    # Half of a head's columns are rotated.
    "glm4v_moe": {"text_config": axes(1, 1, 2)},
    "qwen2_vl": {"text_config": AXES, "vision_config": {"embed_dim": 64, "depth": 2, "num_heads": 4}},
    "hunyuan_vl": {"text_config": axes(2, 2, 2, 2)},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32], **axes(3, 3, 2)}},
    "janus": {"vision_config": {"image_size": 64, "projection_dim": 64}, "vq_config": {"base_channels": 32}},
}


def image_types() -> list[str]:
    """List the types for which transformers has a model of images and text, and none in causal_types."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - set(causal_types()))


def build(kind: str, seed: int = 0) -> Any:
    """Make a small model of a type, with random weights; the same at every call.

    Raises ValueError for a type whose small config has too many parameters.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config: Any = CONFIG_MAPPING[kind]()
    mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model_class = mapping[type(config)]
    values = shrunk(kind, config)
    for key, value in MORE.get(kind, {}).items():
        values[key] = {**(values.get(key) or {}), **value} if isinstance(value, dict) else value
    return made(model_class, type(config)(**values), MOST, seed)
