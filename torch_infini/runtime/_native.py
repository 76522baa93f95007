"""libinfinirt through ctypes: its functions with the signatures of infinirt.h, failures as RuntimeError, devices."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from .._core.devices import backing_device
from .._core.headers import Interface, declare, parse
from .._core.library import ROOT, RUNTIME

SUCCESS, INTERNAL_ERROR = 0, 1
CAPTURE_RELAXED = 2
DISABLE_TIMING, BLOCKING_SYNC = 1, 2
QUEUED = 1

_DEVICES = {"cpu": 0, "cuda": 1}  # infiniDevice_t


@cache
def _interface() -> Interface:
    return parse(ROOT / "include")


@cache
def function(name: str) -> Any:
    """Return infinirt<name> with its argument types."""
    return declare(RUNTIME, f"infinirt{name}", _interface())


def call(name: str, *arguments: Any) -> None:
    """Call infinirt<name>; RuntimeError with its message if it fails."""
    if function(name)(*arguments):
        raise RuntimeError(RUNTIME.infiniGetLastErrorMessage().decode(errors="replace"))


def create(name: str, *arguments: Any, last: bool = False) -> int:
    """Call infinirt<name> and return the handle that it writes through its first argument, or its `last`."""
    handle = ctypes.c_void_p()
    pointer = ctypes.byref(handle)
    call(name, *((*arguments, pointer) if last else (pointer, *arguments)))
    assert handle.value is not None
    return handle.value


def device_of(device: torch.device | str | int | None) -> torch.device:
    """Return a device with its index; for infini, its backing device. None: the current CUDA device, or the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = backing_device(device)
    if device.type not in _DEVICES:
        raise ValueError(f"torch_infini.runtime: device must be cpu or cuda, got {device}")
    if device.index is None:
        current = torch.cuda.current_device() if device.type == "cuda" and torch.cuda.is_available() else 0
        return torch.device(device.type, current)
    return device


@contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make the device libinfinirt's current one on this thread."""
    type_, number = ctypes.c_int(), ctypes.c_int()
    call("GetDevice", ctypes.byref(type_), ctypes.byref(number))
    call("SetDevice", _DEVICES[device.type], device.index)
    try:
        yield
    finally:
        call("SetDevice", type_, number)
