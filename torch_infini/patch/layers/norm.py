"""RMSNorm of a patched model, alone and fused with the residual addition before it.

The rounding mode of a model is determined numerically (verify.py); it is an argument of torch.ops.infini.rms_norm.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.rms_norm import ROUNDINGS
from ..checks.conditions import dense_last, needs_fallback, unhooked, unsupported_placement, unsupported_weights
from ..checks.probe import (
    LENGTHS,
    SIZES,
    WIDTH,
    call_with,
    norm_probe,
    probe_module,
    random,
    tokens,
    weight_of,
    with_nan,
)
from ..parallel_forward import FORWARD
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary, Unsupported

rms_norm = torch.ops.infini.rms_norm.default
rms_norm_ = torch.ops.infini.rms_norm_.default
add_rms_norm = torch.ops.infini.add_rms_norm.default

EPS_NAMES = ("variance_epsilon", "eps")


@lru_cache(64)
def ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of a norm that has none."""
    with torch.inference_mode(False):
        return torch.ones(size, dtype=dtype, device=device)


class NormPlan(NamedTuple):
    """Attribute that holds eps, and the rounding mode."""

    eps: str
    rounding: int


def eps_name(module: nn.Module) -> str | None:
    """Return the name of the attribute with eps; None for a module that is not built like an RMSNorm."""
    if module._modules or list(module._parameters) != ["weight"] or isinstance(module, nn.Embedding | nn.Linear):
        return None
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1:
        return None
    return next((name for name in EPS_NAMES if isinstance(vars(module).get(name), float)), None)


def is_weightless(module: nn.Module) -> bool:
    """Return whether a module may be an RMSNorm without a weight, whose columns only a call tells."""
    if "Norm" not in type(module).__name__ or module._modules or module._buffers:
        return False
    bare = all(parameter is None for parameter in module._parameters.values())
    bare = bare and len(vars(module).get("normalized_shape") or (0,)) == 1
    return bare and any(isinstance(vars(module).get(name), float) for name in EPS_NAMES)


def normalize(x: Tensor, module: nn.Module) -> Tensor:
    """Compute a patched norm without a module call."""
    plan = module.__dict__["_infini_plan"]
    return rms_norm(x, module._parameters["weight"], module.__dict__[plan.eps], plan.rounding)


def normalize_(x: Tensor, module: nn.Module) -> None:
    plan = module.__dict__["_infini_plan"]
    rms_norm_(x, module._parameters["weight"], module.__dict__[plan.eps], plan.rounding)


class NormTerms(NamedTuple):
    """The dicts with a patched norm's weight and eps, for a caller that adds and normalizes without a module call."""

    parameters: dict[str, Any]
    own: dict[str, Any]
    eps: str
    rounding: int


def is_wider(x: Tensor, module: nn.Module) -> bool:
    """Return whether x is float32 and the weight is not, as with Mamba's residual_in_fp32: no kernel takes that."""
    weight = module._parameters["weight"]
    return x.dtype is torch.float32 and weight is not None and weight.dtype is not torch.float32


def terms_of(module: nn.Module) -> NormTerms:
    plan: NormPlan = module.__dict__["_infini_plan"]
    return NormTerms(module._parameters, module.__dict__, *plan)


def is_served(module: nn.Module | None) -> bool:
    """Return whether the module is a patched norm that may be computed without calling it."""
    return module is not None and type(module).forward is RMSNorm.forward and unhooked(module)


class _Handover(threading.local):
    """A layer's result with the next norm already applied, for the module after it in a decoder's forward (loop.py).

    Outside of that forward anything may happen between two modules: weights change, hooks are added, tensors are
    written. Inference tensors are not handed over, because a write to one would not be noticed.

    Attributes:
        calls: The depth of nested decoder forwards on this thread.
        result: The layer's result; None if nothing is handed over.
        norm: The norm that follows.
        normed: The normalized result.
        version: The result's version counter at that time.
    """

    calls = 0
    result: Tensor | None = None
    norm: nn.Module | None = None
    normed: Tensor | None = None
    version = 0


HANDOVER = _Handover()


