"""Attention over caches of int8 on CUDA: every head size and number of rows with a separate kernel, what may not
change a row's bits, and what becomes of scales and values at the ends of their ranges.

On a GPU, or on the emulated kernels (see test_cuda.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.pairwise import on_gpu_all
from torch_infini.testing import call, check_against_reference, cuda_device, moved
from torch_infini.testing.ops import OpInfo, Sample, all_op_infos
from torch_infini.testing.ops.paged_attention import inputs, quantized, slopes

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALVES = DTYPES[1:]
SPECS = {spec.name: spec for spec in all_op_infos()}
DECODE, PREFILL = SPECS["paged_attention"], SPECS["paged_attention_prefill"]
LENGTHS = [0, 1, 15, 16, 17, 300]


def run(spec: OpInfo, args: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
    result: Tensor = call(spec, moved(Sample("", args, kwargs), DEVICE)).cpu()
    return result


def check(spec: OpInfo, args: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
    actual = run(spec, args, **kwargs)
    sample = Sample(f"q {tuple(args[0].shape)}, cache {tuple(args[1].shape)}", args, kwargs)
    check_against_reference(spec, sample, args[0].dtype, actual, on_cuda=True)
    return actual


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


# ---- the right numbers ----


@pytest.mark.parametrize(
    ("dtype", "size", "group"), on_gpu_all(DEVICE, DTYPES, [64, 128, 256, 16, 37, 40, 72, 112, 200, 300], [1, 4, 8])
)
def test_decode(dtype: torch.dtype, size: int, group: int) -> None:
    args, scales = quantized(inputs(dtype, LENGTHS, 2 * group, 2, size))
    check(DECODE, args, **scales)
    check(DECODE, args, **scales, window=16, scale=-0.05)
    check(DECODE, args, **scales, alibi_slopes=slopes(2 * group))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 1), (16, 1), (17, 1), (80, 1)], ids=str)
def test_many_heads_of_a_key_head(dtype: torch.dtype, size: int, heads: int, kv_heads: int) -> None:
    """Two tiles of 8 rows, and more rows than decode's kernel takes."""
    args, scales = quantized(inputs(dtype, LENGTHS, heads, kv_heads, size))
    check(DECODE, args, **scales)
    check(DECODE, args, **scales, window=17)


@pytest.mark.parametrize(("dtype", "size", "group"), on_gpu_all(DEVICE, DTYPES, [64, 128, 256, 40, 112], [1, 4, 8]))
def test_prefill(dtype: torch.dtype, size: int, group: int) -> None:
    queries = [0, 1, 15, 2, 17, 90]
    args, scales = quantized(inputs(dtype, LENGTHS, 2 * group, 2, size, 16, queries))
    check(PREFILL, args, **scales)
    check(PREFILL, args, **scales, window=16, alibi_slopes=slopes(2 * group))


@pytest.mark.parametrize(("dtype", "size", "block"), on_gpu_all(DEVICE, DTYPES, [64, 128, 256], [1, 5, 16, 64]))
def test_many_splits(dtype: torch.dtype, size: int, block: int) -> None:
    lengths = [1900, 3, 257, 512]
    args, scales = quantized(inputs(dtype, lengths, 4, 1, size, block))
    check(DECODE, args, **scales)
    check(DECODE, args, **scales, window=700)
    args, scales = quantized(inputs(dtype, lengths, 4, 1, size, block, [3, 1, 40, 4]))
    check(PREFILL, args, **scales)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_exact_prefill(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """INFINI_EXACT_ATTENTION=1 rounds the result alone; without it bfloat16 rounds probabilities too, which shows.

    float16 then has them in two parts of bfloat16, which is more than it can show.
    """
    args, scales = quantized(inputs(dtype, [300], 4, 2, size, 16, [70]))
    rounded = check(PREFILL, args, **scales)
    monkeypatch.setenv("INFINI_EXACT_ATTENTION", "1")
    best = check(PREFILL, args, **scales)
    assert not same_bits(best, rounded)
    want = PREFILL.reference(*args, **scales)
    error = lambda actual: float((actual.double() - want).abs().mean())  # noqa: E731
    assert error(best) < error(rounded) if dtype == torch.bfloat16 else error(rounded) < 1.01 * error(best)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 9, 20])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_every_value_is_exact(dtype: torch.dtype, heads: int, size: int) -> None:
    """One key that counts, the newest of 1 to 16 by ALiBi: what comes out is its row of V."""
    lens = torch.arange(1, 17)
    for first in range(-128, 128, size):
        values = torch.arange(first, first + size).to(torch.int8)
        v = values.expand(1, 1, 16, size)
        q = torch.randn(16, heads, size).to(dtype)
        ones = torch.ones(1, 1, 16)
        args = (q, v, v, torch.zeros(16, 1).long(), lens)
        out = run(DECODE, args, alibi_slopes=torch.full((heads,), 1e4), k_scales=ones / 1e6, v_scales=ones)
        assert torch.equal(out, values.to(dtype).expand(16, heads, size))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("queries", [1, 24])
