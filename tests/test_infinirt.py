"""libinfinirt on the CPU: what every device promises (support/runtime_cases.py), host functions in events and graphs.

Its streams by themselves: test_infinirt_streams.py.
"""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

from support.c_runtime import (
    BAD_PARAM,
    BLOCKING_SYNC,
    COMPLETE,
    CPU,
    D2H,
    GLOBAL,
    H2D,
    H2H,
    LONG,
    NOT_IMPLEMENTED,
    NOT_READY,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    Bytes,
    Enqueue,
    HostFunction,
    captured,
    elapsed,
    event,
    in_thread,
    instantiated,
    joined,
    made,
    ok,
    query,
    refused,
    rt,
    stream,
)
from support.host_streams import Gate, launch
from support.runtime_cases import Memory, RuntimeCases

pytest_plugins = ["support.host_streams"]  # its fixtures


NOTHING = HostFunction(lambda _: SUCCESS)


class TestCpu(RuntimeCases):
    kind = CPU
    cycles = 5000

    def capture(self, source: Memory, target: Memory, on: int) -> None:
        super().capture(source, target, on)
        assert rt.infinirtStreamLaunchHostFunction(on, NOTHING, None, None) == SUCCESS


def test_what_needs_a_gpu() -> None:
    absent = ": the backend of cpu does not implement this function"
    out = ctypes.byref(ctypes.c_void_p())
    refused(NOT_IMPLEMENTED, f"^infinirtStreamFromNative{absent}$", "StreamFromNative", out, 64)
    enqueue = Enqueue(lambda *_: 0)
    refused(NOT_IMPLEMENTED, f"^infinirtStreamEnqueue{absent}$", "StreamEnqueue", CPU, 0, None, enqueue, None)


# ---- events ----


def test_event_status_follows_queued_work(q: int) -> None:
    done = made("EventCreate")
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


def test_elapsed_time_is_that_of_the_work(q: int) -> None:
    start, end = event(), event(BLOCKING_SYNC)
    ok("EventRecord", start, q)
    measured: list[float] = []

    def body() -> None:
        begin = time.monotonic()
        time.sleep(0.1)
        measured.append(1e3 * (time.monotonic() - begin))

    assert launch(q, body) == SUCCESS
    ok("EventRecord", end, q)
    ok("StreamSynchronize", q)
    assert measured[0] <= elapsed(start, end) <= measured[0] + 2000
    gate = Gate(q)
    ok("EventRecord", end, q)
    out = ctypes.byref(ctypes.c_float())
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


# ---- memory and copies ----


@pytest.mark.parametrize(("allocate", "free"), [("Malloc", "FreeHost"), ("MallocHost", "Free")])
def test_the_cpus_memory_is_host_memory(allocate: str, free: str) -> None:
    """Which either function frees, once."""
    at = made(allocate, 4096)
    ctypes.memset(at, 5, 4096)
    ok(free, at)
    for again in ("Free", "FreeHost"):
        refused(BAD_PARAM, "ptr must be memory of", again, at)


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


def test_memory_is_allocated_and_freed_in_order(q: int) -> None:
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


def test_host_functions_in_a_capture(s: int, queued: bool) -> None:
    a, b, counts, released = Bytes(b"1234"), Bytes(bytes(4)), [0], []
    ok("StreamBeginCapture", s, GLOBAL)
    ok("MemcpyAsync", b.at, a.at, 4, H2D, s)
    assert launch(s, lambda: counts.append(bytes(b)), lambda: released.append(1)) == SUCCESS
    graph = captured(s)
    assert bytes(b) == bytes(4) and counts == [0]  # nothing has run
    exec_ = instantiated(graph)
    ok("GraphDestroy", graph)
    for text, on in ((b"1111", s), (b"2222", s), (b"3333", None)):
        ctypes.memmove(a.at, text, 4)
        ok("GraphLuanch", exec_, on)
        ok("StreamSynchronize", on)
    assert counts == [0, b"1111", b"2222", b"3333"]
    gate = Gate(s) if queued else None
    ok("GraphLuanch", exec_, s)
    assert len(counts) == (4 if queued else 5) and not released
    ok("GraphExecDestroy", exec_)  # queued: still runs
    if gate is not None:
        assert not released
        gate.open()
        ok("StreamSynchronize", s)
    assert counts[4:] == [b"3333"] and released == [1]


def test_a_graph_releases_with_its_last_exec(s: int) -> None:
    seen, released = [], []
    ok("StreamBeginCapture", s, THREAD_LOCAL)
    assert launch(s, lambda: seen.append(1), lambda: released.append(1)) == SUCCESS
    graph = captured(s)
    first, second = instantiated(graph), instantiated(graph)
    ok("GraphExecDestroy", first)
    ok("GraphLuanch", second, None)
    ok("GraphExecDestroy", second)
    assert (seen, released) == ([1], [])
    ok("GraphDestroy", graph)
    assert released == [1]


def test_a_capture_allows_what_waits_for_no_stream_of_it(s: int) -> None:
    ok("StreamBeginCapture", s, RELAXED)
    ok("Free", made("Malloc", 8))
    ok("DeviceSynchronize")
    ok("GraphDestroy", captured(s))


def test_queued_before_the_capture_runs(q: int) -> None:
    gate, seen = Gate(q), []
    assert launch(q, lambda: seen.append(1)) == SUCCESS
    ok("StreamBeginCapture", q, RELAXED)
    gate.open()
    ok("DeviceSynchronize")  # allowed: waits for what is queued, which the capture is not
    assert seen == [1]
    ok("GraphDestroy", captured(q))


def test_functions_of_a_lost_capture_are_released(s2: int) -> None:
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


# ---- threads ----


def test_many_threads_share_a_stream(queued: bool) -> None:
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
            ok(("StreamSynchronize", "DeviceSynchronize")[i % 2], *((own,) if i % 2 == 0 else ()))
            assert bytes(b) == bytes([me]) * 64
            ok("Free", at)
        ok("EventDestroy", done)
        ok("StreamDestroy", own)

    for thread in [in_thread(lambda me=me: body(me)) for me in range(8)]:
        joined(thread)
    ok("StreamDestroy", shared)
    assert counted == [60] * 8
