"""Small models of transformers that read images beside text, random weights, and folders with their processors.

A processor here has a byte-level tokenizer, and an image processor for images of a few patches.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from torch_infini.testing.causal_types import shrunk
from torch_infini.testing.checkpoints import save_tokenizer
from torch_infini.testing.new_model import draw_weights

VOCABULARY = 320
PATCH = 14
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# Of the towers that see an image as squares of PATCH pixels.
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 4 * PATCH,
    "patch_size": PATCH,
}
QWEN_TOWER: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "temporal_patch_size": 2}
QWEN_MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SQUARES = {"size": {"height": 4 * PATCH, "width": 4 * PATCH}}


@dataclass(frozen=True)
class ImageFamily:
    """A family of models that read images.

    Attributes:
        kind: Its model_type.
        config: Returns the entries of its config, from the ids of its marks.
        marks: Special tokens of its tokenizer, the last ids of the vocabulary.
        image_mark: What stands in a prompt for an image.
        processor: The class names of its processor and its image processor.
        image_settings: Of the image processor.
        settings: Of the processor.
        named: Marks that the processor finds by these names in the tokenizer.
    """

    kind: str
    config: Callable[[dict[str, int]], dict[str, Any]]
    marks: tuple[str, ...]
    image_mark: str
    processor: tuple[str, str]
    image_settings: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)

    @property
    def ids(self) -> dict[str, int]:
        """The ids of its marks."""
        return {mark: VOCABULARY - len(self.marks) + i for i, mark in enumerate(self.marks)}

    @property
    def image_id(self) -> int:
        """The id that stands for a part of an image."""
        return int(self.config(self.ids)["image_token_id"])

    def build(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
        """Make its model, the same at every call."""
        from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig

        config = AutoConfig.for_model(self.kind, **self.config(self.ids))
        mapping: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        torch.manual_seed(seed)
        model = mapping[type(config)]._from_config(config, dtype=torch.float32).eval()
        draw_weights(model, seed)
        return model.to(dtype)

    def save(self, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
        """Write its model, tokenizer and processor to a folder; return the model."""
        model = self.build(dtype)
        model.save_pretrained(folder)
        self.save_processor(folder)
        return model

    def save_processor(self, folder: Path) -> None:
        """Write its tokenizer and processor to a folder."""
        save_tokenizer(folder, VOCABULARY)
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocabulary = {word: id for word, id in tokenizer["model"]["vocab"].items() if id not in self.ids.values()}
        tokenizer["model"]["vocab"] = vocabulary | self.ids
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"] = [{"id": id, "content": mark, **flags} for mark, id in self.ids.items()]
        path.write_text(json.dumps(tokenizer))
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        settings["chat_template"], settings["extra_special_tokens"] = self.template, self.named
        settings["pad_token"] = min(vocabulary, key=vocabulary.__getitem__)  # some processors pad
        path.write_text(json.dumps(settings))
        kind, image_kind = self.processor
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"image_processor_type": image_kind, "processor_class": kind, **self.image_settings})
        )
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": kind, **self.settings}))

    @property
    def template(self) -> str:
        """A chat template: each message's parts in order, images as the family's mark."""
        part = f"{{% if p.type == 'image' %}}{self.image_mark}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
        parts = f"{{% for p in m.content %}}{part}{{% endfor %}}"
        content = f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{parts}{{% endif %}}"
        return f"{{% for m in messages %}}{{{{ m.role }}}}: {content}\n{{% endfor %}}assistant:"


def _llava(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER},
        "image_token_id": ids["<image>"],
        "vision_feature_layer": -1,
    }


def _qwen(ids: dict[str, int], tower: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    return {
        "text_config": TEXT | {"rope_parameters": MROPE} | text,
        "vision_config": QWEN_TOWER | tower,
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }


def _qwen2_5(ids: dict[str, int]) -> dict[str, Any]:
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
    return _qwen(ids, {**tower, "window_size": 4 * PATCH}, {})


def _qwen3(ids: dict[str, int]) -> dict[str, Any]:
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64}
    rope = {"rope_parameters": {**MROPE, "mrope_interleaved": True}}
    return _qwen(ids, {**tower, "deepstack_visual_indexes": [0, 1]}, rope)


def _qwen3_5(ids: dict[str, int]) -> dict[str, Any]:
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 64}
    text = {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0},
    }
    return _qwen(ids, tower, text)


def _internvl(ids: dict[str, int]) -> dict[str, Any]:
    side = 4 * PATCH
    return {
        "text_config": {"model_type": "qwen2", **TEXT},
        "vision_config": {**TOWER, "image_size": [side, side], "patch_size": [PATCH, PATCH]},
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": 4,
        "downsample_ratio": 0.5,
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    }


def _idefics3(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": TOWER,
        "image_token_id": ids["<image>"],
        "scale_factor": 2,
        "tie_word_embeddings": False,
    }


def _gemma3(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "text_config": TEXT
        | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
        "image_token_id": ids["<image_soft_token>"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "mm_tokens_per_image": 4,
    }


def _gemma4(ids: dict[str, int]) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    values = shrunk("gemma4", CONFIG_MAPPING["gemma4"]())
    # As the small models of the family: inputs of their own for each layer, keys and values that layers share.
    small = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "use_double_wide_mlp": True}
    sizes = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "max_position_embeddings": 512}
    text = {**small, **sizes, "enable_moe_block": False, "attention_k_eq_v": False}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "position_embedding_size": 64, **heads}
    return {
        **values,
        "text_config": values["text_config"] | text,
        "vision_config": tower,
        "audio_config": None,
        "boi_token_id": ids["<|image>"],
        "image_token_id": ids["<|image|>"],
        "eoi_token_id": ids["<image|>"],
        "video_token_id": ids["<|video|>"],
        "audio_token_id": ids["<|audio|>"],
    }


_QWEN_IMAGES = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 784, "max_pixels": 9408}
LLAVA = ImageFamily(
    "llava",
    _llava,
    ("<image>",),
    "<image>",
    ("LlavaProcessor", "CLIPImageProcessor"),
    {"size": {"shortest_edge": 4 * PATCH}, "crop_size": SQUARES["size"]},
    {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
)
QWEN2_5_VL = ImageFamily(
    "qwen2_5_vl",
    _qwen2_5,
    QWEN_MARKS,
    "<|vision_start|><|image_pad|><|vision_end|>",
    ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor"),
    _QWEN_IMAGES,
)
QWEN3_VL = replace(QWEN2_5_VL, kind="qwen3_vl", config=_qwen3, processor=("Qwen3VLProcessor", "Qwen2VLImageProcessor"))
QWEN3_5 = replace(QWEN3_VL, kind="qwen3_5", config=_qwen3_5)
INTERNVL = ImageFamily(
    "internvl",
    _internvl,
    ("<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    "<IMG_CONTEXT>",
    ("InternVLProcessor", "GotOcr2ImageProcessor"),
    {**SQUARES, "max_patches": 4},
    {"image_seq_length": 4},
    {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
IDEFICS3 = ImageFamily(
    "idefics3",
    _idefics3,
    ("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
    "<image>",
    ("Idefics3Processor", "Idefics3ImageProcessor"),
    {"size": {"longest_edge": 8 * PATCH}, "max_image_size": {"longest_edge": 4 * PATCH}},
    {"image_seq_len": 4},
)
GEMMA3 = ImageFamily(
    "gemma3",
    _gemma3,
    ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
    "<start_of_image>",
    ("Gemma3Processor", "Gemma3ImageProcessor"),
    SQUARES,
    {"image_seq_length": 4},
    {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
)
GEMMA4 = ImageFamily(
    "gemma4",
    _gemma4,
    ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio|>"),
    "<|image|>",
    ("Gemma4Processor", "Gemma4ImageProcessor"),
    {"max_soft_tokens": 70},
    {"image_seq_length": 70},
    {
        "boi_token": "<|image>",
        "image_token": "<|image|>",
        "eoi_token": "<image|>",
        **dict.fromkeys(("audio_token", "boa_token", "eoa_token"), "<|audio|>"),
    },
)
IMAGE_FAMILIES = (LLAVA, QWEN2_5_VL, QWEN3_VL, QWEN3_5, INTERNVL, IDEFICS3, GEMMA3, GEMMA4)
