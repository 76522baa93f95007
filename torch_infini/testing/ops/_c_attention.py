"""Attention of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample
from ._c_paged import DTYPES, TOLERANCES, reversed_, slack
from .paged_attention import attend


def reference(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, pos: int
) -> dict[str, Tensor]:
    end = pos + q.shape[1]
    caches = {}
    for name, cache, rows in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
        caches[name] = cache.double()
        caches[name][:, pos:end] = rows.double()
    if out.numel() == 0:
        return {"out": out, **caches}
    keys, values = (cache[:, :end] for cache in caches.values())
    return {"out": attend(q.transpose(0, 1), keys, values, None, q.shape[2] ** -0.5), **caches}


def tensors(
    dtype: torch.dtype, heads: int, kv_heads: int, tokens: int, head_size: int, pos: int = 0, rows: int = 0
) -> dict[str, Any]:
    rows = max(rows, pos + tokens)
    return {
        "out": torch.full((tokens, heads, head_size), 77, dtype=dtype),
        "q": torch.randn(heads, tokens, head_size).to(dtype),
        "k": torch.randn(kv_heads, tokens, head_size).to(dtype),
        "v": torch.randn(kv_heads, tokens, head_size).to(dtype),
        "k_cache": torch.randn(kv_heads, rows, head_size).to(dtype),
        "v_cache": torch.randn(kv_heads, rows, head_size).to(dtype),
        "pos": pos,
    }


def swap(x: Tensor) -> Tensor:
    """The same elements, stored with the first two dimensions exchanged."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def samples() -> Iterator[CSample]:
    for dtype in DTYPES:
        kind = str(dtype)[6:]
        yield CSample(f"{kind}, one of each", tensors(dtype, 1, 1, 1, 1))
        yield CSample(f"{kind}, decode", tensors(dtype, 8, 2, 1, 128, 77, 100))
        yield CSample(f"{kind}, prefill", tensors(dtype, 8, 2, 65, 64))
        yield CSample(f"{kind}, a later part", tensors(dtype, 4, 4, 30, 37, 40, 80))
        yield CSample(f"{kind}, split", tensors(dtype, 4, 1, 1, 64, 1200, 1300))
        yield CSample(f"{kind}, no tokens", tensors(dtype, 4, 2, 0, 16, 3, 5))
        yield CSample(f"{kind}, no heads", tensors(dtype, 0, 0, 3, 16))
        yield CSample(f"{kind}, no query heads", tensors(dtype, 0, 2, 3, 16))
        yield CSample(f"{kind}, no columns", tensors(dtype, 4, 2, 3, 0))
        args = tensors(dtype, 6, 2, 5, 40, 7, 20)
        yield CSample(f"{kind}, strides", {key: swap(x) if key != "pos" else x for key, x in args.items()})
        args = tensors(dtype, 6, 2, 5, 40, 7, 20)
        args["q"] = args["q"][:1].expand(6, 5, 40)
        args["v"] = args["v"][:, :1].expand(2, 5, 40)
        for key in ("out", "k", "k_cache"):
            args[key] = reversed_(args[key])
        yield CSample(f"{kind}, broadcast and negative strides", args)
        args = tensors(dtype, 6, 2, 5, 40, 7, 20)
        both = torch.stack((args["k_cache"], args["v_cache"]), 1)
        yield CSample(f"{kind}, interleaved caches", {**args, "k_cache": both[:, 0], "v_cache": both[:, 1]})
        yield CSample(
            f"{kind}, in the cache already",
            {**args, "k": args["k_cache"][:, 7:12], "v": args["v_cache"][:, 7:12]},
        )


