"""qkv_rope_cache: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...ops.qkv_rope_cache import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._int8_cache import comparison, scale_errors
from ._int32 import with_int32
from .paged_caching import inputs as caching_inputs
from .paged_caching import peer as caching_peer
from .paged_caching import quantized as caching_quantized
from .paged_caching import reference as caching_reference
from .rope import angles
from .rope import peer as rope_peer
from .rope import reference as rope_reference


def split(qkv: Tensor, q: Tensor, k_cache: Tensor) -> tuple[Tensor, ...]:
    """Split qkv into q [tokens, H, D], and k and v [tokens, Hkv, D]."""
    heads, kv_heads, size = q.shape[1], k_cache.shape[1], k_cache.shape[3]
    return qkv.unflatten(1, (heads + 2 * kv_heads, size)).split([heads, kv_heads, kv_heads], 1)


def reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> tuple[Tensor, ...]:
    new_q, k, v = split(qkv, q, k_cache)
    new_q, k = (rope_reference(x, cos, sin, positions, interleaved) for x in (new_q, k))
    return (new_q, *caching_reference(k_cache, v_cache, k, v, slot_mapping, k_scales, v_scales))


def peer(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Rotate as Hugging Face's Llama does, then write by indices."""
    new_q, k, v = split(qkv, q, k_cache)
    q.copy_(rope_peer(new_q, cos, sin, positions.long(), interleaved))
    caching_peer(
        k_cache, v_cache, rope_peer(k, cos, sin, positions.long(), interleaved), v, slot_mapping, k_scales, v_scales
    )


def inputs(
    dtype: torch.dtype,
    slots: Sequence[int],
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int = 16,
    blocks: int = 3,
    half: int | None = None,
    rows: int = 50,
) -> tuple[Tensor, ...]:
    """Make (q, k_cache, v_cache, qkv, cos, sin, positions, slot_mapping)."""
    g = torch.Generator().manual_seed(len(slots) + head_size)
    k_cache, v_cache, _, _, slot_mapping = caching_inputs(dtype, slots, kv_heads, head_size, block_size, blocks)
    qkv = torch.randn(len(slots), (heads + 2 * kv_heads) * head_size, generator=g).to(dtype)
    tables = angles(rows, head_size // 2 if half is None else half, dtype)
    positions = torch.randint(rows, (len(slots),), generator=g)
    q = torch.full((len(slots), heads, head_size), 77, dtype=dtype)
    return (q, k_cache, v_cache, qkv, *tables, positions, slot_mapping)


def quantized(args: tuple[Tensor, ...], interleaved: bool = False) -> tuple[Any, ...]:
    """Return the arguments with int8 caches and scales instead of the float caches."""
    q, *caches_and_rest = args
    *of_int8, k_scales, v_scales = caching_quantized(tuple(caches_and_rest))
    return (q, *of_int8, interleaved, k_scales, v_scales)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("llama", inputs(dtype, [5, -1, 47, 16, -9, 0], 4, 2, 64))
    yield Sample("gpt-j", (*inputs(dtype, [5, -1, 47, 16, -9, 0], 4, 2, 64), True))
    yield Sample("int8", quantized(inputs(dtype, [5, -1, 47, 16, -9, 0], 4, 2, 64)))
    yield with_int32(Sample("llama", inputs(dtype, [5, -1, 47, 16, -9, 0], 4, 2, 64)))
    yield with_int32(Sample("int8", quantized(inputs(dtype, [5, -1, 47, 16, -9, 0], 4, 2, 64))))
    yield Sample("one token", inputs(dtype, [33], 4, 1, 128))
    yield Sample("no tokens", inputs(dtype, [], 2, 1, 8))
    yield Sample("one slot twice", inputs(dtype, [5, 6, 5, 6], 3, 3, 8, 5))
    for interleaved in (False, True):
        layout = "gpt-j" if interleaved else "llama"
        for half in (1, 7, 33, 513):
            args = inputs(dtype, [7, 0, -1], 2, 1, 2 * half, 4, 2)
            yield Sample(f"{layout}, {half} pairs", (*args, interleaved))
        args = inputs(dtype, [7, 0, -1], 2, 1, 19, 4, 2, half=7)
        yield Sample(f"{layout}, 5 columns pass", (*args, interleaved))
        q, k_cache, v_cache, qkv, _, _, positions, slots = inputs(dtype, [7, 0, -1], 2, 1, 20, 4, 2)
        tables = angles(50, 10, torch.float32)
        yield Sample(f"{layout}, float32 cos", (q, k_cache, v_cache, qkv, *tables, positions.int(), slots, interleaved))
    yield Sample("int8, gpt-j, some columns pass", quantized(inputs(dtype, [7, 0, -1], 2, 1, 19, 4, 2, half=7), True))
    yield Sample("int8, 513 pairs", quantized(inputs(dtype, [7, 0, -1], 2, 1, 1026, 4, 2)))
    yield Sample("int8, one slot twice", quantized(inputs(dtype, [5, 6, 5, 6], 3, 3, 8, 5)))
    yield Sample("int8, no heads of q", quantized(inputs(dtype, [7, 0, -1], 0, 1, 8)))
    yield Sample("int8, no heads of k", quantized(inputs(dtype, [7, 0, -1], 2, 0, 8)))
    yield Sample("int8, no tokens", quantized(inputs(dtype, [], 2, 1, 8)))
    yield Sample("no pairs", inputs(dtype, [7, 0, -1], 2, 1, 8, 4, 2, half=0))
    yield Sample("no heads of q", inputs(dtype, [7, 0, -1], 0, 1, 8))
    yield Sample("no heads of k", inputs(dtype, [7, 0, -1], 2, 0, 8))
    yield Sample("no columns", inputs(dtype, [3], 2, 1, 0))
    yield Sample("no blocks", inputs(dtype, [-1, -1], 2, 1, 8, blocks=0))
    q, k_cache, v_cache, qkv, *rest = inputs(dtype, [30, 2, -1, 17], 4, 2, 24)
    token_major = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k_cache, v_cache))
    yield Sample("token-major caches", (q, *token_major, qkv, *rest))
    yield Sample("one row for all", (q, k_cache, v_cache, qkv[:1].expand(4, -1), *rest))
    order = torch.randperm(320, generator=torch.Generator().manual_seed(0))[:270].tolist()
    # One of three threads starts within the heads of v.
    yield Sample("large", inputs(dtype, [*order, order[0], -1, order[100]], 1, 4, 128, 16, 20))
    yield Sample("int8, large", quantized(inputs(dtype, [*order, order[0], -1, order[100]], 1, 4, 128, 16, 20)))


