"""Quantizes weights to int8 and int4 with float scales, for the ops linear_int8 and linear_int4, and back.

Values are rounded to the nearest integer (ties to even), with scales for each row or group; there is no calibration.
The ops infini::quantize_int8 and quantize_int4 compute it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._core import library
from .._core.devices import on_cpu
from ..ops import FLOATS

GROUP_SIZES = (32, 64, 128)

# CPU capabilities with int8 dot products: VNNI or SDOT.
MULTIPLIES_INTEGERS = ("avx2_vnni", "avx512_vnni", "avx512_bf16", "avx512_amx", "neon_dotprod", "neon_bf16")


# With int8 weights, x is quantized from this many rows on. One row of bfloat16, 4096 -> 14336, takes 1700 us with x
# unquantized, and 1835 us with x quantized (benchmarks/results/zen-5/quantized.csv).
QUANTIZE_X_ROWS = 4


def quantizes_x(x: Tensor, bits: int, *, same_bits: bool = False) -> bool:
    """Return whether a layer with quantized weights quantizes x too: `quantize_x` of linear_int8 and linear_int4.

    It does on CPUs that multiply integers, where that is faster, with one exception: fewer than QUANTIZE_X_ROWS rows of
    x with int8 weights, where it is not faster and x would contribute most of the error. int4 weights have a larger
    error than x adds, and are not slower with any number of rows. On CUDA it never does: few rows are limited by
    reading the weights, and many are multiplied in half precision.

    Args:
        x: [..., k].
        bits: Bits of the weights, 8 or 4.
        same_bits: Whether the layer guarantees that the bits of a row do not depend on the number of rows; then there
            is no exception.

    Raises:
        ValueError: For another number of bits.
    """
    if bits not in (4, 8):
        raise _fail("quantizes_x", "bits", "be 4 or 8", repr(bits))
    return (
        (same_bits or bits == 4 or x.numel() >= QUANTIZE_X_ROWS * x.shape[-1])
        and on_cpu(x)
        and library.capability in MULTIPLIES_INTEGERS
    )


def _fail(function: str, argument: str, rule: str, came: object) -> ValueError:
    return ValueError(f"torch_infini.weights.{function}: {argument} must {rule}, got {came}")


def _check_weight(function: str, weight: Tensor) -> None:
    if weight.dtype not in FLOATS:
        raise _fail(function, "weight", "be float32, bfloat16 or float16", str(weight.dtype).removeprefix("torch."))
    if weight.dim() != 2:
        raise _fail(function, "weight", "have 2 dimensions", f"{weight.dim()} (shape {list(weight.shape)})")


def _prepared(weight: Tensor) -> Tensor:
    """Return the weight in the form that the ops require: stride 1 in a row, detached."""
    weight = weight.detach()
    return weight if weight.stride(1) == 1 else weight.contiguous()


def _check_finite(function: str, scales: Tensor) -> None:
    """Raise if the weight holds infinity or NaN. The scales show it, so no pass over the weight is needed."""
    if not scales.isfinite().all():
        raise _fail(function, "weight", "be finite", "infinity or NaN in it")


def quantize_int8(weight: Tensor, *, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Quantize a weight to int8 with one scale for each row, symmetrically.

    scale = max |row| / 127 and q = round(row / scale), from -127 to 127; a row of zeros has scale 0. So row = q * scale
    to within scale / 2.

    Args:
        weight: [n, k] float32, bfloat16 or float16, finite.
        out: (q, scales), written and returned: stride 1 in the last dimension, any row stride.

    Returns:
        (q, scales): [n, k] int8, contiguous, and [n] float32. linear_int8 takes the rows without packing.

    Raises:
        ValueError: For another dtype or rank, or values that are not finite.
    """
    _check_weight("quantize_int8", weight)
    op, weight = torch.ops.infini.quantize_int8, _prepared(weight)
    q, scales = op.default(weight) if out is None else op.out(weight, out0=out[0], out1=out[1])
    _check_finite("quantize_int8", scales)
    return q, scales


