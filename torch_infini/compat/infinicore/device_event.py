"""DeviceEvent: a mark in a stream, for waiting and for measuring time."""

from __future__ import annotations

from . import _arguments
from .device import device as Device
from .lib import _infinicore

_DISABLE_TIMING = 0x2


class DeviceEvent:
    """A mark in a device's stream.

    Args:
        enable_timing: Whether elapsed_time() will be used.
        device: The device of the streams it is recorded on; None: the current device.
    """

    def __init__(self, enable_timing: bool = False, device: Device | str | None = None) -> None:
        flags = 0 if enable_timing else _DISABLE_TIMING
        if device is None:
            self._underlying = _infinicore.DeviceEvent(flags)
        else:
            raw = _arguments.raw_device(device, "infinicore.DeviceEvent")
            self._underlying = _infinicore.DeviceEvent(raw, flags)
        self._enable_timing = enable_timing

    def record(self, stream: int | None = None) -> None:
        """Queue the mark on a stream (from get_stream()); None: the calling thread's."""
        self._underlying.record(stream)

    def synchronize(self) -> None:
        """Wait until all work queued before the mark is done."""
        self._underlying.synchronize()

    def query(self) -> bool:
        """Return whether all work queued before the mark is done."""
        return self._underlying.query()

    def elapsed_time(self, other: DeviceEvent) -> float:
        """Return the milliseconds from this mark to the other; RuntimeError unless both have timing and are done."""
        for event in (self, other):
            if not isinstance(event, DeviceEvent):
                raise TypeError(f"infinicore.DeviceEvent.elapsed_time: other must be a DeviceEvent, got {event!r}")
            if not event.enable_timing:
                which = "this event" if event is self else "other"
                raise RuntimeError(f"infinicore.DeviceEvent.elapsed_time: {which} must be made with enable_timing=True")
        return self._underlying.elapsed_time(other._underlying)

    def wait(self, stream: int | None = None) -> None:
        """Make later work on the stream wait for the mark; None: the calling thread's stream."""
        self._underlying.wait(stream)

    @property
    def device(self) -> Device:
        """The device of the streams it is recorded on."""
        return Device._from_infinicore_device(self._underlying.device)

    @property
    def is_recorded(self) -> bool:
        """Whether record() has been called."""
        return self._underlying.is_recorded

    @property
    def enable_timing(self) -> bool:
        """Whether elapsed_time() can be used."""
        return self._enable_timing

    @property
    def blocking(self) -> bool:
        """Whether waiting threads sleep: never."""
        return False

    @property
    def interprocess(self) -> bool:
        """Whether other processes can use it: never."""
        return False

    def __repr__(self) -> str:
        recorded = "recorded" if self.is_recorded else "not recorded"
        return f"DeviceEvent(device={self.device}, enable_timing={self.enable_timing}, {recorded})"
