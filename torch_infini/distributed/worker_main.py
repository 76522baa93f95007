"""worker_main: the entry point of a worker process. It holds one object and runs the calls that Workers sends."""

from __future__ import annotations

import os
import pickle
import select
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from ..libinfiniccl import Communicator
from .groups import number_of
from .tensor_parallel import TPGroup

AWAKE = 0.002  # seconds for which a worker polls for its next call before it sleeps


def main(descriptor: int) -> None:
    """Join the group and serve calls until the connection closes.

    Args:
        descriptor: Of this process's end of a socket; workers.py has the other end.
    """
    connection = Connection(descriptor)
    rank, size, unique, threads = connection.recv()
    torch.set_num_threads(threads)
    connection.send(None)
    try:
        communicator = Communicator(size, unique, rank)
        _serve(connection, TPGroup(rank, size, number_of(communicator, size)))
    except EOFError:
        return  # rank 0 closed the connection
    except Exception as error:
        with suppress(OSError):  # rank 0 may have ended
            connection.send_bytes(pickle.dumps((True, str(error) or type(error).__name__)))
        sys.exit(1)


def _serve(connection: Connection, tp_group: TPGroup) -> None:
    make, args = pickle.loads(connection.recv_bytes())
    served = make(tp_group, *args)
    readable = select.poll()
    readable.register(connection.fileno(), select.POLLIN)
    while True:
        method, args, replies = pickle.loads(_receive(connection, readable))
        value = getattr(served, method)(*args)
        if replies:
            connection.send_bytes(pickle.dumps((False, value), pickle.HIGHEST_PROTOCOL))


def _receive(connection: Connection, readable: select.poll) -> bytes:
    """Receive the next message, polling at first: steps follow each other closely and all ranks wait for the slowest,
    so that waking from sleep would delay every step."""
    end = time.perf_counter() + AWAKE
    while not readable.poll(0) and time.perf_counter() < end:
        os.sched_yield()
    return connection.recv_bytes()
