"""libinfinirt on NVIDIA devices: what csrc/include/infinirt.h promises for them.

On a GPU where there is one. Elsewhere, with INFINI_LIBRARIES=build/native/emulated, on the emulated CUDA runtime
(csrc/emulation), which has two devices and runs work when it is queued. Skipped where there is neither.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_infini.testing import emulates_cuda, sanitized
from torch_infini.testing.c_runtime import (
    BAD_PARAM,
    BLOCKING_SYNC,
    COMPLETE,
    CPU,
    D2D,
    D2H,
    DISABLE_TIMING,
    GLOBAL,
    H2D,
    H2H,
    INTERNAL_ERROR,
    NO_BACKEND,
    NO_DEVICE,
    NOT_IMPLEMENTED,
    NOT_READY,
    NVIDIA,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    Bytes,
    Enqueue,
    HostFunction,
    captured,
    check_refusals,
    device,
    device_count,
    elapsed,
    event,
    in_thread,
    instantiated,
    joined,
    last_error,
    made,
    ok,
    query,
    refused,
    rt,
    stream,
)

DEVICES = device_count(NVIDIA)
pytestmark = pytest.mark.skipif(DEVICES == 0, reason="no GPU, and the libraries are not the emulated ones")
gpu = pytest.mark.skipif(emulates_cuda(), reason="the emulation runs work when it is queued")
emulated = pytest.mark.skipif(not emulates_cuda(), reason="asks the emulation")
two_devices = pytest.mark.skipif(DEVICES < 2, reason="needs two devices")


@pytest.fixture(autouse=True)
def on_nvidia() -> Iterator[None]:
    ok("SetDevice", NVIDIA, 0)
    yield
    ok("SetDevice", CPU, 0)


@pytest.fixture
def s() -> Iterator[int]:
    handle = stream()
    yield handle
    ok("StreamDestroy", handle)


@pytest.fixture
def s2() -> Iterator[int]:
    handle = stream()
    yield handle
    ok("StreamDestroy", handle)


class Memory:
    """Device memory, written and read by copies; `pinned`: of the host."""

    def __init__(self, data: bytes, pinned: bool = False) -> None:
        self.size, self.pinned = len(data), pinned
        self.at = made("MallocHost" if pinned else "Malloc", self.size)
        self.set(data)

    def set(self, data: bytes) -> None:
        source = Bytes(data)
        ok("Memcpy", self.at, source.at, self.size, H2H if self.pinned else H2D)

    def __bytes__(self) -> bytes:
        result = Bytes(bytes(self.size))
        ok("Memcpy", result.at, self.at, self.size, H2H if self.pinned else D2H)
        return bytes(result)

    def free(self) -> None:
        ok("FreeHost" if self.pinned else "Free", self.at)


def copy(dst: Memory, src: Memory, on: int | None, kind: int = D2D) -> None:
    ok("MemcpyAsync", dst.at, src.at, src.size, kind, on)


# ---- arguments and devices ----


def test_refused_arguments() -> None:
    check_refusals("nvidia")


def test_devices() -> None:
    counts = (ctypes.c_int * 10)()
    ok("GetAllDeviceCount", counts)
    assert list(counts) == [1, DEVICES] + [0] * 8
    for number in (-1, DEVICES):
        sentence = rf"^infinirtSetDevice: device_id must be less than the number of devices \(nvidia has {DEVICES}\)"
        refused(NO_DEVICE, f"{sentence}, got {number}$", "SetDevice", NVIDIA, number)
    sentence = r"device must be one this build has a backend for \(cpu, nvidia\), got cambricon"
    refused(NO_BACKEND, sentence, "SetDevice", 2, 0)
    assert device() == (NVIDIA, 0)  # what failed has changed nothing

    def another_thread() -> None:
        assert device() == (CPU, 0)

    joined(in_thread(another_thread))
    ok("DeviceSynchronize")


def test_host_functions_are_for_the_cpu(s: int) -> None:
    function = HostFunction(lambda _: SUCCESS)
    sentence = "^infinirtStreamLaunchHostFunction: the backend of nvidia does not implement this function$"
    for on in (s, None):
        refused(NOT_IMPLEMENTED, sentence, "StreamLaunchHostFunction", on, function, None, None)


@two_devices
def test_handles_know_their_device() -> None:
    first, done = stream(), event()
    ok("SetDevice", NVIDIA, 1)
    second, second_done, x, y = stream(), event(), Memory(b"abcd"), Memory(bytes(4))
    refused(BAD_PARAM, "event and stream must be of one device, got nvidia 1 and 0", "EventRecord", second_done, first)
    refused(BAD_PARAM, "must be of one device", "EventElapsedTime", ctypes.byref(ctypes.c_float()), done, second_done)
    ok("SetDevice", NVIDIA, 0)
    refused(BAD_PARAM, "ptr must be memory of infinirtMalloc on nvidia 0", "Free", x.at)
    ok("StreamBeginCapture", second, RELAXED)
    copy(y, x, second)
    exec_ = instantiated(captured(second))
    refused(BAD_PARAM, "graph_exec and stream must be of one device", "GraphLuanch", exec_, first)
    ok("GraphLuanch", exec_, None)
    ok("EventRecord", done, first)
    ok("StreamWaitEvent", second, done)  # across devices
    ok("StreamSynchronize", second)
    ok("SetDevice", NVIDIA, 1)
    assert bytes(y) == b"abcd"
    ok("Free", x.at)
    ok("Free", y.at)
    for handle in (first, second):
        ok("StreamDestroy", handle)


@two_devices
def test_enqueue_makes_the_device_current() -> None:
    """That is the driver's current device, for the length of the call."""
    current = emulated_device if emulates_cuda() else torch.cuda.current_device
    seen: list[int] = []
    note = Enqueue(lambda native, data: (seen.append(current()), SUCCESS)[1])
    ok("SetDevice", NVIDIA, 1)
    of_one = stream()
    ok("SetDevice", NVIDIA, 0)
    of_zero = stream()
    for number, on in ((1, None), (0, None), (1, of_one), (0, of_zero)):
        ok("StreamEnqueue", NVIDIA, number, on, note, None)
        assert current() == 0
    assert seen == [1, 0, 1, 0]


