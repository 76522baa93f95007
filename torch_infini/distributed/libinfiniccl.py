"""ctypes bindings of libinfiniccl: communicators, and collectives on addresses.

Failures raise RuntimeError; csrc/include/infiniccl.h documents each function. A call without a stream runs on the
calling thread, without the GIL, and is done on return.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from typing import Any

import torch

from .._core.dtypes import INFINI_DTYPES, InfiniDtype
from .._core.headers import Interface, declare, parse
from .._core.library import PATH, ROOT, RUNTIME

CPU, NVIDIA = 0, 1  # infiniDevice_t

# By torch's dtype; float8 is sent as bytes.
DTYPES: dict[torch.dtype, int] = {
    dtype: int(number) for dtype, number in INFINI_DTYPES.items() if number is not InfiniDtype.F8
}


class ReduceOp(IntEnum):
    """infinicclReduceOp_t."""

    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


@cache
def _library() -> tuple[ctypes.CDLL, Interface]:
    return ctypes.CDLL(str(PATH.with_name("libinfiniccl.so"))), parse(ROOT / "include")


@cache
def _function(name: str) -> Any:
    library, interface = _library()
    return declare(library, f"infiniccl{name}", interface)


def _call(name: str, *arguments: Any) -> None:
    if _function(name)(*arguments):
        raise RuntimeError(RUNTIME.infiniGetLastErrorMessage().decode(errors="replace"))


def unique_id(device_type: int = CPU) -> bytes:
    """Return a new 128-byte id, for Communicator on every rank."""
    made = ctypes.create_string_buffer(128)
    _call("GetUniqueId", device_type, made)
    return made.raw


class Communicator:
    """One rank's communicator; destroy() or garbage collection ends it.

    Args:
        ranks: The number of ranks.
        unique: The result of unique_id(), the same on all ranks.
        rank: 0 to ranks - 1.
        device_type: infiniDevice_t.
        device_id: The rank's device.
        timeout: How long this and later waits may take, in seconds; None: $INFINI_CCL_TIMEOUT, else 300.

    Raises:
        RuntimeError: If infinicclCommInitRank fails: a rank does not join, memory is short, or arguments are wrong.
    """

    def __init__(
        self,
        ranks: int,
        unique: bytes,
        rank: int,
        device_type: int = CPU,
        device_id: int = 0,
        timeout: float | None = None,
    ) -> None:
        handle = ctypes.c_void_p()
        given = ctypes.create_string_buffer(unique, 128)
        _call("CommInitRank", device_type, ctypes.byref(handle), ranks, given, rank, device_id, _milliseconds(timeout))
        self._own(handle.value)

    @classmethod
    def all(cls, ranks: int, device_type: int = CPU, device_ids: Sequence[int] | None = None) -> list[Communicator]:
        """Create the communicators of all ranks, for threads or streams of this process."""
        handles = (ctypes.c_void_p * ranks)()
        devices = None if device_ids is None else (ctypes.c_int * ranks)(*device_ids)
        _call("CommInitAll", device_type, handles, ranks, devices)
        made = [cls.__new__(cls) for _ in handles]
        for communicator, handle in zip(made, handles, strict=True):
            communicator._own(handle)
        return made

    @property
    def handle(self) -> int | None:
        """The infinicclComm_t; None after destroy()."""
        return self._handle

    def set_timeout(self, timeout: float | None) -> None:
        """Set how long later waits may take, in seconds; None: the default."""
        _call("CommSetTimeout", self._handle, _milliseconds(timeout))

    def abort(self) -> None:
        """Fail the communicator on all ranks."""
        _call("CommAbort", self._handle)

    def destroy(self) -> None:
        """Destroy the communicator. Repeated calls do nothing."""
        self._handle = None
        self._end()

    def _own(self, handle: int | None) -> None:
        self._handle = handle
        self._end = weakref.finalize(self, _call, "CommDestroy", handle)

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int | None = None) -> None:
        """Set recv[i] to the reduction over all ranks of send[i]. Arguments are addresses and infiniDtype_t."""
        _call("AllReduce", send, recv, count, dtype, op, self._handle, stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, stream: int | None = None) -> None:
        """Set recv to the root's send."""
        _call("Broadcast", send, recv, count, dtype, root, self._handle, stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: int, stream: int | None = None) -> None:
        """Set recv[rank * count + i] to the rank's send[i]."""
        _call("AllGather", send, recv, count, dtype, self._handle, stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: int, op: int, stream: int | None = None) -> None:
        """Set recv[i] to the reduction over all ranks of send[rank * count + i]."""
        _call("ReduceScatter", send, recv, count, dtype, op, self._handle, stream)

    def send(self, send: int, count: int, dtype: int, peer: int, stream: int | None = None) -> None:
        """Send to another rank, which calls recv."""
        _call("Send", send, count, dtype, peer, self._handle, stream)

    def recv(self, recv: int, count: int, dtype: int, peer: int, stream: int | None = None) -> None:
        """Receive from another rank, which calls send."""
        _call("Recv", recv, count, dtype, peer, self._handle, stream)


def _milliseconds(timeout: float | None) -> int:
    """Convert seconds; 0 means the default."""
    return 0 if timeout is None else max(1, round(timeout * 1000)) if timeout > 0 else -1
