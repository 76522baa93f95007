"""Waiting, and the devices there are: for the tests of torch_infini.runtime."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch

from torch_infini.runtime import Stream

LONG = 30.0  # seconds after which a test that waits has failed
HAS_CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_CUDA, reason="no GPU"))]
on_gpu = pytest.mark.skipif(not HAS_CUDA, reason="no GPU")
every_device = pytest.mark.parametrize("device", DEVICES)


class Gate:
    """Holds a stream of the CPU up until it is opened."""

    def __init__(self, stream: Stream) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        stream.launch(self.pass_)

    def pass_(self) -> None:
        self.reached.set()
        assert self.opened.wait(LONG)

    def open(self) -> None:
        self.opened.set()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "still waiting"
        gc.collect()
        time.sleep(0.001)
