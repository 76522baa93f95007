"""linear_int8 and linear_int4 on CUDA or its emulation: stages that end within k, groups, blocks of rows that overlap,
scales and zeros of any dtype, and operands anywhere in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_infini.testing import check_against_reference, cuda_device
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops.quantized_linear import inputs_int4, inputs_int8

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")

HALVES = (torch.bfloat16, torch.float16)
MANY = 7000 if DEVICE == "cuda" else 900  # rows of a weight, for more tiles than run at once
QUANTIZE_X = pytest.mark.parametrize("quantize_x", [False, True], ids=["", "x quantized"])
FORMATS = pytest.mark.parametrize(("name", "make"), [("linear_int8", inputs_int8), ("linear_int4", inputs_int4)])


def on_device(args: tuple[Any, ...]) -> list[Any]:
    return [value.to(DEVICE) if isinstance(value, Tensor) else value for value in args]


def check(name: str, args: tuple[Any, ...], quantize_x: bool) -> None:
    spec = OP_INFOS[name]
    actual = spec.op(*on_device(args), quantize_x).cpu()
    sample = Sample("call", args, {"quantize_x": quantize_x})
    check_against_reference(spec, sample, args[0].dtype, actual, on_cuda=True)


def apart(t: Tensor, elements: int, pitch: int) -> Tensor:
    """The same matrix, `elements` into its memory, with `pitch` elements between rows that spoil what reads them."""
    spoiled = torch.full((elements + t.shape[0] * (t.shape[1] + pitch),), 113, dtype=t.dtype)
    if t.dtype.is_floating_point:
        spoiled.fill_(torch.nan)
    view = spoiled.to(DEVICE)[elements:].view(t.shape[0], -1)[:, : t.shape[1]]
    return view.copy_(t)


@QUANTIZE_X
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_int4_groups(dtype: torch.dtype, group: int, quantize_x: bool) -> None:
    """A stage is of 256 elements of k, a warp's next one 2048 further on; aligned scales are copied otherwise."""
    for k in (group, 256, 256 + group, 2048 - group, 2304, 2048 + 256 + group):
        for zeros in (False, True):
            for scales in (dtype, torch.float32):
                args = inputs_int4(dtype, 2, k=k, n=21, group=group, zeros=zeros, bias=True, scales_dtype=scales)
                check("linear_int4", args, quantize_x)


@QUANTIZE_X
@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_slots_are_used_again(group: int, quantize_x: bool) -> None:
    """A warp has four slots for its stages, each of 256 elements in every 2048."""
    for k in (4 * 2048, 4 * 2048 + 256, 9 * 2048 - group):
        for rows in (1, 9, 17):
            args = inputs_int4(torch.bfloat16, rows, k=k, n=18, group=group, zeros=rows != 9)
            check("linear_int4", args, quantize_x)


@QUANTIZE_X
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_int8_slots_are_used_again(dtype: torch.dtype, quantize_x: bool) -> None:
    for k in (1024, 1024 + 127, 4 * 1024, 4 * 1024 + 128, 9 * 1024 + 16):
        for rows in (1, 9, 17):
            check("linear_int8", inputs_int8(dtype, rows, k=k, n=18), quantize_x)


