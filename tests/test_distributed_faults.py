"""What can go wrong between ranks: every fault ends in an exception that names it, in time; nothing stays behind."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import torch_infini
from support.ranks import Ranks
from torch_infini.distributed.transport import MOST_RANKS, choose, machine

SIZE = 3
SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="the ranks meet in /dev/shm")
SOON = datetime.timedelta(seconds=0.2)


def names() -> set[str]:
    return {path.name for path in SHM.iterdir() if path.name.startswith("infini")}


def failure_of(kind: str) -> tuple[str, float]:
    """What a collective raises, and after how many seconds."""
    begin = time.monotonic()
    try:
        if kind == "op":
            torch.ops.infini.all_reduce(torch.ones(4), NUMBER)
        else:
            work = dist.all_reduce(torch.ones(4), async_op=kind == "async")
            if work is not None:
                work.wait()
    except RuntimeError as error:
        return str(error), time.monotonic() - begin
    return "", time.monotonic() - begin


NUMBER = 0


def prepare() -> int:
    global NUMBER
    NUMBER = torch_infini.distributed.communicator()
    dist.all_reduce(torch.ones(1))
    return os.getpid()


def future_fails() -> str:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    try:
        work.get_future().wait()
    except RuntimeError as error:
        assert work.is_completed() and not work.is_success() and work.exception() is not None
        return str(error)
    return ""


def test_a_rank_that_dies() -> None:
    """While the others wait for it, one on its own thread and one in an asynchronous call; from then on; in ops."""
    before = names()
    with Ranks(SIZE) as ranks:
        pids = ranks.run(prepare)
        ranks.begin(failure_of, "sync", only=[0])
        ranks.begin(failure_of, "async", only=[1])
        time.sleep(0.2)  # they wait by then
        ranks.processes[2].kill()
        for said, seconds in ranks.answers([0, 1]):
            assert f"rank 2 (pid {pids[2]})" in said and seconds < 10, (said, seconds)
        for kind in ("sync", "async", "op"):
            ranks.begin(failure_of, kind, only=[0, 1])
            for said, seconds in ranks.answers([0, 1]):
                assert f"rank 2 (pid {pids[2]})" in said and seconds < 5, (said, seconds)
        ranks.begin(future_fails, only=[0, 1])
        assert all("rank 2" in said for said in ranks.answers([0, 1]))
    assert names() <= before


def test_timeouts_of_init_process_group() -> None:
    """They hold for the ops too."""
    with Ranks(2, timeout=1.5) as ranks:
        ranks.run(prepare)
        for kind in ("async", "op"):
            ranks.begin(failure_of, kind, only=[0])
            ((said, seconds),) = ranks.answers([0])
            assert "rank 1" in said and 1.2 < seconds < 20, (said, seconds)


def different(what: str) -> str:
    me = dist.get_rank()
    try:
        if what == "shape":
            dist.all_reduce(torch.ones(4 + me))
        elif what == "dtype":
            dist.all_reduce(torch.ones(4, dtype=torch.float32 if me else torch.float64))
        elif me:
            dist.all_reduce(torch.ones(4))
        else:
            dist.broadcast(torch.ones(4), 0)
    except RuntimeError as error:
        return str(error)
    return ""


def start(timeout: float, store: str) -> str:
    me, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("infiniccl", f"file://{store}", limit, rank=me, world_size=size)
    except Exception as error:
        return str(error)
    return ""


def test_different_calls_are_named(tmp_path: Path) -> None:
    cases = {
        "shape": ("of 4 float32", "of 5 float32"),
        "dtype": ("of 4 float32", "of 4 float64"),
        "order": ("infinicclAllReduce", "infinicclBroadcast"),
    }
    with Ranks(2, environment={"INFINI_CCL_CHECK": "1"}, initialise=False) as ranks:
        for what, words in cases.items():
            assert ranks.run(start, 30.0, str(tmp_path / what)) == ["", ""]
            for said in ranks.run(different, what):
                assert all(word in said for word in words), said
            ranks.run(dist.destroy_process_group)


def set_choice(values: list[str]) -> None:
    os.environ["INFINI_CCL"] = values[int(os.environ["RANK"])]


def test_a_choice_that_is_none_or_not_the_same(tmp_path: Path) -> None:
    with Ranks(2, initialise=False) as ranks:
        ranks.run(set_choice, ["shm", "gloo"])
        for rank, said in enumerate(ranks.run(start, 20.0, str(tmp_path / "a"))):
            mine, other = ("shm", "gloo")[:: -1 if rank else 1]
            assert said == (
                f"torch_infini.distributed: INFINI_CCL must be the same on all ranks, got {mine} on rank {rank} and "
                f"{other} on rank {1 - rank}"
            )
        ranks.run(set_choice, ["mpi", "mpi"])
        for said in ranks.run(start, 20.0, str(tmp_path / "b")):
            assert "INFINI_CCL must be auto (shared memory on one machine" in said and said.endswith("got 'mpi'")
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            ranks.run(set_choice, ["nccl", "nccl"])
            for said in ranks.run(start, 20.0, str(tmp_path / "c")):
                assert "INFINI_CCL must be auto, shm or gloo where this torch has no NCCL or no GPU, got nccl" in said


def store_of(size: int, places: dict[int, str], choice: str = "auto") -> dist.HashStore:
    """A store in which all ranks but 0 have said where they run."""
    store = dist.HashStore()
    for rank in range(1, size):
        store.set(f"infiniccl/machine/{rank}", f"{choice} {places.get(rank, machine())}")
    return store


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFINI_CCL", raising=False)
    one = choose(store_of(4, {}), 0, 4, SOON)
    assert (one.name, one.reason) == ("shm", "all ranks are on one machine")
    far = choose(store_of(4, {3: "another"}), 0, 4, SOON)
    assert (far.name, far.reason) == ("gloo", "ranks 0 and 3 share no memory")
    many = choose(store_of(MOST_RANKS + 1, {}), 0, MOST_RANKS + 1, SOON)
    assert many.name == "gloo" and "65 ranks are more than the 64 that can share memory" in many.reason
    monkeypatch.setenv("INFINI_CCL", "shm")
    for size, places, words in ((2, {1: "another"}, "ranks 0 and 1 share no memory"), (65, {}, "65 ranks are more")):
        with pytest.raises(ValueError, match=f"at most 64 on one machine where INFINI_CCL=shm, got .*{words}"):
            choose(store_of(size, places, "shm"), 0, size, SOON)
    monkeypatch.setenv("INFINI_CCL", "gloo")
    assert choose(store_of(2, {}, "gloo"), 0, 2, SOON).name == "gloo"
    with pytest.raises(RuntimeError, match="every rank must make the group, got nothing from rank 1 of 2 within 0.2 s"):
        choose(dist.HashStore(), 0, 2, SOON)


@pytest.mark.full
def test_under_torchrun_with_import_torch_infini_alone(tmp_path: Path) -> None:
    """As users start it; the log says what was chosen; a program that ends without destroying its groups ends."""
    script = tmp_path / "program.py"
    script.write_text(
        "import logging, torch, torch.distributed as dist\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "import torch_infini\n"
        "dist.init_process_group('infiniccl')\n"
        "x = torch.ones(3) * (1 + dist.get_rank())\n"
        "dist.all_reduce(x, async_op=True).wait()\n"
        "assert x.tolist() == [3.0] * 3\n"
    )
    before = names()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    root = str(Path(torch_infini.__file__).parent.parent)
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in (0, 1):
        assert f"rank {rank} of 2: CPU tensors by shared memory (all ranks are on one machine)" in done.stderr
    assert names() <= before
