"""Small modules with random weights that stand for the ones of a model, so that a formula can be tried out.

Real weights would not do: they may be large, all alike (norms of an untrained model), quantised, or not loaded yet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .swap import FORWARD, Parameters

WIDTH = 16  # of hidden states in probes of modules that do not depend on it
LENGTHS = (1, 40)  # of sequences, beside the few tokens of most calls
SIZES = (1e-2, 30.0, 1e4)  # of numbers, beside those of about 1: formulas may clamp, or leave small ones out
# Tolerances where each step is rounded to 8 or 11 bits. What they are to find are branches on the dtype.
HALF = {torch.bfloat16: 0.05, torch.float16: 0.01}
STAND_IN = "_infini_stand_in"  # attribute of modules made here: the seed of their weights


@lru_cache(256)  # emptied when a model is patched
def random(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed float32 numbers, the same at every call; not to be written to."""
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def frozen(x: Tensor) -> nn.Parameter:
    return nn.Parameter(x, requires_grad=False)


@lru_cache(64)
def projection(outputs: int, inputs: int, seed: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias of a linear layer whose results have a spread of about 1."""
    return frozen(random(outputs, inputs, seed=seed) / inputs**0.5), frozen(random(outputs, seed=seed) / 4)


def linear(outputs: int, inputs: int, seed: int) -> nn.Linear:
    """A plain linear layer in float32."""
    module = nn.Linear(inputs, outputs, device="meta")
    module.weight, module.bias = projection(outputs, inputs, seed)
    vars(module)[STAND_IN] = seed
    return module


def scaled(module: nn.Module, from_x: float | Tensor, of_y: float | Tensor) -> dict[str, Tensor]:
    """Parameters by which a linear layer's results are `of_y` times as large, and x is `from_x / of_y` times as large.

    Args:
        module: What `linear` made.
        from_x: Multiplies the weight: a number, or one for each of its rows.
        of_y: Multiplies the bias, likewise.
    """
    rows = from_x.unsqueeze(1) if isinstance(from_x, Tensor) else from_x
    return {"weight": module._parameters["weight"] * rows, "bias": module._parameters["bias"] * of_y}


def forget() -> None:
    """Free what random and projection remember."""
    projection.cache_clear()
    random.cache_clear()


@contextmanager
def having(clone: nn.Module, parameters: Parameters, dtype: torch.dtype) -> Iterator[None]:
    """Give a twin and its submodules these parameters, and all that they have in this dtype."""
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


def twin(
    module: nn.Module, parameters: dict[str, Any] | None = None, modules: dict[str, nn.Module] | None = None
) -> nn.Module:
    """A module of the same class and with the same attributes, but these parameters and submodules, and no hooks."""
    clone = type(module).__new__(type(module))
    nn.Module.__init__(clone)  # its hooks, empty
    empty = dict(vars(clone))
    vars(clone).update({name: own(value) for name, value in vars(module).items() if name not in empty})
    vars(clone).pop("forward", None)
    vars(clone).pop(FORWARD, None)
    clone.training = False
    clone._parameters = OrderedDict(parameters or {})  # type: ignore[assignment]
    clone._modules = OrderedDict(modules or {})  # type: ignore[assignment]
    return clone


def own(value: Any) -> Any:
    """A copy of what a forward may write to; what it holds stays the original's."""
    if isinstance(value, Tensor) and not value.is_meta:
        return value.detach().clone()
    return copy(value) if type(value) in (list, dict, set) else value


def norm_twin(norm: nn.Module, seed: int, size: int | None = None) -> nn.Module:
    """A twin of a norm in float32, of another size if one is given."""
    weight = 1 + random(size or norm._parameters["weight"].numel(), seed=seed) / 4
    clone = twin(norm, {"weight": nn.Parameter(weight, requires_grad=False)})
    vars(clone)[STAND_IN] = seed
    return clone


def on(x: Tensor, dtype: torch.dtype = torch.float32) -> Callable[[Callable[..., Any]], Any]:
    """A call with x alone; with a copy, as a forward may write to it."""
    return lambda forward: forward(x.to(dtype, copy=True))


def with_nan(x: Tensor) -> Tensor:
    """x [B, S, n] whose last sequence has NaN in its first token, which all others see."""
    x = x.clone()
    x[-1, 0, 1] = torch.nan
    return x


def tokens(length: int) -> str:
    return f"{length} token{'s' * (length != 1)}"
