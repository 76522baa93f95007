"""A graph of libinfinicore_cpp_api through ctypes, as record() fills it: ops are noted in order, and bound at the end.

It is the graph of infinicore's own recording: ops that infinicore notes on the same thread stand between torch's.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from .._core.library import PATH, RUNTIME, is_whole, require_part

_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_FAILED = 1  # INFINI_STATUS_INTERNAL_ERROR


@cache
def _library() -> Any:
    require_part("the recording of graphs, torch_infini.runtime.record,", is_whole())
    library = ctypes.CDLL(str(PATH.with_name("libinfinicore_cpp_api.so")))  # its functions release the GIL
    handle = ctypes.c_void_p
    for name, result, *arguments in (
        ("IsRecording", ctypes.c_bool),
        ("Begin", handle),
        ("IsActive", ctypes.c_bool, handle),
        ("EndAtErrors", None, handle),
        ("OpFailed", None),
        ("Note", ctypes.c_int64, handle, ctypes.c_char_p),
        ("End", ctypes.c_int, handle),
        ("Bind", ctypes.c_int, handle, ctypes.c_size_t, handle, handle),
        ("Run", ctypes.c_int, handle),
        ("Shared", handle, handle),
        ("Report", ctypes.c_char_p, handle),
        ("Destroy", None, handle),
    ):
        function = getattr(library, f"infinicoreGraph{name}")
        function.restype, function.argtypes = result, arguments
    return library


def is_recording() -> bool:
    """Whether this thread records a graph: by record(), or by infinicore.start_graph_recording()."""
    return bool(_library().infinicoreGraphIsRecording())


def op_failed() -> None:
    """Say that a call of this thread has failed: a recording that ends at errors is dropped, with a warning."""
    _library().infinicoreGraphOpFailed()


class OpGraph:
    """A recording of the calling thread from its construction to end(), then a graph.

    Raises RuntimeError where the library refuses: of a thread that records already, for one.
    ends_at_errors: Whether op_failed() drops the recording.
    """

    def __init__(self, ends_at_errors: bool = False) -> None:
        self._handle = _library().infinicoreGraphBegin()
        if not self._handle:
            raise RuntimeError(_last_error())
        if ends_at_errors:
            _library().infinicoreGraphEndAtErrors(self._handle)
        self.drop = weakref.finalize(self, _library().infinicoreGraphDestroy, self._handle)
        self.drop.atexit = False
        self._thread = threading.local()
        self._kept: list[Any] = []
        self._run = _library().infinicoreGraphRun

    def is_active(self) -> bool:
        """Whether the calling thread is recording it: neither dropped, nor ended by a start or stop of InfiniCore's."""
        return self.drop.alive and bool(_library().infinicoreGraphIsActive(self._handle))

    def shared(self) -> int:
        """Return the address of the C++ graph's std::shared_ptr, for _infinicore.shared_graph()."""
        return int(_library().infinicoreGraphShared(self._handle))

    def note(self, name: str) -> int:
        """Add an op, which does nothing before it is bound; return its place among all ops, infinicore's too."""
        place = int(_library().infinicoreGraphNote(self._handle, name.encode()))
        _check(place < 0)
        return place

    def end(self) -> None:
        """End the recording."""
        _check(_library().infinicoreGraphEnd(self._handle))

    def bind(self, index: int, function: int, data: int | None, kept: object) -> None:
        """Let the op noted as number `index` call a C function, given data; keep `kept` as long as the graph."""
        self._kept.append(kept)
        _check(_library().infinicoreGraphBind(self._handle, index, function, data))

    def bind_python(self, index: int, function: Callable[[], object]) -> None:
        """Let the op noted as number `index` call a Python function; what it raises comes out of run()."""
        thread = self._thread

        def guarded(_: int | None) -> int:
            try:
                function()
            except BaseException as error:
                thread.error = error
                return _FAILED
            return 0

        pointer = _Function(guarded)
        # Not by ctypes.cast(), which lets the pointer refer to itself: what it keeps would wait for Python's collector.
        self.bind(index, ctypes.c_void_p.from_buffer(pointer).value or 0, None, pointer)

    def run(self) -> None:
        """Run all ops in order; the first failure ends it."""
        if self._run(self._handle):
            error = self._thread.__dict__.pop("error", None)
            raise RuntimeError(_last_error()) if error is None else error

    def run_by(self, run: Callable[[], None]) -> None:
        """The same by a function that runs the C++ graph, and raises itself what other ops raise."""
        try:
            run()
        except RuntimeError as failure:
            error = self._thread.__dict__.pop("error", failure)
            raise error from None

    def report(self) -> str:
        """What Graph::report() says."""
        return str(_library().infinicoreGraphReport(self._handle).decode(errors="replace"))


def _check(failed: int | bool) -> None:
    if failed:
        raise RuntimeError(_last_error())


def _last_error() -> str:
    return RUNTIME.infiniGetLastErrorMessage().decode(errors="replace")
