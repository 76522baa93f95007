"""Products with a vector of a patched model: y = x * weight, also of a module with more parts than its forward uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checks.conditions import needs_fallback, unsupported_weights
from ..checks.probe import HALF, PROBE_SEED, SIZES, call_with, frozen, probe_module, random, with_nan
from ..own_forward import code_of
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary, Unsupported

mul = torch.ops.infini.mul.default


def is_scale(module: nn.Module) -> bool:
    """Return whether the module's only parameter is a vector, and its forward takes one tensor."""
    code = code_of(type(module).forward)
    parameters = [p for p in module._parameters.values() if p is not None]
    return code is not None and code.co_argcount == 2 and len(parameters) == 1 and parameters[0].dim() == 1


class Scale(Patched):
    """y = x * weight; the plan is the weight's name."""

    infini_ops = "mul"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if not is_scale(module):
            raise Unsupported("it is not built like a product with a vector")
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        return [next(name for name, parameter in module._parameters.items() if parameter is not None)]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        name: str = cls.plans(module)[0]
        small = probe_module(module, {name: frozen(random(module.get_parameter(name).numel()))})
        vars(small)[PROBE_SEED] = 0
        return Probe(small, lambda: cls.calls(small, name))

    @staticmethod
    def calls(small: nn.Module, name: str) -> Iterator[ProbeCall]:
        few = random(2, 3, small.get_parameter(name).numel())
        for size in (1.0, *SIZES):
            yield ProbeCall(f"for numbers of about {size:g}" if size != 1 else "", call_with(size * few), 1e-6)
        for dtype in HALF:
            given = f"in {str(dtype).removeprefix('torch.')}"
            yield ProbeCall(given, call_with(few, dtype), HALF[dtype], dtype=dtype)
        yield ProbeCall("for hidden states with NaN", call_with(with_nan(few)), 1e-6)

    def forward(self, x: Tensor) -> Tensor:
        weight = self._parameters[self.__dict__[PLAN]]
        if needs_fallback(self, x) or x.dtype != weight.dtype:
            original: Tensor = super().forward(x)
            return original
        return mul(x, weight)
