"""paged_attention, paged_attention_prefill: reference, samples, refused calls, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...ops import REGISTRY
from ..c_door import Arguments, c_op, renamed, unwritten
from ..c_ops import CSample
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._cuda_sums import attention_error
from ._int8_cache import attention_comparison, quantize, scale_errors
from ._int32 import with_int32
from ._of_arguments import of_arguments
from ._paged_reference import PagedCall, attended, decode_in_torch, first_seen, prefill_in_torch


def inputs(
    dtype: torch.dtype,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int = 16,
    queries: Sequence[int] | None = None,
    window: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """(q, k_cache, v_cache, block_tables, seq_lens[, cum_seq_lens_q]), blocks dealt out in random order, one spare.

    With a window, the tables no longer name the blocks before it.
    """
    g = torch.Generator().manual_seed(sum(lengths) + head_size)
    n = len(lengths)
    counts = [-(-length // block_size) for length in lengths]
    blocks = sum(counts) + 1
    order = torch.randperm(blocks, generator=g)
    tables = torch.full((n, max(counts, default=0) + 1), -7)  # what is not needed is not looked at
    for b, count in enumerate(counts):
        gone = first_seen(lengths[b], 1 if queries is None else queries[b], window) // block_size
        tables[b, gone:count] = order[sum(counts[:b]) + gone : sum(counts[: b + 1])]
    total = n if queries is None else sum(queries)
    k, v = torch.randn(2, blocks, kv_heads, block_size, head_size, generator=g).to(dtype)
    q = torch.randn(total, heads, head_size, generator=g).to(dtype)
    lens = torch.tensor(lengths, dtype=torch.int64)
    starts = () if queries is None else (torch.tensor([sum(queries[:b]) for b in range(n + 1)]),)
    return (q, k, v, tables, lens, *starts)


def slopes(heads: int) -> Tensor:
    return 2.0 ** -torch.arange(1, heads + 1)


def windowed(
    window: int,
    dtype: torch.dtype,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int = 16,
    queries: Sequence[int] | None = None,
    alibi: bool = False,
) -> Sample:
    args = inputs(dtype, lengths, heads, kv_heads, head_size, block_size, queries, window)
    more = {"alibi_slopes": slopes(heads)} if alibi else {}
    return Sample(f"window of {window}, lengths {lengths}" + ", ALiBi" * alibi, args, {"window": window, **more})


def quantized(args: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The arguments with caches of int8, and their scales by name."""
    q, k_cache, v_cache, *rest = args
    (k_cache, k_scales), (v_cache, v_scales) = quantize(k_cache), quantize(v_cache)
    return (q, k_cache, v_cache, *rest), {"k_scales": k_scales, "v_scales": v_scales}


def with_int8(sample: Sample) -> Sample:
    """The sample with caches of int8."""
    args, scales = quantized(sample.args)
    return Sample(f"int8, {sample.name}", args, {**sample.kwargs, **scales})


def with_softcap(sample: Sample, softcap: float = 1.5) -> Sample:
    """The sample with a cap that its largest scores reach, and those of keys with small ones do not."""
    return Sample(f"softcap, {sample.name}", sample.args, {**sample.kwargs, "softcap": softcap})


