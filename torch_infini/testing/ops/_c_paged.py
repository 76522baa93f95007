"""PagedAttention, PagedAttentionPrefill and PagedCaching of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample, Described
from ._cuda_sums import attention_error
from .paged_attention import attend, gathered

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Scores and sums are float32; a half type rounds the result once.
TOLERANCES = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (2**-7, 1e-4), torch.float16: (2**-10, 1e-5)}


def prefill_reference(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cum_seq_lens_q: Tensor,
    alibi_slopes: Tensor | None,
    scale: float,
) -> dict[str, Tensor]:
    result = out.double()
    starts = cum_seq_lens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        queries = slice(starts[b], starts[b + 1])
        if length > 0 and out.numel():
            k, v = (gathered(cache, block_tables[b], length) for cache in (k_cache, v_cache))
            result[queries] = attend(q[queries], k, v, alibi_slopes, scale)
    return {"out": result}


def reference(seq_lens: Tensor, **args: Any) -> dict[str, Tensor]:
    starts = torch.arange(len(seq_lens) + 1)
    return prefill_reference(seq_lens=seq_lens, cum_seq_lens_q=starts, **args)


def tensors(
    dtype: torch.dtype,
    lengths: Sequence[int],
    heads: int,
    kv_heads: int,
    head_size: int,
    block_size: int = 16,
    queries: Sequence[int] | None = None,
    alibi: bool = False,
) -> dict[str, Any]:
    """Caches whose blocks are dealt out in random order, with one block to spare."""
    n = len(lengths)
    counts = [-(-length // block_size) for length in lengths]
    blocks = sum(counts) + 1
    order = torch.randperm(blocks)
    tables = torch.full((n, max(counts, default=0) + 1), -7)  # what is not needed is not looked at
    for b, count in enumerate(counts):
        tables[b, :count] = order[sum(counts[:b]) : sum(counts[: b + 1])]
    total = n if queries is None else sum(queries)
    args = {
        "out": torch.full((total, heads, head_size), 77, dtype=dtype),
        "q": torch.randn(total, heads, head_size).to(dtype),
        "k_cache": torch.randn(blocks, kv_heads, block_size, head_size).to(dtype),
        "v_cache": torch.randn(blocks, kv_heads, block_size, head_size).to(dtype),
        "block_tables": tables,
        "seq_lens": torch.tensor(lengths, dtype=torch.int64),
        "alibi_slopes": 2.0 ** -torch.arange(1, heads + 1) if alibi else None,
        "scale": max(head_size, 1) ** -0.5,
    }
    if queries is not None:
        args["cum_seq_lens_q"] = torch.tensor([sum(queries[:b]) for b in range(n + 1)])
    return args


def strided(args: dict[str, Any]) -> dict[str, Any]:
    """The same call with strides of its own for each tensor."""
    args = dict(args)
    for key, dim in (("q", 0), ("out", 1)):
        args[key] = args[key].transpose(0, 1).contiguous().transpose(0, 1)
        args[key] = torch.stack((args[key], args[key]), dim).select(dim, 1)
    args["k_cache"] = args["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)
    args["v_cache"] = torch.cat((args["v_cache"], args["v_cache"]), -1)[..., : args["v_cache"].shape[-1]]
    args["block_tables"] = args["block_tables"].T.contiguous().T
    for key in ("seq_lens", "alibi_slopes", "cum_seq_lens_q"):
        if args.get(key) is not None:
            args[key] = Described(args[key].repeat_interleave(3), tuple(args[key].shape), (3,), 1)
    return args


def reversed_(tensor: Tensor) -> Described:
    """The same elements, the first dimension stored backwards."""
    base = tensor.flip(0).contiguous()
    strides = (-base.stride(0), *base.stride()[1:])
    return Described(base, tuple(base.shape), strides, (base.shape[0] - 1) * base.stride(0))


def samples() -> Iterator[CSample]:
    for dtype in DTYPES:
        kind = str(dtype)[6:]
        yield CSample(f"{kind}, one of each", tensors(dtype, [1], 1, 1, 16, 1))
        yield CSample(f"{kind}, groups of 4", tensors(dtype, [5, 33, 200], 8, 2, 128))
        yield CSample(f"{kind}, groups of 4, ALiBi", tensors(dtype, [5, 33, 200], 8, 2, 128, alibi=True))
        yield CSample(f"{kind}, blocks of 5", tensors(dtype, [4, 5, 6, 150], 6, 2, 40, 5))
        yield CSample(f"{kind}, no groups", tensors(dtype, [17, 64], 3, 3, 32, 8, alibi=True))
        yield CSample(f"{kind}, groups of 7", tensors(dtype, [40, 300], 7, 1, 64, 32))
        yield CSample(f"{kind}, groups of 16", tensors(dtype, [40, 70], 32, 2, 256, 64))
        yield CSample(f"{kind}, odd head", tensors(dtype, [40, 131], 4, 2, 37))
        yield CSample(f"{kind}, one column", tensors(dtype, [40], 2, 1, 1))
        yield CSample(f"{kind}, a sequence without keys", tensors(dtype, [0, 9, 0], 4, 2, 16))
        yield CSample(f"{kind}, no sequences", tensors(dtype, [], 4, 2, 16))
        yield CSample(f"{kind}, no heads", tensors(dtype, [3], 0, 0, 16))
        yield CSample(f"{kind}, no columns", tensors(dtype, [3], 4, 2, 0))
        args = strided(tensors(dtype, [7, 50, 20], 4, 2, 32, alibi=True))
        yield CSample(f"{kind}, strides", args)
        args = tensors(dtype, [7, 50, 20], 4, 2, 32)
        yield CSample(f"{kind}, in place", {**args, "out": args["q"]})
        args = tensors(dtype, [18, 18, 18], 4, 2, 32)
        args["q"] = args["q"][:1].expand(3, 4, 32)
        args["block_tables"] = args["block_tables"][:1].expand(3, 3)
        args["seq_lens"] = Described(args["seq_lens"], (3,), (0,))
        yield CSample(f"{kind}, broadcast", args)
        args = tensors(dtype, [7, 50, 20], 4, 2, 32)
        yield CSample(
            f"{kind}, negative strides",
            {**args, **{key: reversed_(args[key]) for key in ("out", "q", "k_cache", "v_cache", "block_tables")}},
        )
        yield CSample(f"{kind}, split", tensors(dtype, [1400, 3, 600], 4, 1, 64))


def prefill_samples() -> Iterator[CSample]:
    for dtype in DTYPES:
        kind = str(dtype)[6:]
        yield CSample(f"{kind}, one of each", tensors(dtype, [1], 1, 1, 16, 1, [1]))
        yield CSample(f"{kind}, all new", tensors(dtype, [5, 33, 130], 8, 2, 128, 16, [5, 33, 130]))
        yield CSample(f"{kind}, ALiBi", tensors(dtype, [5, 33, 130], 8, 2, 64, 16, [3, 1, 40], True))
        yield CSample(f"{kind}, odd head", tensors(dtype, [40, 131], 4, 2, 37, 5, [7, 100]))
        yield CSample(f"{kind}, no queries", tensors(dtype, [9, 0, 20], 4, 2, 16, 16, [0, 0, 3]))
        yield CSample(f"{kind}, no sequences", tensors(dtype, [], 4, 2, 16, 16, []))
        yield CSample(f"{kind}, wide head", tensors(dtype, [20], 2, 1, 1024, 16, [2]))
        yield CSample(f"{kind}, strides", strided(tensors(dtype, [7, 50, 20], 4, 2, 32, 16, [7, 1, 4], True)))
        args = tensors(dtype, [7, 50, 20], 4, 2, 32, 16, [7, 30, 4])
        yield CSample(f"{kind}, in place", {**args, "out": args["q"]})
        yield CSample(f"{kind}, some split", tensors(dtype, [1100, 130, 520], 4, 1, 32, 16, [1, 30, 3]))


def cases(name: str, prefill: bool) -> Iterator[CErrorCase]:
    """What both ops refuse."""
    op = f"infini::{name}: "
    args = tensors(torch.float32, [20, 5], 4, 2, 16, queries=[2, 3] if prefill else None)
    dense = "must have stride 1 in its last dimension (call .contiguous() on it), got strides "
    dtype = "must have the dtype of q, float32, got float16"
    which = "cum_seq_lens_q" if prefill else "q"
    refused: list[tuple[str, dict[str, Any], str, str]] = [
        ("rank", {"q": args["q"][0]}, "BAD_TENSOR_SHAPE", "q must have 3 dimensions, got 2 (shape [4, 16])"),
        (
            "integers",
            {"q": args["q"].int()},
            "BAD_TENSOR_DTYPE",
            "q must be float32, bfloat16 or float16, got int32",
        ),
        (
            "float64",
            {"q": args["q"].double()},
            "BAD_TENSOR_DTYPE",
            "q must be float32, bfloat16 or float16, got float64",
        ),
        ("columns of q", {"q": args["q"][..., ::2]}, "BAD_TENSOR_STRIDES", f"q {dense}[64, 16, 2]"),
        (
            "head size",
            {"q": torch.ones(2, 4, 1025)},
            "BAD_TENSOR_SHAPE",
            "q must have a head size of at most 1024, got 1025 (shape [2, 4, 1025])",
        ),
        (
            "head size of k",
            {"k_cache": args["k_cache"][..., :8]},
            "BAD_TENSOR_SHAPE",
            "k_cache must have shape [4, 2, 16, 16] to match the head size of q, got [4, 2, 16, 8]",
        ),
        ("dtype of k", {"k_cache": args["k_cache"].half()}, "BAD_TENSOR_DTYPE", f"k_cache {dtype}"),
        ("dtype of v", {"v_cache": args["v_cache"].half()}, "BAD_TENSOR_DTYPE", f"v_cache {dtype}"),
        (
            "columns of v",
            {"v_cache": torch.ones(4, 2, 16, 32)[..., ::2]},
            "BAD_TENSOR_STRIDES",
            f"v_cache {dense}[1024, 512, 32, 2]",
        ),
        (
            "shape of v",
            {"v_cache": args["v_cache"][:2]},
            "BAD_TENSOR_SHAPE",
            "v_cache must have the shape of k_cache, [4, 2, 16, 16], got [2, 2, 16, 16]",
        ),
        (
            "groups",
            {key: torch.ones(4, 3, 16, 16) for key in ("k_cache", "v_cache")},
            "BAD_TENSOR_SHAPE",
            "q must have a multiple of k_cache's 3 heads in dimension 1, got 4",
        ),
        (
            "block_tables dtype",
            {"block_tables": args["block_tables"].int()},
            "BAD_TENSOR_DTYPE",
            "block_tables must be int64, got int32",
        ),
        (
            "block_tables shape",
            {"block_tables": args["block_tables"][:1]},
            "BAD_TENSOR_SHAPE",
            f"block_tables must have shape [{len(args['q']) if which == 'q' else 2}, 3] to match the sequences of "
            f"{which}, got [1, 3]",
        ),
        (
            "seq_lens dtype",
            {"seq_lens": args["seq_lens"].int()},
            "BAD_TENSOR_DTYPE",
            "seq_lens must be int64, got int32",
        ),
        (
            "seq_lens shape",
            {"seq_lens": torch.ones(3).long()},
            "BAD_TENSOR_SHAPE",
            f"seq_lens must have shape [2] to match the sequences of {which}, got [3]",
        ),
        (
            "alibi_slopes dtype",
            {"alibi_slopes": torch.ones(4).double()},
            "BAD_TENSOR_DTYPE",
            "alibi_slopes must be float32, got float64",
        ),
        (
            "alibi_slopes shape",
            {"alibi_slopes": torch.ones(5)},
            "BAD_TENSOR_SHAPE",
            "alibi_slopes must have shape [4] to match the heads of q, got [5]",
        ),
        ("scale", {"scale": float("nan")}, "BAD_PARAM", "scale must be finite in float32, got nan"),
        (
            "broadcast out",
            {"out": args["out"][:1].expand(args["out"].shape)},
            "BAD_TENSOR_STRIDES",
            "out must not be a broadcast view, for it is written to, got strides [0, 16, 1]",
        ),
        ("out dtype", {"out": args["out"].half()}, "BAD_TENSOR_DTYPE", f"out {dtype}"),
    ]
    for case, changed, status, sentence in refused:
        yield CErrorCase(case, {**args, **changed}, status, op + sentence)
    tables = args["block_tables"].clone()
    tables[0, 1] = 4
    negative = args["block_tables"].clone()
    negative[1, 0] = -1
    at_run: list[tuple[str, dict[str, Any], str]] = [
        (
            "length",
            {"seq_lens": torch.tensor([20, 49])},
            "seq_lens must be at least 0 and fit into 3 blocks of 16, got 49 for sequence 1",
        ),
        (
            "negative length",
            {"seq_lens": torch.tensor([-1, 5])},
            "seq_lens must be at least 0 and fit into 3 blocks of 16, got -1 for sequence 0",
        ),
        (
            "block",
            {"block_tables": tables},
            "block_tables must name blocks from 0 to less than 4, the blocks of k_cache, got 4 at [0, 1]",
        ),
        (
            "negative block",
            {"block_tables": negative},
            "block_tables must name blocks from 0 to less than 4, the blocks of k_cache, got -1 at [1, 0]",
        ),
        (
            "overlap",
            {"out": args["k_cache"].view(-1)[: args["q"].numel()].view(args["q"].shape)},
            "out must share no memory with k_cache, got one whose span of memory overlaps it",
        ),
    ]
    for case, changed, sentence in at_run:
        yield CErrorCase(
            case, {**args, **changed}, "BAD_PARAM", op + sentence, at="run", of_values="share no memory" not in sentence
        )


def errors() -> Iterator[CErrorCase]:
    yield from cases("paged_attention", False)


def prefill_errors() -> Iterator[CErrorCase]:
    yield from cases("paged_attention_prefill", True)
    op = "infini::paged_attention_prefill: "
    args = tensors(torch.float32, [20, 5], 4, 2, 16, queries=[2, 3])
    yield CErrorCase(
        "starts dtype",
        {**args, "cum_seq_lens_q": torch.tensor([0, 2, 5]).int()},
        "BAD_TENSOR_DTYPE",
        op + "cum_seq_lens_q must be int64, got int32",
    )
    yield CErrorCase(
        "starts shape",
        {**args, "cum_seq_lens_q": torch.tensor([[0, 2, 5]])},
        "BAD_PARAM",
        op + "cum_seq_lens_q must have one dimension, of one more than there are sequences, got [1, 3]",
    )
    for case, starts, rule in (
        ("first start", [1, 2, 5], "begin with 0, got 1"),
        ("last start", [0, 2, 4], "end with 5, the number of queries in q, got 4"),
        ("decreasing starts", [0, 6, 5], "not decrease, got 5 after 6 at position 2"),
    ):
        yield CErrorCase(
            case,
            {**args, "cum_seq_lens_q": torch.tensor(starts)},
            "BAD_PARAM",
            op + f"cum_seq_lens_q must {rule}",
            at="run",
            of_values=True,
        )
    yield CErrorCase(
        "more queries than keys",
        {**args, "seq_lens": torch.tensor([20, 2])},
        "BAD_PARAM",
        op + "seq_lens must count a sequence's queries among its keys, got 2 keys for the 3 queries of sequence 1",
        at="run",
        of_values=True,
    )


def caching_reference(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor
) -> dict[str, Tensor]:
    caches = [k_cache.double(), v_cache.double()]
    size = k_cache.shape[2]
    for t, slot in enumerate(slot_mapping.tolist()):
        for cache, rows in zip(caches, (k, v), strict=True):
            if slot >= 0:
                cache[slot // size, :, slot % size] = rows[t].double()
    return {"k_cache": caches[0], "v_cache": caches[1]}


def caching_tensors(
    dtype: torch.dtype, slots: Sequence[int], heads: int, head_size: int, block_size: int = 16, blocks: int = 3
) -> dict[str, Any]:
    return {
        "k_cache": torch.randn(blocks, heads, block_size, head_size).to(dtype),
        "v_cache": torch.randn(blocks, heads, block_size, head_size).to(dtype),
        "k": torch.randn(len(slots), heads, head_size).to(dtype),
        "v": torch.randn(len(slots), heads, head_size).to(dtype),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
    }


def caching_samples() -> Iterator[CSample]:
    for dtype in DTYPES:
        kind = str(dtype)[6:]
        yield CSample(f"{kind}, one of each", caching_tensors(dtype, [0], 1, 1, 1, 1))
        yield CSample(f"{kind}, some skipped", caching_tensors(dtype, [5, -1, 47, 16, -9, 0], 2, 37))
        yield CSample(f"{kind}, one slot twice", caching_tensors(dtype, [5, 6, 5], 3, 8, 5))
        yield CSample(f"{kind}, no tokens", caching_tensors(dtype, [], 2, 8))
        yield CSample(f"{kind}, no heads", caching_tensors(dtype, [3], 0, 8))
        yield CSample(f"{kind}, no columns", caching_tensors(dtype, [3], 2, 0))
        yield CSample(f"{kind}, no blocks", caching_tensors(dtype, [-1, -1], 2, 8, blocks=0))
        args = caching_tensors(dtype, [30, 2, -1, 17], 2, 24)
        args["k"] = args["k"].transpose(0, 1).contiguous().transpose(0, 1)
        args["v"] = torch.cat((args["v"], args["v"]), -1)[..., 24:]
        args["k_cache"] = args["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)
        args["v_cache"] = torch.cat((args["v_cache"], args["v_cache"]), 2)[:, :, 16:]
        args["slot_mapping"] = Described(args["slot_mapping"].repeat_interleave(2), (4,), (2,), 1)
        yield CSample(f"{kind}, strides", args)
        args = caching_tensors(dtype, [30, 2, -1, 17], 2, 24)
        args["k"] = args["k"][:1].expand(4, 2, 24)
        args["v"], args["v_cache"] = reversed_(args["v"]), reversed_(args["v_cache"])
        yield CSample(f"{kind}, broadcast and negative strides", args)
        args = caching_tensors(dtype, [30, 2, -1, 17], 2, 24)
        both = torch.stack((args["k_cache"], args["v_cache"]), 1)
        yield CSample(f"{kind}, interleaved caches", {**args, "k_cache": both[:, 0], "v_cache": both[:, 1]})
        yield CSample(f"{kind}, large", caching_tensors(dtype, torch.randperm(320)[:300].tolist(), 8, 128, 16, 20))


def caching_errors() -> Iterator[CErrorCase]:
    op = "infini::paged_caching: "
    args = caching_tensors(torch.float32, [5, -1, 40], 2, 8)
    refused: list[tuple[str, dict[str, Any], str, str]] = [
        (
            "float64",
            {"k_cache": args["k_cache"].double()},
            "BAD_TENSOR_DTYPE",
            "k_cache must be float32, bfloat16 or float16, got float64",
        ),
        (
            "dtype of k",
            {"k": args["k"].half()},
            "BAD_TENSOR_DTYPE",
            "k must have the dtype of k_cache, float32, got float16",
        ),
        (
            "dtype of v",
            {"v": args["v"].half()},
            "BAD_TENSOR_DTYPE",
            "v must have the dtype of k_cache, float32, got float16",
        ),
        (
            "rank",
            {"k_cache": args["k_cache"][0]},
            "BAD_TENSOR_SHAPE",
            "k_cache must have 4 dimensions, got 3 (shape [2, 16, 8])",
        ),
        (
            "caches differ",
            {"v_cache": args["v_cache"][:2]},
            "BAD_TENSOR_SHAPE",
            "v_cache must have the shape of k_cache, [3, 2, 16, 8], got [2, 2, 16, 8]",
        ),
        (
            "heads",
            {"k": args["k"][:, :1]},
            "BAD_TENSOR_SHAPE",
            "k must have shape [3, 2, 8] to match the heads and columns of k_cache, got [3, 1, 8]",
        ),
        (
            "tokens of v",
            {"v": args["v"][:2]},
            "BAD_TENSOR_SHAPE",
            "v must have the shape of k, [3, 2, 8], got [2, 2, 8]",
        ),
        (
            "columns",
            {"v": torch.ones(3, 2, 16)[..., ::2]},
            "BAD_TENSOR_STRIDES",
            "v must have stride 1 in its last dimension (call .contiguous() on it), got strides [32, 16, 2]",
        ),
        (
            "broadcast cache",
            {"v_cache": args["v_cache"][:1].expand(3, 2, 16, 8)},
            "BAD_TENSOR_STRIDES",
            "v_cache must not be a broadcast view, for it is written to, got strides [0, 128, 8, 1]",
        ),
        (
            "slots dtype",
            {"slot_mapping": args["slot_mapping"].int()},
            "BAD_TENSOR_DTYPE",
            "slot_mapping must be int64, got int32",
        ),
        (
            "slots shape",
            {"slot_mapping": args["slot_mapping"][:2]},
            "BAD_TENSOR_SHAPE",
            "slot_mapping must have shape [3] to match the tokens of k, got [2]",
        ),
    ]
    for case, changed, status, sentence in refused:
        yield CErrorCase(case, {**args, **changed}, status, op + sentence)
    yield CErrorCase(
        "slot",
        {**args, "slot_mapping": torch.tensor([5, -1, 48])},
        "BAD_PARAM",
        op + "slot_mapping must be below 0 or less than 3 blocks of 16 slots, got 48 for token 2",
        at="run",
        of_values=True,
    )
    yield CErrorCase(
        "overlap",
        {**args, "slot_mapping": args["v_cache"].view(-1).view(torch.int64)[:3]},
        "BAD_PARAM",
        op + "v_cache must share no memory with slot_mapping, got one whose span of memory overlaps it",
        at="run",
    )


def slack(expected: dict[str, Tensor], args: dict[str, Any]) -> Tensor | float:
    """On CUDA probabilities are rounded to a half type."""
    out, dtype = expected["out"], args["out"].dtype
    return attention_error(out, dtype, out.shape[-1]) if dtype.itemsize == 2 else 0.0


C_OPS = [
    COp("PagedAttention", ["out"], reference, samples, errors, tolerances=TOLERANCES, cuda_slack=slack),
    COp(
        "PagedAttentionPrefill",
        ["out"],
        prefill_reference,
        prefill_samples,
        prefill_errors,
        tolerances=TOLERANCES,
        cuda_slack=slack,
    ),
    COp("PagedCaching", ["k_cache", "v_cache"], caching_reference, caching_samples, caching_errors),
]
