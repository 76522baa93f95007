"""How the workers of a model start and end: from one server, beside each other, and when something dies meanwhile."""

from __future__ import annotations

import gc
import os
import signal
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

from torch_infini.commands.run import asks_for_ranks
from torch_infini.distributed import TPGroup, init_tp_group, worker_process, workers
from torch_infini.testing.processes import forking

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="the ranks meet in /dev/shm"),
]
SECONDS = 20.0  # that something may take on a busy machine


class Probe:
    """What a worker holds here."""

    def __init__(self, tp_group: TPGroup) -> None:
        self.tp_group = tp_group

    def place(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "server": os.getppid(),
            "folder": os.getcwd(),
            "value": os.environ.get("INFINI_PROBE"),
            "path": sys.path[-1],
            "threads": (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]),
        }

    def add(self, value: float) -> float:
        return self.tp_group.all_reduce(torch.full((3,), value))[0].item()

    def write(self, text: str) -> None:
        os.write(2, text.encode())

    def sleep(self) -> None:
        torch.randn(8).sum()
        time.sleep(1000)


def ranks(size: int = 2) -> tuple[TPGroup, workers.Workers]:
    tp_group = init_tp_group(size)
    assert tp_group.workers is not None
    tp_group.workers.make(Probe)
    return tp_group, tp_group.workers


def added(tp_group: TPGroup, theirs: workers.Workers, value: float) -> float:
    theirs.send("add", value)
    return Probe(tp_group).add(value)


def is_there(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def wait_until(what: Callable[[], bool], seconds: float = SECONDS) -> bool:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def no_server() -> None:
    """As in a program that has not started workers."""
    if worker_process._server is not None:
        worker_process._server.close()


@pytest.mark.full
def test_one_server_starts_all_with_the_place_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/dev/shm"))
    (first_group, first) = ranks()
    first_place = first.call("place")[0]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFINI_PROBE", "here")
    monkeypatch.syspath_prepend("/somewhere")
    monkeypatch.setattr(sys, "path", [*sys.path, "/somewhere/else"])
    second_group, second = ranks(3)
    places = second.call("place")
    for place in places:
        assert place == {
            "pid": place["pid"],
            "server": first_place["server"],
            "folder": str(tmp_path),
            "value": "here",
            "path": "/somewhere/else",
            "threads": (1, "1"),
        }
    assert len({place["pid"] for place in (first_place, *places)}) == 3
    assert first_place["server"] != os.getpid() and first_place["value"] is None
    assert added(first_group, first, 2.0) == 4.0 and added(second_group, second, 2.0) == 6.0
    processes = [*first._processes, *second._processes]
    del first_group, first, second_group, second
    gc.collect()
    assert [process.poll() for process in processes] == [0, 0, 0]
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("infiniccl")} == set()


