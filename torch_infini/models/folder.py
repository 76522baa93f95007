"""What a Llama needs of a folder or GGUF file before memory is allocated: config, tensors' shapes, stored formats."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from .. import checkpoints
from ..checkpoints import StoredLayer
from ..weights import FORMATS
from . import quantized
from .checkpoint import check_sizes, stored_layers
from .config import LlamaConfig

# Tensors of older checkpoints that are not parameters: frequencies and masks that follow from the config.
_NOT_PARAMETERS = re.compile(r"\.rotary_emb\.inv_freq$|\.masked_bias$|\.attn\.bias$")


def model_folder(name: str | Path) -> Path:
    """Return the folder or .gguf file of a model: the path given, or that of the name in the hub's cache."""
    path = Path(name)
    if not path.exists() and isinstance(name, str) and checkpoints.is_hub_name(name):
        return checkpoints.find(name)
    if not path.is_dir() and not (path.is_file() and path.suffix == ".gguf"):
        raise FileNotFoundError(f"torch_infini.models.Llama: the folder must exist, got {name}")
    return path


def checked_foreign(checkpoint: checkpoints.Checkpoint) -> LlamaConfig:
    """Return the config of a checkpoint of another library, after checking its tensors against it."""
    config = quantized.config_of(checkpoint)
    checkpoints.check_layers("torch_infini.models.Llama", checkpoint.path, checkpoint.tensors, config.num_hidden_layers)
    quantized.check(checkpoint, config, shapes_of(config))
    return config


def checked_config(folder: str | Path) -> LlamaConfig:
    """Return a model folder's config, after checking the files' sizes against it; errors as Llama.from_pretrained."""
    if checkpoints.is_foreign(Path(folder)):
        with checkpoints.open_checkpoint(folder) as checkpoint:
            return checked_foreign(checkpoint)
    config = LlamaConfig.from_pretrained(folder)
    stored = stored_layers(folder)
    integers = {f"{name}.weight_integers": kind for name, kind in stored.items()}

    def shapes() -> dict[str, tuple[int, ...]]:
        formats_of(config, stored, "dense")  # describes errors in the names more clearly
        wanted = shapes_of(config)
        tied = {"lm_head.weight": (config.vocab_size, config.hidden_size)}  # a tied head may have integers of its own
        for name, kind in integers.items():
            dense = name.removesuffix("_integers")
            rows, columns = wanted.pop(dense, None) or tied[dense]
            wanted[name] = FORMATS[kind.format].kinds(rows, columns, kind.group, torch.float32)["weight"].shape
        return wanted

    def is_known(name: str) -> bool:
        beside = name.removesuffix("_scales").removesuffix("_zeros").removesuffix(".weight")
        return beside in stored or is_known_without_slot(config, stored, name)

    dtypes = {
        name: FORMATS[kind.format].kinds(1, kind.group or 1, kind.group, torch.float32)["weight"].dtype
        for name, kind in integers.items()
    }
    check_sizes(folder, config.num_hidden_layers, shapes, is_known, dtypes)
    return config


def is_known_without_slot(config: LlamaConfig, stored: Mapping[str, StoredLayer], name: str) -> bool:
    """Return whether a tensor without a slot may be in a checkpoint."""
    tied = config.tie_word_embeddings and name == "lm_head.weight"
    # Integers come with an empty weight, for readers that do not know them.
    empty = name.endswith(".weight") and name.removesuffix(".weight") in stored
    return tied or empty or _NOT_PARAMETERS.search(name) is not None


def shapes_of(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a checkpoint's tensors by Hugging Face names, without a model."""
    c, size, inner = config, config.hidden_size, config.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    attention, mlp = "self_attn.", "mlp."
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (size,), "post_attention_layernorm.weight": (size,)}
    for name, rows, columns, bias in (
        (attention + "q_proj", q, size, c.qkv_bias),
        (attention + "k_proj", kv, size, c.qkv_bias),
        (attention + "v_proj", kv, size, c.qkv_bias),
        (attention + "o_proj", size, q, c.out_bias),
        (mlp + "gate_proj", inner, size, c.mlp_bias),
        (mlp + "up_proj", inner, size, c.mlp_bias),
        (mlp + "down_proj", size, inner, c.mlp_bias),
    ):
        layer[name + ".weight"] = (rows, columns)
        if bias:
            layer[name + ".bias"] = (rows,)
    if c.qk_norm:
        layer |= {attention + "q_norm.weight": (c.head_dim,), attention + "k_norm.weight": (c.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, size),
        "model.norm.weight": (size,),
    }
    for i in range(c.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes if c.tie_word_embeddings else shapes | {"lm_head.weight": (c.vocab_size, size)}


def formats_of(config: LlamaConfig, stored: Mapping[str, StoredLayer], weights: str) -> dict[str, str]:
    """Return the format of each layer of a checkpoint with integers, or "dense", by the layer's name.

    Raises:
        ValueError: If another format is requested, or projections of one Linear are stored in different ones.
    """
    groups: list[tuple[str, ...]] = [("lm_head",)]
    for i in range(config.num_hidden_layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        groups += [(f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj"), (f"{attention}o_proj",)]
        groups += [(f"{mlp}gate_proj", f"{mlp}up_proj"), (f"{mlp}down_proj",)]
    formats: dict[str, str] = {}
    for names in groups:
        kinds = {stored.get(name, StoredLayer("dense", 0)) for name in names}
        if len(kinds) > 1:
            shown = ", ".join(f"{name} {stored[name].format if name in stored else 'dense'}" for name in names)
            raise ValueError(
                "torch_infini.models.Llama: projections of one input must be stored alike, because one product "
                f"computes them, got {shown}: give patch_model's `skip` all of them"
            )
        formats |= dict.fromkeys(names, kinds.pop().format)
    if unknown := sorted(stored.keys() - formats.keys()):
        raise ValueError(
            "torch_infini.models.Llama: quantization_config.quantized must name linear layers of the model, got "
            f"{', '.join(unknown[:5])}"
        )
    of_layers = {format for name, format in formats.items() if name != "lm_head"}
    kinds_of = {"dense": {"dense"}, **{name: {one.serves, one.exact or name} for name, one in FORMATS.items()}}
    wanted = {name for format in of_layers for name in kinds_of[format]}
    if weights not in ("dense", *wanted):
        raise ValueError(
            "torch_infini.models.Llama: weights must be left out for a checkpoint of integers, or be its format "
            f"({', '.join(sorted(wanted))}), got {weights!r}"
        )
    return formats
