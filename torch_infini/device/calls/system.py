"""Everyday calls around tensors: files, sharing, random numbers, streams, memory, transforms, graphs, threads."""

from __future__ import annotations

import copy
import gc
import io
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .. import backing, wrap
from .checks import DEVICE, bits, data, everyday, on_both, refused, require, same, same_tensor

# torch.infini, which is missing in torch's stubs.
device_module: Any = torch.get_device_module


def equal(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bits, on whatever devices."""
    return got.dtype == want.dtype and got.shape == want.shape and torch.equal(bits(got), bits(want))


# ---- saving ----


@everyday("saving")
def save_and_load() -> None:
    """torch.save and torch.load of tensors, views that share memory, modules' and optimisers' states."""
    x = data(4, 5).to(DEVICE)
    layer = torch.nn.Linear(3, 2).to(DEVICE)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(data(4, 3).to(DEVICE)).sum().backward()
    optimizer.step()
    states = {"layer": layer.state_dict(), "optimizer": optimizer.state_dict(), "x": x, "rows": x[1:3]}
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    same_tensor(loaded["x"], x.cpu())
    require(loaded["rows"].data_ptr() == loaded["x"][1].data_ptr(), "views must share memory when they are loaded")
    same_tensor(loaded["layer"]["weight"], layer.weight.detach().cpu())
    same_tensor(loaded["optimizer"]["state"][0]["exp_avg"], optimizer.state[layer.weight]["exp_avg"].cpu())


@everyday("saving")
def map_location() -> None:
    """map_location onto infini, onto the CPU and by a function; mmap=True."""
    with tempfile.TemporaryDirectory() as folder:
        here, there = Path(folder) / "here.pt", Path(folder) / "there.pt"
        x = data(4, 5)
        torch.save(x, there)
        torch.save(x.to(DEVICE), here)
        same_tensor(torch.load(there, map_location=DEVICE), x)
        same_tensor(torch.load(there, map_location=torch.device(DEVICE, 0), mmap=True), x)
        for place in ("cpu", lambda storage, location: storage.cpu(), {"infini:0": "cpu"}):
            loaded = torch.load(here, map_location=place)
            require(loaded.device.type == "cpu" and equal(loaded, x), "map_location must lead to the CPU")


@everyday("saving")
def deep_copy() -> None:
    """copy.deepcopy and pickle of tensors, parameters, modules and storages."""
    x = data(4, 5).to(DEVICE)
    pair = copy.deepcopy([x, x[1]])
    same(pair, [x.cpu(), x[1].cpu()])
    require(pair[1].data_ptr() == pair[0][1].data_ptr(), "deepcopy must keep what shares memory")
    require(pair[0].data_ptr() != x.data_ptr(), "deepcopy must copy")
    layer = copy.deepcopy(torch.nn.Linear(3, 2).to(DEVICE))
    require(isinstance(layer.weight, torch.nn.Parameter) and layer.weight.device.type == DEVICE, "parameters")
    storage = copy.deepcopy(x.untyped_storage())
    require(storage.device.type == DEVICE and storage.data_ptr() != x.data_ptr(), "deepcopy must copy storages")


@everyday("saving")
def safetensors() -> str | None:
    """safetensors: save_file of infini tensors, load_file onto the CPU, then onto infini."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file, save_file
    except ImportError:
        return "safetensors is not installed"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        x = data(4, 5).to(DEVICE)
        save_file({"x": x}, path)
        same_tensor(load_file(path)["x"].to(DEVICE), x.cpu())
        try:
            same_tensor(load_file(path, device=DEVICE)["x"], x.cpu())
        except SafetensorError as error:
            return f"safetensors itself refuses load_file(device='infini'), so x is loaded and moved: {error}"
    return None


# ---- sharing ----


@everyday("sharing")
def dlpack_out() -> None:
    """An infini tensor through DLPack, to a consumer of infini tensors, without a copy."""
    x = data(4, 5).to(DEVICE)
    y = torch.utils.dlpack.from_dlpack(x)
    same_tensor(y, x.cpu())
    require(y.data_ptr() == x.data_ptr(), "DLPack must share memory")
    y[0] = 7
    require(bool((x[0] == 7).all()), "a write must be seen on the other side")


@everyday("sharing")
def dlpack_in() -> None:
    """Memory of another library (a numpy array) becomes an infini tensor without a copy, and is kept alive."""
    if backing() != "cpu":
        same_tensor(torch.utils.dlpack.from_dlpack(data(3, 4).numpy()).to(DEVICE), data(3, 4))
        return
    numpy = data(3, 4).numpy().copy()
    x = wrap(torch.utils.dlpack.from_dlpack(numpy))
    numpy[0] = 5
    require(bool((x[0] == 5).all()), "the memory must be shared")
    want = torch.from_numpy(numpy.copy())
    del numpy
    gc.collect()
    same_tensor(x * 1, want)


@everyday("sharing")
def resizing() -> None:
    """resize_, set_, untyped_storage().resize_, x.data = y: the device's memory follows."""

    def use(device: str) -> Any:
        x = torch.arange(6.0, device=device)
        view = x[:3]
        x.resize_(40)[6:] = 1
        view.add_(10)
        y = torch.empty(0, device=device)
        y.set_(x.untyped_storage(), 2, (3, 2), (2, 1))
        z = torch.zeros(2, device=device)
        z.data = data(3).to(device)
        x.untyped_storage().resize_(4 * 64)
        return x, y + 1, view, z, x.untyped_storage().nbytes()

    on_both(use)


# ---- random numbers ----


@everyday("random numbers")
def seeds() -> None:
    """torch.manual_seed decides rand, randn, randint, randperm, bernoulli and multinomial."""

    def draw(device: str) -> Any:
        torch.manual_seed(7)
        first = torch.rand(5, device=device), torch.randn(5, device=device), torch.randint(0, 9, (5,), device=device)
        even = torch.full((8,), 0.5, device=device)
        return (
            *first,
            torch.randperm(9, device=device),
            even.bernoulli(),
            even.multinomial(3),
            torch.empty_like(even).uniform_(),
        )

    same(draw(DEVICE), tuple(drawn.cpu() for drawn in draw(DEVICE)))
    if backing() == "cpu":
        on_both(draw)


@everyday("random numbers")
def generators() -> None:
    """torch.Generator("infini"): seeds, state, clones; a CPU generator raises."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    state = generator.get_state()
    first = torch.randn(6, generator=generator, device=DEVICE)
    second = torch.randn(6, generator=generator, device=DEVICE)
    generator.set_state(state)
    require(equal(torch.randn(6, generator=generator, device=DEVICE), first), "set_state must bring the numbers back")
    require(not equal(first, second) and generator.initial_seed() == 3, "the state must move on")
    wrong = torch.Generator().manual_seed(3)
    refused(
        RuntimeError,
        "Expected a 'infini' device type for generator",
        lambda: torch.rand(2, generator=wrong, device=DEVICE),
    )


@everyday("random numbers")
def random_state() -> None:
    """torch.infini.get_rng_state, set_rng_state, manual_seed, initial_seed, seed, and torch.random.fork_rng."""
    module = device_module(DEVICE)
    module.manual_seed(5)
    require(module.initial_seed() == 5, "initial_seed must be what manual_seed set")
    state = module.get_rng_state()
    first = torch.rand(4, device=DEVICE)
    module.set_rng_state(state)
    require(equal(torch.rand(4, device=DEVICE), first), "set_rng_state must bring the numbers back")
    module.set_rng_state(state)
    with torch.random.fork_rng([0], device_type=DEVICE):
        torch.rand(9, device=DEVICE)
    require(equal(torch.rand(4, device=DEVICE), first), "fork_rng must restore the state")
    module.seed()
    require(len(module.get_rng_state_all()) == module.device_count(), "a state for each device")


@everyday("random numbers")
def dropout() -> None:
    """Dropout in training draws from the device's generator, and does nothing in evaluation."""
    x, layer = torch.ones(1000, device=DEVICE), torch.nn.Dropout(0.25)
    torch.manual_seed(1)
    first = layer(x)
    kept = float(first.ne(0).float().mean())
    require(0.65 < kept < 0.85, f"three quarters must be kept, got {kept}")
    torch.manual_seed(1)
    require(equal(layer(x), first) and not equal(layer(x), first), "the seed must decide")
    same_tensor(layer.eval()(x), torch.ones(1000))


# ---- streams ----


@everyday("streams")
def streams() -> None:
    """torch.Stream and torch.infini.Stream: make, enter, wait for each other, synchronize."""
    module = device_module(DEVICE)
    x = data(5).to(DEVICE)
    side = torch.Stream(DEVICE)
    before = torch.accelerator.current_stream()
    with side:
        require(torch.accelerator.current_stream() == side, "a stream that is entered must be the current one")
        y = x + 1
        y.record_stream(side)
    require(torch.accelerator.current_stream() == before, "the stream before must be current again")
    before.wait_stream(side)
    side.synchronize()
    require(side.query(), "a synchronized stream must be idle")
    same_tensor(y, data(5) + 1)
    with module.stream(module.Stream()):
        same_tensor(x * 2, data(5) * 2)
    module.synchronize()


@everyday("streams")
def events() -> None:
    """torch.Event and torch.infini.Event: record, query, wait, elapsed_time."""
    start, end = (torch.Event(DEVICE, enable_timing=True) for _ in range(2))
    start.record()
    torch.randn(64, 64, device=DEVICE).matmul(torch.randn(64, 64, device=DEVICE))
    end.record()
    end.synchronize()
    require(start.query() and end.query(), "synchronized events must be done")
    require(start.elapsed_time(end) >= 0, "the time between must not be negative")
    event = device_module(DEVICE).Event()
    event.record()
    torch.Stream(DEVICE).wait_event(event)
    event.synchronize()


@everyday("streams")
def accelerator() -> None:
    """torch.accelerator and torch.infini: availability, devices, synchronize, indices that are out of range."""
    module = device_module(DEVICE)
    require(torch.accelerator.is_available() and module.is_available(), "the device must be available")
    current = torch.accelerator.current_accelerator()
    require(current is not None and current.type == DEVICE, f"the accelerator must be infini, got {current}")
    require(torch.accelerator.device_count() == module.device_count() >= 1, "there must be a device")
    require(torch.accelerator.current_device_index() == module.current_device() == 0, "device 0 must be current")
    with module.device(0):
        torch.accelerator.synchronize()
    require(module.is_bf16_supported(), "bfloat16 must be supported")
    refused(RuntimeError, "out of range", lambda: torch.empty(1, device="infini:7"))


# ---- memory ----


@everyday("memory")
def memory_accounting() -> None:
    """memory_allocated, peaks, statistics, empty_cache and get_memory_info follow what is allocated."""
    accelerator = torch.accelerator
    gc.collect()
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    x = torch.empty(1 << 20, device=DEVICE)
    y = x + 1
    grown = accelerator.memory_allocated() - before
    require(grown >= 2 * (4 << 20), f"two tensors of 4 MiB must count, got {grown}")
    del x, y
    left = accelerator.memory_allocated() - before
    require(left == 0, f"freed tensors must not count, got {left}")
    peak = accelerator.max_memory_allocated() - before
    require(peak >= 2 * (4 << 20), f"the peak must count both, got {peak}")
    require(accelerator.memory_stats()["allocated_bytes.all.peak"] == peak + before, "memory_stats must agree")
    accelerator.empty_cache()
    free, total = accelerator.get_memory_info()
    require(0 < free <= total, f"free memory must be within all, got {free} of {total}")
    require(device_module(DEVICE).memory_allocated() == accelerator.memory_allocated(), "torch.infini must agree")


@everyday("memory")
def pin_memory() -> None:
    """pin_memory, is_pinned, copies from pinned memory, and DataLoader(pin_memory=True)."""
    x = data(4, 5).pin_memory()
    require(x.is_pinned() and not data(2).is_pinned(), "is_pinned must tell pinned memory")
    require(torch.empty(3, pin_memory=True).is_pinned(), "torch.empty must pin")
    same_tensor(x.to(DEVICE, non_blocking=True), data(4, 5))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data(6, 2)), 3, pin_memory=True)
    batches = [batch for (batch,) in loader]
    require(all(batch.is_pinned() for batch in batches), "batches of the loader must be pinned")
    same_tensor(torch.cat([batch.to(DEVICE) for batch in batches]), data(6, 2))


