"""OpGraph: a graph of libinfinicore_cpp_api through ctypes. record() notes ops in order and binds them at the end.

infinicore's own recording uses the same graph: its ops on the same thread are in order with torch's.
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
    """Return whether this thread records a graph, by record() or by infinicore.start_graph_recording()."""
    return bool(_library().infinicoreGraphIsRecording())


def op_failed() -> None:
    """Report that a call of this thread has failed: a recording that ends at errors is dropped, with a warning."""
    _library().infinicoreGraphOpFailed()


class OpGraph:
    """A recording of the calling thread from its construction to end(), then a graph.

    Args:
        ends_at_errors: Whether op_failed() drops the recording.

    Raises:
        RuntimeError: If the library reports an error, for example because the thread already records.
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
        """Return whether the calling thread records it: it was not dropped, and InfiniCore has not ended it."""
        return self.drop.alive and bool(_library().infinicoreGraphIsActive(self._handle))

    def shared(self) -> int:
        """Return the address of the C++ graph's std::shared_ptr, for _infinicore.shared_graph()."""
        return int(_library().infinicoreGraphShared(self._handle))

    def note(self, name: str) -> int:
        """Add an op, which does nothing until it is bound; return its index among all ops, including infinicore's."""
        index = int(_library().infinicoreGraphNote(self._handle, name.encode()))
        _check(index < 0)
        return index

    def end(self) -> None:
        """End the recording."""
        _check(_library().infinicoreGraphEnd(self._handle))

    def bind(self, index: int, function: int, data: int | None, kept: object) -> None:
        """Make the op with this index call a C function with `data`; keep `kept` alive as long as the graph."""
        self._kept.append(kept)
        _check(_library().infinicoreGraphBind(self._handle, index, function, data))

    def bind_python(self, index: int, function: Callable[[], object]) -> None:
        """Make the op with this index call a Python function; run() raises its exceptions."""
        thread = self._thread

        def guarded(_: int | None) -> int:
            try:
                function()
            except BaseException as error:
                thread.error = error
                return _FAILED
            return 0

        pointer = _Function(guarded)
        # ctypes.cast() would make a reference cycle, and what it keeps alive would wait for the garbage collector.
        self.bind(index, ctypes.c_void_p.from_buffer(pointer).value or 0, None, pointer)

    def run(self) -> None:
        """Run all ops in order, up to the first that fails."""
        if self._run(self._handle):
            error = self._thread.__dict__.pop("error", None)
            raise RuntimeError(_last_error()) if error is None else error

    def run_by(self, run: Callable[[], None]) -> None:
        """Run all ops by a function that runs the C++ graph and itself raises the errors of other ops."""
        try:
            run()
        except RuntimeError as failure:
            error = self._thread.__dict__.pop("error", failure)
            raise error from None

    def report(self) -> str:
        """Return the text of Graph::report()."""
        return str(_library().infinicoreGraphReport(self._handle).decode(errors="replace"))


def _check(failed: int | bool) -> None:
    if failed:
        raise RuntimeError(_last_error())


def _last_error() -> str:
    return RUNTIME.infiniGetLastErrorMessage().decode(errors="replace")
