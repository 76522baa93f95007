"""torch_infini.runtime.record on CUDA: bits as of eager calls, refusals, errors, threads, streams.

Needs a GPU, but for what is tested with a substitute for torch.cuda: a capture that may fail, on torch's meta device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_infini.runtime import Recording, record
from torch_infini.runtime._noting import CaptureGuard
from torch_infini.testing import as_tuple, cuda_device
from torch_infini.testing.ops import OpInfo, Sample, all_op_infos

gpu = pytest.mark.skipif(cuda_device() != "cuda", reason="needs a GPU")
OPS = [spec for spec in all_op_infos() if "cuda" in spec.devices]
ops = torch.ops.infini
SAID = "torch_infini.runtime.record: "


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def message(call: Callable[[], Any], kind: type[Exception] = RuntimeError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def tensors(sample: Sample) -> list[Tensor]:
    return [value for value in (*sample.args, *sample.kwargs.values()) if isinstance(value, Tensor)]


def samples(spec: OpInfo, seed: int) -> list[Sample]:
    torch.manual_seed(seed)
    move = lambda v: v.clone().cuda() if isinstance(v, Tensor) else v  # noqa: E731
    return [
        Sample(sample.name, tuple(map(move, sample.args)), {k: move(v) for k, v in sample.kwargs.items()})
        for sample in spec.samples_on_cuda(spec.dtypes[0])
    ]


# ---- on a GPU ----


@gpu
@pytest.mark.parametrize("spec", OPS, ids=lambda spec: spec.name)
def test_every_op(spec: OpInfo) -> None:
    """Recorded, then run on other inputs: the bits of an eager call."""
    for sample, other in zip(samples(spec, 1), samples(spec, 2), strict=True):
        spec.op(*sample.args, **sample.kwargs)  # what a library sets up at its first call
        graph = record(lambda s=sample: spec.op(*s.args, **s.kwargs), device="cuda")
        for there, new in zip(tensors(sample), tensors(other), strict=True):
            there.copy_(new)
        graph.run()
        expected = spec.op(*other.args, **other.kwargs)
        made = (as_tuple(graph.outputs), as_tuple(expected)) if spec.outputs else (tensors(sample), tensors(other))
        for got, want in zip(*made, strict=True):
            assert same_bits(got, want), sample.name


@gpu
def test_ours_and_torch() -> None:
    """Ops of torch are captured beside ours; results that are held are written by each run, on the inputs' values."""
    x, w = torch.randn(5, 64, device="cuda"), torch.randn(64, device="cuda")
    block = lambda: torch.exp(ops.rms_norm(torch.cat([x, x]), w)).softmax(-1) @ torch.outer(w, w)  # noqa: E731
    block()
    with record(device="cuda") as graph:
        y = block()
        numbers = x * torch.tensor(2.0)
    assert graph.report() == "a CUDA graph on cuda:0, captured"
    for _ in range(3):
        x.normal_()
        graph.run()
        assert same_bits(y, block()) and same_bits(numbers, x * 2)


@gpu
def test_outputs_and_random_ops() -> None:
    x = torch.zeros(1000, device="cuda")
    graph = record(lambda t: (t + 1, torch.rand_like(t)), x)  # on the device of the first argument
    one, drawn = graph.run()
    first = drawn.clone()
    assert graph.run() == (one, drawn) and (one == 1).all() and not torch.equal(first, drawn)


