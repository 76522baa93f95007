"""paged_caching: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...ops.paged_caching import SPEC
from ..c_door import c_op
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._int8_cache import comparison, quantize, scale_errors
from ._int32 import with_int32


def reference(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> tuple[Tensor, ...]:
    size = k_cache.shape[2]
    written = [k_cache.double(), v_cache.double()]
    rows: tuple[Tensor, ...] = (k, v)
    if k_scales is not None and v_scales is not None:
        written += [k_scales.double(), v_scales.double()]
        (k, k_new), (v, v_new) = quantize(k), quantize(v)
        rows = (k, v, k_new, v_new)
    for t, slot in enumerate(slot_mapping.tolist()):
        for cache, new in zip(written, rows, strict=True):
            if slot >= 0 and k.numel():
                cache[slot // size, :, slot % size] = new[t].double()
    return tuple(written)


def peer(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write by indices; the mask of skipped tokens costs an extra pass."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    size = max(k_cache.shape[2], 1)
    block, row = slots // size, slots % size
    caches, scales = (k_cache, v_cache), (k_scales, v_scales)
    for cache, cache_scales, rows in zip(caches, scales, (k[written], v[written]), strict=True):
        if cache_scales is not None:
            rows, cache_scales[block, :, row] = quantize(rows)
        cache[block, :, row] = rows


def inputs(
    dtype: torch.dtype, slots: Sequence[int], heads: int, head_size: int, block_size: int = 16, blocks: int = 3
) -> tuple[Tensor, ...]:
    """Make (k_cache, v_cache, k, v, slot_mapping)."""
    g = torch.Generator().manual_seed(len(slots) + head_size)
    caches = torch.randn(2, blocks, heads, block_size, head_size, generator=g).to(dtype)
    new = torch.randn(2, len(slots), heads, head_size, generator=g).to(dtype)
    return (*(c.clone() for c in caches), *(t.clone() for t in new), torch.tensor(slots, dtype=torch.int64))


def quantized(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the arguments with int8 caches and scales instead of the float caches at their start."""
    (k_cache, k_scales), (v_cache, v_scales) = quantize(args[0]), quantize(args[1])
    return (k_cache, v_cache, *args[2:], k_scales, v_scales)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("some skipped", inputs(dtype, [5, -1, 47, 16, -9, 0], 2, 37))
    yield Sample("one token", inputs(dtype, [33], 4, 64))
    yield Sample("int8", quantized(inputs(dtype, [5, -1, 47, 16, -9, 0], 2, 37)))
    yield with_int32(Sample("some skipped", inputs(dtype, [5, -1, 47, 16, -9, 0], 2, 37)))
    yield with_int32(Sample("int8", quantized(inputs(dtype, [5, -1, 47, 16, -9, 0], 2, 37))))
    yield Sample("no tokens", inputs(dtype, [], 2, 8))
    yield Sample("one slot twice", inputs(dtype, [5, 6, 5], 3, 8, 5))
    yield Sample("one of each", inputs(dtype, [0], 1, 1, 1, 1))
    yield Sample("no heads", inputs(dtype, [3], 0, 8))
    yield Sample("no columns", inputs(dtype, [3], 2, 0))
    yield Sample("no blocks", inputs(dtype, [-1, -1], 2, 8, blocks=0))
    k_cache, v_cache, k, v, slots = inputs(dtype, [30, 2, -1, 17], 2, 24)
    interleaved = torch.stack((k_cache, v_cache), 1)
    yield Sample("interleaved caches", (*(t.clone() for t in interleaved.unbind(1)), k, v, slots))
    token_major = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k_cache, v_cache))
    yield Sample("token-major caches", (*token_major, k, v, slots))
    yield Sample("one key for all", (k_cache, v_cache, k[:1].expand(4, 2, 24), v, slots))
    qkv = torch.cat((k, k, v), 1)
    yield Sample("parts of a fused product", (k_cache, v_cache, qkv[:, 2:4], qkv[:, 4:], slots))
    yield Sample("strided slots", (k_cache, v_cache, k, v, slots.repeat_interleave(2)[1::2]))
    yield Sample("int8, no tokens", quantized(inputs(dtype, [], 2, 8)))
    yield Sample("int8, no columns", quantized(inputs(dtype, [3], 2, 0)))
    yield Sample("int8, one slot twice", quantized(inputs(dtype, [5, 6, 5], 3, 64, 5)))
    k_cache, v_cache, k, v, slots, k_scales, v_scales = quantized(inputs(dtype, [30, 2, -1, 17], 2, 24))
    k[0] = 0
    k[1, 0, 3], k[1, 1, 23], v[0, 0, 0], v[1, 1] = torch.inf, torch.nan, -torch.inf, 1e-7
    yield Sample("int8, zeros, infinity and NaN", (k_cache, v_cache, k, v, slots, k_scales, v_scales))
    apart = torch.stack((k_scales, v_scales), -1)  # strided, and interleaved like the caches
    caches = torch.stack((k_cache, v_cache), 1)
    yield Sample(
        "int8, interleaved",
        (*(t.clone() for t in caches.unbind(1)), qkv[:, 2:4], qkv[:, 4:], slots, *apart.unbind(-1)),
    )
    order = torch.randperm(1500, generator=torch.Generator().manual_seed(0))[:1400].tolist()
    yield Sample("large", inputs(dtype, [*order, order[0], order[700]], 2, 128, 16, 94))
    yield Sample("int8, large", quantized(inputs(dtype, [*order, order[0], order[700]], 2, 128, 16, 94)))


