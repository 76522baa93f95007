"""LayerNorm of a patched model: torch's, and those of models that have a class of their own.

What it has (weight, bias) is read off the module; whether 1 is added to the weight is found numerically.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks.conditions import dense_last, needs_fallback, unsupported_weights
from ..checks.probe import LENGTHS, SIZES, call_with, frozen, probe_module, random, tokens, with_nan
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary, Unsupported
from .norm import EPS_NAMES

layer_norm = torch.ops.infini.layer_norm.default
FIXED_EPS = 1e-5  # of classes that have it as a number in their forward


class LayerNormPlan(NamedTuple):
    """Attribute that holds eps (empty: FIXED_EPS), and whether 1 is added to the weight."""

    eps: str
    adds_one: bool


def is_layer_norm(module: nn.Module) -> bool:
    """Return whether the module may be a LayerNorm over the last dimension, by its name and parameters."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    return (
        "LayerNorm" in type(module).__name__
        and "RMS" not in type(module).__name__
        and not module._modules
        and not module._buffers
        and names in ([], ["weight"], ["weight", "bias"])
        and all(parameter.dim() == 1 for parameter in module._parameters.values() if parameter is not None)
        and columns(module) > 0
    )


def columns(module: nn.Module) -> int:
    """Return how many columns are normalized; 0 if that is not known, or they are several dimensions."""
    shape = vars(module).get("normalized_shape")
    if shape is None:
        weight = module._parameters.get("weight")
        return 0 if weight is None else weight.numel()
    return int(shape[0]) if len(shape) == 1 else 0


class LayerNorm(Patched):
    """y = (x - mean) / sqrt(var + eps) times weight (or 1 + weight, or nothing), plus bias; rounded once."""

    infini_ops = "layer_norm"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if not is_layer_norm(module):
            raise Unsupported("it is not built like a LayerNorm (weight and bias of one dimension, or none)")
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        eps = next((name for name in EPS_NAMES if isinstance(vars(module).get(name), float)), "")
        has_weight = module._parameters.get("weight") is not None
        return [LayerNormPlan(eps, False), *([LayerNormPlan(eps, True)] if has_weight else [])]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        size = columns(module)
        parameters = {
            name: None if value is None else frozen((1 if name == "weight" else 0) + random(size, seed=seed) / 4)
            for seed, (name, value) in enumerate(module._parameters.items())
        }
        small = probe_module(module, parameters)
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[ProbeCall]:
        size = columns(small)
        rows = max(6, 8192 // size)
        yield ProbeCall("", call_with(3 + random(rows, size)), 1e-5)
        for length in (*LENGTHS, 3):
            yield ProbeCall(f"for {tokens(length)}", call_with(random(1, length, size)), 1e-5)
        few = random(2, 3, size)
        for factor in (1e-3, *SIZES):  # the square of the first is about eps
            yield ProbeCall(f"for numbers of about {factor:g}", call_with(factor * few), 1e-5)
        # In half types the original may round before the weight is multiplied, where the op rounds once.
        for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
            name = str(dtype).removeprefix("torch.")
            yield ProbeCall(f"in {name}", call_with(30 * few, dtype), tolerance, dtype=dtype)
        yield ProbeCall("for hidden states with NaN", call_with(with_nan(few)), 1e-5)

    def forward(self, input: Tensor) -> Tensor:
        if needs_fallback(self, input):
            return super().forward(input)
        plan: LayerNormPlan = self.__dict__[PLAN]
        parameters = self._parameters
        weight = parameters["weight"] + 1 if plan.adds_one else parameters.get("weight")
        return layer_norm(dense_last(input), weight, parameters.get("bias"), self.eps_value)

    @property
    def eps_value(self) -> float:
        name: str = self.__dict__[PLAN].eps
        return float(self.__dict__[name]) if name else FIXED_EPS
