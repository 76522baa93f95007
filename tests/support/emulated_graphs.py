"""Captures on the emulated CUDA runtime (csrc/emulation), for tests of what runs in CUDA graphs on a GPU.

Kernels are queued as they would be on a GPU's stream; what torch itself computes on its CPU tensors is not captured.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from torch_infini._core.library import RUNTIME

NVIDIA = 1  # INFINI_DEVICE_NVIDIA


def must(status: int) -> None:
    assert status == 0, RUNTIME.infiniGetLastErrorMessage().decode()


class _Kept(TorchDispatchMode):
    """Keeps what ops return, as the memory pool of a graph does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Any] = []
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.kept += pytree.tree_leaves(result)
        self.ops.add(func.name())
        return result


def captured_by_emulation(call: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
    """(what the call returned while it was captured, a replay of it)."""
    stream, graph, exec_ = (ctypes.c_void_p() for _ in range(3))
    kept = _Kept()
    must(RUNTIME.infinirtSetDevice(NVIDIA, 0))
    try:
        must(RUNTIME.infinirtStreamCreate(ctypes.byref(stream)))
        call()
        must(RUNTIME.infinirtStreamBeginCapture(stream, 0))
        RUNTIME.infinirtEmulateTorchStream(stream)
        try:
            with kept:
                result = call()
        finally:
            RUNTIME.infinirtEmulateTorchStream(None)
            must(RUNTIME.infinirtStreamEndCapture(stream, ctypes.byref(graph)))
        must(RUNTIME.infinirtGraphInstantiate(ctypes.byref(exec_), graph, None, None, ctypes.c_size_t(0)))
    finally:
        must(RUNTIME.infinirtSetDevice(0, 0))

    def replay(kept: _Kept = kept) -> None:
        must(RUNTIME.infinirtGraphLuanch(exec_, stream))
        must(RUNTIME.infinirtStreamSynchronize(stream))

    return result, replay
