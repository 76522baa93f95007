"""What every function does with its arguments before the C++ front end gets them: unwraps, and names what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .device import device as Device
from .dtype import dtype as DataType
from .lib import _infinicore


def raw(value: Any, function: str, argument: str) -> _infinicore.Tensor:
    """The `_infinicore.Tensor` of a Tensor; TypeError for anything else."""
    try:
        underlying = value._underlying
    except AttributeError:
        underlying = None
    if not isinstance(underlying, _infinicore.Tensor):
        raise TypeError(f"{function}: {argument} must be an infinicore.Tensor, got {described(value)}")
    return underlying


def raw_or_none(value: Any, function: str, argument: str) -> _infinicore.Tensor | None:
    return None if value is None else raw(value, function, argument)


def raw_dtype(value: Any, function: str) -> _infinicore.DataType:
    if not isinstance(value, DataType):
        raise TypeError(f"{function}: dtype must be an infinicore.dtype, got {described(value)}")
    return value._underlying


def raw_device(value: Any, function: str) -> _infinicore.Device:
    """The `_infinicore.Device` of a device or its name ("cuda:0"); a device that is not there raises."""
    if isinstance(value, str):
        value = Device(value)
    if not isinstance(value, Device):
        raise TypeError(f"{function}: device must be an infinicore.device or its name, got {described(value)}")
    return value._underlying


def sizes(value: Any, function: str, argument: str = "size") -> list[int]:
    """A shape as a list; an int stands for one dimension."""
    if isinstance(value, int):
        return [value]
    if not isinstance(value, Sequence) or not all(hasattr(size, "__index__") for size in value):
        raise TypeError(f"{function}: {argument} must be a sequence of integers, got {described(value)}")
    found = [size.__index__() for size in value]
    if any(size < 0 for size in found):
        raise ValueError(f"{function}: {argument} must not have negative sizes, got {found}")
    return found


def described(value: Any) -> str:
    """A value for a message: itself if it is a plain one, else its type."""
    if value is None or isinstance(value, (str, int, float, list, tuple)):
        shown = repr(value)
        if len(shown) <= 80:
            return shown
    return f"a {type(value).__module__}.{type(value).__qualname__}"
