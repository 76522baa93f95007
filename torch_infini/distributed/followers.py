"""Followers: ranks of torchrun, on any machine, that run the calls of rank 0; follow: what each of them runs.

As Workers, for processes that this one has not started: calls go by Gloo's broadcast, in a group of their own.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch

_NAME = "torch_infini.distributed.Followers"
# Followers wait for a call as long as there are no requests. A rank that ends closes its connections, which ends the
# wait of the others at once.
FOREVER = timedelta(days=3650)
HEADER = 8  # bytes of the length of a call
FIRST = 8192  # bytes of the first message of a call; a longer one has a second message


class Followers:
    """The ranks of torchrun but this one, rank 0; all of them must call follow at the same time as this is made.

    Raises:
        ValueError: If the ranks are not those of torch.distributed.
        RuntimeError: If the ranks cannot be connected.
    """

    def __init__(self) -> None:
        if not torch.distributed.is_initialized():
            rule = "the ranks must be those of torch.distributed or processes that this one starts"
            raise ValueError(f"{_NAME}: {rule}, got others")
        self._group = torch.distributed.new_group(backend="gloo", timeout=FOREVER)
        self._is_open = True

    @property
    def all_alive(self) -> bool:
        """Whether no call has failed yet."""
        return self._is_open

    def send(self, method: str, *args: Any) -> None:
        """Send a method call to every rank and return; the results are discarded.

        Raises:
            RuntimeError: If a rank has ended, or this is closed.
        """
        if not self._is_open:
            raise RuntimeError(f"{_NAME}: all ranks must be there, got one that has ended")
        try:
            self._broadcast((method, args))
        except RuntimeError as error:
            self._is_open = False
            raise RuntimeError(f"{_NAME}: all ranks must be there, got one that has ended: {error}") from error

    @contextmanager
    def relay_errors(self) -> Iterator[None]:
        """Note an error of a collective in the body: the ranks are not in step any more."""
        try:
            yield
        except RuntimeError:
            self._is_open = False
            raise

    def close(self) -> None:
        """Let the other ranks return from follow."""
        if self._is_open:
            self._is_open = False
            with suppress(RuntimeError):
                self._broadcast(None)

    def _broadcast(self, call: tuple[str, tuple[Any, ...]] | None) -> None:
        data = pickle.dumps(call, pickle.HIGHEST_PROTOCOL)
        content = len(data).to_bytes(HEADER, "little") + data
        first = content[:FIRST].ljust(FIRST, b"\0")
        for message in (first, content[FIRST:]):
            if message:
                torch.distributed.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), 0, self._group)


def follow(served: object) -> None:
    """Run the calls of rank 0 on an object, until rank 0 closes its Followers.

    Raises:
        RuntimeError: If rank 0 has ended without that, or a call failed.
    """
    group = torch.distributed.new_group(backend="gloo", timeout=FOREVER)
    while (call := _receive(group)) is not None:
        method, args = call
        getattr(served, method)(*args)


def _receive(group: Any) -> tuple[str, tuple[Any, ...]] | None:
    first = torch.empty(FIRST, dtype=torch.uint8)
    torch.distributed.broadcast(first, 0, group)
    content = first.numpy().tobytes()
    left = HEADER + int.from_bytes(content[:HEADER], "little") - FIRST
    if left > 0:
        rest = torch.empty(left, dtype=torch.uint8)
        torch.distributed.broadcast(rest, 0, group)
        content += rest.numpy().tobytes()
    call: tuple[str, tuple[Any, ...]] | None = pickle.loads(content[HEADER:])
    return call