def emulated_device() -> int:
    number = ctypes.c_int()
    assert rt.librt.cudaGetDevice(ctypes.byref(number)) == 0
    return number.value


def test_enqueue(s: int) -> None:
    seen: list[tuple[int | None, int | None]] = []

    def body(native: int | None, data: int | None) -> int:
        seen.append((native, data))
        return SUCCESS

    note = Enqueue(body)
    for current in (NVIDIA, CPU):  # whichever is current
        ok("SetDevice", current, 0)
        ok("StreamEnqueue", NVIDIA, 0, s, note, 5)
        ok("StreamEnqueue", NVIDIA, 0, None, note, 6)
    ok("StreamEnqueue", NVIDIA, 0, 64, note, 7)  # not known here: passed on, not followed
    spare = seen[1][0]
    assert spare not in (None, s) and seen == [(s, 5), (spare, 6), (s, 5), (spare, 6), (64, 7)]

    def fails(_native: int | None, _data: int | None) -> int:
        rt.infinirtSetLastErrorMessage(b"infini::test: a rule")
        return 11

    refused(11, "^infini::test: a rule$", "StreamEnqueue", NVIDIA, 0, s, Enqueue(fails), None)
    refused(11, "^infini::test: a rule$", "StreamEnqueue", NVIDIA, 0, None, Enqueue(fails), None)
    refused(NO_DEVICE, "got 99", "StreamEnqueue", NVIDIA, 99, s, note, None)


# ---- streams that infinirt did not make ----


def foreign_stream() -> tuple[int, object]:
    """A stream of the driver's, and what keeps it."""
    if not emulates_cuda():
        made_by_torch = torch.cuda.Stream()
        return made_by_torch.cuda_stream, made_by_torch
    native = ctypes.c_void_p()
    assert rt.librt.cudaStreamCreateWithFlags(ctypes.byref(native), 1) == 0
    return native.value, native


