"""KernelCalls: calls of CPU kernels that csrc/torch/program.h records, and replays by one C function without Python.

check_call only checks an op's arguments, for calls whose kernel runs later.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence

from .._core.library import PATH, RUNTIME
from ._plan import WritingCall

_LIBRARY = ctypes.CDLL(str(PATH))  # its functions release the GIL
_begin, _end = _LIBRARY.infiniTorchProgramBegin, _LIBRARY.infiniTorchProgramEnd
_replay, _destroy = _LIBRARY.infiniTorchProgramReplay, _LIBRARY.infiniTorchProgramDestroy
_checks_only = _LIBRARY.infiniTorchChecksOnly
_begin.argtypes, _begin.restype = [], ctypes.c_void_p
_end.argtypes, _end.restype = [], ctypes.c_size_t
_replay.argtypes = _destroy.argtypes = [ctypes.c_void_p]
_destroy.restype = None
_checks_only.argtypes, _checks_only.restype = [ctypes.c_bool], None
REPLAY: int = ctypes.cast(_replay, ctypes.c_void_p).value or 0  # the C function, to be called with a handle


class KernelCalls:
    """Calls of ops of torch.ops.infini on CPU tensors, all of which write into their arguments.

    Attributes:
        handle: The argument of REPLAY.
    """

    def __init__(self, what: str, calls: Sequence[WritingCall]) -> None:
        """Record the calls without running them; RuntimeError, beginning with `what`, for an op without kernel."""
        self.handle: int = _begin()
        assert self.handle, "this thread records already"
        weakref.finalize(self, _destroy, self.handle).atexit = False
        recorded = 0
        try:
            for call in calls:
                call.func(*call.args, **call.kwargs)
        finally:
            recorded = _end()
        if recorded != len(calls):
            raise RuntimeError(f"{what}: every op must have a kernel in C++, got {len(calls) - recorded} without one")

    def replay(self) -> None:
        """Run the calls up to the first that fails; RuntimeError with its message."""
        if _replay(self.handle):
            raise RuntimeError(RUNTIME.infiniGetLastErrorMessage().decode(errors="replace"))


def check_call(call: WritingCall) -> None:
    """Check the shapes, dtypes and strides of an out or in-place form's arguments; RuntimeError as the op raises."""
    _checks_only(True)
    try:
        call.func(*call.args, **call.kwargs)
    finally:
        _checks_only(False)
