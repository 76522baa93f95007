"""A product with a weight for each expert, of rows that are sorted by expert: JetMoE's parallel experts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..checks.conditions import dense_last, needs_fallback, unsupported_weights
from ..checks.probe import HALF, PROBE_SEED, WIDTH, frozen, probe_module, random, with_nan
from ..swap import Patched, Probe, ProbeCall, Rotary, Unsupported
from .experts import resize

_SIZES = (2, 0, 3, 1)  # rows of the experts of a probe module
_OTHER = 24  # columns of its results

linear = torch.ops.infini.linear


class GroupedLinear(Patched):
    """The rows of x times the weight of their expert; the second argument has the number of rows of each."""

    infini_ops = "linear"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        return [None]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        experts, n, k = module.get_parameter("weight").shape
        columns = WIDTH if n == k else _OTHER
        weight = frozen(random(len(_SIZES), columns, WIDTH) / WIDTH**0.5)
        small = probe_module(module, {"weight": weight})
        vars(small)[PROBE_SEED] = 0
        resize(small, module, (experts, k, n), (len(_SIZES), WIDTH, columns))
        return Probe(small, cls.calls)

    @staticmethod
    def calls() -> Iterator[ProbeCall]:
        def call(when: str, x: Tensor, sizes: Sequence[int] = _SIZES, dtype: torch.dtype = torch.float32) -> ProbeCall:
            run = lambda forward: forward(x.to(dtype, copy=True), list(sizes))
            return ProbeCall(when, run, HALF.get(dtype, 1e-5), dtype=dtype)

        rows = random(sum(_SIZES), WIDTH)
        yield call("", rows)
        yield call("for rows of one expert", rows, (0, len(rows), 0, 0))
        for dtype in HALF:
            yield call(f"in {str(dtype).removeprefix('torch.')}", rows, dtype=dtype)
        yield call("for rows with NaN", with_nan(rows[None])[0])

    def forward(self, inputs: Tensor, expert_size: Any) -> Tensor:
        weight = self._parameters["weight"]
        fits = type(expert_size) is list and len(expert_size) == len(weight) and inputs.dim() == 2
        if not fits or sum(expert_size) != len(inputs) or needs_fallback(self, inputs):
            result: Tensor = super().forward(inputs, expert_size)
            return result
        x, first = dense_last(inputs), 0
        y = x.new_empty(len(x), weight.shape[1])
        for of_expert, size in zip(weight, expert_size, strict=True):
            if size:
                rows = slice(first, first + size)
                linear.out(x[rows], of_expert, None, out=y[rows])
                first += size
        return y


def is_grouped_linear(module: nn.Module) -> bool:
    """Return whether a module's only parameter is a weight [experts, n, k], and its forward takes rows and counts."""
    weight = module._parameters.get("weight")
    alone = len(module._parameters) == 1 and not module._modules
    takes_two = len(inspect.signature(type(module).forward).parameters) == 3  # and self
    return alone and weight is not None and weight.dim() == 3 and takes_two
