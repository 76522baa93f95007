"""embedding_blocks: rows of a table in blocks, selected by ids and decoded.

The kernel is csrc/infiniop/embedding_blocks; ops/_blocks has the kinds of block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._blocks import KINDS
from ._registry import OpSpec


def embedding_blocks(
    ids: Tensor, weight: Tensor, kind: str | int, dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    """Decode the row of a table in blocks that each id selects.

    out[i, :] = the values of weight[ids[i]], rounded once to dtype: a GGUF file's embedding takes the memory of its
    blocks, and a step reads the rows of its tokens alone. Every id is checked before anything is written.

    Args:
        ids: [m] int64 or int32, any stride, each in 0 .. v - 1.
        weight: [v, k / elements, bytes] uint8; the blocks of a row adjacent, any row stride, any address. Or [v / 16,
            k / elements, 16 * bytes], contiguous, in the panels that pack_blocks makes.
        kind: As of linear_blocks: a name of a kind of block, or its number, which torch.ops.infini.embedding_blocks
            takes.
        dtype: float32, bfloat16 or float16.
        out: [m, k] of dtype, written and returned instead of a new tensor; must not share memory with the arguments.

    Returns:
        [m, k], contiguous, of dtype.

    Raises:
        RuntimeError: For an id outside the table (the message names the first one; on CUDA its row is NaN), or an
            unsupported rank, shape, dtype or stride.
        ValueError: For an unknown name of a kind.
        NotImplementedError: On CUDA, for a kind that has no kernel there, or a weight in panels.

    Equivalent to:
        >>> from torch_infini.ops._blocks import KINDS
        >>> from torch_infini.ops._block_panels import blocks_of
        >>> of = next(one for one in KINDS.values() if kind in (one.name, one.number))
        >>> weight = weight if weight.shape[2] == of.bytes else blocks_of(weight, of.number)
        >>> out = of.dequantize(weight[ids]).to(dtype)

    Source: the GGUF specification of the ggml project, for the layouts of its types.
    """
    if isinstance(kind, str) and kind not in KINDS:
        raise ValueError(f"infini::embedding_blocks: kind must be one of {', '.join(KINDS)}, got {kind!r}")
    op, number = torch.ops.infini.embedding_blocks, KINDS[kind].number if isinstance(kind, str) else kind
    return op.default(ids, weight, number, dtype) if out is None else op.out(ids, weight, number, dtype, out=out)


def fake(ids: Tensor, weight: Tensor, kind: int, dtype: torch.dtype) -> Tensor:
    elements = {one.number: one.elements for one in KINDS.values()}[kind]
    return weight.new_empty((ids.shape[0], weight.shape[1] * elements), dtype=dtype)


SPEC = OpSpec(
    embedding_blocks,
    schema="(Tensor ids, Tensor weight, int kind, ScalarType dtype) -> Tensor",
    fake=fake,
    contiguous=("weight",),
)