def test_foreign_streams(s: int) -> None:
    native, keeps = foreign_stream()
    refused(BAD_PARAM, "stream must be a handle", "StreamSynchronize", native)
    assert made("StreamFromNative", native) == native  # the handle is the stream
    x, y, done = Memory(b"1234"), Memory(bytes(4)), event()
    ok("StreamBeginCapture", native, RELAXED)
    copy(y, x, native)
    graph = captured(native)
    ok("GraphLuanch", instantiated(graph), native)
    ok("EventRecord", done, native)
    ok("StreamWaitEvent", s, done)
    ok("StreamSynchronize", native)
    assert bytes(y) == b"1234"
    # Registered twice, forgotten twice.
    assert made("StreamFromNative", native) == native
    ok("StreamDestroy", native)
    ok("StreamSynchronize", native)
    ok("StreamDestroy", native)
    refused(BAD_PARAM, "stream must be a handle", "StreamSynchronize", native)
    refused(BAD_PARAM, "stream must be a handle", "StreamDestroy", native)
    assert made("StreamFromNative", native) == native  # the stream itself is still there
    ok("StreamDestroy", native)
    out = ctypes.byref(ctypes.c_void_p())
    refused(BAD_PARAM, "native must be a stream that the caller made, got one of", "StreamFromNative", out, s)
    legacy = made("StreamFromNative", 1)  # CUDA's default stream
    copy(x, y, legacy)
    ok("StreamSynchronize", legacy)
    ok("StreamDestroy", legacy)
    del keeps


@two_devices
def test_foreign_streams_of_another_device() -> None:
    native, keeps = foreign_stream()
    out = ctypes.byref(ctypes.c_void_p())
    ok("SetDevice", NVIDIA, 1)
    rule = "infinirtStreamFromNative: native must be a stream of the current device, nvidia 1, got one"
    refused(BAD_PARAM, f"^{rule} of nvidia 0$", "StreamFromNative", out, native)
    ok("SetDevice", NVIDIA, 0)
    assert made("StreamFromNative", native) == native
    ok("SetDevice", NVIDIA, 1)
    refused(BAD_PARAM, f"^{rule} registered for nvidia 0$", "StreamFromNative", out, native)
    ok("StreamDestroy", native)
    del keeps


# ---- memory and copies ----


def test_memory() -> None:
    for allocate, free in (("Malloc", "Free"), ("MallocHost", "FreeHost")):
        assert made(allocate, 0) == 0
        ok(free, None)
        for size in (1, 63, 64, 65, 1 << 20):
            at = made(allocate, size)
            assert at % 64 == 0
            refused(BAD_PARAM, "ptr must be memory of", free, at + 1)
            refused(BAD_PARAM, "ptr must be memory of", "FreeHost" if free == "Free" else "Free", at)
            ok(free, at)
            refused(BAD_PARAM, f"ptr must be memory of infinirt{allocate}.*that was not freed, got 0x", free, at)
        for huge in (1 << 62, (1 << 63) - 1, (1 << 64) - 1):
            out = ctypes.c_void_p(123)
            refused(INTERNAL_ERROR, f"no memory for {huge} bytes on nvidia 0", allocate, ctypes.byref(out), huge)
            assert out.value == 123
    host = made("MallocHost", 8)
    ok("SetDevice", CPU, 0)
    ok("FreeHost", host)  # anywhere


def test_stream_ordered_memory(s: int) -> None:
    out = ctypes.c_void_p(123)
    for on in (s, None):
        refused(INTERNAL_ERROR, "no memory for", "MallocAsync", ctypes.byref(out), 1 << 62, on)
        assert out.value == 123
        assert made("MallocAsync", 0, on) == 0
        ok("FreeAsync", None, on)
    source, result = Memory(bytes(range(64)), pinned=True), Memory(bytes(64), pinned=True)
    for allocate in ("MallocAsync", "Malloc"):
        for free in ("FreeAsync", "Free"):
            result.set(bytes(64))
            at = made(allocate, 64, s) if allocate == "MallocAsync" else made(allocate, 64)
            ok("MemcpyAsync", at, source.at, 64, H2D, s)
            ok("MemcpyAsync", result.at, at, 64, D2H, s)
            ok(free, at, s) if free == "FreeAsync" else ok(free, at)
            refused(BAD_PARAM, "ptr must be memory of", "Free", at)
            refused(BAD_PARAM, "ptr must be memory of", "FreeAsync", at, s)
            ok("StreamSynchronize", s)
            assert bytes(result) == bytes(range(64)), (allocate, free)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
