"""libinfiniccl between threads: every collective, dtype and op to the bit, streams, and what is refused."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch

from support.c_runtime import SUCCESS, last_error, made, ok, rt, stream
from torch_infini.distributed import libinfiniccl
from torch_infini.distributed.libinfiniccl import DTYPES, Communicator, ReduceOp, unique_id
from torch_infini.testing import cpu_capability_set_to, kernel_levels

SLOT, ONE_SHOT = 512 * 1024, 64 * 1024  # bytes; csrc/infiniccl/cpu
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = tuple(t for t in DTYPES if not t.is_floating_point and not t.is_complex and t is not torch.bool)
ADD, AVG, BF16, F32 = ReduceOp.SUM, ReduceOp.AVG, DTYPES[torch.bfloat16], DTYPES[torch.float32]


class Ranks:
    """Communicators of this process, each with a thread."""

    def __init__(self, n: int, device_ids: list[int] | None = None) -> None:
        self.communicators = Communicator.all(n, device_ids=device_ids)
        self.threads = ThreadPoolExecutor(n)

    def __len__(self) -> int:
        return len(self.communicators)

    def do(self, body: Callable[..., object], *arguments: object) -> list[object]:
        """body(rank, communicator, *arguments) on every rank at once."""
        futures = [self.threads.submit(body, rank, c, *arguments) for rank, c in enumerate(self.communicators)]
        return [future.result(60) for future in futures]


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 8])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    yield Ranks(request.param)


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    yield Ranks(3)


def numbers(n: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One tensor a rank. The integers wrap around."""
    if dtype.is_floating_point or dtype.is_complex:
        return [torch.randn(count, dtype=torch.complex64 if dtype.is_complex else None).to(dtype) for _ in range(n)]
    size = torch.empty(0, dtype=dtype).element_size()
    bits = [torch.randint(0, 256, (count * size,), dtype=torch.uint8) for _ in range(n)]
    return [(b > 128).to(dtype) if dtype is torch.bool else b.view(dtype) for b in bits]


