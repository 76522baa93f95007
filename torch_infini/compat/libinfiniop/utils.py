"""Tools for scripts that test and time ops through the C ABI: tensors with descriptors, comparison, timing, flags."""

from __future__ import annotations

import argparse
import ctypes
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._core.dtypes import TORCH_DTYPES
from .datatypes import InfiniDtype, InfiniDtypeNames
from .devices import InfiniDeviceEnum, InfiniDeviceNames, torch_device_map
from .liboperators import LIBINFINIOP
from .structs import infiniopHandle_t, infiniopTensorDescriptor_t

# The signed type with the same bits, for operations that torch or numpy lack for the unsigned type.
_SIGNED = {InfiniDtype.U16: torch.int16, InfiniDtype.U32: torch.int32, InfiniDtype.U64: torch.int64}
# The extensions of torch for other vendors' devices.
_TORCH_EXTENSIONS = {
    InfiniDeviceEnum.CAMBRICON: "torch_mlu",
    InfiniDeviceEnum.ASCEND: "torch_npu",
    InfiniDeviceEnum.MOORE: "torch_musa",
    InfiniDeviceEnum.KUNLUN: "torch_xmlir",
}


def check_error(status: int) -> None:
    """Raise an Exception with the library's message if `status` is not 0 (success)."""
    if status:
        names = {value: name for name, value in LIBINFINIOP.interface.enums["infiniStatus_t"].items()}
        sentence = LIBINFINIOP.infiniGetLastErrorMessage().decode()
        raise Exception(f"error {status} ({names.get(status, 'unknown')}): {sentence}")


def to_torch_dtype(dt: InfiniDtype, compatability_mode: bool = False) -> torch.dtype:
    """Return the torch dtype of an InfiniDtype.

    Args:
        dt: Any except INVALID and C16, which torch lacks (ValueError).
        compatability_mode: Return int16, int32 and int64 for U16, U32 and U64, for which torch has few operations.
    """
    if compatability_mode and dt in _SIGNED:
        return _SIGNED[dt]
    if dt not in TORCH_DTYPES:
        raise ValueError(f"torch has no dtype for InfiniDtype {InfiniDtypeNames.get(dt, dt)}")
    return TORCH_DTYPES[dt]


def to_numpy_dtype(dt: InfiniDtype, compatability_mode: bool = False) -> np.dtype:
    """Return the numpy dtype of an InfiniDtype, to read binary files; ValueError for those that numpy lacks.

    BF16 and F8 are read as the unsigned integers of their size.
    """
    if dt == InfiniDtype.BF16:
        return np.dtype(np.uint16)
    if dt == InfiniDtype.F8:
        return np.dtype(np.uint8)
    name = str(to_torch_dtype(dt, compatability_mode)).removeprefix("torch.")
    if dt == InfiniDtype.C32:
        raise ValueError("numpy has no dtype for InfiniDtype C32")
    return np.dtype(name)


class CTensor:
    """Shape, strides and dtype of a tensor, with the library's descriptor of them (`descriptor`).

    Args:
        dt: Element type.
        shape: Elements in each dimension.
        strides: Elements between consecutive indices; None: contiguous.

    Raises:
        ValueError: If there are not as many strides as dimensions.
        Exception: If the library rejects it.
    """

    def __init__(self, dt: InfiniDtype, shape: Sequence[int], strides: Sequence[int] | None) -> None:
        if strides is not None and len(strides) != len(shape):
            raise ValueError(f"CTensor: strides must have {len(shape)} entries, as shape has, got {list(strides)}")
        self.descriptor = infiniopTensorDescriptor_t()
        self.dt = InfiniDtype(dt)
        self.ndim = len(shape)
        self.c_shape = (ctypes.c_uint64 * self.ndim)(*shape)
        self.c_strides = (ctypes.c_int64 * self.ndim)(*strides) if strides is not None else None
        check_error(
            LIBINFINIOP.infiniopCreateTensorDescriptor(
                ctypes.byref(self.descriptor), self.ndim, self.c_shape, self.c_strides, self.dt
            )
        )

    def destroy_desc(self) -> None:
        """Free the descriptor; calling it again does nothing."""
        if self.descriptor:
            check_error(LIBINFINIOP.infiniopDestroyTensorDescriptor(self.descriptor))
            self.descriptor = infiniopTensorDescriptor_t()