def test_copies(s: int, pinned: bool) -> None:
    data = bytes(i % 251 for i in range(100_000))
    size = len(data)
    for on in (None, s, "sync"):
        host, source, result = (Memory(part, pinned=True) for part in (bytes(size), data, bytes(size)))
        if not pinned:
            host, source, result = Bytes(bytes(size)), Bytes(data), Bytes(bytes(size))
        device_memory = made("Malloc", size)

        def move(dst: int | None, src: int | None, count: int, kind: int, on: int | str | None = on) -> None:
            ok("Memcpy", dst, src, count, kind) if on == "sync" else ok("MemcpyAsync", dst, src, count, kind, on)

        move(host.at, source.at, size, H2H)
        move(device_memory, host.at, size, H2D)
        move(device_memory + 1, device_memory, size - 1, D2D)  # they overlap
        move(device_memory, device_memory, size, D2D)
        move(result.at, device_memory, size, D2H)
        move(result.at, result.at + 1, size - 1, H2H)
        move(0, 0, 0, D2H)
        move(result.at, None, 0, H2H)
        ok("StreamSynchronize", s)
        assert bytes(result) == data[:-1] + data[-2:-1]
        ok("Free", device_memory)


def test_copies_are_held_to_the_end_of_an_allocation(s: int) -> None:
    at, other = made("Malloc", 100), Bytes(bytes(400))
    for on in ((), (s,), (None,)):
        name = "MemcpyAsync" if on else "Memcpy"
        refused(BAD_PARAM, "at most the 100 bytes there are at dst, got 101", name, at, other.at, 101, H2D, *on)
        refused(BAD_PARAM, "at most the 60 bytes there are at src, got 61", name, other.at, at + 40, 61, D2H, *on)
        ok(name, other.at, at + 40, 60, D2H, *on)
        ok("StreamSynchronize", s)
    ok("Free", at)


@emulated
def test_fresh_memory_is_poisoned(s: int) -> None:
    for at in (made("Malloc", 16), made("MallocAsync", 16, s)):
        result = Bytes(bytes(16))
        ok("Memcpy", result.at, at, 16, D2H)
        assert bytes(result) == b"\xff" * 16


@emulated
def test_freed_memory_stays_in_the_pool(s: int) -> None:
    """It would go back to the system at every wait."""
    ok("FreeAsync", made("MallocAsync", 16, s), s)
    threshold = rt.librt.infinirtEmulatedReleaseThreshold
    threshold.restype = ctypes.c_ulonglong
    assert threshold(0) == 2**64 - 1


# ---- events ----


def test_event_status(s: int) -> None:
    done = made("EventCreate")
    assert query(done) == COMPLETE  # never recorded
    ok("EventSynchronize", done)
    ok("StreamWaitEvent", None, done)
    for on in (s, None):
        ok("EventRecord", done, on)
        ok("EventSynchronize", done)
        assert query(done) == COMPLETE
    ok("EventDestroy", done)