def errors() -> Iterator[ErrorCase]:
    k_cache, v_cache, k, v, slots = inputs(torch.float32, [5, -1, 40], 2, 8)
    op = "infini::paged_caching: "
    yield ErrorCase(
        "rank", (k_cache[0], v_cache, k, v, slots), op + "k_cache must have 4 dimensions, got 3 (shape [2, 16, 8])"
    )
    yield ErrorCase(
        "float64",
        (k_cache.double(), v_cache, k, v, slots),
        op + "k_cache must be float32, bfloat16 or float16, got float64",
    )
    yield ErrorCase(
        "caches differ",
        (k_cache, v_cache[:2], k, v, slots),
        op + "v_cache must have the shape of k_cache, [3, 2, 16, 8], got [2, 2, 16, 8]",
    )
    yield ErrorCase(
        "k dtype", (k_cache, v_cache, k.half(), v, slots), op + "k must have the dtype of k_cache, float32, got float16"
    )
    yield ErrorCase(
        "v of another dtype",
        (k_cache, v_cache, k, v.half(), slots),
        op + "v must have the dtype of k_cache, float32, got float16",
    )
    yield ErrorCase(
        "columns of v",
        (k_cache, v_cache, k, torch.ones(3, 2, 16)[..., ::2], slots),
        op + "v must have stride 1 in its last dimension (call .contiguous() on it), got strides [32, 16, 2]",
    )
    yield ErrorCase(
        "heads",
        (k_cache, v_cache, k[:, :1], v, slots),
        op + "k must have shape [3, 2, 8] to match the heads and columns of k_cache, got [3, 1, 8]",
    )
    yield ErrorCase(
        "tokens of v", (k_cache, v_cache, k, v[:2], slots), op + "v must have the shape of k, [3, 2, 8], got [2, 2, 8]"
    )
    yield ErrorCase(
        "broadcast cache",
        (k_cache, v_cache[:1].expand(3, 2, 16, 8), k, v, slots),
        op + "v_cache must not be a broadcast view, for it is written to, got strides [0, 128, 8, 1]",
    )
    yield ErrorCase(
        "slots dtype", (k_cache, v_cache, k, v, slots.short()), op + "slot_mapping must be int64 or int32, got int16"
    )
    yield ErrorCase(
        "slots shape",
        (k_cache, v_cache, k, v, slots[:2]),
        op + "slot_mapping must have shape [3] to match the tokens of k, got [2]",
    )
    yield ErrorCase(
        "slot",
        (k_cache, v_cache, k, v, torch.tensor([5, -1, 48])),
        op + "slot_mapping must be below 0 or less than 3 blocks of 16 slots, got 48 for token 2",
        of_values=True,
    )
    yield ErrorCase(
        "meta k", (k_cache, v_cache, k.to("meta"), v, slots), op + "k must be on the device of k_cache, cpu, got meta"
    )
    inside = v_cache.view(-1).view(torch.int64)[:3]
    yield ErrorCase(
        "slots in the cache",
        (k_cache, v_cache, k, v, inside),
        op + "v_cache must share no memory with slot_mapping, got one whose span of memory overlaps it",
    )

    yield from scale_errors("paged_caching", quantized((k_cache, v_cache, k, v, slots)), (k_cache, v_cache))
    k_cache, v_cache, *rest, k_scales, v_scales = quantized((k_cache, v_cache, k, v, slots))
    yield ErrorCase(
        "k of int8",
        (k_cache, v_cache, k.to(torch.int8), *rest[1:], k_scales, v_scales),
        op + "k must be float32, bfloat16 or float16, got int8",
    )
    yield ErrorCase(
        "v dtype",
        (k_cache, v_cache, k, v.half(), slots, k_scales, v_scales),
        op + "v must have the dtype of k, float32, got float16",
    )
    yield ErrorCase(
        "broadcast scales",
        (k_cache, v_cache, *rest, k_scales, v_scales[:1].expand(3, 2, 16)),
        op + "v_scales must not be a broadcast view, for it is written to, got strides [0, 16, 1]",
    )
    yield ErrorCase(
        "scales in the cache",
        (k_cache, v_cache, *rest, v_cache.view(-1).view(torch.float32)[:96].view(3, 2, 16), v_scales),
        op + "k_scales must share no memory with v_cache, got one whose span of memory overlaps it",
    )


def cost(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Cost:
    rows = 2 * int((slot_mapping >= 0).sum()) * k.shape[1]
    stored = k.shape[2] * k_cache.element_size() + (0 if k_scales is None else k_scales.element_size())
    return Cost(bytes=rows * (k.shape[2] * k.element_size() + stored) + nbytes(slot_mapping))


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for tokens in (1, 8, 512):
        slots = torch.randperm(2048, generator=torch.Generator().manual_seed(0))[:tokens].tolist()
        yield Sample(f"{tokens} tokens, 8x128", inputs(dtype, slots, 8, 128, 16, 128))
    yield Sample("512 tokens to int8, 8x128", quantized(inputs(dtype, slots, 8, 128, 16, 128)))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    compare=comparison(reference, rows=2),
)


C_OPS = [
    c_op(
        INFO,
        "PagedCaching",
        ["k_cache", "v_cache"],
        fixed={"k_scales": None, "v_scales": None},
        statuses={"no scales": "BAD_TENSOR_DTYPE"},
        reversible=("k_cache", "v_cache", "k", "v", "slot_mapping"),
    )
]
