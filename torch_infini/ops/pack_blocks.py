"""pack_blocks: rows of a weight in blocks, laid out in the panels that linear_block_panels multiplies.

The kernel is csrc/infiniop/linear_block_panels/pack_blocks_cpu.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, nothing


def pack_blocks(packed: Tensor, weight: Tensor, kind: int, first_row: int = 0) -> None:
    """Write rows of a weight in blocks into a packed one, in place, without loss.

    Row j becomes row first_row + j of the panels, of 16 rows each. A panel begins with the scales of all its blocks, of
    each number the 16 rows' together; then come the codes, in lines of 64 bytes, so that a line has the codes of some
    adjacent columns for the 16 rows. Other rows are not touched; calls for different panels may run at the same time.

    Args:
        packed: [panels, k / elements, 16 * bytes] uint8 on the CPU, contiguous, written.
        weight: [rows, k / elements, bytes] uint8; the blocks of a row adjacent, any row stride, any address.
        kind: As linear_block_panels'.
        first_row: The row of the panels that weight's first row becomes; a multiple of 16.

    Returns:
        None.

    Raises:
        RuntimeError: For an unsupported rank, shape, dtype, stride or kind, or rows beyond the end of packed.
        NotImplementedError: For tensors that are not on the CPU.

    Equivalent to:
        >>> from torch_infini.ops._block_panels import put_blocks
        >>> put_blocks(packed, weight, kind, first_row)

    Source: see linear_block_panels.
    """
    torch.ops.infini.pack_blocks.default(packed, weight, kind, first_row)


SPEC = OpSpec(
    pack_blocks,
    schema="(Tensor(a!) packed, Tensor weight, int kind, int first_row=0) -> ()",
    fake=nothing,
    contiguous=("packed", "weight"),
    devices=("cpu",),
)