@gpu
def test_calls_return_before_the_work_is_done(s: int, s2: int) -> None:
    """Tens of milliseconds of copies hold a stream up; others, and NULL, do not wait for it."""
    size = 1 << 30
    a, b = made("Malloc", size), made("Malloc", size)
    done, after, sleeping = event(), event(), event(BLOCKING_SYNC)
    ok("MemcpyAsync", b, a, size, D2D, s)  # warm
    ok("DeviceSynchronize")
    for _ in range(40):
        ok("MemcpyAsync", b, a, size, D2D, s)
    for each in (done, sleeping):
        ok("EventRecord", each, s)
    ok("StreamWaitEvent", s2, done)
    ok("EventRecord", after, s2)
    small = Memory(b"abcd")
    assert bytes(small) == b"abcd"
    at_once = event()
    ok("EventRecord", at_once, None)
    assert query(at_once) == COMPLETE
    assert [query(each) for each in (done, after, sleeping)] == [NOT_READY] * 3
    out = ctypes.byref(ctypes.c_float())
    refused(BAD_PARAM, "end must .* complete, got one that is not ready", "EventElapsedTime", out, at_once, done)
    ok("EventRecord", done, None)  # replaces the record; s2 keeps waiting for the one before
    assert (query(done), query(after)) == (COMPLETE, NOT_READY)
    ok("EventSynchronize", sleeping)
    ok("EventDestroy", done)
    ok("StreamSynchronize", s2)
    assert query(after) == COMPLETE
    for memory in (a, b):
        ok("Free", memory)


def test_elapsed_time(s: int) -> None:
    start, end, not_timed, never = event(), event(BLOCKING_SYNC), event(DISABLE_TIMING), event()
    ok("EventRecord", start, s)
    ok("StreamSynchronize", s)
    time.sleep(0.05)
    ok("EventRecord", end, s)
    ok("EventRecord", not_timed, s)
    ok("StreamSynchronize", s)
    assert 45 <= elapsed(start, end) <= 5000
    assert elapsed(end, start) == -elapsed(start, end)
    out = ctypes.byref(ctypes.c_float())
    refused(BAD_PARAM, "end must be an event with timing", "EventElapsedTime", out, start, not_timed)
    refused(BAD_PARAM, "start must be an event with timing", "EventElapsedTime", out, not_timed, start)
    refused(BAD_PARAM, "start must .* complete, got one that was never recorded", "EventElapsedTime", out, never, end)
    ok("EventRecord", start, None)
    ok("EventRecord", end, None)
    assert 0 <= elapsed(start, end) < 1000


# ---- graphs ----


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread_local", "relaxed"])
def test_capture_and_replay(s: int, mode: int) -> None:
    source, result = Memory(b"1234", pinned=True), Memory(bytes(4), pinned=True)
    x, y = Memory(b"xxxx"), Memory(b"yyyy")
    ok("StreamBeginCapture", s, mode)
    copy(x, source, s, H2D)
    copy(y, x, s)
    copy(result, y, s, D2H)
    graph = captured(s)
    assert (bytes(y), bytes(result)) == (b"yyyy", bytes(4))  # nothing has run
    node, log = ctypes.c_void_p(5), ctypes.create_string_buffer(b"rubbish")
    exec_ = made("GraphInstantiate", graph, ctypes.byref(node), log, len(log))
    assert (node.value, log.value) == (None, b"")
    ok("GraphDestroy", graph)
    for text, on in ((b"1111", s), (b"2222", s), (b"3333", None)):
        source.set(text)
        ok("GraphLuanch", exec_, on)
        ok("StreamSynchronize", s)
        assert bytes(result) == text
    source.set(b"4444")
    ok("GraphLuanch", exec_, s)
    ok("GraphExecDestroy", exec_)  # queued: still runs
    refused(BAD_PARAM, "graph_exec must be a handle", "GraphLuanch", exec_, s)
    ok("StreamSynchronize", s)
    assert bytes(result) == b"4444"


def test_two_execs_of_one_graph_and_a_graph_in_a_graph(s: int) -> None:
    x, y, z = Memory(b"abcd"), Memory(bytes(4)), Memory(bytes(4))
    ok("StreamBeginCapture", s, RELAXED)
    copy(y, x, s)
    graph = captured(s)
    first, second = instantiated(graph), instantiated(graph)
    ok("GraphDestroy", graph)
    ok("GraphLuanch", first, s)
    ok("GraphExecDestroy", first)
    ok("StreamSynchronize", s)
    assert bytes(y) == b"abcd"
    ok("StreamBeginCapture", s, RELAXED)
    ok("GraphLuanch", second, s)
    copy(z, y, s)
    outer = instantiated(captured(s))
    ok("GraphExecDestroy", second)
    x.set(b"efgh")
    assert bytes(y) == b"abcd"
    ok("GraphLuanch", outer, s)
    ok("StreamSynchronize", s)
    assert bytes(z) == b"efgh"