def test_every_value_of_k_counts(dtype: torch.dtype, queries: int) -> None:
    """Each of 256 columns of K alone, with every value of int8 in one of them."""
    size = 256
    k = torch.stack([torch.arange(-128, 128), torch.zeros(size)]).to(torch.int8).view(1, 1, 2, size)
    v = torch.stack([torch.full((size,), 100), torch.zeros(size)]).to(torch.int8).view(1, 1, 2, size)
    scales = {"k_scales": torch.full((1, 1, 2), 1 / 32), "v_scales": torch.full((1, 1, 2), 0.01)}
    q = torch.eye(size, dtype=dtype).repeat_interleave(queries, 0).view(size, queries, size)
    out = run(DECODE, (q, k, v, torch.zeros(size, 1).long(), torch.full((size,), 2)), **scales, scale=1.0)
    want = torch.sigmoid(torch.arange(-128, 128).double() / 32).view(size, 1, 1).expand(size, queries, size)
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


# ---- scales ----


@pytest.mark.parametrize(("dtype", "queries", "size"), on_gpu_all(DEVICE, HALVES, [1, 40], [64, 128, 256]))
def test_scales_of_any_size(dtype: torch.dtype, queries: int, size: int) -> None:
    """Beyond what float16 can tell: keys of small values that count much, beside keys of large values."""
    args, scales = quantized(inputs(dtype, [200], 4, 2, size, 16, [queries]))
    for of_v, of_k in ((1e-30, 1.0), (200.0, 1.0), (1.0, 1e-30), (1.0, 20.0)):
        changed = {"k_scales": scales["k_scales"] * of_k, "v_scales": scales["v_scales"] * of_v}
        if dtype == torch.float16:
            changed["v_scales"] = changed["v_scales"].clamp(min=1e-6)
        check(PREFILL, args, **changed)
    generator = torch.Generator().manual_seed(1)
    wide = 10.0 ** (torch.rand(scales["v_scales"].shape, generator=generator) * 8 - 8)
    check(PREFILL, args, k_scales=scales["k_scales"], v_scales=wide)


