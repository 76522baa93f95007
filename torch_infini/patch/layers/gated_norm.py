"""RMSNorm times a gate, as linear attention and state-space layers have it: rms_norm(x) * silu(gate)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checks.conditions import dense_last, needs_fallback
from ..checks.probe import LENGTHS, SIZES, norm_probe, random, tokens, weight_of, with_nan
from ..swap import Patched, Probe, ProbeCall, Rotary
from .norm import RMSNorm, eps_name, normalize

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
