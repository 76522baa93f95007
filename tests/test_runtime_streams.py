"""torch_infini.runtime: streams from Python, on the CPU and where there is one on a GPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from support.runtime_helpers import HAS_CUDA, LONG, Gate, on_gpu, until
from torch_infini.runtime import Event, Stream, graph


@pytest.fixture
def stream() -> Stream:
    return Stream("cpu", queued=True)


both = pytest.mark.parametrize("stream", [Stream("cpu"), Stream("cpu", queued=True)], ids=["immediate", "queued"])


@both
def test_work_runs_in_order(stream: Stream) -> None:
    seen: list[int] = []
    for i in range(3000):  # more than a queue holds
        stream.launch(seen.append, i)
    stream.synchronize()
    assert seen == list(range(3000))


def test_an_immediate_stream_runs_functions_in_the_calling_thread() -> None:
    stream, seen = Stream("cpu"), []
    stream.launch(lambda: seen.append(threading.get_ident()))
    assert seen == [threading.get_ident()]
    event = stream.record_event()
    assert event.query()
    stream.launch(lambda: (stream.synchronize(), event.synchronize(), stream.launch(seen.append, "inner")))
    assert seen[1:] == ["inner"]
    x = torch.ones(4)
    alive = weakref.ref(x)
    stream.uses(x)
    del x
    until(lambda: alive() is None)


def test_an_immediate_stream_raises_what_a_function_raises() -> None:
    stream, first = Stream("cpu"), KeyError("gone")

    def fail(error: BaseException) -> None:
        raise error

    for error in (first, SystemExit(3), RuntimeError("\ud800")):
        with pytest.raises(type(error)) as caught:
            stream.launch(fail, error)
        assert caught.value is error
        stream.synchronize()  # told once

    def outer() -> None:
        with pytest.raises(KeyError):
            stream.launch(fail, first)
        with pytest.raises(RuntimeError, match="must not be called by a function that a stream runs"):
            graph(torch.neg, torch.ones(2)).replay()

    stream.launch(outer)


def test_queued_is_a_bool() -> None:
    with pytest.raises(TypeError, match=r"^torch_infini.runtime.Stream: queued must be True or False, got 'yes'$"):
        Stream("cpu", queued="yes")  # type: ignore[arg-type]


def test_an_immediate_stream_waits_for_a_queued_one(stream: Stream) -> None:
    immediate, seen = Stream("cpu"), []
    gate = Gate(stream)
    stream.launch(seen.append, "first")
    threading.Timer(0.05, gate.open).start()
    immediate.wait_stream(stream)
    immediate.launch(seen.append, "second")
    assert seen == ["first", "second"]


def test_the_caller_does_not_wait(stream: Stream) -> None:
    gate, seen = Gate(stream), []
    stream.launch(seen.append, threading.get_ident())
    stream.launch(lambda: seen.append(threading.get_ident()))
    assert gate.reached.wait(LONG) and not seen
    gate.open()
    stream.synchronize()
    assert seen[0] == threading.get_ident() != seen[1]


def test_streams_run_independently(stream: Stream) -> None:
    other, seen = Stream("cpu", queued=True), []
    gate = Gate(stream)
    other.launch(seen.append, 1)
    other.synchronize()
    assert seen == [1]
    gate.open()


def test_a_stream_waits_for_another(stream: Stream) -> None:
    other, seen = Stream("cpu", queued=True), []
    gate = Gate(stream)
    stream.launch(seen.append, "first")
    other.wait_stream(stream)
    other.launch(seen.append, "second")
    time.sleep(0.02)
    assert not seen
    gate.open()
    other.synchronize()
    assert seen == ["first", "second"]


@both
def test_a_launched_function_launches(stream: Stream) -> None:
    seen: list[int] = []
    stream.launch(lambda: stream.launch(seen.append, 1))
    stream.synchronize()
    stream.synchronize()
    assert seen == [1]


def test_exceptions_are_raised_where_the_stream_is_waited_for(stream: Stream) -> None:
    first, seen = KeyError("gone"), []

    def fail(error: BaseException) -> None:
        raise error

    stream.launch(fail, first)
    stream.launch(fail, ValueError("later"))
    stream.launch(seen.append, 1)
    with pytest.raises(KeyError) as caught:
        stream.synchronize()
    assert caught.value is first and seen == [1]
    stream.synchronize()  # told once
    stream.launch(fail, SystemExit(3))
    with pytest.raises(SystemExit):
        stream.synchronize()


def test_exceptions_that_cannot_be_printed(stream: Stream) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Long(Exception):
        pass

    for error in (Mute(), Long("ü" * 5000), Long("a\0b"), Long("\ud800")):

        def fail(error: Exception = error) -> None:
            raise error

        stream.launch(fail)
        with pytest.raises(type(error)):
            stream.synchronize()


def test_functions_must_not_wait(stream: Stream) -> None:
    event = Event("cpu")
    refused: list[str] = []

    def wait(for_: Callable[[], None]) -> None:
        try:
            for_()
        except RuntimeError as error:
            refused.append(str(error))

    stream.launch(wait, stream.synchronize)
    event.record(stream)
    stream.launch(wait, event.synchronize)
    stream.launch(wait, graph(torch.neg, torch.ones(2)).replay)
    stream.synchronize()
    assert len(refused) == 3, refused
    assert (
        refused[2]
        == "torch_infini.runtime.graph: a graph of the CPU must not be called by a function that a stream runs"
    )


@both
def test_functions_run_in_the_modes_of_their_caller(stream: Stream) -> None:
    def modes() -> tuple[object, ...]:
        return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"))

    seen: list[object] = []
    record = lambda: seen.append(modes())  # noqa: E731
    stream.launch(record)
    with torch.no_grad():
        stream.launch(record)
    with torch.inference_mode():
        stream.launch(record)
    with torch.autocast("cpu", dtype=torch.float16):
        stream.launch(record)
        stream.launch(lambda: seen.append(torch.get_autocast_dtype("cpu")))
    stream.synchronize()
    assert seen == [
        (True, False, False),
        (False, False, False),
        (False, True, False),
        (True, False, True),
        torch.float16,
    ]


@both
def test_many_threads_use_one_stream(stream: Stream) -> None:
    seen: list[tuple[int, int]] = []

    def launch(thread: int) -> None:
        for i in range(200):
            stream.launch(seen.append, (thread, i))
            if i % 50 == 0:
                stream.synchronize()

    threads = [threading.Thread(target=launch, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    stream.synchronize()
    assert len(seen) == 1600
    for thread in range(8):
        assert [i for t, i in seen if t == thread] == list(range(200))


@pytest.mark.full
def test_a_stream_that_nobody_holds_finishes_its_work() -> None:
    class Work:
        def __call__(self) -> None:
            seen.append(1)

    seen: list[int] = []
    stream, work = Stream("cpu", queued=True), Work()
    alive = weakref.ref(work)
    gate = Gate(stream)
    stream.launch(work)
    stream.launch(lambda _: None, [stream])  # the last to hold it runs on it
    start = time.monotonic()
    del stream, work
    gc.collect()
    assert time.monotonic() - start < LONG / 2, "the collector waited for the stream"
    assert not seen
    gate.open()
    until(lambda: seen == [1] and alive() is None)


def test_streams_end_with_their_threads() -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))  # others of this process may end meanwhile

    Stream("cpu", queued=True).synchronize()
    before = threads()
    streams = [Stream("cpu", queued=True) for _ in range(20)]
    made = threads() - before
    assert len(made) >= 20
    del streams
    until(lambda: len(made & threads()) <= len(made) - 20)


def test_uses_keeps_memory_until_the_work_is_done(stream: Stream) -> None:
    x = torch.ones(4)
    alive = weakref.ref(x)
    gate = Gate(stream)
    stream.uses(x)
    del x
    gc.collect()
    assert alive() is not None
    gate.open()
    stream.synchronize()
    until(lambda: alive() is None)
    with pytest.raises(ValueError) as caught:
        stream.uses(torch.ones(2), torch.ones(2, device="meta"))
    assert str(caught.value) == (
        "torch_infini.runtime.Stream.uses: tensor 1 must be on the stream's device, cpu, got one on meta"
    )


def test_what_the_cpu_does_not_have(stream: Stream) -> None:
    with pytest.raises(RuntimeError, match="torch has no streams on the CPU, where its ops run in the calling thread"):
        stream.__enter__()
    with pytest.raises(RuntimeError, match="torch has no streams on the CPU"):
        _ = stream.torch
    with pytest.raises(TypeError, match="stream must be a torch.cuda.Stream, got a Stream"):
        Stream.from_torch(stream)  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [Stream, Event])
def test_devices(made: type) -> None:
    assert made("cpu").device == made(torch.device("cpu", 0)).device == torch.device("cpu", 0)
    assert made().device.type == ("cuda" if HAS_CUDA else "cpu")
    with pytest.raises(ValueError, match="device must be cpu or cuda, got meta"):
        made("meta")
    with pytest.raises(RuntimeError, match="device_id must be less than the number of devices"):
        made("cpu:1")
    if not HAS_CUDA:
        with pytest.raises(RuntimeError, match="infinirtSetDevice: "):
            made("cuda:7")
    assert made("cpu").device.type == "cpu"  # the device before is current again


def test_equality(stream: Stream) -> None:
    assert stream == stream and stream != Stream("cpu") and stream != 1 and len({stream, stream}) == 1
    assert repr(stream) == f"<torch_infini.runtime.Stream device=cpu handle={stream.handle:#x}>"


EXIT = r"""
import os
import time
from torch_infini.runtime import Event, Stream, graph
streams = [Stream("cpu", queued=True) for _ in range(3)]
for i, stream in enumerate(streams):
    stream.launch(time.sleep, 0.1)
    stream.launch(os.write, 1, b"%d\n" % i)
