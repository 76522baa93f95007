"""Python functions that streams of the CPU run: the callbacks for C, and the table of functions not yet run.

The two callbacks live as long as the process; C gets a number for each function. The worker thread of a queued stream
takes the GIL in a callback, and a thread that waits for that worker has released the GIL (by ctypes): no deadlock.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from .._core.library import RUNTIME
from . import _native

_numbers = itertools.count(1)
_calls: dict[int, StreamCall] = {}
_thread = threading.local()


def on_stream() -> bool:
    return getattr(_thread, "runs", False)


class Modes:
    """The calling thread's torch modes: gradients, inference, autocast."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = torch.is_autocast_enabled("cpu")
        self.autocast_dtype = torch.get_autocast_dtype("cpu")

    def enter(self, stack: ExitStack) -> None:
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        stack.enter_context(torch.autocast("cpu", dtype=self.autocast_dtype, enabled=self.autocast))


def error_message(error: BaseException) -> bytes:
    """Format an exception for the C interface, short enough not to be truncated there."""
    try:
        return f"{type(error).__name__}: {error}"[:500].encode(errors="replace")
    except Exception:  # raised by its __str__
        return type(error).__name__.encode()


class StreamCall:
    """A function for a stream to run, with the modes of the thread that made it and a list for its exception."""

    def __init__(self, function: Callable[[], Any], errors: list[BaseException]) -> None:
        self.function = function
        self.errors = errors
        self.error: BaseException | None = None
        self.modes = Modes()

    def run(self) -> int:
        outer = on_stream()  # on an immediate stream, a launched function may launch another, which runs at once
        _thread.runs = True
        try:
            with ExitStack() as stack:
                self.modes.enter(stack)
                self.function()
        except BaseException as error:  # SystemExit too: it is for the waiting thread, not for the worker
            self.error = error
            self.errors.append(error)
            RUNTIME.infinirtSetLastErrorMessage(error_message(error))
            return _native.INTERNAL_ERROR
        finally:
            _thread.runs = outer
        return _native.SUCCESS


def _run(number: int) -> int:
    return _calls[number].run()


def _release(number: int) -> None:
    del _calls[number]


_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_run)
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_release)


def queue(stream: int, call: StreamCall) -> None:
    """Queue the call on the stream, or add it to the stream's capture."""
    number = next(_numbers)
    _calls[number] = call
    try:
        _native.call("StreamLaunchHostFunction", stream, _RUN, number, _RELEASE)
    except BaseException:
        del _calls[number]
        raise
