"""InfiniDtype: the element types of the C ABI (infiniDtype_t), and their names."""

from enum import IntEnum


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


InfiniDtypeNames: dict[InfiniDtype, str] = {dtype: dtype.name for dtype in InfiniDtype}
