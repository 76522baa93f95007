"""torch_infini.runtime: streams, events and graphs from Python, on the CPU and where there is one on a GPU."""

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
from torch import Tensor

from torch_infini.runtime import Event, Graph, Stream, graph

LONG = 30.0  # seconds after which a test that waits has failed
HAS_CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_CUDA, reason="no GPU"))]
on_gpu = pytest.mark.skipif(not HAS_CUDA, reason="no GPU")
every_device = pytest.mark.parametrize("device", DEVICES)


class Gate:
    """Holds a stream of the CPU up until it is opened."""

    def __init__(self, stream: Stream) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        stream.launch(self.pass_)

    def pass_(self) -> None:
        self.reached.set()
        assert self.opened.wait(LONG)

    def open(self) -> None:
        self.opened.set()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end, "still waiting"
        gc.collect()
        time.sleep(0.001)


@pytest.fixture
def stream() -> Stream:
    return Stream("cpu", queued=True)


both = pytest.mark.parametrize("stream", [Stream("cpu"), Stream("cpu", queued=True)], ids=["immediate", "queued"])


# ---- streams of the CPU ----


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


# ---- events ----


@every_device
def test_events(device: str) -> None:
    stream = Stream(device, queued=True)
    start, end = Event(device), Event(device)
    assert start.query()  # never recorded
    start.synchronize()
    with pytest.raises(RuntimeError, match="infinirtEventElapsedTime: "):
        start.elapsed_time(end)
    start.record(stream)
    if device == "cpu":
        stream.launch(time.sleep, 0.02)
    else:
        with stream:
            torch.cuda._sleep(40_000_000)  # cycles
    end.record(stream)
    assert not end.query()
    end.synchronize()
    assert start.query() and end.query()
    assert 10 < start.elapsed_time(end) < 1000 * LONG
    assert end.elapsed_time(start) == -start.elapsed_time(end)
    assert repr(end).startswith(f"<torch_infini.runtime.Event device={device}")


def test_an_event_without_a_stream_is_complete() -> None:
    start, end = Event("cpu"), Event("cpu")
    start.record()
    time.sleep(0.01)
    end.record()
    assert start.query() and end.query() and start.elapsed_time(end) >= 10
    end.wait()


@every_device
def test_events_without_timing(device: str) -> None:
    start, end = Event(device), Event(device, enable_timing=False, blocking=True)
    stream = Stream(device)
    start.record(stream)
    end.record(stream)
    stream.synchronize()
    with pytest.raises(RuntimeError, match="end must be an event with timing, got one made with"):
        start.elapsed_time(end)


def test_a_stream_waits_for_an_event(stream: Stream) -> None:
    other, seen = Stream("cpu", queued=True), []
    gate = Gate(stream)
    event = stream.record_event()
    assert not event.query()
    other.wait_event(event)
    other.launch(seen.append, 1)
    del event  # who waits goes on waiting
    gc.collect()
    time.sleep(0.02)
    assert not seen
    gate.open()
    other.synchronize()
    assert seen == [1]
    with pytest.raises(RuntimeError):
        stream.launch(lambda: 1 / 0)
        event = stream.record_event()
        event.synchronize()  # says nothing of failures
        assert event.query()
        try:
            stream.synchronize()
        except ZeroDivisionError as error:
            raise RuntimeError from error


# ---- graphs ----


@every_device
def test_replays_with_other_inputs(device: str) -> None:
    def fn(x: Tensor, more: dict[str, Tensor], factor: float) -> tuple[Tensor, dict[str, object]]:
        return x * factor, {"sum": x + more["y"], "text": "same", "none": None}

    x, y = torch.randn(2, 3, device=device), torch.randn(3, device=device)
    step = graph(fn, x, {"y": y}, 2.0)
    assert isinstance(step, Graph)
    first, rest = step.outputs
    assert torch.equal(first, x * 2) and torch.equal(rest["sum"], x + y)
    assert rest["text"] == "same" and rest["none"] is None
    for _ in range(3):
        x, y = torch.randn(2, 3, device=device), torch.randn(3, device=device)
        strided = x.t().contiguous().t()
        again, rest = step(strided, {"y": y}, 2.0)
        assert again is first and torch.equal(first, x * 2) and torch.equal(rest["sum"], x + y)
        assert torch.equal(step.inputs[0], x)