del stream, streams[0]
"""


def test_a_process_that_ends_lets_its_streams_finish() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=2 * LONG)
    assert (done.returncode, sorted(done.stdout.split()), done.stderr) == (0, ["0", "1", "2"], "")


FORK = """
import os, sys, time
from torch_infini.runtime import Stream
stream = Stream("cpu", queued=True)
stream.launch(time.sleep, 0.3)
child = os.fork()
if child == 0:
    seen = []
    mine = Stream("cpu", queued=True)
    mine.launch(seen.append, 1)
    mine.synchronize()
    del mine
    sys.exit(0 if seen == [1] else 1)
stream.synchronize()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_makes_streams_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=2 * LONG
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- CUDA: one stream seen from two sides ----


@on_gpu
def test_torch_sees_the_same_stream() -> None:
    stream = Stream("cuda")
    assert stream.torch.cuda_stream == stream.handle and stream.torch is stream.torch
    assert Stream.from_torch(stream.torch) is stream
    before = torch.cuda.current_stream()
    with stream:
        assert torch.cuda.current_stream().cuda_stream == stream.handle
        assert Stream.from_torch(torch.cuda.current_stream()) is stream
        with Stream("cuda") as inner:
            assert torch.cuda.current_stream().cuda_stream == inner.handle
        assert torch.cuda.current_stream().cuda_stream == stream.handle
    assert torch.cuda.current_stream() == before


