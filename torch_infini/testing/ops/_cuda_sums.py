"""How far sums on a GPU may be off: what descriptions of ops allow on CUDA beyond their tolerances.

It follows from how a GPU adds, whatever the order is that a kernel or cuBLAS chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

U = 2.0**-24  # half the spacing of floats around 1
STEP = 8  # products that the tensor cores of sm_80 add to a sum at once; those of sm_90 take 16
WORST = 5  # standard deviations: of a million normal errors the largest


def accumulation_error(size: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
    """How far sums of products may be off that go through one running sum in float.

    * Each addition is off by at most U of what the sum has reached. These errors are as good as independent, and sums
      of products of either sign are as large as the root of the sum of their squares: `size`. Together the errors are
      below sqrt(terms) * U * size, and the worst of many elements is off by 5 times that.
    * Tensor cores, which multiply half types, truncate the sum after every step, by up to 2 U of it and by U on
      average, always towards zero. These losses add up. A sum grows with the root of the steps, so on average it is
      2/3 of what it becomes, and that is at most 5 * size.

    Args:
        size: The root of the sum of the squares of the products, for each sum.
        dtype: Of the factors.
        terms: Of a sum.

    Returns:
        As size: the absolute error that must be allowed.
    """
    truncated = 0 if dtype == torch.float32 else 2 / 3 * -(-terms // STEP)
    return WORST * U * (terms**0.5 + truncated) * size


def rounding_error(size: Tensor, dtype: torch.dtype) -> Tensor:
    """How far sums of products may be off whose factors, of one side, were rounded to dtype before.

    A factor is off by up to half a spacing, either way: 1 / sqrt(3) of that as a standard deviation. So is the sum,
    relative to `size`; the worst of many is off by 5 times that.

    Args:
        size: The root of the sum of the squares of the products, for each sum.
        dtype: That the factors were rounded to.

    Returns:
        As size: the absolute error that must be allowed.
    """
    return WORST / 3**0.5 * torch.finfo(dtype).eps / 2 * size


def attention_error(expected: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
    """How far attention may be off on CUDA where more than 16 rows (queries x query heads of a key head) are computed.

    The tensor cores take probabilities rounded to a half type then.

    The size of a sum of independent values is that of the row it belongs to, if it has enough elements to tell. float32
    has sums of floats alone.

    Args:
        expected: [..., head size].
        dtype: Of q.
        terms: Of the longest sum: keys, or the head size.

    Returns:
        [..., 1].
    """
    finite = expected.double().where(expected.isfinite(), 0.0)
    size = finite.square().mean(-1, keepdim=True).sqrt()
    if expected.shape[-1] < 16:
        size = size.clamp(min=float(finite.square().mean().sqrt()))
    rounded = 0.0 if dtype == torch.float32 else rounding_error(size, dtype)
    return accumulation_error(size, dtype, terms) + rounded