class TestTensor(CTensor):
    """A tensor in two forms: as torch computes with it (`torch_tensor`), and in memory with the given strides
    (`actual_tensor`, `data`), with a descriptor of the latter.

    Args:
        shape: Elements in each dimension.
        strides: Elements between consecutive indices, at least 0 (0 repeats one element); None: contiguous.
        dt: Element type.
        device: The memory's device.
        mode: "random" (floats in [0, 1), integers in [randint_low, randint_high)), "zeros", "ones", "randint",
            "float8_e4m3fn" (random numbers rounded to it), "manual" or "binary" (set_tensor).
        scale: Factor of the values; 1 if None.
        bias: Added afterwards; 0 if None.
        set_tensor: The values for "manual" and "binary", of this shape.
        randint_low, randint_high: The range of random integers.
    """

    __test__ = False  # not a test class of pytest, despite its name

    def __init__(
        self,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dt: InfiniDtype,
        device: InfiniDeviceEnum,
        mode: str = "random",
        scale: float | None = None,
        bias: float | None = None,
        set_tensor: Tensor | None = None,
        randint_low: int = -2_000_000_000,
        randint_high: int = 2_000_000_000,
    ) -> None:
        super().__init__(dt, shape, strides)
        self.device = InfiniDeviceEnum(device)
        self.shape = list(shape)
        self.strides = list(strides) if strides is not None else None
        torch_dtype = to_torch_dtype(dt)
        place = torch_device_map[self.device]
        # A dimension of stride 0 holds one element, which is drawn once and repeated.
        kept = [1 if stride == 0 else size for size, stride in zip(self.shape, self.strides or self.shape, strict=True)]
        kept = kept if self.strides is not None else self.shape

        def random_integers() -> Tensor:
            if torch_dtype == torch.bool:
                return torch.randint(0, 2, kept)
            info = torch.iinfo(torch_dtype)
            top = min(randint_high, info.max + 1)
            return torch.randint(max(randint_low, info.min), min(top, 2**63 - 1), kept)

        is_float = torch_dtype.is_floating_point or torch_dtype.is_complex
        if mode == "random":
            values = torch.rand(kept) if is_float else random_integers()
        elif mode == "zeros":
            values = torch.zeros(kept)
        elif mode == "ones":
            values = torch.ones(kept)
        elif mode == "randint":
            values = torch.randint(randint_low, randint_high, kept) if is_float else random_integers()
        elif mode == "float8_e4m3fn":
            values = torch.rand(kept).to(torch.float8_e4m3fn)
        elif mode in ("manual", "binary"):
            if set_tensor is None or list(set_tensor.shape) != self.shape:
                came = None if set_tensor is None else list(set_tensor.shape)
                raise ValueError(f"TestTensor: set_tensor must have shape {self.shape} in mode {mode!r}, got {came}")
            values = set_tensor[tuple(slice(0, size) for size in kept)]
        else:
            raise ValueError(
                "TestTensor: mode must be 'random', 'zeros', 'ones', 'randint', 'float8_e4m3fn', 'manual' or 'binary', "
                f"got {mode!r}"
            )
        if scale is not None:
            values = values * scale
        if bias is not None:
            values = values + bias
        values = values.to(torch_dtype).to(place).expand(self.shape)
        self._torch_tensor = values.contiguous()
        self._data_tensor = self._torch_tensor.clone() if strides is None else rearrange_tensor(values, strides)

    def torch_tensor(self) -> Tensor:
        """Return the values, contiguous, to compute the expected result from."""
        return self._torch_tensor

    def actual_tensor(self) -> Tensor:
        """Return the memory that the library reads and writes, with the given strides."""
        return self._data_tensor

    def data(self) -> int:
        """Return the address of the memory."""
        return self._data_tensor.data_ptr()

    def is_broadcast(self) -> bool:
        """Return whether any stride is 0."""
        return self.strides is not None and 0 in self.strides

    def update_torch_tensor(self, new_tensor: Tensor) -> None:
        """Replace the result of torch_tensor(), after an in-place operation."""
        self._torch_tensor = new_tensor

    @classmethod
    def from_binary(
        cls,
        binary_file: str | Path,
        shape: Sequence[int],
        strides: Sequence[int] | None,
        dt: InfiniDtype,
        device: InfiniDeviceEnum,
    ) -> TestTensor:
        """Read the values, in index order, from a file that holds nothing else."""
        count = int(np.prod(shape, dtype=np.int64))
        values = np.fromfile(binary_file, dtype=to_numpy_dtype(dt))
        if values.size != count:
            raise ValueError(f"TestTensor: {binary_file} must hold {count} elements, got {values.size}")
        tensor = torch.from_numpy(values).view(to_torch_dtype(dt)).reshape(tuple(shape))
        return cls(shape, strides, dt, device, mode="binary", set_tensor=tensor)

    @classmethod
    def from_torch(cls, torch_tensor: Tensor, dt: InfiniDtype, device: InfiniDeviceEnum) -> TestTensor:
        """Make one with a tensor's shape, strides and values."""
        return cls(
            list(torch_tensor.shape), list(torch_tensor.stride()), dt, device, mode="manual", set_tensor=torch_tensor
        )


