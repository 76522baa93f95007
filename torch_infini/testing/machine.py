"""Scopes in which another instruction set or another number of threads is in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .._library import cpu_capability, set_cpu_capability


@contextmanager
def cpu_capability_set_to(name: str) -> Iterator[None]:
    """Run the body with the CPU kernels of one instruction set; ValueError if the machine lacks it."""
    before = cpu_capability()
    set_cpu_capability(name)
    try:
        yield
    finally:
        set_cpu_capability(before)


@contextmanager
def threads_set_to(count: int) -> Iterator[None]:
    """Run the body with torch's (and so our) number of threads set to count."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
