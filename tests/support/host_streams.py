"""Streams of the CPU for the tests of libinfinirt: both kinds, host functions on them, and what holds them up."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_infini.compat.libinfiniop import LIBINFINIOP

from .c_runtime import INTERNAL_ERROR, LONG, SUCCESS, HostFunction, Release, callbacks, ok, rt, stream


def launch(on: int | None, body: Callable[[], object], released: Callable[[], object] | None = None) -> int:
    """Launches body(); returns the status. A body's result other than an int means success."""

    def run(_: object) -> int:
        result = body()
        return result if type(result) is int else SUCCESS

    function, release = HostFunction(run), Release(lambda _: released()) if released else None
    callbacks.extend((function, release))
    return rt.infinirtStreamLaunchHostFunction(on, function, None, release)


class Gate:
    """Holds a stream up until it is opened."""

    def __init__(self, on: int) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        assert launch(on, self.pass_) == SUCCESS

    def pass_(self) -> int:
        self.reached.set()
        return SUCCESS if self.opened.wait(LONG) else INTERNAL_ERROR

    def open(self) -> None:
        self.opened.set()


@pytest.fixture(params=[False, True], ids=["immediate", "queued"])
def queued(request: pytest.FixtureRequest) -> bool:
    """The kind of stream that s and s2 are."""
    return request.param


@pytest.fixture
def s(queued: bool) -> Iterator[int]:
    yield from a_stream(queued)


@pytest.fixture
def s2(queued: bool) -> Iterator[int]:
    yield from a_stream(queued)


@pytest.fixture
def q() -> Iterator[int]:
    """A queued stream, as q2, for tests that hold work up."""
    yield from a_stream(True)


@pytest.fixture
def q2() -> Iterator[int]:
    yield from a_stream(True)


@pytest.fixture
def i() -> Iterator[int]:
    """An immediate one."""
    yield from a_stream(False)


def a_stream(queued: bool) -> Iterator[int]:
    handle = stream(queued)
    yield handle
    ok("StreamDestroy", handle)


linux = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")


def python(code: str, streams: str = "queued") -> None:
    start = f"import ctypes, _ctypes, time\nrt = ctypes.CDLL({LIBINFINIOP.librt._name!r})\ns = ctypes.c_void_p()\n"
    environment = {**os.environ, "INFINI_CPU_STREAMS": streams}
    done = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
