"""libinfinirt through its C interface: what csrc/include/infinirt.h promises, for the CPU.

Its streams by themselves: test_infinirt_streams.py.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from pathlib import Path

import pytest
from host_streams import Gate, launch, linux

from torch_infini.testing import sanitized
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
    LONG,
    NO_BACKEND,
    NO_DEVICE,
    NOT_IMPLEMENTED,
    NOT_READY,
    NULL_POINTER,
    NVIDIA,
    QUEUED,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    Bytes,
    Enqueue,
    HostFunction,
    callbacks,
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

pytest_plugins = ["host_streams"]  # its fixtures


# ---- arguments ----


def test_refused_arguments() -> None:
    check_refusals("cpu")
    out = ctypes.byref(ctypes.c_void_p())
    absent = ": the backend of cpu does not implement this function"
    refused(NOT_IMPLEMENTED, f"^infinirtStreamFromNative{absent}$", "StreamFromNative", out, 64)
    enqueue = Enqueue(lambda *_: 0)
    refused(NOT_IMPLEMENTED, f"^infinirtStreamEnqueue{absent}$", "StreamEnqueue", CPU, 0, None, enqueue, None)


def test_errors_belong_to_the_thread() -> None:
    rt.infinirtSetLastErrorMessage(b"mine")
    joined(in_thread(lambda: refused(NULL_POINTER, "p_ptr", "Malloc", None, 1)))
    assert last_error() == "mine"
    ok("Init")
    assert last_error() == "mine"  # what succeeds leaves it alone


# ---- devices ----


def test_devices() -> None:
    ok("Init")
    ok("Init")
    counts = (ctypes.c_int * 10)(*[7] * 10)
    ok("GetAllDeviceCount", counts)
    nvidia = device_count(NVIDIA)
    assert list(counts) == [1, nvidia] + [0] * 8
    assert [device_count(kind) for kind in range(10)] == list(counts)
    ok("DeviceSynchronize")
    ok("GetDevice", None, None)


def test_absent_devices_change_nothing() -> None:
    names = ["cambricon", "ascend", "metax", "moore", "iluvatar", "kunlun", "hygon", "qy"]
    where = dict.fromkeys(names, 'CONTRIBUTING.md, "Bring up a device", adds one')
    has_cuda = rt.infinirtSetDevice(NVIDIA, -1) != NO_BACKEND
    if not has_cuda:
        names, where = ["nvidia", *names], where | {"nvidia": "a build with nvcc has one"}
    for kind, name in enumerate(names, NVIDIA + has_cuda):
        there = "cpu, nvidia" if has_cuda else "cpu"
        rule = f"infinirtSetDevice: device must be one this build has a backend for ({there})"
        refused(NO_BACKEND, f"^{re.escape(f'{rule}, got {name}; {where[name]}')}$", "SetDevice", kind, 0)
        assert device() == (CPU, 0)
    for number in (-1, 1):
        sentence = rf"device_id must be less than the number of devices \(cpu has 1\), got {number}"
        refused(NO_DEVICE, sentence, "SetDevice", CPU, number)
    assert device() == (CPU, 0)
    ok("SetDevice", CPU, 0)

    def another_thread() -> None:
        assert device() == (CPU, 0)  # where each thread starts

    joined(in_thread(another_thread))


# ---- events ----


def test_event_status(q: int) -> None:
    done = made("EventCreate")
    assert query(done) == COMPLETE  # never recorded
    ok("EventSynchronize", done)
    gate = Gate(q)
    ok("EventRecord", done, q)
    assert query(done) == NOT_READY
    gate.open()
    ok("EventSynchronize", done)
    assert query(done) == COMPLETE
    gate = Gate(q)
    ok("EventRecord", done, None)  # a NULL stream waits for no other
    assert query(done) == COMPLETE
    gate.open()
    ok("EventDestroy", done)


def test_streams_wait_for_events(q: int, q2: int) -> None:
    gate, done, never, seen = Gate(q), event(BLOCKING_SYNC), event(), []
    assert launch(q, lambda: (time.sleep(0.02), seen.append("s"))) == SUCCESS
    ok("EventRecord", done, q)
    ok("StreamWaitEvent", q2, never)
    ok("StreamWaitEvent", q2, done)
    assert launch(q2, lambda: seen.append("s2")) == SUCCESS
    # Neither a record after the wait nor the event's end changes what q2 waits for.
    ok("EventRecord", done, None)
    ok("EventDestroy", done)
    time.sleep(0.02)
    assert seen == []
    gate.open()
    ok("StreamSynchronize", q2)
    assert seen == ["s", "s2"]


def test_null_stream_waits_in_the_call(q: int) -> None:
    gate, done = Gate(q), event()
    ok("EventRecord", done, q)
    threading.Timer(0.05, gate.open).start()
    ok("StreamWaitEvent", None, done)
    assert gate.opened.is_set() and query(done) == COMPLETE


def test_destroying_an_event_wakes_nobody(q: int) -> None:
    gate, done = Gate(q), event()
    ok("EventRecord", done, q)
    entered = threading.Event()
    waiting = in_thread(lambda: (entered.set(), ok("EventSynchronize", done)))
    assert entered.wait(LONG)
    time.sleep(0.05)
    ok("EventDestroy", done)
    time.sleep(0.02)
    assert waiting.is_alive()
    gate.open()
    joined(waiting)


def test_elapsed_time(q: int) -> None:
    start, end, not_timed, never = event(), event(BLOCKING_SYNC), event(DISABLE_TIMING), event()
    ok("EventRecord", start, q)
    measured: list[float] = []

    def body() -> None:
        begin = time.monotonic()
        time.sleep(0.1)
        measured.append(1e3 * (time.monotonic() - begin))

    assert launch(q, body) == SUCCESS
    ok("EventRecord", end, q)
    ok("EventRecord", not_timed, q)
    ok("StreamSynchronize", q)
    assert measured[0] <= elapsed(start, end) <= measured[0] + 2000
    assert elapsed(end, start) == -elapsed(start, end)
    out = ctypes.byref(ctypes.c_float())
    refused(BAD_PARAM, "end must be an event with timing", "EventElapsedTime", out, start, not_timed)
    refused(BAD_PARAM, "start must be an event with timing", "EventElapsedTime", out, not_timed, start)
    refused(BAD_PARAM, "start must .* complete, got one that was never recorded", "EventElapsedTime", out, never, end)
    gate = Gate(q)
    ok("EventRecord", end, q)
    refused(BAD_PARAM, "end must .* complete, got one that is not ready", "EventElapsedTime", out, start, end)
    gate.open()
    # Two records in a row are microseconds apart, and their distance is seen.
    ok("EventSynchronize", end)
    distances = []
    for _ in range(200):
        ok("EventRecord", start, None)
        ok("EventRecord", end, None)
        distances.append(elapsed(start, end))
    assert 0 < min(distances) < 1


# ---- memory ----


def test_memory() -> None:
    for allocate, free in (("Malloc", "Free"), ("MallocHost", "FreeHost")):
        assert made(allocate, 0) == 0
        ok(free, None)
        for size in (1, 63, 64, 65, 1 << 20):
            at = made(allocate, size)
            assert at % 64 == 0
            ctypes.memset(at, 7, size)
            refused(BAD_PARAM, "ptr must be memory of", free, at + 1)
            other = "FreeHost" if free == "Free" else "Free"
            refused(BAD_PARAM, "ptr must be memory of", other, at)
            refused(BAD_PARAM, "ptr must be memory of", "FreeAsync", at + 1, None)
            ok(free, at)
            refused(BAD_PARAM, f"ptr must be memory of infinirt{allocate}.*that was not freed, got 0x", free, at)
        for huge in (1 << 62, (1 << 63) - 1, (1 << 64) - 1):
            out = ctypes.c_void_p(123)
            refused(INTERNAL_ERROR, f"no memory for {huge} bytes on cpu 0", allocate, ctypes.byref(out), huge)
            assert out.value == 123


def test_stream_ordered_memory_is_refused_alike(s: int) -> None:
    out = ctypes.c_void_p(123)
    for on in (s, None):
        refused(INTERNAL_ERROR, "no memory for", "MallocAsync", ctypes.byref(out), 1 << 62, on)
        assert out.value == 123
        assert made("MallocAsync", 0, on) == 0
        ok("FreeAsync", None, on)
        at = made("MallocAsync", 100, on)
        ok("FreeAsync", at, on)
        refused(BAD_PARAM, "ptr must be memory of", "FreeAsync", at, on)
        refused(BAD_PARAM, "ptr must be memory of", "Free", at)


def test_host_memory_is_freed_by_any_thread() -> None:
    at = made("MallocHost", 100)
    joined(in_thread(lambda: ok("FreeHost", at)))
    refused(BAD_PARAM, "ptr must be", "FreeHost", at)


@pytest.mark.parametrize("free", ["Free", "FreeHost"])
def test_free_waits_for_queued_work(q: int, free: str) -> None:
    at = made(free.replace("Free", "Malloc"), 4096)
    gate, result = Gate(q), Bytes(bytes(4096))
    ctypes.memset(at, 5, 4096)
    ok("MemcpyAsync", result.at, at, 4096, D2H, q)
    assert launch(q, lambda: 3) == SUCCESS
    freeing = in_thread(lambda: ok(free, at))
    time.sleep(0.05)
    assert freeing.is_alive()
    gate.open()
    joined(freeing)
    assert bytes(result) == b"\5" * 4096
    refused(3, "status 3", "StreamSynchronize", q)  # freeing has not taken the failure


def test_stream_ordered_memory(q: int) -> None:
    gate = Gate(q)
    at, source, result = made("MallocAsync", 64, q), Bytes(bytes(range(64))), Bytes(bytes(64))
    assert at % 64 == 0
    ok("MemcpyAsync", at, source.at, 64, H2D, q)
    ok("MemcpyAsync", result.at, at, 64, D2H, q)
    ok("FreeAsync", at, q)
    refused(BAD_PARAM, "ptr must be memory of", "Free", at)
    gate.open()
    ok("StreamSynchronize", q)
    assert bytes(result) == bytes(range(64))


# ---- copies ----


def test_copies(s: int) -> None:
    data = bytes(i % 251 for i in range(100_000))
    device_memory, host_memory = made("Malloc", len(data)), made("MallocHost", len(data))
    for on in (None, s, "sync"):
        source, result = Bytes(data), Bytes(bytes(len(data)))

        def copy(dst: int, src: int, size: int, kind: int, on: int | str | None = on) -> None:
            if on == "sync":
                ok("Memcpy", dst, src, size, kind)
            else:
                ok("MemcpyAsync", dst, src, size, kind, on)

        copy(host_memory, source.at, len(data), H2H)
        copy(device_memory, host_memory, len(data), H2D)
        copy(device_memory + 1, device_memory, len(data) - 1, D2D)  # they overlap
        copy(result.at, device_memory, len(data), D2H)
        copy(0, 0, 0, D2H)
        copy(result.at, None, 0, H2H)
        ok("StreamSynchronize", s)
        assert bytes(result) == data[:1] + data[:-1]
    ok("Free", device_memory)
    ok("FreeHost", host_memory)


def test_copies_are_held_to_the_end_of_an_allocation(s: int) -> None:
    for allocate, free in (("Malloc", "Free"), ("MallocHost", "FreeHost")):
        at, other = made(allocate, 100), Bytes(bytes(400))
        for kind in (H2H, H2D, D2H, D2D):
            for on in ((), (s,), (None,)):
                name = "MemcpyAsync" if on else "Memcpy"
                refused(
                    BAD_PARAM, "at most the 100 bytes there are at dst, got 101", name, at, other.at, 101, kind, *on
                )
                refused(
                    BAD_PARAM, "at most the 60 bytes there are at src, got 61", name, other.at, at + 40, 61, kind, *on
                )
                refused(BAD_PARAM, "size must be at most", name, other.at, at, (1 << 64) - 1, kind, *on)
                refused(BAD_PARAM, "size must be at most", name, other.at, other.at + 1, (1 << 64) - 1, kind, *on)
                ok(name, other.at, at + 40, 60, kind, *on)
                ok(name, other.at, at + 100, 1, kind, *on)  # begins outside: not ours to judge
                ok("StreamSynchronize", s)
        ok(free, at)


def test_async_copies_are_ordered(q: int) -> None:
    gate, a, b = Gate(q), Bytes(b"before"), Bytes(bytes(6))
    ok("MemcpyAsync", b.at, a.at, 6, H2H, q)
    ctypes.memmove(a.at, b"after!", 6)  # not read yet
    assert bytes(b) == bytes(6)
    ok("Memcpy", b.at, a.at, 3, H2H)  # waits for no stream
    assert bytes(b) == b"aft\0\0\0"
    gate.open()
    ok("StreamSynchronize", q)
    assert bytes(b) == b"after!"


# ---- graphs ----


def test_capture_and_replay(s: int, queued: bool) -> None:
    a, b, counts, released = Bytes(b"1234"), Bytes(bytes(4)), [0], []
    ok("StreamBeginCapture", s, GLOBAL)
    ok("MemcpyAsync", b.at, a.at, 4, H2D, s)
    assert launch(s, lambda: counts.append(bytes(b)), lambda: released.append(1)) == SUCCESS
    graph = captured(s)
    assert bytes(b) == bytes(4) and counts == [0]  # nothing has run
    exec_ = instantiated(graph)
    ok("GraphDestroy", graph)
    for text in (b"1111", b"2222", b"3333"):
        ctypes.memmove(a.at, text, 4)
        ok("GraphLuanch", exec_, s)
        ok("StreamSynchronize", s)
    ctypes.memmove(a.at, b"4444", 4)
    ok("GraphLuanch", exec_, None)
    assert counts == [0, b"1111", b"2222", b"3333", b"4444"]
    gate = Gate(s) if queued else None
    ok("GraphLuanch", exec_, s)
    assert len(counts) == (5 if queued else 6) and not released
    ok("GraphExecDestroy", exec_)  # queued: still runs
    refused(BAD_PARAM, "graph_exec must be a handle", "GraphLuanch", exec_, s)
    if gate is not None:
        assert not released
        gate.open()
        ok("StreamSynchronize", s)
    assert counts[5:] == [b"4444"] and released == [1]


def test_two_execs_of_one_graph(s: int) -> None:
    seen, released = [], []
    ok("StreamBeginCapture", s, THREAD_LOCAL)
    assert launch(s, lambda: seen.append(1), lambda: released.append(1)) == SUCCESS
    graph = captured(s)
    node, log = ctypes.c_void_p(5), ctypes.create_string_buffer(b"rubbish")
    first = made("GraphInstantiate", graph, ctypes.byref(node), log, len(log))
    assert (node.value, log.value) == (None, b"")
    second = instantiated(graph)
    ok("GraphExecDestroy", first)
    ok("GraphLuanch", second, None)
    ok("GraphExecDestroy", second)
    assert (seen, released) == ([1], [])
    ok("GraphDestroy", graph)
    assert released == [1]
    out, node = ctypes.c_void_p(9), ctypes.c_void_p(5)
    refused(BAD_PARAM, "graph must be", "GraphInstantiate", ctypes.byref(out), graph, ctypes.byref(node), log, 8)
    assert (out.value, node.value, log.value) == (9, None, b"infinir")


def test_fork_and_join_in_a_capture(s: int, s2: int) -> None:
    seen: list[str] = []
    forked, back = event(), event()
    ok("StreamBeginCapture", s, RELAXED)
    assert launch(s, lambda: seen.append("before")) == SUCCESS
    ok("EventRecord", forked, s)
    ok("StreamWaitEvent", s2, forked)
    assert launch(s2, lambda: seen.append("forked")) == SUCCESS
    ok("EventRecord", back, s2)
    refused(BAD_PARAM, "stream must not be captured", "StreamSynchronize", s2)
    refused(BAD_PARAM, "a capture began", "StreamEndCapture", s2, ctypes.byref(ctypes.c_void_p()))
    refused(BAD_PARAM, "stream must not be captured already", "StreamBeginCapture", s2, RELAXED)
    ok("StreamWaitEvent", s, back)
    assert launch(s, lambda: seen.append("after")) == SUCCESS
    exec_ = instantiated(captured(s))
    assert launch(s2, lambda: seen.append("s2 is free again")) == SUCCESS
    ok("StreamSynchronize", s2)
    assert seen.pop() == "s2 is free again" and not seen
    for on in (s, s2, None):
        ok("GraphLuanch", exec_, on)
        ok("DeviceSynchronize")
        assert seen == ["before", "forked", "after"]
        seen.clear()


def test_what_a_capture_refuses(s: int, s2: int) -> None:
    outside, inside, out = event(), event(), ctypes.byref(ctypes.c_void_p())
    ok("EventRecord", outside, s)
    ok("StreamBeginCapture", s, RELAXED)
    refused(BAD_PARAM, "stream must not be captured already", "StreamBeginCapture", s, RELAXED)
    refused(BAD_PARAM, "stream must not be captured", "StreamSynchronize", s)
    refused(BAD_PARAM, "recorded outside", "StreamWaitEvent", s, outside)
    ok("StreamWaitEvent", s, event())  # never recorded
    at = made("Malloc", 8)
    refused(NOT_IMPLEMENTED, "stream must not be captured", "MallocAsync", out, 8, s)
    refused(NOT_IMPLEMENTED, "stream must not be captured", "FreeAsync", at, s)
    ok("Free", at)  # it was not taken
    ok("EventRecord", inside, s)
    status, ms = ctypes.byref(ctypes.c_int()), ctypes.byref(ctypes.c_float())
    ok("StreamBeginCapture", s2, RELAXED)
    refused(BAD_PARAM, "another capture", "StreamWaitEvent", s2, inside)
    graph = captured(s2)
    for _ in range(2):
        refused(BAD_PARAM, "recorded in a capture", "EventQuery", inside, status)
        refused(BAD_PARAM, "recorded in a capture", "EventSynchronize", inside)
        refused(BAD_PARAM, "recorded in a capture", "StreamWaitEvent", None, inside)
        refused(BAD_PARAM, "end must not be last recorded in a capture", "EventElapsedTime", ms, outside, inside)
        if graph:
            ok("GraphDestroy", graph)
            ok("GraphDestroy", captured(s))
            graph = None
    refused(BAD_PARAM, "since the capture .* ended", "StreamWaitEvent", s2, inside)
    ok("EventRecord", inside, s)
    ok("StreamWaitEvent", s2, inside)
    ok("EventSynchronize", inside)


def test_queued_before_the_capture_runs(q: int) -> None:
    gate, seen = Gate(q), []
    assert launch(q, lambda: seen.append(1)) == SUCCESS
    ok("StreamBeginCapture", q, RELAXED)
    gate.open()
    ok("DeviceSynchronize")  # allowed: waits for what is queued, which the capture is not
    assert seen == [1]
    ok("GraphDestroy", captured(q))


def test_capture_is_lost_with_its_stream(s2: int) -> None:
    released, forked, s = [], event(), stream()
    ok("StreamBeginCapture", s, RELAXED)
    assert launch(s, lambda: None, lambda: released.append("first")) == SUCCESS
    ok("EventRecord", forked, s)
    ok("StreamWaitEvent", s2, forked)
    assert launch(s2, lambda: None, lambda: released.append("second")) == SUCCESS
    assert not released
    ok("StreamDestroy", s)
    assert released == ["first", "second"]
    ok("StreamSynchronize", s2)


def test_capture_outlives_a_stream_that_joined(s: int) -> None:
    seen, forked, s2 = [], event(), stream()
    ok("StreamBeginCapture", s, RELAXED)
    ok("EventRecord", forked, s)
    ok("StreamWaitEvent", s2, forked)
    assert launch(s2, lambda: seen.append(1)) == SUCCESS
    ok("StreamDestroy", s2)
    ok("GraphLuanch", instantiated(captured(s)), None)
    assert seen == [1]


def test_graph_in_a_graph(s: int) -> None:
    seen, released = [], []
    ok("StreamBeginCapture", s, RELAXED)
    assert launch(s, lambda: seen.append("inner"), lambda: released.append(1)) == SUCCESS
    graph = captured(s)
    inner = instantiated(graph)
    ok("GraphDestroy", graph)
    ok("StreamBeginCapture", s, RELAXED)
    ok("GraphLuanch", inner, s)
    assert launch(s, lambda: seen.append("outer")) == SUCCESS
    ok("GraphLuanch", inner, s)
    ok("GraphExecDestroy", inner)
    graph = captured(s)
    outer = instantiated(graph)
    ok("GraphDestroy", graph)
    assert not seen and not released
    ok("GraphLuanch", outer, s)
    ok("StreamSynchronize", s)
    assert seen == ["inner", "outer", "inner"] and not released
    ok("GraphExecDestroy", outer)
    assert released == [1]


def test_failure_in_a_graph(s: int, queued: bool) -> None:
    seen: list[int] = []
    ok("StreamBeginCapture", s, RELAXED)
    for status in (0, 11, 12):
        assert launch(s, lambda status=status: (seen.append(status), status)[1]) == SUCCESS
    exec_ = instantiated(captured(s))
    if queued:
        ok("GraphLuanch", exec_, s)
        refused(11, "status 11", "StreamSynchronize", s)
    else:
        refused(11, "status 11", "GraphLuanch", exec_, s)
    refused(11, "status 11", "GraphLuanch", exec_, None)
    ok("StreamSynchronize", s)
    assert seen == [0, 11, 12] * 2


# ---- threads, processes, and large numbers ----


def test_many_threads_at_once(queued: bool) -> None:
    shared, shared_event = stream(queued), event()
    counted = [0] * 8

    def body(me: int) -> None:
        own, a, b = stream(queued), Bytes(bytes([me]) * 64), Bytes(bytes(64))
        done = event()
        for i in range(60):
            at = made("Malloc", 64)
            ok("MemcpyAsync", at, a.at, 64, H2D, own)
            ok("EventRecord", done, own)
            ok("StreamWaitEvent", shared, done)
            ok("EventRecord", shared_event, shared)
            ok("StreamWaitEvent", own, shared_event)
            ok("MemcpyAsync", b.at, at, 64, D2H, own)
            assert launch(shared, lambda: counted.__setitem__(me, counted[me] + 1)) == SUCCESS
            if i % 3 == 0:
                ok("StreamBeginCapture", own, RELAXED)
                ok("MemcpyAsync", b.at, at, 64, D2H, own)
                graph = captured(own)
                exec_ = instantiated(graph)
                ok("GraphLuanch", exec_, own)
                ok("GraphDestroy", graph)
                ok("GraphExecDestroy", exec_)
            ok(("StreamSynchronize", "DeviceSynchronize")[i % 2], *((own,) if i % 2 == 0 else ()))
            assert bytes(b) == bytes([me]) * 64
            ok("Free", at)
        ok("EventDestroy", done)
        ok("StreamDestroy", own)

    for thread in [in_thread(lambda me=me: body(me)) for me in range(8)]:
        joined(thread)
    ok("StreamDestroy", shared)
    assert counted == [60] * 8


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@linux
@pytest.mark.skipif(sanitized(), reason="sanitizers keep memory")
def test_memory_stays_flat(s: int, queued: bool) -> None:
    function, out = HostFunction(lambda _: 0), ctypes.c_void_p()
    callbacks.append(function)

    def events(count: int) -> None:
        for _ in range(count):
            assert rt.infinirtEventCreate(ctypes.byref(out)) == SUCCESS
            assert rt.infinirtEventRecord(out, s) == SUCCESS
            assert rt.infinirtEventSynchronize(out) == SUCCESS
            assert rt.infinirtEventDestroy(out) == SUCCESS

    def streams(count: int) -> None:
        for _ in range(count):
            assert rt.infinirtStreamCreateWithFlags(ctypes.byref(out), QUEUED if queued else 0) == SUCCESS
            assert rt.infinirtStreamDestroy(out) == SUCCESS

    def graphs(count: int) -> None:
        for _ in range(count):
            ok("StreamBeginCapture", s, RELAXED)
            assert rt.infinirtStreamLaunchHostFunction(s, function, None, None) == SUCCESS
            graph = captured(s)
            exec_ = instantiated(graph)
            ok("GraphLuanch", exec_, s)
            ok("GraphDestroy", graph)
            ok("GraphExecDestroy", exec_)
        ok("StreamSynchronize", s)

    def memory(count: int) -> None:
        for _ in range(count):
            ok("FreeAsync", made("MallocAsync", 1000, s), s)
            ok("Free", made("Malloc", 1000))

    for body, count in ((events, 100_000), (streams, 10_000), (graphs, 5_000), (memory, 5_000)):
        body(count // 10)
        before = resident()
        body(count)
        grown = resident() - before
        assert grown < 4 << 20, f"{body.__name__}: {grown} bytes more after {count}"
