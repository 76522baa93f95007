"""The runtime of the calling thread: its current device and stream, waiting, and recording of graphs."""

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
    """Return how many devices of a type ("cpu", "cuda", ...) there are; 0 where this build or machine has none."""
    name = _ALIASES.get(device_type, device_type)
    if name not in _TYPES:
        known = ", ".join(_TYPES)
        raise ValueError(f"infinicore.get_device_count: device_type must be one of {known}, got {device_type!r}")
    return sum(_infinicore.get_device_count(kind) for kind in _TYPES[name])


def set_device(device: Device | str) -> None:
    """Make a device the calling thread's current one."""
    _infinicore.set_device(_arguments.raw_device(device, "infinicore.set_device"))


def sync_stream() -> None:
    """Wait for all that the calling thread queued on the current device."""
    _infinicore.sync_stream()


def sync_device() -> None:
    """Wait for all that any thread queued on the current device."""
    _infinicore.sync_device()


def get_stream() -> int:
    """Return the handle of the calling thread's stream on its current device, as a number."""
    return _infinicore.get_stream()


def memory_stats(device: Device | str) -> dict[str, int]:
    """Return what the caches of a device hold, in bytes: in_use, cached, peak_in_use; and allocations, cache_hits."""
    return _infinicore.memory_stats(_arguments.raw_device(device, "infinicore.context.memory_stats"))


def trim_memory(device: Device | str) -> None:
    """Give the memory that the caches of a device do not use back to the system."""
    _infinicore.trim_memory(_arguments.raw_device(device, "infinicore.context.trim_memory"))


def is_graph_recording() -> bool:
    """Whether the calling thread is between start_graph_recording() and stop_graph_recording()."""
    return _infinicore.is_graph_recording()


def start_graph_recording(device: Device | str | None = None) -> None:
    """Note the ops that this thread calls from now on instead of running them: infinicore's and, on the CPU, torch's.

    On other devices ops of torch raise RuntimeError meanwhile. An op that raises ends the recording, with a warning:
    what follows runs. An exception of the caller's own does not; `with infinicore.graph():` ends at any.

    Args:
        device: Made the current device first; None: it stays.

    A recording that has been started and not stopped is dropped, with a warning. RuntimeError within
    torch_infini.runtime.record().
    """
    _started.refuse_torchs("infinicore.start_graph_recording")
    _started.drop_loudly()
    if device is not None:
        set_device(device)
    _started.start("infinicore.start_graph_recording", ends_at_errors=True)


def stop_graph_recording() -> Graph | None:
    """Return what was recorded, ready to run; None, with a warning, if nothing was being recorded.

    Tensors that recorded ops returned are written by each Graph.run(), and hold nothing before the first.
    """
    recorded = _started.stop("infinicore.stop_graph_recording")
    return None if recorded is None else Graph._of(*recorded)
