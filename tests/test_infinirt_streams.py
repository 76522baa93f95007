"""libinfinirt's streams on the CPU, queued and immediate, through the C interface."""

from __future__ import annotations

import os
import threading
import time

import pytest

from support.c_runtime import (
    BAD_PARAM,
    COMPLETE,
    D2H,
    H2D,
    INTERNAL_ERROR,
    LONG,
    MAX_QUEUED,
    RELAXED,
    SUCCESS,
    Bytes,
    HostFunction,
    callbacks,
    captured,
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
from support.host_streams import Gate, launch, linux, python
from support.sanitizers import sanitized

pytest_plugins = ["support.host_streams"]  # its fixtures


def test_order_within_a_stream(s: int) -> None:
    seen: list[int] = []
    for i in range(500):
        assert launch(s, lambda i=i: seen.append(i)) == SUCCESS
    ok("StreamSynchronize", s)
    assert seen == list(range(500))


def test_streams_are_independent(q: int, q2: int) -> None:
    gate, seen = Gate(q), []
    assert launch(q2, lambda: seen.append("other stream")) == SUCCESS
    ok("StreamSynchronize", q2)
    assert launch(None, lambda: seen.append("no stream")) == SUCCESS
    ok("StreamSynchronize", None)
    assert seen == ["other stream", "no stream"]
    gate.open()
    ok("DeviceSynchronize")


def test_launch_returns_at_once_and_a_null_stream_on_completion(q: int) -> None:
    gate, seen = Gate(q), []
    assert launch(q, lambda: seen.append(threading.get_native_id())) == SUCCESS
    assert seen == []
    gate.open()
    ok("StreamSynchronize", q)
    assert launch(None, lambda: seen.append(threading.get_native_id())) == SUCCESS
    assert seen[0] != threading.get_native_id() == seen[1]


def test_device_synchronize_waits_for_all_streams(s: int, s2: int) -> None:
    seen: list[int] = []
    for on in (s, s2):
        assert launch(on, lambda on=on: (time.sleep(0.05), seen.append(on))) == SUCCESS
    ok("DeviceSynchronize")
    assert set(seen) == {s, s2}


def test_destroy_waits() -> None:
    other, seen = stream(queued=True), []
    assert launch(other, lambda: (time.sleep(0.05), seen.append(1))) == SUCCESS
    ok("StreamDestroy", other)
    assert seen == [1]
    refused(BAD_PARAM, "stream must be a handle", "StreamDestroy", other)


def test_destroy_while_another_thread_waits() -> None:
    for _ in range(20):
        other = stream(queued=True)
        gate = Gate(other)
        waiting = [in_thread(lambda other=other: rt.infinirtStreamSynchronize(other)) for _ in range(3)]
        destroying = in_thread(lambda other=other: ok("StreamDestroy", other))
        gate.open()
        for thread in (*waiting, destroying):
            joined(thread)


def test_first_failure_stays_until_it_is_asked_for(q: int) -> None:
    def fails(sentence: bytes, status: int) -> int:
        rt.infinirtSetLastErrorMessage(sentence)
        return status

    seen: list[int] = []
    assert launch(q, lambda: fails(b"infini::test: the first", 11)) == SUCCESS
    assert launch(q, lambda: fails(b"infini::test: the second", 12)) == SUCCESS
    assert launch(q, lambda: seen.append(1)) == SUCCESS
    refused(11, "^infini::test: the first$", "StreamSynchronize", q)
    assert seen == [1]
    ok("StreamSynchronize", q)
    assert launch(q, lambda: 3) == SUCCESS
    refused(3, "a host function returned status 3", "StreamSynchronize", q)
    rt.infinirtSetLastErrorMessage(b"of the caller")
    assert launch(None, lambda: SUCCESS) == SUCCESS
    assert last_error() == "of the caller"
    assert launch(None, lambda: fails(b"infini::test: at once", 10)) == 10
    assert last_error() == "infini::test: at once"


def test_device_synchronize_reports_the_first_failure_of_all_streams(q: int, q2: int) -> None:
    for first, second in ((q, q2), (q2, q)):
        gate = Gate(second)
        assert launch(second, lambda: 12) == SUCCESS
        assert launch(first, lambda: 11) == SUCCESS
        done = event()
        ok("EventRecord", done, first)
        ok("EventSynchronize", done)
        gate.open()
        refused(11, "status 11", "DeviceSynchronize")
        ok("DeviceSynchronize")  # asked for: all of them


def test_release_is_called_once_and_not_for_a_refused_call(q: int) -> None:
    released: list[str] = []
    assert launch(q, lambda: None, lambda: released.append("stream")) == SUCCESS
    assert launch(q, lambda: 3, lambda: released.append("stream, failed")) == SUCCESS
    refused(3, "status 3", "StreamSynchronize", q)
    ok("StreamSynchronize", q)
    assert released == ["stream", "stream, failed"]
    assert launch(None, lambda: None, lambda: released.append("null")) == SUCCESS
    assert released.pop() == "null"
    assert launch(None, lambda: 3, lambda: released.append("failed")) == 3
    gone = stream()
    ok("StreamDestroy", gone)
    assert launch(gone, lambda: None, lambda: released.append("refused")) == BAD_PARAM
    assert released == ["stream", "stream, failed"]


def test_functions_that_wait_are_refused_in_host_functions(q: int, q2: int) -> None:
    done, memory, statuses = event(), made("Malloc", 64), {}

    def body() -> None:
        statuses["StreamSynchronize"] = rt.infinirtStreamSynchronize(q)
        statuses["DeviceSynchronize"] = rt.infinirtDeviceSynchronize()
        statuses["EventSynchronize"] = rt.infinirtEventSynchronize(done)
        statuses["StreamWaitEvent"] = rt.infinirtStreamWaitEvent(None, done)
        statuses["StreamDestroy"] = rt.infinirtStreamDestroy(q)
        assert statuses == dict.fromkeys(statuses, BAD_PARAM)
        assert "must not be called in a host function" in last_error()
        ok("Free", memory)  # frees without waiting
        ok("EventRecord", done, q2)

    assert launch(q, body) == SUCCESS
    ok("StreamSynchronize", q)
    assert len(statuses) == 5 and set(statuses.values()) == {BAD_PARAM}
    refused(BAD_PARAM, "ptr must be memory", "Free", memory)
    assert launch(None, lambda: rt.infinirtStreamSynchronize(q)) == SUCCESS  # no worker: may wait
    ok("EventDestroy", done)


def test_host_functions_run_with_the_callers_openmp_threads(s: int) -> None:
    before, seen = rt.omp_get_max_threads(), []
    try:
        for threads in (3, 5):
            rt.omp_set_num_threads(threads)
            assert launch(s, lambda: seen.append(rt.omp_get_max_threads())) == SUCCESS
        ok("StreamBeginCapture", s, RELAXED)
        assert launch(s, lambda: seen.append(rt.omp_get_max_threads())) == SUCCESS
        exec_ = instantiated(captured(s))
        rt.omp_set_num_threads(2)
        ok("GraphLuanch", exec_, None)
        ok("StreamSynchronize", s)
        assert sorted(seen) == [3, 5, 5]
        assert rt.omp_get_max_threads() == 2
    finally:
        rt.omp_set_num_threads(before)


# ---- immediate streams, and what both kinds have to do with each other ----


def test_an_immediate_stream_has_done_its_work_on_return(i: int) -> None:
    seen, released, a, b = [], [], Bytes(b"1234"), Bytes(bytes(4))
    assert launch(i, lambda: seen.append(threading.get_native_id()), lambda: released.append(1)) == SUCCESS
    assert seen == [threading.get_native_id()] and released == [1]
    at, done = made("MallocAsync", 4, i), event()
    ok("MemcpyAsync", at, a.at, 4, H2D, i)
    ok("MemcpyAsync", b.at, at, 4, D2H, i)
    assert bytes(b) == b"1234"
    ok("EventRecord", done, i)
    assert query(done) == COMPLETE
    ok("FreeAsync", at, i)
    refused(BAD_PARAM, "ptr must be memory of", "Free", at)
    at = made("Malloc", 4)
    ok("MemcpyAsync", at, a.at, 4, H2D, i)
    ok("Free", at)


def test_failures_on_an_immediate_stream_are_the_calls(i: int) -> None:
    def fails() -> int:
        rt.infinirtSetLastErrorMessage(b"infini::test: at once")
        return 11

    released: list[str] = []
    assert launch(i, fails, lambda: released.append("failed")) == 11
    assert last_error() == "infini::test: at once" and not released
    assert launch(i, lambda: 3) == 3
    assert last_error() == "infinirt: a host function returned status 3"
    ok("StreamSynchronize", i)
    ok("DeviceSynchronize")
    ok("StreamBeginCapture", i, RELAXED)
    assert launch(i, lambda: 11, lambda: released.append("captured")) == SUCCESS
    exec_ = instantiated(graph := captured(i))
    ok("GraphDestroy", graph)
    refused(11, "status 11", "GraphLuanch", exec_, i)
    ok("GraphExecDestroy", exec_)
    assert released == ["captured"]


def test_host_functions_on_an_immediate_stream_may_wait_and_launch_more(i: int) -> None:
    seen, other = [], stream()

    def body() -> None:
        assert launch(i, lambda: seen.append("inner")) == SUCCESS
        ok("StreamSynchronize", i)
        ok("DeviceSynchronize")
        ok("StreamDestroy", other)
        seen.append("outer")

    assert launch(other, body) == SUCCESS
    assert seen == ["inner", "outer"]
    refused(BAD_PARAM, "stream must be a handle", "StreamSynchronize", other)


def test_free_does_not_wait_for_an_immediate_stream(i: int) -> None:
    """Its work belongs to the thread that called: one that waits for another rank must not hold that one up."""
    reached, freed = threading.Event(), threading.Event()
    running = in_thread(lambda: launch(i, lambda: (reached.set(), SUCCESS if freed.wait(LONG) else INTERNAL_ERROR)[1]))
    assert reached.wait(LONG)
    ok("Free", made("Malloc", 64))
    ok("DeviceSynchronize")
    ok("StreamSynchronize", i)
    freed.set()
    joined(running)


def test_an_immediate_stream_waits_in_the_call(i: int, q: int, q2: int) -> None:
    gate, done, statuses = Gate(q), event(), []
    ok("EventRecord", done, q)
    threading.Timer(0.05, gate.open).start()
    ok("StreamWaitEvent", i, done)
    assert gate.opened.is_set() and query(done) == COMPLETE
    assert launch(q2, lambda: statuses.append((rt.infinirtStreamWaitEvent(i, done), last_error()))) == SUCCESS
    ok("StreamSynchronize", q2)
    assert statuses[0][0] == BAD_PARAM and "must not be called in a host function" in statuses[0][1]
    ok("EventRecord", done, i)
    ok("StreamWaitEvent", q, done)
    ok("StreamSynchronize", q)


def test_a_capture_of_both_kinds(i: int, q: int) -> None:
    def check(first: int, second: int) -> None:
        seen, forked, back = [], event(), event()
        ok("StreamBeginCapture", first, RELAXED)
        assert launch(first, lambda: seen.append("before")) == SUCCESS
        ok("EventRecord", forked, first)
        ok("StreamWaitEvent", second, forked)
        assert launch(second, lambda: seen.append("forked")) == SUCCESS
        ok("EventRecord", back, second)
        ok("StreamWaitEvent", first, back)
        assert launch(first, lambda: seen.append("after")) == SUCCESS
        exec_ = instantiated(captured(first))
        assert not seen
        for on in (first, second, None):
            ok("GraphLuanch", exec_, on)
            ok("DeviceSynchronize")
            assert seen == ["before", "forked", "after"]
            seen.clear()

    check(i, q)
    check(q, i)


def test_a_full_queue_makes_the_caller_wait(q: int) -> None:
    gate, seen = Gate(q), []
    function = HostFunction(lambda _: seen.append(1) or SUCCESS)
    callbacks.append(function)

    def one_more() -> None:
        assert rt.infinirtStreamLaunchHostFunction(q, function, None, None) == SUCCESS

    for _ in range(MAX_QUEUED - 1):  # with the gate as many as there is room for
        one_more()
    calls = [one_more, lambda: ok("EventRecord", event(), q), lambda: ok("FreeAsync", made("Malloc", 8), q)]
    waiting = [in_thread(call) for call in calls]
    time.sleep(0.1)
    assert all(thread.is_alive() for thread in waiting) and not seen
    gate.open()
    for thread in waiting:
        joined(thread)
    ok("StreamSynchronize", q)
    assert len(seen) == MAX_QUEUED


def test_a_host_function_may_fill_its_own_queue(q: int) -> None:
    seen: list[int] = []
    function = HostFunction(lambda _: seen.append(1) or SUCCESS)
    callbacks.append(function)

    def body() -> None:
        for _ in range(2 * MAX_QUEUED):
            assert rt.infinirtStreamLaunchHostFunction(q, function, None, None) == SUCCESS

    assert launch(q, body) == SUCCESS
    ok("StreamSynchronize", q)
    ok("StreamSynchronize", q)
    assert len(seen) == 2 * MAX_QUEUED


def test_the_end_of_a_full_stream_wakes_its_callers() -> None:
    full = stream(queued=True)
    gate, function = Gate(full), HostFunction(lambda _: SUCCESS)
    callbacks.append(function)
    for _ in range(MAX_QUEUED - 1):
        assert rt.infinirtStreamLaunchHostFunction(full, function, None, None) == SUCCESS

    def waits() -> None:
        pattern = "the stream was destroyed by another thread while this call used it"
        refused(BAD_PARAM, pattern, "StreamLaunchHostFunction", full, function, None, None)

    waiting = in_thread(waits)
    time.sleep(0.1)
    destroying = in_thread(lambda: ok("StreamDestroy", full))
    joined(waiting)
    gate.open()
    joined(destroying)


LAUNCHED = """
import threading
ran, function = threading.Event(), ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
rt.infiniGetLastErrorMessage.restype = ctypes.c_char_p
body = function(lambda _: (ran.wait(0.05), here.append(threading.get_ident()), 0)[2])
here = []
status = rt.infinirtStreamCreate(ctypes.byref(s))
assert status == 0, rt.infiniGetLastErrorMessage()
assert rt.infinirtStreamLaunchHostFunction(s, body, None, None) == 0
at_once = bool(here)
assert rt.infinirtStreamSynchronize(s) == 0 and len(here) == 1
assert (at_once, here == [threading.get_ident()]) == (expected, expected)
print("done")
"""


@pytest.mark.parametrize(("setting", "immediate"), [("", True), ("immediate", True), ("queued", False)])
def test_the_environment_chooses(setting: str, immediate: bool) -> None:
    python(f"expected = {immediate}\n{LAUNCHED}", setting)


def test_other_settings_are_an_error_in_words() -> None:
    python(
        "rt.infiniGetLastErrorMessage.restype = ctypes.c_char_p\n"
        "for flags in (0, 1, 0):\n"
        "    assert rt.infinirtStreamCreateWithFlags(ctypes.byref(s), flags) == 3\n"
        "    assert rt.infiniGetLastErrorMessage() == (b'infinirtStreamCreate: the environment variable '\n"
        "        b'INFINI_CPU_STREAMS must be queued or immediate, got asynchronous')\n"
        "print('done')",
        "asynchronous",
    )


# ---- threads and processes ----


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@linux
def test_no_thread_is_left() -> None:
    before = threads()
    immediate = [stream() for _ in range(20)]
    assert threads() < before + 20  # they have none
    handles = [stream(queued=True) for _ in range(20)]
    running = threads()
    assert running > 20
    for handle in (*immediate, *handles):
        ok("StreamDestroy", handle)
    deadline = time.monotonic() + LONG  # the kernel lists a thread a moment longer than its join lasts
    while threads() > running - 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= running - 20


def test_streams_do_not_prevent_the_exit() -> None:
    """One stream is in a host function that never returns, another waits for it."""
    python(
        "t, e = ctypes.c_void_p(), ctypes.c_void_p()\n"
        "pause = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)\n"
        "status = rt.infinirtStreamCreate(ctypes.byref(s)) + rt.infinirtStreamCreate(ctypes.byref(t))\n"
        "status += rt.infinirtEventCreate(ctypes.byref(e))\n"
        "status += rt.infinirtStreamLaunchHostFunction(s, pause, None, None)\n"
        "status += rt.infinirtEventRecord(e, s) + rt.infinirtStreamWaitEvent(t, e)\n"
        "assert status == 0\n"
        "print('done')"
    )


def test_library_stays_while_its_threads_run() -> None:
    python(
        "assert rt.infinirtStreamCreate(ctypes.byref(s)) == 0\n"
        "_ctypes.dlclose(rt._handle)\n"
        "time.sleep(0.1)\n"
        "print('done')"
    )


@pytest.mark.skipif(sanitized(), reason="sanitizers need the address space")
@linux
def test_no_more_threads() -> None:
    python(
        "import resource\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (size + (100 << 20),) * 2)\n"
        "rt.infiniGetLastErrorMessage.restype = ctypes.c_char_p\n"
        "made = []\n"
        "while (status := rt.infinirtStreamCreate(ctypes.byref(s))) == 0 and len(made) < 100_000:\n"
        "    made.append(s.value)\n"
        "assert status == 1 and made, (status, len(made))\n"
        "assert rt.infiniGetLastErrorMessage() == b'infinirtStreamCreate: the system gives no more threads'\n"
        "for handle in made:\n"
        "    assert rt.infinirtStreamDestroy(ctypes.c_void_p(handle)) == 0\n"
        "assert rt.infinirtStreamCreate(ctypes.byref(s)) == 0\n"
        "print('done')"
    )
