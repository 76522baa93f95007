"""Runs torch's ops on infinicore tensors: views in both directions, on one stream, at once or at each replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.utils.dlpack import from_dlpack

from ..._core.library import emulates_cuda
from . import utils
from .lib import _infinicore
from .tensor import Tensor, from_torch

__all__ = ["as_torch", "check_torch_has", "from_torch", "record_or_run"]


def check_torch_has(kind: str) -> None:
    """Raise RuntimeError for a device type on which torch does not compute."""
    if kind == "cuda" and (emulates_cuda() or not torch.backends.cuda.is_built()):
        without = "the CUDA of this build is emulated" if emulates_cuda() else "this torch has no CUDA"
        raise RuntimeError(f"torch computes this, so its tensors must be on the CPU, since {without}, got one on cuda")


def as_torch(tensor: Tensor) -> torch.Tensor:
    """Return a torch view of a tensor's memory, which it keeps alive; also for bool and bfloat16.

    On CUDA, use it only for work on the context's stream: in functions called by record_or_run().
    """
    utils.to_torch_dtype(tensor.dtype)  # raises for dtypes that torch lacks
    check_torch_has(tensor.device.type)
    found: torch.Tensor = from_dlpack(tensor._underlying.to_dlpack(True, False))
    return found


def record_or_run(function: Callable[[], object], outputs: Sequence[Tensor], name: str = "function of torch") -> None:
    """Run a function that fills `outputs` by torch; while a graph is recorded, add it to the graph instead.

    Args:
        function: Reads and writes torch views (as_torch()); runs at each Graph.run() if recorded. On CUDA, torch's
            current stream is then the context's, and a graph with such a function runs op by op. Its exceptions are
            raised by this call, or by Graph.run().
        outputs: The tensors it writes, kept alive by the graph. The first one's device determines the stream.
        name: For Graph.report().
    """
    if outputs:
        check_torch_has(outputs[0].device.type)
    if not _infinicore.is_graph_recording():
        _run(function, outputs)
        return
    kept = tuple(outputs)
    _infinicore.add_host_operator(lambda: _run(function, kept), name)


def _run(function: Callable[[], object], outputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        if not outputs or outputs[0].device.type != "cuda":
            function()
            return
        device = outputs[0].device
        before = _infinicore.get_device()
        _infinicore.set_device(device._underlying)
        try:
            stream = torch.cuda.ExternalStream(_infinicore.get_stream(), f"cuda:{device.index}")
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    # torch would reuse the memory of intermediate results, which a captured graph still writes.
                    raise RuntimeError("an op that torch computes is run anew each time, not captured")
                function()
        finally:
            _infinicore.set_device(before)
