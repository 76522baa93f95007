"""float32 biases, and weights of layer_norm, beside activations of half types: added in float32, one rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_infini.testing import cpu_capability_set_to, kernel_levels
from torch_infini.weights import quantize_int4, quantize_int8

ops = torch.ops.infini
HALVES = (torch.bfloat16, torch.float16)
ROWS = (1, 3, 33, 70)
N, K = 70, 64
capabilities = pytest.mark.parametrize("capability", kernel_levels())
Product = Callable[[Tensor, Tensor | None], Tensor]


def products(dtype: torch.dtype) -> dict[str, Product]:
    """Products of x [m, K] with weights of N rows in all."""
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(0)) / 8
    dense, int8, int4 = weight.to(dtype), quantize_int8(weight), quantize_int4(weight)

    def fused(x: Tensor, bias: Tensor | None) -> Tensor:
        parts: tuple[Any, ...] = (None, None) if bias is None else bias.split([30, 40])
        return ops.fused_linear(x, *dense.split([30, 40]), None, *parts)

    made: dict[str, Product] = {
        "linear": lambda x, bias: ops.linear(x, dense, bias),
        "fused_linear": fused,
        "linear_int8": lambda x, bias: ops.linear_int8(x, *int8, bias),
        "linear_int8, x too": lambda x, bias: ops.linear_int8(x, *int8, bias, True),
        "linear_int4": lambda x, bias: ops.linear_int4(x, *int4, bias),
        "linear_int4, x too": lambda x, bias: ops.linear_int4(x, *int4, bias, True),
    }
    if dtype == torch.bfloat16:
        packed = torch.zeros(-(-N // 48), K // 2, 48, 2, dtype=dtype)
        ops.pack_linear(packed, dense)
        made["linear_packed"] = lambda x, bias: ops.linear_packed(x, packed, N, bias)
    return made


def inputs(dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, K, generator=g).to(dtype), torch.randn(N, generator=g)


@capabilities
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_bias_that_the_half_type_holds_has_its_bits(dtype: torch.dtype, rows: int, capability: str) -> None:
    x, bias = inputs(dtype, rows)
    narrow = bias.to(dtype)
    with cpu_capability_set_to(capability):
        for name, product in products(dtype).items():
            assert torch.equal(product(x, narrow.float()), product(x, narrow)), name


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_bias_is_not_rounded(dtype: torch.dtype, rows: int) -> None:
    """With x of zeros the result is the bias, rounded once; beside a product of 1 its low bits decide the rounding."""
    _, bias = inputs(dtype, rows)
    zeros = torch.zeros(rows, K, dtype=dtype)
    for name, product in products(dtype).items():
        assert torch.equal(product(zeros, bias), bias.to(dtype).expand(rows, N)), name
    x, weight = torch.ones(rows, 1, dtype=dtype), torch.ones(N, 1, dtype=dtype)
    half = torch.finfo(dtype).eps / 2  # of the spacing above 1: alone it rounds to 1, to even
    assert torch.equal(ops.linear(x, weight, torch.full((N,), half)), x.expand(rows, N))
    above = torch.full((N,), half * (1 + 2**-12))
    assert torch.equal(ops.linear(x, weight, above), torch.full((rows, N), 1 + 2 * half, dtype=dtype))


def test_rows_that_are_no_matrix() -> None:
    """On CUDA their sums cannot be cuBLAS's in float32."""
    x, bias = inputs(torch.bfloat16, 44)
    apart = x.view(4, 11, K)[:, :10]
    for name, product in products(torch.bfloat16).items():
        want = product(apart.contiguous(), bias).float()
        torch.testing.assert_close(product(apart, bias).float(), want, rtol=2**-7, atol=1e-6, msg=name)


def test_a_bias_of_another_dtype_is_refused() -> None:
    x, bias = inputs(torch.bfloat16, 2)
    for name, product in products(torch.bfloat16).items():
        rule = "bias(_a)? must have the dtype of x, bfloat16, or float32, got float16"
        with pytest.raises(RuntimeError, match=f"^infini::{name.split(',')[0]}: {rule}$"):
            product(x, bias.half())


@capabilities
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("given", ["weight", "bias", "both", "strided"])
def test_layer_norm(given: str, dtype: torch.dtype, capability: str) -> None:
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight, bias = torch.randn(2, 300, generator=torch.Generator().manual_seed(2))
    if given == "strided":
        weight, bias = torch.stack((weight, bias), 1).unbind(1)
    w, b = (None if given == "bias" else weight), (None if given == "weight" else bias)
    with cpu_capability_set_to(capability):
        wide = ops.layer_norm(x.float(), w, b)
        assert torch.equal(ops.layer_norm(x, w, b), wide.to(dtype))
        narrow = [None if p is None else p.to(dtype) for p in (w, b)]
        widened = [None if p is None else p.float() for p in narrow]
        assert torch.equal(ops.layer_norm(x, *widened), ops.layer_norm(x, *narrow))


def test_layer_norm_takes_weight_and_bias_of_one_dtype() -> None:
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    rule = "bias must have the dtype of weight, float32, got bfloat16"
    with pytest.raises(RuntimeError, match=f"^infini::layer_norm: {rule}$"):
        ops.layer_norm(x, torch.ones(8), torch.ones(8, dtype=torch.bfloat16))