def with_sinks(sample: Sample) -> Sample:
    """The sample with sinks below all scores, among them, above all, and without effect, and a stride."""
    q = sample.args[0]
    sinks = torch.tensor([-9.0, 1.0, 20.0, -torch.inf, 4.0])[torch.arange(2 * q.shape[1]) // 2 % 5].to(q.dtype)
    return Sample(f"sinks, {sample.name}", sample.args, {**sample.kwargs, "sinks": sinks[::2]})


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("groups of 4", inputs(dtype, [5, 33, 200], 8, 2, 128))
    yield Sample("ALiBi", (*inputs(dtype, [5, 33, 200], 8, 2, 64), slopes(8)))
    yield windowed(48, dtype, [5, 48, 49, 96, 200], 8, 2, 128)
    yield with_int8(Sample("groups of 4", inputs(dtype, [5, 33, 200], 8, 2, 128)))
    yield with_int32(windowed(5, dtype, [0, 1, 5, 129, 203], 6, 2, 40, 5))
    yield with_int32(with_int8(Sample("split", inputs(dtype, [1400, 3, 600], 4, 1, 64))))
    yield Sample("sequences without keys", inputs(dtype, [0, 9, 0], 4, 2, 16))
    yield Sample("one of each", inputs(dtype, [1], 1, 1, 16, 1))
    yield Sample("blocks of 5", inputs(dtype, [4, 5, 6, 150], 6, 2, 40, 5))
    yield Sample("no groups, ALiBi", (*inputs(dtype, [17, 64], 3, 3, 32, 8), slopes(3)))
    yield Sample("groups of 7", inputs(dtype, [40, 300], 7, 1, 64, 32))
    yield Sample("odd head", inputs(dtype, [40, 131], 4, 2, 37))
    yield Sample("scale", inputs(dtype, [40, 70], 32, 2, 256, 64), {"scale": -0.03})
    yield Sample("one column", inputs(dtype, [40], 2, 1, 1))
    yield Sample("split", inputs(dtype, [1400, 3, 600], 4, 1, 64))
    q, k, v, tables, lens = inputs(dtype, [18, 18, 18], 4, 2, 32)
    shared = (q[:1].expand(3, 4, 32), k, v, tables[:1].expand(3, 3), lens[:1].expand(3))
    yield Sample("one query and table for all", shared)
    q, k, v, tables, lens = inputs(dtype, [7, 50, 20], 4, 2, 32)
    yield Sample("interleaved caches", (q, *torch.stack((k, v), 1).unbind(1), tables, lens))
    yield Sample(
        "token-major caches", (q, *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)), tables, lens)
    )
    for window in (1, 3, 5, 64, 130):
        yield windowed(window, dtype, [0, 1, 5, 129, 130, 131, 203], 6, 2, 40, 5)
    yield windowed(600, dtype, [1400, 3, 600, 601], 4, 1, 64)  # split
    yield windowed(1100, dtype, [2000, 1099], 4, 2, 37, 64)
    yield windowed(70, dtype, [300, 64], 24, 1, 32, alibi=True)
    yield windowed(2**63 - 1, dtype, [0, 40], 4, 2, 16)
    yield with_int8(Sample("blocks of 5", inputs(dtype, [4, 5, 6, 150, 0], 6, 2, 40, 5)))
    yield with_int8(Sample("odd head, ALiBi", inputs(dtype, [40, 131], 4, 2, 37), {"alibi_slopes": slopes(4)}))
    yield with_int8(Sample("many heads of a key head", inputs(dtype, [40, 300], 14, 1, 64, 32)))
    yield with_int8(Sample("wide head", inputs(dtype, [70], 8, 8, 1024)))
    yield with_int8(Sample("one column", inputs(dtype, [40], 2, 1, 1)))
    yield with_int8(Sample("split", inputs(dtype, [1400, 3, 600], 4, 1, 64)))
    yield with_int8(windowed(70, dtype, [300, 64], 24, 1, 32, alibi=True))
    yield with_int8(windowed(600, dtype, [1400, 3, 600, 601], 4, 1, 64))
    args, scales = quantized(inputs(dtype, [7, 50, 20], 4, 2, 32))
    args = (args[0], *torch.stack(args[1:3], 1).unbind(1), *args[3:])
    apart = torch.stack((scales["k_scales"], scales["v_scales"]), -1).unbind(-1)
    yield Sample("int8, interleaved", args, dict(zip(scales, apart, strict=True)))
    yield with_softcap(Sample("scale", inputs(dtype, [40, 70, 0], 32, 2, 256, 64), {"scale": -0.03}), 0.2)
    yield with_softcap(windowed(600, dtype, [1400, 3, 600, 601], 4, 1, 64, alibi=True))
    yield with_softcap(with_int8(windowed(70, dtype, [300, 64], 24, 1, 37)))
    yield with_sinks(Sample("scale", inputs(dtype, [40, 70, 0], 32, 2, 256, 64), {"scale": -0.03}))
    yield with_sinks(windowed(600, dtype, [1400, 3, 600, 601], 4, 1, 64, alibi=True))
    yield with_sinks(with_softcap(Sample("split", inputs(dtype, [1400, 3, 600], 4, 1, 64))))
    yield with_sinks(with_softcap(with_int8(windowed(70, dtype, [300, 64], 24, 1, 37))))
    yield with_sinks(with_int8(Sample("split", inputs(dtype, [1400, 3, 600], 4, 1, 64))))
    yield with_softcap(with_int8(Sample("split", inputs(dtype, [1400, 3, 600], 4, 1, 64))))
    yield Sample("no sequences", inputs(dtype, [], 4, 2, 16))
    yield Sample("no heads", inputs(dtype, [3], 0, 0, 16))
    yield Sample("no columns", inputs(dtype, [3], 4, 2, 0))


