"""unpack_blocks: rows in blocks, copied out of the panels of linear_block_panels.

The kernel is csrc/infiniop/linear_block_panels/pack_blocks_cpu.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def unpack_blocks(weight: Tensor, packed: Tensor, kind: int, first_row: int = 0) -> None:
    """Write rows of a packed weight into blocks as pack_blocks takes them, in place, without loss.

    Args:
        weight: [rows, k / elements, bytes] uint8 on the CPU, written; the blocks of a row adjacent, any row stride.
        packed: [panels, k / elements, 16 * bytes] uint8, contiguous.
        kind: As linear_block_panels'.
        first_row: The row of the panels that weight's first row is; a multiple of 16.

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, stride or kind, or rows beyond the end of packed.
        NotImplementedError: For tensors that are not on the CPU.

    Equivalent to:
        >>> from torch_infini.ops._block_panels import blocks_of
        >>> weight.copy_(blocks_of(packed, kind)[first_row : first_row + len(weight)])

    Source: see linear_block_panels.
    """
    torch.ops.infini.unpack_blocks.default(weight, packed, kind, first_row)


SPEC = OpSpec(
    unpack_blocks,
    schema="(Tensor(a!) weight, Tensor packed, int kind, int first_row=0) -> ()",
    fake=nothing,
    contiguous=("packed", "weight"),
    devices=("cpu",),
)
