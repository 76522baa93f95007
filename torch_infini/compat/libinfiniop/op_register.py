"""OpRegister: gives every function of the libraries its ctypes signature, which comes from the C headers alone.

A script may add functions of its own library with @OpRegister.operator.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

from ..._core.headers import Interface
from .structs import infiniopHandle_t, infiniopOperatorDescriptor_t, infiniopTensorDescriptor_t

_PLAIN: dict[str, Any] = {
    "int": c_int,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "uint32_t": c_uint32,
    "size_t": c_size_t,
    "ptrdiff_t": c_int64,
    "float": c_float,
    "infiniopHandle_t": infiniopHandle_t,
    "infiniopTensorDescriptor_t": infiniopTensorDescriptor_t,
    "struct InfiniopDescriptor*": infiniopOperatorDescriptor_t,
    "char*": c_char_p,
    "void*": c_void_p,
    "function": c_void_p,
}


def ctype(type_: str, interface: Interface) -> Any:
    """Return the ctypes type of a C type as headers.Argument states it; None for void."""
    type_ = type_.removeprefix("const ")
    if type_ == "void":
        return None
    if type_ in _PLAIN:
        return _PLAIN[type_]
    if type_ in interface.enums:
        return c_int
    if type_ in interface.handles:
        return infiniopOperatorDescriptor_t if type_.startswith("infiniop") else c_void_p
    if type_.endswith("*"):
        return POINTER(ctype(type_[:-1], interface))
    raise TypeError(f"torch_infini.compat.libinfiniop: no ctypes type for the C type {type_!r}")


class OpRegister:
    """Collects functions that configure a library, and calls them on it.

    `registry` holds what scripts have added; the libraries' own signatures come from their headers.
    """

    registry: list[Callable[[Any], None]] = []

    @classmethod
    def operator(cls, op: Callable[[Any], None]) -> Callable[[Any], None]:
        """Register `op` (as a decorator): it is called with the library when that is opened, to set signatures."""
        cls.registry.append(op)
        return op

    @classmethod
    def register_lib(cls, lib: Any) -> None:
        """Set the signatures of all functions on an InfiniLib."""
        interface = lib.interface
        for function in interface.functions.values():
            if function.library == "libinfiniccl":  # torch_infini.distributed.libinfiniccl sets those
                continue
            native = getattr(lib, function.name)
            native.argtypes = [ctype(argument.type, interface) for argument in function.arguments]
            native.restype = ctype(function.result, interface)
        for op in cls.registry:
            op(lib)
