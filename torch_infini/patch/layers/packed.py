"""Takes over linear layers of AutoAWQ, AutoGPTQ and GPTQModel, whose integers are packed in int32 words.

The libraries are not needed: a layer is known by its tensors and by the config. Its own product of a few rows must
agree with the integers read here, because some libraries store other zero points in memory than in the file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoints import QuantizedLayer, Target, TensorInfo, layers_of
from ..checks.conditions import unhooked
from .quantized_linear import install_weight

_METHODS = ("awq", "gptq")
_MARKS = ("qweight", "qzeros", "scales")
_ROWS = 3  # of the product that is compared
# The library may compute in float16; zero points that are off by one change a product by a tenth and more.
_TOLERANCE = 0.02
_WHERE = "torch_infini.patch_model"
_logger = logging.getLogger("torch_infini")


def packed_layers(model: nn.Module) -> dict[str, QuantizedLayer]:
    """Return the packed layers of a model, by name; none in other models.

    Raises:
        ValueError, NotImplementedError: As open_checkpoint, for a config that is not supported.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if not isinstance(module, nn.Linear) and all(last in tensors_of(module) for last in _MARKS)
    }
    configs = (getattr(getattr(one, "config", None), "quantization_config", None) for one in model.modules())
    config = next((one for one in configs if one is not None), None)
    if not modules or config is None:
        return {}
    entry: dict[str, Any] = dict(config if isinstance(config, Mapping) else config.to_dict())
    method = getattr(entry.get("quant_method"), "value", entry.get("quant_method"))
    if method not in _METHODS:
        return {}
    tensors = {
        f"{name}.{last}": TensorInfo(tensor.dtype, tuple(tensor.shape))
        for name, module in modules.items()
        for last, tensor in tensors_of(module).items()
    }
    return layers_of({**entry, "quant_method": method}, tensors, "the model's config")


def take_over_packed(model: nn.Module, layers: Mapping[str, QuantizedLayer]) -> list[str]:
    """Replace packed layers by quantized or dense ones; return the names of the quantized layers.

    A layer that computes something else than its integers say, that has hooks or that cannot be called here stays as it
    is, and a warning names the reason.

    Raises:
        ValueError: For scales that are not finite, or groups that do not exist; then no layer is changed.
    """
    if not layers:
        return []
    dtype = next(module.dtype for module in model.modules() if isinstance(module, PreTrainedModel))
    variants = {name: list(valid_variants(name, model.get_submodule(name), layer)) for name, layer in layers.items()}
    quantized = []
    for name, readings in variants.items():
        module = model.get_submodule(name)
        layer, reason = agreeing(module, readings, dtype)
        if layer is None:
            _logger.warning("%s: %s stays a %s: %s", _WHERE, name, type(module).__name__, reason)
            continue
        tensors = tensors_of(module)
        target = Target.of(dtype, tensors["qweight"].device, "own")
        weight = layer.format.weight(tensors, layer.n, layer.k, target)
        linear = nn.Linear(layer.k, layer.n, False, "meta", dtype).train(module.training)
        linear.weight = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        if (bias := tensors.get("bias")) is not None:
            linear.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        is_quantized = install_weight(linear, weight, dtype)
        model.set_submodule(name, linear)
        if is_quantized:
            quantized.append(name)
    return quantized


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module itself, by their names in it."""
    own = {**module._parameters, **module._buffers}
    return {last: tensor.detach() for last, tensor in own.items() if tensor is not None}


def valid_variants(name: str, module: nn.Module, layer: QuantizedLayer) -> Iterator[QuantizedLayer]:
    """Yield what the integers of a layer may mean: as the config says, and with zero points of GPTQ's other version.

    Raises:
        ValueError: If the tensors contradict every variant; for the first.
    """
    formats = [layer.format]
    if (version := getattr(layer.format, "version", None)) is not None:
        formats.append(replace(layer.format, version=3 - version))  # type: ignore[type-var]  # a GPTQ
    tensors = tensors_of(module)
    faults = [format.check(tensors, layer.n, layer.k) for format in formats]
    if all(faults) and faults[0] is not None:
        last, rule, got = faults[0]
        raise ValueError(f"{_WHERE}: {name}.{last} must {rule} ({layer.format.name}), got {got}")
    yield from (layer._replace(format=format) for format, fault in zip(formats, faults, strict=True) if not fault)


def agreeing(
    module: nn.Module, readings: list[QuantizedLayer], dtype: torch.dtype
) -> tuple[QuantizedLayer | None, str]:
    """Return the reading that computes what the module computes, or None and why there is none."""
    if not unhooked(module):
        return None, "it has hooks or a forward of its own"
    tensors = tensors_of(module)
    device = tensors["qweight"].device
    k = readings[0].k
    x = torch.randn(_ROWS, k, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    try:
        with torch.no_grad():
            found = module(x).double()
    except Exception as error:  # a library's own kernels may raise anything where they are missing
        return None, f"it cannot be called here: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    differences = []
    for layer in readings:
        expected = x.double() @ layer.format.dequantize(tensors, layer.n, layer.k).double().t()
        expected += tensors["bias"].double() if "bias" in tensors else 0
        if found.shape == expected.shape:
            difference = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
            if difference <= _TOLERANCE:
                return layer, ""
            differences.append(difference)
    if not differences:
        return None, f"its product has the shape {list(found.shape)}"
    return None, f"its product differs from that of its integers by {min(differences):.2g}"
