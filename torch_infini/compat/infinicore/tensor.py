"""Tensor, and the functions that make one from sizes, addresses, lists, numpy arrays, torch tensors and DLPack."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import utils
from ._arguments import described, integer, integers, raw, raw_device, raw_dtype, sizes
from ._started import without_modes
from .device import device as Device
from .dtype import dtype as DataType
from .lib import _infinicore

if TYPE_CHECKING:
    import numpy

_HOST = (1, 0)  # the CPU in the form of __dlpack_device__()
_TORCH_DLPACK = "torch.utils.dlpack"  # the module that calls __dlpack__() for torch.from_dlpack


class Tensor:
    """A tensor of the C++ front end: `_underlying` is its `_infinicore.Tensor`.

    Tensor(x) of an `_infinicore.Tensor` or another Tensor shares its memory.

    Sizes and strides are lists; strides are in elements. Views share memory. `+`, `*` and `@` take two tensors.
    numpy.asarray(), numpy.from_dlpack() and torch.from_dlpack() give views of the same memory, which they keep alive.
    """

    _underlying: _infinicore.Tensor
    _torch_ref: torch.Tensor | None

    def __init__(self, underlying: _infinicore.Tensor | Tensor, *, _torch_ref: torch.Tensor | None = None) -> None:
        if isinstance(underlying, Tensor):
            self._underlying, self._torch_ref = underlying._underlying, underlying._torch_ref
        elif isinstance(underlying, _infinicore.Tensor):
            self._underlying, self._torch_ref = underlying, _torch_ref
        else:
            raise TypeError(f"infinicore.Tensor: underlying must be an _infinicore.Tensor, got {described(underlying)}")
        self._shape: list[int] | None = None
        self._dtype: DataType | None = None
        self._device: Device | None = None

    @property
    def shape(self) -> list[int]:
        """The sizes, as a list."""
        if self._shape is None:
            self._shape = self._underlying.shape
        return list(self._shape)

    @property
    def dtype(self) -> DataType:
        """The element type."""
        if self._dtype is None:
            self._dtype = DataType(self._underlying.dtype)
        return self._dtype

    @property
    def device(self) -> Device:
        """The device."""
        if self._device is None:
            self._device = Device._from_infinicore_device(self._underlying.device)
        return self._device

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self._underlying.ndim

    def data_ptr(self) -> int:
        """Return the address of element [0, ..., 0]."""
        return self._underlying.data_ptr()

    def size(self, dim: int | None = None) -> Any:
        """Return all sizes, as a list, or the size of one dimension."""
        return self.shape if dim is None else self._pick(self.shape, dim, "size")

    def stride(self, dim: int | None = None) -> Any:
        """Return all strides in elements, as a list, or the stride of one dimension."""
        strides = self._underlying.strides
        return strides if dim is None else self._pick(strides, dim, "stride")

    def _pick(self, numbers: list[int], dim: int, function: str) -> int:
        dim = integer(dim, f"infinicore.Tensor.{function}", "dim", lowest=-(2**63))
        if not -len(numbers) <= dim < len(numbers):
            raise IndexError(f"infinicore.Tensor.{function}: dim must be below {len(numbers)}, got {dim}")
        return numbers[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return self._underlying.numel()

    def is_contiguous(self) -> bool:
        """Whether the strides are those of a new tensor; those of dimensions of size 1 matter too."""
        return self._underlying.is_contiguous()

    def is_pinned(self) -> bool:
        """Whether the memory is pinned: host memory that devices copy from directly."""
        return self._underlying.is_pinned()

    def copy_(self, src: Tensor) -> None:
        """Copy the elements of a tensor of the same shape and dtype, which may be on another device."""
        self._underlying.copy_(raw(src, "infinicore.Tensor.copy_", "src"))

    def to(self, device: Device | str) -> Tensor:
        """Return a copy on another device, or, on the same device, a tensor over the same memory."""
        return Tensor(self._underlying.to(raw_device(device, "infinicore.Tensor.to")))

    def contiguous(self) -> Tensor:
        """Return a contiguous copy, or a tensor over the same memory if it is already contiguous."""
        return Tensor(self._underlying.contiguous())

    def as_strided(self, size: Sequence[int], stride: Sequence[int]) -> Tensor:
        """Return a view with these sizes and strides that starts where this tensor does."""
        function = "infinicore.Tensor.as_strided"
        return Tensor(self._underlying.as_strided(sizes(size, function), integers(stride, function, "stride")))

    def permute(self, dims: Sequence[int]) -> Tensor:
        """Return a view whose dimension i is dimension dims[i] of this tensor."""
        return Tensor(self._underlying.permute(sizes(dims, "infinicore.Tensor.permute", "dims")))

    def view(self, shape: Sequence[int]) -> Tensor:
        """Return a view of another shape with equally many elements; sizes of -1 are not supported.

        RuntimeError if the strides do not allow it.
        """
        return Tensor(self._underlying.view(sizes(shape, "infinicore.Tensor.view", "shape")))

    def squeeze(self, dim: int) -> Tensor:
        """Return a view without a dimension, which must have size 1 (else RuntimeError); dim counts from 0."""
        return Tensor(self._underlying.squeeze(integer(dim, "infinicore.Tensor.squeeze", "dim")))

    def unsqueeze(self, dim: int) -> Tensor:
        """Return a view with a new dimension of size 1 and stride 0 at `dim`, which counts from 0."""
        return Tensor(self._underlying.unsqueeze(integer(dim, "infinicore.Tensor.unsqueeze", "dim")))

    def narrow(self, dim: int, start: int, length: int) -> Tensor:
        """Return a view of `length` elements of a dimension, from `start`; RuntimeError if it exceeds the dimension."""
        function = "infinicore.Tensor.narrow"
        return Tensor(
            self._underlying.narrow(
                integer(dim, function, "dim"),
                integer(start, function, "start"),
                integer(length, function, "length"),
            )
        )

    def debug(self, filename: str | None = None) -> None:
        """Print shape, strides, dtype, device and values; or write the elements' bytes to a file."""
        sys.stdout.flush()
        if filename is None:
            self._underlying.debug()
        else:
            self._underlying.debug(filename)

    def __add__(self, other: Tensor) -> Tensor:
        return Tensor(_infinicore.add(self._underlying, other._underlying)) if _is(other) else NotImplemented

    def __iadd__(self, other: Tensor) -> Tensor:
        if not _is(other):
            return NotImplemented
        _infinicore.add_(self._underlying, self._underlying, other._underlying)
        return self

    def __mul__(self, other: Tensor) -> Tensor:
        return Tensor(_infinicore.mul(self._underlying, other._underlying)) if _is(other) else NotImplemented

    def __matmul__(self, other: Tensor) -> Tensor:
        return Tensor(_infinicore.matmul(self._underlying, other._underlying)) if _is(other) else NotImplemented

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's (device type, index)."""
        return self._underlying.dlpack_device()

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule over this memory, or over a copy if requested.

        Waits for this thread's work on a CUDA device, unless stream is -1. After the consumer drops the capsule's
        tensor, the memory is reused only when its device is idle.
        """
        source = self
        place = self.__dlpack_device__()
        if dl_device is not None and tuple(dl_device) != place:
            if tuple(dl_device) != _HOST or copy is False:
                raise BufferError(f"infinicore.Tensor.__dlpack__: dl_device must be {place}, got {tuple(dl_device)}")
            source, place = self.to("cpu"), _HOST
        elif copy:
            source = Tensor(_infinicore.rearrange(self._underlying))
        # During the recording that writes this tensor, torch notes ops on a view; any other consumer would read
        # unfilled memory.
        if source._underlying.is_recorded_now() and sys._getframe(1).f_globals.get("__name__") == _TORCH_DLPACK:
            if place == _HOST:  # torch could not prevent reads between the recording and the first run
                with without_modes():
                    memory = source._as_torch().untyped_storage()
                    torch.empty(0, dtype=torch.uint8).set_(memory).zero_()
        else:
            _check_readable(source, "__dlpack__")
        waits = place[0] != _HOST[0] and stream != -1
        if waits:
            before = _infinicore.get_device()
            _infinicore.set_device(source._underlying.device)
            _infinicore.sync_stream()
            _infinicore.set_device(before)
        versioned = max_version is not None and max_version[0] >= 1
        return source._underlying.to_dlpack(versioned, waits)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray[Any, Any]:
        """Return a numpy view of this memory, on the CPU; a copy if dtype or copy requires one.

        bfloat16 uses ml_dtypes' bfloat16, and needs that package.
        """
        import numpy

        if self.device.type != "cpu":
            raise TypeError(f"infinicore.Tensor.__array__: device must be the CPU, got {self.device}: use to() first")
        _check_readable(self, "__array__")
        found: numpy.ndarray[Any, Any]
        if self._underlying.dtype == _infinicore.DataType.BF16:
            bits = _infinicore.from_owner(
                self._underlying,
                self.data_ptr(),
                self.shape,
                self.stride(),
                _infinicore.DataType.U16,
                self._underlying.device,
            )
            found = numpy.from_dlpack(Tensor(bits)).view(utils.infinicore_to_numpy_dtype(self.dtype))
        else:
            found = numpy.from_dlpack(self)
        if dtype is not None and found.dtype != dtype:
            if copy is False:
                raise ValueError(
                    f"infinicore.Tensor.__array__: dtype must be {found.dtype} without a copy, got {dtype}"
                )
            return found.astype(dtype)
        return found.copy() if copy else found

    def to_numpy(self) -> numpy.ndarray[Any, Any]:
        """Return a numpy array with a copy of the elements, also for a tensor on another device."""
        return self.to("cpu").__array__(copy=True)

    def __bool__(self) -> bool:
        if self.numel() != 1:
            raise RuntimeError(
                f"infinicore.Tensor.__bool__: the tensor must have one element, got shape {self.shape}: compare with "
                "None, or reduce it first"
            )
        return bool(self._host_view("__bool__"))  # raises while torch's ops are noted, as for a torch tensor

    def __copy__(self) -> Tensor:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copied = Tensor(_infinicore.rearrange(self._underlying))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        with without_modes():
            bits = self._host_view("__reduce__").flatten().view(torch.uint8).numpy()
        return _restored, (bits, self.shape, self.dtype, self.device)

    def _host_view(self, function: str) -> torch.Tensor:
        """Return the elements as a torch tensor on the CPU, a copy if they are elsewhere."""
        _check_readable(self, function)
        utils.to_torch_dtype(self.dtype)  # raises for dtypes that torch lacks
        return self.to("cpu")._as_torch()

    def _as_torch(self) -> torch.Tensor:
        found: torch.Tensor = torch.utils.dlpack.from_dlpack(self._underlying.to_dlpack(True, False))
        return found

    def __repr__(self) -> str:
        return f"infinicore.{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, device={self.device})"


def _is(other: object) -> bool:
    return isinstance(other, Tensor)


def _restored(bits: numpy.ndarray[Any, Any], shape: list[int], dtype: DataType, device: Device) -> Tensor:
    """Restore a tensor from its pickled bytes."""
    return Tensor(_infinicore.host_copy(bits.ctypes.data, shape, dtype._underlying)).to(device)


def _check_readable(tensor: Tensor, function: str) -> None:
    if tensor._underlying.is_recorded_only():
        raise RuntimeError(
            f"infinicore.Tensor.{function}: this tensor was made while a graph was recorded and holds nothing before "
            "the graph's first run()"
        )


def empty(
    size: Sequence[int], *, dtype: DataType | None = None, device: Device | str | None = None, pin_memory: bool = False
) -> Tensor:
    """Return a contiguous, uninitialized tensor; dtype and device must be given.

    Its device becomes the current one. pin_memory, for a CPU tensor: allocate memory that devices copy from directly.
    """
    return _made(_infinicore.empty, "empty", size, dtype, device, pin_memory)


def zeros(
    size: Sequence[int], *, dtype: DataType | None = None, device: Device | str | None = None, pin_memory: bool = False
) -> Tensor:
    """Return a contiguous tensor of zeros; arguments as for empty()."""
    return _made(_infinicore.zeros, "zeros", size, dtype, device, pin_memory)


def ones(
    size: Sequence[int], *, dtype: DataType | None = None, device: Device | str | None = None, pin_memory: bool = False
) -> Tensor:
    """Return a contiguous tensor of ones; arguments as for empty()."""
    return _made(_infinicore.ones, "ones", size, dtype, device, pin_memory)


def _made(make: Any, name: str, size: Any, dtype: Any, device: Any, pin_memory: bool) -> Tensor:
    function = f"infinicore.{name}"
    return Tensor(make(sizes(size, function), raw_dtype(dtype, function), raw_device(device, function), pin_memory))


def empty_like(input: Tensor, *, dtype: DataType | None = None, device: Device | str | None = None) -> Tensor:
    """Return a contiguous, uninitialized tensor of input's shape; dtype and device are input's unless given."""
    raw(input, "infinicore.empty_like", "input")
    return empty(input.shape, dtype=dtype or input.dtype, device=device or input.device)


def strided_empty(
    size: Sequence[int],
    strides: Sequence[int],
    *,
    dtype: DataType | None = None,
    device: Device | str | None = None,
    pin_memory: bool = False,
) -> Tensor:
    """Return an uninitialized tensor with these strides (in elements, not negative); otherwise as empty()."""
    function = "infinicore.strided_empty"
    shape, steps = sizes(size, function), sizes(strides, function, "strides")
    made = _infinicore.strided_empty(shape, steps, raw_dtype(dtype, function), raw_device(device, function), pin_memory)
    return Tensor(made)


def from_blob(
    data_ptr: int, size: Sequence[int], *, dtype: DataType | None = None, device: Device | str | None = None
) -> Tensor:
    """Return a contiguous tensor over memory at an address, which the caller keeps alive."""
    function = "infinicore.from_blob"
    address, shape = integer(data_ptr, function, "data_ptr", limit=2**64), sizes(size, function)
    return Tensor(_infinicore.from_blob(address, shape, raw_dtype(dtype, function), raw_device(device, function)))


def strided_from_blob(
    data_ptr: int,
    size: Sequence[int],
    strides: Sequence[int],
    *,
    dtype: DataType | None = None,
    device: Device | str | None = None,
) -> Tensor:
    """Return a tensor with these strides (in elements) over memory at an address, which the caller keeps alive."""
    function = "infinicore.strided_from_blob"
    made = _infinicore.strided_from_blob(
        integer(data_ptr, function, "data_ptr", limit=2**64),
        sizes(size, function),
        integers(strides, function, "strides"),
        raw_dtype(dtype, function),
        raw_device(device, function),
    )
    return Tensor(made)


def from_torch(torch_tensor: torch.Tensor) -> Tensor:
    """Return a tensor over a torch tensor's memory, with its strides and device; nothing is copied.

    The memory is kept alive, even if the torch tensor later gets other memory (module.half(), tensor.data = ...), which
    this tensor does not follow. On CUDA, this thread's stream waits for torch's current stream.
    """
    function = "infinicore.from_torch"
    if not isinstance(torch_tensor, torch.Tensor):
        raise TypeError(f"{function}: torch_tensor must be a torch.Tensor, got {described(torch_tensor)}")
    kind = torch_tensor.device.type
    if torch_tensor.layout != torch.strided or kind not in ("cpu", "cuda"):
        raise ValueError(
            f"{function}: torch_tensor must be a strided tensor on the CPU or a CUDA device, got layout "
            f"{torch_tensor.layout} on {torch_tensor.device}"
        )
    if torch_tensor.is_conj() or torch_tensor.is_neg():
        raise ValueError(f"{function}: torch_tensor must not be a lazy conjugate: call resolve_conj().resolve_neg()")
    dtype = utils.to_infinicore_dtype(torch_tensor.dtype)
    device = Device(kind, torch_tensor.device.index)
    if kind == "cuda":
        before = _infinicore.get_device()
        _infinicore.set_device(device._underlying)
        stream = torch.cuda.ExternalStream(_infinicore.get_stream(), torch_tensor.device)
        _infinicore.set_device(before)
        stream.wait_stream(torch.cuda.current_stream(torch_tensor.device))
        torch_tensor.record_stream(stream)
    made = _infinicore.from_owner(
        torch_tensor.detach(),  # an alias, because the tensor itself may change its storage
        torch_tensor.data_ptr(),
        list(torch_tensor.shape),
        list(torch_tensor.stride()),
        dtype._underlying,
        device._underlying,
    )
    return Tensor(made, _torch_ref=torch_tensor)


def from_dlpack(source: Any) -> Tensor:
    """Return a tensor over the memory of an object with `__dlpack__`, which is kept alive; nothing is copied."""
    if not hasattr(source, "__dlpack__"):
        raise TypeError(f"infinicore.from_dlpack: source must have __dlpack__, got {described(source)}")
    arguments = {}
    kind, index = source.__dlpack_device__()
    if kind == 2:  # CUDA: the producer makes this stream wait for its own
        before = _infinicore.get_device()
        _infinicore.set_device(Device("cuda", int(index))._underlying)
        arguments["stream"] = _infinicore.get_stream()
        _infinicore.set_device(before)
    try:
        capsule = source.__dlpack__(max_version=(1, 0), **arguments)
    except TypeError:  # a producer older than DLPack 1.0
        capsule = source.__dlpack__(**arguments)
    return Tensor(_infinicore.from_dlpack(capsule))


def from_numpy(
    np_array: numpy.ndarray[Any, Any], *, dtype: DataType | None = None, device: Device | str | None = None
) -> Tensor:
    """Return a contiguous copy of a numpy array, which must not be empty.

    Args:
        dtype: The result's dtype; None: the array's. ml_dtypes' bfloat16 is bfloat16. Fractions are truncated for an
            integer dtype; ValueError for a number out of its range, or an imaginary part for a real dtype.
        device: The result's device; None: the CPU.
    """
    import numpy

    function = "infinicore.from_numpy"
    if not isinstance(np_array, numpy.ndarray):
        raise TypeError(f"{function}: np_array must be a numpy.ndarray, got {described(np_array)}")
    return _from_array(np_array, dtype, device, function, "np_array")


def _from_array(
    array: numpy.ndarray[Any, Any], dtype: DataType | None, device: Device | str | None, function: str, argument: str
) -> Tensor:
    import numpy

    if array.size == 0:
        raise ValueError(f"{function}: {argument} must not be empty, got shape {array.shape}")
    found = utils.numpy_to_infinicore_dtype(array.dtype)
    if dtype is not None:
        raw_dtype(dtype, function)
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if dtype is None or dtype == found:
        host = numpy.asarray(native, order="C")
        made = Tensor(_infinicore.host_copy(host.ctypes.data, list(host.shape), found._underlying))
    else:
        wanted = utils.to_torch_dtype(dtype)
        lost = _lost(native, wanted)
        if lost.any():
            raise ValueError(f"{function}: {argument} must be numbers of {dtype}, got {native[lost][0].item()}")
        copy = numpy.array(native if wanted.is_complex or native.dtype.kind != "c" else native.real, order="C")
        with without_modes():
            if found == utils.to_infinicore_dtype(torch.bfloat16):
                source = torch.from_numpy(copy.view(numpy.uint16)).view(torch.bfloat16)
            else:
                source = torch.from_numpy(copy)
            converted = source.to(wanted)
        made = Tensor(_infinicore.host_copy(converted.data_ptr(), list(converted.shape), dtype._underlying))
    return made if device is None else made.to(device)


def _lost(array: numpy.ndarray[Any, Any], dtype: torch.dtype) -> numpy.ndarray[Any, Any]:
    """Return which numbers a dtype cannot represent; fractions may be truncated, and floats become infinite."""
    import numpy

    lost = numpy.zeros(array.shape, dtype=bool)
    if dtype == torch.bool or dtype.is_complex:
        return lost
    if array.dtype.kind == "c":
        lost |= array.imag != 0
        array = array.real
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        # Truncate floats first; both limits are powers of two, which float64 represents.
        whole = array if array.dtype.kind in "iu" else numpy.trunc(array.astype(numpy.float64))
        lost |= ~((whole >= limits.min) & ((whole <= limits.max) if whole is array else (whole < limits.max + 1)))
    return lost


def from_list(data: Any, *, dtype: DataType | None = None, device: Device | str | None = None) -> Tensor:
    """Return a tensor of the numbers of a list or tuple, nested per dimension; arguments as for from_numpy().

    Without a dtype numpy chooses: float64 for floats, int64 for ints.
    """
    import numpy

    if not isinstance(data, (list, tuple)):
        raise TypeError(f"infinicore.from_list: data must be a list or a tuple, got {described(data)}")
    return _from_array(numpy.array(data), dtype, device, "infinicore.from_list", "data")