@gpu
def test_runs_of_threads_and_streams() -> None:
    """A run comes behind the one before, whatever stream that was on."""
    x, total = torch.ones(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    graph = record(lambda: total.add_(x), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        graph.run()
    graph.run()
    torch.cuda.current_stream().synchronize()
    assert (total == 2).all()

    def run() -> None:
        for _ in range(10):
            graph.run()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert (total == 42).all()


@gpu
def test_refusals_leave_the_thread_as_it_was() -> None:
    import torch_infini.compat.infinicore as ic

    x, host = torch.ones(4, device="cuda"), torch.ones(4)
    ours, complete = ic.from_torch(x), record(lambda: x + 1, device="cuda")
    for call, expected in (
        (lambda: x.sum().item(), "nothing may depend on them, got aten._local_scalar_dense"),
        (lambda: x.nonzero(), "nothing may depend on them, got aten.nonzero"),
        (lambda: x.cpu(), "a copy must stay on cuda:0, got one to cpu"),
        (lambda: host + 1, "every tensor must be on cuda:0"),
        (lambda: torch.zeros(3), "every tensor must be on cuda:0"),
        (lambda: ours + ours, "must be on CPU:0, whose graph is recorded, got NVIDIA:0"),
        (lambda: record(lambda: x, device="cuda"), "must not be made or run while a graph is recorded"),
        (complete.run, "must not be made or run while a graph is recorded"),
    ):
        stream = torch.cuda.current_stream()
        assert expected in message(lambda call=call: record(call, device="cuda"))
        assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    with pytest.raises(LookupError, match="on purpose"), record(device="cuda"):
        raise LookupError("on purpose")
    assert (record(lambda: x + 2, device="cuda").run() == 3).all()


@gpu
def test_another_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.ones(4, device="cuda:1")
    graph = record(lambda t: t + 1, x)
    with torch.cuda.device(1):
        same = record(lambda: x + 2, device="cuda")
    assert torch.cuda.current_device() == 0
    assert (graph.run() == 2).all() and (same.run() == 3).all()
    assert same.report() == "a CUDA graph on cuda:1, captured"


# ---- without a GPU ----


class Substitute:
    """torch.cuda as record() uses it: says what was done, and lets the end of a capture fail after an error."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.current = "default stream"
        self.fails: str | None = None

    def install(self, patch: pytest.MonkeyPatch) -> None:
        cuda = torch.cuda
        patch.setattr(cuda, "is_available", lambda: True)
        patch.setattr(cuda, "current_device", lambda: 1)
        patch.setattr(cuda, "CUDAGraph", lambda: self)
        patch.setattr(cuda, "Stream", lambda: "own stream")
        patch.setattr(cuda, "current_stream", lambda: self.current)
        patch.setattr(cuda, "device", self.device)
        patch.setattr(cuda, "stream", self.stream)
        patch.setattr(cuda, "graph", self.graph)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.done.append(f"on {device}")
        yield

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert graph is self and pool is None and capture_error_mode == "thread_local" and self.current == stream
        if self.fails == "begin":
            raise RuntimeError("the capture cannot begin")
        self.done.append("begin")
        yield
        if self.fails == "end":
            raise RuntimeError("the capture is invalid")
        self.done.append("end")

    def replay(self) -> None:
        self.done.append("replay")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Substitute]:
    substitute = Substitute()
    substitute.install(monkeypatch)
    monkeypatch.setattr("torch_infini.runtime.recording.CaptureGuard", lambda _: CaptureGuard(torch.device("meta")))
    yield substitute
    usable(substitute)


def usable(cuda: Substitute) -> None:
    """Nothing is left of a recording: neither modes, nor infinicore's, nor the capture's stream."""
    assert cuda.current == "default stream"
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    x = torch.ones(3)
    assert x.tolist() == [1, 1, 1]
    graph = record(lambda: x + 1)
    assert graph.run().tolist() == [2, 2, 2]


def test_captured_once_and_replayed(cuda: Substitute) -> None:
    """The device is the recording thread's current one, also for runs of other threads."""
    x = torch.ones(4, device="meta")
    graph = record(lambda: x + torch.tensor(2.0), device="cuda")
    assert cuda.done == ["on cuda:1", "begin", "end"]
    cuda.current = "own stream"  # where the capture was: nothing to wait for
    torch.cuda.current_device = lambda: 0
    thread = threading.Thread(target=graph.run)
    thread.start()
    thread.join()
    cuda.current = "default stream"
    assert cuda.done[3:] == ["on cuda:1", "replay"]
    assert graph.report() == "a CUDA graph on cuda:1, captured"


def test_an_error_comes_out_whatever_the_end_of_the_capture_says(cuda: Substitute) -> None:
    cuda.fails = "end"
    with pytest.raises(LookupError, match="on purpose"), record(device="cuda"):
        raise LookupError("on purpose")
    usable(cuda)
    graph = Recording(torch.device("cuda"))
    with pytest.raises(RuntimeError, match="the capture is invalid"), graph:
        pass
    assert message(graph.run) == f"{SAID}run() must come after a complete recording, got one that is dropped"


def test_a_capture_that_cannot_begin(cuda: Substitute) -> None:
    cuda.fails = "begin"
    for _ in range(2):
        assert message(lambda: record(lambda: None, device="cuda")) == "the capture cannot begin"
        usable(cuda)


def test_what_would_not_be_replayed(cuda: Substitute) -> None:
    """Ops on the host, copies to it, and sizes that depend on values."""
    x, host, number = torch.ones(4, device="meta"), torch.ones(4), torch.tensor(3.0)
    place = f"{SAID}every tensor must be on meta, the device of record(), except numbers (tensors without dimensions), "
    place += "which keep their present values, got one of shape [4] on cpu"
    early = f"{SAID}ops are noted and not run, so tensors hold no values yet: nothing may depend on them, got "
    for call, sentence in (
        (lambda: host + 1, place),
        (lambda: x * host, place),
        (lambda: torch.zeros(4), place),
        (lambda: host.add_(x), place),
        (lambda: x.to("cpu"), f"{SAID}a copy must stay on meta, got one to cpu"),
        (lambda: host.to("meta"), place),
        (lambda: x.nonzero(), f"{early}aten.nonzero.default"),
        (lambda: x.sum().item(), f"{early}aten._local_scalar_dense.default"),
        (lambda: x.tolist(), f"{early}Tensor.tolist"),
    ):
        assert message(lambda call=call: record(call, device="cuda")) == sentence
        usable(cuda)
    record(lambda: (x * number, x + 2.0, number + 1, torch.full((3,), 2.0, device="meta"), x.double()), device="cuda")


def test_ops_of_infinicore(cuda: Substitute) -> None:
    """They are neither run nor forgotten; and recordings of either kind do not nest."""
    import torch_infini.compat.infinicore as ic

    values = torch.ones(3)
    ours, complete = ic.from_torch(values), record(lambda: values + 1)
    assert message(lambda: record(lambda: ours.copy_(ours + ours), device="cuda")) == (
        f"{SAID}ops of infinicore cannot be recorded on CUDA, got 2 on the CPU"
    )
    assert values.tolist() == [1, 1, 1]
    usable(cuda)
    graph = record(lambda: None, device="cuda")
    for call in (
        ic.graph().__enter__,
        lambda: record(lambda: None),
        lambda: record(lambda: None, device="cuda"),
        graph.run,
        complete.run,
    ):
        assert "record" in message(lambda call=call: record(call, device="cuda"))
        usable(cuda)
    with ic.graph(), pytest.raises(RuntimeError, match="this thread records a graph already"):
        graph.run()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has CUDA devices")
def test_a_torch_without_cuda() -> None:
    assert message(lambda: record(lambda: None, device="cuda:1")) == (
        f"{SAID}device must be one that torch has, which has no CUDA device here, got cuda:1"
    )
    assert record(lambda: torch.ones(2) + 1).run().tolist() == [2, 2]