def prefill_samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("all new", inputs(dtype, [5, 33, 130], 8, 2, 128, 16, [5, 33, 130]))
    yield Sample("ALiBi", (*inputs(dtype, [5, 33, 130], 8, 2, 64, 16, [3, 1, 40]), slopes(8)))
    yield windowed(20, dtype, [5, 20, 33, 130], 8, 2, 128, 16, [5, 20, 33, 130])
    yield Sample("sequences without queries or keys", inputs(dtype, [9, 0, 20], 4, 2, 16, 16, [0, 0, 3]))
    yield Sample("one of each", inputs(dtype, [1], 1, 1, 16, 1, [1]))
    yield Sample("odd head", inputs(dtype, [40, 131], 4, 2, 37, 5, [7, 100]))
    yield Sample("wide head", inputs(dtype, [20], 2, 1, 1024, 16, [2]), {"scale": 0.05})
    yield Sample("some split", inputs(dtype, [1100, 130, 520], 4, 1, 32, 16, [1, 30, 3]))
    for window in (1, 7, 128, 150):
        yield windowed(window, dtype, [9, 0, 300, 140, 131], 6, 2, 37, 5, [9, 0, 300, 60, 1])
    yield windowed(64, dtype, [200, 170, 129], 4, 1, 64, 32, [100, 3, 0])  # chunks, many rows and few
    yield windowed(600, dtype, [1300, 700], 4, 1, 32, 16, [3, 20])  # split, also where windows begin at several keys
    yield windowed(502, dtype, [700], 2, 2, 32, 16, [16])  # what the rows see ends in a split of its own on CUDA
    yield windowed(48, dtype, [200], 12, 1, 64, 16, [40])  # rows of few queries, whose windows differ by a key
    yield windowed(33, dtype, [100, 70, 40], 8, 2, 64, 16, [40, 2, 40], alibi=True)
    yield with_int8(Sample("all new", inputs(dtype, [5, 33, 130], 8, 2, 128, 16, [5, 33, 130])))
    yield with_int32(windowed(64, dtype, [200, 170, 129], 4, 1, 64, 32, [100, 3, 0]))
    yield with_int32(with_int8(Sample("some split", inputs(dtype, [1100, 130, 520], 4, 1, 32, 16, [1, 30, 3]))))
    yield with_int8(Sample("odd head", inputs(dtype, [40, 131], 4, 2, 37, 5, [7, 100])))
    yield with_int8(Sample("some split", inputs(dtype, [1100, 130, 520], 4, 1, 32, 16, [1, 30, 3])))
    yield with_int8(windowed(33, dtype, [100, 70, 40], 8, 2, 64, 16, [40, 2, 40], alibi=True))
    yield with_softcap(windowed(33, dtype, [100, 70, 40], 8, 2, 64, 16, [40, 2, 40], alibi=True))
    yield with_softcap(Sample("some split", inputs(dtype, [1100, 130, 520], 4, 1, 32, 16, [1, 30, 3])), 50)
    yield with_softcap(with_int8(Sample("odd head", inputs(dtype, [40, 131], 4, 2, 37, 5, [7, 100]))))
    yield with_sinks(windowed(33, dtype, [100, 70, 40], 8, 2, 64, 16, [40, 2, 40], alibi=True))
    yield with_sinks(Sample("some split", inputs(dtype, [1100, 130, 520], 4, 1, 32, 16, [1, 30, 3])))
    yield with_sinks(with_softcap(with_int8(windowed(150, dtype, [300, 131], 8, 2, 64, 16, [300, 1]))))
    yield with_sinks(Sample("wide head", inputs(dtype, [20], 2, 1, 1024, 16, [2]), {"scale": 0.05}))
    yield Sample("no sequences", inputs(dtype, [], 4, 2, 16, 16, []))


