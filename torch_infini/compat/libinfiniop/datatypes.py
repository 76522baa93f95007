"""InfiniDtype: the element types of the C ABI (infiniDtype_t), and their names."""

from ..._core.dtypes import InfiniDtype

__all__ = ["InfiniDtype", "InfiniDtypeNames"]

InfiniDtypeNames: dict[InfiniDtype, str] = {dtype: dtype.name for dtype in InfiniDtype}
