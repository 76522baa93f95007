"""torch.ops.infini.linear_blocks beyond what the registry's tests check: its kinds of blocks, by value and bit for bit.

The formulas in ops/_blocks are what kernels are compared with elsewhere; here they meet blocks worked out by hand.
"""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

import torch_infini
from torch_infini._core import library
from torch_infini.nn.linear import MULTIPLIES_BFLOAT16
from torch_infini.ops._blocks import KINDS
from torch_infini.testing.ops.linear_blocks import random_weight


def decoded(kind: str, block: bytes) -> list[float]:
    """Return a block's elements, by the op and by the formula, which must agree."""
    weight = torch.tensor([list(block)], dtype=torch.uint8)[None]
    elements = KINDS[kind].elements
    found = torch_infini.ops.linear_blocks(torch.eye(elements), weight, kind)[:, 0]
    assert torch.equal(found, KINDS[kind].dequantize(weight)[0])
    return found.tolist()


def halves(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


NIBBLES = bytes(i | (15 - i) << 4 for i in range(16))  # elements 0 to 15 are 0 to 15, elements 16 to 31 are 15 to 0
COUNTED = [*range(16), *reversed(range(16))]


def test_legacy_blocks() -> None:
    assert decoded("q4_0", halves(0.5) + NIBBLES) == [0.5 * (q - 8) for q in COUNTED]
    assert decoded("q4_1", halves(0.5, 3) + NIBBLES) == [0.5 * q + 3 for q in COUNTED]
    high = 0x80000001  # the fifth bits of the first and the last element
    fifth = [16 * (i in (0, 31)) for i in range(32)]
    five = [q + bit for q, bit in zip(COUNTED, fifth, strict=True)]
    assert decoded("q5_0", halves(2) + struct.pack("<I", high) + NIBBLES) == [2.0 * (q - 16) for q in five]
    assert decoded("q5_1", halves(2, -1) + struct.pack("<I", high) + NIBBLES) == [2.0 * q - 1 for q in five]
    assert decoded("q8_0", halves(0.25) + struct.pack("32b", *range(-16, 16))) == [0.25 * q for q in range(-16, 16)]
    levels = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    assert decoded("iq4_nl", halves(2) + NIBBLES) == [2.0 * levels[q] for q in COUNTED]


def test_k_blocks() -> None:
    scales, minima = [1, 2, 3, 4, 17, 33, 50, 63], [0, 5, 6, 7, 16, 32, 48, 62]
    packed = [s | (scales[i + 4] >> 4) << 6 for i, s in enumerate(scales[:4])]
    packed += [m | (minima[i + 4] >> 4) << 6 for i, m in enumerate(minima[:4])]
    packed += [scales[i] & 15 | (minima[i] & 15) << 4 for i in range(4, 8)]
    head = halves(2, 0.5) + bytes(packed)
    pairs = bytes(i % 16 | (i // 2) << 4 for i in range(32))  # elements of the first 32, then of the next 32
    nibbles = [[i % 16 for i in range(32)], [i // 2 for i in range(32)]] * 4
    q4 = [2.0 * scales[g] * nibbles[g][i] - 0.5 * minima[g] for g in range(8) for i in range(32)]
    assert decoded("q4_k", head + pairs * 4) == q4
    high = bytes(1 << (i % 8) for i in range(32))  # bit g of byte i belongs to element i of group g
    q5 = [2.0 * scales[g] * (nibbles[g][i] + 16 * (i % 8 == g)) - 0.5 * minima[g] for g in range(8) for i in range(32)]
    assert decoded("q5_k", head + high + pairs * 4) == q5


def test_q6_k() -> None:
    low = bytes(i % 16 | (15 - i % 16) << 4 for i in range(64))
    high = bytes(i % 4 | 1 << 2 | 2 << 4 | 3 << 6 for i in range(32))
    scales = [*range(-8, 8)]
    of_half = [  # 128 elements: lower nibbles of 64 bytes, then upper ones, each with two of the upper bits of its byte
        ((i % 16 if i < 64 else 15 - i % 16) | (i % 4 if i < 32 else i // 32) << 4) - 32 for i in range(128)
    ]
    expected = [0.5 * scales[e // 16] * of_half[e % 128] for e in range(256)]
    assert decoded("q6_k", low * 2 + high * 2 + struct.pack("16b", *scales) + halves(0.5)) == expected


def test_few_bits() -> None:
    two = bytes(i % 4 | 1 << 2 | 2 << 4 | (3 - i % 4) << 6 for i in range(32))  # bits of 4 times 32 elements
    codes = [(i % 4, 1, 2, 3 - i % 4)[part % 4] for part in range(8) for i in range(32)]
    scales, minima = [*range(16)], [*range(15, -1, -1)]
    both = bytes(s | m << 4 for s, m in zip(scales, minima, strict=True))
    expected = [2.0 * scales[e // 16] * codes[e] - 0.5 * minima[e // 16] for e in range(256)]
    assert decoded("q2_k", both + two * 2 + halves(2, 0.5)) == expected
    third = bytes(1 << i % 8 for i in range(32))  # bit p of byte i belongs to element i of part p
    signed = [2 * i - 15 for i in range(16)]
    packed = [(signed[i] + 32 & 15) | (signed[i + 8] + 32 & 15) << 4 for i in range(8)]
    packed += [sum((signed[i + 4 * j] + 32 >> 4) << 2 * j for j in range(4)) for i in range(4)]
    expected = [0.5 * signed[e // 16] * (codes[e] - (0 if e % 32 % 8 == e // 32 else 4)) for e in range(256)]
    assert decoded("q3_k", third + two * 2 + bytes(packed) + halves(0.5)) == expected
    levels = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
    of_parts = [-32, -5, 0, 1, 7, 15, 16, 31]
    upper = sum((s + 32 >> 4) << 2 * i for i, s in enumerate(of_parts))
    low = bytes(of_parts[i] + 32 & 15 | (of_parts[i + 1] + 32 & 15) << 4 for i in range(0, 8, 2))
    expected = [0.25 * s * levels[q] for s in of_parts for q in COUNTED]
    assert decoded("iq4_xs", halves(0.25) + struct.pack("<H", upper) + low + NIBBLES * 8) == expected


def test_small_floats() -> None:
    fp4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    fp4 += [-value for value in fp4]
    assert decoded("mxfp4", bytes([128]) + NIBBLES) == [2.0 * fp4[q] for q in COUNTED]
    assert decoded("mxfp4", bytes([1]) + NIBBLES) == [2.0**-126 * fp4[q] for q in COUNTED]
    codes = [0x00, 0x80, 0x01, 0x87, 0x08, 0x38, 0xB8, 0x7E, 0xFE]
    values = [0, -0.0, 2.0**-9, -7 * 2.0**-9, 2.0**-6, 1, -1, 448, -448]
    block = struct.pack("<f", 0.5) + bytes(codes) + bytes(128 - len(codes))
    assert decoded("fp8", block)[: len(codes)] == [0.5 * value for value in values]
    nf4 = decoded("nf4", struct.pack("<f", 4) + bytes([0xF0, 0x7C]) + bytes([0x77]) * 30)
    assert nf4[:2] == [4.0, -4.0] and nf4[2] == 0 and nf4[3] == pytest.approx(4 * 0.4407098)


def test_every_code_of_fp8() -> None:
    """Each code is an element of a row of its own: NaN times 0 would spoil the others."""
    blocks = torch.zeros(256, 1, 132, dtype=torch.uint8)
    blocks[:, 0, :4] = torch.tensor([1.0]).view(torch.uint8)
    codes = torch.arange(256, dtype=torch.uint8)
    blocks[:, 0, 4 + 77] = codes
    found = torch_infini.ops.linear_blocks(torch.eye(128)[77], blocks, "fp8")
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(1000), expected.nan_to_num(1000))
    assert found.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


BATCHES = ((0, 1), (139, 1), (5, 2), (7, 3), (60, 9), (11, 129), (3, 63), (2, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_batch(kind: str, dtype: torch.dtype) -> None:
    of = KINDS[kind]
    k = 768
    weight, x = random_weight(of, 53, k), torch.randn(140, k).to(dtype)
    whole = torch_infini.ops.linear_blocks(x, weight, kind)

    def rows(first: int, count: int) -> Tensor:
        return torch_infini.ops.linear_blocks(x[first : first + count], weight, kind)

    for first, count in BATCHES:
        assert torch.equal(rows(first, count), whole[first : first + count]), (first, count)


@pytest.mark.skipif(
    library.capability not in (*MULTIPLIES_BFLOAT16, "avx512_amx"), reason="bfloat16 is multiplied as float32"
)
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_and_tiles_have_the_bits_of_linear(kind: str) -> None:
    of = KINDS[kind]
    weight, x = random_weight(of, 61, 1024), torch.randn(140, 1024).bfloat16()
    dense = of.dequantize(weight, torch.bfloat16)
    for first, count in BATCHES:
        found = torch_infini.ops.linear_blocks(x[first : first + count], weight, kind)
        assert torch.equal(found, torch.ops.infini.linear(x[first : first + count], dense)), (first, count)


def test_an_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of q4_0, .*, got 'iq1_s'"):
        torch_infini.ops.linear_blocks(torch.ones(1, 256), torch.zeros(1, 1, 110, dtype=torch.uint8), "iq1_s")