def errors_of(name: str, args: tuple[Tensor, ...]) -> Iterator[ErrorCase]:
    """What both ops refuse, for two sequences of 20 and 5 keys."""
    q, k, v, tables, lens, *starts = args
    rest = (*starts,)
    of, sequences = ("cum_seq_lens_q", 2) if starts else ("q", 2)
    op = f"infini::{name}: "
    yield ErrorCase("rank", (q[0], k, v, tables, lens, *rest), op + "q must have 3 dimensions, got 2 (shape [4, 16])")
    yield ErrorCase(
        "float64",
        (q.double(), k, v, tables, lens, *rest),
        op + "q must be float32, bfloat16 or float16, got float64",
    )
    yield ErrorCase(
        "k_cache dtype",
        (q, k.half(), v, tables, lens, *rest),
        op + "k_cache must have the dtype of q, float32, got float16",
    )
    yield ErrorCase(
        "v_cache shape",
        (q, k, v[:2], tables, lens, *rest),
        op + "v_cache must have the shape of k_cache, [4, 2, 16, 16], got [2, 2, 16, 16]",
    )
    yield ErrorCase(
        "head size",
        (q, k[..., :8], v, tables, lens, *rest),
        op + "k_cache must have shape [4, 2, 16, 16] to match the head size of q, got [4, 2, 16, 8]",
    )
    wide = torch.ones(len(q), 4, 1025)
    yield ErrorCase(
        "wide head",
        (wide, k, v, tables, lens, *rest),
        op + f"q must have a head size of at most 1024, got 1025 (shape [{len(q)}, 4, 1025])",
    )
    yield ErrorCase(
        "v_cache dtype",
        (q, k, v.half(), tables, lens, *rest),
        op + "v_cache must have the dtype of q, float32, got float16",
    )
    dense = "must have stride 1 in its last dimension (call .contiguous() on it), got strides "
    yield ErrorCase(
        "columns of v_cache",
        (q, k, torch.ones(4, 2, 16, 32)[..., ::2], tables, lens, *rest),
        op + f"v_cache {dense}[1024, 512, 32, 2]",
    )
    three = torch.ones(4, 3, 16, 16)
    yield ErrorCase(
        "groups",
        (q, three, three, tables, lens, *rest),
        op + "q must have a multiple of k_cache's 3 heads in dimension 1, got 4",
    )
    yield ErrorCase(
        "columns",
        (q[..., ::2], k, v, tables, lens, *rest),
        op + f"q {dense}[64, 16, 2]",
    )
    yield ErrorCase(
        "block_tables dtype",
        (q, k, v, tables.short(), lens, *rest),
        op + "block_tables must be int64 or int32, got int16",
    )
    yield ErrorCase(
        "block_tables shape",
        (q, k, v, tables[:1], lens, *rest),
        op + f"block_tables must have shape [{sequences}, 3] to match the sequences of {of}, got [1, 3]",
    )
    yield ErrorCase(
        "seq_lens shape",
        (q, k, v, tables, torch.tensor([1, 1, 1]), *rest),
        op + f"seq_lens must have shape [{sequences}] to match the sequences of {of}, got [3]",
    )
    yield ErrorCase(
        "seq_lens dtype", (q, k, v, tables, lens.short(), *rest), op + "seq_lens must be int64 or int32, got int16"
    )
    for lengths, got in (([20, 49], "49 for sequence 1"), ([-1, 5], "-1 for sequence 0")):
        yield ErrorCase(
            f"lengths {lengths}",
            (q, k, v, tables, torch.tensor(lengths), *rest),
            op + f"seq_lens must be at least 0 and fit into 3 blocks of 16, got {got}",
            of_values=True,
        )
    for place, block in (([0, 1], 4), ([1, 0], -1)):
        wrong = tables.clone()
        wrong[tuple(place)] = block
        yield ErrorCase(
            f"block {block}",
            (q, k, v, wrong, lens, *rest),
            op + f"block_tables must name blocks from 0 to less than 4, the blocks of k_cache, got {block} at {place}",
            of_values=True,
        )
    yield ErrorCase(
        "alibi_slopes dtype",
        (*args, torch.ones(4).double()),
        op + "alibi_slopes must be float32, got float64",
    )
    yield ErrorCase(
        "alibi_slopes shape",
        (*args, torch.ones(5)),
        op + "alibi_slopes must have shape [4] to match the heads of q, got [5]",
    )
    yield ErrorCase("scale", (*args, None, float("nan")), op + "scale must be finite in float32, got nan")
    yield ErrorCase("window", (*args, None, None, -1), op + "window must be 0 (no limit) or positive, got -1")
    for softcap, got in ((-1.0, "-1"), (float("inf"), "inf"), (1e39, "1e+39"), (float("nan"), "nan")):
        rule = f"softcap must be 0 (no cap), or positive and finite in float32, got {got}"
        yield ErrorCase(f"softcap {got}", args, op + rule, {"softcap": softcap})
    of_sinks = {"sinks": torch.ones(4).half()}
    yield ErrorCase("sinks dtype", args, op + "sinks must have the dtype of q, float32, got float16", of_sinks)
    for shape in ([5], [4, 1]):
        rule = f"sinks must have shape [4] to match the heads of q, got {shape}"
        yield ErrorCase(f"sinks {shape}", args, op + rule, {"sinks": torch.ones(shape)})
    yield ErrorCase(
        "out is a part of the sinks",
        args,
        op + "out must share no memory with sinks, got one whose span of memory overlaps it",
        {"sinks": (memory := torch.zeros(q.shape)).view(-1)[:4], "out": memory},
    )
    of_int8, scales = quantized(args)
    yield from scale_errors(name, (*of_int8, None, None, 0, *scales.values()), (k, v))
    at = scales["k_scales"].new_zeros(q.numel())
    scale_view = at[: scales["k_scales"].numel()].view_as(scales["k_scales"])
    yield ErrorCase(
        "out is a part of the scales",
        of_int8,
        op + "out must share no memory with k_scales, got one whose span of memory overlaps it",
        {**scales, "k_scales": scale_view, "out": at.view(q.shape)},
    )
    yield ErrorCase(
        "meta cache",
        (q, k.to("meta"), v, tables, lens, *rest),
        op + "k_cache must be on the device of q, cpu, got meta",
    )
    yield ErrorCase(
        "out shape",
        args,
        op + f"out must have the shape of q, [{len(q)}, 4, 16], got [1, 4, 16]",
        {"out": torch.empty(1, 4, 16)},
    )
    yield ErrorCase(
        "out dtype",
        args,
        op + "out must have the dtype of q, float32, got float16",
        {"out": torch.empty_like(q).half()},
    )
    yield ErrorCase(
        "broadcast out",
        args,
        op + "out must not be a broadcast view, for it is written to, got strides [0, 16, 1]",
        {"out": torch.empty(1, 4, 16).expand(q.shape)},
    )
    for cache, tensor in (("k_cache", k), ("v_cache", v)):
        yield ErrorCase(
            f"out is a part of {cache}",
            args,
            op + f"out must share no memory with {cache}, got one whose span of memory overlaps it",
            {"out": tensor.view(-1)[: q.numel()].view(q.shape)},
        )


