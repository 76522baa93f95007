"""What a thread of infinicore records: start(), stop() and drop(), for context.py and graph.py, and without_modes().

On the CPU a recording notes torch's ops too, in their place among infinicore's: it is one of torch_infini.runtime.
Elsewhere torch's ops cannot be noted in the graph, and are refused.
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
        function: Of the caller, for messages.
        ends_at_errors: Whether an op that raises drops the recording.

    Raises:
        RuntimeError: Where torch_infini.runtime.record() records on this thread.
    """
    refuse_torchs(function)
    drop()
    _thread.recording = (_OnCpu if _infinicore.get_device().type == _infinicore.Device.Type.CPU else _OnDevice)(
        ends_at_errors
    )


def stop(function: str) -> tuple[_infinicore.Graph, SharedRecording | None] | None:
    """Return what was recorded, and what runs it if ops of torch are in it; None where nothing is being recorded."""
    refuse_torchs(function)
    recording: _OnCpu | _OnDevice | None = getattr(_thread, "recording", None)
    _thread.recording = None
    if recording is not None and recording.is_active():
        return recording.stop()
    if recording is not None:
        recording.drop()
    graph = _infinicore.stop_graph_recording()  # of one that was started by the raw module; else it warns
    return None if graph is None else (graph, None)


def drop() -> bool:
    """End this thread's recording, and keep nothing of it; whether there was one that no error had ended."""
    recording: _OnCpu | _OnDevice | None = getattr(_thread, "recording", None)
    _thread.recording = None
    if recording is None:
        return False
    was_active = recording.is_active()
    recording.drop()
    return was_active


def drop_loudly() -> None:
    """End this thread's recording, whoever began it, with a warning if no error had ended it."""
    if drop():
        print("infinicore: warning: startGraphRecording: a recording was under way, which is dropped", file=sys.stderr)
    elif _infinicore.is_graph_recording() and Recording.current() is None:
        _infinicore.start_graph_recording()  # warns, and drops it
        _infinicore.stop_graph_recording()


def refuse_torchs(function: str) -> None:
    """Raise RuntimeError where this thread is in the block of torch_infini.runtime.record()."""
    current = Recording.current()
    if current is not None and not isinstance(current, SharedRecording):
        raise RuntimeError(
            f"{function}: a start or stop must not come between the start and the end of torch_infini.runtime.record()"
        )


@contextmanager
def without_modes() -> Iterator[None]:
    """Let torch compute what infinicore asks of it meanwhile, instead of noting it."""
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
    """Refuses ops of torch but views and fresh memory, which compute nothing."""

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
