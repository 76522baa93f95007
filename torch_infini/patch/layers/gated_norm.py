"""RMSNorm with a gate, as linear attention and state-space layers have it: after the norm, or before it, in groups."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks.conditions import dense_last, needs_fallback
from ..checks.probe import LENGTHS, SIZES, norm_probe, random, tokens, weight_of, with_nan
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary
from .norm import RMSNorm, eps_name, normalize, ones

rms_norm = torch.ops.infini.rms_norm.default
swiglu = torch.ops.infini.swiglu.default


def is_gated_norm(module: nn.Module) -> bool:
    """Return whether the module is built like an RMSNorm, and its forward takes a gate too."""
    return eps_name(module) is not None and list(inspect.signature(type(module).forward).parameters)[2:] == ["gate"]


class GatedNorm(Patched):
    """y = x / sqrt(mean(x^2) + eps) * weight * silu(gate), rounded where the original rounds."""

    infini_ops = "rms_norm, swiglu"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        return RMSNorm.plans(module)

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        small = norm_probe(module, 0)
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[ProbeCall]:
        size = weight_of(small).numel()

        def call(
            when: str, x: Tensor, tolerance: float, dtype: torch.dtype = torch.float32, factor: float = 1.0
        ) -> ProbeCall:
            """Return a call with x and a gate of its shape, times `factor`."""
            gate = factor * random(*x.shape, seed=3)

            def run(forward: Callable[..., Any]) -> Any:
                return forward(x.to(dtype, copy=True), gate.to(dtype, copy=True))

            return ProbeCall(when, run, tolerance, dtype=dtype)

        rows = max(6, 8192 // size)
        # In bfloat16, where the rounding modes differ; the gate's product may be rounded once more.
        yield call("", random(rows, size), 8e-3, torch.bfloat16)
        for length in LENGTHS:
            yield call(f"for {tokens(length)}", random(1, length, size), 1e-5)
        few = random(2, 3, size)
        for factor in (1e-3, *SIZES):
            yield call(f"for numbers of about {factor:g}", factor * few, 1e-5)
            yield call(f"for gates of about {factor:g}", few, 1e-5, factor=factor)
        yield call("for numbers of about 30 in float16", 30 * few, 2e-3, torch.float16)
        yield call("for hidden states with NaN", with_nan(few), 1e-5)

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None or needs_fallback(self, hidden_states) or needs_fallback(self, gate):
            return super().forward(hidden_states, gate)
        if gate.dtype != hidden_states.dtype:
            return super().forward(hidden_states, gate)
        return swiglu(dense_last(gate), normalize(dense_last(hidden_states), self))


class GroupedGatePlan(NamedTuple):
    """How a norm with a gate in groups computes.

    Attributes:
        eps: The attribute that holds eps.
        gate_first: Whether the norm is of x * silu(gate), not of x alone.
        weight_last: Whether x is rounded to its dtype before it is multiplied by the weight.
    """

    eps: str
    gate_first: bool
    weight_last: bool


class GroupedGatedNorm(GatedNorm):
    """The norm of each group of columns of x * silu(gate), as in Mamba-2, or that norm times silu(gate); in float32."""

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        eps = RMSNorm.plans(module)[0].eps
        return [GroupedGatePlan(eps, gate_first, last) for gate_first in (True, False) for last in (True, False)]

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None or needs_fallback(self, hidden_states) or needs_fallback(self, gate):
            return super(GatedNorm, self).forward(hidden_states, gate)
        plan: GroupedGatePlan = self.__dict__[PLAN]
        weight, groups = weight_of(self), gate_groups(self)
        x, factor = dense_last(hidden_states.float()), dense_last(gate.float())
        if plan.gate_first:
            x = swiglu(factor, x)
        size = weight.numel() // groups
        compiling = torch.compiler.is_compiling()
        one = x.new_ones(size) if compiling else ones(size, torch.float32, x.device)
        y = rms_norm(x.unflatten(-1, (groups, size)), one, self.__dict__[plan.eps], 0).flatten(-2)
        if plan.weight_last:
            y = weight * y.to(hidden_states.dtype)
            return y if plan.gate_first else (y * torch.nn.functional.silu(factor)).to(hidden_states.dtype)
        y = weight * y
        return (y if plan.gate_first else swiglu(factor, y)).to(hidden_states.dtype)


def gate_groups(module: nn.Module) -> int:
    """Return how many groups of columns a norm has, by its attribute group_size or n_groups."""
    own, columns = vars(module), weight_of(module).numel()
    size, count = own.get("group_size"), own.get("n_groups", 1)
    if type(size) is int and size > 0 and columns % size == 0:
        return max(columns // size, 1)
    return count if type(count) is int and count > 0 and columns % count == 0 else 1
