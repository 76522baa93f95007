"""fork_caller: the fork of a program that becomes its fork server: what it leaves behind, and when there is none."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_infini.distributed import TPGroup, fork_caller, init_tp_group, worker_process
from torch_infini.testing.processes import forking

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="the ranks meet in /dev/shm")
SECONDS = 20.0  # that something may take on a busy machine


def in_a_program(body: Callable[..., Any], *args: Any) -> Any:
    """Return body(*args) of a process of one thread, as a program is that has imported torch and torch_infini."""
    context = forking()
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(body, args, there))
    process.start()
    there.close()
    assert here.poll(60)
    result = here.recv()
    process.join(SECONDS)
    assert process.exitcode == 0
    return result


def _run(body: Callable[..., Any], args: Any, pipe: Connection) -> None:
    pipe.send(body(*args))


def is_there(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def children() -> list[int]:
    pids = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return [int(pid) for pid in pids if is_there(int(pid))]


class Probe:
    """What a worker holds here."""

    def __init__(self, tp_group: TPGroup) -> None:
        self.tp_group = tp_group

    def add(self, value: float) -> float:
        return self.tp_group.all_reduce(torch.full((3,), value))[0].item()

    def place(self) -> dict[str, Any]:
        print("a line of a worker")
        return {
            "pid": os.getpid(),
            "server": os.getppid(),
            "caught": [number for number in signal.valid_signals() if callable(signal.getsignal(number))],
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            "stdin": os.readlink("/proc/self/fd/0"),
            "trace": sys.gettrace(),
        }


def server_pid() -> int:
    assert worker_process._server is not None
    return worker_process._server._process.pid


def a_program(folder: Path) -> dict[str, Any]:
    """Has handlers, files, a socket that listens and text that was not written yet when it makes its first model."""
    os.dup2(os.open(folder / "stdout", os.O_WRONLY | os.O_CREAT), 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stdout.write("a line of the program\n")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    sys.settrace(lambda *_: None)
    file = os.fdopen(os.open(folder / "file", os.O_WRONLY | os.O_CREAT), "w")
    file.write("text")
    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    groups = [init_tp_group(2) for _ in range(2)]
    places, sums = [], []
    for tp_group in groups:
        assert tp_group.workers is not None
        tp_group.workers.make(Probe)
        places += tp_group.workers.call("place")
        tp_group.workers.send("add", 2.0)
        sums.append(Probe(tp_group).add(1.0))
    file.close()
    listener.close()
    again = socket.create_server(place)  # nobody else has it open
    again.close()
    server = server_pid()
    held = [os.readlink(f"/proc/{server}/fd/{name}") for name in os.listdir(f"/proc/{server}/fd")]
    sys.stdout.flush()
    return {
        "places": places,
        "sums": sums,
        "server": server,
        "held": {name for name in held if name.startswith("/")} - {os.readlink("/proc/self/fd/2")},
        "program": Path("/proc/self/cmdline").read_bytes(),
        "server's program": Path(f"/proc/{server}/cmdline").read_bytes(),
        "modules": "torch_infini.infinilm.inference" in sys.modules,
    }


def test_a_server_that_is_a_fork_leaves_the_program_behind(tmp_path: Path) -> None:
    told = in_a_program(a_program, tmp_path)
    assert told["sums"] == [3.0, 3.0]
    assert told["program"] == told["server's program"], "it is no fork"
    assert told["held"] == {"/dev/null"}
    for place in told["places"]:
        assert place == {
            "pid": place["pid"],
            "server": told["server"],
            "caught": [signal.SIGINT],
            "blocked": set(),
            "stdin": "/dev/null",
            "trace": None,
        }
    assert len({place["pid"] for place in told["places"]}) == 2
    lines = (tmp_path / "stdout").read_text().splitlines()
    assert sorted(lines) == ["a line of a worker"] * 2 + ["a line of the program"]
    assert (tmp_path / "file").read_text() == "text"
    end = time.monotonic() + SECONDS
    while is_there(told["server"]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(map(is_there, [told["server"], *(place["pid"] for place in told["places"])]))


def a_large_program() -> Any:
    big = torch.ones(fork_caller.MOST_MEMORY >> 2)
    return tried(), big[0].item()


def a_program_with_a_thread() -> Any:
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    told = tried()
    done.set()
    thread.join()
    return told, tried()


def a_program_that_computed() -> Any:
    torch.set_num_threads(2)
    torch.ones(1 << 20).sum()
    return tried()


def a_program_in_a_mode() -> Any:
    with torch.inference_mode():
        first = tried()
    with torch.device("meta"):
        return first, tried()


def a_program_with_a_device() -> Any:
    fork_caller._NO_DEVICES.discard(1)  # /dev/null is one then
    with open(os.devnull):
        return tried()


def tried() -> str:
    """Return why this process was not forked, "" if it was."""
    before = len(os.listdir("/proc/self/fd"))
    process, reason = fork_caller.fork_caller(lambda descriptor: os._exit(5), 2)
    if process is None:
        assert children() == []
    else:
        assert process.wait() == 5 and process.poll() == 5
        process.kill()  # does nothing
    assert len(os.listdir("/proc/self/fd")) == before
    return reason


@pytest.mark.parametrize(
    "program, reasons",
    [
        (a_large_program, ("MiB of memory, more than 512", 1.0)),
        (a_program_with_a_thread, ("it has 2 threads of Python's", "")),
        (a_program_in_a_mode, ("it is in a mode of torch's, which the fork would not leave",) * 2),
        (a_program_with_a_device, "it has opened /dev/null"),
        (a_program_that_computed, "threads"),
    ],
)
def test_programs_that_are_not_forked(program: Callable[[], Any], reasons: Any) -> None:
    told = in_a_program(program)
    if isinstance(reasons, str):
        told, reasons = (told,), (reasons,)
    for one, reason in zip(told, reasons, strict=True):
        assert one == reason if reason in ("", 1.0) else reason in one


def interrupted() -> Any:
    """A handler that raises, whose signal comes as the process forks."""
    fork, forked = os.fork, []

    def handler(*_: Any) -> None:
        raise KeyboardInterrupt(os.getpid())

    def forks() -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        pid = fork()
        if pid == 0:
            signal.raise_signal(signal.SIGUSR1)
        forked.append(pid)
        return pid

    signal.signal(signal.SIGUSR1, handler)
    os.fork = forks
    try:
        process, reason = fork_caller.fork_caller(lambda descriptor: os._exit(5), 2)
    except KeyboardInterrupt as error:
        assert error.args == (os.getpid(),) and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        return os.waitstatus_to_exitcode(os.waitpid(forked[0], 0)[1])
    return "no interrupt"


def test_an_interrupt_is_the_callers() -> None:
    """No handler runs in the fork, which ends."""
    assert in_a_program(interrupted) == 1


def without_streams() -> Any:
    """A program that has closed stdin, stdout and stderr, as daemons do."""
    for number in range(3):
        os.close(number)
    tp_group = init_tp_group(2)
    assert tp_group.workers is not None
    tp_group.workers.make(Probe)
    tp_group.workers.send("add", 2.0)
    program = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (os.getpid(), server_pid())]
    streams = {os.readlink(f"/proc/{server_pid()}/fd/{number}") for number in range(3)}
    return Probe(tp_group).add(1.0), program[0] == program[1], streams


def test_a_program_without_streams() -> None:
    assert in_a_program(without_streams) == (3.0, True, {"/dev/null"})
