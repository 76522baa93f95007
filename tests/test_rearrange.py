"""rearrange beyond what tests/test_ops.py asks of every op: outs of any strides, x itself, every byte kept."""

from __future__ import annotations

import itertools

import pytest
import torch

from torch_infini.testing import cpu_capability_set_to, kernel_levels

DTYPES = [torch.int8, torch.bfloat16, torch.float32, torch.int64]


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_between_any_two_layouts(dtype: torch.dtype, capability: str) -> None:
    shape = (6, 70, 33)
    orders = list(itertools.permutations(range(3)))
    with cpu_capability_set_to(capability):
        for source, target in itertools.product(orders, orders):
            x, out = (in_order(shape, order, dtype) for order in (source, target))
            x.copy_(torch.randint(-128, 128, shape))
            margin = out._base.clone()
            assert torch.ops.infini.rearrange.out(x, out=out) is out
            assert torch.equal(out, x)
            out.copy_(torch.full(shape, 77))
            assert torch.equal(out._base, margin), "written beside out"


def in_order(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """77 everywhere, its dimensions in memory in that order; a slice of something larger."""
    wide = torch.full([shape[dim] + 3 for dim in order], 77, dtype=dtype)
    back = [order.index(dim) for dim in range(3)]
    return wide[tuple(slice(1, -2) for _ in shape)].permute(back)


def test_out_is_x() -> None:
    x = torch.randn(5, 7)
    before = x.clone()
    assert torch.ops.infini.rearrange.out(x, out=x) is x
    assert torch.equal(x, before)


def test_the_result_is_a_copy() -> None:
    x = torch.randn(5, 7)
    y = torch.ops.infini.rearrange(x)
    assert y.data_ptr() != x.data_ptr() and torch.equal(x, y)
