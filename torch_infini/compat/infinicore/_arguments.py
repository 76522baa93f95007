"""Unwraps arguments for the C++ front end, and names what is wrong with them; used by every function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .device import device as Device
from .dtype import dtype as DataType
from .lib import _infinicore


def raw(value: Any, function: str, argument: str) -> _infinicore.Tensor:
    """Return the `_infinicore.Tensor` of a Tensor; TypeError for anything else."""
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
    """Return the `_infinicore.Device` of a device or its name ("cuda:0"); raise if the device does not exist."""
    if isinstance(value, str):
        value = Device(value)
    if not isinstance(value, Device):
        raise TypeError(f"{function}: device must be an infinicore.device or its name, got {described(value)}")
    return value._underlying


def sizes(value: Any, function: str, argument: str = "size") -> list[int]:
    """Return a shape as a list; an int stands for one dimension."""
    return integers([value] if isinstance(value, int) else value, function, argument, lowest=0)


def integers(value: Any, function: str, argument: str, lowest: int = -(2**63)) -> list[int]:
    """Return a sequence of 64-bit integers as a list."""
    if not isinstance(value, Sequence) or not all(hasattr(number, "__index__") for number in value):
        raise TypeError(f"{function}: {argument} must be a sequence of integers, got {described(value)}")
    found = [number.__index__() for number in value]
    if any(number < lowest for number in found):
        rule = "have negative sizes" if lowest == 0 else f"have numbers below {lowest}"
        raise ValueError(f"{function}: {argument} must not {rule}, got {found}")
    if any(number >= 2**63 for number in found):
        raise ValueError(f"{function}: {argument} must be below 2^63, got {found}")
    return found


def integer(value: Any, function: str, argument: str, lowest: int = 0, limit: int = 2**63) -> int:
    """Return one integer, at least `lowest` and below `limit`."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{function}: {argument} must be an integer, got {described(value)}")
    found: int = value.__index__()
    if found < lowest:
        raise ValueError(f"{function}: {argument} must be at least {lowest}, got {found}")
    if found >= limit:
        raise ValueError(f"{function}: {argument} must be below 2^{limit.bit_length() - 1}, got {found}")
    return found


def described(value: Any) -> str:
    """Format a value for a message: plain values by repr, others by type."""
    if value is None or isinstance(value, (str, int, float, list, tuple)):
        shown = repr(value)
        if len(shown) <= 80:
            return shown
    return f"a {type(value).__module__}.{type(value).__qualname__}"
