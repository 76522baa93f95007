"""matmul and gemm: what the generic tests cannot see: bits that depend on k alone, and where out may lie."""

from __future__ import annotations

import pytest
import torch

from torch_infini._core.products import aten_from_set_to
from torch_infini.ops import gemm, matmul

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [33, 1100])
@aten_from_set_to(None)  # which shapes are ATen's depends on the CPU
def test_an_element_has_the_same_bits_in_every_shape(dtype: torch.dtype, k: int) -> None:
    a, b = torch.randn(70, k).to(dtype), torch.randn(k, 50).to(dtype)
    whole = matmul(a, b)
    assert torch.equal(matmul(a[5], b), whole[5])
    assert torch.equal(matmul(a, b[:, 7]), whole[:, 7])
    assert torch.equal(matmul(a[5], b[:, 7]), whole[5, 7])
    assert torch.equal(matmul(a[3:6], b.t().contiguous().t()), whole[3:6])
    assert torch.equal(matmul(b.t(), a.t()), whole.t())
    assert torch.equal(matmul(a.view(5, 2, 7, k), b).view(70, 50), whole)
    assert torch.equal(matmul(a.view(5, 14, k), b.expand(5, k, 50)).view(70, 50), whole)
    assert torch.equal(gemm(a, b, whole, 1.0, 0.0), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gemm_adds_to_out(dtype: torch.dtype) -> None:
    """out may be c itself; another out leaves c as it was. Both give the functional form's bits."""
    a, b, c = (torch.randn(*shape).to(dtype) for shape in ((3, 9, 33), (33, 20), (3, 9, 20)))
    expected, before = gemm(a, b, c, 0.5, 2.0), c.clone()
    out = torch.full_like(c, torch.nan)
    assert gemm(a, b, c, 0.5, 2.0, out=out) is out
    assert torch.equal(out, expected) and torch.equal(c, before)
    assert gemm(a, b, c, 0.5, 2.0, out=c) is c
    assert torch.equal(c, expected)


def test_out_by_columns() -> None:
    a, b, c = torch.randn(2, 9, 33), torch.randn(2, 33, 20), torch.randn(20)
    out = torch.empty(2, 20, 9).transpose(1, 2)
    assert torch.equal(matmul(a, b, out=out), matmul(a, b))
    assert torch.equal(gemm(a, b, c, 1.0, 1.0, out=out), gemm(a, b, c, 1.0, 1.0))
    heads = torch.empty(9, 2, 20).transpose(0, 1)  # rows of the two products in turn
    assert torch.equal(matmul(a, b, out=heads), matmul(a, b))
    vector = torch.empty(9, 4)[:, 1]
    assert torch.equal(matmul(a[0], b[0, :, 3], out=vector), matmul(a[0], b[0, :, 3]))


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 5), (5, 6)),
        ((2, 3, 4, 5), (5, 6)),
        ((5,), (2, 5, 6)),
        ((3, 1, 4, 5), (2, 5, 6)),
        ((5,), (5,)),
        ((4, 5), (5,)),
    ],
    ids=str,
)
def test_shapes_are_those_of_torch(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Sums of five products of order 1 round by a few 2^-24: far less than assert_close allows unless told."""
    a, b = (torch.randn(shape) for shape in shapes)
    torch.testing.assert_close(matmul(a, b), torch.matmul(a, b))


def test_addmm_and_baddbmm() -> None:
    a, b, bias = torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(6)
    torch.testing.assert_close(gemm(a[0], b[0], bias, 2.0, 0.5), torch.addmm(bias, a[0], b[0], alpha=2.0, beta=0.5))
    torch.testing.assert_close(gemm(a, b, bias, 2.0, 0.5), torch.baddbmm(bias, a, b, alpha=2.0, beta=0.5))
