"""Rows of a table."""

from __future__ import annotations

from ..._arguments import raw
from ...lib import _infinicore
from ...tensor import Tensor


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Return the rows of a table; `torch.nn.functional.embedding(input, weight)`.

    Args:
        input: Row indices, int32 or int64, any shape.
        weight: [rows, d].
        padding_idx: Has no effect: there are no gradients.
        max_norm, norm_type, scale_grad_by_freq, sparse: Must have their defaults.
        out: [*input.shape, d].
    """
    function = "infinicore.nn.functional.embedding"
    if max_norm is not None or norm_type != 2.0 or scale_grad_by_freq or sparse:
        raise AssertionError(
            f"{function}: max_norm, norm_type, scale_grad_by_freq and sparse must have their defaults, got "
            f"{max_norm}, {norm_type}, {scale_grad_by_freq}, {sparse}"
        )
    rows, table = raw(input, function, "input"), raw(weight, function, "weight")
    if out is None:
        return Tensor(_infinicore.embedding(rows, table))
    _infinicore.embedding_(raw(out, function, "out"), rows, table)
    return out