class RMSNorm(Patched):
    """y = x / sqrt(mean(x^2) + eps) times weight (or 1 + weight), rounded where the original rounds."""

    infini_ops = "rms_norm"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        name = eps_name(module)
        if name is None:
            raise Unsupported("it is not built like an RMSNorm (one weight with one dimension, and eps)")
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        return [NormPlan(name, rounding) for rounding in (ROUNDINGS["llama"], ROUNDINGS["once"], ROUNDINGS["gemma"])]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        small = norm_probe(module, 0)
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[ProbeCall]:
        size = weight_of(small).numel()
        # In bfloat16, where the rounding modes differ; otherwise only the order of the sum may differ.
        rows = max(6, 8192 // size)  # many, so that a single tie weighs little
        yield ProbeCall("", call_with(random(rows, size), torch.bfloat16), 1e-3, dtype=torch.bfloat16)
        for length in (*LENGTHS, 3):
            yield ProbeCall(f"for {tokens(length)}", call_with(random(1, length, size)), 1e-5)
        few = random(2, 3, size)
        for factor in (1e-3, *SIZES):  # the square of the first is about eps
            yield ProbeCall(f"for numbers of about {factor:g}", call_with(factor * few), 1e-5)
        yield ProbeCall(
            "for numbers of about 30 in float16", call_with(30 * few, torch.float16), 2e-3, dtype=torch.float16
        )
        yield ProbeCall(
            "for numbers of about 10000 in bfloat16", call_with(1e4 * few, torch.bfloat16), 1e-2, dtype=torch.bfloat16
        )
        yield ProbeCall("for hidden states with NaN", call_with(with_nan(few)), 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        if needs_fallback(self, x) or is_wider(x, self):
            shared = vars(self).get(FORWARD)  # all-reduces gradients
            return super().forward(x) if shared is None else shared(x)
        handed = HANDOVER
        if torch.compiler.is_compiling() or not (
            handed.result is x and handed.norm is self and handed.version == x._version
        ):
            return normalize(dense_last(x), self)
        normed, handed.result, handed.normed = handed.normed, None, None
        assert normed is not None
        return normed


class GroupedRMSNorm(RMSNorm):
    """RMSNorm of each of several groups of columns, with one weight for all."""

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if not groups(module):
            raise Unsupported("its columns are not a multiple of its group_size")
        return super().plans(module)

    def forward(self, x: Tensor) -> Tensor:
        if needs_fallback(self, x) or is_wider(x, self):
            original: Tensor = super(RMSNorm, self).forward(x)
            return original
        plan: NormPlan = self.__dict__[PLAN]
        count, eps = groups(self), self.__dict__[plan.eps]
        parts = zip(dense_last(x).chunk(count, -1), self._parameters["weight"].chunk(count), strict=True)
        return torch.cat([rms_norm(part, weight, eps, plan.rounding) for part, weight in parts], -1)


def groups(module: nn.Module) -> int:
    """Return how many groups of columns a norm has by its attribute group_size; 0 if it has one, or none is known."""
    size, weight = vars(module).get("group_size"), module._parameters.get("weight")
    if type(size) is not int or size <= 0 or weight is None or weight.numel() % size:
        return 0
    count = weight.numel() // size
    return count if count > 1 else 0


class WeightlessRMSNorm(Patched):
    """y = x / sqrt(mean(x^2) + eps), in float32, rounded once; the plan is the name of eps."""

    infini_ops = "rms_norm"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if not is_weightless(module):
            raise Unsupported("it is not built like an RMSNorm without a weight")
        if reason := unsupported_placement(module):
            raise Unsupported(reason)
        return [next(name for name in EPS_NAMES if isinstance(vars(module).get(name), float))]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        small = probe_module(module, dict.fromkeys(module._parameters))
        shape = vars(module).get("normalized_shape")  # torch's norm knows its columns
        return Probe(small, lambda: cls.calls((WIDTH, 33) if shape is None else shape))

    @staticmethod
    def calls(sizes: Sequence[int]) -> Iterator[ProbeCall]:
        for size in sizes:
            yield ProbeCall("", call_with(random(40, size)), 1e-5)
        size = sizes[0]
        few = random(2, 3, 4, size)
        for factor in (1e-3, *SIZES):  # the square of the first is about eps
            yield ProbeCall(f"for numbers of about {factor:g}", call_with(factor * few), 1e-5)
        # In half types the original may round the factor too.
        for dtype, tolerance in ((torch.bfloat16, 8e-3), (torch.float16, 1e-3)):
            name = str(dtype).removeprefix("torch.")
            yield ProbeCall(f"in {name}", call_with(random(512, size), dtype), tolerance, dtype=dtype)
        yield ProbeCall("for hidden states with NaN", call_with(with_nan(random(2, 3, size))), 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        if needs_fallback(self, x):
            original: Tensor = super().forward(x)
            return original
        size = x.shape[-1]
        weight = x.new_ones(size) if torch.compiler.is_compiling() else ones(size, x.dtype, x.device)
        eps: float = self.__dict__[self.__dict__[PLAN]]
        return rms_norm(dense_last(x), weight, eps, ROUNDINGS["once"])