@QUANTIZE_X
@pytest.mark.parametrize("zeros", [False, True], ids=["no zeros", "zeros"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_int4_rows_beside_others(dtype: torch.dtype, zeros: bool, quantize_x: bool) -> None:
    x, *rest = on_device(inputs_int4(dtype, 32, k=2048 + 320, n=19, group=32, zeros=zeros))
    op = OP_INFOS["linear_int4"].op
    everything = op(x, *rest, quantize_x)
    for rows in range(1, 32):
        assert torch.equal(op(x[32 - rows :], *rest, quantize_x), everything[32 - rows :]), rows


@QUANTIZE_X
@FORMATS
@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=str)
def test_columns_beside_others(name: str, make: Callable[..., Any], dtype: torch.dtype, quantize_x: bool) -> None:
    """The last block of rows of the weight has rows of the one before too, and writes its own only."""
    args = make(dtype, 3, k=512, n=49, bias=True)
    x, weight, *scales, bias = on_device(args)
    op = OP_INFOS[name].op
    everything = op(x, weight, *scales, bias, quantize_x)
    for n in (1, 2, 15, 16, 17, 31, 32, 33, 47, 48):
        wide = torch.full((3, n + 16), 99.0, dtype=dtype, device=DEVICE)
        out = wide[:, 8 : 8 + n]
        OP_INFOS[name].out(x, weight[:n], *[values[:n] for values in scales], bias[:n], quantize_x, out=out)
        assert torch.equal(out, everything[:, :n]), n
        assert (wide[:, :8] == 99).all() and (wide[:, 8 + n :] == 99).all(), n


@QUANTIZE_X
@FORMATS
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_tiles_that_follow_one_another(name: str, make: Callable[..., Any], rows: int, quantize_x: bool) -> None:
    """With more tiles than are computed at once, a block's next one has the bits of one computed alone."""
    for k in (128, 2176, 4096):  # the first is shorter than the warps' turns: most have no stage
        x, weight, *scales, bias = on_device(make(torch.bfloat16, rows, k=k, n=MANY, bias=True))
        op = OP_INFOS[name].op
        everything = op(x, weight, *scales, bias, quantize_x)
        for first in (0, MANY // 2 + 1, MANY - 18):
            part = slice(first, first + 18)
            alone = op(x, weight[part], *[values[part] for values in scales], bias[part], quantize_x)
            assert torch.equal(everything[:, part], alone), (k, first)


@pytest.mark.parametrize("rows", [1, 9])
def test_tiles_of_several_weights(rows: int) -> None:
    """A block's next tile is of another weight, which may be unaligned."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 1160, generator=generator).bfloat16().to(DEVICE)
    weights = [torch.randn(n, 1160, generator=generator).bfloat16() for n in (MANY, 5, MANY // 2)]
    weights = [weights[0].to(DEVICE), weights[1].to(DEVICE), apart(weights[2], 1, 3)]
    fused = torch.ops.infini.fused_linear(x, *weights)
    assert torch.equal(fused, torch.cat([torch.ops.infini.linear(x, w) for w in weights], -1))


@QUANTIZE_X
@FORMATS
@pytest.mark.parametrize("dtype", (torch.float32, *HALVES), ids=str)
def test_any_layout_has_the_same_bits(
    name: str, make: Callable[..., Any], dtype: torch.dtype, quantize_x: bool
) -> None:
    """What is aligned is copied in vectors, what is not element by element."""
    x, weight, *scales, bias = on_device(make(dtype, 3, k=1152, n=21, bias=True))
    op = OP_INFOS[name].op
    expected = op(x, weight, *scales, bias, quantize_x)
    for elements, pitch in ((0, 16), (16, 32), (8, 8), (4, 4), (2, 2), (1, 0), (0, 3), (5, 1)):
        for which in range(3):
            moved = [
                apart(x, elements, pitch) if which == 0 else x,
                apart(weight, elements, pitch) if which == 1 else weight,
            ]
            move = which == 2 and scales[0].dim() == 2
            others = [apart(values, elements, pitch) for values in scales] if move else scales
            assert torch.equal(op(*moved, *others, bias, quantize_x), expected), (elements, pitch, which)


@QUANTIZE_X
def test_int4_of_every_nibble(quantize_x: bool) -> None:
    """Each of the 16 integers at each place of a word, by an x that is 1 there alone."""
    for dtype in HALVES:
        weight = torch.arange(16, dtype=torch.uint8)[:, None].repeat(1, 16) * 17
        scales = torch.ones(16, 1, dtype=dtype)
        y = (
            OP_INFOS["linear_int4"]
            .op(*on_device((torch.eye(32, dtype=dtype), weight, scales, None, None)), quantize_x)
            .cpu()
        )
        assert torch.equal(y, (torch.arange(16) - 8).to(dtype).expand(32, 16)), dtype
        mixed = torch.tensor([0x10 * ((i + 1) % 16) + i for i in range(0, 16, 2)] * 2, dtype=torch.uint8).expand(16, 16)
        y = (
            OP_INFOS["linear_int4"]
            .op(*on_device((torch.eye(32, dtype=dtype), mixed.contiguous(), scales, None, None)), quantize_x)
            .cpu()
        )
        assert torch.equal(y, (torch.arange(32) % 16 - 8).to(dtype)[:, None].expand(32, 16)), dtype


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_int8_of_every_integer(dtype: torch.dtype) -> None:
    weight = torch.arange(-128, 128).to(torch.int8).view(16, 16)
    y = OP_INFOS["linear_int8"].op(*on_device((torch.eye(16, dtype=dtype), weight, torch.ones(16), None)), False).cpu()
    assert torch.equal(y, weight.t().to(dtype))
