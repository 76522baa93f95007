"""Products on CUDA or its emulation, beyond tests/test_cuda.py: rows beside others, layouts that cuBLAS does not take,
offsets beyond 32 bits, infinity and NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.c_runtime import CPU, NVIDIA, ok
from support.cuda_calls import allocations, check, here
from torch_infini.ops.matmul import values
from torch_infini.testing import check_against_reference, cuda_device
from torch_infini.testing.c_ops import Descriptor
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops.linear import C_OPS, inputs
from torch_infini.testing.ops.matmul import factors
from torch_infini.testing.ops.quantized_linear import inputs_int4, inputs_int8

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [5, 700, 3001])
def test_a_streamed_row_has_the_same_bits_beside_any_others(dtype: torch.dtype, k: int) -> None:
    x, weight, bias = here(*inputs(dtype, 16, k=k, n=35, bias=True))
    linear, fused = OP_INFOS["linear"].op, OP_INFOS["fused_linear"].op
    alone = torch.cat([linear(row, weight, bias) for row in x.split(1)])
    streamed = 4 if dtype == torch.float32 else 16
    for rows in {2, 3, 4, 8, 9, 16}:
        if rows <= streamed:
            assert torch.equal(linear(x[:rows], weight, bias), alone[:rows]), rows
            both = fused(x[:rows], weight, weight[:7], None, bias, None, None)
            assert torch.equal(both[:, :35], alone[:rows]), rows
            # gemm streams the same way: b by columns, and, transposed, a by rows.
            matmul = OP_INFOS["matmul"].op
            product = matmul(x[:rows], weight.t())
            assert torch.equal(product, linear(x[:rows], weight)), rows
            assert torch.equal(matmul(weight, x[:rows].t()), product.t()), rows


@pytest.mark.parametrize("quantize_x", [False, True], ids=["", "x quantized"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "make"), [("linear_int8", inputs_int8), ("linear_int4", inputs_int4)])
def test_a_row_of_quantized_products_has_the_same_bits_beside_any_others(
    name: str, make: Callable[..., Any], dtype: torch.dtype, quantize_x: bool
) -> None:
    x, *rest = here(*make(dtype, 40, k=640, n=35, bias=True))
    op = OP_INFOS[name].op
    alone = torch.cat([op(row, *rest, quantize_x) for row in x.split(1)])
    for rows in (2, 8, 9, 16, 17, 32):
        assert torch.equal(op(x[:rows], *rest, quantize_x), alone[:rows]), rows
    everything = op(x, *rest, quantize_x)  # more than 32 rows are multiplied in tiles, which add in another order
    for rows in (33, 39):
        assert torch.equal(op(x[:rows], *rest, quantize_x), everything[:rows]), rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts_that_cublas_does_not_take(dtype: torch.dtype) -> None:
    a, b = factors(dtype, (40, 33), (33, 50))
    check("matmul", a[0].expand(40, 33), b)
    check("matmul", a, b[:, 0].contiguous()[:, None].expand(33, 50))
    check("matmul", a.view(-1).as_strided((40, 33), (7, 1)), b)  # rows that overlap
    check("matmul", a, b.view(-1).as_strided((33, 50), (1, 3)))
    check("matmul", *factors(dtype, (3, 40, 0), (3, 0, 50)))
    three = values(dtype, 3, 40, 33)
    check("matmul", three.view(-1).as_strided((3, 40, 33), (1, 33, 1)), b)  # matrices that overlap


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 33, 50), (2, 33, 50), (40, 33, 1)], ids=str)
def test_results_by_columns(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = factors(dtype, (m, k), (k, n))
    gemm = OP_INFOS["gemm"]
    for first in (a, a.t().contiguous().t()):
        for second in (b, b.t().contiguous().t()):
            c = values(dtype, m, n, seed=2)
            out = torch.empty(n, m + 3, dtype=dtype)[:, :m].t().to(DEVICE)
            assert out.copy_(c) is gemm.out(*here(first, second), out, -0.5, 2.0, out=out)
            check_against_reference(gemm, Sample("call", (a, b, c, -0.5, 2.0)), dtype, out.cpu(), on_cuda=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_far_apart(dtype: torch.dtype) -> None:
    """More than 2^31 bytes: memory that is never touched, apart from the rows."""
    apart = 2**31 // dtype.itemsize + 32
    x, weight, _ = inputs(dtype, 2, k=64, n=2)
    wide = torch.empty(apart + 64, dtype=dtype, device=DEVICE)
    far = wide.as_strided((2, 64), (apart, 1))
    near = here(x, weight)
    for name, args in (("linear", near), ("matmul", [near[0], near[1].t()])):
        op = OP_INFOS[name].op
        expected = op(*args)
        assert torch.equal(op(far.copy_(near[0]), args[1]), expected), name
        far.copy_(near[1])
        assert torch.equal(op(args[0], far if name == "linear" else far.t()), expected), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 20])
def test_infinity_and_nan_stay_in_their_row(dtype: torch.dtype, rows: int) -> None:
    x, weight, bias = here(*inputs(dtype, rows, k=100, n=30, bias=True))
    linear = OP_INFOS["linear"].op
    clean = linear(x, weight, bias)
    x[1, 99] = torch.inf
    y = linear(x, weight, bias)
    assert y[1].isinf().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    for name, make in (("linear_int8", inputs_int8), ("linear_int4", inputs_int4)):
        x, *rest = here(*make(dtype, rows, k=128, n=30, bias=True))
        op = OP_INFOS[name].op
        for quantize_x in (False, True):
            clean = op(x, *rest, quantize_x)
            bad = x.clone()
            bad[1, 127] = torch.nan
            y = op(bad, *rest, quantize_x)
            assert y[1].isnan().all()
            assert torch.equal(y[[0, 2]], clean[[0, 2]])


def test_results_do_not_share_a_workspace() -> None:
    """Calls one behind another, without waiting between them."""
    x, weight, _ = here(*inputs(torch.bfloat16, 64, k=320, n=96))
    linear = OP_INFOS["linear"].op
    results = [linear(x * scale, weight) for scale in (1, 2, 4)]
    assert torch.equal(results[1], 2 * results[0]) and torch.equal(results[2], 4 * results[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_streamed_rows_take_no_workspace(dtype: torch.dtype) -> None:
    """cuBLAS's 32 MiB, which a CUDA graph would keep for each that it has recorded, go with calls of cuBLAS alone."""
    x, weight, _ = here(*inputs(dtype, 64, k=64, n=48))
    linear, fused, gemm, matmul = (OP_INFOS[name].op for name in ("linear", "fused_linear", "gemm", "matmul"))

    def largest(call: Callable[..., torch.Tensor], *args: Any) -> int:
        return max(allocations(lambda: call(*args)))

    for rows in (1, 4, 64):
        some = x[:rows]
        calls: dict[str, tuple[Any, ...]] = {
            "linear": (linear, some, weight),
            "fused_linear": (fused, some, weight, weight, None, None, None, None),
            "matmul": (matmul, some, weight.t()),
            "matmul, turned": (matmul, weight, some.t()),
            "matmul, a batch that shares b": (matmul, some.view(1, rows, 1, 64), weight.t()),
            "gemm": (gemm, some, weight.t(), some[:, :48], 1.0, 1.0),
        }
        for name, call in calls.items():
            size = largest(*call)
            assert 2**25 < size < 2**26 if rows == 64 else 0 < size < 2**20, (rows, name, size)
    assert largest(matmul, x[:1], weight.t().contiguous()) > 2**25  # which is not streamed, few rows or not
    # Two batches that do not merge: of three rows each, and of three matrices.
    assert largest(matmul, x[:6].view(3, 2, 1, 64).transpose(0, 1), weight.t()) < 2**20
    assert largest(matmul, x[:24].view(3, 2, 4, 64).transpose(0, 1), weight.t()) > 2**25


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_c_operator_asks_for_workspace_where_cublas_is_called(dtype: torch.dtype) -> None:
    streamed = 4 if dtype == torch.float32 else 16
    for device, rows, k, wanted in (
        (NVIDIA, streamed, 64, False),
        (NVIDIA, streamed + 1, 64, True),
        (NVIDIA, streamed + 1, 0, False),
        (NVIDIA, 0, 64, False),
        (CPU, streamed + 1, 64, False),
    ):
        x, weight, bias = inputs(dtype, rows, k=k, n=48, bias=True)
        ok("SetDevice", device, 0)
        try:
            with Descriptor(C_OPS[0], {"out": x.new_empty(rows, 48), "x": x, "weight": weight, "bias": bias}) as made:
                size = made.workspace_size()
        finally:
            ok("SetDevice", CPU, 0)
        assert 2**25 < size < 2**26 if wanted else size == 0, (device, rows, k, size)
