"""81 everyday calls of PyTorch on the device infini, each checked against the CPU: `python -m torch_infini device`.

The modules of this package register calls by area; torch_infini.device.enable must be called before they run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from . import basics, computing, system
from .checks import CALLS, ExampleCall

__all__ = ["CALLS", "ExampleCall", "Outcome", "basics", "computing", "run", "system"]


class Outcome(NamedTuple):
    """The outcome of a call.

    Attributes:
        call: The call.
        error: The exception it raised; None if it gave the CPU's result.
        note: What another library does not support, if anything.
        seconds: How long it took.
    """

    call: ExampleCall
    error: Exception | None
    note: str | None
    seconds: float


def run(calls: Iterable[ExampleCall] | None = None) -> Iterator[Outcome]:
    """Run everyday calls, by default all of CALLS, and yield each outcome; an exception ends only its call."""
    for call in CALLS.values() if calls is None else calls:
        start = time.perf_counter()
        note, error = None, None
        try:
            note = call.function()
        except Exception as raised:  # any exception is an outcome
            error = raised
        yield Outcome(call, error, note, time.perf_counter() - start)
