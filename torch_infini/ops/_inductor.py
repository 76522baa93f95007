"""The one lowering that Inductor lacks for ops that write into views of a graph's inputs.

Inductor recreates such a view by aten.sym_storage_offset. Under dynamic shapes, without the lowering, the offset counts
as 0, and the op silently writes to the start of the whole tensor (pytorch issue 198068, seen in 2.13). A torch that has
the lowering keeps its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def add_missing_lowering() -> None:
    """Add it if Inductor has been loaded. Never loads Inductor, which would take seconds."""
    inductor = sys.modules.get("torch._inductor.lowering")
    target = torch.ops.aten.sym_storage_offset.default
    if inductor is None or target in inductor.lowerings:
        return

    def sym_storage_offset(tensor: Any) -> Any:
        offset = inductor.V.graph.current_node.meta["val"]
        return offset.node.expr if isinstance(offset, torch.SymInt) else int(offset)

    inductor.register_lowering(target)(sym_storage_offset)
