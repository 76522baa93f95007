"""Linear layers of a patched model: products without a call of the module, and several of one input in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .conditions import dense_last, is_plain, must_step_aside, unwatched, weights_refusal
from .quantised import JOINT, QuantisedLinear
from .sharded import ShardedLinear
from .shares import Share
from .swap import PLAN, Patched, Refusal

linear = torch.ops.infini.linear.default
fused_linear = torch.ops.infini.fused_linear.default


def project(x: Tensor, module: nn.Module) -> Tensor:
    """A linear layer's product where nothing asks to step aside; of another kind, or watched, the layer is called."""
    if is_plain(module):
        parameters = module._parameters
        return linear(x, parameters["weight"], parameters["bias"])
    if type(module).forward in (QuantisedLinear.forward, ShardedLinear.forward) and unwatched(module):
        return module.product(x)
    return module(x)


def project_together(x: Tensor, *modules: nn.Module) -> Tensor | None:
    """The products of x with two or three linear layers, side by side; None unless all are plain, this
    rank's rows, or quantised alike.

    Plain weights stay where they are, each a parameter of its own: nothing is copied.
    """
    joint = modules[0].__dict__.get(JOINT)
    if joint is not None:
        return joint.product(x, modules)
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
    """Whether the layer is one that ranks share, and each rank keeps what it computes."""
    if type(module).forward is not ShardedLinear.forward or not unwatched(module):
        return False
    share: Share = module.__dict__[PLAN]
    return share.apart


class Linear(Patched):
    """A linear layer that is called by itself, such as lm_head."""

    infini_ops = "linear"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if type(module) is not nn.Linear:
            raise Refusal("it is not a torch.nn.Linear")
        if reason := weights_refusal(module):
            raise Refusal(reason)
        return [None]

    def forward(self, input: Tensor) -> Tensor:
        if must_step_aside(self, input):
            return super().forward(input)
        parameters = self._parameters
        return linear(dense_last(input), parameters["weight"], parameters["bias"])