def test_overlapping_copies_in_a_capture(s: int) -> None:
    x = Memory(b"abcdefgh")
    ok("StreamBeginCapture", s, RELAXED)
    ok("MemcpyAsync", x.at + 1, x.at, 7, D2D, s)
    exec_ = instantiated(captured(s))
    for expected in (b"aabcdefg", b"aaabcdef"):
        ok("GraphLuanch", exec_, s)
        ok("StreamSynchronize", s)
        assert bytes(x) == expected


def test_fork_and_join_in_a_capture(s: int, s2: int) -> None:
    """a -> b on s2 and a -> c on s at once; then both come together on s."""
    a, b, c, both = Memory(b"a---"), Memory(b"b---"), Memory(b"c---"), Memory(bytes(8))
    forked, back = event(), event(DISABLE_TIMING)
    ok("StreamBeginCapture", s, RELAXED)
    copy(a, b, s)  # something before the fork
    ok("EventRecord", forked, s)
    ok("StreamWaitEvent", s2, forked)
    ok("MemcpyAsync", b.at, a.at, 2, D2D, s2)
    ok("MemcpyAsync", both.at, b.at, 4, D2D, s2)
    ok("EventRecord", back, s2)
    refused(BAD_PARAM, "stream must not be captured", "StreamSynchronize", s2)
    refused(BAD_PARAM, "a capture began", "StreamEndCapture", s2, ctypes.byref(ctypes.c_void_p()))
    refused(BAD_PARAM, "stream must not be captured already", "StreamBeginCapture", s2, RELAXED)
    copy(c, a, s)
    ok("StreamWaitEvent", s, back)
    ok("MemcpyAsync", both.at + 4, c.at, 4, D2D, s)
    exec_ = instantiated(captured(s))
    ok("StreamSynchronize", s2)  # free again
    for text in (b"1234", b"5678", b"90ab"):
        a.set(bytes(4))
        b.set(text)
        c.set(bytes(4))
        both.set(bytes(8))
        ok("GraphLuanch", exec_, s2)
        ok("StreamSynchronize", s2)
        assert bytes(both) == text * 2


def test_unjoined_fork_is_refused(s: int, s2: int) -> None:
    x, y, forked, out = Memory(b"abcd"), Memory(bytes(4)), event(), ctypes.c_void_p(9)
    ok("StreamBeginCapture", s, RELAXED)
    ok("EventRecord", forked, s)
    ok("StreamWaitEvent", s2, forked)
    copy(y, x, s2)
    refused(BAD_PARAM, "cudaErrorStreamCaptureUnjoined", "StreamEndCapture", s, ctypes.byref(out))
    assert out.value == 9
    for on in (s, s2):  # both have left the capture
        copy(y, x, on)
        ok("StreamSynchronize", on)
    ok("DeviceSynchronize")


@emulated
def test_no_error_is_left_to_those_who_ask_cuda_next(s: int) -> None:
    out = ctypes.byref(ctypes.c_void_p())
    refused(INTERNAL_ERROR, "no memory", "Malloc", out, 1 << 62)
    assert rt.librt.cudaGetLastError() == 0
    ok("StreamBeginCapture", s, GLOBAL)
    refused(BAD_PARAM, "cudaErrorStreamCaptureUnsupported", "Malloc", out, 8)
    assert rt.librt.cudaGetLastError() == 0
    refused(BAD_PARAM, "cudaErrorStreamCaptureInvalidated", "StreamEndCapture", s, out)
    assert rt.librt.cudaGetLastError() == 0


