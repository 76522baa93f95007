"""is_additive: whether an MLP's result is the sum of what its inner columns give, by a small copy of the module.

Only then may ranks have some of these columns each: not, for example, where the activation depends on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..checks.probe import WIDTH, frozen, linear, probe_module, random
from ..checks.verify import distance, first

_INNER, _FIRST_PART = 24, 10  # inner columns, and how many the first of two parts has
_SIZES = (1.0, 8.0)  # of hidden states


def is_additive(module: nn.Module, inputs: Sequence[str], output: str, halves: int = 1) -> bool | None:
    """Return whether a module's result is the sum of the results of parts of its inner columns.

    Args:
        module: Called with hidden states [..., hidden]; it may be on meta.
        inputs: The names of its linear layers whose results are the inner columns.
        output: That of the layer whose inputs they are.
        halves: 2: the results of `inputs` are two halves, of which a part has the same columns.

    Returns:
        None if its forward does not run by itself.
    """

    def part(inner: slice, is_first: bool) -> nn.Module:
        modules: dict[str, nn.Module | None] = {}
        for seed, (name, child) in enumerate(module._modules.items()):
            if name in inputs:
                modules[name] = _cut(_layer(child, halves * _INNER, WIDTH, seed), inner, 0, halves)
            elif name == output:
                modules[name] = _cut(_layer(child, WIDTH, _INNER, seed), inner, 1, 1)
                if not is_first and modules[name]._parameters["bias"] is not None:  # type: ignore[union-attr]
                    modules[name]._parameters["bias"] = frozen(torch.zeros(WIDTH))  # type: ignore[union-attr]
            else:
                modules[name] = child
        own = {name: None if p is None else frozen(1 + random(*p.shape)) for name, p in module._parameters.items()}
        return probe_module(module, own, modules)

    slices = (slice(0, _INNER), slice(0, _FIRST_PART), slice(_FIRST_PART, _INNER))
    try:
        with torch.no_grad():
            parts = [part(inner, inner.start == 0) for inner in slices]
            for size in _SIZES:
                whole, *some = (first(one(size * random(2, 3, WIDTH))) for one in parts)
                if not distance(some[0] + some[1], whole) < 1e-4:
                    return False
    except Exception:  # a forward that needs other arguments or sizes may raise anything
        return None
    return True


def _layer(like: nn.Module | None, outputs: int, inputs: int, seed: int) -> nn.Linear:
    made = linear(outputs, inputs, seed)
    if like is not None and like._parameters.get("bias") is None:
        made._parameters["bias"] = None
    return made


def _cut(layer: nn.Linear, inner: slice, dim: int, halves: int) -> nn.Linear:
    """Leave a layer some of its inner columns: rows of its weight, or columns."""

    def of(tensor: Tensor, dim: int) -> nn.Parameter:
        parts = [half.narrow(dim, inner.start, inner.stop - inner.start) for half in tensor.chunk(halves, dim)]
        return frozen(torch.cat(parts, dim))

    layer._parameters["weight"] = of(layer.weight, dim)
    if dim == 0 and layer.bias is not None:
        layer._parameters["bias"] = of(layer.bias, 0)
    return layer
