"""torch_infini.runtime: events and graphs from Python, on the CPU and where there is one on a GPU."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

from support.runtime_helpers import LONG, Gate, every_device, on_gpu, until
from torch_infini.runtime import Event, Graph, Stream, graph


@pytest.fixture
def stream() -> Stream:
    return Stream("cpu", queued=True)


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