class TestWorkspace:
    """Memory that an op may use while it runs: `size` bytes on the device; none if size is 0."""

    __test__ = False

    def __init__(self, size: int, device: InfiniDeviceEnum) -> None:
        self.tensor = TestTensor((size,), None, InfiniDtype.U8, device, mode="ones") if size else None
        self._size = size

    def data(self) -> int | None:
        """Return the address; None if size is 0."""
        return self.tensor.data() if self.tensor is not None else None

    def size(self) -> ctypes.c_uint64:
        """Return the size in bytes, as the library takes it."""
        return ctypes.c_uint64(self._size)


def create_handle() -> Any:
    """Create an infiniopHandle_t for the current device."""
    handle = infiniopHandle_t()
    check_error(LIBINFINIOP.infiniopCreateHandle(ctypes.byref(handle)))
    return handle


def destroy_handle(handle: Any) -> None:
    """Destroy a handle."""
    check_error(LIBINFINIOP.infiniopDestroyHandle(handle))


def rearrange_tensor(tensor: Tensor, new_strides: Sequence[int]) -> Tensor:
    """Copy the values to new memory with the given strides; elements between them are 0.

    If a stride is 0, the last of the repeated elements is kept.

    Raises:
        ValueError: For a negative stride, which torch does not support.
    """
    if any(stride < 0 for stride in new_strides):
        raise ValueError(f"rearrange_tensor: strides must be at least 0, got {list(new_strides)}")
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, new_strides, strict=True))
    memory = torch.zeros(reach + 1 if tensor.numel() else 0, dtype=tensor.dtype, device=tensor.device)
    # torch cannot write overlapping views: write one element of each repeated dimension.
    first = [1 if stride == 0 else size for size, stride in zip(tensor.shape, new_strides, strict=True)]
    if tensor.numel():
        memory.as_strided(first, list(new_strides)).copy_(tensor[tuple(slice(-size, None) for size in first)])
    return memory.as_strided(tuple(tensor.shape), list(new_strides))


def get_args() -> argparse.Namespace:
    """Parse a test script's command line: devices (--cpu, --nvidia, ...), --debug, --verbose, --profile,
    --num_prerun,
    --num_iterations."""
    parser = argparse.ArgumentParser(description="Test an operator through the C interface")
    parser.add_argument("--profile", action="store_true", help="time the operator as well")
    parser.add_argument("--num_prerun", type=int, default=10, help="calls before the timing (default: %(default)s)")
    parser.add_argument("--num_iterations", type=int, default=1000, help="calls that are timed (default: %(default)s)")
    parser.add_argument("--debug", action="store_true", help="print every element that is off")
    parser.add_argument("--verbose", action="store_true", help="print what is being done")
    for device in InfiniDeviceEnum:
        parser.add_argument(
            f"--{device.name.lower()}", action="store_true", help=f"test on {InfiniDeviceNames[device]}"
        )
    return parser.parse_args()


def get_test_devices(args: argparse.Namespace) -> list[InfiniDeviceEnum]:
    """Return the devices named on the command line; the CPU if there are none."""
    devices = [device for device in InfiniDeviceEnum if getattr(args, device.name.lower(), False)]
    for device in devices:
        if device in _TORCH_EXTENSIONS:
            importlib.import_module(_TORCH_EXTENSIONS[device])
        if device == InfiniDeviceEnum.ASCEND:
            torch.npu.set_device(0)  # type: ignore[attr-defined]
    return devices or [InfiniDeviceEnum.CPU]


def synchronize_device(torch_device: str) -> None:
    """Wait until the torch device ("cpu", "cuda", ...) has done all queued work."""
    if torch_device != "cpu":
        getattr(torch, torch_device).synchronize()


