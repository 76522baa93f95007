"""Linear layers of a patched model: products without a call of the module, and several of one input in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .conditions import is_plain, must_step_aside, unwatched, weights_refusal
from .quantised import JOINT, QuantisedLinear
from .swap import Patched, Refusal

linear = torch.ops.infini.linear.default
fused_linear = torch.ops.infini.fused_linear.default


def project(x: Tensor, module: nn.Module) -> Tensor:
    """A linear layer's product where nothing asks to step aside; of another kind, or watched, the layer is called."""
    if is_plain(module):
        parameters = module._parameters
        return linear(x, parameters["weight"], parameters["bias"])
    if type(module).forward is QuantisedLinear.forward and unwatched(module):
        return module.product(x)
    return module(x)


def project_together(x: Tensor, *modules: nn.Module) -> Tensor | None:
    """The products of x with two or three linear layers, side by side; None unless all are plain, or quantised alike.

    Plain weights stay where they are, each a parameter of its own: nothing is copied.
    """
    joint = modules[0].__dict__.get(JOINT)
    if joint is not None:
        return joint.product(x, modules)
    for module in modules:
        if not is_plain(module):
            return None
    own = [module._parameters for module in modules]
    a, b = own[0], own[1]
    if len(own) == 2:
        return fused_linear(x, a["weight"], b["weight"], None, a["bias"], b["bias"])
    c = own[2]
    return fused_linear(x, a["weight"], b["weight"], c["weight"], a["bias"], b["bias"], c["bias"])


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
        return linear(input, parameters["weight"], parameters["bias"])
