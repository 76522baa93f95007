"""LoRAWeights: reads a LoRA adapter that peft wrote, adapter_config.json and adapter_model.safetensors.

What an adapter may have beyond two matrices for each layer (DoRA, biases, whole modules) is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .files import read_header, read_object, read_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"^base_model\.model\.(.+)\.lora_([AB])\.weight$")
# Entries of the config, and the values with which they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "fan_in_fan_out": (None, False),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "lora_bias": (None, False),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
}


class LoRALayer(NamedTuple):
    """The two matrices of a layer: y += (x a^T) b^T.

    Attributes:
        a: [r, k].
        b: [n, r], multiplied by the adapter's scale.
    """

    a: Tensor
    b: Tensor


class LoRAWeights(NamedTuple):
    """An adapter.

    Attributes:
        rank: The largest rank of a layer.
        layers: The layers that it changes, by their names in the base model.
    """

    rank: int
    layers: dict[str, LoRALayer]


def read_lora(folder: Path, max_rank: int, where: str) -> LoRAWeights:
    """Read an adapter; its tensors are float32.

    The scale is lora_alpha / r, with use_rslora lora_alpha / sqrt(r), each layer's own where the config has patterns.

    Args:
        folder: The folder of an adapter.
        max_rank: The largest rank that the caller takes; a larger one is refused before tensors are read.
        where: The caller, which errors begin with.

    Raises:
        FileNotFoundError: For a folder or file that does not exist.
        ValueError: For another kind of adapter, tensors that do not form pairs, or ones with NaN or infinity.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, arXiv:2106.09685; Kalajdzievski, A Rank
        Stabilization Scaling Factor for Fine-Tuning with LoRA, 2023, arXiv:2312.03732.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{where}: the folder of an adapter must exist, got {folder}")
    config = read_object(folder / CONFIG, where)
    check_config(config, folder / CONFIG, where)
    path = folder / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"{where}: an adapter must have a {TENSORS}, got {folder}, which has none")
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, (info, *_) in read_header(path, where).items():
        found = _FACTOR.match(name)
        if found is None or len(info.shape) != 2 or not info.dtype.is_floating_point:
            shown = f"{name} {list(info.shape)}"
            raise ValueError(f"{where}: {path} must hold matrices lora_A and lora_B of linear layers, got {shown}")
        shapes.setdefault(found[1], {})[found[2]] = info.shape
    if not shapes:
        raise ValueError(f"{where}: {path} must hold matrices lora_A and lora_B, got none")
    for name, pair in shapes.items():
        if len(pair) != 2 or pair["A"][0] != pair["B"][1]:
            got = ", ".join(f"lora_{of} {list(shape)}" for of, shape in sorted(pair.items()))
            raise ValueError(f"{where}: {name} in {path} must have lora_A [r, k] and lora_B [n, r], got {got}")
    rank = max(pair["A"][0] for pair in shapes.values())
    if not 0 < rank <= max_rank:
        raise ValueError(f"{where}: the rank of {folder} must be from 1 to max_lora_rank, {max_rank}, got {rank}")
    tensors = {name: tensor.float() for name, tensor in read_tensors(path, where)}
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{where}: {name} in {path} must be finite, got NaN or infinity")
    layers = {}
    for name in shapes:
        a, b = (tensors[f"{_PREFIX}{name}.lora_{of}.weight"] for of in "AB")
        layers[name] = LoRALayer(a, b * scale_of(config, name, a.shape[0]))
    return LoRAWeights(rank, layers)


def check_config(config: Mapping[str, Any], path: Path, where: str) -> None:
    """Raise ValueError for an adapter that is not plain LoRA of linear layers."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{where}: peft_type in {path} must be 'LORA', got {config.get('peft_type')!r}")
    for name, neutral in _NEUTRAL.items():
        if config.get(name) not in neutral:
            raise ValueError(
                f"{where}: {name} in {path} must be {neutral[-1]!r}, got {config[name]!r}: merge such an adapter with "
                "peft (merge_and_unload) and serve the merged model"
            )
    alphas = [config.get("lora_alpha"), *(config.get("alpha_pattern") or {}).values()]
    for alpha in alphas:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise ValueError(f"{where}: lora_alpha in {path} must be a number, got {alpha!r}")


def scale_of(config: Mapping[str, Any], name: str, rank: int) -> float:
    """Return what a layer's product is multiplied by; `name` is the layer's, for alpha_pattern."""
    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    own = (alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", name))
    alpha = float(next(own, config["lora_alpha"]))
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
