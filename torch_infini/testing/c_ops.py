"""Shared by tests, fuzzer and benchmarks of the C ops: a description of each, one file per op (or family).

`call` runs an op through the C ABI on torch tensors; arguments have the names in the op's header.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._core.dtypes import INFINI_DTYPES
from .._core.headers import Function, parse
from .._core.library import PATH, ROOT

INTERFACE = parse(ROOT / "include")

STATUS = {value: name.removeprefix("INFINI_STATUS_") for name, value in INTERFACE.enums["infiniStatus_t"].items()}
# No operator computes in complex numbers.
DTYPES: dict[torch.dtype, int] = {dt: int(number) for dt, number in INFINI_DTYPES.items() if not dt.is_complex}
# The allowed (relative, absolute) error if a sample states none; integers must be equal.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-13, 1e-13),
    torch.float32: (2e-6, 2e-6),
    torch.bfloat16: (2**-8, 1e-6),
    torch.float16: (2**-11, 1e-6),
}


class CError(RuntimeError):
    """A function of the C ABI failed: `status` is its status's name, the text its message."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = STATUS[status]


@dataclass(frozen=True)
class Described:
    """A tensor that a descriptor can express and torch may not: any strides on any memory.

    `base` is the memory, `offset` the position in it of the element with all indices 0, in elements of `base`.
    """

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    dtype: int | None = None  # an infiniDtype_t, if different from base's