def errors() -> Iterator[ErrorCase]:
    yield from errors_of("paged_attention", inputs(torch.float32, [20, 5], 4, 2, 16))


def prefill_errors() -> Iterator[ErrorCase]:
    name = "paged_attention_prefill"
    args = inputs(torch.float32, [20, 5], 4, 2, 16, 16, [2, 3])
    yield from errors_of(name, args)
    q, k, v, tables, lens, starts = args
    op = f"infini::{name}: "
    yield ErrorCase(
        "starts dtype",
        (q, k, v, tables, lens, starts.short()),
        op + "cum_seq_lens_q must be int64 or int32, got int16",
    )
    yield ErrorCase(
        "starts rank",
        (q, k, v, tables, lens, starts[None]),
        op + "cum_seq_lens_q must have one dimension, of one more than there are sequences, got [1, 3]",
    )
    for values, rule in (
        ([1, 2, 5], "begin with 0, got 1"),
        ([0, 2, 4], "end with 5, the number of queries in q, got 4"),
        ([0, 6, 5], "not decrease, got 5 after 6 at position 2"),
    ):
        changed = (q, k, v, tables, lens, torch.tensor(values))
        yield ErrorCase(f"starts {values}", changed, op + f"cum_seq_lens_q must {rule}", of_values=True)
    yield ErrorCase(
        "more queries than keys",
        (q, k, v, tables, torch.tensor([20, 2]), starts),
        op + "seq_lens must count a sequence's queries among its keys, got 2 keys for the 3 queries of sequence 1",
        of_values=True,
    )