def errors() -> Iterator[CErrorCase]:
    op = "infini::attention: "
    args = tensors(torch.float32, 4, 2, 3, 8, 5, 9)
    dtype = "must have the dtype of q, float32, got float16"
    refused: list[tuple[str, dict[str, Any], str, str]] = [
        ("rank", {"q": args["q"][0]}, "BAD_TENSOR_SHAPE", "q must have 3 dimensions, got 2 (shape [3, 8])"),
        (
            "float64",
            {"q": args["q"].double()},
            "BAD_TENSOR_DTYPE",
            "q must be float32, bfloat16 or float16, got float64",
        ),
        *(
            (f"{key} dtype", {key: args[key].half()}, "BAD_TENSOR_DTYPE", f"{key} {dtype}")
            for key in ("out", "k", "v", "k_cache", "v_cache")
        ),
        (
            "tokens of k",
            {"k": args["k"][:, :2]},
            "BAD_TENSOR_SHAPE",
            "k must have shape [2, 3, 8] to match the tokens and the head size of q, got [2, 2, 8]",
        ),
        (
            "heads of v",
            {"v": args["v"][:1]},
            "BAD_TENSOR_SHAPE",
            "v must have the shape of k, [2, 3, 8], got [1, 3, 8]",
        ),
        (
            "groups",
            {"q": torch.ones(3, 3, 8)},
            "BAD_TENSOR_SHAPE",
            "q must have a multiple of k's 2 heads in dimension 0, got 3",
        ),
        (
            "heads of the cache",
            {"k_cache": args["k_cache"][:1]},
            "BAD_TENSOR_SHAPE",
            "k_cache must have shape [2, 9, 8] to match the heads and the head size of k, got [1, 9, 8]",
        ),
        (
            "the other cache",
            {"v_cache": args["v_cache"][:, :8]},
            "BAD_TENSOR_SHAPE",
            "v_cache must have the shape of k_cache, [2, 9, 8], got [2, 8, 8]",
        ),
        (
            "a full cache",
            {"pos": 7},
            "BAD_TENSOR_SHAPE",
            "k_cache must have room for 3 tokens behind the first 7, got 9 rows (shape [2, 9, 8])",
        ),
        (
            "a huge pos",
            {"pos": 2**64 - 1},
            "BAD_TENSOR_SHAPE",
            f"k_cache must have room for 3 tokens behind the first {2**64 - 1}, got 9 rows (shape [2, 9, 8])",
        ),
        (
            "columns of q",
            {"q": torch.ones(4, 3, 16)[..., ::2]},
            "BAD_TENSOR_STRIDES",
            "q must have stride 1 in its last dimension (call .contiguous() on it), got strides [48, 16, 2]",
        ),
        (
            "broadcast cache",
            {"k_cache": args["k_cache"][:1].expand(2, 9, 8)},
            "BAD_TENSOR_STRIDES",
            "k_cache must not be a broadcast view, for it is written to, got strides [0, 8, 1]",
        ),
        (
            "shape of out",
            {"out": torch.ones(4, 3, 8)},
            "BAD_TENSOR_SHAPE",
            "out must have shape [3, 4, 8] to match the tokens and heads of q, got [4, 3, 8]",
        ),
    ]
    for case, changed, status, sentence in refused:
        yield CErrorCase(case, {**args, **changed}, status, op + sentence)
    span = "one whose span of memory overlaps it"
    for case, changed, sentence in (
        ("out is q, heads first", {"out": args["q"].view(3, 4, 8)}, "out must be q itself or share no memory with it"),
        ("k beside its place", {"k": args["k_cache"][:, 4:7]}, "k_cache must be k itself or share no memory with it"),
        (
            "out in the cache",
            {"out": args["v_cache"].view(-1)[:96].view(3, 4, 8)},
            "out must share no memory with v_cache",
        ),
        ("q in the cache", {"q": args["k_cache"].view(-1)[:96].view(4, 3, 8)}, "k_cache must share no memory with q"),
        ("v where k goes", {"v": args["k_cache"][:, 5:8]}, "k_cache must share no memory with v"),
    ):
        yield CErrorCase(case, {**args, **changed}, "BAD_PARAM", f"{op}{sentence}, got {span}", at="run")


C_OPS = [
    COp(
        "Attention",
        ["out", "k_cache", "v_cache"],
        reference,
        samples,
        errors,
        tolerances=TOLERANCES,
        cuda_slack=slack,
    )
]
