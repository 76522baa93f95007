"""fork_caller: a fork of this process that runs a function and never returns, made only where a fork is safe.

worker_process.py makes the fork server by it: the copy has torch already, whose import takes a second.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import stat
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

MOST_MEMORY = 512 << 20  # bytes of a process that is forked: the copy keeps what the process frees later
_NO_DEVICES = {1, 4, 5, *range(136, 144)}  # major numbers: memory (/dev/null, ...), terminals


class ForkedProcess:
    """A child of this process, with the names of subprocess.Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, a signal's number below 0, or None: it runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait for the exit status and return it."""
        return self._wait(0)

    def kill(self) -> None:
        """End the process, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # another wait of this program got the status, or it ignores SIGCHLD
                self.returncode = 0
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def fork_caller(main: Callable[[int], object], descriptor: int) -> tuple[ForkedProcess | None, str]:
    """Run main(descriptor) in a fork of this process, with /dev/null as stdin and stdout.

    Locks that other threads hold would stay locked in the fork, and OpenMP's threads would be missing there. So it runs
    nothing unless this thread was the only one while it was made. The threads of numpy's OpenBLAS do not count: a fork
    ends them first, and the next product starts them again.

    Args:
        descriptor: The only one, with stderr, that stays open in the fork.

    Returns:
        (process, ""), or (None, the reason why this process cannot be forked).
    """
    reason = obstacle()
    if reason:
        return None, reason
    read, write = os.pipe()
    try:
        with _signals_blocked() as mask, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, where there are other threads
            pid = os.fork()
            if pid == 0:
                os.close(write)
                _run(main, descriptor, read, mask)
            threads = len(os.listdir("/proc/self/task"))
        process = ForkedProcess(pid)
        if threads == 1:
            os.write(write, b"g")
            return process, ""
    except OSError as error:
        return None, str(error)
    finally:
        os.close(read)
        os.close(write)
    process.kill()
    process.wait()
    return None, f"it has {threads} threads"


def obstacle() -> str:
    """Return why this process cannot be forked, before its threads are counted; "" if nothing is known."""
    if threading.active_count() > 1:
        return f"it has {threading.active_count()} threads of Python's"
    if (
        torch.is_inference_mode_enabled()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
    ):
        return "it is in a mode of torch's, which the fork would not leave"
    status = Path("/proc/self/status").read_text().splitlines()
    memory = sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon:", "RssShmem:")))
    if memory > MOST_MEMORY:
        return f"it has {memory >> 20} MiB of memory, more than {MOST_MEMORY >> 20}"
    device = next(filter(_is_device, _descriptors()), None)
    if device is not None:  # a driver's context does not survive a fork
        return f"it has opened {os.readlink(f'/proc/self/fd/{device}')}"
    return ""


def _descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _stderr() -> set[int]:
    """Return {2}, unless the caller closed it: a file that Python opened at its number is not inherited."""
    with suppress(OSError):
        return {2} if os.get_inheritable(2) else set()
    return set()


def _is_device(descriptor: int) -> bool:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return stat.S_ISCHR(status.st_mode) and os.major(status.st_rdev) not in _NO_DEVICES


@contextmanager
def _signals_blocked() -> Iterator[set[Any]]:
    """Keep the caller's signal handlers, which may raise, from running in the fork. Gives the mask from before."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run(main: Callable[[int], object], descriptor: int, go: int, mask: set[Any]) -> NoReturn:
    """Run main in the fork. Nothing of the caller may run: no handler, no flush, no exit function."""
    try:
        if os.read(go, 1):
            main(_leave_the_caller(descriptor, mask))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _leave_the_caller(descriptor: int, mask: set[Any]) -> int:
    """Part with the caller's files, signal handlers and half-written lines, and return the descriptor's new number."""
    gc.disable()
    sys.settrace(None)
    sys.setprofile(None)
    kept = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)  # a caller may have closed its stdin
    null = fcntl.fcntl(os.open(os.devnull, os.O_RDWR), fcntl.F_DUPFD_CLOEXEC, 3)
    for other in {0, 1, 2, *_descriptors()} - {kept, null} - _stderr():
        os.dup2(null, other, inheritable=other < 3)  # not closed: the caller's objects may close the number once more
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return kept
