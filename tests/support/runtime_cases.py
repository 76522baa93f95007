"""What csrc/include/infinirt.h promises for every device: a class of tests, which the file of each backend runs.

A subclass names its device; `s`, `s2` (streams) and `queued` (their kind) are fixtures of the file that it stands in.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from .c_runtime import (
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
    NULL_POINTER,
    NVIDIA,
    RELAXED,
    SUCCESS,
    THREAD_LOCAL,
    Bytes,
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
from .sanitizers import sanitized

KINDS = ("cpu", "nvidia", "cambricon", "ascend", "metax", "moore", "iluvatar", "kunlun", "hygon", "qy")
MODES = pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED], ids=["global", "thread_local", "relaxed"])


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


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class RuntimeCases:
    """The tests; each begins with device 0 of `kind` as the current one."""

    kind: int
    cycles: int  # of the test for leaks

    @property
    def name(self) -> str:
        return KINDS[self.kind]

    # ---- arguments and devices ----

    def test_refused_arguments(self) -> None:
        check_refusals(self.name)

    def test_errors_belong_to_the_thread(self) -> None:
        rt.infinirtSetLastErrorMessage(b"mine")
        joined(in_thread(lambda: refused(NULL_POINTER, "p_ptr", "Malloc", None, 1)))
        assert last_error() == "mine"
        ok("Init")
        assert last_error() == "mine"  # what succeeds leaves it alone

    def test_devices(self) -> None:
        ok("Init")
        ok("Init")
        counts = (ctypes.c_int * 10)(*[7] * 10)
        ok("GetAllDeviceCount", counts)
        assert list(counts) == [1, device_count(NVIDIA)] + [0] * 8
        assert [device_count(kind) for kind in range(10)] == list(counts)
        ok("DeviceSynchronize")
        ok("GetDevice", None, None)

    def test_absent_devices_change_nothing(self) -> None:
        there = [name for kind, name in enumerate(KINDS) if rt.infinirtSetDevice(kind, -1) != NO_BACKEND]
        where = dict.fromkeys(KINDS, 'CONTRIBUTING.md, "Bring up a device", adds one')
        where["nvidia"] = "a build with nvcc has one"
        assert self.name in there
        for kind, name in enumerate(KINDS):
            if name not in there:
                rule = f"infinirtSetDevice: device must be one this build has a backend for ({', '.join(there)})"
                refused(NO_BACKEND, f"^{re.escape(f'{rule}, got {name}; {where[name]}')}$", "SetDevice", kind, 0)
                assert device() == (self.kind, 0)
        count = device_count(self.kind)
        for number in (-1, count):
            rule = rf"device_id must be less than the number of devices \({self.name} has {count}\), got {number}"
            refused(NO_DEVICE, f"^infinirtSetDevice: {rule}$", "SetDevice", self.kind, number)
            assert device() == (self.kind, 0)
        ok("SetDevice", self.kind, 0)

        def another_thread() -> None:
            assert device() == (CPU, 0)  # where each thread starts

        joined(in_thread(another_thread))

    # ---- memory and copies ----

    def test_memory(self) -> None:
        for allocate, free in (("Malloc", "Free"), ("MallocHost", "FreeHost")):
            assert made(allocate, 0) == 0
            ok(free, None)
            for size in (1, 63, 64, 65, 1 << 20):
                at = made(allocate, size)
                assert at % 64 == 0
                if self.kind == CPU or free == "FreeHost":
                    ctypes.memset(at, 7, size)
                refused(BAD_PARAM, "ptr must be memory of", free, at + 1)
                if self.kind != CPU:
                    refused(BAD_PARAM, "ptr must be memory of", "FreeHost" if free == "Free" else "Free", at)
                refused(BAD_PARAM, "ptr must be memory of", "FreeAsync", at + 1, None)
                ok(free, at)
                refused(BAD_PARAM, f"ptr must be memory of infinirt{allocate}.*that was not freed, got 0x", free, at)
            for huge in (1 << 62, (1 << 63) - 1, (1 << 64) - 1):
                out = ctypes.c_void_p(123)
                sentence = f"no memory for {huge} bytes on {self.name} 0"
                refused(INTERNAL_ERROR, sentence, allocate, ctypes.byref(out), huge)
                assert out.value == 123

    def test_host_memory_is_freed_by_any_thread(self) -> None:
        """On whatever device is current there."""

        def free(at: int, set_device: bool) -> None:
            if set_device:
                ok("SetDevice", self.kind, 0)
            ok("FreeHost", at)

        for set_device in (False, True):
            at = made("MallocHost", 100)
            joined(in_thread(partial(free, at, set_device)))
            refused(BAD_PARAM, "ptr must be", "FreeHost", at)

    def test_stream_ordered_memory(self, s: int) -> None:
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
        source, result = Memory(bytes(range(64)), pinned=True), Memory(bytes(64), pinned=True)
        for allocate in ("MallocAsync", "Malloc"):
            for free in ("FreeAsync", "Free"):
                result.set(bytes(64))
                at = made(allocate, 64, s) if allocate == "MallocAsync" else made(allocate, 64)
                assert at % 64 == 0
                ok("MemcpyAsync", at, source.at, 64, H2D, s)
                ok("MemcpyAsync", result.at, at, 64, D2H, s)
                ok(free, at, s) if free == "FreeAsync" else ok(free, at)
                refused(BAD_PARAM, "ptr must be memory of", "Free", at)
                refused(BAD_PARAM, "ptr must be memory of", "FreeAsync", at, s)
                ok("StreamSynchronize", s)
                assert bytes(result) == bytes(range(64)), (allocate, free)

    @pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
    def test_copies(self, s: int, pinned: bool) -> None:
        data = bytes(i % 251 for i in range(100_000))
        size = len(data)
        for on in (None, s, "sync"):
            make: Callable[[bytes], Memory | Bytes] = partial(Memory, pinned=True) if pinned else Bytes
            host, source, result = (make(part) for part in (bytes(size), data, bytes(size)))
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

    def test_copies_are_held_to_the_end_of_an_allocation(self, s: int) -> None:
        """On the CPU whatever the kind of copy says: all memory is one."""
        huge = (1 << 64) - 1
        for allocate, free, to, from_ in (("Malloc", "Free", H2D, D2H), ("MallocHost", "FreeHost", H2H, H2H)):
            at, other = made(allocate, 100), Bytes(bytes(400))
            every = [(kind, kind) for kind in (H2H, H2D, D2H, D2D)]
            for to_at, from_at in every if self.kind == CPU else [(to, from_)]:
                for on in ((), (s,), (None,)):
                    name = "MemcpyAsync" if on else "Memcpy"
                    rule = "at most the {} bytes there are at {}, got {}"
                    refused(BAD_PARAM, rule.format(100, "dst", 101), name, at, other.at, 101, to_at, *on)
                    refused(BAD_PARAM, rule.format(60, "src", 61), name, other.at, at + 40, 61, from_at, *on)
                    refused(BAD_PARAM, "size must be at most", name, other.at, at, huge, from_at, *on)
                    refused(BAD_PARAM, "size must be at most", name, other.at, other.at + 1, huge, H2H, *on)
                    ok(name, other.at, at + 40, 60, from_at, *on)
                    ok("StreamSynchronize", s)
            ok(free, at)

    # ---- events ----

    def test_event_status(self, s: int) -> None:
        done = made("EventCreate")
        assert query(done) == COMPLETE  # never recorded
        ok("EventSynchronize", done)
        ok("StreamWaitEvent", None, done)
        for on in (s, None):
            ok("EventRecord", done, on)
            ok("EventSynchronize", done)
            assert query(done) == COMPLETE
        ok("EventDestroy", done)

    def test_elapsed_time(self, s: int) -> None:
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
        sentence = "start must .* complete, got one that was never recorded"
        refused(BAD_PARAM, sentence, "EventElapsedTime", out, never, end)
        ok("EventRecord", start, None)
        ok("EventRecord", end, None)
        assert 0 <= elapsed(start, end) < 1000

    # ---- graphs ----

    @MODES
    def test_capture_and_replay(self, s: int, mode: int) -> None:
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
        out, node = ctypes.c_void_p(9), ctypes.c_void_p(5)
        refused(BAD_PARAM, "graph must be", "GraphInstantiate", ctypes.byref(out), graph, ctypes.byref(node), log, 8)
        assert (out.value, node.value, log.value) == (9, None, b"infinir")

    def test_two_execs_of_one_graph_and_a_graph_in_a_graph(self, s: int) -> None:
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
        if self.kind == NVIDIA:
            refused(
                BAD_PARAM, "^infinirtGraphLuanch: stream must not be captured at the time$", "GraphLuanch", second, s
            )
            copy(y, x, s)  # the capture goes on
        else:
            ok("GraphLuanch", second, s)
        copy(z, y, s)
        outer = instantiated(captured(s))
        ok("GraphExecDestroy", second)
        x.set(b"efgh")
        assert bytes(y) == b"abcd"
        ok("GraphLuanch", outer, s)
        ok("StreamSynchronize", s)
        assert bytes(z) == b"efgh"

    def test_overlapping_copies_in_a_capture(self, s: int) -> None:
        x = Memory(b"abcdefgh")
        ok("StreamBeginCapture", s, RELAXED)
        ok("MemcpyAsync", x.at + 1, x.at, 7, D2D, s)
        exec_ = instantiated(captured(s))
        for expected in (b"aabcdefg", b"aaabcdef"):
            ok("GraphLuanch", exec_, s)
            ok("StreamSynchronize", s)
            assert bytes(x) == expected

    def test_fork_and_join_in_a_capture(self, s: int, s2: int) -> None:
        """a -> b on s2 and a -> c on s at once; then both come together on s."""
        a, b, c, both, free = Memory(b"a---"), Memory(b"b---"), Memory(b"c---"), Memory(bytes(8)), Memory(bytes(4))
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
        copy(free, b, s2)  # runs: s2 has left the capture
        ok("StreamSynchronize", s2)
        assert (bytes(free), bytes(both)) == (b"b---", bytes(8))
        for text, on in ((b"1234", s2), (b"5678", s), (b"90ab", None)):
            a.set(bytes(4))
            b.set(text)
            c.set(bytes(4))
            both.set(bytes(8))
            ok("GraphLuanch", exec_, on)
            ok("StreamSynchronize", on)
            assert bytes(both) == text * 2

    def test_what_a_capture_refuses(self, s: int, s2: int) -> None:
        """And the capture survives every refusal."""
        outside, inside, out = event(), event(), ctypes.byref(ctypes.c_void_p())
        x, y, at = Memory(b"abcd"), Memory(bytes(4)), made("Malloc", 8)
        ok("EventRecord", outside, s)
        ok("EventSynchronize", outside)
        ok("StreamBeginCapture", s, RELAXED)
        copy(y, x, s)
        refused(BAD_PARAM, "stream must not be captured already", "StreamBeginCapture", s, RELAXED)
        refused(BAD_PARAM, "stream must not be captured", "StreamSynchronize", s)
        refused(BAD_PARAM, "recorded outside", "StreamWaitEvent", s, outside)
        ok("StreamWaitEvent", s, event())  # never recorded
        refused(NOT_IMPLEMENTED, "stream must not be captured", "MallocAsync", out, 8, s)
        refused(NOT_IMPLEMENTED, "stream must not be captured", "FreeAsync", at, s)
        ok("EventRecord", inside, s)
        status, ms = ctypes.byref(ctypes.c_int()), ctypes.byref(ctypes.c_float())
        ok("StreamBeginCapture", s2, RELAXED)
        refused(BAD_PARAM, "another capture", "StreamWaitEvent", s2, inside)
        ok("GraphDestroy", captured(s2))

        def refuses_events_of_a_capture() -> None:
            refused(BAD_PARAM, "recorded in a capture", "EventQuery", inside, status)
            refused(BAD_PARAM, "recorded in a capture", "EventSynchronize", inside)
            refused(BAD_PARAM, "recorded in a capture", "StreamWaitEvent", None, inside)
            refused(BAD_PARAM, "end must not be last recorded in a capture", "EventElapsedTime", ms, outside, inside)

        refuses_events_of_a_capture()
        graph = captured(s)
        assert bytes(y) == bytes(4)
        ok("GraphLuanch", instantiated(graph), None)
        assert bytes(y) == b"abcd"
        ok("GraphDestroy", graph)
        refuses_events_of_a_capture()
        refused(BAD_PARAM, "since the capture .* ended", "StreamWaitEvent", s2, inside)
        ok("EventRecord", inside, s)
        ok("StreamWaitEvent", s2, inside)
        ok("EventSynchronize", inside)
        ok("Free", at)  # it was not taken

    def test_capture_is_lost_with_its_stream(self, s2: int, queued: bool) -> None:
        forked, s, x, y = event(), stream(queued), Memory(b"abcd"), Memory(bytes(4))
        ok("StreamBeginCapture", s, RELAXED)
        copy(y, x, s)
        ok("EventRecord", forked, s)
        ok("StreamDestroy", s)
        refused(BAD_PARAM, "since the capture .* ended", "StreamWaitEvent", s2, forked)
        ok("StreamSynchronize", s2)
        ok("DeviceSynchronize")
        assert bytes(y) == bytes(4)

    # ---- threads and large numbers ----

    def test_many_threads_at_once(self, queued: bool) -> None:
        shared = stream(queued)

        def body(me: int) -> None:
            ok("SetDevice", self.kind, 0)
            own, done = stream(queued), event()
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

        for thread in [in_thread(partial(body, me)) for me in range(8)]:
            joined(thread)
        ok("StreamDestroy", shared)

    @pytest.mark.skipif(sanitized() or not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
    def test_memory_stays_flat(self, s: int, queued: bool) -> None:
        """Nothing is left of events, streams, graphs and memory that are gone."""
        out = ctypes.c_void_p()
        source, target = Memory(bytes(64)), Memory(bytes(64))

        def events(count: int) -> None:
            for _ in range(count):
                assert rt.infinirtEventCreate(ctypes.byref(out)) == SUCCESS
                assert rt.infinirtEventRecord(out, s) == SUCCESS
                assert rt.infinirtEventSynchronize(out) == SUCCESS
                assert rt.infinirtEventDestroy(out) == SUCCESS

        def streams(count: int) -> None:
            for _ in range(count):
                ok("StreamDestroy", stream(queued))

        def graphs(count: int) -> None:
            for _ in range(count):
                ok("StreamBeginCapture", s, RELAXED)
                self.capture(source, target, s)
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
            ok("StreamSynchronize", s)

        bodies: tuple[tuple[Callable[[int], None], int], ...] = ((events, 20), (streams, 2), (graphs, 1), (memory, 1))
        for body, weight in bodies:
            count = weight * self.cycles
            body(count // 5)
            before = resident()
            body(count)
            grown = resident() - before
            assert grown < 4 << 20, f"{body.__name__}: {grown} bytes more after {count}"

    def capture(self, source: Memory, target: Memory, on: int) -> None:
        """What the test for leaks captures."""
        copy(target, source, on)
