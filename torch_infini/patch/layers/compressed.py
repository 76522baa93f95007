"""Takes over layers that transformers has loaded in the format of compressed-tensors, before it decompresses them.

The model's first forward would make every layer dense; quantized layers here compute with the stored integers.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from ...checkpoints import QuantizedLayer, Target, TensorInfo, layers_of
from .quantized_linear import install_weight

_HOOK = "ct_decompress_hook"  # of compressed-tensors: decompresses the model at its first forward
_OWN = ("quantization_scheme", "quantization_status", "forward", "_is_hf_initialized")  # what it sets in a layer
_METHOD = "compressed-tensors"


def compressed_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Return the layers of a model that are still compressed, by name; none in other models.

    Raises:
        ValueError, NotImplementedError: As open_checkpoint, for a config that is not supported.
    """
    holder = next((module for module in model.modules() if _HOOK in vars(module)), None)
    config = getattr(getattr(holder, "config", None), "quantization_config", None)
    if holder is None or config is None:
        return {}
    entry: Any = config if isinstance(config, dict) else config.to_dict()
    if getattr(entry.get("quant_method"), "value", entry.get("quant_method")) != _METHOD:
        return {}
    # transformers' class may hold the fields of the file under this entry.
    entry = {**entry, **(entry.get("quantization_config") or {}), "quant_method": _METHOD}
    tensors = {
        name: TensorInfo(parameter.dtype, tuple(parameter.shape))
        for module_name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "quantization_scheme" in vars(module)
        for last, parameter in module._parameters.items()
        if parameter is not None and (name := f"{module_name}.{last}")
    }
    return layers_of(entry, tensors, "the model's config")


def take_over(model: nn.Module, layers: dict[str, QuantizedLayer]) -> list[str]:
    """Turn compressed layers into quantized or dense ones; return the names of the quantized layers.

    Raises:
        ValueError: For scales that are not finite; then no layer is changed.
    """
    if not layers:
        return []
    modules = {name: model.get_submodule(name) for name in layers}
    tensors = {
        name: {
            last: p.detach() for last, p in module._parameters.items() if last in layers[name].names and p is not None
        }
        for name, module in modules.items()
    }
    for name, layer in layers.items():
        if fault := layer.format.check(tensors[name], layer.n, layer.k):
            last, rule, got = fault
            raise ValueError(f"torch_infini.patch_model: {name}.{last} must {rule} ({layer.format.name}), got {got}")
    dtype = next(module.dtype for module in model.modules() if isinstance(module, PreTrainedModel))
    quantized = []
    for name, layer in layers.items():
        module = modules[name]
        assert isinstance(module, nn.Linear)
        activations: Literal["own", "int8"] = "int8" if layer.format.quantizes_x else "own"
        target = Target.of(dtype, next(module.parameters()).device, activations)
        weight = layer.format.weight(tensors.pop(name), layer.n, layer.k, target)._replace(activations=activations)
        for last in [last for last in module._parameters if last != "bias"]:
            del module._parameters[last]
        for attribute in _OWN:
            vars(module).pop(attribute, None)
        module.register_parameter("weight", nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False))
        if install_weight(module, weight, dtype):
            quantized.append(name)
    for module in model.modules():
        hook = vars(module).pop(_HOOK, None)
        if hook is not None:
            hook.remove()
    return quantized