@on_gpu
@pytest.mark.parametrize("theirs", [torch.cuda.Stream, torch.cuda.default_stream])
def test_streams_of_torch(theirs: Callable[[], torch.cuda.Stream]) -> None:
    native = theirs()
    stream = Stream.from_torch(native)
    assert stream.torch is native and stream == Stream.from_torch(native)
    x = torch.ones(1 << 20, device="cuda")
    with stream:
        y = x * 2
    event = stream.record_event()
    stream.synchronize()
    assert event.query() and y.sum().item() == 2 << 20


@on_gpu
def test_ops_run_on_the_stream() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    stream, other = Stream("cuda"), Stream("cuda")
    for _ in range(3):
        stream.wait_stream(torch.cuda.current_stream())
        with stream:
            torch.cuda._sleep(10_000_000)
            y = torch.ops.infini.silu(x)
        stream.uses(x)
        other.wait_event(stream.record_event())
        with other:
            z = y + 1
        other.uses(y)
        Event("cuda").wait()
        torch.cuda.current_stream().wait_stream(other.torch)
        torch.testing.assert_close(z, torch.nn.functional.silu(x) + 1)


@on_gpu
def test_a_stream_is_used_again() -> None:
    stream = Stream("cuda")
    handle, native = stream.handle, stream.torch
    del stream
    gc.collect()
    assert Stream.from_torch(native).handle == handle  # torch may still hold it


@on_gpu
def test_the_gpu_runs_no_functions() -> None:
    with pytest.raises(RuntimeError):
        Stream("cuda").launch(print)
