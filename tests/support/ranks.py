"""Ranks: processes of one torch.distributed world, for tests: they run functions of the tests' files side by side."""

from __future__ import annotations

import datetime
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import connection
from types import TracebackType
from typing import Any

from torch_infini.testing.processes import forking

LONG = 240.0  # seconds after which ranks that do not answer have failed; compilers are slow on a busy machine


class Ranks:
    """Ranks 0 to size - 1, each a process with one thread for kernels, in a group of backend infiniccl.

    Args:
        size: How many.
        timeout: The group's, in seconds.
        environment: More variables, for all ranks.
        initialise: Whether they call init_process_group() at once.
    """

    def __init__(
        self, size: int, timeout: float = LONG, environment: dict[str, str] | None = None, initialise: bool = True
    ) -> None:
        self._settings = size, timeout, environment or {}, initialise
        self._start()

    def _start(self) -> None:
        size, timeout, environment, initialise = self._settings
        self._failed = False
        context = forking()
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            arguments = (there, rank, size, timeout, f"{self._folder.name}/store", environment, initialise)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)
        self.answers()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, function: Callable[..., Any], *arguments: Any, only: Sequence[int] | None = None) -> None:
        """Have the ranks, or some of them, call a function of a test's file; new ones where a test's calls failed."""
        if self._failed:
            self._start()
        for rank in self._all(only):
            self._pipes[rank].send((function, arguments))

    def answers(self, only: Sequence[int] | None = None, seconds: float = LONG) -> list[Any]:
        """What the calls returned; an exception's traceback fails the test."""
        told: dict[int, tuple[bool, Any]] = {}
        waiting = {self._pipes[rank]: rank for rank in self._all(only)}
        end = time.monotonic() + seconds
        while waiting and (ready := connection.wait(waiting, max(0.0, end - time.monotonic()))):
            for pipe in [pipe for pipe in waiting if pipe in ready]:
                rank = waiting.pop(pipe)
                try:
                    told[rank] = pipe.recv()
                except EOFError:
                    told[rank] = (False, "its process ended")
                if not told[rank][0]:  # the others may wait for it for ever
                    end = min(end, time.monotonic() + 5)
        failed = [f"rank {rank}:\n{result}" for rank, (good, result) in sorted(told.items()) if not good]
        failed += [f"rank {rank} has not answered" for rank in self._all(only) if rank not in told]
        if failed:
            self.close()  # whatever they wait for, the next test's calls are not it
            self._failed = True
            raise AssertionError("\n".join(failed))
        return [result for _, (_, result) in sorted(told.items())]

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Both, on all ranks."""
        self.begin(function, *arguments)
        return self.answers()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        end = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _all(self, only: Sequence[int] | None) -> Sequence[int]:
        return range(len(self._pipes)) if only is None else only


def _serve(
    pipe: Any, rank: int, size: int, timeout: float, store: str, environment: dict[str, str], initialise: bool
) -> None:
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    import torch
    import torch.distributed as dist

    import torch_infini  # noqa: F401

    torch.set_num_threads(1)

    def start() -> None:
        if initialise:
            limit = datetime.timedelta(seconds=timeout)
            dist.init_process_group("infiniccl", f"file://{store}", limit, rank=rank, world_size=size)

    _answer(pipe, start)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:  # the tests are over
            break
        _answer(pipe, function, *arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


def _answer(pipe: Any, function: Callable[..., Any], *arguments: Any) -> None:
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
