"""The numbers by which ops name a group of ranks: torch.ops.infini.all_reduce(x, group)."""

from __future__ import annotations

import ctypes
import weakref

from .._library import PATH
from ..libinfiniccl import Communicator

_LIBRARY = ctypes.CDLL(str(PATH))
_add, _remove = _LIBRARY.infiniTorchGroupAdd, _LIBRARY.infiniTorchGroupRemove
_add.argtypes, _add.restype = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p], ctypes.c_int64
_remove.argtypes, _remove.restype = [ctypes.c_int64], None


def number_of(communicator: Communicator, size: int) -> int:
    """A number for a communicator of `size` ranks; it holds as long as the communicator is there."""
    number: int = _add(size, communicator._handle, None)
    weakref.finalize(communicator, _remove, number).atexit = False
    return number
