"""Every op of the C ABI on an NVIDIA device, by its description in torch_infini/testing/ops: nothing here names one.

On a GPU the samples are copied to its memory and back. Elsewhere, with INFINI_LIBRARIES=build/native/emulated, the same
kernels run on the host (csrc/emulation), where device memory is the host's. Skipped where there is neither.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from support.c_checks import bits, check, first_sample, overwrite
from support.c_runtime import BAD_PARAM, CPU, NVIDIA, THREAD_LOCAL, captured, device_count, instantiated, ok, rt, stream
from torch_infini.testing import cuda_device
from torch_infini.testing.c_ops import CError, COp, CSample, Described, Descriptor, c_function, clone, memory_of
from torch_infini.testing.ops import all_c_ops

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")

OPS = list(all_c_ops())


@pytest.fixture(autouse=True)
def on_nvidia() -> Iterator[None]:
    ok("SetDevice", NVIDIA, 0)
    yield
    ok("SetDevice", CPU, 0)


@pytest.fixture
def s() -> Iterator[int]:
    handle = stream()
    yield handle
    ok("StreamDestroy", handle)


def name(op: COp) -> str:
    return op.name


def there(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with device memory, the copy to it done."""
    moved = clone(args, DEVICE)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return moved


def quick(samples: Iterable[CSample]) -> list[CSample]:
    """Those that the emulation gets through quickly; on a GPU all. test_reference has the others."""

    def elements(value: Any) -> int:
        base = value.base if isinstance(value, Described) else value
        return base.numel() if isinstance(base, Tensor) else 0

    small = 50_000 if DEVICE == "cpu" else float("inf")
    return [sample for sample in samples if max(map(elements, sample.args.values())) <= small]


def with_other_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the arguments, their elements in the opposite order; an index that names nothing then is allowed."""
    copies, turned = clone(args), set()
    for value in copies.values():
        tensor = value.base if isinstance(value, Described) else value
        if isinstance(tensor, Tensor) and tensor.numel() and tensor.untyped_storage().data_ptr() not in turned:
            elements = memory_of(tensor).view(-1, tensor.itemsize)
            elements.copy_(elements.flip(0))
            turned.add(tensor.untyped_storage().data_ptr())
    return copies


def after(op: COp, args: Mapping[str, Any], on: int | None = None) -> dict[str, Any]:
    """What the arguments hold after a run on the device, in host memory."""
    moved = there(args)
    with Descriptor(op, moved) as descriptor:
        held = descriptor.run(moved, ctypes.c_void_p(on))
    if on is not None:  # the descriptor is destroyed before the work is done
        ok("StreamSynchronize", on)
    del held
    return clone(moved, "cpu")


def assert_same_outputs(op: COp, sample: CSample, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    for key in op.outputs:
        if a[key] is not None:
            assert torch.equal(bits(a[key]), bits(b[key])), f"{sample.name}: {key}"


@pytest.mark.parametrize("op", OPS, ids=name)
def test_reference(op: COp) -> None:
    for sample in op.samples():
        result = after(op, sample.args)
        check(op, sample, clone(sample.args), result, on_cuda=True)
        written = {id(sample.args[key]) for key in op.outputs}
        for key, value in sample.args.items():
            if isinstance(value, Tensor) and id(value) not in written:
                assert torch.equal(bits(value), bits(result[key])), f"{sample.name}: {key} was written to"


@pytest.mark.parametrize("op", OPS, ids=name)
def test_stream_gives_the_same_bits(op: COp, s: int) -> None:
    for sample in quick(op.samples())[:8]:
        assert_same_outputs(op, sample, after(op, sample.args), after(op, sample.args, s))


@pytest.mark.full(beyond=6)
@pytest.mark.parametrize("op", OPS, ids=name)
def test_capture_and_replay(op: COp, s: int) -> None:
    """Replays read new inputs and write everything anew, to the bits of separate runs."""
    for sample in quick(op.samples()):
        args = there(sample.args)
        expected = after(op, sample.args)  # kernels are loaded before the capture
        with Descriptor(op, args) as descriptor:
            run = descriptor.bound(args, ctypes.c_void_p(s))
            ok("StreamBeginCapture", s, THREAD_LOCAL)
            run()
            graph = captured(s)
        assert all(
            torch.equal(bits(sample.args[k]), bits(clone(args, "cpu")[k])) for k in op.outputs if args[k] is not None
        ), f"{sample.name}: ran while it was captured"
        exec_ = instantiated(graph)
        ok("GraphDestroy", graph)
        # Numbers are captured with the call, tensors are read by each replay.
        others = with_other_values(sample.args)
        for given, wanted in ((sample.args, expected), (others, after(op, others)), (sample.args, expected)):
            overwrite(args, given)
            ok("GraphLuanch", exec_, s)
            ok("StreamSynchronize", s)
            assert_same_outputs(op, sample, wanted, clone(args, "cpu"))
        ok("GraphExecDestroy", exec_)
        del run  # holds the workspace


@pytest.mark.parametrize("op", OPS, ids=name)
def test_several_threads_run_one_descriptor(op: COp) -> None:
    samples = [s for s in op.samples() if any(isinstance(v, Tensor) and v.numel() for v in s.args.values())]
    sample = samples[len(samples) // 2]
    alone = after(op, sample.args)
    copies = [there(sample.args) for _ in range(8)]
    with Descriptor(op, copies[0]) as descriptor, ThreadPoolExecutor(4) as pool:
        list(pool.map(descriptor.run, copies))
    for args in copies:
        assert_same_outputs(op, sample, alone, clone(args, "cpu"))


@pytest.mark.parametrize("op", OPS, ids=name)
def test_errors(op: COp) -> None:
    """The sentences of the CPU; rules about values are the CPU's alone."""
    for case in op.errors():
        if case.of_values:
            continue
        args = there(case.args)
        with pytest.raises(CError) as caught, Descriptor(op, args) as descriptor:
            assert case.at == "run", case.name
            descriptor.run(args)
        assert (str(caught.value), caught.value.status) == (case.message, case.status), case.name


