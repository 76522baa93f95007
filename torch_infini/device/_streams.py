"""Streams and events of torch.infini, based on torch's own; on the CPU each is a libinfinirt stream or event."""

from __future__ import annotations

from typing import Any

import torch

from ..runtime import streams as runtime
from ._state import backing

Device = torch.device | str | int | None


def _device(device: Device) -> torch.device:
    if isinstance(device, int):
        return torch.device("infini", device)
    return torch.device("infini" if device is None else device)


class Stream(torch.Stream):
    """A queue of work of a device, from a pool of 32.

    Backed by the CPU, ops on infini tensors are done when their call returns, whichever stream is current; work queued
    through `runtime` runs in the order of the stream.

    Args:
        device: An infini device; None: the current one.
        priority: As for torch.cuda.Stream; without effect on the CPU.
    """

    def __new__(cls, device: Device = None, priority: int = 0, **known: Any) -> Stream:
        if known:  # wraps an existing stream: stream_id, device_index, device_type
            return super().__new__(cls, **known)
        return super().__new__(cls, device=_device(device), priority=priority)

    @property
    def runtime(self) -> runtime.Stream:
        """The torch_infini.runtime stream, which launches functions and records events."""
        if backing() == "cuda":
            device = torch.device("cuda", self.device_index)
            native = self.native_handle  # type: ignore[attr-defined]
            return runtime.Stream.from_torch(torch.cuda.ExternalStream(native, device))
        return runtime.Stream.borrow(self.stream_id, torch.device("cpu", 0))


class _EventMeta(type):
    """Metaclass of Event: torch's functions require exactly torch.Event, so Event() makes those."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Event)


class Event(metaclass=_EventMeta):
    """A point in a stream, to wait for or to measure time with: a torch.Event.

    Args:
        enable_timing: Whether elapsed_time() will be used.
        blocking: On CUDA, whether waiting threads sleep.
        device: An infini device; None: the current one.
    """

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, device: Device = None) -> Any:
        return torch.Event(_device(device), enable_timing=enable_timing, blocking=blocking)


def _ours(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Device = None) -> Stream:
    """Return a device's current stream."""
    index = _device(device).index
    return _ours(torch.accelerator.current_stream(torch.accelerator.current_device_index() if index is None else index))


def default_stream(device: Device = None) -> Stream:
    """Return a device's default stream."""
    index = _device(device).index
    current = current_stream(device)
    return Stream(
        stream_id=0, device_index=current.device_index if index is None else index, device_type=current.device_type
    )


def set_stream(stream: torch.Stream) -> None:
    """Make a stream current on its device."""
    torch.accelerator.set_stream(stream)


class StreamContext:
    """Make a stream current in a `with` statement; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        return None if self.stream is None else self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def stream(stream: torch.Stream | None) -> StreamContext:
    """Make a stream current in a `with` statement; None changes nothing."""
    return StreamContext(stream)