@everyday("memory")
def no_leak() -> None:
    """A thousand steps forward and backward leave no memory behind."""
    layer, x = torch.nn.Linear(16, 16).to(DEVICE), data(8, 16).to(DEVICE)

    def steps(count: int) -> int:
        for _ in range(count):
            layer(x).relu().sum().backward()
        layer.zero_grad()
        gc.collect()
        return torch.accelerator.memory_allocated()

    before = steps(10)
    after = steps(1000)
    require(after == before, f"allocated memory must stay at {before} bytes, got {after}")


# ---- transforms ----


@everyday("transforms")
def vmap() -> None:
    """torch.vmap over products, norms and masks, nested."""

    def use(device: str) -> Any:
        x, y = data(4, 5).to(device), data(4, 5, seed=2).to(device)
        every = torch.vmap(torch.vmap(torch.mul, (None, 0)), (0, None))
        return torch.vmap(torch.dot)(x, y), torch.vmap(lambda row: row.softmax(0))(x), every(x[:, 0], y)

    on_both(use)


@everyday("transforms")
def functional_gradients() -> None:
    """torch.func: grad, jacrev, jvp, vmap of grad, functional_call; forward-mode autograd."""

    def use(device: str) -> Any:
        x = data(4).to(device)
        loss = lambda v: (v.sin() * v).sum()
        each = torch.vmap(torch.func.grad(loss))(data(3, 4).to(device))
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 2).to(device)
        scaled = {name: p.detach() * 2 for name, p in layer.named_parameters()}
        called = torch.func.functional_call(layer, scaled, (x,))
        return torch.func.grad(loss)(x), torch.func.jacrev(torch.exp)(x), torch.func.jvp(loss, (x,), (x,)), each, called

    on_both(use)


