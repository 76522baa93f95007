"""torch_infini.compat.libinfiniop: the ctypes door. The usage examples of its documentation, and each tool by itself.

The examples are those of the Infini stack's document with its slips mended: GEMM's create takes C, A, B; a tensor that
is broadcast has stride 0 and the shape it is broadcast to; results are compared through torch.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.rounding import assert_same_but_rounding
from torch_infini.compat.libinfiniop import *  # noqa: F403 -- as scripts do
from torch_infini.compat.libinfiniop import (
    LIBINFINIOP,
    CTensor,
    InfiniDeviceEnum,
    InfiniDeviceNames,
    InfiniDtype,
    InfiniDtypeNames,
    OpRegister,
    TestTensor,
    TestWorkspace,
    check_error,
    create_handle,
    debug,
    destroy_handle,
    get_args,
    get_test_devices,
    get_tolerance,
    infini_device_map,
    infiniopOperatorDescriptor_t,
    open_lib,
    profile_operation,
    rearrange_tensor,
    timed_op,
    to_numpy_dtype,
    to_torch_dtype,
    torch_device_map,
)
from torch_infini.compat.libinfiniop import test_operator as run_operator  # renamed: no test of pytest

CPU = InfiniDeviceEnum.CPU


def gemm(handle: Any, device: Any, m: int, n: int, k: int, tensor_dtype: Any, sync_func: Any) -> None:
    a = TestTensor((m, k), None, tensor_dtype, device, mode="random")
    b = TestTensor((k, n), None, tensor_dtype, device, mode="random")
    c = TestTensor((m, n), None, tensor_dtype, device, mode="zeros")
    descriptor = infiniopOperatorDescriptor_t()
    check_error(
        LIBINFINIOP.infiniopCreateGemmDescriptor(
            handle, ctypes.byref(descriptor), c.descriptor, a.descriptor, b.descriptor
        )
    )
    for tensor in (a, b, c):
        tensor.destroy_desc()
    workspace_size = ctypes.c_size_t()
    check_error(LIBINFINIOP.infiniopGetGemmWorkspaceSize(descriptor, ctypes.byref(workspace_size)))
    workspace = TestWorkspace(workspace_size.value, device)
    check_error(
        LIBINFINIOP.infiniopGemm(
            descriptor,
            workspace.data(),
            workspace.size(),
            c.data(),
            a.data(),
            b.data(),
            ctypes.c_float(1.0),
            ctypes.c_float(0.0),
            None,
        )
    )
    if sync_func:
        sync_func()
    expected = torch.matmul(a.torch_tensor(), b.torch_tensor())
    assert_same_but_rounding(c.actual_tensor(), expected, terms=a.torch_tensor().shape[1])
    check_error(LIBINFINIOP.infiniopDestroyGemmDescriptor(descriptor))


def test_gemm_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gemm.py"])
    calls: list[tuple] = []

    def counted(*args: Any) -> None:
        calls.append(args)
        gemm(*args)

    for device in get_test_devices(get_args()):
        run_operator(device, counted, [(128, 256, 512), (64, 128, 256)], [InfiniDtype.F32, InfiniDtype.F16])
    assert [(args[1], *args[2:5]) for args in calls] == 2 * [(CPU, 128, 256, 512)] + 2 * [(CPU, 64, 128, 256)]


def test_broadcast_add_example() -> None:
    handle = create_handle()
    a = TestTensor((3, 4), [1, 0], InfiniDtype.F32, CPU, mode="random")
    b = TestTensor((3, 4), None, InfiniDtype.F32, CPU, mode="random")
    c = TestTensor((3, 4), None, InfiniDtype.F32, CPU, mode="zeros")
    assert a.is_broadcast() and not b.is_broadcast()
    descriptor = infiniopOperatorDescriptor_t()
    check_error(
        LIBINFINIOP.infiniopCreateAddDescriptor(
            handle, ctypes.byref(descriptor), c.descriptor, a.descriptor, b.descriptor
        )
    )
    check_error(LIBINFINIOP.infiniopAdd(descriptor, None, 0, c.data(), a.data(), b.data(), None))
    expected = a.torch_tensor() + b.torch_tensor()
    assert debug(c.actual_tensor(), expected, atol=0, rtol=1e-6) == []
    assert torch.equal(c.actual_tensor(), expected)
    assert (descriptor.contents.device, descriptor.contents.device_id) == (CPU, 0)
    check_error(LIBINFINIOP.infiniopDestroyAddDescriptor(descriptor))
    destroy_handle(handle)


def test_from_binary_example(tmp_path: Path) -> None:
    file = tmp_path / "matmul_input_A.bin"
    values = np.arange(24, dtype=np.float16).reshape(4, 6)
    values.tofile(file)
    tensor = TestTensor.from_binary(
        binary_file=file, shape=(4, 6), strides=(8, 1), dt=InfiniDtype.F16, device=InfiniDeviceEnum.CPU
    )
    assert torch.equal(tensor.torch_tensor(), torch.from_numpy(values))
    assert tensor.actual_tensor().stride() == (8, 1) and torch.equal(tensor.actual_tensor(), torch.from_numpy(values))
    with pytest.raises(ValueError, match="must hold 25 elements, got 24"):
        TestTensor.from_binary(file, (5, 5), None, InfiniDtype.F16, CPU)


@pytest.mark.parametrize("dt", [d for d in InfiniDtype if d not in (InfiniDtype.INVALID, InfiniDtype.C16)])
def test_every_dtype(dt: InfiniDtype) -> None:
    for mode in ("zeros", "ones", "random"):
        tensor = TestTensor((3, 5), [7, 1], dt, CPU, mode=mode)
        assert tensor.torch_tensor().dtype == to_torch_dtype(dt) and tensor.data()
        assert tensor.actual_tensor().stride() == (7, 1)
        tensor.destroy_desc()
        tensor.destroy_desc()
    assert InfiniDtypeNames[dt] == dt.name
    if dt != InfiniDtype.C32:
        assert to_numpy_dtype(dt).itemsize == to_torch_dtype(dt).itemsize


def test_dtypes_that_torch_lacks() -> None:
    for dt in (InfiniDtype.INVALID, InfiniDtype.C16):
        with pytest.raises(ValueError, match="torch has no dtype"):
            to_torch_dtype(dt)
    assert to_torch_dtype(InfiniDtype.U16, compatability_mode=True) == torch.int16
    assert to_numpy_dtype(InfiniDtype.U64, compatability_mode=True) == np.int64


def test_modes() -> None:
    shape = (40, 50)
    random = TestTensor(shape, None, InfiniDtype.F32, CPU, scale=4, bias=-2).torch_tensor()
    assert -2 <= random.min() < -1.5 and 1.5 < random.max() < 2
    integers = TestTensor(shape, None, InfiniDtype.I32, CPU, mode="randint", randint_low=-3, randint_high=4)
    assert sorted(integers.torch_tensor().unique().tolist()) == [-3, -2, -1, 0, 1, 2, 3]
    small = TestTensor(shape, None, InfiniDtype.F8, CPU, mode="float8_e4m3fn").torch_tensor()
    assert small.dtype == torch.float8_e4m3fn and 0 < small.float().mean() < 1
    given = torch.arange(6.0).reshape(2, 3)
    manual = TestTensor((2, 3), [1, 2], InfiniDtype.F32, CPU, mode="manual", set_tensor=given)
    assert torch.equal(manual.torch_tensor(), given) and torch.equal(manual.actual_tensor(), given)
    assert manual.actual_tensor().untyped_storage().nbytes() == 24
    with pytest.raises(ValueError, match="set_tensor must have shape"):
        TestTensor((2, 4), None, InfiniDtype.F32, CPU, mode="manual", set_tensor=given)
    with pytest.raises(ValueError, match="mode must be"):
        TestTensor((2, 3), None, InfiniDtype.F32, CPU, mode="gauss")
    same = TestTensor.from_torch(given.T, InfiniDtype.F32, CPU)
    assert torch.equal(same.torch_tensor(), given.T) and same.actual_tensor().stride() == (1, 3)
    same.update_torch_tensor(given)
    assert same.torch_tensor() is given


def test_rearrange() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    moved = rearrange_tensor(x, [2, 9])
    assert moved.stride() == (2, 9) and torch.equal(moved, x)
    assert rearrange_tensor(torch.ones(0, 4), [4, 1]).shape == (0, 4)
    with pytest.raises(ValueError, match="strides must be at least 0"):
        rearrange_tensor(x, [-4, 1])


def test_ctensor() -> None:
    tensor = CTensor(InfiniDtype.BF16, (2, 3), None)
    assert tensor.ndim == 2 and list(tensor.c_shape) == [2, 3] and tensor.descriptor
    tensor.destroy_desc()
    for strides in ([1], [3, 1, 1]):
        with pytest.raises(ValueError, match="strides must have 2 entries, as shape has, got"):
            CTensor(InfiniDtype.BF16, (2, 3), strides)


def test_check_error() -> None:
    check_error(0)
    with pytest.raises(Exception, match=r"error 5 \(INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED\): infinirtSetDevice: "):
        check_error(LIBINFINIOP.infinirtSetDevice(InfiniDeviceEnum.CAMBRICON, 0))
    with pytest.raises(Exception, match="INFINI_STATUS_DEVICE_TYPE_NOT_SUPPORTED"):
        run_operator(InfiniDeviceEnum.QY, lambda *_: None, [()], [InfiniDtype.F32])


def test_debug_prints_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    desired = torch.ones(2, 3, dtype=torch.bfloat16)
    actual = desired.clone()
    actual[1, 2] = 3
    assert debug(actual, desired, atol=0, rtol=1e-2) == [(1, 2)]
    printed = capsys.readouterr().out
    assert "[1, 2]: \033[31m3\033[0m, should be \033[32m1\033[0m, off by \033[33m2\033[0m" in printed
    assert "1 of 6 elements off (16.67 %)" in printed
    assert debug(torch.tensor([torch.nan]), torch.tensor([torch.nan]), equal_nan=True, verbose=False) == []
    with pytest.raises(ValueError, match="one shape"):
        debug(actual, torch.ones(3))


def test_timing(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    assert timed_op(lambda: calls.append(1), 5, "cpu") >= 0 and len(calls) == 5
    profile_operation("Matmul", lambda: calls.append(1), "cpu", 2, 3)
    assert len(calls) == 10
    assert re.fullmatch(r"Matmul time: \d+\.\d{6} ms\n", capsys.readouterr().out)


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x.py", "--nvidia", "--profile", "--num_prerun", "3", "--debug"])
    args = get_args()
    assert (args.profile, args.num_prerun, args.num_iterations, args.debug, args.verbose) == (
        True,
        3,
        1000,
        True,
        False,
    )
    assert get_test_devices(args) == [InfiniDeviceEnum.NVIDIA]
    monkeypatch.setattr(sys, "argv", ["x.py"])
    assert get_test_devices(get_args()) == [CPU]


def test_names_and_maps() -> None:
    assert set(InfiniDeviceNames) == set(torch_device_map) == set(InfiniDeviceEnum)
    assert (
        infini_device_map["cuda"] == InfiniDeviceEnum.NVIDIA and infini_device_map["mlu"] == InfiniDeviceEnum.CAMBRICON
    )
    assert get_tolerance({InfiniDtype.F16: {"atol": 1e-3, "rtol": 1e-2}}, InfiniDtype.F16) == (1e-3, 1e-2)
    assert get_tolerance({}, InfiniDtype.F16) == (0, 0)


def test_open_lib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="neither libinfiniop nor libinfinirt has infiniopNothing"):
        LIBINFINIOP.infiniopNothing  # noqa: B018
    assert LIBINFINIOP.infinirtSetDevice.argtypes == [ctypes.c_int, ctypes.c_int]
    assert LIBINFINIOP.infiniopCreateRoPEDescriptor.argtypes[-1] is ctypes.c_int
    monkeypatch.setenv("INFINI_ROOT", str(tmp_path))
    with pytest.raises(AssertionError, match="libinfinirt.so is not in"):
        open_lib()
    (tmp_path / "lib").symlink_to(LIBINFINIOP.root / "lib")
    with pytest.raises(AssertionError, match="include has no headers of torch_infini"):
        open_lib()


def test_a_script_may_register_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpRegister, "registry", [])
    seen: list[Any] = []

    @OpRegister.operator
    def mine(lib: Any) -> None:
        seen.append(lib.infinirtInit)

    open_lib()
    assert len(seen) == 1
