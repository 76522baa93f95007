"""Recordings of infinicore that hold ops of torch: one graph, in order, none run; its end by stop, errors, threads."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torch_infini.compat.infinicore as ic
from torch_infini import runtime
from torch_infini.compat.infinicore import _started
from torch_infini.compat.infinicore.lib import _infinicore as raw

F = ic.nn.functional
CPU = ic.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    modes = _get_current_dispatch_mode_stack()
    was_recording = _started.drop()  # so that a test that fails is the only one
    assert not was_recording and not ic.is_graph_recording() and modes == []


class Started:
    """The graph between start and stop; `with infinicore.graph()` otherwise."""

    graph: Any = None


@contextmanager
def by_functions() -> Iterator[Started]:
    found = Started()
    ic.start_graph_recording()
    yield found
    found.graph = ic.stop_graph_recording()


@contextmanager
def by_block() -> Iterator[Started]:
    found = Started()
    with ic.graph() as g:
        yield found
    found.graph = g


WAYS = pytest.mark.parametrize("way", [by_functions, by_block])


def theirs(tensor: ic.Tensor) -> torch.Tensor:
    return torch.from_dlpack(tensor)


@WAYS
def test_one_graph_in_order(way: Callable[[], Any]) -> None:
    """Each op reads what the one before wrote, on torch's tensors, infinicore's, and what either made meanwhile."""
    a, b, out, weight = torch.randn(4, 6), torch.randn(4, 6), torch.full((4, 6), 7.0), torch.rand(6)
    ours_a, ours_b, ours_out = map(ic.from_torch, (a, b, out))
    with way() as found:
        x = ic.add(ours_a, ours_b)
        y = torch.add(theirs(x), a)  # of memory of the graph
        z = F.silu(ic.from_torch(y))  # of what torch will have made
        w = theirs(z).mul(2).tanh()
        e = ic.exp2(ic.from_torch(w))  # which torch computes
        torch.ops.infini.rms_norm(theirs(e), weight, out=out)
        ic.add(ours_out, ours_a, out=ours_out)
        out.add_(1)
    assert torch.equal(out, torch.full((4, 6), 7.0))  # nothing ran
    graph = found.graph
    for _ in range(3):
        a.normal_()
        b.normal_()
        graph.run()
        first = a + b
        second = torch.ops.infini.silu(first + a)
        third = second.mul(2).tanh()
        last = torch.ops.infini.rms_norm(third.exp2(), weight) + a + 1
        assert torch.equal(theirs(x), first) and torch.equal(theirs(z), second)
        assert torch.equal(w, third) and torch.equal(theirs(e), third.exp2())
        assert torch.equal(out, last)
    names = [line.strip() for line in graph.report().splitlines()[1:-1]]
    assert names == [
        "add",
        "aten.add.Tensor",
        "silu",
        "aten.mul.Tensor",
        "aten.tanh.default",
        "torch.exp2",
        "infini.rms_norm.out",
        "add",
        "aten.add_.Tensor",
    ]


@WAYS
def test_dropped_results(way: Callable[[], Any]) -> None:
    """Memory that nobody holds is used again, by each side, and replays have the bits of eager calls."""
    x = torch.randn(64)
    ours = ic.from_torch(x)

    def chain() -> tuple[ic.Tensor, torch.Tensor]:
        t, o = x, ours
        for _ in range(5):
            t = torch.sin(theirs(ic.add(o, ic.from_torch(t))))
            o = ic.mul(ic.from_torch(t.cos()), o)
        return o, t

    with way() as found:
        o, t = chain()
    for _ in range(2):
        x.normal_()
        found.graph.run()
        want_o, want_t = chain()
        assert torch.equal(theirs(o), theirs(want_o)) and torch.equal(t, want_t)


def test_memory_of_functions_that_torch_computes() -> None:
    """Results that are dropped share memory, those that an op of infinicore reads stay; none is read before a run."""
    x = ic.from_torch(torch.rand(64))
    with ic.graph() as g:
        y = ic.exp2(ic.log(ic.exp2(ic.log(x))))
        z = ic.add(ic.exp2(x), x)
    assert "dropped results share 512 bytes, held ones have 512" in g.report()  # two at once; y and what z is made of
    with pytest.raises(RuntimeError, match="holds nothing before the graph's first run"):
        theirs(y)
    for _ in range(2):
        theirs(x).uniform_()
        g.run()
        assert torch.equal(theirs(y), theirs(x).log().exp2().log().exp2())
        assert torch.equal(theirs(z), theirs(x).exp2() + theirs(x))


def test_lists_and_arrays_are_values_at_once() -> None:
    """What is made of numbers while recording holds them: it is no op."""
    x = torch.zeros(3)
    ours = ic.from_torch(x)
    with ic.graph() as g:
        numbers = ic.from_list([1.0, 2.0, 3.0], dtype=ic.float32)
        ic.add(ours, numbers, out=ours)
    g.run()
    assert torch.equal(x, torch.tensor([1.0, 2.0, 3.0]))


def test_what_cannot_be_noted_is_refused() -> None:
    x = torch.ones(3)
    ours = ic.from_torch(x)
    for wrong, rule in (
        (lambda: x.sum().item(), "nothing may depend on them"),
        (lambda: x.tolist(), "nothing may depend on them"),
        (lambda: torch.nonzero(x), "nothing may depend on them"),
        (lambda: x.set_(torch.ones(4)), "must keep its memory and shape"),
    ):
        with ic.graph() as g:
            ic.add(ours, ours, out=ours)
            with pytest.raises(RuntimeError, match=rule):
                wrong()
            x.mul_(3)
        g.run()
        assert torch.equal(x, torch.full((3,), 6.0))
        x.fill_(1)


def test_a_tensor_of_another_recording_is_not_readable() -> None:
    x = ic.from_torch(torch.ones(3))
    with ic.graph():
        y = ic.add(x, x)
        assert theirs(y).shape == (3,)
    with ic.graph(), pytest.raises(RuntimeError, match="was made while a graph was recorded"):
        theirs(y)


# ---- the end of a recording ----


def failures() -> dict[str, tuple[Callable[[torch.Tensor], Any], str]]:
    return {
        "an op of infinicore": (lambda x: ic.add(ic.from_torch(x), ic.from_torch(torch.empty(4))), "add"),
        "a function of infinicore": (lambda x: ic.cat([ic.from_torch(x), ic.from_torch(torch.empty(2, 2))]), "cat"),
        "an op of torch": (lambda x: x.add_(torch.empty(4)), "broadcast"),
        "a value": (lambda x: x.tolist(), "hold no values"),
    }


def test_a_torch_view_of_what_is_recorded_is_zero_before_the_first_run() -> None:
    """torch cannot refuse to read it; it must not show what the memory held before."""
    for _ in range(3):  # fills the memory that the recording gets
        numpy.asarray(ic.ones([256], dtype=ic.float32, device=CPU))[:] = 7
    x = ic.ones([256], dtype=ic.float32, device=CPU)
    with ic.graph() as g:
        y = ic.add(x, x)
        views = [torch.from_dlpack(y), torch.from_dlpack(y.view([16, 16]).permute([1, 0]))]
    for view in views:
        assert not view.any()
    with pytest.raises(RuntimeError, match="holds nothing before the graph's first run"):
        torch.from_dlpack(y)
    with pytest.raises(RuntimeError, match=r"__reduce__: this tensor .* holds nothing before the graph's first run"):
        pickle.dumps(y)
    with pytest.raises(RuntimeError, match="is only recorded|holds nothing|before"):
        copy.deepcopy(y)
    with pytest.raises(RuntimeError, match=r"__bool__: this tensor .* holds nothing before the graph's first run"):
        bool(y.narrow(0, 0, 1))
    g.run()
    for view in views:
        assert (view == 2).all()


def test_the_truth_of_a_tensor_is_not_recorded() -> None:
    """As that of torch's tensors: what Python decides is decided once, so a recording must not depend on values."""
    x = ic.ones([1], dtype=ic.float32, device=CPU)
    with pytest.raises(RuntimeError, match="nothing may depend on them"), ic.graph():
        bool(x)


