"""Loads the vendor's library beside torch_infini's, and calls ops on its device through the C interface.

Run by tests/test_vendor_device.py in a separate process, since a device that is registered stays: use.py LIBRARY
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_infini.compat.libinfiniop import LIBINFINIOP as lib

QY, F32, H2D, D2H, NOT_IMPLEMENTED, BAD_DTYPE = 9, 13, 1, 2, 2, 10


def ok(status: int) -> None:
    assert status == 0, (status, lib.infiniGetLastErrorMessage().decode())


def refused(status: int, expected: int, pattern: str) -> None:
    sentence = lib.infiniGetLastErrorMessage().decode()
    assert status == expected and re.fullmatch(pattern, sentence), (status, sentence)


def made(function: Any, *arguments: Any, at: int = 0) -> Any:
    """What a function writes through its argument number `at`, the others being these."""
    out = function.argtypes[at]._type_()
    ok(function(*arguments[:at], ctypes.byref(out), *arguments[at:]))
    return out


def described(shape: Sequence[int], dtype: int = F32) -> Any:
    sizes = (ctypes.c_size_t * len(shape))(*shape)
    return made(lib.infiniopCreateTensorDescriptor, len(shape), sizes, None, dtype)


def on_device(x: Tensor) -> Any:
    memory = made(lib.infinirtMalloc, x.nbytes)
    ok(lib.infinirtMemcpy(memory, x.data_ptr(), x.nbytes, H2D))
    return memory


def on_host(memory: Any, shape: Sequence[int]) -> Tensor:
    y = torch.empty(shape)
    ok(lib.infinirtMemcpy(y.data_ptr(), memory, y.nbytes, D2H))
    return y


def main() -> None:
    refused(
        lib.infinirtSetDevice(QY, 0),
        5,
        r"infinirtSetDevice: device must be one this build has a backend for \(cpu(, nvidia)?\), got qy; .*",
    )
    vendor = ctypes.CDLL(sys.argv[1])
    vendor.qy_last_kernel.restype = ctypes.c_char_p
    vendor.qy_last_stream.restype = ctypes.c_void_p
    count = ctypes.c_int()
    ok(lib.infinirtGetDeviceCount(QY, ctypes.byref(count)))
    assert count.value == 2
    ok(lib.infinirtSetDevice(QY, 1))
    handle, stream = made(lib.infiniopCreateHandle), made(lib.infinirtStreamCreate)

    # RMSNorm, on a stream and on none.
    x, weight = torch.randn(5, 7), torch.randn(7)
    x_desc, weight_desc = described((5, 7)), described((7,))
    desc = made(lib.infiniopCreateRMSNormDescriptor, handle, x_desc, x_desc, weight_desc, 1e-5, at=1)
    device, number = ctypes.c_int(), ctypes.c_int()
    ok(lib.infiniopGetDescriptorDeviceType(desc, ctypes.byref(device)))
    ok(lib.infiniopGetDescriptorDeviceId(desc, ctypes.byref(number)))
    assert (device.value, number.value) == (QY, 1)
    y_memory, x_memory, w_memory = on_device(torch.zeros(5, 7)), on_device(x), on_device(weight)
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    for on in (stream, None):
        ok(lib.infiniopRMSNorm(desc, None, 0, y_memory, x_memory, w_memory, on))
        # One rounding of y, and one of the scale: 2^-24 each.
        torch.testing.assert_close(on_host(y_memory, (5, 7)).double(), expected, rtol=2**-22, atol=1e-30)
        assert vendor.qy_last_kernel() == b"rms_norm"
        assert vendor.qy_last_device() == 100 * QY + 1
        assert vendor.qy_last_stream() == (None if on is None else stream.value)
    ok(lib.infiniopDestroyRMSNormDescriptor(desc))

    # Add, which shares its table with the other elementwise ops: the vendor's kernel refuses those.
    desc = made(lib.infiniopCreateAddDescriptor, handle, x_desc, x_desc, x_desc, at=1)
    ok(lib.infiniopAdd(desc, None, 0, y_memory, x_memory, x_memory, stream))
    assert torch.equal(on_host(y_memory, (5, 7)), x + x)
    assert vendor.qy_last_kernel() == b"add"
    ok(lib.infiniopDestroyAddDescriptor(desc))
    desc = made(lib.infiniopCreateMulDescriptor, handle, x_desc, x_desc, x_desc, at=1)
    refused(
        lib.infiniopMul(desc, None, 0, y_memory, x_memory, x_memory, None),
        NOT_IMPLEMENTED,
        "infini::mul: no kernel for qy",
    )
    ok(lib.infiniopDestroyMulDescriptor(desc))

    # The rules are checked in front of the vendor's kernel, and its own errors come back.
    halves = described((5, 7), 12)
    desc = made(lib.infiniopCreateAddDescriptor, handle, halves, halves, halves, at=1)
    refused(
        lib.infiniopAdd(desc, None, 0, y_memory, x_memory, x_memory, None),
        BAD_DTYPE,
        "qy::add: tensors must be float32, got float16",
    )
    ok(lib.infiniopDestroyAddDescriptor(desc))
    none = lib.infiniopCreateRMSNormDescriptor.argtypes[1]._type_()
    status = lib.infiniopCreateRMSNormDescriptor(handle, ctypes.byref(none), x_desc, x_desc, x_desc, 1e-5)
    assert status != 0 and "weight must have" in lib.infiniGetLastErrorMessage().decode()

    # An op that the vendor has no kernel for.
    square = described((4, 4))
    none = lib.infiniopCreateGemmDescriptor.argtypes[1]._type_()
    refused(
        lib.infiniopCreateGemmDescriptor(handle, ctypes.byref(none), square, square, square),
        NOT_IMPLEMENTED,
        "infiniopCreateGemmDescriptor: handle must be of a device that this op has a kernel for "
        r"\(cpu(, nvidia)?\), got one of qy",
    )

    for memory in (y_memory, x_memory, w_memory):
        ok(lib.infinirtFree(memory))
    ok(lib.infinirtStreamDestroy(stream))
    ok(lib.infiniopDestroyHandle(handle))

    # The CPU computes as before, in the same process.
    ok(lib.infinirtSetDevice(0, 0))
    y = torch.empty(5, 7)
    handle = made(lib.infiniopCreateHandle)
    desc = made(lib.infiniopCreateAddDescriptor, handle, x_desc, x_desc, x_desc, at=1)
    ok(lib.infiniopAdd(desc, None, 0, y.data_ptr(), x.data_ptr(), x.data_ptr(), None))
    assert torch.equal(y, x + x) and torch.equal(torch.ops.infini.add(x, x), x + x)
    assert vendor.qy_last_kernel() == b"add" and vendor.qy_last_device() == 100 * QY + 1
    print("fine")


if __name__ == "__main__":
    main()
