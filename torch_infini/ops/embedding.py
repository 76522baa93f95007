"""embedding: rows of a table, picked by ids.

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
    """Copy the row of weight that each id names.

    out[..., :] = weight[ids[...] - first, :], or zeros for ids of rows that weight does not have: ranks that share a
    table by its rows add up what each has. Every id is checked before anything is copied. On CUDA, where that would
    wait for the GPU, nothing is raised: the row of an id that is no row of the table becomes NaN.

    Args:
        ids: int64 or int32, of any shape (up to 7 dimensions) and any strides, each in 0 .. total - 1.
        weight: [v, n] float32, bfloat16 or float16; stride 1 in the last dimension, any distance between rows.
        first: Which row of the table the first one of weight is.
        total: Rows of the table, first + v at least; None: v.
        out: [*ids.shape, n], written and returned instead of a new tensor; shares no memory with ids or weight.

    Returns:
        [*ids.shape, n], contiguous; of weight's dtype.

    Raises:
        RuntimeError: For an id that is no row of the table (the first one is named), a first or total that weight
            does not fit, or a rank, shape, dtype or stride that cannot be served.

    Equivalent to:
        >>> rows = weight.shape[0] if total is None else total
        >>> table = torch.nn.functional.pad(weight, (0, 0, first, rows - first - weight.shape[0]))
        >>> out = torch.nn.functional.embedding(ids, table)

    Source: Bengio et al., A Neural Probabilistic Language Model, JMLR 3, 2003; Shoeybi et al., Megatron-LM, 2019,
        arXiv:1909.08053 (a table that ranks share).
    """
    op = torch.ops.infini.embedding
    return op.default(ids, weight, first, total) if out is None else op.out(ids, weight, first, total, out=out)


def fake(ids: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


SPEC = OpSpec(embedding, fake=fake)
