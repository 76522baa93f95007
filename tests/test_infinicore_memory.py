"""infinicore's memory: views both ways with torch, numpy and DLPack, who keeps it alive, the GIL, and leaks."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy
import pytest
import torch

import torch_infini.compat.infinicore as ic
from support.fresh_python import run_python
from torch_infini.compat.infinicore import _bridge, utils
from torch_infini.compat.infinicore.lib import _infinicore as raw

ROOT = Path(__file__).resolve().parent.parent
CPU = ic.device("cpu")
DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bytes that are numbers of the dtype."""
    size = torch.Size(shape).numel()
    if dtype == torch.bool:
        return (torch.arange(size) % 3 == 0).view(shape)
    return (torch.arange(size) % 100).to(dtype).view(shape)


# ---- torch ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_and_back(dtype: torch.dtype) -> None:
    """The same memory, strides and dtype, in whatever layout; what one side writes the other reads."""
    base = numbers(dtype, 4, 6, 5)
    views = (
        base,
        base.transpose(0, 2),
        base[:, ::2],
        base[1:, 2],
        base[:0],
        base[:, :1].expand(4, 3, 5),
        base[0, 0, 0],
    )
    for view in views:
        x = ic.from_torch(view)
        assert x.data_ptr() == view.data_ptr()
        assert x.shape == list(view.shape) and x.stride() == list(view.stride())
        assert utils.to_torch_dtype(x.dtype) == dtype and x.device == CPU
        for back in (torch.from_dlpack(x), _bridge.as_torch(x), torch.utils.dlpack.from_dlpack(x.__dlpack__())):
            assert back.dtype == dtype and back.shape == view.shape and back.data_ptr() == view.data_ptr()
            assert back.numel() < 2 or back.stride() == view.stride()
            assert torch.equal(bytes_of(back), bytes_of(view))
    torch.from_dlpack(ic.from_torch(base))[0] = 1
    assert torch.equal(base[0], torch.ones_like(base[0]))


