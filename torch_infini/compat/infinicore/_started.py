"""The recording of a thread of infinicore: start(), stop() and drop(), for context.py and graph.py, and
without_modes().

On the CPU a recording also notes torch's ops, in order among infinicore's: it is a torch_infini.runtime recording. On
other devices torch's ops cannot be noted in the graph, and raise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...runtime.recording import Recording, SharedRecording, computes
from .lib import _infinicore

_thread = threading.local()


def start(function: str, ends_at_errors: bool) -> None:
    """Begin a recording on the current device.

    Args:
        function: The caller's function, for messages.
        ends_at_errors: Whether an op that raises ends the recording.

    Raises:
        RuntimeError: If torch_infini.runtime.record() records on this thread.
    """
    check_no_torch_recording(function)
    drop()
    _thread.recording = (_OnCpu if _infinicore.get_device().type == _infinicore.Device.Type.CPU else _OnDevice)(
        ends_at_errors
    )


def stop(function: str) -> tuple[_infinicore.Graph, SharedRecording | None] | None:
    """Return the recorded graph, and what runs it if it has torch ops; None if nothing is being recorded."""
    check_no_torch_recording(function)
    recording: _OnCpu | _OnDevice | None = getattr(_thread, "recording", None)
    _thread.recording = None
    if recording is not None and recording.is_active():
        return recording.stop()
    if recording is not None:
        recording.drop()
    graph = _infinicore.stop_graph_recording()  # of a recording that the raw module started; otherwise it warns
    return None if graph is None else (graph, None)


def drop() -> bool:
    """Drop this thread's recording; return whether there was one that no error had ended."""
    recording: _OnCpu | _OnDevice | None = getattr(_thread, "recording", None)
    _thread.recording = None
    if recording is None:
        return False
    was_active = recording.is_active()
    recording.drop()
    return was_active


def drop_with_warning() -> None:
    """Drop this thread's recording, whoever began it, with a warning unless an error had ended it."""
    if drop():
        print("infinicore: warning: startGraphRecording: a recording was under way, which is dropped", file=sys.stderr)
    elif _infinicore.is_graph_recording() and Recording.current() is None:
        _infinicore.start_graph_recording()  # warns, and drops it
        _infinicore.stop_graph_recording()


def check_no_torch_recording(function: str) -> None:
    """Raise RuntimeError if this thread is inside torch_infini.runtime.record()."""
    current = Recording.current()
    if current is not None and not isinstance(current, SharedRecording):
        raise RuntimeError(
            f"{function}: a start or stop must not come between the start and the end of torch_infini.runtime.record()"
        )


@contextmanager
def without_modes() -> Iterator[None]:
    """Let torch compute, instead of being noted, what infinicore calls in the body."""
    if getattr(_thread, "recording", None) is None and Recording.current() is None:
        yield
        return
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class _OnCpu:
    """A recording of ops of infinicore and of torch."""

    def __init__(self, ends_at_errors: bool) -> None:
        self._recording = SharedRecording(ends_at_errors)
        self._recording.__enter__()

    def is_active(self) -> bool:
        return self._recording.is_active()

    def stop(self) -> tuple[_infinicore.Graph, SharedRecording | None]:
        self._recording.__exit__(None, None, None)
        graph = _infinicore.shared_graph(self._recording.shared())
        return graph, self._recording if self._recording.calls else None

    def drop(self) -> None:
        self._recording.leave()


class _OnDevice:
    """A recording of ops of infinicore."""

    def __init__(self, ends_at_errors: bool) -> None:
        self._recording = _infinicore.GraphRecording()
        if ends_at_errors:
            self._recording.end_at_errors()
        self._modes = ExitStack()
        self._modes.enter_context(_Refuser(self._recording))

    def is_active(self) -> bool:
        return self._recording.is_active()

    def stop(self) -> tuple[_infinicore.Graph, None]:
        self._modes.close()
        return self._recording.stop(), None

    def drop(self) -> None:
        self._modes.close()
        self._recording.drop()


class _Refuser(TorchDispatchMode):
    """Raises for torch ops except views and allocations, which compute nothing."""

    def __init__(self, recording: _infinicore.GraphRecording) -> None:
        TorchDispatchMode.__init__(self)
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._recording.is_active() and computes(func):
            _infinicore.GraphRecording.op_failed()
            raise RuntimeError(
                f"infinicore: a graph on {_infinicore.get_device()} records no ops of torch (use infinicore's, or "
                f"torch_infini.runtime.record()), got {func}"
            )
        return func(*args, **(kwargs or {}))
