"""Graph, a recorded sequence of ops. The module itself is callable: `with infinicore.graph() as g:` records one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from . import _arguments, _started
from .device import device as Device
from .lib import _infinicore

if TYPE_CHECKING:
    from ...runtime.recording import SharedRecording


class Graph:
    """Ops recorded between start_graph_recording() and stop_graph_recording().

    run() repeats them on the memory that they used when recorded, on the calling thread's stream. Fill the inputs
    before and read the outputs after; on CUDA synchronize in between. Runs from several threads take turns.
    """

    def __init__(self, graph: _infinicore.Graph) -> None:
        if not isinstance(graph, _infinicore.Graph):
            raise TypeError(f"infinicore.graph.Graph: graph must be an _infinicore.Graph, got {graph!r}")
        self._graph: _infinicore.Graph | None = graph
        self._recording: SharedRecording | None = None

    @classmethod
    def _of(cls, graph: _infinicore.Graph, recording: SharedRecording | None) -> Graph:
        made = cls(graph)
        made._recording = recording
        return made

    def run(self) -> None:
        """Repeat the recorded ops; RuntimeError if the recording has not ended, or has ended in an error."""
        if self._graph is None:
            raise RuntimeError("infinicore.graph.Graph: run() must come after the end of the recording's `with` block")
        if self._recording is None:
            self._graph.run()
        else:
            self._recording.run_by(self._graph.run)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "infinicore.graph.Graph: a graph must not be copied or pickled, as it names the memory that it was "
            "recorded on: record it again"
        )

    def report(self) -> str:
        """Describe how run() works: as a captured device graph or op by op, and which ops were fused."""
        if self._graph is None:
            return "not recorded yet"
        return self._graph.report() if self._recording is None else self._recording.report()


class _GraphModule(ModuleType):
    """A module that can be called as a context manager."""

    @contextmanager
    def __call__(self, device: Device | str | None = None) -> Iterator[Graph]:
        """Record the ops of the `with` block, infinicore's and, on the CPU, torch's, into the Graph that it yields.

        Args:
            device: Made the current device first; None: keep the current one.

        If the block raises, the recording is dropped. Raises RuntimeError if this thread is already recording a graph.
        """
        if device is not None:
            _infinicore.set_device(_arguments.raw_device(device, "infinicore.graph"))
        recorded = Graph(_infinicore.Graph())
        recorded._graph = None
        if _infinicore.is_graph_recording():
            raise RuntimeError("infinicore.graph: this thread records a graph already")
        _started.start("infinicore.graph", ends_at_errors=False)
        try:
            yield recorded
        except BaseException:
            _started.drop()
            raise
        found = _started.stop("infinicore.graph")
        if found is None:
            raise RuntimeError("infinicore.graph: a stop of the recording must not come before the end of the block")
        recorded._graph, recorded._recording = found


sys.modules[__name__].__class__ = _GraphModule