def errors() -> Iterator[ErrorCase]:
    args = inputs(torch.float32, [5, -1, 40], 4, 2, 8)
    names = ("q", "k_cache", "v_cache", "qkv", "cos", "sin", "positions", "slot_mapping")
    values = dict(zip(names, args, strict=True))
    q, k_cache, v_cache, qkv, cos, sin, positions, slots = args

    def case(name: str, rule: str, of_values: bool = False, **changed: Tensor) -> ErrorCase:
        args = tuple({**values, **changed}.values())
        return ErrorCase(name, args, f"infini::qkv_rope_cache: {rule}", of_values=of_values)

    columns = "qkv must hold in each row q's 4 heads and twice k_cache's 2 heads of 8 columns, got "
    overlap = "share no memory with qkv, got one whose span of memory overlaps it"
    yield case("rank", "qkv must have 2 dimensions, got 1 (shape [64])", qkv=qkv[0])
    yield case("float64", "qkv must be float32, bfloat16 or float16, got float64", qkv=qkv.double())
    yield case("one column short", f"{columns}63 columns (shape [3, 63])", qkv=qkv[:, :63])
    yield case("one head short", f"{columns}56 columns (shape [3, 56])", qkv=qkv[:, :56])
    yield case("two heads more", f"{columns}80 columns (shape [3, 80])", qkv=qkv.new_empty(3, 80))
    strided = qkv.repeat_interleave(2, 1)[:, ::2]
    dense = "stride 1 in its last dimension (call .contiguous() on it), got strides"
    yield case("strided columns", f"qkv must have {dense} [128, 2]", qkv=strided)
    yield case(
        "cache dtype",
        "k_cache must have the dtype of qkv, float32, got float16",
        k_cache=k_cache.half(),
        v_cache=v_cache.half(),
    )
    yield case(
        "caches differ",
        "v_cache must have the shape of k_cache, [3, 2, 16, 8], got [2, 2, 16, 8]",
        v_cache=v_cache[:2],
    )
    yield case(
        "tokens of q",
        "q must have shape [3, 4, 8] to match the tokens of qkv and columns of k_cache, got [2, 4, 8]",
        q=q[:2],
    )
    yield case("q dtype", "q must have the dtype of qkv, float32, got float16", q=q.half())
    yield case(
        "broadcast q",
        "q must not be a broadcast view, for it is written to, got strides [0, 8, 1]",
        q=q[:1].expand(3, 4, 8),
    )
    wide = torch.ones(50, 5)
    yield case(
        "cos too wide",
        "cos must have at most 4 columns, half the last dimension of q, got 5 (shape [50, 5])",
        cos=wide,
        sin=wide,
    )
    yield case("cos dtype", "cos must be float32 as q is, got float16", cos=cos.half(), sin=sin.half())
    yield case("cos rank", "cos must have 2 dimensions, got 3 (shape [1, 50, 4])", cos=cos[None], sin=sin[None])
    yield case("sin shape", "sin must have the shape of cos, [50, 4], got [50, 3]", sin=sin[:, :3])
    yield case(
        "positions shape", "positions must have shape [3] to match the tokens of qkv, got [2]", positions=positions[:2]
    )
    yield case(
        "positions dtype",
        "positions must be int64, int32, int16, int8, uint64, uint32, uint16 or uint8, got float32",
        positions=positions.float(),
    )
    yield case(
        "position",
        "positions must be at least 0 and less than 50, the rows of cos, got 50 at [1]",
        of_values=True,
        positions=torch.tensor([0, 50, 1]),
    )
    yield case("slots dtype", "slot_mapping must be int64 or int32, got int16", slot_mapping=slots.short())
    yield case(
        "slots shape", "slot_mapping must have shape [3] to match the tokens of qkv, got [2]", slot_mapping=slots[:2]
    )
    yield case(
        "slot",
        "slot_mapping must be below 0 or less than 3 blocks of 16 slots, got 48 for token 2",
        of_values=True,
        slot_mapping=torch.tensor([5, -1, 48]),
    )
    yield case("meta cos", "cos must be on the device of q, cpu, got meta", cos=cos.to("meta"))
    yield case("q in qkv", f"q must {overlap}", q=qkv[:, :32].view(3, 4, 8))
    yield case("the cache in qkv", f"k_cache must {overlap}", qkv=k_cache.view(-1)[:192].view(3, 64))
    yield from scale_errors("qkv_rope_cache", quantized(args), (k_cache, v_cache))
    yield ErrorCase(
        "scales in q",
        (*quantized(args)[:-2], q.view(-1)[:96].view(3, 2, 16), quantized(args)[-1]),
        "infini::qkv_rope_cache: q must share no memory with k_scales, got one whose span of memory overlaps it",
    )


def cost(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    interleaved: bool = False,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Cost:
    size = qkv.element_size()
    rows, columns = 2 * k_cache.shape[1], k_cache.shape[3]
    stored = columns * k_cache.element_size() + (0 if k_scales is None else k_scales.element_size())
    written = int((slot_mapping >= 0).sum())
    tables = 2 * min(cos.numel(), len(positions) * cos.shape[1]) * cos.element_size()
    return Cost(
        bytes=2 * q.numel() * size
        + written * rows * (columns * size + stored)
        + tables
        + nbytes(positions, slot_mapping),
        flops=6 * cos.shape[1] * (q.shape[0] * q.shape[1] + written * k_cache.shape[1]),
    )


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for tokens in (1, 8, 512):
        slots = torch.randperm(2048, generator=torch.Generator().manual_seed(0))[:tokens].tolist()
        yield Sample(f"{tokens} tokens, 32/8x128", inputs(dtype, slots, 32, 8, 128, 16, 128, rows=8192))
    args = inputs(dtype, slots, 32, 8, 128, 16, 128, rows=8192)
    yield Sample("512 tokens to int8, 32/8x128", quantized(args))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    compare=comparison(reference, rows=3),
)
