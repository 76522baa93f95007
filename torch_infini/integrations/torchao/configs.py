"""The configs that `torchao.quantize_` takes: which of this library's formats the weights of linear layers get."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from ... import weights
from .tensor import InfiniTensor


@dataclass
class InfiniInt8Config(AOBaseConfig):
    """int8 weights; with `format` one of the formats that serve "int8": the best of them on the layer's device.

    Example:
        >>> quantize_(model, InfiniInt8Config())
    """

    format: str = "int8"

    def __post_init__(self) -> None:
        _check(type(self).__name__, self.format, "int8")


@dataclass
class InfiniInt4Config(AOBaseConfig):
    """4-bit weights; with `format` one of the formats that serve "int4": the best of them on the layer's device.

    Example:
        >>> quantize_(model, InfiniInt4Config(), filter_fn=lambda module, name: "mlp" in name)
    """

    format: str = "int4"

    def __post_init__(self) -> None:
        _check(type(self).__name__, self.format, "int4")


def _check(name: str, format_name: str, serves: str) -> None:
    taken = [serves, *(one.exact or one.name for one in weights.FORMATS.values() if one.serves == serves)]
    if format_name not in taken:
        raise ValueError(f"{name}: format must be one of {', '.join(dict.fromkeys(taken))}, got {format_name!r}")


def _quantize(module: nn.Module, config: InfiniInt8Config | InfiniInt4Config) -> nn.Module:
    weight = InfiniTensor.quantized(module.weight, config.format)  # type: ignore[arg-type]
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


for _config in (InfiniInt8Config, InfiniInt4Config):
    register_quantize_module_handler(_config)(_quantize)
# Checkpoints name the class of a config; torchao looks for it in these modules.
ALLOWED_AO_MODULES.add(__name__)
