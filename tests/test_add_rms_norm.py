"""The order of roundings in add_rms_norm, by exact bits: tolerances of a dtype would not tell the modes apart.

Here on the CPU at the level at hand; tests/test_cuda_norms.py calls the same checks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_infini import ops
from torch_infini.ops.rms_norm import ROUNDINGS

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SHAPES = ((7, 64), (3, 769), (2, 5125), (2, 16387))


def inputs(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(sum(shape))
    x, residual = torch.randn(shape, generator=g) * 3, torch.randn(shape, generator=g) * 40
    return x.to(dtype), residual.to(dtype), (1 + torch.randn(shape[-1], generator=g) / 8).to(dtype)


def documented(x: Tensor, residual: Tensor, weight: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """y and h as the docstrings write them, in torch."""
    s = x.float() + residual.float()
    h = s.to(x.dtype)
    order = rounding.removeprefix("wide_")
    v = s if order != rounding else h.float()
    v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6)
    if order == "llama":
        return v.to(x.dtype) * weight, h
    return (v * (weight.float() + (order == "gemma"))).to(x.dtype), h


def shared(a: Tensor, b: Tensor) -> float:
    """The share of elements that are equal; sums in another order may change the last bit of a few."""
    assert a.dtype == b.dtype
    return (a == b).float().mean().item()


@HALVES
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_modes(rounding: str, dtype: torch.dtype) -> None:
    assert_mode(rounding, torch.device("cpu"), dtype)


def assert_mode(rounding: str, device: torch.device, dtype: torch.dtype) -> None:
    """The bits are those of the documented code, and not those of the mode with the other sum."""
    for shape in SHAPES:
        x, residual, weight = inputs(dtype, *shape)
        for w in (weight, weight.float()):
            args = x.to(device), residual.to(device), w.to(device)
            y, h = (t.cpu() for t in ops.add_rms_norm(*args, rounding=rounding))
            expected, total = documented(x, residual, w, rounding)
            assert torch.equal(h, total)
            assert shared(y, expected) > 0.995
            other = rounding.removeprefix("wide_") if "wide" in rounding else f"wide_{rounding}"
            assert shared(y, documented(x, residual, w, other)[0]) < 0.9
            y, h = (t.cpu() for t in torch.ops.infini.add_rms_norm.default(*args, 1e-6, ROUNDINGS[rounding]))
            assert shared(y, expected) > 0.995 and torch.equal(h, total)


@HALVES
@pytest.mark.parametrize("rounding", ["once", "wide_once", "wide_llama"])
def test_in_place(rounding: str, dtype: torch.dtype) -> None:
    assert_in_place(rounding, torch.device("cpu"), dtype)


def assert_in_place(rounding: str, device: torch.device, dtype: torch.dtype) -> None:
    """y and h over x and residual, either way round: as into new memory."""
    for shape in (*SHAPES, (300, 2048)):
        x, residual, weight = (t.to(device) for t in inputs(dtype, *shape))
        expected = ops.add_rms_norm(x, residual, weight, rounding=rounding)
        for y_first in (True, False):
            a, b = x.clone(), residual.clone()
            out = (a, b) if y_first else (b, a)
            ops.add_rms_norm(a, b, weight, rounding=rounding, out=out)
            assert all(torch.equal(got, want) for got, want in zip(out, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_sums_of_wide_dtypes(dtype: torch.dtype) -> None:
    """Are their sums: the bits of the other mode."""
    x, residual, weight = (t.to(dtype) for t in inputs(torch.float32, 5, 769))
    for order in ("once", "llama", "gemma"):
        wide = ops.add_rms_norm(x, residual, weight, rounding=f"wide_{order}")
        assert all(map(torch.equal, wide, ops.add_rms_norm(x, residual, weight, rounding=order)))


@HALVES
def test_alone_there_is_no_sum(dtype: torch.dtype) -> None:
    x, _, weight = inputs(dtype, 5, 769)
    for order in ("once", "llama", "gemma"):
        for w in (weight, weight.float()):
            wide = ops.rms_norm(x, w, rounding=f"wide_{order}")
            assert torch.equal(wide, ops.rms_norm(x, w, rounding=order))


def test_unknown_names() -> None:
    x, residual, weight = inputs(torch.float32, 2, 8)
    with pytest.raises(ValueError, match=r"^infini::add_rms_norm: rounding must be one of 'once', .*, got 'wide'$"):
        ops.add_rms_norm(x, residual, weight, rounding="wide")
