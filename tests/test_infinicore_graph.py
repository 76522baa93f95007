"""Recording from Python: every op replayed on other inputs with the bits of an eager call; host functions; refusals."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import numpy
import pytest
import torch

import torch_infini.compat.infinicore as ic
from support.c_checks import bits, overwrite
from support.infinicore_calls import CALLS, OPS, RESULTS, F, copies, is_written, samples, wrapped
from torch_infini.compat.infinicore import _bridge, context
from torch_infini.compat.infinicore.lib import _infinicore as raw
from torch_infini.testing import as_tuple
from torch_infini.testing.c_ops import Described, clone

CPU = ic.device("cpu")


def ours(*shape: int) -> ic.Tensor:
    return ic.from_torch(torch.randn(*shape))


def theirs(tensor: ic.Tensor) -> torch.Tensor:
    return torch.from_dlpack(tensor)


@pytest.fixture(autouse=True)
def nothing_is_left_recording() -> Any:
    yield
    assert not ic.is_graph_recording()


def garbage(args: dict[str, Any]) -> None:
    """Bytes that no kernel takes: NaN, and numbers of rows that no table has."""
    for value in args.values():
        base = value.base if isinstance(value, Described) else value
        if isinstance(base, torch.Tensor):
            torch.empty(0, dtype=torch.uint8).set_(base.untyped_storage()).fill_(0xFF)


def changed(args: dict[str, Any]) -> dict[str, Any]:
    """The same arguments with other numbers: floats in another order."""
    other = clone(args)
    done = set()
    for value in other.values():
        base = value.base if isinstance(value, Described) else value
        if isinstance(base, torch.Tensor) and base.is_floating_point():
            whole = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage())
            if whole.data_ptr() not in done:
                done.add(whole.data_ptr())
                whole.copy_(whole.roll(1))
    return other


@pytest.mark.parametrize("name", CALLS)
def test_recorded_op(name: str) -> None:
    """Recorded on garbage, so not run, then replayed twice on other inputs: the bits of eager calls."""
    op = OPS[name]
    for sample in samples(op):
        args, given = copies(sample)
        garbage(args)
        untouched = clone(args)
        with ic.graph() as g:
            CALLS[name](given)
        assert all(torch.equal(bits(args[key]), bits(untouched[key])) for key in op.outputs), sample.name
        for values in (dict(sample.args), changed(dict(sample.args)), dict(sample.args)):
            eager = clone(values)
            CALLS[name](wrapped(eager))
            overwrite(args, clone(values))
            g.run()
            for key in op.outputs:
                assert torch.equal(bits(args[key]), bits(eager[key])), f"{sample.name}: {key}"


@pytest.mark.parametrize("name", RESULTS)
def test_recorded_results(name: str) -> None:
    """What an op makes while it is recorded is written by each run, and cannot be read before the first."""
    for sample in list(filter(is_written, samples(OPS[name])))[::5]:
        args, given = copies(sample)
        with ic.graph() as g:
            made = as_tuple(RESULTS[name](given))
        for tensor in made:
            if tensor.numel():
                with pytest.raises(RuntimeError, match="recorded"):
                    torch.from_dlpack(tensor)
        _, again = copies(sample)
        expected = as_tuple(RESULTS[name](again))
        for _ in range(2):
            overwrite(args, clone(dict(sample.args)))
            g.run()
            for got, want in zip(made, expected, strict=True):
                assert torch.equal(bits(theirs(got)), bits(theirs(want))), sample.name


def test_a_block_of_a_model() -> None:
    """Ops on each other's results, whose memory is the graph's: replays give what eager calls give."""
    layers = {"up": ic.nn.Linear(32, 64), "gate": ic.nn.Linear(32, 64), "down": ic.nn.Linear(64, 32)}
    weight = ours(32)
    for layer in layers.values():
        layer.load_state_dict({"weight": ours(*layer.weight.shape)})

    def block(x: ic.Tensor) -> ic.Tensor:
        h = F.rms_norm(x, [32], weight)
        return x + layers["down"](F.swiglu(layers["up"](h), layers["gate"](h)))

    x = ic.zeros([5, 32], dtype=ic.float32, device=CPU)
    with ic.graph() as g:
        y = block(block(x))
    for _ in range(3):
        x.copy_(ours(5, 32))
        g.run()
        assert torch.equal(theirs(y), theirs(block(block(x))))


def test_start_and_stop() -> None:
    x = ours(3, 4)
    before = theirs(x).clone()
    ic.start_graph_recording()
    assert ic.is_graph_recording() and context.is_graph_recording()
    x += x
    y = F.silu(x)
    g = ic.stop_graph_recording()
    assert isinstance(g, ic.graph.Graph)
    assert torch.equal(theirs(x), before)
    g.run()
    assert torch.equal(theirs(x), 2 * before)
    g.run()
    assert torch.equal(theirs(x), 4 * before)
    assert torch.equal(theirs(y), theirs(F.silu(x)))
    assert "2 ops" in g.report()


def test_start_names_a_device() -> None:
    ic.start_graph_recording(CPU)
    assert ic.stop_graph_recording() is not None
    ic.start_graph_recording("cpu")
    assert ic.stop_graph_recording() is not None
    with pytest.raises(KeyError, match="there is no device"):
        ic.start_graph_recording("mlu")
    assert not ic.is_graph_recording()


def test_stop_without_a_start(capfd: pytest.CaptureFixture[str]) -> None:
    assert ic.stop_graph_recording() is None
    assert "no graph is recorded" in capfd.readouterr().err


def test_start_while_recording_drops_what_was_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    x = ours(3)
    before = theirs(x).clone()
    ic.start_graph_recording()
    x += x
    ic.start_graph_recording()
    g = ic.stop_graph_recording()
    assert "dropped" in capfd.readouterr().err
    g.run()
    assert torch.equal(theirs(x), before)


def test_an_exception_drops_the_recording() -> None:
    x = ours(3)
    before = theirs(x).clone()
    with pytest.raises(ZeroDivisionError) as raised, ic.graph() as g:
        x += x
        1 / 0  # noqa: B018
    assert raised.value is not None and not ic.is_graph_recording()  # though its traceback has the recording's frame
    with pytest.raises(RuntimeError, match="after the end of the recording"):
        g.run()
    x += x  # runs at once
    assert torch.equal(theirs(x), 2 * before)


def test_an_exception_leaves_a_recording_of_the_raw_module_to_its_caller() -> None:
    """As in C++; of start_graph_recording() it ends the recording: test_infinicore_record.py."""
    x = ours(3)
    raw.start_graph_recording()
    with pytest.raises(RuntimeError, match="add"):
        ic.add(x, ours(4))
    assert ic.is_graph_recording()
    x += x
    g = ic.stop_graph_recording()
    before = theirs(x).clone()
    g.run()
    assert torch.equal(theirs(x), 2 * before)


def test_graphs_do_not_nest() -> None:
    with ic.graph() as g:
        with pytest.raises(RuntimeError, match="already"), ic.graph():
            pass
        with pytest.raises(RuntimeError, match="recording"):
            g.run()
    g.run()


def test_graph_takes_a_raw_graph() -> None:
    with pytest.raises(TypeError, match="graph must be an _infinicore.Graph, got None"):
        ic.graph.Graph(None)  # type: ignore[arg-type]
    ic.graph.Graph(raw.Graph()).run()


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_graph_is_neither_copied_nor_pickled(way: Any) -> None:
    with pytest.raises(
        TypeError, match=r"infinicore.graph.Graph: a graph must not be copied or pickled, .*record it again"
    ):
        way(ic.graph.Graph(raw.Graph()))


def test_recording_belongs_to_its_thread() -> None:
    x, y = ours(3), ours(3)
    before = theirs(y).clone()
    with ic.graph():
        seen: list[Any] = []

        def other() -> None:
            seen.append(ic.is_graph_recording())
            ic.add(y, y, out=y)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        ic.add(x, x, out=x)
    assert seen == [False]
    assert torch.equal(theirs(y), 2 * before)


def test_runs_of_several_threads() -> None:
    """One graph from four threads: its runs are one after another."""
    x = ic.from_torch(torch.zeros(1000))
    one = ic.from_torch(torch.ones(1000))
    with ic.graph() as g:
        ic.add(x, one, out=x)
    threads = [threading.Thread(target=lambda: [g.run() for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(theirs(x), torch.full((1000,), 200.0))


# ---- host functions ----


def test_torch_as_an_op() -> None:
    """record_or_run: at once without a recording, at each run with one, in its place among the ops."""
    x, y = ours(4), ours(4)
    out = ic.empty([4], dtype=ic.float32, device=CPU)

    def exponential() -> None:
        torch.exp(_bridge.as_torch(y), out=_bridge.as_torch(out))

    _bridge.record_or_run(exponential, [out])
    assert torch.equal(theirs(out), theirs(y).exp())
    theirs(out).zero_()
    with ic.graph() as g:
        ic.add(x, x, out=y)
        _bridge.record_or_run(exponential, [out])
        z = ic.add(out, out)
    assert torch.equal(theirs(out), torch.zeros(4))
    for _ in range(2):
        theirs(x).normal_()
        g.run()
        assert torch.equal(theirs(z), 2 * (2 * theirs(x)).exp())


def test_what_a_host_function_raises() -> None:
    """Comes out of run(); the ops before it have run, those behind it have not; the next run is a new one."""
    x = ic.from_torch(torch.ones(3))
    fails = [True]

    def fail() -> None:
        assert not torch.is_grad_enabled()
        if fails[0]:
            raise LookupError("on purpose")

    with ic.graph() as g:
        ic.add(x, x, out=x)
        _bridge.record_or_run(fail, [])
        ic.add(x, x, out=x)
    with pytest.raises(LookupError, match="on purpose"):
        g.run()
    assert torch.equal(theirs(x), torch.full((3,), 2.0))
    fails[0] = False
    g.run()
    assert torch.equal(theirs(x), torch.full((3,), 8.0))


def test_a_graph_keeps_its_functions_and_outputs() -> None:
    class Function:
        def __call__(self) -> None:
            calls.append(1)

    calls: list[int] = []
    function, source = Function(), torch.ones(3)
    alive, memory = weakref.ref(function), weakref.ref(source)
    out = ic.from_torch(source)
    with ic.graph() as g:
        _bridge.record_or_run(function, [out])
    del function, source, out
    gc.collect()
    assert alive() is not None and memory() is not None
    g.run()
    assert calls == [1]
    del g
    gc.collect()
    assert alive() is None and memory() is None


def test_a_graph_keeps_the_memory_of_its_tensors() -> None:
    ones = numpy.ones(3, dtype=numpy.float32)  # which torch's storage holds
    source, memory = torch.from_numpy(ones), weakref.ref(ones)
    x = ic.from_torch(source)
    with ic.graph() as g:
        y = ic.add(x, x)
    del ones, source, x
    gc.collect()
    assert memory() is not None
    g.run()
    assert torch.equal(theirs(y), torch.full((3,), 2.0))
    del g
    gc.collect()
    assert memory() is None


def test_host_functions_need_a_recording() -> None:
    with pytest.raises(RuntimeError, match="no graph is recorded"):
        raw.add_host_operator(lambda: None)
    with pytest.raises(TypeError):
        raw.add_host_operator(3)  # type: ignore[arg-type]
