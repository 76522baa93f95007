"""RMSNorm of a patched model, alone and with the residual addition before it.

Which rounding a model has is found by numbers (verify.py); the plan is its number in torch.ops.infini.rms_norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.rms_norm import ROUNDINGS
from .conditions import dense_last, must_step_aside, unwatched, weights_refusal
from .stand_in import LENGTHS, SIZES, norm_twin, on, random, tokens, with_nan
from .swap import FORWARD, Call, Patched, Probe, Refusal, Rotary

rms_norm = torch.ops.infini.rms_norm.default
rms_norm_ = torch.ops.infini.rms_norm_.default
add_rms_norm = torch.ops.infini.add_rms_norm.default

EPS_NAMES = ("variance_epsilon", "eps")


class NormPlan(NamedTuple):
    """The attribute that holds eps, and where the value is rounded."""

    eps: str
    rounding: int


def eps_name(module: nn.Module) -> str | None:
    """The attribute with the number under the root; None for a module that is not built like an RMSNorm."""
    if module._modules or list(module._parameters) != ["weight"] or isinstance(module, nn.Embedding | nn.Linear):
        return None
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1:
        return None
    return next((name for name in EPS_NAMES if isinstance(vars(module).get(name), float)), None)


def normalise(x: Tensor, module: nn.Module) -> Tensor:
    """A patched norm's result, without a call of the module."""
    plan = module.__dict__["_infini_plan"]
    return rms_norm(x, module._parameters["weight"], module.__dict__[plan.eps], plan.rounding)


def normalise_(x: Tensor, module: nn.Module) -> None:
    """The same in place."""
    plan = module.__dict__["_infini_plan"]
    rms_norm_(x, module._parameters["weight"], module.__dict__[plan.eps], plan.rounding)


def add_and_normalise(x: Tensor, residual: Tensor, module: nn.Module) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual) of a patched norm."""
    plan = module.__dict__["_infini_plan"]
    return add_rms_norm(x, residual, module._parameters["weight"], module.__dict__[plan.eps], plan.rounding)


def is_served(module: nn.Module | None) -> bool:
    """Whether the module is a patched norm that may be computed without calling it."""
    return module is not None and type(module).forward is RMSNorm.forward and unwatched(module)


class Normed:
    """What a layer already knows of its result: the norm of it that the next module asks for (layer.py)."""

    __slots__ = ("norm", "value", "version")

    def __init__(self, norm: nn.Module, value: Tensor, version: int | None) -> None:
        self.norm, self.value, self.version = norm, value, version


def version_of(x: Tensor) -> int | None:
    """How often x was written to; inference tensors do not count."""
    return None if x.is_inference() else x._version


def attach(x: Tensor, norm: nn.Module, value: Tensor) -> None:
    """Remember the norm of x with x itself."""
    x._infini_normed = Normed(norm, value, version_of(x))  # type: ignore[attr-defined]


def attached(x: Tensor, norm: nn.Module) -> Tensor | None:
    """The norm of x, if it was computed with x and x was not written to since."""
    known: Normed | None = getattr(x, "_infini_normed", None)
    if known is None or known.norm is not norm or known.version != version_of(x):
        return None
    return known.value


class RMSNorm(Patched):
    """y = x / sqrt(mean(x^2) + eps) times weight (or 1 + weight), rounded where the original rounds."""

    infini_ops = "rms_norm"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        name = eps_name(module)
        if name is None:
            raise Refusal("it is not built like an RMSNorm (one weight with one dimension, and eps)")
        if reason := weights_refusal(module):
            raise Refusal(reason)
        return [NormPlan(name, rounding) for rounding in (ROUNDINGS["llama"], ROUNDINGS["once"], ROUNDINGS["gemma"])]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        small = norm_twin(module, 0)
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[Call]:
        size = small._parameters["weight"].numel()
        # In bfloat16, where the orders of rounding differ; the order of the sum may differ, and nothing else.
        rows = max(6, 8192 // size)  # many, so that one that is rounded the other way by chance weighs little
        yield Call("", on(random(rows, size), torch.bfloat16), 1e-3, dtype=torch.bfloat16)
        for length in (*LENGTHS, 3):
            yield Call(f"for {tokens(length)}", on(random(1, length, size)), 1e-5)
        few = random(2, 3, size)
        for factor in (1e-3, *SIZES):  # the square of the first is about eps
            yield Call(f"for numbers of about {factor:g}", on(factor * few), 1e-5)
        yield Call("for numbers of about 30 in float16", on(30 * few, torch.float16), 2e-3, dtype=torch.float16)
        yield Call("for numbers of about 10000 in bfloat16", on(1e4 * few, torch.bfloat16), 1e-2, dtype=torch.bfloat16)
        yield Call("for hidden states with NaN", on(with_nan(few)), 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        if must_step_aside(self, x):
            shared = vars(self).get(FORWARD)  # adds up the ranks' gradients
            return super().forward(x) if shared is None else shared(x)
        known = None if torch.compiler.is_compiling() else attached(x, self)
        return normalise(dense_last(x), self) if known is None else known
