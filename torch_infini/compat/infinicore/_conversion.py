"""Converts calls of infinicore to calls of torch: arguments, results, and `out`.

torch gets views of the tensors' memory; only results are copied, into `out`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch

from . import utils
from ._arguments import described
from ._bridge import check_torch_has
from ._rules import Compute
from .device import device as Device
from .dtype import dtype as DataType
from .tensor import Tensor


class Sources:
    """The tensors of a call, each with its torch counterpart: a view of its memory, or a tensor without values."""

    def __init__(self, make: Callable[[Tensor], torch.Tensor]) -> None:
        self._make = make
        self._found: dict[int, tuple[Tensor, torch.Tensor]] = {}

    def __getitem__(self, tensor: Tensor) -> torch.Tensor:
        if id(tensor) not in self._found:
            self._found[id(tensor)] = tensor, self._make(tensor)
        return self._found[id(tensor)][1]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _ in self._found.values()]

    def view(self, value: torch.Tensor) -> Tensor | None:
        """Return the argument that is `value`, or a view if `value` lies in an argument's memory; else None."""
        for tensor, source in self._found.values():
            if value is source:
                return tensor
            if (
                value.dtype == source.dtype
                and value.untyped_storage()._cdata == source.untyped_storage()._cdata
                and not (value.is_conj() or value.is_neg())
            ):
                offset = int(value.storage_offset() - source.storage_offset()) if value.numel() else 0
                start = tensor._underlying
                if offset:
                    start = start.as_strided([offset + 1], [1]).narrow(0, offset, 1)
                return Tensor(start.as_strided(list(value.shape), list(value.stride())))
        return None


def converted(
    args: tuple[Any, ...], kwargs: dict[str, Any], sources: Sources, wrap: Callable[[Callable[..., Any]], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Convert the arguments for torch; `wrap` converts functions."""
    theirs = {name: _converted(value, sources, wrap) for name, value in kwargs.items()}
    if isinstance(theirs.get("device"), str):
        theirs["device"] = torch_device(Device(theirs["device"]))
    return [_converted(value, sources, wrap) for value in args], theirs


# Not nested in converted(): a nested function that calls itself refers to itself, and would keep the tensors alive.
def _converted(value: Any, sources: Sources, wrap: Callable[[Callable[..., Any]], Any]) -> Any:
    if isinstance(value, Tensor):
        return sources[value]
    if isinstance(value, torch.Tensor):
        raise TypeError("tensors must be infinicore.Tensor, got a torch.Tensor: use from_torch()")
    if isinstance(value, DataType):
        return utils.to_torch_dtype(value)
    if isinstance(value, Device):
        return torch_device(value)
    if type(value) in (list, tuple):
        return type(value)([_converted(item, sources, wrap) for item in value])
    return wrap(value) if callable(value) and not isinstance(value, type) else value


class TorchCall:
    """A call of infinicore with its arguments converted for torch.

    Attributes:
        sources: The tensors among the arguments.
    """

    def __init__(
        self,
        compute: Compute,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        view: Callable[[Tensor], torch.Tensor],
        wrap: Callable[[Callable[..., Any]], Any],
    ) -> None:
        self._compute, self.sources = compute, Sources(view)
        self._args, self._kwargs = converted(args, kwargs, self.sources, wrap)

    def __call__(self) -> Any:
        """Return torch's result."""
        return self._compute(self._args, self._kwargs)

    def result(self, made: Callable[[torch.Tensor], Tensor]) -> Any:
        """Return the result with infinicore tensors: arguments, views of them, and new tensors."""

        def convert(value: torch.Tensor) -> Tensor:
            view = self.sources.view(value)
            return made(value) if view is None else view

        return rebuilt(self(), convert)

    def write(
        self, outs: Sequence[tuple[Tensor, torch.Tensor]], directly: Callable[[Callable[[], Any]], Any] | None = None
    ) -> None:
        """Write the results to tensors, each with its torch view, as torch's own `out` would.

        directly: Calls torch's function with `out`; None: copy the results.
        """
        values, views = list(leaves(self())), [view for _, view in outs]
        if copies_do(values, views) or not self.takes_out(views, directly):
            check_results(values, outs)
            for value, view in zip(values, views):
                view.copy_(value)

    def takes_out(
        self, views: Sequence[torch.Tensor], directly: Callable[[Callable[[], Any]], Any] | None = None
    ) -> bool:
        """Call torch's function with its own `out`; return False if it has none or rejects these."""
        out = tuple(views) if len(views) > 1 else views[0]

        def function() -> None:
            self._compute.theirs(*self._args, **self._kwargs, out=out)

        try:
            function() if directly is None else directly(function)
        except Exception:  # check_results() reports what is wrong
            return False
        return True


def torch_device(device: Device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, since torch computes, got {device}")
    check_torch_has(device.type)
    return torch.device("cpu") if device.type == "cpu" else torch.device("cuda", device.index)


def leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


def rebuilt(value: Any, convert: Callable[[torch.Tensor], Tensor]) -> Any:
    """Convert the tensors of a result; torch's named tuples keep their type."""
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, (list, tuple)):
        items = [rebuilt(item, convert) for item in value]
        return items if isinstance(value, list) else type(value)(items)
    return value


def outs(out: Any) -> Sequence[Tensor]:
    return [] if out is None else [out] if isinstance(out, Tensor) else list(out)


def by_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sort tensors whose device has streams first: torch computes on the first one's stream."""
    return sorted(tensors, key=lambda tensor: tensor.device.type == "cpu")


def check_out(out: Any) -> None:
    if out is not None and not isinstance(out, Tensor):
        is_sequence = isinstance(out, (list, tuple))
        wrong = [value for value in out if not isinstance(value, Tensor)] if is_sequence else [out]
        if wrong or not out:
            raise TypeError(
                f"out must be an infinicore.Tensor, or a tuple of them, got {described(wrong[0] if wrong else out)}"
            )


def check_results(
    values: Sequence[torch.Tensor],
    outs: Sequence[tuple[Tensor, torch.Tensor]],
    device: torch.device | None = None,
) -> None:
    """Raise unless results fit into `out`; `device` is the results' device if not that of the values."""
    if len(values) != len(outs):
        raise TypeError(f"out must be as many tensors as there are results, {len(values)}, got {len(outs)}")
    for value, (tensor, view) in zip(values, outs):
        if list(value.shape) != tensor.shape:
            raise ValueError(f"out must have the shape of the result, {list(value.shape)}, got {tensor.shape}")
        if not _casts(value.dtype, view.dtype):
            raise TypeError(f"out must have a dtype that takes the result's, {value.dtype}, got {tensor.dtype}")
        if (device or value.device) != view.device:
            raise ValueError(f"out must be on the device of the result, {device or value.device}, got {tensor.device}")


def copies_do(values: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> bool:
    """Return whether copying the results gives the same as torch's own `out`.

    False for elements that share memory, where the order of writes matters, and for a dtype that only the function
    supports (bool, for all() and any() of uint8). Invalid outs count as copied; write() raises for them.
    """
    if [value.shape for value in values] != [view.shape for view in views]:
        return True
    return all(_casts(value.dtype, view.dtype) and not _may_share_elements(view) for value, view in zip(values, views))


# A recorder would intercept torch.can_cast(), so cache it.
_casts = cache(torch.can_cast)


def _may_share_elements(view: torch.Tensor) -> bool:
    span = 0  # elements from the first to the last in the dimensions so far
    for stride, size in sorted(zip(view.stride(), view.shape)):
        if size > 1 and stride <= span:
            return True
        span += stride * (size - 1)
    return False
