"""libinfinirt for its tests, on any device: calls that must succeed or be refused, and what every backend refuses."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable

from torch_infini.compat.libinfiniop import LIBINFINIOP

SUCCESS, INTERNAL_ERROR, NOT_IMPLEMENTED, BAD_PARAM, NULL_POINTER, NO_BACKEND, NO_DEVICE = range(7)
CPU, NVIDIA, CAMBRICON, QY = 0, 1, 2, 9
H2H, H2D, D2H, D2D = range(4)
COMPLETE, NOT_READY = range(2)
DISABLE_TIMING, BLOCKING_SYNC = 1, 2
QUEUED = 1
MAX_QUEUED = 1024  # pieces of work on a queued stream of the CPU
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
LONG = 30.0  # seconds after which a test that waits has failed

HostFunction = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Enqueue = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

FUNCTIONS = {name: f for name, f in LIBINFINIOP.interface.functions.items() if f.library == "libinfinirt"}
rt = LIBINFINIOP

callbacks: list[object] = []  # C code may hold any of them


def last_error() -> str:
    return rt.infiniGetLastErrorMessage().decode()


def ok(name: str, *arguments: object) -> None:
    status = getattr(rt, f"infinirt{name}")(*arguments)
    assert status == SUCCESS, f"status {status}: {last_error()}"


def refused(expected: int, pattern: str, name: str, *arguments: object) -> None:
    rt.infinirtSetLastErrorMessage(None)
    status = getattr(rt, f"infinirt{name}")(*arguments)
    assert (status, bool(re.search(pattern, last_error()))) == (expected, True), (status, last_error())


def made(name: str, *arguments: object) -> int:
    """What a function writes through its first argument, a pointer to a pointer."""
    out = ctypes.c_void_p()
    ok(name, ctypes.byref(out), *arguments)
    return out.value or 0


def stream(queued: bool = False) -> int:
    """A stream; on the CPU immediate, unless INFINI_CPU_STREAMS says otherwise, or queued."""
    return made("StreamCreateWithFlags", QUEUED) if queued else made("StreamCreate")


def event(flags: int = 0) -> int:
    return made("EventCreateWithFlags", flags)


def captured(on: int) -> int:
    graph = ctypes.c_void_p()
    ok("StreamEndCapture", on, ctypes.byref(graph))
    return graph.value or 0


def instantiated(graph: int) -> int:
    return made("GraphInstantiate", graph, None, None, 0)


def query(of: int) -> int:
    status = ctypes.c_int(-1)
    ok("EventQuery", of, ctypes.byref(status))
    return status.value


def elapsed(start: int, end: int) -> float:
    ms = ctypes.c_float()
    ok("EventElapsedTime", ctypes.byref(ms), start, end)
    return ms.value


def device() -> tuple[int, int]:
    kind, number = ctypes.c_int(-1), ctypes.c_int(-1)
    ok("GetDevice", ctypes.byref(kind), ctypes.byref(number))
    return kind.value, number.value


def device_count(kind: int) -> int:
    count = ctypes.c_int(-1)
    ok("GetDeviceCount", kind, ctypes.byref(count))
    return count.value


class Bytes:
    """Host memory that is not of the library."""

    def __init__(self, data: bytes) -> None:
        self.buffer = ctypes.create_string_buffer(data, len(data))
        self.at = ctypes.addressof(self.buffer)

    def __bytes__(self) -> bytes:
        return self.buffer.raw


class Checked(threading.Thread):
    """A thread whose failure is the test's: joined() raises it."""

    def __init__(self, body: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.body = body
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.body()
        except BaseException as error:
            self.failure = error


def in_thread(body: Callable[[], object]) -> Checked:
    thread = Checked(body)
    thread.start()
    return thread


def joined(thread: Checked) -> None:
    thread.join(LONG)
    assert not thread.is_alive(), "still waiting"
    if thread.failure is not None:
        raise thread.failure


Refusal = tuple[tuple[object, ...], int, str]


def refusals(name: str) -> dict[str, list[Refusal]]:
    """What each function must refuse on the current device, called `name`: arguments, status, part of the sentence."""
    out, number, ms = (ctypes.byref(kind()) for kind in (ctypes.c_void_p, ctypes.c_int, ctypes.c_float))
    live, an_event = stream(), event()
    ok("StreamBeginCapture", live, RELAXED)
    graph = captured(live)
    exec_ = instantiated(graph)
    function, enqueue, data = HostFunction(lambda _: 0), Enqueue(lambda *_: 0), Bytes(b"12345678")
    callbacks.extend((function, enqueue, data))
    gone_stream, gone_event, gone_graph, gone_exec = stream(), event(), graph, exec_
    ok("StreamDestroy", gone_stream)
    ok("EventDestroy", gone_event)
    ok("GraphDestroy", gone_graph)
    ok("GraphExecDestroy", gone_exec)
    not_made = data.at  # an address that is no handle

    def bad(argument: str, *calls: tuple[object, ...]) -> list[Refusal]:
        return [
            (call, BAD_PARAM, f"{argument} must be a handle that was made and not destroyed, got 0x") for call in calls
        ]

    def null(argument: str, *call: object) -> list[Refusal]:
        return [(call, NULL_POINTER, f"{argument} must not be NULL")]

    def no_device_type(*rest: object) -> list[Refusal]:
        sentence = "device must be a device type, 0 to 9, got {}"
        return [((value, *rest), NO_BACKEND, sentence.format(value)) for value in (-1, 10, 99)]

    return {
        "GetAllDeviceCount": null("count_array", None),
        "GetDeviceCount": null("count", CPU, None) + no_device_type(number),
        "IsHostAccessible": null("is_accessible", CPU, 0, None)
        + no_device_type(0, number)
        + [((CPU, 1, number), NO_DEVICE, "device_id must be less than the number of devices")],
        "SetDevice": no_device_type(0),
        "StreamCreate": null("stream_ptr", None),
        "StreamCreateWithFlags": null("stream_ptr", None, 0)
        + [((out, 2), BAD_PARAM, r"flags must be an or of infinirtStreamFlags_t \(0 to 1\), got 2")],
        "StreamFromNative": null("stream_ptr", None, not_made) + null("native", out, None),
        "StreamDestroy": null("stream", None) + bad("stream", (gone_stream,), (not_made,), (an_event,)),
        "StreamSynchronize": bad("stream", (gone_stream,), (not_made,), (an_event,)),
        "StreamWaitEvent": bad("stream", (gone_stream, an_event))
        + bad("event", (live, gone_event), (None, gone_event), (live, live))
        + null("event", live, None),
        "StreamLaunchHostFunction": bad("stream", (gone_stream, function, None, None))
        + null("function", live, None, None, None),
        "StreamEnqueue": no_device_type(0, live, enqueue, None)
        + null("enqueue", CPU, 0, live, None, None)
        + [((CPU, 1, live, enqueue, None), NO_DEVICE, "device_id must be less than the number of devices")],
        "EventCreate": null("event_ptr", None),
        "EventCreateWithFlags": null("event_ptr", None, 0)
        + [((out, 4), BAD_PARAM, r"flags must be an or of infinirtEventFlags_t \(0 to 3\), got 4")],
        "EventRecord": null("event", None, live)
        + bad("event", (gone_event, live), (live, live))
        + bad("stream", (an_event, gone_stream), (an_event, an_event)),
        "EventQuery": null("event", None, number)
        + null("status_ptr", an_event, None)
        + bad("event", (gone_event, number)),
        "EventSynchronize": null("event", None) + bad("event", (gone_event,), (live,)),
        "EventDestroy": null("event", None) + bad("event", (gone_event,), (live,)),
        "EventElapsedTime": null("ms_ptr", None, an_event, an_event)
        + null("start", ms, None, an_event)
        + null("end", ms, an_event, None)
        + bad("start", (ms, gone_event, an_event))
        + bad("end", (ms, an_event, gone_event)),
        "Malloc": null("p_ptr", None, 8),
        "MallocHost": null("p_ptr", None, 8),
        "Free": [
            ((data.at,), BAD_PARAM, f"ptr must be memory of infinirtMalloc on {name} 0 that was not freed, got 0x")
        ],
        "FreeHost": [((data.at,), BAD_PARAM, "ptr must be memory of infinirtMallocHost that was not freed, got 0x")],
        "Memcpy": null("dst", None, data.at, 8, H2D)
        + null("src", data.at, None, 8, H2D)
        + [
            ((data.at, data.at, 8, kind), BAD_PARAM, f"kind must be an infinirtMemcpyKind_t, 0 to 3, got {kind}")
            for kind in (-1, 4)
        ],
        "MemcpyAsync": null("dst", None, data.at, 8, H2D, live)
        + null("src", data.at, None, 8, H2D, None)
        + bad("stream", (data.at, data.at, 8, H2D, gone_stream))
        + [((data.at, data.at, 8, 4, live), BAD_PARAM, "kind must be an infinirtMemcpyKind_t, 0 to 3, got 4")],
        "MallocAsync": null("p_ptr", None, 8, live) + bad("stream", (out, 8, gone_stream)),
        "FreeAsync": bad("stream", (None, gone_stream))
        + [((data.at, on), BAD_PARAM, f"ptr must be memory of infinirtMalloc on {name} 0") for on in (live, None)],
        "StreamBeginCapture": bad("stream", (gone_stream, GLOBAL))
        + [((None, GLOBAL), BAD_PARAM, "stream must be a stream that was created, got NULL")]
        + [
            ((live, mode), BAD_PARAM, f"mode must be an infinirtStreamCaptureMode_t, 0 to 2, got {mode}")
            for mode in (-1, 3)
        ],
        "StreamEndCapture": bad("stream", (gone_stream, out))
        + null("graph_ptr", live, None)
        + [((None, out), BAD_PARAM, "stream must be a stream that was created, got NULL")]
        + [((live, out), BAD_PARAM, "stream must be the one on which a capture began")],
        "GraphDestroy": null("graph", None) + bad("graph", (gone_graph,), (live,)),
        "GraphInstantiate": null("graph_exec_ptr", None, gone_graph, None, None, 0)
        + null("graph", out, None, None, None, 0)
        + bad("graph", (out, gone_graph, None, None, 0)),
        "GraphExecDestroy": null("graph_exec", None) + bad("graph_exec", (gone_exec,), (live,)),
        "GraphLuanch": null("graph_exec", None, live) + bad("graph_exec", (gone_exec, live), (gone_exec, None)),
        "CpuSetCapability": null("name", None),
    }


CANNOT_FAIL = {"Init", "GetDevice", "DeviceSynchronize", "SetLastErrorMessage", "CpuCapability"}
CANNOT_FAIL |= {"CpuCapabilityLevel", "CpuHighestCapability", "CpuVectorLevel", "CpuTiles", "CpuTilesRefused"}
CANNOT_FAIL |= {"CpuHasCapability"}  # it answers -1 instead of a status


def check_refusals(name: str) -> None:
    """Every function of the header is in the table, and refuses what stands there."""
    table = refusals(name)
    functions = {function.removeprefix("infinirt") for function in set(FUNCTIONS) - {"infiniGetLastErrorMessage"}}
    assert set(table) | CANNOT_FAIL == functions
    for function, calls in table.items():
        for arguments, status, sentence in calls:
            refused(status, f"^infinirt{function}: .*{sentence}", function, *arguments)