def get_sync_func(device: InfiniDeviceEnum) -> Callable[[], None] | None:
    """Return a function that waits for the device; None for the CPU, where calls without a stream are done."""
    torch_device = torch_device_map[device]
    return None if torch_device == "cpu" else lambda: synchronize_device(torch_device)


def test_operator(
    device: InfiniDeviceEnum,
    test_func: Callable[..., None],
    test_cases: Sequence[tuple[Any, ...]],
    tensor_dtypes: Sequence[Any],
) -> None:
    """Call test_func(handle, device, *test_case, tensor_dtype, sync_func) for every case and dtype on the device.

    Raises:
        Exception: If the library has no such device; or any exception of test_func. The handle is destroyed either way.
    """
    check_error(LIBINFINIOP.infinirtSetDevice(device, 0))
    handle = create_handle()
    try:
        for test_case in test_cases:
            for tensor_dtype in tensor_dtypes:
                test_func(handle, device, *test_case, tensor_dtype, get_sync_func(device))
    finally:
        destroy_handle(handle)


test_operator.__test__ = False  # type: ignore[attr-defined]


def get_tolerance(tolerance_map: dict[Any, dict[str, float]], tensor_dtype: Any) -> tuple[float, float]:
    """Return (atol, rtol) of a dtype from a map {InfiniDtype.F16: {"atol": 1e-3, "rtol": 1e-2}}; zeros if absent."""
    tolerance = tolerance_map.get(tensor_dtype, {})
    return tolerance.get("atol", 0), tolerance.get("rtol", 0)


def debug(
    actual: Tensor,
    desired: Tensor,
    atol: float = 0,
    rtol: float = 1e-2,
    equal_nan: bool = False,
    verbose: bool = True,
) -> list[tuple[int, ...]]:
    """Compare two tensors, print differences (red: actual, green: desired, yellow: difference), return their indices.

    An element differs if |actual - desired| > atol + rtol * |desired|. BF16 is compared as float32.
    """
    return print_discrepancy(actual, desired, atol, rtol, equal_nan, verbose)


def print_discrepancy(
    actual: Tensor,
    expected: Tensor,
    atol: float = 0,
    rtol: float = 1e-3,
    equal_nan: bool = True,
    verbose: bool = True,
) -> list[tuple[int, ...]]:
    """Print and return the differences, for `debug`."""
    if actual.shape != expected.shape:
        raise ValueError(f"the tensors must have one shape, got {list(actual.shape)} and {list(expected.shape)}")
    left, right = (t.detach().cpu().to(torch.float64) for t in (actual, expected))
    off = ~torch.isclose(left, right, rtol=rtol, atol=atol, equal_nan=equal_nan)
    where = [tuple(index) for index in off.nonzero().tolist()]
    if verbose:
        for index in where:
            a, e = left[index].item(), right[index].item()
            place = ", ".join(map(str, index))
            red, green, yellow = f"\033[31m{a:.8g}\033[0m", f"\033[32m{e:.8g}\033[0m", f"\033[33m{a - e:.3g}\033[0m"
            print(f" > [{place}]: {red}, should be {green}, off by {yellow}")
        print(f"  dtype {actual.dtype} against {expected.dtype}, atol {atol}, rtol {rtol}")
        print(f"  {len(where)} of {actual.numel()} elements off ({100 * len(where) / max(actual.numel(), 1):.2f} %)")
        if actual.numel():
            print(
                f"  actual {left.min().item():.6g} to {left.max().item():.6g}, "
                f"desired {right.min().item():.6g} to {right.max().item():.6g}"
            )
    return where


def timed_op(func: Callable[[], Any], num_iterations: int, device: str) -> float:
    """Return the average seconds of a call of func; the torch device is synchronized before and after."""
    synchronize_device(device)
    start = time.perf_counter()
    for _ in range(num_iterations):
        func()
    synchronize_device(device)
    return (time.perf_counter() - start) / num_iterations


def profile_operation(
    desc: str, func: Callable[[], Any], torch_device: str, NUM_PRERUN: int, NUM_ITERATIONS: int
) -> None:
    """Call func NUM_PRERUN times, then time NUM_ITERATIONS calls and print the average: "Matmul time: 1.234567 ms"."""
    for _ in range(NUM_PRERUN):
        func()
    print(f"{desc} time: {timed_op(func, NUM_ITERATIONS, torch_device) * 1000:.6f} ms")
