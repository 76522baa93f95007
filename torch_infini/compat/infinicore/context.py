"""The calling thread's runtime: its current device and stream, waiting, and graph recording."""

from __future__ import annotations

from . import _arguments, _started
from .device import _ALIASES, _TYPES
from .device import device as Device
from .graph import Graph
from .lib import _infinicore


def get_device() -> _infinicore.Device:
    """Return the calling thread's current device, as an `_infinicore.Device`."""
    return _infinicore.get_device()


def get_device_count(device_type: str) -> int:
    """Return the number of devices of a type ("cpu", "cuda", ...); 0 if this build or machine has none."""
    name = _ALIASES.get(device_type, device_type)
    if name not in _TYPES:
        known = ", ".join(_TYPES)
        raise ValueError(f"infinicore.get_device_count: device_type must be one of {known}, got {device_type!r}")
    return sum(_infinicore.get_device_count(kind) for kind in _TYPES[name])


def set_device(device: Device | str) -> None:
    """Make a device the calling thread's current one."""
    _infinicore.set_device(_arguments.raw_device(device, "infinicore.set_device"))


def sync_stream() -> None:
    """Wait for all work that the calling thread queued on the current device."""
    _infinicore.sync_stream()


def sync_device() -> None:
    """Wait for all work that any thread queued on the current device."""
    _infinicore.sync_device()


def get_stream() -> int:
    """Return the handle of the calling thread's stream on its current device, as a number."""
    return _infinicore.get_stream()


def memory_stats(device: Device | str) -> dict[str, int]:
    """Return a device's allocator statistics: in_use, cached, peak_in_use in bytes; and allocations, cache_hits."""
    return _infinicore.memory_stats(_arguments.raw_device(device, "infinicore.context.memory_stats"))


def trim_memory(device: Device | str) -> None:
    """Return unused memory of a device's allocators to the system."""
    _infinicore.trim_memory(_arguments.raw_device(device, "infinicore.context.trim_memory"))


def is_graph_recording() -> bool:
    """Whether the calling thread is between start_graph_recording() and stop_graph_recording()."""
    return _infinicore.is_graph_recording()


def start_graph_recording(device: Device | str | None = None) -> None:
    """Note the ops that this thread calls from now on instead of running them: infinicore's and, on the CPU, torch's.

    On other devices torch ops raise RuntimeError meanwhile. An op that raises ends the recording, with a warning; later
    ops run. Other exceptions do not end it; `with infinicore.graph():` ends at any.

    Args:
        device: Made the current device first; None: keep the current one.

    A recording that was started and not stopped is dropped, with a warning. Raises RuntimeError within
    torch_infini.runtime.record().
    """
    _started.check_no_torch_recording("infinicore.start_graph_recording")
    _started.drop_with_warning()
    if device is not None:
        set_device(device)
    _started.start("infinicore.start_graph_recording", ends_at_errors=True)


def stop_graph_recording() -> Graph | None:
    """Return the recorded graph, ready to run; None, with a warning, if nothing was being recorded.

    Each Graph.run() writes the tensors that recorded ops returned; they are unfilled before the first.
    """
    recorded = _started.stop("infinicore.stop_graph_recording")
    return None if recorded is None else Graph._of(*recorded)
