"""The element types of the C ABI (infiniDtype_t) and of safetensors files, each with torch's dtype in one table."""

from __future__ import annotations

from enum import IntEnum

import torch


class InfiniDtype(IntEnum):
    """infiniDtype_t."""

    INVALID = 0
    BYTE = 1
    BOOL = 2
    I8 = 3
    I16 = 4
    I32 = 5
    I64 = 6
    U8 = 7
    U16 = 8
    U32 = 9
    U64 = 10
    F8 = 11
    F16 = 12
    F32 = 13
    F64 = 14
    C16 = 15
    C32 = 16
    C64 = 17
    C128 = 18
    BF16 = 19


TORCH_DTYPES: dict[InfiniDtype, torch.dtype] = {  # torch has no C16
    InfiniDtype.BYTE: torch.uint8,
    InfiniDtype.BOOL: torch.bool,
    InfiniDtype.I8: torch.int8,
    InfiniDtype.I16: torch.int16,
    InfiniDtype.I32: torch.int32,
    InfiniDtype.I64: torch.int64,
    InfiniDtype.U8: torch.uint8,
    InfiniDtype.U16: torch.uint16,
    InfiniDtype.U32: torch.uint32,
    InfiniDtype.U64: torch.uint64,
    InfiniDtype.F8: torch.float8_e4m3fn,
    InfiniDtype.F16: torch.float16,
    InfiniDtype.F32: torch.float32,
    InfiniDtype.F64: torch.float64,
    InfiniDtype.C32: torch.complex32,
    InfiniDtype.C64: torch.complex64,
    InfiniDtype.C128: torch.complex128,
    InfiniDtype.BF16: torch.bfloat16,
}
# The reverse; uint8 is U8, not BYTE.
INFINI_DTYPES: dict[torch.dtype, InfiniDtype] = {
    dtype: number for number, dtype in TORCH_DTYPES.items() if number is not InfiniDtype.BYTE
}

# By the names that safetensors files have.
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def floating(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a floating dtype, given by itself or by name, None for "auto"; ValueError for one without kernels."""
    if dtype == "auto":  # as in transformers and vLLM
        return None
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), None) or dtype
    if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"torch_infini: dtype must be float32, bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
        )
    return dtype
