"""fork_server: the program of a helper process that has imported torch and forks a worker per request.

An import of torch takes over a second, a fork 20 ms. The caller itself must not be forked: once it computes, its
threads may hold locks, and OpenMP's pool does not survive in a child. This process computes nothing and has one thread.
worker_process.py starts it.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress

from . import worker_main
from .worker_process import DESCRIPTORS, NUMBER

_ALONE = """
import gc, json, sys
gc.disable()
sys.path[:] = json.loads(sys.argv[1])
from torch_infini.distributed.fork_server import run_alone
run_alone(int(sys.argv[2]), int(sys.argv[3]))
"""


def main(descriptor: int) -> None:
    """Serve requests until the requesting process ends.

    Args:
        descriptor: A socket. Each received byte is a request and carries DESCRIPTORS file descriptors.
    """
    gc.freeze()  # a collection in a worker would copy every page of the imported modules
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the workers' parent; later workers are forked from here
    requests = socket.socket(fileno=descriptor)
    ended, wakeup = socket.socketpair()
    wakeup.setblocking(False)
    signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # it only has to write to wakeup
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    pipes: dict[int, int] = {}  # by worker pid
    while True:
        for key, _ in selector.select():
            if key.fileobj is ended:
                ended.recv(4096)
                _reap(pipes)
                continue
            data, descriptors, _, _ = socket.recv_fds(requests, 1, DESCRIPTORS)
            if not data:
                os._exit(0)
            worker, pipe, *rest = descriptors
            pid = _fork(worker, *rest) if _threads() == 1 else _spawn(worker, *rest)
            if pid == 0:  # the worker, which never returns to the loop
                selector.close()
                for end in (requests, ended, wakeup):
                    end.close()
                for number in (pipe, *pipes.values()):
                    os.close(number)
                _run(worker, rest[0])
            for number in (worker, *rest):
                os.close(number)
            pipes[pid] = pipe
            with suppress(OSError):  # nobody reads the pipe any more
                os.write(pipe, NUMBER.pack(pid))


def _threads() -> int:
    """Return the number of this process's threads: one, unless an imported module has started others."""
    return len(os.listdir("/proc/self/task"))


def _fork(worker: int, folder: int, out: int, err: int) -> int:
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        os.close(err)
    return pid


def _spawn(worker: int, folder: int, out: int, err: int) -> int:
    """Start a worker that imports everything itself, because a fork might copy a lock that another thread holds."""
    os.set_inheritable(worker, True)
    os.set_inheritable(folder, True)
    command = [sys.executable, "-c", _ALONE, json.dumps(sys.path), str(worker), str(folder)]
    streams = [(os.POSIX_SPAWN_DUP2, out, 1), (os.POSIX_SPAWN_DUP2, err, 2)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=streams, setsigdef=[signal.SIGINT])


def run_alone(worker: int, folder: int) -> None:
    """Run a worker that was not forked."""
    _run(worker, folder)


def _run(worker: int, folder: int) -> None:
    """Run a worker and end the process without the half second that finalizing torch would take."""
    status = 1
    try:
        gc.enable()
        os.fchdir(folder)
        os.close(folder)
        status = worker_main.main(worker)
    except KeyboardInterrupt:  # rank 0's process got it too, and reports it
        status = 130
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _reap(pipes: dict[int, int]) -> None:
    """Report the exit status of every worker that has ended; a signal's number is negative."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        pipe = pipes.pop(pid)
        with suppress(OSError):
            os.write(pipe, NUMBER.pack(os.waitstatus_to_exitcode(status)))
        os.close(pipe)