@pytest.mark.parametrize("what", failures())
def test_an_op_that_raises_ends_both(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Between start and stop: what follows runs; stop has nothing to return; a block goes on if it catches."""
    fail, rule = failures()[what]
    x = torch.ones(3)
    ours = ic.from_torch(x)
    ic.start_graph_recording()
    ic.add(ours, ours, out=ours)
    x.mul_(5)
    with pytest.raises(RuntimeError, match=rule):
        fail(x)
    assert not ic.is_graph_recording()
    assert "a recording of 2 ops is dropped" in capfd.readouterr().err
    ic.add(ours, ours, out=ours)
    x.add_(1)
    assert x.tolist() == [3.0, 3.0, 3.0]
    runtime.program(lambda: torch.ops.infini.silu(x))  # which a recording would refuse
    assert ic.stop_graph_recording() is None
    assert "no graph is recorded" in capfd.readouterr().err
    with ic.graph() as g:
        x.add_(1)
        with pytest.raises(RuntimeError, match=rule):
            fail(x)
        assert ic.is_graph_recording()
        ic.add(ours, ours, out=ours)
    g.run()
    assert x.tolist() == [8.0, 8.0, 8.0]


@pytest.mark.parametrize("leave", ["start", "block"])
def test_after_an_error_a_recording_can_begin(leave: str) -> None:
    """Without a stop between: what an error left behind goes."""
    x = torch.ones(3)
    ic.start_graph_recording()
    with pytest.raises(RuntimeError):
        x.tolist()
    if leave == "start":
        ic.start_graph_recording()
        x.add_(1)
        g = ic.stop_graph_recording()
    else:
        with ic.graph() as g:
            x.add_(1)
    assert _get_current_dispatch_mode_stack() == []
    g.run()
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_an_exception_in_a_block_ends_both_and_keeps_nothing() -> None:
    def fail() -> weakref.ref[torch.Tensor]:
        x = torch.ones(3)
        with pytest.raises(ZeroDivisionError), ic.graph() as g:
            ic.add(ic.from_torch(x), ic.from_torch(x))
            x.mul_(2).exp()
            1 / 0  # noqa: B018
        x.add_(1)  # runs
        assert x.tolist() == [2.0, 2.0, 2.0]
        with pytest.raises(RuntimeError, match="after the end of the recording"):
            g.run()
        return weakref.ref(x)

    alive = fail()
    gc.collect()
    assert alive() is None


def test_starts_and_stops_between(capfd: pytest.CaptureFixture[str]) -> None:
    """A second start drops the first with what torch noted; the raw module's is dropped too; torch's is not."""
    x = torch.ones(3)
    ic.start_graph_recording()
    x.add_(1)
    ic.start_graph_recording()
    x.mul_(3)
    g = ic.stop_graph_recording()
    assert "a recording was under way, which is dropped" in capfd.readouterr().err
    raw.start_graph_recording()
    ic.start_graph_recording()
    assert "which is dropped" in capfd.readouterr().err
    assert ic.stop_graph_recording() is not None
    g.run()
    assert x.tolist() == [3.0, 3.0, 3.0]
    with runtime.record() as theirs_:
        for call in (ic.start_graph_recording, ic.stop_graph_recording):
            with pytest.raises(RuntimeError, match="must not come between"):
                call()
        x.add_(1)
    theirs_.run()
    assert x.tolist() == [4.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="must not come before the end of the block"), ic.graph():
        ic.stop_graph_recording()


def test_a_recording_is_of_its_thread() -> None:
    x, y = torch.ones(3), torch.ones(3)

    def other() -> None:
        y.add_(1)
        assert not ic.is_graph_recording()

    with ic.graph() as g:
        x.add_(1)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert y.tolist() == [2.0, 2.0, 2.0] and x.tolist() == [1.0, 1.0, 1.0]
    threads = [threading.Thread(target=g.run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert x.tolist() == [5.0, 5.0, 5.0]


# ---- what a run raises, and its memory ----


def test_errors_of_a_run_stay_what_they_are() -> None:
    """Of a function of infinicore and of an op of torch, in one graph."""
    x, ids, fails = torch.zeros(3), torch.tensor([9]), [True]
    table = torch.randn(4, 3)

    def fail() -> None:
        if fails[0]:
            raise LookupError("on purpose")

    with ic.graph() as g:
        x.add_(1)
        raw.add_host_operator(fail, "fails")
        y = table.index_select(0, ids)
        x.add_(1)
    with pytest.raises(LookupError, match="on purpose"):
        g.run()
    fails[0] = False
    with pytest.raises(IndexError):
        g.run()
    assert x.tolist() == [2.0, 2.0, 2.0]
    ids.fill_(2)
    g.run()
    assert x.tolist() == [4.0, 4.0, 4.0] and torch.equal(y, table[2:3])
    assert "\n  fails\n" in g.report()


@pytest.mark.full
def test_a_graph_keeps_what_it_uses_and_frees_it() -> None:
    def made() -> tuple[Any, list[weakref.ref[Any]]]:
        x, y = torch.ones(3), torch.ones(3)
        with ic.graph() as g:
            z = torch.exp(theirs(ic.add(ic.from_torch(x), ic.from_torch(x))))
            y.copy_(z)
        return g, [weakref.ref(x.untyped_storage()), weakref.ref(g)]

    g, _ = made()
    gc.collect()
    g.run()
    alive = weakref.ref(g)
    del g
    gc.collect()
    assert alive() is None
    before = raw.memory_stats(raw.Device())["in_use"]
    for _ in range(5):
        made()[0].run()
    gc.collect()
    assert raw.memory_stats(raw.Device())["in_use"] <= before
