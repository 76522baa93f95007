"""Weights in panels: how far they are from what was quantized, beside int8 and int4; the rest is in test_ops.py."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from support.fresh_python import run_python
from torch_infini.ops import (
    linear_group8,
    linear_table4,
    quantize_group8,
    quantize_int4,
    quantize_int8,
    quantize_table4,
)
from torch_infini.ops._panels import GROUP8, TABLE, TABLE4, Panels
from torch_infini.weights import dequantize_int4, dequantize_int8


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    packed = torch.zeros(TABLE4.packed_shape(*weight.shape), dtype=torch.uint8)
    scales = torch.zeros(weight.shape[0])
    quantize_table4(packed, scales, weight)
    return packed, scales


def error(weight: Tensor, approximate: Tensor) -> float:
    return float((approximate - weight).norm() / weight.norm())


def normal_weight(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_error_of_normal_weights() -> None:
    """At the bits of int4 with groups of 64 in bfloat16, 4.5 a weight, the error is at most 0.72 of its."""
    weight = normal_weight(256, 1024)
    packed, scales = quantized(weight)
    assert packed.numel() * 8 / weight.numel() == 4.5
    ours = error(weight, TABLE4.dequantize(packed, scales, 1024))
    int4 = error(weight, dequantize_int4(*quantize_int4(weight.bfloat16(), 64), torch.float32))
    assert ours < 0.0635
    assert ours < 0.72 * int4


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_of_the_table_are_exact(sign: int) -> None:
    """Multiples of the levels come back, with either sign of a group's scale."""
    order = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(8)])
    weight = (torch.tensor(TABLE)[order] * sign * 127.0).view(2, 64)
    packed, scales = quantized(weight)
    assert torch.equal(TABLE4.dequantize(packed, scales, 64), weight)


@pytest.mark.parametrize(("panels", "byte"), [(TABLE4, 0x00), (TABLE4, 0xFF), (GROUP8, 0x81), (GROUP8, 0x7F)])
def test_the_largest_products_are_exact(panels: Panels, byte: int) -> None:
    """No step overflows, in any kernel: levels, scales and x at their ends, over one run of columns."""
    generator = torch.Generator().manual_seed(0)
    k, scales = (128 if panels is TABLE4 else 64), torch.ones(32)
    packed = torch.full(panels.packed_shape(32, k), byte, dtype=torch.uint8)
    packed[..., :64] = torch.tensor([127, 129], dtype=torch.uint8)[torch.randint(2, (64,), generator=generator)]
    weight = panels.dequantize(packed, scales, k).double()
    for ends in (torch.ones(9, k), -torch.ones(9, k), torch.randint(2, (9, k), generator=generator) * 2.0 - 1):
        x = ends * 127
        exact = (x.double() @ weight.T).float()
        for rows in (1, 2, 3, 8, 9):
            linear = linear_table4 if panels is TABLE4 else linear_group8
            assert torch.equal(linear(x[:rows], packed, scales), exact[:rows])


def test_a_huge_column_stays_in_its_group() -> None:
    """What one column makes large takes precision from the 15 beside it, and from the scales of its row, to 1 / 127."""
    weight = normal_weight(64, 256)
    weight[:, 100] *= 50
    packed, scales = quantized(weight)
    others = torch.arange(256) // 16 != 100 // 16
    assert error(weight[:, others], TABLE4.dequantize(packed, scales, 256)[:, others]) < 0.13


def test_x_with_an_outlier_loses_no_other_run() -> None:
    """A large element of x is quantized with its run of 128 columns alone."""
    weight, x = normal_weight(32, 512), normal_weight(1, 512)
    packed, scales = quantized(weight)
    exact = TABLE4.dequantize(packed, scales, 512)
    x[:, 5] = 1000
    rest = x.clone()
    rest[:, :128] = 0
    got = linear_table4(x, packed, scales) - linear_table4(x - rest, packed, scales)
    assert error(rest @ exact.t(), got) < 0.02


def test_error_of_int8_with_groups() -> None:
    """The largest of 16 normal numbers is some 0.6 of the largest of 1024."""
    weight = normal_weight(256, 1024)
    packed, scales = torch.zeros(GROUP8.packed_shape(256, 1024), dtype=torch.uint8), torch.zeros(256)
    quantize_group8(packed, scales, weight)
    assert packed.numel() * 8 / weight.numel() == 8.5
    rows = error(weight, dequantize_int8(*quantize_int8(weight), torch.float32))
    assert error(weight, GROUP8.dequantize(packed, scales, 1024)) < 0.64 * rows


def test_no_weight_is_cut_off() -> None:
    """Rounded up, a group's scale reaches its largest weight: no error is above half a step."""
    weight = normal_weight(48, 192) * torch.logspace(-3, 3, 12).repeat_interleave(16)
    packed, scales = torch.zeros(GROUP8.packed_shape(48, 192), dtype=torch.uint8), torch.zeros(48)
    quantize_group8(packed, scales, weight)
    steps = packed[..., :64].view(3, 3, 4, 16).permute(0, 3, 1, 2).reshape(48, 12) * scales[:, None]
    off = (GROUP8.dequantize(packed, scales, 192) - weight).abs().view(48, 12, 16).amax(2)
    assert (off <= 0.5001 * steps + 1e-6 * scales[:, None]).all()


READ = """
import hashlib
import torch
from torch_infini.nn import Linear

torch.manual_seed(0)
for format in ("group8", "table4", "int8", "int4", "w8a16", "w4a16", "dense"):
    for dtype in (torch.float32, torch.bfloat16):
        for n, k in ((16, 64), (250, 192), (83, 4160)):
            layer = Linear(k, n, format=format, dtype=dtype)
            layer.load(torch.randn(n, k))
            found = hashlib.sha256()
            for rows in (1, 2, 3, 8, 9):
                found.update(layer(torch.randn(rows, k, dtype=dtype)).float().numpy().tobytes())
            print(format, dtype, n, k, found.hexdigest())
"""


def test_reading_changes_no_bit() -> None:
    """A weight that is read in one place or in several gives the same bits."""
    one, several = (
        run_python(READ, env={**os.environ, "INFINI_WEIGHT_READING": value}, check=True).stdout
        for value in ("one", "several")
    )
    assert one == several and one.count("group8") == 6


THREADS = """
import torch
from torch_infini.nn import Linear
from torch_infini.ops import attention

torch.set_num_threads(2)
x = torch.randn(1, 2048)
heads = torch.randn(1, 4096, 16, 64)
calls = [lambda: attention(heads[:, :1], heads, heads)]
for format in ("group8", "table4", "int8", "int4", "w8a16", "dense"):
    layer = Linear(2048, 4096, format=format)
    layer.load(torch.randn(4096, 2048))
    calls.append(lambda layer=layer: layer(x))
for call in calls:
    try:
        call()
    except RuntimeError as error:
        print(error)
"""


def test_a_wrong_way_to_read_is_refused() -> None:
    """With a sentence, also where several threads compute."""
    found = run_python(THREADS, env={**os.environ, "INFINI_WEIGHT_READING": "fast"}, check=True).stdout
    rule = "INFINI_WEIGHT_READING must be 'one' or 'several', or not be set, got 'fast'"
    assert found.count(rule) == len(found.splitlines()) == 7, found
