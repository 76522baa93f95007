"""communicator: the number of a process group, for torch.ops.infini.all_reduce and the other collectives.

csrc/torch/groups.h has the table of numbers, csrc/torch/collectives_torch.cpp the ops.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.devices import backing_type
from .._core.library import PATH, RUNTIME
from .libinfiniccl import CPU, DTYPES, NVIDIA, Communicator, ReduceOp
from .transport import choose, shared_unique_id

SELF = 0  # the group of this process alone

_Function = ctypes.CFUNCTYPE(
    ctypes.c_int,  # infiniStatus_t
    ctypes.c_int32,  # Collective
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int,  # infiniDtype_t
    ctypes.c_int32,
)
_LIBRARY = ctypes.CDLL(str(PATH))
_add, _remove = _LIBRARY.infiniTorchGroupAdd, _LIBRARY.infiniTorchGroupRemove
_add.argtypes, _add.restype = [ctypes.c_int64, ctypes.c_void_p, _Function], ctypes.c_int64
_remove.argtypes, _remove.restype = [ctypes.c_int64], None


def number_of(communicator: Communicator, size: int) -> int:
    """Register a communicator of `size` ranks. Its number is valid as long as the object lives."""
    number: int = _add(size, communicator.handle, _Function())
    weakref.finalize(communicator, _remove, number).atexit = False
    return number


_INTERNAL_ERROR = 1  # infiniStatus_t
_TORCH_DTYPES = {number: dtype for dtype, number in DTYPES.items()}


def _by_torch(group: Any) -> Callable[..., int]:
    """Make a function that runs the collectives by the group's own, for ranks that share no memory
    (csrc/torch/groups.h).

    Data that is only moved is sent as bytes, because Gloo does not know all dtypes. Gloo gets tensors with separate
    memory, because its threads may hold them after the call.
    """
    dist = torch.distributed
    size, me = group.size(), group.rank()
    reductions = {
        ReduceOp.SUM: dist.ReduceOp.SUM,
        ReduceOp.PROD: dist.ReduceOp.PRODUCT,
        ReduceOp.MAX: dist.ReduceOp.MAX,
        ReduceOp.MIN: dist.ReduceOp.MIN,
        ReduceOp.AVG: dist.ReduceOp.SUM,
    }

    def read(address: int | None, nbytes: int) -> Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            ctypes.memmove(made.data_ptr(), address or 0, nbytes)
        return made

    def all_reduce(send: int | None, nbytes: int, dtype: torch.dtype, op: int) -> Tensor:
        x = read(send, nbytes).view(dtype)
        dist.all_reduce(x, reductions[ReduceOp(op)], group)
        return x.div_(size) if op == ReduceOp.AVG else x

    def broadcast(send: int | None, nbytes: int, dtype: torch.dtype, root: int) -> Tensor:
        x = read(send, nbytes)
        dist.broadcast(x, group=group, group_src=root)
        return x

    def all_gather(send: int | None, nbytes: int, dtype: torch.dtype, _: int) -> Tensor:
        parts = list(torch.empty(size, nbytes, dtype=torch.uint8))
        dist.all_gather(parts, read(send, nbytes), group)
        return torch.cat(parts)

    def reduce_scatter(send: int | None, nbytes: int, dtype: torch.dtype, op: int) -> Tensor:
        return all_reduce(send, size * nbytes, dtype, op).chunk(size)[me] if nbytes else torch.empty(0)

    functions = (all_reduce, broadcast, all_gather, reduce_scatter)  # indexed by Collective

    def function(kind: int, send: int | None, recv: int | None, count: int, number: int, parameter: int) -> int:
        try:
            dtype = _TORCH_DTYPES[number]
            with torch.no_grad():
                result = functions[kind](send, count * dtype.itemsize, dtype, parameter)
            if result.nbytes:
                ctypes.memmove(recv or 0, result.data_ptr(), result.nbytes)
        except Exception as error:  # no exception may pass through C
            RUNTIME.infinirtSetLastErrorMessage(str(error).encode())
            return _INTERNAL_ERROR
        return 0

    return function


class Number:
    """An entry of the number table, with its communicator or function."""

    def __init__(self, group: Any, kind: str) -> None:
        self.group = group
        store = torch.distributed.distributed_c10d._get_process_group_store(group)
        timeout = getattr(group, "timeout", None) or torch.distributed.constants.default_pg_timeout
        rank, size = group.rank(), group.size()
        self._communicator: Communicator | None = None
        function = _Function()
        if kind == "cuda" or choose(store, rank, size, timeout).name == "shm":
            device_type = NVIDIA if kind == "cuda" else CPU
            unique = shared_unique_id(store, f"infiniccl/ops/{kind}", rank, timeout, device_type)
            device_id = torch.cuda.current_device() if kind == "cuda" else 0
            self._communicator = Communicator(size, unique, rank, device_type, device_id, timeout.total_seconds())
        else:
            function = _Function(_by_torch(group))
        self._function = function  # kept alive, because C calls it
        self.value: int = _add(size, self._communicator and self._communicator.handle, function)

    def destroy(self) -> None:
        _remove(self.value)
        if self._communicator is not None:
            self._communicator.destroy()


_lock = threading.Lock()
_numbers: dict[tuple[str, str], Number] = {}  # by group name and device type


def communicator(group: Any = None, device: str | torch.device = "cpu") -> int:
    """Return the number of a process group for torch.ops.infini's collective ops.

    The first call for a group and device type creates a communicator besides torch.distributed's own, so ops are not
    ordered with torch.distributed's calls; all ranks of the group must make it. Later calls return the same number
    until the group is destroyed. On the CPU the ranks share memory, or use the group's own collectives if they cannot
    (torch_infini.distributed.transport); on CUDA they use NCCL, on the rank's current device.

    Args:
        group: A process group of any backend; None: the default group, or this process alone if torch.distributed is
            not initialized.
        device: The device of the ops' tensors: "cpu", "cuda", or "infini", which means its backing device.

    Returns:
        A number above 0; 0 for a single rank.

    Raises:
        ValueError: For another device, or a process that is not in the group.
        RuntimeError: If the ranks cannot be connected within the group's timeout.

    Example:
        >>> group = torch_infini.distributed.communicator()
        >>> y = torch.ops.infini.all_reduce(x, group)
    """
    dist = torch.distributed
    kind = backing_type(device)
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"torch_infini.distributed.communicator: device must be cpu or cuda, got {kind}")
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return SELF
    group = group if group is not None else dist.group.WORLD
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            "torch_infini.distributed.communicator: this process must be in the group, got one that is not"
        )
    if group.size() == 1:
        return SELF
    with _lock:
        key = (group.group_name, kind)
        known = _numbers.get(key)
        if known is None or known.group is not group:  # a new group of the same name, after the old one was destroyed
            if known is not None:
                known.destroy()
            known = _numbers[key] = Number(group, kind)
        return known.value


def forget(group: Any) -> None:
    with _lock:
        for key in [key for key, number in _numbers.items() if number.group is group]:
            _numbers.pop(key).destroy()