def test_what_a_capture_refuses(s: int, s2: int) -> None:
    """And the capture survives every refusal."""
    outside, inside, out = event(), event(), ctypes.byref(ctypes.c_void_p())
    x, y = Memory(b"abcd"), Memory(bytes(4))
    ok("EventRecord", outside, s)
    at, host = made("Malloc", 8), made("MallocHost", 8)
    ok("StreamBeginCapture", s, RELAXED)
    copy(y, x, s)
    refused(BAD_PARAM, "stream must not be captured already", "StreamBeginCapture", s, RELAXED)
    refused(BAD_PARAM, "stream must not be captured", "StreamSynchronize", s)
    refused(BAD_PARAM, "recorded outside", "StreamWaitEvent", s, outside)
    ok("StreamWaitEvent", s, event())  # never recorded
    refused(NOT_IMPLEMENTED, "stream must not be captured", "MallocAsync", out, 8, s)
    refused(NOT_IMPLEMENTED, "stream must not be captured", "FreeAsync", at, s)
    waits = "no stream of nvidia 0 may be captured at the time, as the call waits for all of them"
    refused(BAD_PARAM, f"^infinirtFree: {waits}$", "Free", at)
    refused(BAD_PARAM, f"^infinirtFreeHost: {waits}$", "FreeHost", host)
    refused(BAD_PARAM, f"^infinirtDeviceSynchronize: {waits}$", "DeviceSynchronize")
    ok("EventRecord", inside, s)
    status, ms = ctypes.byref(ctypes.c_int()), ctypes.byref(ctypes.c_float())
    ok("StreamBeginCapture", s2, RELAXED)
    refused(BAD_PARAM, "another capture", "StreamWaitEvent", s2, inside)
    ok("GraphDestroy", captured(s2))
    for _ in range(2):
        refused(BAD_PARAM, "recorded in a capture", "EventQuery", inside, status)
        refused(BAD_PARAM, "recorded in a capture", "EventSynchronize", inside)
        refused(BAD_PARAM, "recorded in a capture", "StreamWaitEvent", None, inside)
        refused(BAD_PARAM, "end must not be last recorded in a capture", "EventElapsedTime", ms, outside, inside)
        if x is not None:
            ok("GraphLuanch", instantiated(captured(s)), None)
            assert bytes(y) == b"abcd"
            x = None
    refused(BAD_PARAM, "since the capture .* ended", "StreamWaitEvent", s2, inside)
    ok("EventRecord", inside, s)
    ok("StreamWaitEvent", s2, inside)
    ok("EventSynchronize", inside)
    ok("Free", at)  # it was not taken
    ok("FreeHost", host)


def test_modes_forbid_allocations(s: int) -> None:
    """GLOBAL to all threads, THREAD_LOCAL to this one, RELAXED to none; the capture is lost."""
    out = ctypes.byref(ctypes.c_void_p())
    ok("StreamBeginCapture", s, RELAXED)
    at = made("Malloc", 8)
    ok("GraphDestroy", captured(s))
    ok("Free", at)
    for mode in (GLOBAL, THREAD_LOCAL):
        ok("StreamBeginCapture", s, mode)
        refused(BAD_PARAM, "cudaMalloc: .*cudaErrorStreamCaptureUnsupported", "Malloc", out, 8)
        refused(BAD_PARAM, "cudaErrorStreamCaptureInvalidated", "StreamEndCapture", s, out)
        ok("StreamBeginCapture", s, mode)  # the stream is as good as before
        ok("GraphDestroy", captured(s))
    ok("StreamBeginCapture", s, THREAD_LOCAL)
    joined(in_thread(lambda: (ok("SetDevice", NVIDIA, 0), made("Malloc", 8))))
    ok("GraphDestroy", captured(s))
    ok("StreamBeginCapture", s, GLOBAL)
    joined(in_thread(lambda: (ok("SetDevice", NVIDIA, 0), refused(BAD_PARAM, "Unsupported", "Malloc", out, 8))))
    refused(BAD_PARAM, "cudaErrorStreamCaptureInvalidated", "StreamEndCapture", s, out)


def test_calls_with_a_null_stream_do_not_disturb_a_capture(s: int) -> None:
    x, y, z, done = Memory(b"abcd"), Memory(bytes(4)), Memory(bytes(4)), event()
    note = Enqueue(lambda native, data: SUCCESS)
    ok("StreamBeginCapture", s, GLOBAL)
    copy(y, x, s)
    ok("EventRecord", done, None)
    ok("StreamEnqueue", NVIDIA, 0, None, note, None)
    copy(z, x, None)
    assert (bytes(y), bytes(z)) == (bytes(4), b"abcd")
    ok("GraphLuanch", instantiated(captured(s)), None)
    assert bytes(y) == b"abcd"


