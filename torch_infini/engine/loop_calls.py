"""LoopCalls: calls in an event loop, from other threads, that wake the loop once for all that are waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

Call = tuple[Callable[..., object], tuple[Any, ...]]


class LoopCalls:
    """Runs calls of other threads in an event loop, in their order.

    A step of the engine has an output for each request. call_soon_threadsafe would write to the loop's socket for each
    of them, and make a handle; here the first of those that the loop has not begun with does so for all.

    Args:
        loop: Runs the calls. Once it is closed, they are dropped.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: list[Call] = []

    def add(self, call: Callable[..., object], *args: Any) -> None:
        """Have the loop run call(*args). What it raises goes to the loop's exception handler."""
        with self._lock:
            is_first = not self._waiting
            self._waiting.append((call, args))
        if is_first:
            try:
                self._loop.call_soon_threadsafe(self._run)
            except RuntimeError:  # the loop is closed
                with self._lock:
                    self._waiting = []

    def _run(self) -> None:
        with self._lock:
            calls, self._waiting = self._waiting, []
        for call, args in calls:
            try:
                call(*args)
            except Exception as error:
                context = {"message": f"a call from another thread failed: {call}", "exception": error}
                self._loop.call_exception_handler(context)
