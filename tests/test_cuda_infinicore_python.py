"""infinicore on NVIDIA devices: tensors, copies, ops, recording and replay, streams, events, memory.

On a GPU, or, with INFINI_LIBRARIES=build/native/emulated, on the emulated CUDA runtime. Skipped where there is neither.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torch_infini.compat.infinicore as ic
from support.c_checks import bits, check
from support.c_runtime import NVIDIA, device_count
from support.infinicore_calls import CALLS, OPS, RESULTS, F
from torch_infini._core.library import emulates_cuda
from torch_infini.compat.infinicore import _bridge
from torch_infini.compat.infinicore.lib import _infinicore as raw
from torch_infini.testing import as_tuple
from torch_infini.testing.c_ops import CSample, Described, clone

DEVICES = device_count(NVIDIA)
pytestmark = pytest.mark.skipif(DEVICES == 0, reason="no GPU, and the libraries are not the emulated ones")
gpu = pytest.mark.skipif(emulates_cuda(), reason="needs a torch with CUDA")
emulated = pytest.mark.skipif(not emulates_cuda(), reason="asks the emulation")
two_devices = pytest.mark.skipif(DEVICES < 2, reason="needs two devices")
CPU, CUDA = ic.device("cpu"), ic.device("cuda:0")


@pytest.fixture(autouse=True)
def from_cuda_and_back() -> Iterator[None]:
    ic.set_device(CUDA)
    yield
    assert not ic.is_graph_recording()
    ic.set_device(CPU)


def put(tensor: torch.Tensor, device: ic.device = CUDA) -> ic.Tensor:
    """A contiguous copy on a device."""
    return ic.from_torch(tensor.contiguous()).to(device)


def got(tensor: ic.Tensor) -> torch.Tensor:
    return torch.from_dlpack(tensor.to(CPU))


def ours(*shape: int) -> ic.Tensor:
    return put(torch.randn(*shape))


def full(n: int, value: float) -> torch.Tensor:
    return torch.full((n,), value)


# ---- tensors and copies ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool], ids=str)
def test_copies(dtype: torch.dtype) -> None:
    """To the device and back: contiguous, strided on either side, between two tensors there, and of no element."""
    source = torch.randn(6, 10).mul(4).to(dtype)
    x = ic.from_torch(source).to(CUDA)
    assert x.device == CUDA and x.shape == [6, 10] and x.data_ptr() != source.data_ptr()
    assert torch.equal(got(x), source)
    assert x.to(CUDA).data_ptr() == x.data_ptr()
    assert torch.equal(got(ic.from_torch(source.t()).to("cuda:0")), source.t())
    turned = x.permute([1, 0])
    assert not turned.is_contiguous() and turned.contiguous().device == CUDA
    assert torch.equal(got(turned), source.t())
    part = ic.empty([6, 10], dtype=x.dtype, device=CUDA)
    part.copy_(put(torch.zeros(6, 10).to(dtype)))
    part.narrow(1, 3, 4).copy_(ic.from_torch(source[:, 3:7]))  # from the host into strides of the device
    part.narrow(1, 0, 1).copy_(x.narrow(1, 9, 1))
    expected = torch.zeros(6, 10).to(dtype)
    expected[:, 3:7], expected[:, :1] = source[:, 3:7], source[:, 9:]
    assert torch.equal(got(part), expected)
    host = torch.zeros(6, 10).to(dtype)
    ic.from_torch(host).copy_(part)
    assert torch.equal(host, expected)
    assert got(put(source[:0])).shape == (0, 10)


def test_made_tensors(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for made, value in ((ic.ones, 1), (ic.zeros, 0)):
        x = made([3, 70], dtype=ic.bfloat16, device="cuda")
        assert torch.equal(got(x), torch.full((3, 70), value, dtype=torch.bfloat16))
    assert got(ic.from_list([[1, 2], [3, 4]], device=CUDA)).tolist() == [[1, 2], [3, 4]]
    x = put(torch.arange(4.0))
    x.debug()
    assert "device NVIDIA:0\n[0, 1, 2, 3]" in capfd.readouterr().out
    x.debug(str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == got(x).numpy().tobytes()
    pinned = ic.ones([4], dtype=ic.float32, device=CPU, pin_memory=True)
    assert pinned.is_pinned() and torch.equal(got(pinned.to(CUDA)), torch.ones(4))


def test_other_libraries_get_copies_on_the_host() -> None:
    x = ours(2, 3)
    assert x.__dlpack_device__() == (2, 0)
    assert torch.equal(torch.from_dlpack(ic.Tensor(raw.from_dlpack(x.__dlpack__(dl_device=(1, 0))))), got(x))
    same = ic.Tensor(raw.from_dlpack(x.__dlpack__()))
    assert same.device == CUDA and same.data_ptr() == x.data_ptr()
    with pytest.raises(TypeError, match="device must be the CPU, got cuda:0: use to"):
        x.__array__()


# ---- ops ----


def samples(name: str) -> list[CSample]:
    """A few of the operator's samples, without negative strides, which a copy to the device does not keep."""
    plain = [
        sample
        for sample in OPS[name].samples()
        if not any(isinstance(value, Described) for value in sample.args.values())
        and not (name == "Gemm" and sample.args["beta"] != 0)
        and sum(value.numel() for value in sample.args.values() if isinstance(value, torch.Tensor)) < 20_000
    ]
    return plain[:: max(1, len(plain) // 6)]


def on_cuda(args: dict[str, Any]) -> SimpleNamespace:
    """The arguments with tensors on the device; one tensor stays one."""
    made: dict[int, Any] = {}
    for value in args.values():
        if isinstance(value, torch.Tensor) and id(value) not in made:
            made[id(value)] = put(value)
    return SimpleNamespace(**{key: made.get(id(value), value) for key, value in args.items()})


def back(given: SimpleNamespace) -> dict[str, Any]:
    return {key: got(value) if isinstance(value, ic.Tensor) else value for key, value in vars(given).items()}


@pytest.mark.parametrize("name", CALLS)
def test_op(name: str) -> None:
    """Against float64; then recorded and not run, captured, and replayed twice with the bits of the eager call."""
    op = OPS[name]
    for sample in samples(name):
        before, given = clone(sample.args), on_cuda(dict(sample.args))
        CALLS[name](given)
        eager = back(given)
        after = {key: eager[key].reshape(before[key].shape) if key in op.outputs else before[key] for key in before}
        check(op, sample, before, after, on_cuda=True)
        recorded = on_cuda(dict(sample.args))
        with ic.graph(CUDA) as g:
            CALLS[name](recorded)
        untouched = back(recorded)
        for key in op.outputs:
            assert torch.equal(bits(untouched[key]), bits(before[key])), f"{sample.name}: {key}"
        empty = all(eager[key].numel() == 0 for key in op.outputs)
        assert "on NVIDIA:0, captured" in g.report() or empty, g.report()
        for _ in range(2):
            fresh = on_cuda(dict(sample.args))
            for key, value in vars(recorded).items():
                if isinstance(value, ic.Tensor):
                    value.copy_(getattr(fresh, key))
            g.run()
            replayed = back(recorded)
            for key in op.outputs:
                assert torch.equal(bits(replayed[key]), bits(eager[key])), f"{sample.name}: {key}"


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    """Without `out`: on the device of the arguments, the bits of the call with `out`."""
    sample = next(one for one in samples(name) if one.args.get("seq_lens") is None or (one.args["seq_lens"] > 0).all())
    given = on_cuda(dict(sample.args))
    CALLS[name](given)
    made = as_tuple(RESULTS[name](on_cuda(dict(sample.args))))
    for result, key in zip(made, OPS[name].outputs):
        want = got(getattr(given, key))
        assert result.device == CUDA and result.is_contiguous()
        if got(result).dtype == want.dtype:
            assert torch.equal(bits(got(result)), bits(want)), key


def test_a_block_of_a_model() -> None:
    """Ops on each other's results, whose memory is the graph's, run from another thread as well."""
    layers = {"up": ic.nn.Linear(32, 64), "gate": ic.nn.Linear(32, 64), "down": ic.nn.Linear(64, 32)}
    for layer in layers.values():
        layer.load_state_dict({"weight": ic.from_torch(torch.randn(*layer.weight.shape))})
    weights = {name: layer.weight.to(CUDA) for name, layer in layers.items()}
    norm = ours(32)

    def block(x: ic.Tensor) -> ic.Tensor:
        h = F.rms_norm(x, [32], norm)
        return x + F.linear(F.swiglu(F.linear(h, weights["up"]), F.linear(h, weights["gate"])), weights["down"])

    x = ic.zeros([5, 32], dtype=ic.float32, device=CUDA)
    ic.start_graph_recording("cuda:0")
    y = block(block(x))
    g = ic.stop_graph_recording()
    assert g is not None and "captured" in g.report() and "fused: add + rms_norm" in g.report()
    for _ in range(2):
        x.copy_(ours(5, 32))
        g.run()
        assert torch.equal(got(y), got(block(block(x))))

    def elsewhere() -> None:
        g.run()
        ic.sync_stream()

    x.copy_(ours(5, 32))
    ic.sync_stream()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert torch.equal(got(y), got(block(block(x))))


# ---- recording ----


def test_what_cannot_be_recorded() -> None:
    x, host = ours(4), ic.ones([4], dtype=ic.float32, device=CPU)
    ic.set_device(CUDA)
    with ic.graph() as g:
        y = x + x
        with pytest.raises(RuntimeError, match=r"copy to the host cannot be recorded: copy after Graph::run\(\)"):
            y.to(CPU)
        with pytest.raises(RuntimeError, match=r"must be on NVIDIA:0, whose graph is recorded, got CPU:0"):
            host + host
        ic.set_device(CUDA)
        with pytest.raises(RuntimeError, match="cannot be read while a graph is recorded"):
            x.debug()
        z = y + y
    with pytest.raises(RuntimeError, match="only recorded"):
        y.to(CPU)
    g.run()
    assert torch.equal(got(z), 4 * got(x))
    ic.set_device(CPU)
    with ic.graph(), pytest.raises(RuntimeError) as error:
        x + x
    assert str(error.value).endswith(
        "must be on CPU:0, whose graph is recorded, got NVIDIA:0 (torch_infini.runtime.record on CUDA records torch's "
        "ops alone)"
    )
    ic.set_device(CUDA)


def test_a_copy_from_the_host_is_recorded() -> None:
    """It takes what the host's tensor holds at each run."""
    host = torch.arange(4.0)
    x = ic.zeros([4], dtype=ic.float32, device=CUDA)
    source = ic.from_torch(host)
    with ic.graph(CUDA) as g:
        x.copy_(source)
        y = x + x
    for value in (1.0, 5.0):
        host.fill_(value)
        g.run()
        ic.sync_stream()
        assert torch.equal(got(y), full(4, 2 * value))


def test_a_host_function_that_cannot_be_captured(capfd: pytest.CaptureFixture[str]) -> None:
    """The graph runs op by op, and says so and why."""
    x = put(torch.ones(3))
    runs: list[bool] = []

    def function() -> None:
        ic.sync_stream()  # refused while the stream is captured
        runs.append(True)

    with ic.graph(CUDA) as g:
        ic.add(x, x, out=x)
        raw.add_host_operator(function, "waits")
        ic.add(x, x, out=x)
    assert not runs
    g.run()
    assert torch.equal(got(x), full(3, 4.0)) and runs == [True]
    said = capfd.readouterr().err.replace("\n", " ")
    assert "infinicore: warning: a graph of 3 ops on NVIDIA:0 runs op by op, because it could not be captured" in said
    assert g.report().splitlines() == [
        "graph of 3 ops on NVIDIA:0, run op by op, because it could not be captured: waits: RuntimeError: "
        "infinirtStreamSynchronize: stream must not be captured at the time",
        "  add",
        "  waits",
        "  add",
    ]


# ---- streams and events ----


def test_streams_and_events() -> None:
    stream = ic.get_stream()
    assert stream and stream == ic.get_stream()
    others: list[int] = []
    thread = threading.Thread(target=lambda: (ic.set_device(CUDA), others.append(ic.get_stream())))
    thread.start()
    thread.join()
    assert others and others[0] != stream
    start, end = (ic.DeviceEvent(enable_timing=True, device=CUDA) for _ in range(2))
    assert start.device == CUDA and not start.is_recorded
    start.record()
    x = ours(64, 64)
    y = x @ x
    end.record(stream)
    end.synchronize()
    assert end.query() and start.elapsed_time(end) >= 0
    start.wait()
    end.wait(stream)
    ic.sync_device()
    assert torch.allclose(got(y), got(x) @ got(x), atol=1e-3)
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        start.elapsed_time(ic.DeviceEvent(device=CUDA))
    host = ic.DeviceEvent(enable_timing=True, device=CPU)
    with pytest.raises(RuntimeError, match="must be of one device"):
        host.record(stream)


def test_devices() -> None:
    assert ic.get_device_count("cuda") == ic.get_device_count("nvidia") == DEVICES
    assert ic.device._from_infinicore_device(ic.get_device()) == CUDA
    assert ic.backend_of("add", ic.float32, "cuda") == "infini"
    missing = f"cuda:{DEVICES}"
    for call in (
        lambda: ic.ones([1], dtype=ic.float32, device=missing),
        lambda: ic.set_device(missing),
        lambda: ours(2).to(missing),
        lambda: ic.context.memory_stats(missing),
        lambda: ic.DeviceEvent(device=missing),
        lambda: ic.start_graph_recording(missing),
    ):
        with pytest.raises(KeyError, match=f'there is no device "{missing}": found {DEVICES} of type cuda'):
            call()
    with pytest.raises(RuntimeError, match=r"infinicore::add: b must be on NVIDIA:0 as c is, got CPU:0"):
        ic.add(ours(3), ic.ones([3], dtype=ic.float32, device=CPU))


@two_devices
def test_two_devices() -> None:
    """An op runs where its tensors are, which becomes the current device; copies go between them; nothing mixes."""
    second = ic.device("cuda:1")
    source = torch.randn(5, 7)
    x, y = put(source), put(source, second)
    assert y.device == second
    both = x.to(second) + y
    assert both.device == second and ic.device._from_infinicore_device(ic.get_device()) == second
    assert torch.equal(got(both), 2 * source)
    assert torch.equal(got(y.permute([1, 0]).to(CUDA)), source.t())
    with pytest.raises(RuntimeError, match=r"infinicore::mul: b must be on NVIDIA:0 as c is, got NVIDIA:1"):
        x * y
    with ic.graph(second) as g:
        z = y + y
        with pytest.raises(RuntimeError, match="must be on NVIDIA:1, whose graph is recorded, got NVIDIA:0"):
            x + x
        ic.set_device(second)
    ic.set_device(CUDA)
    g.run()
    assert torch.equal(got(z), 2 * source)
    used = [ic.context.memory_stats(f"cuda:{i}")["in_use"] for i in range(2)]
    extra = ic.empty([1 << 20], dtype=ic.float32, device=second)
    now = [ic.context.memory_stats(f"cuda:{i}")["in_use"] for i in range(2)]
    assert now == [used[0], used[1] + (4 << 20)] and extra.device == second


# ---- memory ----


def test_memory_statistics() -> None:
    ic.context.trim_memory(CUDA)
    before = ic.context.memory_stats(CUDA)
    assert before["cached"] == 0
    x = ic.empty([1 << 20], dtype=ic.float32, device=CUDA)
    during = ic.context.memory_stats(CUDA)
    assert during["in_use"] - before["in_use"] == 4 << 20
    assert during["allocations"] - before["allocations"] == 1
    address = x.data_ptr()
    del x
    after = ic.context.memory_stats(CUDA)
    assert (after["in_use"], after["cached"]) == (before["in_use"], 4 << 20)
    again = ic.empty([1 << 20], dtype=ic.float32, device=CUDA)
    assert again.data_ptr() == address
    assert ic.context.memory_stats(CUDA)["cache_hits"] == before["cache_hits"] + 1
    del again
    ic.context.trim_memory("cuda:0")
    assert ic.context.memory_stats(CUDA)["cached"] == 0
    assert ic.context.memory_stats(CUDA)["peak_in_use"] >= before["in_use"] + (4 << 20)


def test_out_of_memory() -> None:
    """The sentence names bytes asked, in use and cached, after the cache was given back; the next call works."""
    held = ic.empty([1 << 18], dtype=ic.float32, device=CUDA)
    del held
    assert ic.context.memory_stats(CUDA)["cached"] >= 1 << 20
    sentence = (
        r"infinicore::context: 1099511627776 bytes \(1048576 MiB\) of memory of NVIDIA:0 cannot be had: .* are in use, "
        "0 bytes are cached after the cache was trimmed"
    )
    with pytest.raises(RuntimeError, match=sentence):
        ic.empty([1 << 38], dtype=ic.float32, device=CUDA)
    assert ic.context.memory_stats(CUDA)["cached"] == 0
    with ic.graph(CUDA) as g:
        with pytest.raises(RuntimeError, match="cannot be had"):
            ic.empty([1 << 38], dtype=ic.float32, device=CUDA)
        y = ic.ones([4], dtype=ic.float32, device=CUDA)
    g.run()
    assert torch.equal(got(y), torch.ones(4))


def test_trimming_leaves_a_graph_its_memory() -> None:
    x = ours(1 << 12)
    with ic.graph(CUDA) as g:
        y = F.silu(F.silu(x + x) + x)
    in_use = ic.context.memory_stats(CUDA)["in_use"]
    ic.context.trim_memory(CUDA)
    others = [ours(1 << 12) for _ in range(8)]
    g.run()
    assert torch.equal(got(y), got(F.silu(F.silu(x + x) + x)))
    del others
    assert ic.context.memory_stats(CUDA)["in_use"] == in_use
    del g
    assert torch.equal(got(y), got(F.silu(F.silu(x + x) + x)))  # it outlives its graph
    del y
    assert ic.context.memory_stats(CUDA)["in_use"] == in_use - 2 * (4 << 12)  # two blocks served all three


def test_replays_do_not_grow() -> None:
    x = ours(64)
    with ic.graph(CUDA) as g:
        y = F.silu(x + x)
    g.run()
    stats = ic.context.memory_stats(CUDA)
    for _ in range(2000):
        g.run()
    ic.sync_stream()
    now = ic.context.memory_stats(CUDA)
    assert (now["in_use"], now["allocations"]) == (stats["in_use"], stats["allocations"])
    assert torch.equal(got(y), got(F.silu(x + x)))


# ---- what torch computes ----

OF_TORCH = {
    "exp2": lambda x: ic.exp2(x),
    "clone": lambda x: ic.clone(x),  # our kernel, through torch's op
    "sort": lambda x: ic.sort(x),
    "full": lambda x: ic.full((2, 3), 1.0, device="cuda"),
    "nn.functional.softplus": lambda x: F.softplus(x),
}


@emulated
@pytest.mark.parametrize("name", OF_TORCH)
def test_what_torch_computes_is_refused(name: str) -> None:
    """Where the devices are ours alone; eagerly and recorded."""
    x = ours(4)
    sentence = (
        f"^infinicore.{name}: torch computes this, so its tensors must be on the CPU, since the CUDA of this build is "
        "emulated, got one on cuda$"
    )
    with pytest.raises(RuntimeError, match=sentence):
        OF_TORCH[name](x)
    with ic.graph(CUDA) as g:
        with pytest.raises(RuntimeError, match=sentence):
            OF_TORCH[name](x)
        y = x + x
    g.run()
    assert torch.equal(got(y), 2 * got(x))
    with pytest.raises(RuntimeError, match="torch computes this"):
        _bridge.record_or_run(lambda: None, [x])


@gpu
@pytest.mark.parametrize("name", OF_TORCH)
def test_what_torch_computes(name: str) -> None:
    """On torch's memory views of the same device, on the context's stream, behind our ops and before others."""
    x = ours(1 << 12)
    result = as_tuple(OF_TORCH[name](x + x))[0]
    expected = as_tuple(OF_TORCH[name](put(2 * got(x)).to(CPU)))[0]
    assert result.device == CUDA
    torch.testing.assert_close(got(result), got(expected))


@gpu
def test_what_torch_computes_in_a_graph(capfd: pytest.CaptureFixture[str]) -> None:
    """The graph runs op by op, says why, and takes the values of each run."""
    x = ours(1 << 12)
    with ic.graph(CUDA) as g:
        y = ic.exp2(x + x) + x
    assert g.report().splitlines() == [
        "graph of 3 ops on NVIDIA:0, run op by op, because it could not be captured: torch.exp2: RuntimeError: an op "
        "that torch computes is run anew each time, not captured",
        "  add",
        "  torch.exp2",
        "  add",
    ]
    assert "runs op by op" in capfd.readouterr().err
    for _ in range(3):
        x.copy_(ours(1 << 12))
        g.run()
        torch.testing.assert_close(got(y), torch.exp2(2 * got(x)) + got(x))


@gpu
def test_torch_tensors() -> None:
    """Both ways without a copy, ordered behind what torch's current stream has queued."""
    t = torch.zeros(1 << 20, device="cuda")
    torch.cuda._sleep(20_000_000)
    t.fill_(3)
    x = ic.from_torch(t)
    assert x.data_ptr() == t.data_ptr() and x.device == CUDA
    assert torch.equal(got(x + x), full(1 << 20, 6.0))
    view = torch.from_dlpack(x + x)
    assert view.is_cuda and torch.equal(view.cpu(), full(1 << 20, 6.0))