@pytest.mark.parametrize("op", OPS, ids=name)
def test_workspace_too_small(op: COp) -> None:
    for sample in op.samples():
        with Descriptor(op, sample.args) as descriptor:
            size = descriptor.workspace_size()
            if size == 0:
                continue
            values = [ctypes.c_void_p(None) for _ in op.run.arguments]
            values[0], values[2] = descriptor.handle, ctypes.c_size_t(size - 1)  # type: ignore[call-overload]
            with pytest.raises(CError, match=f"workspace_size must be at least {size}, got {size - 1}"):
                c_function(op.run.name)(*values)
            return


def test_descriptors_know_their_device() -> None:
    op = next(op for op in OPS if op.name == "RMSNorm")
    kind, number = ctypes.c_int(), ctypes.c_int()
    with Descriptor(op, first_sample(op).args) as descriptor:
        c_function("infiniopGetDescriptorDeviceType")(descriptor.handle, ctypes.byref(kind))
        c_function("infiniopGetDescriptorDeviceId")(descriptor.handle, ctypes.byref(number))
    assert (kind.value, number.value) == (NVIDIA, 0)


@pytest.mark.skipif(device_count(NVIDIA) < 2, reason="needs two devices")
def test_another_device_than_the_current_one() -> None:
    """A descriptor runs on its own device; a stream of another device is refused by CUDA."""
    op = next(op for op in OPS if op.name == "RMSNorm")
    sample = first_sample(op)
    expected = after(op, sample.args)
    of_zero = stream()
    ok("SetDevice", NVIDIA, 1)
    of_one = stream()
    args = clone(sample.args, "cpu" if DEVICE == "cpu" else "cuda:1")
    with Descriptor(op, args) as descriptor:
        for kind, number in ((CPU, 0), (NVIDIA, 0), (NVIDIA, 1)):
            ok("SetDevice", kind, number)
            for on in (of_one, None):
                overwrite(args, sample.args)
                held = descriptor.run(args, ctypes.c_void_p(on))
                ok("StreamSynchronize", of_one)
                assert_same_outputs(op, sample, expected, clone(args, "cpu"))
        with pytest.raises(CError, match="a kernel launch: .*cudaErrorInvalidResourceHandle") as caught:
            descriptor.run(args, ctypes.c_void_p(of_zero))
        assert caught.value.status == "BAD_PARAM"
    del held
    for handle in (of_zero, of_one):
        ok("StreamDestroy", handle)


def test_broken_capture_is_told(s: int) -> None:
    """A kernel on a stream with an invalidated capture."""
    op = next(op for op in OPS if op.name == "RMSNorm")
    args = there(first_sample(op).args)
    with Descriptor(op, args) as descriptor:
        descriptor.run(args)
        run = descriptor.bound(args, ctypes.c_void_p(s))
        ok("StreamBeginCapture", s, THREAD_LOCAL)
        assert rt.infinirtMalloc(ctypes.byref(ctypes.c_void_p()), 8) == BAD_PARAM
        with pytest.raises(CError, match="cudaErrorStreamCaptureInvalidated"):
            run()
    assert rt.infinirtStreamEndCapture(s, ctypes.byref(ctypes.c_void_p())) == BAD_PARAM