@pytest.mark.parametrize(
    ("dtype", "size", "which"), on_gpu_all(DEVICE, DTYPES, [64, 128, 256], ["k_scales", "v_scales"])
)
def test_scales_of_nan(dtype: torch.dtype, size: int, which: str) -> None:
    """Rows that see the key become NaN; those that do not keep their bits."""
    lengths, queries = [100, 40, 700, 30], [60, 3, 1, 0]
    args, scales = quantized(inputs(dtype, lengths, 4, 2, size, 16, queries))
    tables = args[3]
    for window in (0, 20):
        good = run(PREFILL, args, **scales, window=window)
        changed = {name: scale.clone() for name, scale in scales.items()}
        scale = changed[which]
        scale[tables[0, 60 // 16], :, 60 % 16] = torch.nan  # seen by queries 20 to 59, by 20 to 39 with the window
        scale[tables[1, 38 // 16], :, 38 % 16] = torch.nan  # by the last two of three
        scale[tables[2, 650 // 16], :, 650 % 16] = torch.nan  # without the window
        for b, length in enumerate(lengths):  # behind the end
            if length % 16:
                scale[tables[b, length // 16], :, length % 16 :] = torch.nan
        actual = run(PREFILL, args, **changed, window=window)
        seen = torch.zeros(len(actual), dtype=torch.bool)
        seen[20 : 40 if window else 60] = True
        seen[61:63] = True
        seen[63] = not window
        assert actual[seen].isnan().all()
        assert same_bits(actual[~seen], good[~seen])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_blocks_outside_become_nan(dtype: torch.dtype, size: int) -> None:
    lengths, queries = [40, 700, 40], [40, 1, 1]
    args, scales = quantized(inputs(dtype, lengths, 4, 2, size, 16, queries))
    good = run(PREFILL, args, **scales)
    for wrong in (-1, 2**40, -(2**62)):
        tables = args[3].clone()
        tables[0, 1] = tables[1, 30] = wrong  # of keys 16 to 31, and 480 to 495
        actual = run(PREFILL, (*args[:3], tables, *args[4:]), **scales)
        assert actual[16:41].isnan().all()
        assert same_bits(actual[:16], good[:16]) and same_bits(actual[41], good[41])


# ---- bits ----


@pytest.mark.parametrize(("dtype", "size", "window"), on_gpu_all(DEVICE, DTYPES, [64, 128, 256, 40], [0, 5, 260]))
def test_neighbours_change_no_bit(dtype: torch.dtype, size: int, window: int) -> None:
    """Decode and prefill in one call, each alone, and decode by its own op, which has a kernel for fewer rows."""
    lengths, queries = [700, 33, 90, 300], [1, 33, 3, 20]
    args, scales = quantized(inputs(dtype, lengths, 8, 2, size, 16, queries, window))
    q, k, v, tables, lens, starts = args
    together = run(PREFILL, args, **scales, window=window)
    for b, count in enumerate(queries):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        one = (q[rows], k, v, tables[b : b + 1], lens[b : b + 1], torch.tensor([0, count]))
        assert same_bits(run(PREFILL, one, **scales, window=window), together[rows]), b
    decoded = run(DECODE, (q[:1], k, v, tables[:1], lens[:1]), **scales, window=window)
    assert same_bits(decoded, together[:1])


@pytest.mark.parametrize(("dtype", "size", "queries"), on_gpu_all(DEVICE, DTYPES, [64, 128, 256], [1, 40]))
def test_layout_and_capacity_change_no_bit(dtype: torch.dtype, size: int, queries: int) -> None:
    args, scales = quantized(inputs(dtype, [410 if queries == 1 else 100, 60], 8, 2, size, 16, [queries] * 2))
    q, k, v, tables, lens, starts = args
    expected = check(PREFILL, args, **scales)

    def misaligned(cache: Tensor) -> Tensor:
        buffer = torch.full((cache.numel() + 1,), 77, dtype=torch.int8)
        return buffer[1:].view(cache.shape).copy_(cache)

    def padded(cache: Tensor) -> Tensor:
        return torch.nn.functional.pad(cache, (0, 16), value=77)[..., :size]

    def token_major(cache: Tensor) -> Tensor:
        return cache.transpose(1, 2).contiguous().transpose(1, 2)

    for layout in (misaligned, padded, token_major):
        assert same_bits(run(PREFILL, (q, layout(k), layout(v), tables, lens, starts), **scales), expected), layout
    strided = {
        name: torch.stack([scale, scale.new_full(scale.shape, torch.nan)], -1)[..., 0] for name, scale in scales.items()
    }
    assert same_bits(run(PREFILL, args, **strided), expected)
    wide = torch.nn.functional.pad(tables, (0, 600), value=-1)
    assert same_bits(run(PREFILL, (q, k, v, wide, lens, starts), **scales), expected)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_allowed_notices_a_lost_key_or_scale(dtype: torch.dtype) -> None:
    args, scales = quantized(inputs(dtype, [300], 4, 2, 128))
    right = run(DECODE, args, **scales)
    for name in ("k_scales", "v_scales"):
        changed = {**scales, name: scales[name].clone()}
        changed[name][args[3][0, 3], :, 5] = 0  # of key 53
        with pytest.raises(AssertionError, match="elements are off"):
            check_against_reference(DECODE, Sample("", args, changed), dtype, right, on_cuda=True)
