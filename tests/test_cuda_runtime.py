"""libinfinirt on NVIDIA devices: what csrc/include/infinirt.h promises for them.

On a GPU where there is one. Elsewhere, with INFINI_LIBRARIES=build/native/emulated, on the emulated CUDA runtime
(csrc/emulation), which has two devices and runs work when it is queued. Skipped where there is neither.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator

import pytest
import torch

from support.c_runtime import (
    BAD_PARAM,
    BLOCKING_SYNC,
    COMPLETE,
    CPU,
    D2D,
    D2H,
    GLOBAL,
    INTERNAL_ERROR,
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
    device_count,
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
from support.runtime_cases import Memory, RuntimeCases, copy
from torch_infini._core.library import emulates_cuda

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
def queued() -> bool:
    """A GPU's streams are of one kind."""
    return False


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


class TestNvidia(RuntimeCases):
    kind = NVIDIA
    cycles = 1500


# ---- devices ----


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


# ---- memory ----


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


# ---- graphs ----


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


def test_a_capture_refuses_what_waits_for_all_streams(s: int) -> None:
    """And survives it."""
    x, y, at, host = Memory(b"abcd"), Memory(bytes(4)), made("Malloc", 8), made("MallocHost", 8)
    ok("StreamBeginCapture", s, RELAXED)
    copy(y, x, s)
    waits = "no stream of nvidia 0 may be captured at the time, as the call waits for all of them"
    refused(BAD_PARAM, f"^infinirtFree: {waits}$", "Free", at)
    refused(BAD_PARAM, f"^infinirtFreeHost: {waits}$", "FreeHost", host)
    refused(BAD_PARAM, f"^infinirtDeviceSynchronize: {waits}$", "DeviceSynchronize")
    ok("GraphLuanch", instantiated(captured(s)), None)
    assert bytes(y) == b"abcd"
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
        wrong = "^infinirtStreamEndCapture: the thread must be the one that began the capture"
        joined(in_thread(lambda out=out: refused(BAD_PARAM, wrong, "StreamEndCapture", s, out)))  # noqa: B023
        ok("GraphDestroy", captured(s))
    ok("StreamBeginCapture", s, RELAXED)
    joined(in_thread(lambda: ok("GraphDestroy", captured(s))))


# ---- threads and large numbers ----


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
