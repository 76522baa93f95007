"""track: an iterator with a progress bar: total, rate and the time left, by tqdm, on stderr where that is a terminal.

Loading, quantizing and long generate calls use it. Where tqdm is not installed nothing is shown.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
DELAY = 0.5  # seconds before a bar that nobody asked for appears: short work shows none


def track(
    items: Iterable[T], what: str, sizes: Sequence[int], shown: bool | None = None, unit: str = "it", delay: float = 0.0
) -> Iterator[T]:
    """Yield the items; the bar moves by an item's size as it comes.

    Args:
        items: As many as sizes.
        what: What is done, before the bar.
        sizes: Of each item, in `unit`.
        shown: Whether to show the bar; None: if stderr is a terminal.
        unit: "B" for bytes, which are shown in kB, MB and GB.
        delay: Seconds that pass before the bar appears.
    """
    if not sizes or not (sys.stderr.isatty() if shown is None else shown):
        yield from items
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]  # it has no stubs
    except ImportError:
        yield from items
        return
    with tqdm(
        desc=what,
        total=sum(sizes),
        unit=unit,
        unit_scale=unit == "B",
        file=sys.stderr,
        dynamic_ncols=True,
        delay=delay,
    ) as bar:
        left = iter(sizes)
        for item in items:
            bar.update(next(left, 0))  # a wrong number of sizes must not fail the work
            yield item


def finish(steps: Iterable[object]) -> None:
    """Run an iterator to its end."""
    deque(steps, 0)