def test_float8_and_complex32() -> None:
    """What torch has and computes little with."""
    for dtype in (torch.float8_e4m3fn, torch.complex32):
        view = torch.zeros(4, 2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
        x = ic.from_torch(view)
        assert utils.to_torch_dtype(x.dtype) == dtype
        back = _bridge.as_torch(x)
        assert back.dtype == dtype and back.data_ptr() == view.data_ptr()
    with pytest.raises(BufferError, match="no counterpart of dtype"):
        raw.empty([2], raw.DataType.C16, raw.Device()).to_dlpack()


def watched_ones() -> tuple[torch.Tensor, weakref.ref[Any]]:
    """A tensor, and a reference that dies with its memory."""
    memory = numpy.ones(3, dtype=numpy.float32)  # which torch's storage holds
    return torch.from_numpy(memory), weakref.ref(memory)


def test_from_torch_keeps_the_memory() -> None:
    source, alive = watched_ones()
    x = ic.from_torch(source)
    assert x._torch_ref is source
    view = x.narrow(0, 1, 2)
    del source, x
    gc.collect()
    assert alive() is not None and torch.equal(torch.from_dlpack(view), torch.ones(2))
    del view
    gc.collect()
    assert alive() is None


def test_from_torch_outlives_a_change_of_the_storage() -> None:
    """What the torch tensor gets later is not followed, and what it had is not freed."""
    layer = torch.nn.Linear(300, 300)
    before = layer.weight.detach().clone()
    x, y = ic.from_torch(layer.weight), ic.from_torch(layer.bias)
    ic.start_graph_recording()
    doubled = x + x
    graph = ic.stop_graph_recording()
    layer.half()
    layer.bias.data = torch.zeros(300)
    gc.collect()
    filler = [torch.full((300, 300), 7.0) for _ in range(8)]  # takes the memory, if it was freed
    assert numpy.array_equal(x.to_numpy(), before.numpy()) and not numpy.array_equal(y.to_numpy(), numpy.zeros(300))
    graph.run()
    assert torch.equal(_bridge.as_torch(doubled), 2 * before) and len(filler) == 8


def test_as_torch_keeps_the_memory() -> None:
    before = ic.context.memory_stats("cpu")["in_use"]
    x = ic.ones([1 << 20], dtype=ic.float32, device=CPU)
    view = _bridge.as_torch(x)
    del x
    held = ic.context.memory_stats("cpu")["in_use"]
    assert held >= before + (4 << 20)
    assert view.sum() == 1 << 20
    del view
    assert ic.context.memory_stats("cpu")["in_use"] == before


@pytest.mark.parametrize(
    ("tensor", "error", "sentence"),
    [
        (numpy.zeros(3), TypeError, "torch_tensor must be a torch.Tensor, got a numpy.ndarray"),
        (torch.eye(3).to_sparse(), ValueError, "torch_tensor must be a strided tensor on the CPU or a CUDA device"),
        (torch.empty(3, device="meta"), ValueError, "got layout torch.strided on meta"),
        (torch.ones(3, dtype=torch.complex64).conj(), ValueError, "must not be a lazy conjugate"),
        (torch.zeros(3).to(torch.float8_e5m2), ValueError, "Unsupported torch dtype"),
    ],
    ids=["numpy", "sparse", "meta", "conjugate", "float8_e5m2"],
)
def test_refused_tensors(tensor: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        ic.from_torch(tensor)


# ---- numpy ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numpy_views(dtype: torch.dtype) -> None:
    """asarray and from_dlpack show the same memory; bfloat16 as ml_dtypes has it, and from_dlpack has none of it."""
    view = numbers(dtype, 4, 6).t()[1:, ::2]
    x = ic.from_torch(view)
    array = numpy.asarray(x)
    assert array.dtype == utils.infinicore_to_numpy_dtype(x.dtype)
    assert array.__array_interface__["data"][0] == view.data_ptr()
    assert (array.astype(complex) == view.to(torch.complex128).numpy()).all()
    assert array.shape == view.shape and array.flags.writeable
    if dtype != torch.bfloat16:
        other = numpy.from_dlpack(x)
        assert other.__array_interface__["data"][0] == view.data_ptr() and (other == array).all()


def test_numpy_copies() -> None:
    x = ic.from_torch(torch.arange(6.0).view(2, 3))
    assert numpy.array(x).__array_interface__["data"][0] != x.data_ptr()
    assert numpy.asarray(x, dtype=numpy.float64).dtype == numpy.float64
    with pytest.raises(ValueError, match="without a copy"):
        x.__array__(numpy.float64, copy=False)
    array = numpy.asarray(x)
    del x
    gc.collect()
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_from_numpy(dtype: torch.dtype) -> None:
    """A contiguous copy of any layout, byte order and dtype."""
    array = numpy.asarray(ic.from_torch(numbers(dtype, 4, 6)))
    for source in (array, array.T, array[::-1, ::2], array[0, 0:1], numpy.array(array[1, 1])):
        x = ic.from_numpy(source)
        assert x.is_contiguous() and x.shape == list(source.shape) and utils.to_torch_dtype(x.dtype) == dtype
        assert x.data_ptr() != source.__array_interface__["data"][0]
        assert (numpy.asarray(x) == source).all()
    frozen = array.copy()
    frozen.flags.writeable = False
    assert (numpy.asarray(ic.from_numpy(frozen)) == array).all()


def test_from_numpy_converts() -> None:
    array = numpy.array([1.0, 2.5, -3.0078125])
    for name in ("bfloat16", "float16", "float32", "int32", "bool"):
        x = ic.from_numpy(array, dtype=getattr(ic, name), device=CPU)
        assert torch.equal(torch.from_dlpack(x), torch.from_numpy(array).to(getattr(torch, name)))
    swapped = array.astype(">f4")
    assert numpy.asarray(ic.from_numpy(swapped)).tolist() == swapped.tolist()
    brain = numpy.array([1.5, -2], dtype=ml_dtypes.bfloat16)
    assert ic.from_numpy(brain).dtype == ic.bfloat16
    assert torch.from_dlpack(ic.from_numpy(brain, dtype=ic.float32)).tolist() == [1.5, -2]


def test_refused_arrays() -> None:
    with pytest.raises(TypeError, match="np_array must be a numpy.ndarray, got a torch.Tensor"):
        ic.from_numpy(torch.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"np_array must be a numpy.ndarray, got \[1\]"):
        ic.from_numpy([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"np_array must not be empty, got shape \(0, 3\)"):
        ic.from_numpy(numpy.zeros((0, 3)))
    with pytest.raises(ValueError, match="Unsupported numpy dtype: object"):
        ic.from_numpy(numpy.array([None]))
    with pytest.raises(TypeError, match="from_numpy: dtype must be an infinicore.dtype, got a torch.dtype"):
        ic.from_numpy(numpy.zeros(3), dtype=torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "name", "shown"),
    [
        ([0, 300], "uint8", "300"),
        ([-1], "uint8", "-1"),
        ([[2**31]], "int32", "2147483648"),
        ([2**63], "int64", "9223372036854775808"),
        ([1.0, 256.0], "uint8", "256.0"),
        ([2.0**63], "int64", str(2.0**63)),
        ([float("nan")], "int16", "nan"),
        ([float("-inf")], "int64", "-inf"),
        ([1 + 2j], "float32", "(1+2j)"),
        ([0.5j], "int8", "0.5j"),
    ],
)
def test_numbers_that_a_dtype_does_not_have(data: list[Any], name: str, shown: str) -> None:
    """Neither wrapped around nor cut to their real part."""
    dtype = getattr(ic, name)
    for call, argument in (
        (ic.from_list, "data"),
        (lambda x, dtype: ic.from_numpy(numpy.array(x), dtype=dtype), "np_array"),
    ):
        with pytest.raises(ValueError) as caught:
            call(data, dtype=dtype)
        assert f"{argument} must be numbers of infinicore.{name}, got {shown}" in str(caught.value)


def test_numbers_at_a_dtypes_limits() -> None:
    for name in ("uint8", "int8", "int16", "int32", "int64"):
        limits = torch.iinfo(getattr(torch, name))
        x = ic.from_list([limits.min, limits.max], dtype=getattr(ic, name))
        assert numpy.asarray(x).tolist() == [limits.min, limits.max]
    assert numpy.asarray(ic.from_list([-(2.0**63)], dtype=ic.int64)).tolist() == [-(2**63)]
    assert numpy.asarray(ic.from_list([1 + 0j, 3.5], dtype=ic.float32)).tolist() == [1, 3.5]
    assert numpy.asarray(ic.from_list([300, -1, 0.5], dtype=ic.bool)).all()
    assert numpy.asarray(ic.from_list([1e300], dtype=ic.float16)).tolist() == [float("inf")]  # torch rounds so too


# ---- DLPack ----


def test_from_dlpack() -> None:
    """numpy's arrays, with negative strides and none, torch's tensors, and our own."""
    array = numpy.arange(24, dtype=numpy.int32).reshape(4, 6)
    for source in (array, array[::-1], array[:, ::-2], array[2:2], array[1, 1]):
        if not isinstance(source, numpy.ndarray):
            continue
        x = ic.from_dlpack(source)
        assert x.data_ptr() == source.__array_interface__["data"][0] or source.size == 0
        assert x.shape == list(source.shape) and numpy.asarray(x).tolist() == source.tolist()
    x = ic.from_dlpack(torch.arange(6).view(2, 3).t())
    assert x.stride() == [1, 3] and ic.from_dlpack(x).data_ptr() == x.data_ptr()
    alive = weakref.ref(array)
    y = ic.from_dlpack(array)
    del array, source
    gc.collect()
    assert alive() is not None
    del y
    gc.collect()
    assert alive() is None


def test_negative_strides_are_computed_with() -> None:
    array = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
    made = ic.add(ic.from_dlpack(array[::-1]), ic.from_dlpack(array))
    assert numpy.asarray(made).tolist() == (array[::-1] + array).tolist()
    assert ic.rearrange(ic.from_dlpack(array[:, ::-1])).is_contiguous()


def test_capsules_are_used_once() -> None:
    x = ic.ones([2, 3], dtype=ic.float32, device=CPU)
    for version, name in ((None, "dltensor"), ((1, 0), "dltensor_versioned"), ((0, 8), "dltensor")):
        capsule = x.__dlpack__(max_version=version)
        assert f'"{name}"' in repr(capsule)
        assert raw.from_dlpack(capsule).data_ptr() == x.data_ptr()
        with pytest.raises(TypeError, match="a DLPack capsule that nobody has taken yet"):
            raw.from_dlpack(capsule)
    with pytest.raises(TypeError, match="DLPack capsule"):
        raw.from_dlpack(3)
    with pytest.raises(TypeError, match="source must have __dlpack__, got 3"):
        ic.from_dlpack(3)


def test_capsules_that_nobody_takes() -> None:
    source, alive = watched_ones()
    capsules = [ic.from_torch(source).__dlpack__(), ic.from_torch(source).__dlpack__(max_version=(1, 0))]
    del source
    gc.collect()
    assert alive() is not None
    del capsules
    gc.collect()
    assert alive() is None


def test_dlpack_arguments() -> None:
    x = ic.ones([2, 3], dtype=ic.float32, device=CPU)
    assert x.__dlpack_device__() == (1, 0)
    assert raw.from_dlpack(x.__dlpack__(dl_device=(1, 0))).data_ptr() == x.data_ptr()
    assert raw.from_dlpack(x.__dlpack__(copy=False)).data_ptr() == x.data_ptr()
    copied = raw.from_dlpack(x.__dlpack__(copy=True))
    assert copied.data_ptr() != x.data_ptr() and numpy.asarray(ic.Tensor(copied)).tolist() == [[1] * 3] * 2
    with pytest.raises(BufferError, match=r"dl_device must be \(1, 0\), got \(2, 0\)"):
        x.__dlpack__(dl_device=(2, 0))


def test_read_only_memory_is_refused() -> None:
    array = numpy.zeros(3)
    array.flags.writeable = False
    with pytest.raises(BufferError):
        ic.from_dlpack(array)


def test_recorded_tensors_cannot_be_read() -> None:
    x = ic.ones([3], dtype=ic.float32, device=CPU)
    with ic.graph() as g:
        y = x + x
        for read in (numpy.asarray, numpy.from_dlpack):
            with pytest.raises(RuntimeError, match="made while a graph was recorded"):
                read(y)
    with pytest.raises(RuntimeError, match="made while a graph was recorded"):
        torch.from_dlpack(y)
    g.run()
    assert numpy.asarray(y).tolist() == [2, 2, 2]


# ---- the GIL ----


def large(*shape: int) -> ic.Tensor:
    return ic.zeros(shape, dtype=ic.float32, device=CPU)


def long_calls() -> dict[str, Callable[[], object]]:
    """Calls of at least some tens of milliseconds, of each kind that must let other threads run."""
    a, b, c, wide = *(large(1200, 1200) for _ in range(3)), large(4000, 4000)
    out = large(4000, 4000)
    with ic.graph() as g:
        ic.matmul(a, b)
    return {
        "an op": lambda: raw.matmul(a._underlying, b._underlying),
        "an op with out": lambda: raw.matmul_(c._underlying, a._underlying, b._underlying),
        "copy_": lambda: out._underlying.copy_(wide.permute([1, 0])._underlying),
        "contiguous": lambda: wide.permute([1, 0])._underlying.contiguous(),
        "zeros": lambda: raw.zeros([16000, 4000], raw.DataType.F32, raw.Device()),
        "a graph": lambda: g._graph.run(),  # type: ignore[union-attr]
    }


@pytest.mark.parametrize("name", ["an op", "an op with out", "copy_", "contiguous", "zeros", "a graph"])
def test_other_threads_run_meanwhile(name: str) -> None:
    """A thread that waits for the GIL has run when the call returns: with this interval, nothing else gives it up."""
    call = long_calls()[name]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        for _ in range(50):
            start, has_run = threading.Lock(), threading.Event()
            start.acquire()

            def run(start: threading.Lock = start, has_run: threading.Event = has_run) -> None:
                start.acquire()
                has_run.set()

            thread = threading.Thread(target=run)
            thread.start()
            time.sleep(0.01)  # it waits for the lock by now
            start.release()
            call()
            if has_run.is_set():
                return
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("no other thread ran during 50 calls")


def test_owners_are_released_by_threads_without_the_gil() -> None:
    """The last tensor goes away inside a call of C++ that holds no GIL: a graph that another graph's end drops."""
    source, alive = watched_ones()
    tensors = [ic.from_torch(source)]
    del source

    def drop() -> None:
        tensors.clear()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    gc.collect()
    assert alive() is None
    source, alive = watched_ones()
    raw.start_graph_recording()
    x = ic.from_torch(source)
    ic.add(x, x, out=x)
    del source, x
    gc.collect()
    assert alive() is not None
    raw.start_graph_recording()  # drops the recording, without the GIL
    gc.collect()
    assert alive() is None
    raw.stop_graph_recording()


def test_at_the_end_of_the_interpreter() -> None:
    """Tensors, capsules, graphs with functions, and a thread that holds some, all alive when the interpreter ends."""
    code = """
import threading, time, torch
import torch_infini.compat.infinicore as ic
from torch_infini.compat.infinicore import _bridge
x = ic.from_torch(torch.ones(3))
with ic.graph() as g:
    y = x + x
    _bridge.record_or_run(lambda: None, [y])
g.run()
view, capsule = torch.from_dlpack(y), y.__dlpack__()
def hold(mine):
    ic.start_graph_recording()
    ic.add(mine, mine, out=mine)
    time.sleep(600)
threading.Thread(target=hold, args=(ic.from_torch(torch.ones(3)),), daemon=True).start()
import builtins; builtins.kept = (x, g, view, capsule)
time.sleep(0.2)
print("done")
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run_python(code, env=env, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# ---- leaks ----


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def recorded_and_run() -> Callable[[], object]:
    x = ic.ones([64, 64], dtype=ic.float32, device=CPU)
    with ic.graph() as g:
        y = x @ x
        _bridge.record_or_run(lambda: _bridge.as_torch(y).neg_(), [y])
    return g.run


def made_and_dropped() -> None:
    x = ic.from_torch(torch.ones(64, 64))
    with ic.graph() as g:
        y = x @ x
        _bridge.record_or_run(lambda: None, [y])
    g.run()


def of_ones(function: Callable[[ic.Tensor], object]) -> Callable[[], Callable[[], object]]:
    """A loop's call on a tensor that is made once."""

    def make() -> Callable[[], object]:
        x = ic.ones([8, 8], dtype=ic.float32, device=CPU)
        return lambda: function(x)

    return make


def refused(x: ic.Tensor) -> None:
    with pytest.raises(RuntimeError):
        x.view([9])


LOOPS: dict[str, tuple[int, Callable[[], Callable[[], object]]]] = {
    "replays": (10_000, recorded_and_run),
    "ops": (10_000, of_ones(lambda x: x + x)),
    "views": (10_000, of_ones(lambda x: x.permute([1, 0]).narrow(0, 1, 2))),
    "torch": (10_000, lambda: lambda: torch.from_dlpack(ic.from_torch(torch.ones(64)))),
    "numpy": (10_000, lambda: lambda: numpy.asarray(ic.from_dlpack(numpy.ones(64)))),
    "unused capsules": (10_000, of_ones(lambda x: x.__dlpack__())),
    "errors": (10_000, of_ones(refused)),
    "events": (10_000, lambda: ic.DeviceEvent),
    "graphs": (2_000, lambda: made_and_dropped),
}


@pytest.mark.full(beyond=2)
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps freed memory a while")
@pytest.mark.parametrize("name", LOOPS)
def test_nothing_leaks(name: str) -> None:
    """Neither what the caches count as in use, nor the process's memory: 64 bytes a call would be seen."""
    times, make = LOOPS[name]
    call = make()
    for _ in range(times // 4):  # caches fill
        call()
    gc.collect()
    used, before = ic.context.memory_stats("cpu")["in_use"], resident()
    for _ in range(times):
        call()
    gc.collect()
    assert ic.context.memory_stats("cpu")["in_use"] == used
    assert resident() - before < 64 * times + (1 << 18)