def cost_of(call: PagedCall) -> Cost:
    heads, size = call.q.shape[1:]
    window = call.window
    counts = [end - start for start, end in pairwise(call.starts())]
    keys = [length if count else 0 for length, count in zip(call.seq_lens.tolist(), counts, strict=True)]
    # Of n keys, query t of the last s sees n - s + 1 + t; or the window, if that is less.
    pairs = sum(min(n - t, window or n) for n, s in zip(keys, counts, strict=True) for t in range(s))
    read = sum(n - first_seen(n, s, window) for n, s in zip(keys, counts, strict=True))
    row = size * call.k_cache.element_size() + (0 if call.k_scales is None else call.k_scales.element_size())
    cached = 2 * read * call.k_cache.shape[1] * row
    return Cost(bytes=2 * nbytes(call.q) + cached, flops=4 * heads * size * pairs)


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("decode 1 x 2048 keys, 32/8x128", inputs(dtype, [2048], 32, 8, 128))
    yield Sample("decode 8 x 2048 keys, 32/8x128", inputs(dtype, [2048] * 8, 32, 8, 128))
    yield with_int8(Sample("decode 8 x 2048 keys, 32/8x128", inputs(dtype, [2048] * 8, 32, 8, 128)))
    few = inputs(dtype, [2048] * 8, 32, 8, 128, window=512)
    yield Sample("decode 8 x 2048 keys, window 512, 32/8x128", few, {"window": 512})


def prefill_bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("prefill 512, 32/8x128", inputs(dtype, [512], 32, 8, 128, 16, [512]))
    yield with_int8(Sample("prefill 512, 32/8x128", inputs(dtype, [512], 32, 8, 128, 16, [512])))
    yield Sample(
        "128 behind 1920 keys, 7 x 1 behind 2047, 32/8x128", inputs(dtype, [2048] * 8, 32, 8, 128, 16, [128] + [1] * 7)
    )


def prefill_slack(
    expected: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, *_: Any, **__: Any
) -> Tensor:
    return attention_error(expected, q.dtype, max(tables.shape[1] * k_cache.shape[2], q.shape[2]))


def slack(expected: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, *_: Any, **__: Any) -> Tensor:
    """Up to 16 query heads of a key head round nothing but the result."""
    few = q.shape[1] <= 16 * k_cache.shape[1]
    return torch.zeros(()) if few else prefill_slack(expected, q, k_cache, v_cache, tables)