def expected(xs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reduction in the order of the ranks: half types in float, rounded once."""
    dtype = xs[0].dtype
    if dtype is torch.bool:
        return reduce(torch.logical_or if op in (ReduceOp.SUM, ReduceOp.MAX) else torch.logical_and, xs)
    if not dtype.is_floating_point:  # torch has no arithmetic for some of them
        of = {ReduceOp.SUM: np.add, ReduceOp.PROD: np.multiply, ReduceOp.MAX: np.maximum, ReduceOp.MIN: np.minimum}[op]
        return torch.from_numpy(reduce(of, [x.numpy() for x in xs]))
    wide = [x.float() if dtype in FLOATS[:2] else x for x in xs]
    of = {ReduceOp.PROD: torch.mul, ReduceOp.MAX: torch.maximum, ReduceOp.MIN: torch.minimum}.get(op, torch.add)
    total = reduce(of, wide)
    return (total / len(xs) if op is ReduceOp.AVG else total).to(dtype)


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def all_reduced(
    ranks: Ranks, xs: list[torch.Tensor], op: ReduceOp, in_place: bool = False, misaligned: int = 0
) -> list[bytes]:
    count, dtype, size = xs[0].numel(), DTYPES[xs[0].dtype], xs[0].element_size()

    def body(rank: int, c: Communicator) -> bytes:
        send = np.empty(count * size + 64, np.uint8)
        recv = send if in_place else np.full(count * size + 64, 0xA5, np.uint8)
        send[misaligned : misaligned + count * size] = np.frombuffer(bits(xs[rank]), np.uint8)
        c.all_reduce(send.ctypes.data + misaligned, recv.ctypes.data + misaligned, count, dtype, op)
        assert in_place or (recv[misaligned + count * size :] == 0xA5).all() and (recv[:misaligned] == 0xA5).all()
        return recv[misaligned : misaligned + count * size].tobytes()

    return ranks.do(body)  # type: ignore[return-value]


OPS = {dtype: list(ReduceOp) if dtype.is_floating_point else list(ReduceOp)[:4] for dtype in DTYPES}


@pytest.mark.parametrize("dtype", [t for t in DTYPES if not t.is_complex], ids=str)
def test_all_reduce_of_every_dtype(three: Ranks, dtype: torch.dtype) -> None:
    for op in OPS[dtype]:
        for count in (1, 7, 1000, 40_001):
            xs = numbers(3, count, dtype)
            assert all_reduced(three, xs, op) == [bits(expected(xs, op))] * 3, (op, count)


SIZES = sorted({0, 1, *(b + d for b in (ONE_SHOT, SLOT, 2 * SLOT) for d in (-2, 0, 2)), 3_000_002})


@pytest.mark.parametrize("in_place", [False, True])
def test_all_reduce_of_every_size(ranks: Ranks, in_place: bool) -> None:
    for size in SIZES:
        xs = numbers(len(ranks), size // 2, torch.bfloat16)
        assert all_reduced(ranks, xs, ADD, in_place) == [bits(expected(xs, ADD))] * len(ranks), size


def test_misaligned(three: Ranks) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for count in (5, 333, 300_001):
            xs = numbers(3, count, dtype)
            assert all_reduced(three, xs, ADD, misaligned=1) == [bits(expected(xs, ADD))] * 3


def test_every_instruction_set(three: Ranks) -> None:
    """The same bits but for bf16 numbers below 1.2e-38, which AVX-512 BF16 rounds to zero."""
    for dtype in FLOATS:
        xs = numbers(3, 1003, dtype)
        for capability in kernel_levels():
            with cpu_capability_set_to(capability):
                for op in OPS[dtype]:
                    assert all_reduced(three, xs, op) == [bits(expected(xs, op))] * 3, (dtype, op, capability)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_nan_of_any_rank_is_the_result(three: Ranks, dtype: torch.dtype) -> None:
    for bad in range(3):
        xs = [torch.ones(21, dtype=dtype) for _ in range(3)]
        xs[bad][::5] = float("nan")
        for op in ReduceOp:
            for result in all_reduced(three, xs, op):
                got = torch.frombuffer(bytearray(result), dtype=dtype)
                assert torch.equal(got.isnan(), xs[bad].isnan()), (op, bad)


def test_one_rounding(three: Ranks) -> None:
    """In bfloat16 step by step, 256 + 1 would stay 256."""
    xs = [torch.full((9,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert all_reduced(three, xs, ADD) == [bits(torch.full((9,), 258.0, dtype=torch.bfloat16))] * 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.bfloat16, torch.complex128], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_only_moves(ranks: Ranks, dtype: torch.dtype, in_place: bool) -> None:
    """Broadcast and all-gather."""
    n, code, size = len(ranks), DTYPES[dtype], torch.empty(0, dtype=dtype).element_size()

    def broadcast(rank: int, c: Communicator, xs: list[torch.Tensor], count: int) -> None:
        for root in range(n):
            send = xs[rank].clone()
            recv = send if in_place else torch.zeros_like(send)
            c.broadcast(send.data_ptr() if rank == root else 0, recv.data_ptr(), count, code, root)
            assert bits(recv) == bits(xs[root]), (rank, root)

    def all_gather(rank: int, c: Communicator, xs: list[torch.Tensor], count: int) -> bytes:
        recv = torch.zeros(n * count, dtype=dtype)
        send = recv[rank * count : (rank + 1) * count].copy_(xs[rank]) if in_place else xs[rank]
        c.all_gather(send.data_ptr(), recv.data_ptr(), count, code)
        return bits(recv)

    for count in (0, 1, 1001, SLOT // size - 1, SLOT // size + 1, 3 * SLOT // size):
        xs = numbers(n, count, dtype)
        ranks.do(broadcast, xs, count)
        assert ranks.do(all_gather, xs, count) == [bits(torch.cat(xs))] * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_reduce_scatter(ranks: Ranks, dtype: torch.dtype, in_place: bool) -> None:
    n, code, size = len(ranks), DTYPES[dtype], torch.empty(0, dtype=dtype).element_size()

    def body(rank: int, c: Communicator, xs: list[torch.Tensor], count: int) -> bytes:
        send = xs[rank].clone()
        recv = send[rank * count : (rank + 1) * count] if in_place else torch.zeros(count, dtype=dtype)
        c.reduce_scatter(send.data_ptr(), recv.data_ptr(), count, code, ADD)
        return bits(recv)

    for count in (0, 1, 1001, SLOT // n // size - 1, SLOT // n // size + 1, SLOT // size):
        xs = numbers(n, n * count, dtype)
        assert b"".join(ranks.do(body, xs, count)) == bits(expected(xs, ADD)), count  # type: ignore[arg-type]


def test_messages_around_a_ring(ranks: Ranks) -> None:
    n = len(ranks)
    if n == 1:
        with pytest.raises(RuntimeError, match="peer must be another rank, got 0 on rank 0"):
            ranks.communicators[0].send(0, 0, F32, 0)
        return

    def body(rank: int, c: Communicator, xs: list[torch.Tensor], count: int) -> None:
        recv = torch.zeros(count, dtype=torch.int16)
        calls = [
            lambda: c.send(xs[rank].data_ptr(), count, DTYPES[torch.int16], (rank + 1) % n),
            lambda: c.recv(recv.data_ptr(), count, DTYPES[torch.int16], (rank - 1) % n),
        ]
        for call in calls if rank > 0 else calls[::-1]:  # somebody must receive first
            call()
        assert bits(recv) == bits(xs[(rank - 1) % n])

    for count in (0, 1, 65_536, 65_537, 300_000):
        ranks.do(body, numbers(n, count, torch.int16), count)


def test_a_sender_is_ahead() -> None:
    """What has not been received is not written over."""

    def body(rank: int, c: Communicator) -> None:
        if rank == 1:
            time.sleep(0.05)
        for number in range(10):
            x = torch.full((5,), float(number if rank == 0 else -1))
            c.send(x.data_ptr(), 5, F32, 1) if rank == 0 else c.recv(x.data_ptr(), 5, F32, 0)
            assert (x == number).all()

    Ranks(2).do(body)


def test_many_calls_of_all_kinds(ranks: Ranks) -> None:
    """Whatever came before, slots are free and steps agree; messages go on beside the collectives."""
    n = len(ranks)
    plan = [
        (int(k), int(c)) for k, c in zip(torch.randint(0, 4, (120,)), torch.randint(0, 90_000, (120,)), strict=True)
    ]

    def body(rank: int, c: Communicator) -> None:
        for number, (kind, count) in enumerate(plan):
            x = torch.full((n * count,), float(rank + number))
            y = torch.empty(n * count)
            total = sum(range(n)) + n * number
            if kind == 0:
                c.all_reduce(x.data_ptr(), y.data_ptr(), count, F32, ADD)
                assert (y[:count] == total).all()
            elif kind == 1:
                c.broadcast(x.data_ptr(), y.data_ptr(), count, F32, number % n)
                assert (y[:count] == number % n + number).all()
            elif kind == 2:
                c.all_gather(x.data_ptr(), y.data_ptr(), count, F32)
                assert (y.view(n, count) == torch.arange(n)[:, None] + number).all()
            else:
                c.reduce_scatter(x.data_ptr(), y.data_ptr(), count, F32, ADD)
                assert (y[:count] == total).all()

    ranks.do(body)


def test_threads_that_join_by_an_id() -> None:
    unique = unique_id()

    def body(rank: int) -> float:
        x = torch.full((3,), float(rank))
        Communicator(3, unique, rank).all_reduce(x.data_ptr(), x.data_ptr(), 3, F32, ADD)
        return x[0].item()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(body, range(3))) == [3.0] * 3


@pytest.mark.parametrize("ids", [[0, 0], [0, 1], [3, 7]], ids=str)
def test_device_ids_of_the_cpu(ids: list[int]) -> None:
    """Any is the one CPU, as scripts number its ranks like GPUs."""
    xs = numbers(2, 100, torch.float32)
    assert all_reduced(Ranks(2, ids), xs, ADD) == [bits(expected(xs, ADD))] * 2


def test_two_communicators(three: Ranks) -> None:
    """At the same time, in opposite orders."""
    other = Communicator.all(3)
    pool = ThreadPoolExecutor(6)

    def body(c: Communicator, rank: int) -> float:
        x = torch.full((30_000,), float(rank))
        for _ in range(20):
            c.all_reduce(x.data_ptr(), x.data_ptr(), x.numel(), F32, AVG)
        return x[0].item()

    futures = [pool.submit(body, c, rank) for group in (three.communicators, other) for rank, c in enumerate(group)]
    assert [future.result(60) for future in futures] == [1.0] * 6


def test_streams() -> None:
    """One thread queues for all ranks; a failure is the stream's."""
    communicators = Communicator.all(3)
    streams = [stream(queued=True) for _ in communicators]
    xs = [torch.full((50_000,), rank + 1.0) for rank in range(3)]
    for _ in range(3):
        for c, x, on in zip(communicators, xs, streams, strict=True):
            c.all_reduce(x.data_ptr(), x.data_ptr(), x.numel(), F32, ADD, on)
    for on in streams:
        ok("StreamSynchronize", on)
    assert [x[-1].item() for x in xs] == [54.0] * 3
    communicators[1].abort()
    communicators[0].all_reduce(xs[0].data_ptr(), xs[0].data_ptr(), 1, F32, ADD, streams[0])
    assert rt.infinirtStreamSynchronize(streams[0]) != SUCCESS
    assert last_error() == "infinicclAllReduce: rank 1 has aborted the communicator"
    for on in streams:
        ok("StreamDestroy", on)


def test_immediate_streams(three: Ranks) -> None:
    """A thread for each rank: sums are there on return; a rank may free memory while others wait for it."""

    def body(rank: int, c: Communicator) -> None:
        on = stream()
        for i in range(50):
            x = torch.full((100,), float(rank + i))
            memory = made("Malloc", 64)
            if rank == 2:
                ok("Free", memory)  # the others may be in the call below
            c.all_reduce(x.data_ptr(), x.data_ptr(), x.numel(), F32, ADD, on)
            assert x.tolist() == [3.0 + 3 * i] * 100
            if rank != 2:
                ok("Free", memory)
        ok("StreamDestroy", on)

    three.do(body)


def test_a_communicator_destroyed_behind_its_work() -> None:
    communicators = Communicator.all(2)
    streams = [stream(queued=True) for _ in communicators]
    xs = [torch.ones(5) for _ in communicators]
    for c, x, on in zip(communicators, xs, streams, strict=True):
        c.all_reduce(x.data_ptr(), x.data_ptr(), 5, F32, ADD, on)
        c.destroy()
        c.destroy()  # again: does no harm
    for on in streams:
        ok("StreamSynchronize", on)
        ok("StreamDestroy", on)
    assert [x.tolist() for x in xs] == [[2.0] * 5] * 2


def test_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the environment, and set: ranks of one process have no process id in the sentence."""
    monkeypatch.setenv("INFINI_CCL_TIMEOUT", "0.05")
    sentence = "infinicclAllReduce: rank 1, rank 2 did not arrive within {} s"
    for seconds, given in ((0.05, None), (0.1, 0.1)):
        c = Communicator.all(3)
        if given is not None:
            c[0].set_timeout(given)
        for _ in range(2):  # the second time it does not wait
            with pytest.raises(RuntimeError) as caught:
                c[0].all_reduce(0, 0, 0, F32, ADD)
            assert str(caught.value) == sentence.format(seconds)
        with pytest.raises(RuntimeError) as caught:
            c[2].all_reduce(0, 0, 0, F32, ADD)
        assert str(caught.value) == sentence.format(seconds)
    for text in ("0", "-1", "x", "1s", "nan", "1e10"):
        monkeypatch.setenv("INFINI_CCL_TIMEOUT", text)
        with pytest.raises(RuntimeError, match="TIMEOUT must be a number of seconds above 0 and at most 1e9, got '"):
            Communicator.all(1)
    monkeypatch.delenv("INFINI_CCL_TIMEOUT")
    with pytest.raises(RuntimeError, match="infinicclCommSetTimeout: timeout_ms must be at least 0, got -1"):
        Communicator.all(1)[0].set_timeout(-5)


def refused(status: int, sentence: str, name: str, *arguments: object) -> None:
    rt.infinirtSetLastErrorMessage(None)
    assert (libinfiniccl._function(name)(*arguments), last_error()) == (status, f"infiniccl{name}: {sentence}")


def test_what_is_refused() -> None:
    handles = (ctypes.c_void_p * 2)()
    assert libinfiniccl._function("CommInitAll")(0, handles, 2, None) == SUCCESS
    comm, other = handles
    x = torch.zeros(8)
    p = x.data_ptr()
    out, number, unique = ctypes.c_void_p(), ctypes.c_int(), ctypes.create_string_buffer(unique_id(), 128)
    none = "must be a communicator that was made and not destroyed, got 0x"
    types = "device_type must be one that has communicators (INFINI_DEVICE_CPU, INFINI_DEVICE_NVIDIA), got "

    for device in (2, 10, -1):
        refused(5, f"{types}{device}", "CommInitAll", device, handles, 2, None)
        refused(5, f"{types}{device}", "GetUniqueId", device, unique)
        refused(5, f"{types}{device}", "CommInitRank", device, ctypes.byref(out), 1, unique, 0, 0, 0)
    refused(4, "comms must not be NULL", "CommInitAll", 0, None, 2, None)
    refused(3, "ndevice must be at least 1, got 0", "CommInitAll", 0, handles, 0, None)
    refused(3, "ndevice must be at most 64 on the CPU, got 65", "CommInitAll", 0, handles, 65, None)
    devices = (ctypes.c_int * 2)(0, -1)
    refused(6, "device_id must be at least 0, got -1", "CommInitAll", 0, handles, 2, devices)
    refused(6, "device_id must be at least 0, got -1", "CommInitRank", 0, ctypes.byref(out), 1, unique, 0, -1, 0)
    refused(4, "unique_id must not be NULL", "GetUniqueId", 0, None)
    refused(4, "comm must not be NULL", "CommInitRank", 0, None, 1, unique, 0, 0, 0)
    refused(4, "unique_id must not be NULL", "CommInitRank", 0, ctypes.byref(out), 1, None, 0, 0, 0)
    refused(3, "nranks must be at least 1, got 0", "CommInitRank", 0, ctypes.byref(out), 0, unique, 0, 0, 0)
    refused(
        3, "nranks must be at most 64 on the CPU, got 65", "CommInitRank", 0, ctypes.byref(out), 65, unique, 0, 0, 0
    )
    refused(3, "rank must be 0 to 1, got 2", "CommInitRank", 0, ctypes.byref(out), 2, unique, 2, 0, 0)
    refused(3, "rank must be 0 to 1, got -1", "CommInitRank", 0, ctypes.byref(out), 2, unique, -1, 0, 0)
    refused(3, "timeout_ms must be at least 0, got -1", "CommInitRank", 0, ctypes.byref(out), 1, unique, 0, 0, -1)
    foreign = "unique_id must be one of infinicclGetUniqueId for the CPU"
    for text in (b"", b"infiniccl-", b"infiniccl-" + b"g" * 32, b"infiniccl-../" + b"0" * 29, b"\xff" * 128):
        refused(3, foreign, "CommInitRank", 0, ctypes.byref(out), 1, ctypes.create_string_buffer(text, 128), 0, 0, 0)
    assert out.value is None

    for name in ("CommDestroy", "CommAbort"):
        refused(4, "comm must not be NULL", name, None)
    for name in ("CommCount", "CommUserRank"):
        refused(4, "comm must not be NULL", name, None, ctypes.byref(number))
    refused(4, "count must not be NULL", "CommCount", comm, None)
    refused(4, "rank must not be NULL", "CommUserRank", comm, None)
    refused(3, f"comm {none}{p:x}", "CommDestroy", p)
    refused(3, f"comm {none}{p:x}", "AllReduce", p, p, 1, 13, 0, p, None)

    refused(4, "comm must not be NULL", "AllReduce", p, p, 1, 13, 0, None, None)
    refused(4, "sendbuf must not be NULL", "AllReduce", None, p, 1, 13, 0, comm, None)
    refused(4, "recvbuf must not be NULL", "AllReduce", p, None, 1, 13, 0, comm, None)
    refused(
        11 - 1, "datatype must be one that can be reduced, got complex64 (17)", "AllReduce", p, p, 1, 17, 0, comm, None
    )
    refused(10, "datatype must be one that can be reduced, got float8 (11)", "AllReduce", p, p, 1, 11, 0, comm, None)
    for dtype, name in ((0, "invalid"), (20, "unknown"), (-1, "unknown")):
        sentence = f"datatype must be one that has a size, got {name} ({dtype})"
        refused(10, sentence, "Broadcast", p, p, 1, dtype, 0, comm, None)
    for op in (5, -1):
        refused(3, f"op must be an infinicclReduceOp_t, 0 to 4, got {op}", "AllReduce", p, p, 1, 13, op, comm, None)
    refused(
        3, "op must not be AVG for int32, whose mean may be none of its values", "AllReduce", p, p, 1, 5, 4, comm, None
    )
    most = (2**63 - 1) // 4 // 2
    refused(3, f"count must be at most {most}, got {most + 1}", "AllReduce", p, p, most + 1, 13, 0, comm, None)
    for root in (2, -1):
        refused(3, f"root must be a rank, 0 to 1, got {root}", "Broadcast", p, p, 1, 13, root, comm, None)
    refused(3, "peer must be a rank, 0 to 1, got 2", "Send", p, 1, 13, 2, comm, None)
    refused(3, "peer must be another rank, got 1 on rank 1", "Recv", p, 1, 13, 1, other, None)
    overlap = f"recvbuf must share no memory with sendbuf, or be in place, got {p + 4:#x} and {p:#x}"
    refused(3, overlap, "AllReduce", p, p + 4, 2, 13, 0, comm, None)
    refused(3, overlap, "Broadcast", p, p + 4, 2, 13, 0, comm, None)
    refused(3, overlap, "AllGather", p, p + 4, 2, 13, comm, None)
    refused(3, overlap, "ReduceScatter", p, p + 4, 2, 13, 0, comm, None)
    assert libinfiniccl._function("AllReduce")(p, p, 1, 13, 0, comm, p) != SUCCESS  # a stream that is none
    assert "stream must be a handle that was made and not destroyed" in last_error()

    number.value = -1
    assert libinfiniccl._function("CommCount")(other, ctypes.byref(number)) == SUCCESS and number.value == 2
    assert libinfiniccl._function("CommUserRank")(other, ctypes.byref(number)) == SUCCESS and number.value == 1
    for handle in handles:
        assert libinfiniccl._function("CommDestroy")(handle) == SUCCESS
    refused(3, f"comm {none}{comm:x}", "CommDestroy", comm)


def test_nothing_is_kept() -> None:
    xs = [torch.ones(100_000) for _ in range(2)]

    def cycle() -> None:
        group = Ranks(2)
        group.do(lambda rank, c: c.all_reduce(xs[rank].data_ptr(), xs[rank].data_ptr(), 100_000, F32, ADD))
        for c in group.communicators:
            c.destroy()
        group.threads.shutdown()

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("infiniccl (deleted)")

    gc.collect()  # of communicators that other tests left some are dropped now, and some perhaps during the cycles
    before = mapped()
    for _ in range(20):
        cycle()
    assert mapped() <= before
