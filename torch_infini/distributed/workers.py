"""Workers: processes that this one starts as the other ranks of a model; worker_main.py is their program.

Each worker holds one object and runs the calls that rank 0 sends, while rank 0 makes the same calls on its own object.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import torch

from .groups import number_of
from .libinfiniccl import Communicator, unique_id
from .worker_process import Start, WorkerProcess, start_worker

_NAME = "torch_infini.distributed.Workers"
_TIMEOUT = 300.0  # libinfiniccl's default
_MAX_POLL_SECONDS = 1e6  # seconds, the limit of poll(2)
SECONDS = 10.0  # seconds that a worker has to end after its connection is closed


class Workers:
    """The processes of ranks 1 to size - 1. They end with this object, with close(), or with this process.

    The constructor does not wait for them: they start while the caller reads a model, and calls are sent meanwhile.

    Args:
        size: The number of ranks, this process included. They divide this process's threads among themselves.

    Raises:
        RuntimeError: If no process can be started. If one ends while it starts, the first later call raises.
    """

    def __init__(self, size: int) -> None:
        self._threads = max(torch.get_num_threads() // size, 1)
        self._size, unique = size, unique_id()
        self._connections: list[Connection] = []
        self._processes: list[WorkerProcess] = []
        self._joining = _Joining(self._connections, self._processes, unique)
        arguments = os.getpid(), self._joining, self._connections, self._processes
        self.close = weakref.finalize(self, _close, *arguments)
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
        try:
            for rank in range(1, size):
                connection, process = start_worker()
                self._connections.append(connection)
                self._processes.append(process)
                with suppress(ConnectionError):  # it has ended; the thread below reports it
                    connection.send(Start(rank, size, unique, self._threads, environment, list(sys.path)))
        except OSError as error:
            self.close()
            raise RuntimeError(f"{_NAME}: {size - 1} processes must be startable, got: {error}") from error
        torch.set_num_threads(self._threads)
        self._joining.start()
        _live.add(self)

    @cached_property
    def group(self) -> int:
        """The number of the group of all ranks (torch_infini.distributed.communicator); this process is its rank 0.

        Waits until the workers are up.

        Raises:
            RuntimeError: If one of them failed to start.
        """
        return number_of(self._joining.result(), self._size)

    @property
    def all_alive(self) -> bool:
        """Whether every process is running or still starting."""
        hung_up = select.poll()
        for connection in self._connections:
            if connection.closed:
                return False
            hung_up.register(connection.fileno(), 0)  # only POLLHUP: no other process has the other end
        return not hung_up.poll(0)

    def make(self, make: Callable[..., Any], *args: Any) -> None:
        """Make every worker's object: make(tp_group, *args). Call this once, before send and call.

        Args:
            make: A function or class of a module; it and the arguments are pickled.
        """
        self._broadcast((make, args))

    def send(self, method: str, *args: Any) -> None:
        """Send a method call to every worker and return at once; the results are discarded."""
        self._broadcast((method, args, False))

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker's object, wait, and return the results of ranks 1, 2, ..."""
        self._broadcast((method, args, True))
        self._joining.result()
        try:
            return [_reply(connection, rank) for rank, connection in enumerate(self._connections, 1)]
        except (OSError, EOFError) as error:
            raise RuntimeError(f"{_NAME}: all ranks must be there, got one that has ended") from error

    def _broadcast(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self.relay_errors():
            for connection in self._connections:
                connection.send_bytes(data)

    @contextmanager
    def relay_errors(self) -> Iterator[None]:
        """If a worker has failed, raise its error instead of the error that its end causes in the body.

        Raises:
            RuntimeError: With the worker's message.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._joining.result()
            for rank, connection in enumerate(self._connections, 1):
                with suppress(OSError, EOFError):
                    if connection.poll(0.5):
                        _reply(connection, rank)
            if isinstance(error, OSError):
                raise RuntimeError(f"{_NAME}: all ranks must be there, got one that has ended") from error
            raise


def _reply(connection: Connection, rank: int) -> Any:
    """Receive a worker's result; RuntimeError with its message if the call failed."""
    failed, value = pickle.loads(connection.recv_bytes())
    if failed:
        raise RuntimeError(f"rank {rank}: {value}")
    return value


class _Joining(threading.Thread):
    """Waits until the workers are up, and makes the group's Communicator."""

    def __init__(self, connections: list[Connection], processes: list[WorkerProcess], unique: bytes) -> None:
        super().__init__(name=_NAME, daemon=True)
        self._connections, self._processes, self._unique = connections, processes, unique
        self._communicator: Communicator | None = None
        self._error = "closed while the workers started"
        self._timeout = _timeout()

    def run(self) -> None:
        try:
            for rank, (connection, process) in enumerate(zip(self._connections, self._processes, strict=True), 1):
                try:
                    if not connection.poll(self._timeout):
                        raise RuntimeError(
                            f"{_NAME}: rank {rank} must start within {self._timeout:g} s (INFINI_CCL_TIMEOUT), got no "
                            f"answer from process {process.pid}"
                        )
                    failed = connection.recv()  # None: it is ready; from now on libinfiniccl detects its end
                except (OSError, EOFError):
                    raise RuntimeError(f"{_NAME}: rank {rank} must start, got {_end_of(process)}") from None
                if failed:
                    raise RuntimeError(f"{_NAME}: rank {rank} must start, got: {failed[1]}")
            self._communicator = Communicator(len(self._connections) + 1, self._unique, 0)
        except Exception as error:
            self._error = str(error)

    def result(self) -> Communicator:
        """Wait for the Communicator and return it; RuntimeError on failure."""
        self.join()
        if self._communicator is None:
            raise RuntimeError(self._error)
        return self._communicator


def _timeout() -> float:
    """Return the seconds that a rank waits for another; Communicator rejects invalid numbers."""
    try:
        return min(float(os.environ.get("INFINI_CCL_TIMEOUT", "")), _MAX_POLL_SECONDS)
    except ValueError:
        return _TIMEOUT


def _end_of(process: WorkerProcess) -> str:
    with suppress(TimeoutError):
        status = process.wait(SECONDS)
        return "no process: its server ended" if status is None else f"exit status {status}"
    return "a closed connection"


def _close(owner: int, joining: _Joining, connections: list[Connection], processes: list[WorkerProcess]) -> None:
    if os.getpid() != owner:  # a forked child; the workers are its parent's
        return
    for connection in connections:  # closed only later, because the thread may be reading
        with socket.socket(fileno=os.dup(connection.fileno())) as end, suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    if joining.ident is not None and joining is not threading.current_thread():
        joining.join(SECONDS)
    for connection in connections:
        connection.close()
    for process in processes:
        try:
            process.wait(SECONDS)
        except TimeoutError:
            process.kill()
            process.wait()


_live: weakref.WeakSet[Workers] = weakref.WeakSet()


def _after_fork() -> None:
    """Close a forked child's copies of the connections: workers end when no process holds them any more."""
    for workers in list(_live):
        for connection in workers._connections:
            connection.close()


os.register_at_fork(after_in_child=_after_fork)
