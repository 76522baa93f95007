"""Small modules with random weights that stand for the ones of a model, so that a formula can be tried out.

Real weights would not do: they may be large, all alike (norms of an untrained model), quantised, or not loaded yet.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from .swap import FORWARD

WIDTH = 16  # of hidden states in probes of modules that do not depend on it


def random(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed float32 numbers, the same at every call."""
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, device="cpu")


def linear(outputs: int, inputs: int, bias: bool, seed: int) -> nn.Linear:
    """A plain linear layer in float32 whose results have a spread of about 1."""
    module = nn.Linear(inputs, outputs, bias=bias, device="meta")
    module.weight = nn.Parameter(random(outputs, inputs, seed=seed) / inputs**0.5, requires_grad=False)
    if bias:
        module.bias = nn.Parameter(random(outputs, seed=seed) / 4, requires_grad=False)
    return module


def twin(
    module: nn.Module, parameters: dict[str, Any] | None = None, modules: dict[str, nn.Module] | None = None
) -> nn.Module:
    """A module of the same class and with the same attributes, but these parameters and submodules, and no hooks."""
    copy = type(module).__new__(type(module))
    nn.Module.__init__(copy)  # its hooks, empty
    empty = dict(vars(copy))
    vars(copy).update({name: value for name, value in vars(module).items() if name not in empty})
    vars(copy).pop("forward", None)
    vars(copy).pop(FORWARD, None)
    copy.training = False
    copy._parameters = OrderedDict(parameters or {})  # type: ignore[assignment]
    copy._modules = OrderedDict(modules or {})  # type: ignore[assignment]
    return copy


def norm_twin(norm: nn.Module, seed: int, size: int | None = None) -> nn.Module:
    """A twin of a norm in float32, of another size if one is given."""
    weight = 1 + random(size or norm._parameters["weight"].numel(), seed=seed) / 4
    return twin(norm, {"weight": nn.Parameter(weight, requires_grad=False)})