def dequantize_int8(q: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize int8 values: q * scale, computed in float64 and rounded once.

    Args:
        q: [n, k] int8.
        scales: [n], any floating dtype.
        dtype: The result's dtype.

    Returns:
        [n, k].
    """
    return (q.double() * scales.double()[:, None]).to(dtype)


def quantize_int4(
    weight: Tensor, group_size: int = 64, *, out: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a weight to 4 bits with a scale and a zero for each group of group_size elements along a row.

    The range of a group is divided into 15 steps: scale = (largest - least) / 15, zero = least + 8 * scale,
    both rounded to the weight's dtype, and q = round((w - zero) / scale) + 8, from 0 to 15. Then w is (q - 8) * scale +
    zero to within half a step plus the rounding of scale and zero at the ends of the range. Scale and zero
    have the meaning of torch's own `_weight_int4pack_mm`.

    Args:
        weight: [n, k] float32, bfloat16 or float16, finite; k a multiple of group_size.
        group_size: 32, 64 or 128.
        out: (packed, scales, zeros), written and returned: stride 1 in the last dimension, any row stride.

    Returns:
        (packed, scales, zeros): [n, k / 2] uint8 as pack_int4 makes it, [n, k / group_size] and [n, k / group_size],
        dtype of weight.

    Raises:
        ValueError: For another dtype, rank or group size, a k that is no multiple of it, or values that are not finite.
    """
    _check_weight("quantize_int4", weight)
    if group_size not in GROUP_SIZES:
        raise _fail("quantize_int4", "group_size", "be 32, 64 or 128", group_size)
    if weight.shape[1] % group_size:
        rule = f"have rows that are a multiple of group_size, {group_size}"
        raise _fail("quantize_int4", "weight", rule, weight.shape[1])
    op, args = torch.ops.infini.quantize_int4, (_prepared(weight), group_size)
    if out is None:
        packed, scales, zeros = op.default(*args)
    else:
        packed, scales, zeros = op.out(*args, out0=out[0], out1=out[1], out2=out[2])
    _check_finite("quantize_int4", scales)
    return packed, scales, zeros


def pack_int4(values: Tensor) -> Tensor:
    """Pack integers from 0 to 15 two to a byte, as linear_int4 reads them: for weights quantized elsewhere.

    Element 2i of a row goes to the lower half of byte i, element 2i + 1 to the upper half. The weight is
    (value - 8) * scale + zero: an integer zero point z, as in AWQ and GPTQ, corresponds to zero = (8 - z) * scale.

    Args:
        values: [n, k] of an integer dtype, k even.

    Returns:
        [n, k / 2] uint8, contiguous.

    Raises:
        ValueError: For another rank, an odd k, or values that are not from 0 to 15.
    """
    if values.dim() != 2 or values.shape[1] % 2:
        raise _fail("pack_int4", "values", "have 2 dimensions, the second even", f"shape {list(values.shape)}")
    if values.is_floating_point() or values.is_complex():
        raise _fail("pack_int4", "values", "be integers from 0 to 15", str(values.dtype).removeprefix("torch."))
    least, largest = (int(values.min()), int(values.max())) if values.numel() else (0, 0)
    if least < 0 or largest > 15:
        raise _fail("pack_int4", "values", "be integers from 0 to 15", f"{least} to {largest}")
    low, high = values.to(torch.uint8).unflatten(1, (-1, 2)).unbind(-1)
    return low | high << 4


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack the integers from 0 to 15 that pack_int4 packed.

    Args:
        packed: [n, k / 2] uint8.

    Returns:
        [n, k] uint8.
    """
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def dequantize_int4(
    packed: Tensor, scales: Tensor, zeros: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dequantize packed int4 values: (q - 8) * scale + zero, computed in float64 and rounded once.

    Args:
        packed: [n, k / 2] uint8, from pack_int4 or quantize_int4.
        scales: [n, k / group], any floating dtype.
        zeros: [n, k / group], or None for no zeros.
        dtype: The result's dtype.

    Returns:
        [n, k].
    """
    n, k = packed.shape[0], 2 * packed.shape[1]
    groups = (unpack_int4(packed).double() - 8).view(n, scales.shape[1], k // max(scales.shape[1], 1))
    weight = groups * scales.double()[..., None]
    if zeros is not None:
        weight = weight + zeros.double()[..., None]
    return weight.to(dtype).view(n, k)
