"""Attention whose forward calls a method of its own, `_attn(query, key, value, attention_mask)`, as GPT-J's does.

The method is replaced; it gets q, k and v after rotation and cache, so that the forward stays.
"""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks.conditions import needs_fallback, unsupported_placement
from ..checks.probe import HALF, probe_module, random, with_nan
from ..own_forward import code_of
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary, Unsupported
from .attention import causal_mask
from .interface import attend
from .paged import CURRENT, ScoreTerms

ARGUMENTS = ["self", "query", "key", "value", "attention_mask"]


class MethodPlan(NamedTuple):
    """How a module attends.

    Attributes:
        scale: The factor of the scores; None: the usual one.
        masks: Whether a buffer of the module masks keys too.
        window: How many keys, the newest, that buffer shows; 0: all. Read once, for a recorded step reads no values.
    """

    scale: float | None
    masks: bool
    window: int


class _Wanted(threading.local):
    """Whether the forward that runs on this thread returns attention weights, which the kernel never stores."""

    weights = False


WANTED = _Wanted()


def has_method(module: nn.Module) -> bool:
    """Return whether a module's class has such a method, and its forward calls it."""
    method, forward = getattr(type(module), "_attn", None), code_of(type(module).forward)
    if method is None or forward is None or "_attn" not in forward.co_names:
        return False
    return list(inspect.signature(method).parameters) == ARGUMENTS


class MethodAttention(Patched):
    """softmax(scale q k^T + mask) v, in the method that the module's own forward calls."""

    infini_ops = "attention"

    @classmethod
    def plans(cls, module: Any) -> Sequence[Any]:
        if reason := unsupported_placement(module):
            raise Unsupported(reason)
        if getattr(getattr(module, "config", None), "output_attentions", False):
            raise Unsupported("config.output_attentions is set, but the kernel stores no attention weights")
        mask = module._buffers.get("bias")
        masks = mask is not None and mask.dtype == torch.bool and mask.dim() == 4
        window = window_of(mask) if masks and not mask.is_meta else 0
        return [MethodPlan(scale, masks, window) for scale in (None, 1.0)]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        parts = {name: child for name, child in module._modules.items() if isinstance(child, nn.Dropout)}
        small: Any = probe_module(module, {}, parts)
        small._buffers = OrderedDict(module._buffers)
        sizes = [vars(module).get(name) for name in ("head_dim", "head_size")]
        size = next((size for size in sizes if isinstance(size, int)), 0)
        if not size:
            raise Unsupported("its head size is unknown")
        return Probe(small, lambda: cls.calls(size))

    @staticmethod
    def calls(size: int) -> Iterator[ProbeCall]:
        def call(
            when: str,
            length: int = 5,
            total: int = 5,
            factor: float = 1.0,
            dtype: torch.dtype = torch.float32,
            change: Callable[[Tensor], Tensor] = lambda x: x,
        ) -> ProbeCall:
            """Return a call with a mask, and scores of about `factor`."""

            def run(forward: Callable[..., Any]) -> Any:
                q = random(2, 3, length, size, seed=1) * (factor / size**0.5)
                k, v = random(2, 3, total, size, seed=2), change(random(2, 3, total, size, seed=3))
                q, k, v = (x.to(dtype, copy=True) for x in (q, k, v))
                mask = causal_mask(length, total, dtype).expand(2, 1, length, total)
                module: Any = forward.__self__  # type: ignore[attr-defined]
                return module._attn(q, k, v, mask)

            return ProbeCall(when, run, HALF.get(dtype, 1e-4), dtype=dtype)

        yield call("", factor=8.0)
        yield call("for 40 tokens", 40, 40)
        yield call("for a token after others", 1, 40, 4.0)
        for factor in (1e-2, 30.0):
            yield call(f"for scores of about {factor:g}", factor=factor)
        for dtype in HALF:
            yield call(f"in {str(dtype).removeprefix('torch.')}", dtype=dtype)
        yield call("for values with NaN", change=with_nan)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before, WANTED.weights = WANTED.weights, bool(kwargs.get("output_attentions"))
        try:
            return super().forward(*args, **kwargs)
        finally:
            WANTED.weights = before

    def _attn(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        plan: MethodPlan = self.__dict__[PLAN]
        scale = query.shape[-1] ** -0.5 if plan.scale is None else plan.scale
        q, k, v = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        if CURRENT.backend is not None:
            scores = ScoreTerms(scale, causal=plan.masks, window=plan.window)
            return CURRENT.backend.attend(self, q, k, v, attention_mask, scores).transpose(1, 2), None
        if needs_fallback(self, query) or self.training or WANTED.weights:
            return super()._attn(query, key, value, attention_mask)  # type: ignore[misc]
        mask = attention_mask
        if plan.masks:
            length, total = q.shape[1], k.shape[1]
            seen: Tensor = self._buffers["bias"][:, :, total - length : total, :total]
            least = torch.finfo(value.dtype).min
            mask = seen if mask is None else seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, least)
        return attend(q, k, v, mask, scale, False).transpose(1, 2), None


def window_of(mask: Tensor) -> int:
    """Return how many keys, the newest, a buffer [1, 1, positions, positions] shows to the last query; 0: all."""
    seen = mask[0, 0, -1]
    count = int(seen.sum())
    return 0 if count == len(seen) else count