def test_captures_end_on_their_thread(s: int) -> None:
    for mode in (GLOBAL, THREAD_LOCAL):
        ok("StreamBeginCapture", s, mode)
        out = ctypes.byref(ctypes.c_void_p())
        wrong = "cudaErrorStreamCaptureWrongThread"
        joined(in_thread(lambda out=out: refused(BAD_PARAM, wrong, "StreamEndCapture", s, out)))  # noqa: B023
        ok("GraphDestroy", captured(s))
    ok("StreamBeginCapture", s, RELAXED)
    joined(in_thread(lambda: ok("GraphDestroy", captured(s))))


def test_capture_is_lost_with_its_stream(s2: int) -> None:
    forked, s, x, y = event(), stream(), Memory(b"abcd"), Memory(bytes(4))
    ok("StreamBeginCapture", s, RELAXED)
    copy(y, x, s)
    ok("EventRecord", forked, s)
    ok("StreamDestroy", s)
    refused(BAD_PARAM, "since the capture .* ended", "StreamWaitEvent", s2, forked)
    ok("StreamSynchronize", s2)
    ok("DeviceSynchronize")
    assert bytes(y) == bytes(4)


# ---- threads and large numbers ----


def test_many_threads_at_once() -> None:
    def body(me: int) -> None:
        ok("SetDevice", NVIDIA, 0)
        own, done = stream(), event()
        a, b = Memory(bytes([me]) * 64, pinned=True), Memory(bytes(64), pinned=True)
        for i in range(30):
            at = made("MallocAsync", 64, own)
            ok("MemcpyAsync", at, a.at, 64, H2D, own)
            ok("EventRecord", done, own)
            ok("StreamWaitEvent", shared, done)
            ok("MemcpyAsync", b.at, at, 64, D2H, own)
            ok("FreeAsync", at, own)
            if i % 3 == 0:
                ok("StreamBeginCapture", own, THREAD_LOCAL)
                ok("MemcpyAsync", b.at, a.at, 64, H2H, own)
                graph = captured(own)
                exec_ = instantiated(graph)
                ok("GraphLuanch", exec_, own)
                ok("GraphDestroy", graph)
                ok("GraphExecDestroy", exec_)
            ok("StreamSynchronize", own)
            assert bytes(b) == bytes([me]) * 64
            Memory(b"done on return")
        ok("EventDestroy", done)
        ok("StreamDestroy", own)

    shared = stream()
    for thread in [in_thread(lambda me=me: body(me)) for me in range(8)]:
        joined(thread)
    ok("StreamDestroy", shared)


@pytest.mark.skipif(sanitized() or not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_memory_stays_flat(s: int) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cycle(count: int) -> None:
        source, target = Memory(bytes(64)), Memory(bytes(64))
        for _ in range(count):
            done, other = event(), stream()
            ok("EventRecord", done, other)
            ok("StreamDestroy", other)
            ok("EventDestroy", done)
            ok("StreamBeginCapture", s, RELAXED)
            copy(target, source, s)
            graph = captured(s)
            exec_ = instantiated(graph)
            ok("GraphLuanch", exec_, s)
            ok("GraphDestroy", graph)
            ok("GraphExecDestroy", exec_)
            ok("FreeAsync", made("MallocAsync", 1000, s), s)
            ok("StreamSynchronize", s)
        source.free()
        target.free()

    cycle(300)
    before = resident()
    cycle(1500)
    grown = resident() - before
    assert grown < 4 << 20, f"{grown} bytes more"


def test_destroy_while_another_thread_waits() -> None:
    for _ in range(20):
        other, started = stream(), threading.Event()

        def wait(other: int = other, started: threading.Event = started) -> None:
            started.set()
            status = rt.infinirtStreamSynchronize(other)
            assert status == SUCCESS or "handle" in last_error()

        waiting = in_thread(wait)
        started.wait()
        ok("StreamDestroy", other)
        joined(waiting)
