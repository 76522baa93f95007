"""Probe modules: small copies of a model's modules with random weights, on which the patched forward is checked.

The real weights are not suitable: they may be large, all equal (norms of an untrained model), quantized or not loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel_forward import FORWARD
from ..swap import Parameters

WIDTH = 16  # columns of hidden states in probe modules, where the model's number does not matter
LENGTHS = (1, 40)  # of sequences, in addition to the few tokens of most calls
SIZES = (1e-2, 30.0, 1e4)  # magnitudes in addition to 1: formulas may clamp, or drop small numbers
# Tolerances where each step is rounded to 8 or 11 bits. They only need to find branches on the dtype.
HALF = {torch.bfloat16: 0.05, torch.float16: 0.01}
PROBE_SEED = "_infini_probe_seed"  # attribute of modules created here: the seed of their weights


@lru_cache(256)  # emptied when a model is patched
def random(*shape: int, seed: int = 0) -> Tensor:
    """Return cached, normally distributed float32 numbers, the same at every call; do not write to them."""
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


@lru_cache(64)
def projection(outputs: int, inputs: int, seed: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return weight and bias of a linear layer with results of standard deviation about 1."""
    return frozen(random(outputs, inputs, seed=seed) / inputs**0.5), frozen(random(outputs, seed=seed) / 4)


def linear(outputs: int, inputs: int, seed: int) -> nn.Linear:
    module = nn.Linear(inputs, outputs, device="meta")
    module.weight, module.bias = projection(outputs, inputs, seed)
    vars(module)[PROBE_SEED] = seed
    return module


def scaled(module: nn.Module | None, weight_factor: float | Tensor, bias_factor: float | Tensor) -> dict[str, Tensor]:
    """Return parameters of a linear layer with scaled weight and bias.

    Args:
        module: A result of `linear`.
        weight_factor: Multiplies the weight: a number, or one for each row.
        bias_factor: Multiplies the bias, likewise.
    """
    assert isinstance(module, nn.Linear) and module.bias is not None
    rows = weight_factor.unsqueeze(1) if isinstance(weight_factor, Tensor) else weight_factor
    return {"weight": module.weight * rows, "bias": module.bias * bias_factor}


def clear_caches() -> None:
    """Free the results that random and projection cache."""
    projection.cache_clear()
    random.cache_clear()


@contextmanager
def with_parameters(clone: nn.Module, parameters: Parameters, dtype: torch.dtype) -> Iterator[None]:
    """Run the body with these parameters in a probe module and its submodules, all converted to dtype."""
    modules = {"": clone, **{name: child for name, child in clone._modules.items() if child is not None}}
    before = {name: dict(module._parameters) for name, module in modules.items()}
    try:
        for name, module in modules.items():
            for key, tensor in before[name].items():
                given = parameters.get(name, {}).get(key, tensor)
                if given is not None and given.is_floating_point():
                    module._parameters[key] = frozen(given.to(dtype))
        yield
    finally:
        for name, module in modules.items():
            module._parameters.update(before[name])


def probe_module(
    module: nn.Module, parameters: dict[str, Any] | None = None, modules: Mapping[str, nn.Module | None] | None = None
) -> nn.Module:
    """Return a module of the same class and attributes with these parameters and submodules, and without hooks."""
    clone = type(module).__new__(type(module))
    nn.Module.__init__(clone)  # its hooks, empty
    empty = dict(vars(clone))
    vars(clone).update({name: shallow_copy(value) for name, value in vars(module).items() if name not in empty})
    vars(clone).pop("forward", None)
    vars(clone).pop(FORWARD, None)
    clone.training = False
    clone._parameters = OrderedDict(parameters or {})
    clone._modules = OrderedDict(modules or {})
    return clone


def shallow_copy(value: Any) -> Any:
    """Copy a tensor or container that a forward may write to; the container's elements are shared."""
    if isinstance(value, Tensor) and not value.is_meta:
        return value.detach().clone()
    return copy(value) if type(value) in (list, dict, set) else value


def weight_of(module: nn.Module) -> Tensor:
    weight = module._parameters["weight"]
    assert weight is not None
    return weight


def norm_probe(norm: nn.Module, seed: int, size: int | None = None) -> nn.Module:
    """Return a probe module of a norm in float32, of another size if one is given."""
    weight = 1 + random(size or weight_of(norm).numel(), seed=seed) / 4
    clone = probe_module(norm, {"weight": nn.Parameter(weight, requires_grad=False)})
    vars(clone)[PROBE_SEED] = seed
    return clone


def call_with(x: Tensor, dtype: torch.dtype = torch.float32) -> Callable[[Callable[..., Any]], Any]:
    """Return a call with a copy of x as the only argument; a forward may write to it."""
    return lambda forward: forward(x.to(dtype, copy=True))


def with_nan(x: Tensor) -> Tensor:
    """Return x [B, S, n] with NaN in the first token of the last sequence, which all its other tokens attend to."""
    x = x.clone()
    x[-1, 0, 1] = torch.nan
    return x


def tokens(length: int) -> str:
    return f"{length} token{'s' * (length != 1)}"