def memory_of(tensor: Tensor) -> Tensor:
    """Return all bytes of the tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def clone(args: Mapping[str, Any], device: str | torch.device | None = None) -> dict[str, Any]:
    """Copy all tensors, with their strides, to `device` if given; tensors that share memory share their copy."""
    copies: dict[int, Any] = {}
    memory: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Described):
            return Described(copy(value.base), value.shape, value.strides, value.offset, value.dtype)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            storage, place = value.untyped_storage(), torch.device(device or value.device)
            if storage.data_ptr() not in memory:
                memory[storage.data_ptr()] = memory_of(value).to(place, copy=True).untyped_storage()
            copies[id(value)] = torch.empty(0, dtype=value.dtype, device=place).set_(
                memory[storage.data_ptr()], value.storage_offset(), value.shape, value.stride()
            )
        return copies[id(value)]

    return {key: copy(value) for key, value in args.items()}


def as_tensor(value: Tensor | Described) -> Tensor:
    """Copy a tensor with strides that torch does not support (negative ones), element by element."""
    if isinstance(value, Tensor):
        return value
    index = torch.full(value.shape, value.offset, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(value.shape, value.strides, strict=True)):
        index += (torch.arange(size) * stride).view([-1 if d == dim else 1 for d in range(len(value.shape))])
    return value.base.reshape(-1)[index]


@dataclass(frozen=True)
class CSample:
    """One call: all arguments of Create and of the op itself, by name; tensors without `_desc`.

    Tensors to be written are given as they are before the call (fill them so that a skipped write shows). For a call in
    place, give the same tensor object under two names. None: NULL.
    """

    name: str
    args: Mapping[str, Any]
    tolerance: tuple[float, float] | None = None


@dataclass(frozen=True)
class CErrorCase:
    """A call that `at` ("create" or "run") must reject, with this status and this message.

    of_values: the rule is about the tensors' contents, which only the CPU checks before it computes.
    """

    name: str
    args: Mapping[str, Any]
    status: str
    message: str
    at: str = "create"
    of_values: bool = False


@dataclass(frozen=True)
class COp:
    """One op of the C ABI.

    Attributes:
        name: As in infiniopCreate<name>Descriptor.
        outputs: The names of the tensors that it writes.
        reference: Takes the arguments by name, as they were before the call, and returns the expected outputs in
            float64 (or as integers), computed from the given inputs. It has no side effects.
        samples: The calls of the generic tests: every dtype of the specification, odd and large shapes, strides,
            broadcast inputs, in place, empty, and without dimensions if allowed.
        errors: The calls that must be rejected.
        undescribed: For ops that write to memory without a descriptor: takes the arguments, returns the bytes that each
            such tensor needs.
        compare: Replaces the comparison with the reference for results that are not deterministic: takes the sample,
            and the outputs by name; raises AssertionError.
        cuda_slack: Takes the reference's result and the arguments; returns the absolute error allowed on CUDA beyond
            the tolerances, as OpInfo.cuda_slack, or by output name if allowed only for some. Then `compare` applies to
            the CPU only.
    """

    name: str
    outputs: Sequence[str]
    reference: Callable[..., dict[str, Tensor]]
    samples: Callable[[], Iterable[CSample]]
    errors: Callable[[], Iterable[CErrorCase]]
    compare: Callable[[CSample, dict[str, Tensor]], None] | None = None
    undescribed: Callable[[Mapping[str, Any]], dict[str, int]] | None = None
    tolerances: Mapping[torch.dtype, tuple[float, float]] = field(default_factory=lambda: dict(TOLERANCES))
    cuda_slack: Callable[[dict[str, Tensor], dict[str, Any]], Tensor | float | Mapping[str, Tensor]] | None = None

    @property
    def create(self) -> Function:
        return INTERFACE.functions[f"infiniopCreate{self.name}Descriptor"]

    @property
    def run(self) -> Function:
        return INTERFACE.functions[f"infiniop{self.name}"]


_CTYPES = {"int": ctypes.c_int, "size_t": ctypes.c_size_t, "float": ctypes.c_float, "infiniRoPEAlgo_t": ctypes.c_int}


# Without the signatures of torch_infini.compat.libinfiniop, because tests pass values that those would reject.
LIBRARIES = {name: ctypes.CDLL(str(PATH.with_name(f"{name}.so"))) for name in ("libinfinirt", "libinfiniop")}
LIBRARIES["libinfinirt"].infiniGetLastErrorMessage.restype = ctypes.c_char_p


def c_function(name: str) -> Callable[..., None]:
    """Return a function of the C ABI that raises CError on failure."""
    function = LIBRARIES[INTERFACE.functions[name].library][name]

    def call(*args: Any) -> None:
        status = function(*args)
        if status:
            raise CError(status, LIBRARIES["libinfinirt"].infiniGetLastErrorMessage().decode())

    return call


def _array(ctype: Any, values: Sequence[int]) -> Any:
    return (ctype * len(values))(*values)


class TensorDescriptor:
    """An infiniopTensorDescriptor_t of a torch tensor (or of a Described), destroyed at the end of `with`."""

    def __init__(self, tensor: Tensor | Described) -> None:
        shape = tuple(tensor.shape)
        if isinstance(tensor, Described):
            strides = tensor.strides
            dtype = DTYPES[tensor.base.dtype] if tensor.dtype is None else tensor.dtype
        else:
            strides, dtype = tensor.stride(), DTYPES[tensor.dtype]
        self.handle = ctypes.c_void_p()
        c_function("infiniopCreateTensorDescriptor")(
            ctypes.byref(self.handle),
            ctypes.c_size_t(len(shape)),
            _array(ctypes.c_size_t, shape),
            _array(ctypes.c_ssize_t, strides),
            dtype,
        )

    def __enter__(self) -> ctypes.c_void_p:
        return self.handle

    def __exit__(self, *_: object) -> None:
        c_function("infiniopDestroyTensorDescriptor")(self.handle)


def address(tensor: Tensor | Described | None) -> ctypes.c_void_p:
    """Return the address of the element with all indices 0."""
    if tensor is None:
        return ctypes.c_void_p(None)
    if isinstance(tensor, Described):
        return ctypes.c_void_p(tensor.base.data_ptr() + tensor.offset * tensor.base.element_size())
    return ctypes.c_void_p(tensor.data_ptr())


def _value(type_: str, value: Any, keep: list[Any]) -> Any:
    """Convert an argument that is no tensor for ctypes; `keep` collects objects that must stay alive."""
    if type_.endswith("*"):
        if isinstance(value, Tensor):
            return address(value)
        if value is None:
            return ctypes.c_void_p(None)
        keep.append(_array(ctypes.c_int64, value))  # conv's pads, strides and dilations
        return ctypes.cast(keep[-1], ctypes.c_void_p)
    return _CTYPES.get(type_, ctypes.c_int)(value)


class Handle:
    """An infiniopHandle_t of the current device, destroyed at the end of `with`."""

    def __enter__(self) -> ctypes.c_void_p:
        self.handle = ctypes.c_void_p()
        c_function("infiniopCreateHandle")(ctypes.byref(self.handle))
        return self.handle

    def __exit__(self, *_: object) -> None:
        c_function("infiniopDestroyHandle")(self.handle)


class Descriptor:
    """An operator descriptor for a sample's arguments; its tensor descriptors and handle are already destroyed."""

    def __init__(self, op: COp, args: Mapping[str, Any]) -> None:
        self.op, self.handle = op, ctypes.c_void_p()
        keep: list[Any] = []
        made: list[TensorDescriptor] = []
        with Handle() as handle:
            try:
                values: list[Any] = [handle, ctypes.byref(self.handle)]
                for argument in op.create.arguments[2:]:
                    if argument.type == "infiniopTensorDescriptor_t":
                        tensor = args[argument.name.removesuffix("_desc")]
                        if tensor is not None:
                            made.append(TensorDescriptor(tensor))
                        values.append(made[-1].handle if tensor is not None else None)
                    else:
                        values.append(_value(argument.type, args[argument.name], keep))
                c_function(op.create.name)(*values)
            finally:
                for descriptor in made:
                    descriptor.__exit__()

    def workspace_size(self) -> int:
        name = f"infiniopGet{self.op.name}WorkspaceSize"
        if name not in INTERFACE.functions:  # rearrange
            return 0
        size = ctypes.c_size_t()
        c_function(name)(self.handle, ctypes.byref(size))
        return size.value

    def run(self, args: Mapping[str, Any], stream: ctypes.c_void_p | None = None) -> Any:
        """Run on the memory of a sample's arguments. With a stream, keep the result until the work is done."""
        bound = self.bound(args, stream)
        bound()
        return bound

    def bound(self, args: Mapping[str, Any], stream: ctypes.c_void_p | None = None) -> Callable[[], None]:
        """Return the run as a function without arguments, for repeated calls; it holds the workspace."""
        size = self.workspace_size()
        bases = [v.base if isinstance(v, Described) else v for v in args.values()]
        place = next((v.device for v in bases if isinstance(v, Tensor)), None)
        workspace = torch.empty(size, dtype=torch.uint8, device=place)
        keep: list[Any] = [workspace]
        values: list[Any] = []
        for argument in self.op.run.arguments:
            if argument.name == "desc":
                values.append(self.handle)
            elif argument.name == "workspace":
                values.append(ctypes.c_void_p(workspace.data_ptr() if size else None))
            elif argument.name == "workspace_size":
                values.append(ctypes.c_size_t(size))
            elif argument.name == "stream":
                values.append(stream)
            elif argument.type.endswith("*"):
                tensor = args[argument.name]
                values.append(address(tensor))
            else:
                values.append(_value(argument.type, args[argument.name], keep))
        function = c_function(self.op.run.name)

        def run(_keep: list[Any] = keep) -> None:
            function(*values)

        return run

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        c_function(f"infiniopDestroy{self.op.name}Descriptor")(self.handle)


def call(op: COp, args: Mapping[str, Any], stream: ctypes.c_void_p | None = None) -> Any:
    """Create, run, destroy. With a stream, keep the result until the work is done."""
    with Descriptor(op, args) as descriptor:
        return descriptor.run(args, stream)
