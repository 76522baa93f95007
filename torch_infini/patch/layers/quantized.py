"""What modules whose weights are stored in another form share: their base classes, and the read-only weight.

Quantized is the base of those with integer weights; packed_linear.py has the layer with exact ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from ...weights import Integers
from ..swap import PLAN, Patched

WRITE_ERROR = (
    "torch_infini: the weight of a layer with integer weights must not be written to: merge adapters before "
    "patch_model(weights=...)"
)


class StoragePlan(Protocol):
    """What the plan of every module with integer weights has."""

    @property
    def format(self) -> str: ...  # the name in torch_infini.weights.FORMATS

    @property
    def group(self) -> int: ...  # the size of its groups where the format has several; otherwise 0

    @property
    def dtype(self) -> torch.dtype: ...  # of the original weights, and of the module's input and output


def version_of(x: Tensor) -> int | None:
    """Return the version counter of x; None for inference tensors, which have none."""
    return None if x.is_inference() else x._version


class ReadOnly(Tensor):
    """A dequantized weight. Writes, as by merging an adapter, raise because they would be lost; results are plain."""

    error = WRITE_ERROR

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            weights = [x for x in args if isinstance(x, cls)]
            before = [version_of(x) for x in weights]
            result = func(*args, **(kwargs or {}))
            if before != [version_of(x) for x in weights]:
                raise ValueError(cls.error)
        return result

    @property
    def data(self) -> Tensor:
        return self.detach().as_subclass(type(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        raise ValueError(self.error)


def shown(weight: Tensor) -> Tensor:
    """Return a dequantized weight as callers see it."""
    return weight if torch.compiler.is_compiling() else weight.as_subclass(ReadOnly)


class Reformatted(Patched):
    """Base of the modules that store weights in another form than as parameters."""

    unsaved: ClassVar[tuple[str, ...]] = ()  # buffers that are in no file, because they are made from the weights

    @property
    def freed(self) -> tuple[str, ...]:
        """The names of the original's parameters that it no longer has."""
        raise NotImplementedError

    @property
    def weight_count(self) -> int:
        """The number of these weights on this rank."""
        raise NotImplementedError

    @property
    def weight_bytes(self) -> int:
        """The bytes of these weights on this rank."""
        raise NotImplementedError


class Quantized(Reformatted):
    """Base of the modules with integer weights, whose full-precision weights are freed."""

    @property
    def kept(self) -> tuple[str, ...]:
        """The buffers that keep their precision when the module is converted."""
        raise NotImplementedError

    @property
    def plan(self) -> StoragePlan:
        plan: StoragePlan = vars(self)[PLAN]
        return plan

    @property
    def weight_bytes(self) -> int:
        return sum(b.nbytes for b in self.buffers())

    @property
    def is_savable(self) -> bool:
        """Whether the weights are stored as patch_model stores them, which save_patched can write."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Implement `to`: scales move to another device, but keep their precision."""
        kept = {name: self._buffers[name] for name in self.kept if name in self._buffers}
        super()._apply(fn, recurse)
        for name, old in kept.items():
            new = self._buffers[name]
            if new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device, torch.float32)
        plan: Any = self.plan
        vars(self)[PLAN] = plan._replace(dtype=fn(torch.empty(0, dtype=plan.dtype)).dtype)
        return self


def all_finite(weight: Tensor) -> bool:
    """Return whether a weight [..., n, k] has neither infinity nor NaN, a matrix at a time."""
    return (
        all(bool(one.isfinite().all()) for one in weight.flatten(0, -3))
        if weight.dim() > 2
        else bool(weight.isfinite().all())
    )


def nth(integers: Integers, i: int) -> Integers:
    """Return matrix i of the integers of several."""
    weight, scales, zeros = integers
    return Integers(weight[i], None if scales is None else scales[i], None if zeros is None else zeros[i])