@every_device
def test_inputs_may_be_written_in_place(device: str) -> None:
    step = graph(torch.neg, torch.ones(3, device=device))
    step.inputs[0].fill_(5)
    assert torch.equal(step.replay().cpu(), torch.full((3,), -5.0))
    step.inputs[0].fill_(6)
    assert torch.equal(step(step.inputs[0]).cpu(), torch.full((3,), -6.0))


@every_device
def test_what_fn_holds_is_used_where_it_lies(device: str) -> None:
    weight, count = torch.ones(3, device=device), torch.zeros((), device=device)

    def fn(x: Tensor) -> Tensor:
        count.add_(1)
        return x * weight

    x = torch.ones(3, device=device)
    step = graph(fn, x)
    before = count.item()
    weight.fill_(7)
    assert torch.equal(step(x).cpu(), torch.full((3,), 7.0))
    step(x)
    assert count.item() == before + 2


@every_device
def test_ops_of_this_library(device: str) -> None:
    infini = torch.ops.infini
    x, weight = torch.randn(4, 64, device=device).bfloat16(), torch.randn(64, device=device).bfloat16()
    step = graph(lambda x: infini.silu(infini.rms_norm(x, weight, 1e-6)), x)
    for _ in range(2):
        x = torch.randn(4, 64, device=device).bfloat16()
        assert torch.equal(step(x), infini.silu(infini.rms_norm(x, weight, 1e-6)))


@every_device
def test_arguments_that_do_not_fit(device: str) -> None:
    x = torch.ones(2, 3, device=device)
    with torch.no_grad():
        step = graph(lambda x, pair, n: x + pair[0] + n, x, [x, None], 1)

    def refused(*args: object) -> str:
        with pytest.raises(ValueError) as caught:
            step(*args)
        return str(caught.value).removeprefix("torch_infini.runtime.graph: ")

    assert refused(x[:1], [x, None], 1) == "argument 0 must have shape [2, 3] as at capture, got [1, 3]"
    assert refused(x, [x.int(), None], 1) == "argument 1 must have dtype torch.float32 as at capture, got torch.int32"
    assert refused(x.to("meta"), [x, None], 1) == f"argument 0 must be on {x.device} as at capture, got meta"
    assert refused(3, [x, None], 1) == "argument 0 must be a tensor as at capture, got 3"
    assert refused(x, [x, None], 2) == "argument 3 must be what it was at capture, 1, got 2"
    assert refused(x, [x, None], x) == ("argument 3 must be what it was at capture, 1, got a tensor of shape [2, 3]")
    assert refused(x, [x], 1) == "the arguments must be nested as at capture, (*, [*, *], *), got (*, [*], *)"
    assert refused() == "the arguments must be nested as at capture, (*, [*, *], *), got ()"
    assert "must not require a gradient" in refused(x.clone().requires_grad_(), [x, None], 1)
    with torch.no_grad():
        step(x.clone().requires_grad_(), [x, None], 1)


@every_device
def test_what_cannot_be_captured(device: str) -> None:
    x = torch.ones(3, device=device)
    with pytest.raises(ValueError, match="must be on one device, the CPU or a CUDA device, got no tensor"):
        graph(lambda: 1)
    with pytest.raises(ValueError, match="must be on one device, the CPU or a CUDA device, got .*, meta"):
        graph(torch.add, x, x.to("meta"))
    with pytest.raises(ValueError, match="must be on one device, the CPU or a CUDA device, got meta"):
        graph(torch.neg, x.to("meta"))
    with pytest.raises(ValueError, match="warmup must be at least 1, got 0"):
        graph(torch.neg, x, warmup=0)
    with pytest.raises(ValueError, match="what it wrote to argument 1 would be in the graph's copy"):
        graph(lambda a, b: b.add_(a), x, x)
    assert torch.equal(x.cpu(), torch.ones(3))
    with pytest.raises(RuntimeError, match="results must not require a gradient"):
        weight = x.clone().requires_grad_()
        graph(lambda x: x * weight, x)
    with pytest.raises(ZeroDivisionError):
        graph(lambda x: 1 / 0, x)
    nan = torch.tensor([torch.nan, 1.0], device=device)
    assert graph(torch.neg, nan)(nan).isnan().tolist() == [True, False]


