"""dtype: the element types with torch's names; `float`, `int` and `bool` shadow the builtins in this file."""

from __future__ import annotations

import builtins

from .lib._infinicore import DataType

# The name that repr() shows; dtypes without such a constant are available only as _infinicore.DataType.
_NAMES = {
    DataType.BYTE: "byte",
    DataType.BOOL: "bool",
    DataType.I8: "int8",
    DataType.I16: "int16",
    DataType.I32: "int32",
    DataType.I64: "int64",
    DataType.U8: "uint8",
    DataType.U16: "uint16",
    DataType.U32: "uint32",
    DataType.U64: "uint64",
    DataType.F8: "float8",
    DataType.F16: "float16",
    DataType.F32: "float32",
    DataType.F64: "float64",
    DataType.C16: "complex16",
    DataType.C32: "complex32",
    DataType.C64: "complex64",
    DataType.C128: "complex128",
    DataType.BF16: "bfloat16",
}


class dtype:
    """An element type, such as infinicore.float16; `_underlying` is its `_infinicore.DataType`."""

    def __init__(self, data_type: DataType) -> None:
        if not isinstance(data_type, DataType):
            raise TypeError(f"infinicore.dtype: data_type must be an _infinicore.DataType, got {data_type!r}")
        self._underlying = data_type

    def __eq__(self, other: object) -> builtins.bool:
        return self._underlying == other._underlying if isinstance(other, dtype) else NotImplemented

    def __hash__(self) -> builtins.int:
        return hash(self._underlying)

    def __repr__(self) -> str:
        return f"infinicore.{_NAMES[self._underlying]}"


float32 = float = dtype(DataType.F32)
float64 = double = dtype(DataType.F64)
complex32 = chalf = dtype(DataType.C32)
complex64 = cfloat = dtype(DataType.C64)
complex128 = cdouble = dtype(DataType.C128)
float16 = half = dtype(DataType.F16)
bfloat16 = dtype(DataType.BF16)
uint8 = dtype(DataType.U8)
int8 = dtype(DataType.I8)
int16 = short = dtype(DataType.I16)
int32 = int = dtype(DataType.I32)
int64 = long = dtype(DataType.I64)
bool = dtype(DataType.BOOL)
