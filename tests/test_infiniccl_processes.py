"""libinfiniccl between processes: the same results, and every way in which a rank can fail the others.

What a rank is to do goes to tests/support/ccl_rank.py as a line of Python.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import random
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.sanitizers import sanitized
from torch_infini._core.library import PATH
from torch_infini.distributed.libinfiniccl import unique_id

SHM = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not SHM.is_dir(), reason="the ranks meet in /dev/shm")
LONG = 60.0  # seconds; what takes as long has hung


class Rank:
    """A process that runs one line at a time."""

    def __init__(self, **environment: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("support") / "ccl_rank.py"), str(PATH.parent)]
        env = {**os.environ, **environment}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.pid = self.process.pid

    def start(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 1.5 * LONG)[0], "the rank's process hangs"
        line = self.process.stdout.readline()
        assert line, "the rank's process ended"
        return ast.literal_eval(line)

    def do(self, line: str) -> Any:
        self.start(line)
        return self.answer()

    def kill(self) -> None:
        """Leaves a zombie, as a launcher that does not wait would."""
        self.process.kill()
        while "State:\tZ" not in Path(f"/proc/{self.pid}/status").read_text():
            time.sleep(0.001)


Start = Callable[..., list[Rank]]
ids: list[str] = []  # of the test that runs


def new_id() -> str:
    ids.append(unique_id().hex())
    return ids[-1]


@pytest.fixture
def start() -> Iterator[Start]:
    """start(n, **environment): n processes."""
    all_ranks: list[Rank] = []

    def started(n: int, **environment: str) -> list[Rank]:
        ranks = [Rank(**environment) for _ in range(n)]
        all_ranks.extend(ranks)
        assert all_do(ranks, "1") == [1] * n  # they run
        return ranks

    ids.clear()
    yield started
    for rank in all_ranks:
        rank.process.kill()
        rank.process.communicate()
    assert not [name for name in ids if (SHM / bytes.fromhex(name).rstrip(b"\0").decode()).exists()]


def all_do(ranks: list[Rank], line: str) -> list[Any]:
    """The same line on every rank at once; {rank} is its number."""
    for number, rank in enumerate(ranks):
        rank.start(line.format(rank=number))
    return [rank.answer() for rank in ranks]


def join(ranks: list[Rank], seconds: float = LONG) -> None:
    line = f"join({new_id()!r}, {len(ranks)}, {{rank}}, {seconds})"
    assert all_do(ranks, line) == [None] * len(ranks)


def data(seed: int, count: int) -> np.ndarray:
    return np.frombuffer(random.Random(seed).randbytes(count), dtype=np.uint8)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_all_reduce(start: Start, n: int) -> None:
    ranks = start(n)
    join(ranks)
    for count in (0, 1, 1001, 64 * 1024 + 1, 3_000_001):
        expected = sum((data(rank, count) for rank in range(n)), np.zeros(count, np.uint8))
        assert all_do(ranks, f"all_reduce(data({{rank}}, {count}))") == [digest(expected)] * n


def test_floats_have_the_same_bits_on_all_ranks_and_in_every_run(start: Start) -> None:
    ranks = start(3)
    seen = set()
    for _ in range(2):
        join(ranks)
        for _ in range(10):
            seen.update(all_do(ranks, "all_reduce(data({rank}, 400_000), F32, SUM, 4)"))
    assert len(seen) == 1


def test_messages(start: Start) -> None:
    ranks = start(2)
    join(ranks)
    for count in (0, 1, 128 * 1024, 128 * 1024 + 1, 2_000_000):
        ranks[1].start(f"recv({count}, 0)")
        assert ranks[0].do(f"send(data(5, {count}), 1)") is None
        assert ranks[1].answer() == digest(data(5, count))


def test_a_send_of_another_count(start: Start) -> None:
    ranks = start(2)
    join(ranks)
    assert ranks[0].do("send(b'12345', 1)") is None
    assert ranks[1].do("recv(4, 0)") == (
        "failed 3: infinicclRecv: a send and its receive must have the same count and datatype, got infinicclRecv of 4 "
        f"uint8 on rank 1 (pid {ranks[1].pid}) and infinicclSend of 5 uint8 on rank 0 (pid {ranks[0].pid})"
    )


def test_a_rank_that_never_joins(start: Start) -> None:
    ranks = start(2)
    unique = new_id()
    for number, rank in enumerate(ranks):
        rank.start(f"join({unique!r}, 4, {number}, 0.5)")
    sentences = {rank.answer() for rank in ranks}
    assert sentences == {"failed 1: infinicclCommInitRank: rank 2, rank 3 did not join within 0.5 s"}


def test_rank_0_never_joins(start: Start) -> None:
    (rank,) = start(1)
    assert rank.do(f"join({new_id()!r}, 2, 1, 0.1)") == (
        "failed 1: infinicclCommInitRank: rank 0 did not join within 0.1 s"
    )


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_ends_while_the_others_join(start: Start, victim: int) -> None:
    ranks = start(2)
    unique = new_id()
    for number, rank in enumerate(ranks):
        rank.start(f"join({unique!r}, 3, {number})")
    while "infiniccl-" not in Path(f"/proc/{ranks[1].pid}/maps").read_text():
        time.sleep(0.001)
    time.sleep(0.1)  # both have joined, and wait for the third
    ranks[victim].kill()
    began = time.monotonic()
    assert ranks[1 - victim].answer() == (
        f"failed 1: infinicclCommInitRank: rank {victim} (pid {ranks[victim].pid}) has ended"
    )
    assert time.monotonic() - began < LONG / 4


@pytest.mark.parametrize("moment", ["in a call", "between calls"])
def test_a_rank_ends(start: Start, moment: str) -> None:
    ranks = start(3)
    join(ranks)
    all_do(ranks, "all_reduce(b'1234')")
    if moment == "between calls":
        ranks[2].kill()
    for rank in ranks[:2]:
        rank.start("all_reduce(b'1234')")
    time.sleep(0.1)
    if moment == "in a call":
        ranks[2].kill()
    sentence = f"failed 1: infinicclAllReduce: rank 2 (pid {ranks[2].pid}) has ended"
    assert [rank.answer() for rank in ranks[:2]] == [sentence] * 2
    assert ranks[0].do("broadcast(b'1', 0)") == sentence.replace("AllReduce", "Broadcast")
    join(ranks[:2])  # what is left may go on without it
    assert len(set(all_do(ranks[:2], "all_reduce(b'1234')"))) == 1


def test_a_rank_ends_at_any_point(start: Start) -> None:
    """In short calls and long ones, wherever the signal finds it."""
    for trial in range(12):
        ranks = start(2)
        join(ranks)
        for rank in ranks:
            rank.start(f"[all_reduce(bytes({(10, 100_000, 3_000_000)[trial % 3]})) for _ in range(10**9)]")
        time.sleep(0.01 + random.random() / 50)
        ranks[1].kill()
        assert ranks[0].answer() == f"failed 1: infinicclAllReduce: rank 1 (pid {ranks[1].pid}) has ended"


def test_a_rank_ends_at_any_point_of_joining(start: Start) -> None:
    for trial in range(12):
        ranks = start(2)
        unique = new_id()
        for number, rank in enumerate(ranks):
            rank.start(f"join({unique!r}, 2, {number}, 0.3)")
        time.sleep(random.random() / 20)
        ranks[trial % 2].kill()
        assert re.fullmatch(
            rf"None|failed 1: infinicclCommInitRank: rank {trial % 2} (\(pid {ranks[trial % 2].pid}\) has ended|"
            r"did not join within 0.3 s)",
            str(ranks[1 - trial % 2].answer()),
        )


def test_all_ranks_are_killed_while_they_join(start: Start) -> None:
    """What they leave behind, the next communicator takes away."""
    (rank,) = start(1)
    unique = new_id()
    file = SHM / bytes.fromhex(unique).rstrip(b"\0").decode()
    rank.start(f"join({unique!r}, 2, 0)")
    while not file.exists():
        time.sleep(0.001)
    join(start(2))
    assert file.exists()  # its rank still waits
    rank.kill()
    join(start(2))
    assert not file.exists()


def test_the_peer_of_a_message_ends(start: Start) -> None:
    ranks = start(2)
    join(ranks)
    ranks[0].start("recv(4, 1)")
    ranks[1].kill()
    assert ranks[0].answer() == f"failed 1: infinicclRecv: rank 1 (pid {ranks[1].pid}) has ended"


def test_what_an_ended_rank_has_sent_arrives(start: Start) -> None:
    ranks = start(2)
    join(ranks)
    ranks[1].do("send(b'last words', 0)")
    ranks[1].kill()
    assert ranks[0].do("recv(10, 1)") == hashlib.sha256(b"last words").hexdigest()


def test_a_rank_that_is_late(start: Start) -> None:
    """It is named, its own call fails then too, and later calls do not wait."""
    ranks = start(3)
    join(ranks, seconds=0.5)
    ranks[0].start("all_reduce(b'1234')")
    ranks[2].start("all_reduce(b'1234')")
    sentence = f"failed 1: infinicclAllReduce: rank 1 (pid {ranks[1].pid}) did not arrive within 0.5 s"
    assert [ranks[0].answer(), ranks[2].answer()] == [sentence] * 2
    began = time.monotonic()
    assert all_do(ranks, "all_reduce(b'1234')") == [sentence] * 3
    assert time.monotonic() - began < 0.5


def test_a_rank_that_has_left_or_aborts(start: Start) -> None:
    for line, text in (
        ("CommDestroy", "has destroyed its communicator"),
        ("CommAbort", "has aborted the communicator"),
    ):
        ranks = start(2)
        join(ranks)
        ranks[0].start("all_reduce(b'1234')")
        assert ranks[1].do(f"call({line!r}, comm)") is None
        assert ranks[0].answer() == f"failed 1: infinicclAllReduce: rank 1 (pid {ranks[1].pid}) {text}"


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (("all_reduce(b'1234')", "all_reduce(b'12345')"), ("AllReduce of 4 uint8 (SUM)", "AllReduce of 5 uint8 (SUM)")),
        (("all_reduce(b'1')", "all_reduce(b'1', 3)"), ("AllReduce of 1 uint8 (SUM)", "AllReduce of 1 int8 (SUM)")),
        (("all_reduce(b'1')", "all_reduce(b'1', 7, 2)"), ("AllReduce of 1 uint8 (SUM)", "AllReduce of 1 uint8 (MAX)")),
        (("all_reduce(b'1')", "broadcast(b'1', 0)"), ("AllReduce of 1 uint8 (SUM)", "Broadcast of 1 uint8 (root 0)")),
        (
            ("broadcast(b'', 1)", "broadcast(b'', 0)"),
            ("Broadcast of 0 uint8 (root 1)", "Broadcast of 0 uint8 (root 0)"),
        ),
        (("all_reduce(b'')", "all_reduce(b'1')"), ("AllReduce of 0 uint8 (SUM)", "AllReduce of 1 uint8 (SUM)")),
    ],
)
@pytest.mark.parametrize("check", ["0", "1"])
def test_calls_that_differ(start: Start, calls: tuple[str, str], words: tuple[str, str], check: str) -> None:
    ranks = start(2, INFINI_CCL_CHECK=check)
    join(ranks)
    for rank, line in zip(ranks, calls, strict=True):
        rank.start(line)
    for rank in ranks:
        said = rank.answer()
        assert re.match(
            "failed 3: infiniccl(AllReduce|Broadcast): the ranks must make the same calls in the same ord", said
        )
        for other, what in zip(ranks, words, strict=True):
            assert re.search(rf"infiniccl{re.escape(what)} on rank \d \(pid {other.pid}\)", said)


@pytest.mark.parametrize("check", ["maybe", "true", "2", "01", " 1"])
def test_a_checking_mode_that_is_none(start: Start, check: str) -> None:
    """Every rank that has the value is told, at once."""
    ranks = start(2, INFINI_CCL_CHECK=check)
    line = f"join({new_id()!r}, 2, {{rank}}, {LONG})"
    rule = f"infinicclCommInitRank: INFINI_CCL_CHECK must be 0 or 1, or not be set, got '{check}'"
    assert all_do(ranks, line) == [f"failed 3: {rule}"] * 2


def test_a_checking_mode_that_is_empty(start: Start) -> None:
    ranks = start(2, INFINI_CCL_CHECK="")
    join(ranks)
    assert all_do(ranks, "all_reduce(b'12')") == [digest(np.frombuffer(b"bd", np.uint8))] * 2


def test_the_root_learns_of_a_difference_in_the_checking_mode(start: Start) -> None:
    """Without it a root that only writes may be done before another rank comes with another call."""
    for check, fails in (("0", False), ("1", True)):
        ranks = start(2, INFINI_CCL_CHECK=check)
        join(ranks)
        ranks[0].start("broadcast(b'1234', 0)")
        time.sleep(0.2)
        ranks[1].start("broadcast(b'123', 0)")
        answers = [rank.answer() for rank in ranks]
        assert ["must make the same calls" in answer for answer in answers] == [fails, True]


def test_no_shared_memory_left(start: Start) -> None:
    ranks = start(2)
    ranks[0].do("limit_files(100_000)")
    unique = new_id()
    assert ranks[0].do(f"join({unique!r}, 2, 0, 1)").startswith("failed 1: infinicclCommInitRank: no shared memory of ")
    assert "rank 0 did not join" in ranks[1].do(f"join({unique!r}, 2, 1, 0.1)")


FULL = """
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
int posix_fallocate(int file, off_t offset, off_t size) {
    return offset > 0 ? ENOSPC : (int)syscall(SYS_fallocate, file, 0, offset, size);
}
"""


@pytest.mark.skipif(shutil.which("cc") is None or sanitized(), reason="preloads another library")
def test_no_shared_memory_left_for_messages(start: Start, tmp_path: Path) -> None:
    (tmp_path / "full.c").write_text(FULL)
    library = str(tmp_path / "full.so")
    subprocess.run(["cc", "-shared", "-fPIC", str(tmp_path / "full.c"), "-o", library], check=True)
    ranks = start(2, LD_PRELOAD=library)
    join(ranks)
    said = ranks[0].do("send(b'1', 1)")
    assert said == ("failed 1: infinicclSend: no shared memory of 262144 bytes for 2 ranks: No space left on device")
    assert len(set(all_do(ranks, "all_reduce(b'1234')"))) == 1  # which needs no more memory


def test_ranks_that_do_not_fit_together(start: Start) -> None:
    ranks = start(3)
    unique = new_id()
    ranks[0].start(f"join({unique!r}, 2, 0)")
    assert ranks[1].do(f"join({unique!r}, 3, 1)") == (
        "failed 3: infinicclCommInitRank: nranks must be rank 0's, 2, got 3"
    )
    assert ranks[2].do(f"join({unique!r}, 2, 0)") == (
        "failed 3: infinicclCommInitRank: rank must be given once, got 0 twice"
    )
    assert ranks[1].do(f"join({unique!r}, 2, 1)") is None
    assert ranks[0].answer() is None


def test_another_layout(start: Start) -> None:
    """The file of a rank 0 with another version of the library, and so another layout."""
    (rank,) = start(1)
    unique = new_id()
    file = SHM / bytes.fromhex(unique).rstrip(b"\0").decode()
    with file.open("wb", buffering=0) as opened:
        fcntl.flock(opened, fcntl.LOCK_SH)  # or the rank 0 of another test might take it away
        opened.write((2).to_bytes(4, "little") + bytes(10_000))
        try:
            assert "rank 0 is of another build of libinfiniccl" in rank.do(f"join({unique!r}, 2, 1)")
        finally:
            file.unlink()


def test_a_child_takes_nothing_from_its_parent(start: Start) -> None:
    ranks = start(2)
    join(ranks)
    assert ranks[1].do("child_destroys()") is None
    ranks[0].start("all_reduce(b'1234')")
    time.sleep(0.1)  # long enough for rank 0 to look whether rank 1 has left
    assert ranks[1].do("all_reduce(b'1234')") == ranks[0].answer()


def test_groups_at_the_same_time(start: Start) -> None:
    ranks = start(4)
    first, second = ranks[:2], ranks[2:]
    uniques = [new_id() for _ in range(2)]
    for number, rank in enumerate(ranks):
        rank.start(f"join({uniques[number // 2]!r}, 2, {number % 2})")
    assert [rank.answer() for rank in ranks] == [None] * 4
    for _ in range(20):
        for number, rank in enumerate(ranks):
            rank.start(f"all_reduce(data({number}, 5000))")
        sums = [data(0, 5000) + data(1, 5000), data(2, 5000) + data(3, 5000)]
        assert [rank.answer() for rank in first] == [digest(sums[0])] * 2
        assert [rank.answer() for rank in second] == [digest(sums[1])] * 2


def test_nothing_is_kept(start: Start) -> None:
    ranks = start(2)
    join(ranks)
    all_do(ranks, "call('CommDestroy', comm)")
    before = all_do(ranks, "files()")
    for _ in range(20):
        join(ranks)
        all_do(ranks, "all_reduce(b'1234')")
        all_do(ranks, "call('CommDestroy', comm)")
    assert all_do(ranks, "files()") == before