@every_device
def test_inference_mode(device: str) -> None:
    x = torch.ones(3, device=device)
    with torch.inference_mode():
        step = graph(lambda x: x + 1, x.clone())
        assert torch.equal(step(x * 2).cpu(), torch.full((3,), 3.0))
        inference = x * 4
    assert torch.equal(step(x * 3).cpu(), torch.full((3,), 4.0))
    assert torch.equal(step(inference).cpu(), torch.full((3,), 5.0))


def test_exceptions_of_a_replay() -> None:
    broken: list[BaseException] = []

    def fn(x: Tensor) -> Tensor:
        if broken:
            raise broken[0]
        return x + 1

    x = torch.ones(2)
    step = graph(fn, x)
    for error in (ValueError("now"), KeyboardInterrupt()):
        broken.append(error)
        with pytest.raises(type(error)) as caught:
            step(x)
        assert caught.value is error
        broken.clear()
        assert torch.equal(step(x), x + 1)


def test_results_that_change() -> None:
    results: list[object] = []
    step = graph(lambda x: results[-1] if results else x + 1, torch.ones(2))
    for result, sentence in (
        (torch.ones(3), "result 0 must have shape [2] as at capture, got [3]"),
        (torch.ones(2).int(), "result 0 must have dtype torch.float32 as at capture, got torch.int32"),
        (3, "result 0 must be a tensor as at capture, got 3"),
        ([torch.ones(2)], "fn must return what it did at capture, *, got [*]"),
    ):
        results.append(result)
        with pytest.raises(RuntimeError) as caught:
            step.replay()
        assert str(caught.value) == f"torch_infini.runtime.graph: {sentence}"
    results.append(torch.full((2,), 9.0))
    assert torch.equal(step.replay(), torch.full((2,), 9.0))


@every_device
def test_graphs_are_collected(device: str) -> None:
    class Fn:
        def __call__(self, x: Tensor) -> Tensor:
            return x + 1

    fn = Fn()
    alive = weakref.ref(fn)
    step = graph(fn, torch.ones(2, device=device))
    outputs = step(torch.zeros(2, device=device))
    del fn
    if device == "cpu":  # on CUDA fn is not needed any more
        assert alive() is not None
    del step
    until(lambda: alive() is None)
    assert torch.equal(outputs.cpu(), torch.ones(2))


@every_device
def test_many_threads_replay_one_graph(device: str) -> None:
    total = torch.zeros((), dtype=torch.int64, device=device)
    x = torch.ones((), dtype=torch.int64, device=device)
    step = graph(lambda x: total.add_(x), x)
    total.zero_()
    failures: list[BaseException] = []

    def replay() -> None:
        try:
            for _ in range(50):
                step(x)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=replay) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert not failures and total.item() == 300


def test_a_graph_that_calls_itself() -> None:
    again: list[Graph] = []
    step = graph(lambda x: again[0](x) if again else x + 1, torch.ones(2))
    again.append(step)
    with pytest.raises(RuntimeError, match="a graph of the CPU must not be called by a function that a stream runs"):
        step.replay()


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


@on_gpu
def test_replays_on_several_streams() -> None:
    x = torch.ones(1 << 22, device="cuda")
    step = graph(lambda x: x + 1, x)
    for i in range(6):
        stream = Stream("cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with stream:
            y = step(x * i).clone()
        torch.cuda.current_stream().wait_stream(stream.torch)
        assert torch.equal(y, x * i + 1)
