"""on_ranks: runs a function as the ranks of a tensor-parallel group, each a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from .groups import number_of
from .libinfiniccl import Communicator
from .tensor_parallel import TPGroup

SECONDS = 60.0  # that a rank waits for the others


def on_ranks(size: int, work: Callable[[TPGroup], Any]) -> list[Any]:
    """Return what each rank's call work(tp_group) returns, or the exception that it raises.

    Where one raises something other than ValueError, to which all ranks come, the others' collectives end too.
    """
    communicators = Communicator.all(size)
    for communicator in communicators:
        communicator.set_timeout(SECONDS)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(TPGroup(rank, size, number_of(communicators[rank], size)))
        except Exception as error:
            results[rank] = error
            if not isinstance(error, ValueError):
                communicators[rank].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
