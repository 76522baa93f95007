"""linear beyond the generic tests: rows do not depend on their batch, many rows of bfloat16 and float32, which have
kernels of their own, odd strides, and that the tolerances notice a single lost product.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_infini import cpu_capability
from torch_infini.testing import check_against_reference, cpu_capability_set_to, kernel_levels, relayout, threads_set_to
from torch_infini.testing.compare import assert_close
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops.linear import inputs, reference

SPEC = OP_INFOS["linear"]
MANY = 130  # rows that are packed
PACKED = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def check(actual: Tensor, *args: Tensor | None) -> None:
    check_against_reference(SPEC, Sample("call", args), args[0].dtype, actual)


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
@pytest.mark.parametrize("k", [5, 700, 3001])
def test_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype, k: int, capability: str) -> None:
    x, weight, bias = inputs(dtype, 70, k=k, n=53, bias=True)
    with cpu_capability_set_to(capability):
        alone = torch.cat([SPEC.op(row, weight, bias) for row in x.split(1)])
        for rows in (*range(2, 18), 31, 32, 33, 40, 41, 57, 64, 70):
            assert torch.equal(SPEC.op(x[:rows], weight, bias), alone[:rows]), rows


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize(
    ("dtype", "rows", "k"),
    [(torch.bfloat16, 1100, 37), (torch.bfloat16, 500, 20000), (torch.float32, 150, 2000)],
    ids=str,
)
def test_rows_that_are_packed_in_several_passes(dtype: torch.dtype, rows: int, k: int, capability: str) -> None:
    x, weight, bias = inputs(dtype, rows, k=k, n=35, bias=True)
    with cpu_capability_set_to(capability):
        parts = torch.cat([SPEC.op(part, weight, bias) for part in x.split(40)])
        assert torch.equal(SPEC.op(x, weight, bias), parts)


@pytest.mark.parametrize("threads", [1, 2, 3])
@PACKED
def test_many_rows_of_several_weights(dtype: torch.dtype, threads: int) -> None:
    """Their panels are shared out among the threads across weights, some of which have part of one or nothing."""
    sizes = (70, 0, 33)
    x = inputs(dtype, MANY, k=333, n=1)[0]
    weights = [inputs(dtype, 1, k=333, n=n, bias=True, seed=n)[1:] for n in sizes]
    with threads_set_to(threads):
        y = torch.ops.infini.fused_linear(x, *(w for w, _ in weights), *(b for _, b in weights))
    assert torch.equal(y, torch.cat([SPEC.op(x, w, b) for w, b in weights], 1))


@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
def test_a_lost_product_is_noticed(dtype: torch.dtype) -> None:
    x, weight, _ = inputs(dtype, 2, k=5125, n=64)
    less = weight.clone()
    less[:, 5124] = 0
    relative, absolute = SPEC.tolerances[dtype]
    with pytest.raises(AssertionError, match="elements are off"):
        assert_close(reference(x, less).to(dtype), reference(x, weight), relative, absolute)


@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
@pytest.mark.parametrize("name", ["linear", "matmul", "gemm", "fused_linear"])
def test_what_is_allowed_on_cuda_notices_lost_products(name: str, dtype: torch.dtype) -> None:
    """One that is left out, and a step of the tensor cores that is left out, added twice or taken from elsewhere."""
    spec = OP_INFOS[name]
    x, weight, _ = inputs(dtype, 20, k=5125, n=64)
    args = {"linear": (x, weight), "fused_linear": (x, weight[:40], weight[40:])}.get(name, (x, weight.t()))
    sample = Sample("call", args)
    exact = x.double() @ weight.double().t()
    part = lambda of_x, of_weight: x[:, of_x].double() @ weight[:, of_weight].double().t()
    check = lambda y: check_against_reference(spec, sample, dtype, y.to(dtype), on_cuda=True)
    check(exact)
    last, step, other = slice(5124, 5125), slice(5104, 5120), slice(16, 32)
    of_step = part(step, step)
    for wrong in (exact - part(last, last), exact - of_step, exact + of_step, exact - of_step + part(other, step)):
        with pytest.raises(AssertionError, match="elements are off"):
            check(wrong)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("k", "n"), [(64, 33), (769, 770), (5125, 301), (2048, 512), (0, 5)])
@PACKED
def test_many_rows(dtype: torch.dtype, k: int, n: int, bias: bool) -> None:
    if dtype == torch.float32:
        # The tolerances are not for longer sums of so many elements, in any kernel; SSE's four lanes add twice as many.
        k = min(k, 1025 if cpu_capability() == "baseline" else 2051)
    x, weight, b = inputs(dtype, 2, MANY // 2, k=k, n=n, bias=bias)
    with threads_set_to(1):
        y = SPEC.op(x, weight, b)
    check(y, x, weight, b)
    with threads_set_to(2):
        assert torch.equal(SPEC.op(x, weight, b), y)
    for layout in ("strided rows", "misaligned", "permuted rows"):
        moved = SPEC.op(relayout(layout, x), relayout(layout, weight), relayout(layout, b))
        assert moved.is_contiguous()
        assert torch.equal(moved, y), layout


@PACKED
def test_many_rows_into_any_layout(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(dtype, 2, MANY // 2, k=100, n=50, bias=True)
    want = SPEC.op(x, weight, bias)
    for out in (
        torch.full_like(want, 7),
        relayout("strided rows", torch.full_like(want, 7)),
        torch.full((MANY // 2, 2, 50), 7, dtype=dtype).transpose(0, 1),
    ):
        assert SPEC.out(x, weight, bias, out=out) is out
        assert torch.equal(out, want)


@pytest.mark.parametrize("rows", [2, MANY])
@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
def test_repeated_rows(dtype: torch.dtype, rows: int) -> None:
    """Row strides of 0, in x and in weight."""
    x, weight, _ = inputs(dtype, 1, k=70, n=20)
    for call in ((x.expand(rows, 70), weight), (inputs(dtype, rows, k=70, n=1)[0], weight[:1].expand(20, 70))):
        check(SPEC.op(*call), *call)


@pytest.mark.parametrize("rows", [2, MANY])
def test_parameters(rows: int) -> None:
    """Weights that require a gradient are served; asking for the gradient raises."""
    x, weight, bias = inputs(torch.bfloat16, rows, k=64, n=20, bias=True)
    want = SPEC.op(x, weight, bias)
    weight.requires_grad_(True)
    got = SPEC.op(x, weight, bias)
    assert torch.equal(got, want)
    with pytest.raises(RuntimeError, match="^infini::linear has no backward: "):
        got.sum().backward()
    assert weight.grad is None
    with torch.no_grad():
        assert torch.equal(SPEC.out(x, weight, bias, out=torch.empty_like(want)), want)


def test_infinity_and_nan_stay_in_their_row() -> None:
    for dtype in SPEC.dtypes:
        x, weight, _ = inputs(dtype, 3, k=45, n=20)
        x[1, 44], x[2, 3] = torch.inf, torch.nan
        y = SPEC.op(x, weight)
        assert y[0].isfinite().all()
        assert y[1].isinf().all()
        assert y[2].isnan().all()