def test_output_goes_where_it_goes_at_the_start_of_a_worker(tmp_path: Path) -> None:
    """Not where it went when the server started."""
    before = ranks()
    stderr = os.dup(2)
    with open(tmp_path / "stderr", "wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            _, theirs = ranks()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
    theirs.call("write", "a line of a worker\n")
    assert (tmp_path / "stderr").read_text() == "a line of a worker\n"
    assert added(*before, 1.0) == 2.0


@pytest.mark.full
def test_models_that_start_beside_each_other(no_server: None) -> None:
    """On threads, in a program that has no server yet, beside one that is closed before its workers are up."""
    results: list[Any] = [None] * 3
    all_there = threading.Barrier(4)
    closed: list[TPGroup] = []

    def close_at_once() -> None:
        all_there.wait()
        closed.append(init_tp_group(2))
        assert closed[0].workers is not None
        closed[0].workers.close()

    def run(index: int) -> None:
        all_there.wait()
        tp_group, theirs = ranks()
        results[index] = (added(tp_group, theirs, float(index)), theirs.call("place")[0]["server"])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    threads.append(threading.Thread(target=close_at_once))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    servers = {server for _, server in results}
    assert [value for value, _ in results] == [0.0, 2.0, 4.0] and len(servers) == 1
    assert closed[0].workers is not None and closed[0].workers._processes[0].poll() == 0
    with pytest.raises(RuntimeError, match="rank 1 must start, got"):
        closed[0].all_reduce(torch.ones(1))


class Ends:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


class Raises:
    def __reduce__(self) -> Any:
        return int, ("no number",)


@pytest.mark.parametrize(
    "message, said", [(Ends(), "exit status 3"), (Raises(), ": invalid literal for int() with base 10: 'no number'")]
)
def test_a_worker_that_ends_while_it_starts(message: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, at every later call; the next workers are as good as any."""
    with monkeypatch.context() as patched:
        patched.setattr(workers, "Start", lambda *_: message)
        tp_group = init_tp_group(2)
    assert tp_group.workers is not None
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            tp_group.all_reduce(torch.ones(1))
        assert str(raised.value) == f"torch_infini.distributed.Workers: rank 1 must start, got {said}".replace(
            "got :", "got:"
        )
    with pytest.raises(RuntimeError, match="rank 1 must start, got"):
        tp_group.workers.call("place")
    good = ranks()
    assert added(*good, 1.5) == 3.0


class Hangs:
    def __reduce__(self) -> Any:
        return time.sleep, (1000,)


def test_a_worker_that_hangs_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error after the seconds that ranks wait for each other, and ends with the group."""
    monkeypatch.setenv("INFINI_CCL_TIMEOUT", "0.5")
    with monkeypatch.context() as patched:
        patched.setattr(workers, "Start", lambda *_: Hangs())
        tp_group = init_tp_group(2)
    assert tp_group.workers is not None
    (process,) = tp_group.workers._processes
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            tp_group.all_reduce(torch.ones(1))
        assert str(raised.value) == (
            "torch_infini.distributed.Workers: rank 1 must start within 0.5 s (INFINI_CCL_TIMEOUT), got no answer from "
            f"process {process.pid}"
        )
    tp_group.workers.close()
    assert not is_there(process.pid or 0)
    monkeypatch.delenv("INFINI_CCL_TIMEOUT")
    good = ranks()
    assert added(*good, 1.5) == 3.0


def test_a_server_that_is_killed(no_server: None) -> None:
    """While it imports torch: a sentence. Later: its workers live on, their end is noticed, and there is a new one."""
    tp_group, theirs = ranks()
    server = worker_process._server
    assert server is not None
    server._process.kill()
    with pytest.raises(RuntimeError, match="rank 1 must start, got no process: its server ended"):
        tp_group.all_reduce(torch.ones(1))
    tp_group, theirs = ranks()
    pid = theirs.call("place")[0]["pid"]
    server = worker_process._server
    assert server is not None
    server._process.kill()
    server._process.wait()
    assert added(tp_group, theirs, 1.0) == 2.0 and theirs.all_alive
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not theirs.all_alive)
    with pytest.raises(RuntimeError, match="all ranks must be there, got one that has ended"):
        theirs.call("place")
    theirs.close()
    assert not theirs.all_alive


def test_a_forked_child_leaves_the_workers_alone() -> None:
    """Also when it ends in order; and workers do not live as long as it does."""
    tp_group, theirs = ranks()
    pid = theirs.call("place")[0]["pid"]
    read, write = os.pipe()
    server = worker_process._server
    assert server is not None
    child = os.fork()
    if child == 0:
        status = 1
        with suppress(BaseException):
            assert all(connection.closed for connection in theirs._connections)
            assert worker_process._server is None and not server.close.alive and server._requests.fileno() < 0
            theirs.close()
            os.read(read, 1)
            status = 0
        os._exit(status)
    time.sleep(0.1)
    assert added(tp_group, theirs, 1.0) == 2.0
    theirs.close()
    assert wait_until(lambda: not is_there(pid))
    os.write(write, b"x")
    assert os.waitpid(child, 0)[1] == 0
    os.close(read)
    os.close(write)


def program(when: str, pipe: Connection) -> None:
    """A program that is killed."""
    torch.set_num_threads(1)
    _, theirs = ranks(3)
    server = worker_process._server
    assert server is not None
    pids = [server._process.pid]
    if when == "they compute":
        pids += [place["pid"] for place in theirs.call("place")]
        theirs.send("sleep")
        time.sleep(0.2)
    pipe.send(pids)
    signal.pause()


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("when", ["they start", "they compute"])
def test_nothing_stays_of_a_program_that_is_killed(when: str) -> None:
    context = forking()
    here, there = context.Pipe()
    parent = context.Process(target=program, args=(when, there))
    parent.start()
    there.close()
    pids = here.recv()
    session = [pid for pid in pids if is_there(pid)]
    assert session == pids
    parent.kill()
    parent.join()
    assert wait_until(lambda: not any(map(is_there, pids))), pids
    if when != "they compute":  # what it may have forked
        assert not [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent_of(pid) in pids]


def _parent_of(pid: int) -> int:
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


@pytest.mark.full
def test_a_server_with_threads_does_not_fork(no_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that the environment loads may start one; the workers are then started, not forked."""
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    try:
        tp_group, theirs = ranks()
        assert added(tp_group, theirs, 1.0) == 2.0
        place = theirs.call("place")[0]
        command = Path(f"/proc/{place['pid']}/cmdline").read_text()
        assert "run_alone" in command and worker_process._server is not None
        assert place["server"] == worker_process._server._process.pid
        theirs.close()
        assert theirs._processes[0].poll() == 0
    finally:
        if worker_process._server is not None:
            worker_process._server.close()


@pytest.mark.parametrize(
    "argv, ranks_asked",
    [
        ("a.py --tp 2", True),
        ("a.py --cpu --tp=16 x", True),
        ("a.py --tensor-parallel-size 4", True),
        ("a.py --tensor_parallel_size=2", True),
        ("a.py --tp 1", False),
        ("a.py --tp=1 2", False),
        ("a.py", False),
        ("a.py --top-p 2", False),
        ("a.py --tp two", False),
        ("--tp 2", False),
    ],
)
def test_arguments_that_ask_for_ranks(argv: str, ranks_asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert asks_for_ranks(argv.split()) is ranks_asked
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert not asks_for_ranks(argv.split())
