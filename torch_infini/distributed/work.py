"""InfiniWork: the result of an asynchronous collective; WorkThread: runs a group's collectives in order."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from .._core.devices import INFINI

NO_TIMEOUT = timedelta(0)  # torch's kNoTimeout


class InfiniWork(torch.distributed.Work):
    """The result of a collective on a group's thread.

    wait() raises the exception of the collective. The value of get_future() is the list of result tensors; it fails as
    wait() does, in C++ too, where DDP's reducer waits for it.
    """

    def __init__(self, results: list[Any]) -> None:
        super().__init__()
        self._results = results
        self._error: BaseException | None = None
        self.ended = threading.Event()
        # torch's futures carry tensors of the CPU and of the listed devices.
        devices: list[int | str | torch.device] = [*{x.device for x in tensors_in(results) if x.device.type == INFINI}]
        self._trigger: Future[None] = Future(devices=devices) if devices else Future()
        # An exception set by Future.set_exception is visible to Python only; one that a callback raises, to C++ too.
        self._future = self._trigger.then(lambda _: self.result())

    def finish(self, error: BaseException | None = None) -> None:
        """Complete the work; called by the thread that ran the collective."""
        self._error = error
        self.ended.set()
        self._trigger.set_result(None)

    def follow(self, future: Future[Any]) -> None:
        """Complete the work with the result of another work's future."""
        try:
            future.value()
        except BaseException as error:
            self.finish(error)
        else:
            self.finish()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        seconds = timeout.total_seconds()
        if not self.ended.wait(seconds if seconds > 0 else None):
            raise RuntimeError(f"infiniccl: a collective must end within the timeout of its wait, {seconds:g} s")
        if self._error is not None:
            raise self._error
        return True

    def result(self) -> list[Any]:
        self.wait()
        return self._results

    def get_future(self) -> Any:
        return self._future

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def is_success(self) -> bool:
        return self.ended.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error


def tensors_in(results: Any) -> list[Tensor]:
    """Return the tensors of nested lists."""
    return [results] if isinstance(results, Tensor) else [x for part in results for x in tensors_in(part)]


class DoneWork(torch.distributed.Work):
    """The result of a collective that ran on the caller's thread: complete from the start."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class Works(torch.distributed.Work):
    """Several works combined."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return all(work.wait(timeout) for work in self._works)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)


def together(works: Iterable[Any]) -> Any:
    known = list(works)
    return known[0] if len(known) == 1 else Works(known)


_PATIENCE = 2.0  # seconds to wait, at the program's end, for collectives that other ranks may never join


class WorkThread:
    """A thread that runs functions in the order of submit() calls; the first call starts it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[tuple[Callable[[], object], InfiniWork] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._last: threading.Event | None = None  # of the last work; the work itself would keep its tensors alive

    def idle(self) -> bool:
        """Return whether no function is queued or running."""
        return self._last is None or self._last.is_set()

    def submit(self, function: Callable[[], object], results: list[Any]) -> InfiniWork:
        work = InfiniWork(results)
        with self._lock:
            if self._thread is None:
                # A daemon, so that a program that ends without destroying its groups does not wait for ranks that never
                # join.
                self._thread = threading.Thread(target=_run, args=(self._queue,), name=self._name, daemon=True)
                self._thread.start()
                _started.add(self)
            self._last = work.ended
            self._queue.put((function, work))
        return work

    def stop(self, patience: float | None = None) -> None:
        """Wait until all submitted functions have run, or for `patience` seconds, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(patience)
            self._thread = None


_started: weakref.WeakSet[WorkThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop the threads before Python ends: a thread that is stopped inside C++ would crash the process."""
    for worker in list(_started):
        worker.stop(_PATIENCE)


def _run(queue: SimpleQueue[tuple[Callable[[], object], InfiniWork] | None]) -> None:
    with torch.no_grad():
        while (item := queue.get()) is not None:
            function, work = item
            try:
                function()
            except BaseException as error:
                work.finish(error)
            else:
                work.finish()
            del item, function, work  # releases their tensors too
