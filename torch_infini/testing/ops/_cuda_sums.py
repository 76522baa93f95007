"""The error of sums on a GPU, which ops may have on CUDA beyond their tolerances.

It is derived from how a GPU adds, whatever the order that a kernel or cuBLAS chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

U = 2.0**-24  # half the spacing of floats around 1
STEP = 8  # products that the tensor cores of sm_80 add to a sum at once; those of sm_90 add 16
WORST = 5  # standard deviations: the largest of a million normal errors


def accumulation_error(size: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
    """Return the error of sums of products that are added in one running float sum.

    * Each addition is off by at most U of the current sum. These errors are nearly independent, and sums of products of
      either sign are as large as the root of the sum of their squares, `size`. Together the errors are below
      sqrt(terms) * U * size, and the worst of many elements is off by 5 times that.
    * Tensor cores, which multiply half types, truncate the sum after every step, by up to 2 U of it and by U on
      average, always towards zero, so these losses add up. A sum grows with the root of the number of steps, so on
      average it is 2/3 of its final value, which is at most 5 * size.

    Args:
        size: For each sum, the root of the sum of the squares of the products.
        dtype: The dtype of the factors.
        terms: The number of products in a sum.

    Returns:
        The allowed absolute error, shaped as size.
    """
    truncated = 0 if dtype == torch.float32 else 2 / 3 * -(-terms // STEP)
    return WORST * U * (terms**0.5 + truncated) * size


def rounding_error(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of sums of products of which one factor was rounded to dtype before.

    A factor is off by up to half a spacing, either way: 1 / sqrt(3) of that as a standard deviation. So is the sum,
    relative to `size`; the worst of many is off by 5 times that.

    Args:
        size: For each sum, the root of the sum of the squares of the products.
        dtype: The dtype that the factors were rounded to.

    Returns:
        The allowed absolute error, shaped as size.
    """
    return WORST / 3**0.5 * torch.finfo(dtype).eps / 2 * size


def attention_error(expected: Tensor, dtype: torch.dtype, terms: int) -> Tensor:
    """Return the error of attention on CUDA for more than 16 rows (queries x query heads of a key head).

    The tensor cores then take probabilities rounded to a half type.

    The size of a sum of independent values is estimated from the row that it belongs to, if that has enough elements.
    float32 attention uses float sums only.

    Args:
        expected: [..., head size].
        dtype: The dtype of q.
        terms: The length of the longest sum: keys, or the head size.

    Returns:
        [..., 1].
    """
    finite = expected.double().where(expected.isfinite(), 0.0)
    size = finite.square().mean(-1, keepdim=True).sqrt()
    if expected.shape[-1] < 16:
        size = size.clamp(min=float(finite.square().mean().sqrt()))
    rounded = 0.0 if dtype == torch.float32 else rounding_error(size, dtype)
    return accumulation_error(size, dtype, terms) + rounded
