"""add_rms_norm: the residual addition and the normalisation that follows it in every transformer layer, in one pass.

The kernel is csrc/infiniop/rms_norm, shared with rms_norm.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._registry import Cost, ErrorCase, OpSpec, Sample, nbytes
from .rms_norm import ROUNDINGS, norm_inputs, output_dtype, rounding_number
from .rms_norm import SPEC as NORM
from .rms_norm import decomposition as norm_decomposition
from .rms_norm import peer as norm_peer
from .rms_norm import reference as norm_reference


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    rounding: str = "once",
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum.

    h = x + residual, rounded to the dtype of x; y = rms_norm(h, weight, eps, rounding).

    Args:
        x: [..., n] float32, bfloat16, float16 or float64: what a layer adds. Stride 1 in the last dimension.
        residual: [..., n], dtype of x: the stream so far.
        weight: [n], of x's dtype; for a half type also float32, and with "once" the other half type.
        eps: Added to the mean of squares; at least 0.
        rounding: "once", "llama" or "gemma"; see rms_norm.
        out: (y, h), written and returned; either may be x or residual itself, but not both the same tensor.

    Returns:
        (y, h): the normalised value and the new residual, both [..., n] and contiguous.

    Raises:
        RuntimeError: For a rank, shape, dtype or stride that cannot be served, or a negative or NaN eps.
        ValueError: For an unknown rounding.

    Equivalent to:
        >>> h = x + residual
        >>> y, h = torch_infini.ops.rms_norm(h, weight, eps, rounding), h

    Source: the pre-norm transformer layer as in Touvron et al., LLaMA, 2023, arXiv:2302.13971.
    """
    number = rounding_number("add_rms_norm", rounding)
    if out is None:
        return torch.ops.infini.add_rms_norm.default(x, residual, weight, eps, number)
    return torch.ops.infini.add_rms_norm.out(x, residual, weight, eps, number, out0=out[0], out1=out[1])


def fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=output_dtype(x, weight, rounding)), x.new_empty(x.shape)


def reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    # The sum is rounded as the op's contract says; from there on everything is float64. float + float is exact in
    # float64, so this rounds once.
    h = (x.double() + residual.double()).to(x.dtype)
    return norm_reference(h, weight, eps, rounding), h.double()


def peer(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> tuple[Tensor, Tensor]:
    """As Hugging Face writes it."""
    h = x + residual
    return norm_peer(h, weight, eps, rounding), h


def decomposition(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0
) -> tuple[Tensor, Tensor]:
    h = (x + residual).contiguous()  # of two halves: in float32, rounded once
    return norm_decomposition(h, weight, eps, rounding), h


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = norm_inputs(dtype, *shape)
    return x, norm_inputs(dtype, *shape, seed=1)[0], weight


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", inputs(dtype, 3, n))
    yield Sample("one dimension", inputs(dtype, 64))
    yield Sample("four dimensions", inputs(dtype, 2, 3, 4, 32))
    yield Sample("no rows", inputs(dtype, 0, 16))
    yield Sample("no columns", inputs(dtype, 4, 0))
    yield Sample("large", inputs(dtype, 300, 2048))
    for rounding, number in ROUNDINGS.items():
        x, residual, weight = inputs(dtype, 5, 100)
        yield Sample(rounding, (x, residual, weight, 1e-5, number))
        yield Sample(f"{rounding}, float32 weight", (x, residual, weight.float(), 1e-5, number))


def errors() -> Iterator[ErrorCase]:
    x, residual, weight = inputs(torch.float32, 2, 16)
    op = "infini::add_rms_norm: "
    yield ErrorCase(
        "residual shape", (x, residual[:1], weight), op + "residual must have the shape of x, [2, 16], got [1, 16]"
    )
    yield ErrorCase(
        "residual dtype",
        (x, residual.half(), weight),
        op + "residual must have the dtype of x, float32, got float16",
    )
    yield ErrorCase(
        "weight too long",
        (x, residual, torch.ones(17)),
        op + "weight must have shape [16] to match the last dimension of x, got [17]",
    )
    yield ErrorCase(
        "strided columns",
        (x[:, ::2], residual[:, ::2], weight[:8]),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [16, 2]",
    )
    yield ErrorCase(
        "negative eps", (x, residual, weight, -0.5), op + "eps must be a finite number of at least 0, got -0.5"
    )
    same = torch.empty(2, 16)
    yield ErrorCase(
        "one output for two",
        (x, residual, weight),
        op + "out0 must share no memory with out1, got one whose span of memory overlaps it",
        {"out0": same, "out1": same},
    )
    weight = torch.ones(16)
    yield ErrorCase(
        "a sum that is the weight",
        (x[0], residual[0], weight),
        op + "out1 must share no memory with weight, got one whose span of memory overlaps it",
        {"out0": torch.empty(16), "out1": weight},
    )


def cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, rounding: int = 0) -> Cost:
    return Cost(bytes=nbytes(x, residual, weight, x, x), flops=5 * x.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, columns in ((512, 4096), (16384, 4096), (1, 2048)):
        yield Sample(f"{rows}x{columns}", (*inputs(dtype, rows, columns), 1e-6, ROUNDINGS["llama"]))


SPEC = OpSpec(
    name="add_rms_norm",
    schema="(Tensor x, Tensor residual, Tensor weight, float eps=1e-6, int rounding=0) -> (Tensor, Tensor)",
    function=add_rms_norm,
    fake=fake,
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    tolerances=NORM.tolerances,
    decomposition=decomposition,
)
