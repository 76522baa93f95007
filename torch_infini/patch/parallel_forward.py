"""The forward that transformers' tensor parallelism (`tp_plan="auto"`) sets on the instance of a sharded module.

Its closure holds the style and the mesh, which say how the module is sharded.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn

FORWARD = "_infini_forward"  # attribute of a patched module: the forward that transformers set on the instance
TENSOR_PARALLELISM = "transformers.distributed.tensor_parallel"  # the module that defines these forwards


def parallel_forward(module: nn.Module) -> FunctionType | None:
    """Return the forward that transformers' tensor parallelism set on the instance; None if there is none."""
    forward = vars(module).get("forward")
    # Identified by its globals: a wrapper around it (accelerate's) copies its names, but does more.
    if isinstance(forward, FunctionType) and forward.__globals__.get("__name__") == TENSOR_PARALLELISM:
        return forward
    return None


def closure_of(forward: FunctionType) -> dict[str, Any]:
    """Return the closure variables of such a forward: `self`, its style, and `mesh`, its ranks, if there are any."""
    names, cells = forward.__code__.co_freevars, forward.__closure__ or ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True))


def only_reduces_gradients(module: nn.Module) -> bool:
    """Return whether the instance's forward only all-reduces gradients of the module's parameters."""
    forward = parallel_forward(module)
    return forward is not None and forward.__qualname__.startswith("ReplicatedWithGradAllReduce.")
