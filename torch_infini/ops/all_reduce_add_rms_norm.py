"""all_reduce_add_rms_norm: the all-reduce, residual addition and norm between two halves of a tensor-parallel layer.

csrc/torch/all_reduce_add_rms_norm_torch.cpp combines libinfiniccl with the kernel of add_rms_norm.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec
from .add_rms_norm import fake
from .rms_norm import rounding_number

NAME = "all_reduce_add_rms_norm"


def all_reduce_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    rounding: str = "once",
    group: int = 0,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum x over the ranks, add the sum to the residual stream and normalize.

    s = all_reduce(x, group); h = s + residual; y = rms_norm(h, weight, eps, rounding), each rounded to the dtype of x:
    the bits are those of all_reduce and add_rms_norm, the same on all ranks. All ranks must make
    the same calls in the same order.

    Args:
        x: [..., n] float32, bfloat16, float16 or float64, the same shape on all ranks: this rank's partial output of
            the layer. Stride 1 in the last dimension; tensors that are not contiguous cost a copy.
        residual: [..., n], dtype of x: the residual stream, the same on all ranks.
        weight: [n], as in add_rms_norm.
        eps: Added to the mean of squares; at least 0.
        rounding: As add_rms_norm's.
        group: A number from torch_infini.distributed.communicator; 0: this process alone.
        out: (y, h), written and returned; either may be x or residual itself, but y and h must be distinct.

    Returns:
        (y, h): the normalized value and the new residual, both [..., n] and contiguous.

    Raises:
        RuntimeError: For an unsupported argument, a rank that does not call within the group's timeout or has died, or
            ranks whose calls differ.
        ValueError: For an unknown rounding.

    Equivalent to:
        >>> y, h = torch_infini.ops.add_rms_norm(torch_infini.ops.all_reduce(x, group), residual, weight, eps, rounding)

    Source: the row-parallel layer of Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053, and the norm after it in
        Touvron et al., LLaMA, 2023, arXiv:2302.13971.
    """
    number = rounding_number(NAME, rounding)
    if out is None:
        return torch.ops.infini.all_reduce_add_rms_norm.default(x, residual, weight, eps, number, group)
    return torch.ops.infini.all_reduce_add_rms_norm.out(
        x, residual, weight, eps, number, group, out0=out[0], out1=out[1]
    )


# The registry's tests use one process, group 0. tests/test_distributed_ops.py tests several ranks.
SPEC = OpSpec(
    all_reduce_add_rms_norm,
    schema="(Tensor x, Tensor residual, Tensor weight, float eps=1e-6, int rounding=0, int group=0)"
    " -> (Tensor, Tensor)",
    fake=fake,
)
