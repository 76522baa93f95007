"""int8 caches, with a float32 scale per token and head: shared by the ops that write or read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..op_info import TOLERANCES, ErrorCase, Sample


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows [..., D] to int8; return them and their scales [...], max |row| / 127.

    Computed in float32, as in the kernels, so that a row's bits are determined.
    """
    rows = rows.float()
    if not rows.shape[-1]:
        return rows.to(torch.int8), rows.new_zeros(rows.shape[:-1])
    scales = rows.abs().amax(-1) / 127
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    divisors = torch.where(scales > 0, scales, 1.0)
    steps = (rows / divisors.unsqueeze(-1)).round().clamp(-127, 127)
    return steps.nan_to_num(0.0).where(scales.isfinite().unsqueeze(-1), 0.0).to(torch.int8), scales


def dequantized(cache: Tensor, scales: Tensor | None) -> Tensor:
    """Return the numbers that a cache stands for, in float64; without scales the cache holds floats."""
    return cache if scales is None else cache.double() * scales.double().unsqueeze(-1)


def comparison(reference: Callable[..., Any], rows: int) -> Callable[[Any, Sample], None]:
    """Make an OpInfo.compare in which integers may be off by 1, if a value lies between two.

    rows: the index of the argument with the new rows, whose dtype determines the tolerance of everything else.
    """

    def compare(actual: Any, sample: Sample) -> None:
        relative, absolute = TOLERANCES[sample.args[rows].dtype]
        for got, want in zip(actual, reference(*sample.args, **sample.kwargs), strict=True):
            rtol, atol = (0, 1) if got.dtype == torch.int8 else (relative, absolute)
            torch.testing.assert_close(got.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)

    return compare


def attention_comparison(reference: Callable[..., Any]) -> Callable[[Any, Sample], None]:
    """Make an OpInfo.compare: as exact for int8 caches as for others, except for bfloat16.

    For bfloat16, if the machine has VNNI, q and probabilities are rounded to 24 bits, for integer products:
    tests/test_int8_attention.py tests outliers.
    """

    def compare(actual: Any, sample: Sample) -> None:
        q, _, v_cache, *_ = sample.args
        scales = sample.kwargs.get("v_scales")
        relative, absolute = TOLERANCES[q.dtype]
        if scales is not None and q.dtype == torch.bfloat16 and v_cache.numel():
            absolute += 2**-16 * float(dequantized(v_cache, scales).abs().max())
        want = reference(*sample.args, **sample.kwargs)
        torch.testing.assert_close(actual.double(), want, rtol=relative, atol=absolute, equal_nan=True)

    return compare


def scale_errors(name: str, args: Sequence[Any], floats: tuple[Tensor, Tensor]) -> Iterator[ErrorCase]:
    """Yield the calls that every op with scales rejects; the scales are the last two of `args`.

    floats: caches of the op's own dtype, which replace the int8 caches among `args`.
    """
    *rest, k_scales, v_scales = args
    blocks, heads, rows = k_scales.shape
    rule = f"infini::{name}: {{}} must be given if and only if k_cache is int8, got {{}}"
    caches = [i for i, arg in enumerate(rest) if isinstance(arg, Tensor) and arg.dtype == torch.int8]
    of_floats = list(rest)
    for i, cache in zip(caches, floats, strict=True):
        of_floats[i] = cache
    dtype = str(floats[0].dtype).removeprefix("torch.")
    yield ErrorCase("no scales", (*rest,), rule.format("k_scales", "none for int8"))
    yield ErrorCase("no v_scales", (*rest, k_scales), rule.format("v_scales", "none for int8"))
    yield ErrorCase("scales of floats", (*of_floats, k_scales, v_scales), rule.format("k_scales", f"some for {dtype}"))
    yield ErrorCase(
        "scales dtype",
        (*rest, k_scales, v_scales.half()),
        f"infini::{name}: v_scales must be float32, got float16",
    )
    yield ErrorCase(
        "scales shape",
        (*rest, k_scales[:, :1], v_scales),
        f"infini::{name}: k_scales must have shape [{blocks}, {heads}, {rows}] to match the blocks, heads and rows of "
        f"k_cache, got [{blocks}, 1, {rows}]",
    )
    yield ErrorCase(
        "one cache of floats",
        (*(floats[1] if i == caches[1] else arg for i, arg in enumerate(rest)), k_scales, v_scales),
        f"infini::{name}: v_cache must have the dtype of k_cache, int8, got {dtype}",
    )
