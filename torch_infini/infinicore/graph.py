"""Graph, a recorded sequence of ops; this module itself is called, `with infinicore.graph() as g:`, to record one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from . import _arguments
from .device import device as Device
from .lib import _infinicore


class Graph:
    """Ops recorded between start_graph_recording() and stop_graph_recording().

    run() repeats them on the memory that they named when they were recorded, on the calling thread's stream. Fill the
    inputs before, read the outputs after; on CUDA synchronise in between. Runs from several threads take turns.
    """

    def __init__(self, graph: _infinicore.Graph) -> None:
        if not isinstance(graph, _infinicore.Graph):
            raise TypeError(f"infinicore.graph.Graph: graph must be an _infinicore.Graph, got {graph!r}")
        self._graph: _infinicore.Graph | None = graph

    def run(self) -> None:
        """Repeat the recorded ops; RuntimeError while they are still being recorded, or were not to their end."""
        if self._graph is None:
            raise RuntimeError("infinicore.graph.Graph: run() must come after the end of the recording's `with` block")
        self._graph.run()

    def report(self) -> str:
        """How run() does it: as a captured device graph or op by op, and which ops were fused."""
        return "not recorded yet" if self._graph is None else self._graph.report()


class _GraphModule(ModuleType):
    """A module that can be called as a context manager."""

    @contextmanager
    def __call__(self, device: Device | str | None = None) -> Iterator[Graph]:
        """Record the ops of the `with` block into the Graph that it yields.

        Args:
            device: Made the current device first; None: it stays.

        If the block raises, what was recorded is dropped. RuntimeError where this thread records a graph already.
        """
        if device is not None:
            _infinicore.set_device(_arguments.raw_device(device, "infinicore.graph"))
        recorded = Graph(_infinicore.Graph())
        recorded._graph = None
        recording = _infinicore.GraphRecording()
        try:
            yield recorded
        except BaseException:
            recording.drop()
            raise
        recorded._graph = recording.stop()


sys.modules[__name__].__class__ = _GraphModule
