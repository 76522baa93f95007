"""Products of 33 and more rows of x with quantized weights on CUDA or its emulation, which are computed in tiles: parts
of k, the ends of x, of the weight and of k, groups, and the layouts that are streamed instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.cuda_calls import allocations, here
from torch_infini.testing import check_against_reference, cuda_device
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops.quantized_linear import inputs_int4, inputs_int8
from torch_infini.testing.ops.scaled_mm_int8 import inputs as inputs_mm

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")

HALVES = pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
QUANTIZE_X = pytest.mark.parametrize("quantize_x", [False, True], ids=["", "x quantized"])
FORMATS = pytest.mark.parametrize(("name", "make"), [("linear_int8", inputs_int8), ("linear_int4", inputs_int4)])


def check(name: str, args: tuple[Any, ...], quantize_x: bool) -> None:
    actual = OP_INFOS[name].op(*here(*args), quantize_x).cpu()
    sample = Sample("call", args, {"quantize_x": quantize_x})
    check_against_reference(OP_INFOS[name], sample, args[0].dtype, actual, on_cuda=True)


@pytest.mark.full(beyond=2)
@QUANTIZE_X
@HALVES
@FORMATS
def test_parts_of_k(name: str, make: Callable[..., Any], dtype: torch.dtype, quantize_x: bool) -> None:
    """Stages are of 128 elements of k for int8 and of 256 for int4; from eight on, blocks share them."""
    for k in (1024, 2048, 2048 + 160, 4096 + 32):
        for rows, n in ((33, 1), (34, 127), (64, 130)):
            groups = {"group": 32} if name == "linear_int4" else {}
            check(name, make(dtype, rows, k=k, n=n, bias=rows == 34, **groups), quantize_x)


@QUANTIZE_X
@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups(group: int, quantize_x: bool) -> None:
    for k in (group, 256 + group, 2048 + group):
        for zeros in (False, True):
            for scales in (torch.bfloat16, torch.float32):
                made = inputs_int4(torch.bfloat16, 40, k=k, n=21, group=group, zeros=zeros, scales_dtype=scales)
                check("linear_int4", made, quantize_x)


@pytest.mark.parametrize(
    "name", ["linear_int8, x quantized", "linear_int4, x quantized", "scaled_mm_int8", "linear_int8"]
)
def test_rows_beside_others(name: str) -> None:
    """A row has the same bits in a tile's first row and in another's last, and nothing is written beside y."""
    if name == "scaled_mm_int8":
        a, b, a_scale, *rest = here(*inputs_mm(torch.bfloat16, 63, 1024, 72))
        call = lambda first, last: OP_INFOS[name].op(a[first:last], b, a_scale[first:last], *rest)  # noqa: E731
    else:
        make = inputs_int8 if "int8" in name else inputs_int4
        x, *rest = here(*make(torch.bfloat16, 100, k=2048, n=72, bias=True))
        op = OP_INFOS[name.partition(",")[0]].op
        call = lambda first, last: op(x[first:last], *rest, "x quantized" in name)  # noqa: E731
    last = 63 if name == "scaled_mm_int8" else 100
    everything = call(0, last)
    for first in (1, 25, last - 33):
        assert torch.equal(call(first, last), everything[first:]), first


def test_many_rows_need_no_parts() -> None:
    """The parts' sums take memory, which more than 128 rows do without: those have tiles enough."""
    # int8 x by int4 weights: so many rows of any other kind are multiplied by cuBLAS.
    x, *rest = here(*inputs_int4(torch.bfloat16, 129, k=2048, n=64))
    op = OP_INFOS["linear_int4"].op
    parts = 2 * 128 * 64 * 4
    assert max(allocations(lambda: op(x[:128], *rest, True))) > parts
    assert max(allocations(lambda: op(x, *rest, True))) < parts + 129 * 2064


@QUANTIZE_X
@FORMATS
def test_layouts(name: str, make: Callable[..., Any], quantize_x: bool) -> None:
    """Columns of a wider y and unaligned rows of x have the values of a plain call, whichever kernel computes them."""
    x, weight, *scales, bias = here(*make(torch.bfloat16, 40, k=1280, n=48, bias=True))
    spec = OP_INFOS[name]
    expected = spec.op(x, weight, *scales, bias, quantize_x)
    wide = torch.full((40, 64), 99.0, dtype=torch.bfloat16, device=DEVICE)
    spec.out(x, weight, *scales, bias, quantize_x, out=wide[:, 8:56])
    assert torch.equal(wide[:, 8:56], expected)
    assert (wide[:, :8] == 99).all() and (wide[:, 56:] == 99).all()
    apart = torch.zeros(40, 1283, dtype=torch.bfloat16, device=DEVICE)[:, 1:1281].copy_(x)
    streamed = spec.op(apart, weight, *scales, bias, quantize_x)
    torch.testing.assert_close(streamed, expected, rtol=2**-7, atol=2**-4)
    split = x.view(4, 10, -1).transpose(0, 1)
    of_split = spec.op(split, weight, *scales, bias, quantize_x).transpose(0, 1).flatten(0, 1)
    torch.testing.assert_close(of_split, expected, rtol=2**-7, atol=2**-4)
