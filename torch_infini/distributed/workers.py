"""Workers: processes that this one starts as the other ranks of a model; worker_main.py is what they run.

Each worker holds one object and runs the calls that rank 0 sends, while rank 0 makes the same calls on its own object.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..libinfiniccl import Communicator, unique_id
from .groups import number_of

_NAME = "torch_infini.distributed.Workers"
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from torch_infini.distributed.worker_main import main
main(int(sys.argv[2]))
"""


class Workers:
    """The processes of ranks 1 to size - 1. They end with this object, with close(), or with this process.

    Args:
        size: The number of ranks, this process included.

    Attributes:
        group: The number of the group of all ranks (torch_infini.distributed.communicator); this process is its rank 0.

    Raises:
        RuntimeError: If a process does not start.
    """

    def __init__(self, size: int) -> None:
        threads = max(torch.get_num_threads() // size, 1)
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.close = weakref.finalize(self, _close, self._connections, self._processes)
        unique = unique_id()
        for rank in range(1, size):
            connection, process = _start(threads)
            self._connections.append(connection)
            self._processes.append(process)
            connection.send((rank, size, unique, threads))
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.recv()  # the process is up: from now on libinfiniccl notices if it ends
            except EOFError:
                code = self._processes[rank - 1].wait()
                raise RuntimeError(f"{_NAME}: rank {rank} must start, got exit status {code}") from None
        self._communicator = Communicator(size, unique, 0)
        self.group = number_of(self._communicator, size)
        torch.set_num_threads(threads)

    @property
    def all_alive(self) -> bool:
        """Whether every process is running."""
        return all(process.poll() is None for process in self._processes)

    def make(self, make: Callable[..., Any], *args: Any) -> None:
        """Make every worker's object: make(tp_group, *args). Call this once, before send and call.

        Args:
            make: A function or class of a module; it and the arguments are pickled.
        """
        self._broadcast((make, args))

    def send(self, method: str, *args: Any) -> None:
        """Send a method call to every worker and return at once; the results are dropped."""
        self._broadcast((method, args, False))

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every worker's object, wait, and return the results of ranks 1, 2, ..."""
        self._broadcast((method, args, True))
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
        """Raise the error of a worker that failed, in place of the error that its end causes in the body.

        Raises:
            RuntimeError: With the worker's message.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            for rank, connection in enumerate(self._connections, 1):
                with suppress(OSError, EOFError):
                    if connection.poll(0.5):
                        _reply(connection, rank)
            if isinstance(error, OSError):
                raise RuntimeError(f"{_NAME}: all ranks must be there, got one that has ended") from error
            raise


def _start(threads: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    here, there = socket.socketpair()
    with there:
        # Not multiprocessing, which would import the program's main module again.
        command = [sys.executable, "-c", _START, json.dumps(sys.path), str(there.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment, stdin=subprocess.DEVNULL)
    return Connection(here.detach()), process


def _reply(connection: Connection, rank: int) -> Any:
    """Receive a worker's result; RuntimeError with its message if the call failed."""
    failed, value = pickle.loads(connection.recv_bytes())
    if failed:
        raise RuntimeError(f"rank {rank}: {value}")
    return value


def _close(connections: list[Connection], processes: list[subprocess.Popen[bytes]]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
