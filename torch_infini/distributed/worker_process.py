"""WorkerProcess: a process started by a Workers object, through the fork server of this process.

worker_main.py is its program, fork_server.py the server's. A program has one server, a new interpreter, from its first
workers or prepare_workers() to its end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

NUMBER = struct.Struct("i")  # in a worker's pipe: its pid, then its exit status
DESCRIPTORS = 5  # per request: the worker's socket, the pipe's end, its folder, its stdout and stderr

# torch's import is a tenth faster without garbage collection. OpenBLAS, which numpy imports, starts threads when it is
# loaded, and a process with threads cannot be forked.
_START = """
import gc, signal
gc.disable()
signal.signal(signal.SIGINT, signal.SIG_IGN)
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import torch_infini.engine, torch_infini.patch  # what workers run, loaded once
from torch_infini.distributed.fork_server import main
main(int(sys.argv[2]))
"""
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Start:
    """The first message to a worker.

    Attributes:
        rank, size: The worker's rank and the group's size.
        unique: The id for the group's Communicator.
        threads: The number of threads for kernels.
        environment, path: os.environ and sys.path of rank 0.
    """

    rank: int
    size: int
    unique: bytes
    threads: int
    environment: Mapping[str, str]
    path: Sequence[str]


class WorkerProcess:
    """A worker, from the view of its parent. Its system parent is the fork server, which learns its exit status.

    Args:
        pipe: Delivers the pid, then the exit status.
    """

    def __init__(self, pipe: int) -> None:
        self._pipe, self._numbers = pipe, list[int]()
        self._lock = threading.Lock()

    def __del__(self) -> None:
        os.close(self._pipe)

    @property
    def pid(self) -> int | None:
        """The process id; None if it was never started. Waits for the start."""
        return self._number(0, None)

    def poll(self) -> int | None:
        """Return the exit status (a signal is negative), or None if it is running or the server ended first."""
        return self._number(1, 0.0)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the exit status and return it; None if the server ended first.

        Raises:
            TimeoutError: If the process is still running after `timeout` seconds.
        """
        status = self._number(1, timeout)
        if status is None and not self._is_at_end():
            raise TimeoutError(f"a worker must end within {timeout:g} s, got one that runs")
        return status

    def kill(self) -> None:
        """Kill the process if it is running."""
        if self.poll() is None and self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _number(self, index: int, timeout: float | None) -> int | None:
        end = None if timeout is None else time.monotonic() + timeout
        readable = select.poll()
        readable.register(self._pipe, select.POLLIN)
        with self._lock:
            while len(self._numbers) <= index:
                left = None if end is None else max(0.0, end - time.monotonic()) * 1000
                if not readable.poll(left):
                    return None
                data = os.read(self._pipe, NUMBER.size)  # a pipe delivers at once what was written at once
                if not data:
                    return None
                self._numbers += NUMBER.unpack(data)
            return self._numbers[index]

    def _is_at_end(self) -> bool:
        readable = select.poll()
        readable.register(self._pipe, 0)
        return bool(readable.poll(0))


class _ForkServer:
    def __init__(self) -> None:
        self._requests, there = socket.socketpair()
        with there:
            self._process = _started(there.fileno())
        self.close = weakref.finalize(self, _close, self._requests, self._process)

    def runs(self) -> bool:
        return self._process.poll() is None

    def start(self) -> tuple[Connection, WorkerProcess]:
        here, there = socket.socketpair()
        read, write = os.pipe()
        process = WorkerProcess(read)
        descriptors = [there.detach(), write]
        try:
            descriptors.append(os.open(".", os.O_RDONLY | os.O_DIRECTORY))
            descriptors += map(_stream, (1, 2))
            assert len(descriptors) == DESCRIPTORS
            socket.send_fds(self._requests, [b"w"], descriptors)
        except OSError:
            here.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return Connection(here.detach()), process

    def forget(self) -> None:
        """Leave the server to the parent process; called in a forked child."""
        self.close.detach()
        self._requests.close()
        self._process.returncode = 0  # it is not a child of this process


def _started(descriptor: int) -> subprocess.Popen[bytes]:
    """Start a server."""
    # Not multiprocessing's server, whose children would import the program's main module again.
    return subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path), str(descriptor)],
        pass_fds=[descriptor],
        env={**os.environ, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _close(requests: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End a server, even one that is still importing; workers end by themselves."""
    requests.close()
    process.kill()
    process.wait()


def _stream(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError:  # the program may have closed it
        return os.open(os.devnull, os.O_WRONLY)


_lock = threading.Lock()
_server: _ForkServer | None = None


def _running() -> _ForkServer:
    global _server
    if _server is None or not _server.runs():
        if _server is not None:
            _server.close()
        _server = _ForkServer()
    return _server


def start_worker() -> tuple[Connection, WorkerProcess]:
    """Start a worker; it may become ready later.

    Returns:
        (connection, process): the connection's other end is the worker's.

    Raises:
        OSError: If no process can be started.
    """
    with _lock:
        try:
            return _running().start()
        except ConnectionError:  # the server has ended, which the system did not report a moment ago
            _running().close()
            return _running().start()


def prepare_workers() -> None:
    """Start the process that workers are forked from, and return at once.

    It imports torch for a second, in parallel with this program. Programs need not call this: the first model with
    tensor_parallel does. A worker has os.environ, sys.path, the current folder, stdout and stderr as of its start.
    Settings that torch or torch_infini read at import are those of the first call.
    """
    with _lock:
        _running()


def _after_fork() -> None:
    global _lock, _server
    _lock = threading.Lock()
    if _server is not None:
        _server.forget()
        _server = None


os.register_at_fork(after_in_child=_after_fork)
