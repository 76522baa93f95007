"""worker_main: the program of a worker process. It holds one object and runs the calls that Workers sends."""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from .groups import number_of
from .libinfiniccl import Communicator
from .tensor_parallel import TPGroup
from .worker_process import Start

AWAKE = 0.002  # seconds that a worker polls for its next call before it sleeps
GRACE = 1.0  # seconds that a worker has to end by itself after rank 0 has closed the connection, or has ended


def main(descriptor: int) -> int:
    """Join the group and serve calls until the connection closes.

    Args:
        descriptor: This process's end of a socket; workers.py has the other end.

    Returns:
        The exit status.
    """
    threading.Thread(target=_end_with_rank_0, args=(descriptor,), daemon=True).start()
    connection = Connection(descriptor)
    try:
        start: Start = pickle.loads(_receive(connection))
        os.environ.clear()
        os.environ.update(start.environment)
        sys.path[:] = start.path
        torch.set_num_threads(start.threads)
        _send(connection, None)
        communicator = Communicator(start.size, start.unique, start.rank)
        _serve(connection, TPGroup(start.rank, start.size, number_of(communicator, start.size)))
    except _Closed:
        return 0
    except Exception as error:
        with suppress(_Closed):
            _send(connection, (True, str(error) or type(error).__name__))
        return 1


class _Closed(Exception):
    """Rank 0 has closed the connection, or has ended."""


def _end_with_rank_0(descriptor: int) -> None:
    """End this process soon after the connection is closed, whatever it computes or waits for."""
    closed = select.poll()
    closed.register(descriptor, 0)  # only POLLHUP, which is always reported
    closed.poll()
    time.sleep(GRACE)
    os._exit(1)


def _serve(connection: Connection, tp_group: TPGroup) -> NoReturn:
    make, args = pickle.loads(_receive(connection))
    served = make(tp_group, *args)
    readable = select.poll()
    readable.register(connection.fileno(), select.POLLIN)
    while True:
        _wait(readable)
        method, args, replies = pickle.loads(_receive(connection))
        value = getattr(served, method)(*args)
        if replies:
            _send(connection, (False, value))


def _wait(readable: select.poll) -> None:
    """Poll for the next message for a while before sleeping: steps follow each other closely and all ranks wait for
    the
    slowest, so waking up from sleep would delay every step."""
    end = time.perf_counter() + AWAKE
    while not readable.poll(0) and time.perf_counter() < end:
        os.sched_yield()


def _receive(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionError):
        raise _Closed from None


def _send(connection: Connection, value: Any) -> None:
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    try:
        connection.send_bytes(data)
    except ConnectionError:
        raise _Closed from None
