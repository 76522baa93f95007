"""share: the ranks of a model. Under torchrun they are its processes; otherwise this one and Workers, which it starts.

A worker holds one object, and does the calls that it is told of, at the same time as this process's part of the object.
"""

from __future__ import annotations

import json
import os
import pickle
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..libinfiniccl import Communicator, unique_id
from ..nn import Ranks
from .groups import communicator, number_of
from .transport import MOST_RANKS

AWAKE = 0.002  # seconds for which a worker looks for its next call before it sleeps

_NAME = "torch_infini.distributed"
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from torch_infini.distributed.workers import work
work(int(sys.argv[2]))
"""


def share(size: int, device: torch.device | str = "cpu") -> Ranks:
    """The ranks that share a model.

    Args:
        size: How many.
        device: Where this one's part is; on CUDA the ranks must be torchrun's processes.

    Returns:
        Under torchrun, with `size` processes, these, all of which make the same calls. Otherwise this process is rank
        0, and the others are its workers, each with this process's threads divided by size, as this one then.

    Raises:
        ValueError: For a size below 2, under torchrun another one than its number of processes, or CUDA without it.
        RuntimeError: If the ranks do not find each other.
    """
    if not isinstance(size, int) or size < 2:
        raise ValueError(f"{_NAME}.share: size must be an integer of at least 2, got {size!r}")
    if "TORCHELASTIC_RUN_ID" not in os.environ and not torch.distributed.is_initialized():
        if torch.device(device).type != "cpu":
            raise ValueError(f"{_NAME}.share: device must be cpu where torchrun did not start the ranks, got {device}")
        if size > MOST_RANKS:
            raise ValueError(f"{_NAME}.share: size must be at most {MOST_RANKS}, the ranks of one machine, got {size}")
        workers = Workers(size)
        return Ranks(0, size, workers.group, workers)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("infiniccl")
    return ranks_of_world(size, device)


class Workers:
    """Processes that are the other ranks. They end with this object, with close(), or with this process.

    Args:
        size: Ranks, this one included.

    Attributes:
        group: The number of the group of all ranks, of which this process is rank 0.

    Raises:
        RuntimeError: If one does not come up.
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
                connection.recv()  # it is there: from now on libinfiniccl sees it end
            except EOFError:
                code = self._processes[rank - 1].wait()
                raise RuntimeError(f"{_NAME}.Workers: rank {rank} must start, got exit status {code}") from None
        self._communicator = Communicator(size, unique, 0)
        self.group = number_of(self._communicator, size)
        torch.set_num_threads(threads)

    def make(self, make: Callable[..., Any], *args: Any) -> None:
        """Let every worker make its object: make(ranks, *args). To be called first, once.

        Args:
            make: A function or class of a module, as are all that the arguments consist of.
        """
        self._send((make, args))

    def tell(self, method: str, *args: Any) -> None:
        """Let every worker's object do a call; what it returns is dropped."""
        self._send((method, args, False))

    def ask(self, method: str, *args: Any) -> list[Any]:
        """What every worker's object returns of a call, by rank from 1 on."""
        self._send((method, args, True))
        try:
            return [_answer(connection, rank) for rank, connection in enumerate(self._connections, 1)]
        except (OSError, EOFError) as error:
            raise RuntimeError(f"{_NAME}.Workers: all ranks must be there, got one that has ended") from error

    def _send(self, message: Any) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self.watched():
            for connection in self._connections:
                connection.send_bytes(data)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What a worker failed by, instead of the error that its end leads to here.

        Raises:
            RuntimeError: With the worker's sentence.
        """
        try:
            yield
        except (RuntimeError, OSError) as error:
            for rank, connection in enumerate(self._connections, 1):
                with suppress(OSError, EOFError):
                    if connection.poll(0.5):
                        _answer(connection, rank)
            if isinstance(error, OSError):
                raise RuntimeError(f"{_NAME}.Workers: all ranks must be there, got one that has ended") from error
            raise


def _start(threads: int) -> tuple[Connection, subprocess.Popen[bytes]]:
    here, there = socket.socketpair()
    with there:
        # Not multiprocessing, which would import the program's main module anew.
        command = [sys.executable, "-c", _START, json.dumps(sys.path), str(there.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        process = subprocess.Popen(command, pass_fds=[there.fileno()], env=environment, stdin=subprocess.DEVNULL)
    return Connection(here.detach()), process


def _answer(connection: Connection, rank: int) -> Any:
    """What a worker returned; RuntimeError for what it failed by."""
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


def work(descriptor: int) -> None:
    """A worker's life."""
    connection = Connection(descriptor)
    rank, size, unique, threads = connection.recv()
    torch.set_num_threads(threads)
    connection.send(None)
    try:
        joined = Communicator(size, unique, rank)
        _serve(connection, Ranks(rank, size, number_of(joined, size)))
    except EOFError:
        return  # that is the end
    except Exception as error:
        with suppress(OSError):  # nobody is there to hear it
            connection.send_bytes(pickle.dumps((True, str(error) or type(error).__name__)))
        sys.exit(1)


def _serve(connection: Connection, ranks: Ranks) -> None:
    make, args = pickle.loads(connection.recv_bytes())
    served = make(ranks, *args)
    arrived = select.poll()
    arrived.register(connection.fileno(), select.POLLIN)
    while True:
        method, args, asked = pickle.loads(_next(connection, arrived))
        value = getattr(served, method)(*args)
        if asked:
            connection.send_bytes(pickle.dumps((False, value), pickle.HIGHEST_PROTOCOL))


def _next(connection: Connection, arrived: select.poll) -> bytes:
    """The next message. Steps follow each other closely, and all ranks wait for the last: a worker goes to sleep, from
    which it would first have to be woken, only after a while."""
    end = time.perf_counter() + AWAKE
    while not arrived.poll(0) and time.perf_counter() < end:
        os.sched_yield()
    return connection.recv_bytes()


def ranks_of_world(size: int, device: torch.device | str) -> Ranks:
    """This process's place among those of torch.distributed's world.

    Raises:
        ValueError: If they are not `size`.
    """
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if world != size:
        raise ValueError(f"{_NAME}: the ranks must be the processes of torch.distributed, {world}, got {size}")
    return Ranks(rank, size, communicator(None, device))
