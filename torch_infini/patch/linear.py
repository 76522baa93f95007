"""Linear layers of a patched model: products without a module call, and several products of one input in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .conditions import dense_last, is_plain, needs_fallback, unsupported_weights, unwatched
from .quantized_linear import FUSED, QuantizedLinear
from .sharded import ShardedLinear
from .shares import Share
from .swap import PLAN, Patched, Unsupported

linear = torch.ops.infini.linear.default
fused_linear = torch.ops.infini.fused_linear.default


def product(x: Tensor, module: Any) -> Tensor | None:
    """Compute a linear layer's product without calling it; None for a layer with hooks or of another class."""
    if is_plain(module):
        parameters = module._parameters
        return linear(x, parameters["weight"], parameters["bias"])
    if type(module).forward in (QuantizedLinear.forward, ShardedLinear.forward) and unwatched(module):
        own: Tensor = module.product(x)
        return own
    return None


def project(x: Tensor, module: Any) -> Tensor:
    """Compute a linear layer's product in a forward without fallback."""
    y = product(x, module)
    return module(x) if y is None else y


def project_to_own(x: Tensor, module: Any) -> Tensor:
    """Compute the same into memory that no hook has seen and the caller may write."""
    y = product(x, module)
    return module(x).clone(memory_format=torch.contiguous_format) if y is None else y


def project_together(x: Tensor, *modules: Any) -> Tensor | None:
    """Compute the products of x with two or three linear layers, concatenated by columns.

    Returns None unless all are plain, column-parallel shards, or quantized alike. Weights are not copied.
    """
    fused = modules[0].__dict__.get(FUSED)
    if fused is not None:
        return fused.product(x, modules)
    own = []
    for module in modules:
        if is_plain(module):
            own.append((module._parameters["weight"], module._parameters["bias"]))
        elif multiplies_apart(module):
            own.append(module.own())
        else:
            return None
    (a, of_a), (b, of_b) = own[0], own[1]
    if len(own) == 2:
        return fused_linear(x, a, b, None, of_a, of_b)
    c, of_c = own[2]
    return fused_linear(x, a, b, c, of_a, of_b, of_c)


def multiplies_apart(module: nn.Module) -> bool:
    """Return whether the layer is sharded and each rank keeps its own columns."""
    if type(module).forward is not ShardedLinear.forward or not unwatched(module):
        return False
    share: Share = module.__dict__[PLAN]
    return share.apart


class Linear(Patched):
    """A linear layer outside attention and MLP, such as lm_head."""

    infini_ops = "linear"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if type(module) is not nn.Linear:
            raise Unsupported("it is not a torch.nn.Linear")
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        return [None]

    def forward(self, input: Tensor) -> Tensor:
        if needs_fallback(self, input):
            return super().forward(input)
        parameters = self._parameters
        return linear(dense_last(input), parameters["weight"], parameters["bias"])