def info(name: str, in_torch: Callable[[PagedCall], Tensor], **own: Any) -> OpInfo:
    """What proves the op; own: what differs between the two."""
    reference = of_arguments(name, PagedCall, attended)
    return OpInfo(
        **vars(REGISTRY[name]),
        reference=reference,
        cost=of_arguments(name, PagedCall, cost_of),
        peer=of_arguments(name, PagedCall, in_torch),
        compare=attention_comparison(reference),
        **own,
    )


INFOS = (
    info("paged_attention", decode_in_torch, samples=samples, errors=errors, bench=bench, cuda_slack=slack),
    info(
        "paged_attention_prefill",
        prefill_in_torch,
        samples=prefill_samples,
        errors=prefill_errors,
        bench=prefill_bench,
        cuda_slack=prefill_slack,
    ),
)


FIXED = {"window": 0, "k_scales": None, "v_scales": None, "softcap": 0.0, "sinks": None}  # what the C operators lack


def to_c(args: Arguments) -> Arguments | None:
    """The C operators have no default scale."""
    inputs = renamed({}, FIXED, args)
    if inputs is not None and inputs["scale"] is None:
        inputs["scale"] = max(args["q"].shape[-1], 1) ** -0.5
    return inputs


def c_reference(out: Tensor, seq_lens: Tensor, **args: Any) -> dict[str, Tensor]:
    """A sequence without keys leaves its part of out as it is, where the torch op writes zeros."""
    empty = (seq_lens == 0)[:, None, None]
    return {"out": out.double().where(empty, attended(PagedCall(seq_lens=seq_lens, **args)))}


def c_samples(info: OpInfo, queries: Sequence[int] | None = None) -> Iterator[CSample]:
    """In place, and strides that differ from tensor to tensor."""
    for dtype in info.dtypes:
        kind, tolerance = str(dtype).removeprefix("torch."), info.tolerances[dtype]
        made = inputs(dtype, [7, 50, 20], 4, 2, 32, queries=queries)
        args: Arguments = {**dict(zip(info.arguments, made)), "alibi_slopes": slopes(4), "scale": 0.2}
        yield CSample(f"{kind} in place", {"out": args["q"], **args}, tolerance)
        q = args["q"].clone()
        strided: Arguments = {
            "out": torch.stack((unwritten(q.shape, dtype),) * 2, 1)[:, 1],
            "q": torch.stack((q.transpose(0, 1).contiguous().transpose(0, 1),) * 2)[1],
            "k_cache": args["k_cache"].transpose(1, 2).contiguous().transpose(1, 2),
            "v_cache": torch.cat((args["v_cache"],) * 2, -1)[..., :32],
            "block_tables": args["block_tables"].T.contiguous().T,
        }
        for key in ("seq_lens", "alibi_slopes", "cum_seq_lens_q"):
            if key in args:
                strided[key] = args[key].repeat_interleave(3)[1::3]
        yield CSample(f"{kind} strides of each", {**args, **strided}, tolerance)


STATUSES = {"no scales": "BAD_TENSOR_DTYPE", "groups": "BAD_TENSOR_SHAPE", "starts rank": "BAD_PARAM"}
REVERSIBLE = ("out", "q", "k_cache", "v_cache", "block_tables", "seq_lens", "cum_seq_lens_q")

C_OPS = [
    c_op(
        INFOS[0],
        "PagedAttention",
        ["out"],
        fixed=FIXED,
        samples=lambda: c_samples(INFOS[0]),
        to_c=to_c,
        statuses=STATUSES,
        reversible=REVERSIBLE,
        reference=c_reference,
    ),
    c_op(
        INFOS[1],
        "PagedAttentionPrefill",
        ["out"],
        fixed=FIXED,
        samples=lambda: c_samples(INFOS[1], [7, 30, 4]),
        to_c=to_c,
        statuses=STATUSES,
        reversible=REVERSIBLE,
    ),
]
