"""embedding: rows of a table, selected by ids.

The kernel is csrc/infiniop/embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._registry import OpSpec


def embedding(
    ids: Tensor, weight: Tensor, first: int = 0, total: int | None = None, *, out: Tensor | None = None
) -> Tensor:
    """Copy the row of weight that each id selects.

    out[..., :] = weight[ids[...] - first, :], or zeros for ids of rows that weight does not have: ranks that shard a
    table by rows add up their results. Every id is checked before anything is copied. On CUDA that would wait for the
    GPU, so nothing is raised: an id outside the table gives a row of NaN.

    Args:
        ids: int64 or int32, of any shape (up to 7 dimensions) and any strides, each in 0 .. total - 1.
        weight: [v, n] float32, bfloat16 or float16; stride 1 in the last dimension, any row stride.
        first: The row of the table that weight's first row is.
        total: The number of rows of the table, at least first + v; None: v.
        out: [*ids.shape, n], written and returned instead of a new tensor; must not share memory with ids or weight.

    Returns:
        [*ids.shape, n], contiguous; of weight's dtype.

    Raises:
        RuntimeError: For an id outside the table (the message names the first one), a first or total that does not fit
            weight, or an unsupported rank, shape, dtype or stride.

    Equivalent to:
        >>> rows = weight.shape[0] if total is None else total
        >>> table = torch.nn.functional.pad(weight, (0, 0, first, rows - first - weight.shape[0]))
        >>> out = torch.nn.functional.embedding(ids, table)

    Source: Bengio et al., A Neural Probabilistic Language Model, JMLR 3, 2003; Shoeybi et al., Megatron-LM, 2019,
        arXiv:1909.08053 (a sharded table).
    """
    op = torch.ops.infini.embedding
    return op.default(ids, weight, first, total) if out is None else op.out(ids, weight, first, total, out=out)


def fake(ids: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


SPEC = OpSpec(embedding, fake=fake)