# ---- graphs ----


class FeedForward(torch.nn.Module):
    """A small feed-forward block, to be compiled and exported."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def new_block(device: str) -> FeedForward:
    torch.manual_seed(0)
    return FeedForward().to(device)


@everyday("graphs")
def export() -> None:
    """torch.export of a module on infini; the program runs there."""
    x = data(3, 6)
    program = torch.export.export(new_block(DEVICE), (x.to(DEVICE),))
    same_tensor(program.module()(x.to(DEVICE)).detach(), new_block("cpu")(x).detach())


@everyday("graphs")
def fake_tensors() -> None:
    """FakeTensorMode: factories, ops and modules on infini without memory."""
    with FakeTensorMode():
        x = torch.empty(1 << 40, 4, device=DEVICE)
        y = (x[:3] @ torch.empty(4, 5, device=DEVICE)).sum(0)
        require(y.shape == (5,) and y.device.type == DEVICE, f"shape [5] on infini must come, got {y}")
        layer = torch.nn.Linear(4, 2, device=DEVICE)
        require(layer(x[:7]).shape == (7, 2), "modules must work")


@everyday("graphs")
def compile_eager() -> None:
    """torch.compile(backend="eager"): one graph, no break, with gradients."""
    compiled_by("eager")


@everyday("graphs")
def compile_aot() -> None:
    """torch.compile(backend="aot_eager"): ahead-of-time autograd, with gradients."""
    compiled_by("aot_eager")


def compiled_by(backend: str) -> None:
    def use(device: str) -> Any:
        block, x = new_block(device), data(3, 6).to(device).requires_grad_()
        call = torch.compile(block, backend=backend, fullgraph=True) if device == DEVICE else block
        y = call(x)
        y.sum().backward()
        return y.detach(), x.grad, [p.grad for p in block.parameters()]

    try:
        on_both(use)
    finally:
        torch._dynamo.reset()


@everyday("graphs")
def profiler() -> None:
    """torch.profiler over forward and backward: ops by name, shapes, a table, a chrome trace."""
    block, x = new_block(DEVICE), data(3, 6).to(DEVICE)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        block(x).sum().backward()
    averages = profile.key_averages()
    found = {event.key for event in averages}
    require({"aten::linear", "aten::silu", "aten::sum"} <= found, f"the ops must be in the profile, got {found}")
    require("aten::silu" in averages.table(sort_by="cpu_time_total"), "the table must have the ops")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        require("aten::linear" in path.read_text(), "the trace must have the ops")


# ---- threads ----


@everyday("threads")
def four_threads() -> None:
    """Four threads compute, allocate and run backward at the same time, each with the results of running alone."""
    x = data(16, 16)
    want = torch.autograd.functional.jvp(lambda v: v.tanh() @ v, x, x)[1]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(25):
                here = x.to(DEVICE).requires_grad_()
                (here.tanh() @ here).sum().backward()
                moved = torch.autograd.functional.jvp(lambda v: v.tanh() @ v, x.to(DEVICE), x.to(DEVICE))[1]
                same_tensor(moved, want)
        except BaseException as error:  # re-raised in the caller's thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
