"""attention: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops.attention import SPEC
from ..c_door import Arguments, c_op, renamed, status_of, unwritten
from ..c_ops import CErrorCase, CSample
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._cuda_sums import attention_error


def visible_keys(q: Tensor, k: Tensor, kv_lens: Tensor | None, causal: bool) -> Tensor:
    """Return [B, 1, S, T] bool: the keys that kv_lens and causal leave visible to each query."""
    queries, keys = q.shape[1], k.shape[1]
    lens = torch.full((q.shape[0],), keys) if kv_lens is None else kv_lens
    limit = lens[:, None] + (torch.arange(1 - queries, 1) if causal else torch.zeros(queries, dtype=torch.int64))
    return (torch.arange(keys) < limit[..., None])[:, None]


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    group = q.shape[2] // k.shape[2]
    q64 = q.double().transpose(1, 2)
    k64, v64 = (t.double().transpose(1, 2).repeat_interleave(group, 1) for t in (k, v))
    scores = q64 @ k64.transpose(-1, -2) * (max(q.shape[-1], 1) ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    visible = visible_keys(q, k, kv_lens, causal)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        scores = scores + mask.double()
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    probabilities = scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
    probabilities = probabilities[..., : k.shape[1]]
    return (probabilities @ v64.masked_fill(~visible.any(2)[..., None], 0)).transpose(1, 2)


def peer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Call torch's SDPA on transposed views, with is_causal or without a mask where that is equivalent.

    SDPA has no soft cap and no sinks: with these, compute what Gemma 2 and gpt-oss do in transformers, written out.
    """
    queries, keys = q.shape[1], k.shape[1]
    square = causal and mask is None and kv_lens is None and queries == keys
    if kv_lens is not None or (causal and queries > 1 and not square):
        visible = visible_keys(q, k, kv_lens, causal)
        if mask is None or mask.dtype == torch.bool:
            mask = visible if mask is None else visible & mask
        else:
            mask = mask.masked_fill(~visible, -torch.inf)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    if softcap or sinks is not None:
        if square:
            mask = visible_keys(q, k, None, True)
        return written_out(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale, softcap, sinks)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=square and queries > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Compute attention in plain torch: scores and probabilities are stored in q's dtype."""
    groups = q.shape[2] // k.shape[2]
    q = q.transpose(1, 2)
    k, v = (t.transpose(1, 2).repeat_interleave(groups, 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    probabilities = scores.softmax(-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]]
    return (probabilities @ v).transpose(1, 2)


def attention_inputs(
    dtype: torch.dtype, batch: int, queries: int, keys: int, heads: int, kv_heads: int, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Make (q, k, v), spread so that some keys matter much more than others."""
    g = torch.Generator().manual_seed(queries + keys)
    q = torch.randn(batch, queries, heads, size, generator=g) * 1.5
    k = torch.randn(batch, keys, kv_heads, size, generator=g)
    v = torch.randn(batch, keys, kv_heads, size, generator=g)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    def make(*sizes: int) -> tuple[Tensor, Tensor, Tensor]:
        return attention_inputs(dtype, *sizes)

    yield Sample("multi-head", make(2, 9, 9, 4, 4, 64))
    yield Sample("grouped heads", make(1, 21, 21, 6, 2, 32))
    yield Sample("decode", make(2, 1, 77, 8, 2, 64))
    lens = torch.tensor([40, 7, 0])
    q, k, v = make(3, 4, 50, 4, 2, 64)
    k[1, 7:], v[1, 7:] = torch.nan, torch.inf  # invalid keys must not affect the result
    yield Sample("static cache", (q, k, v), {"kv_lens": lens})
    yield Sample("prefill", make(1, 150, 150, 8, 2, 64))
    yield Sample("long decode", make(1, 1, 2300, 8, 1, 64))
    yield Sample("longer than the table of splits", make(1, 1, 9000, 2, 2, 16))
    yield Sample("continues a cache", make(1, 5, 140, 7, 1, 128))
    yield Sample("more queries than keys", make(1, 12, 5, 2, 2, 16))
    yield Sample("not causal", make(2, 33, 300, 3, 1, 48), {"causal": False})
    yield Sample("many rows, not causal", make(1, 40, 131, 6, 2, 80), {"causal": False})
    for size in (1, 7, 80, 128, 256):
        yield Sample(f"head size {size}", make(1, 3, 19, 4, 2, size))
        yield Sample(f"head size {size}, many rows", make(1, 30, 30, 4, 2, size))
    yield Sample("scale", make(1, 6, 6, 2, 2, 16), {"scale": -0.75})
    decode = {"kv_lens": torch.tensor([1500, 3, 512], dtype=torch.int32)}
    yield Sample("decode, static cache", make(3, 1, 1600, 4, 4, 32), decode)
    yield Sample("static cache, not causal", (q, k, v), {"kv_lens": lens, "causal": False})

    q, k, v = make(3, 20, 20, 4, 2, 32)
    padding = torch.arange(20) >= torch.tensor([0, 7, 19])[:, None]
    yield Sample("left padding", (q, k, v), {"mask": padding[:, None, None]})
    yield Sample("left padding, not causal", (q, k, v), {"mask": padding[:, None, None], "causal": False})
    g = torch.Generator().manual_seed(1)
    bias = torch.randn(1, 4, 20, 20, generator=g).to(dtype)
    yield Sample("additive mask", (q, k, v), {"mask": bias.expand(3, 4, 20, 20)})
    yield Sample("float32 mask", (q, k, v), {"mask": bias[:, :1].float(), "causal": False})
    yield Sample("mask of one key column", (q, k, v), {"mask": bias[..., :1]})
    floor = torch.zeros(3, 1, 20, 20).masked_fill(~padding[:, None, None], torch.finfo(torch.float32).min)
    yield Sample("mask of lowest numbers", (q, k, v), {"mask": floor})
    rows = torch.rand(3, 4, 20, 20, generator=g) < 0.3
    rows[:, :, 11] = False
    yield Sample("fully masked row", (q, k, v), {"mask": rows})
    yield Sample("fully masked row, additive", (q, k, v), {"mask": torch.where(rows, 0.5, -torch.inf)})
    q, k, v = make(2, 1, 1100, 4, 2, 64)
    half = torch.arange(1100) % 1024 >= 600
    yield Sample("decode, whole splits masked", (q, k, v), {"mask": half.view(1, 1, 1, 1100)})
    yield Sample("decode, all masked", (q, k, v), {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)})
    large = make(1, 4, 40, 2, 2, 64)
    yield Sample("large scores", (large[0] * 60, large[1] * 8, large[2]), {"scale": 1.0})

    cap = {"softcap": 2.0}  # scores far beyond the cap, and far below
    yield Sample("softcap", make(2, 9, 9, 4, 4, 64), {"softcap": 5.0, "scale": 0.5})
    yield Sample("softcap, prefill, grouped heads", make(1, 150, 150, 8, 2, 64), cap)
    yield Sample("softcap, decode", make(2, 1, 77, 8, 2, 64), cap)
    yield Sample("softcap, long decode", make(1, 1, 1300, 4, 1, 64), cap)
    yield Sample("softcap, continues a cache", make(1, 5, 140, 7, 1, 128), cap)
    for size in (7, 80, 256):
        yield Sample(f"softcap, head size {size}", make(1, 3, 19, 4, 2, size), cap)
        yield Sample(f"softcap, head size {size}, many rows", make(1, 30, 30, 4, 2, size), cap)
    q, k, v = make(3, 4, 50, 4, 2, 64)
    k[1, 7:], v[1, 7:] = torch.nan, torch.inf
    yield Sample("softcap, static cache", (q, k, v), {"kv_lens": lens, "softcap": 30.0})
    q, k, v = make(3, 20, 20, 4, 2, 32)
    yield Sample("softcap, additive mask", (q, k, v), {"mask": bias, "softcap": 2.0, "causal": False})
    yield Sample("softcap, left padding", (q, k, v), {"mask": padding[:, None, None], "softcap": 50.0})
    yield Sample("softcap, mask of lowest numbers", (q, k, v), {"mask": floor, "softcap": 50.0})
    yield Sample("softcap, fully masked row", (q, k, v), {"mask": rows, "softcap": 1.0, "scale": -0.75})
    yield Sample("softcap, large scores", (large[0] * 60, large[1] * 8, large[2]), {"scale": 1.0, "softcap": 50.0})
    yield Sample("softcap far above the scores", make(1, 4, 40, 2, 2, 64), {"softcap": 1e6})
    yield Sample("smallest softcap", make(1, 4, 40, 2, 2, 64), {"softcap": 1e-300})

    def sinks_of(heads: int) -> Tensor:
        """Below all scores, among them, above all, and without effect; with a stride."""
        values = torch.tensor([1.0, -9.0, 20.0, -torch.inf, 4.0])
        return values[torch.arange(2 * heads) // 2 % 5].to(dtype)[::2]

    yield Sample("sinks", make(2, 9, 9, 4, 4, 64), {"sinks": sinks_of(4)})
    yield Sample("sinks, grouped heads, many rows", make(1, 150, 150, 8, 2, 64), {"sinks": sinks_of(8)})
    yield Sample("sinks, long decode", make(1, 1, 2300, 8, 1, 64), {"sinks": sinks_of(8)})
    yield Sample("sinks, softcap, not causal", make(1, 33, 70, 5, 1, 40), cap | {"sinks": sinks_of(5), "causal": False})
    yield Sample("sinks, fully masked row", (q, k, v), {"mask": rows, "sinks": sinks_of(4)})
    yield Sample("sinks, more queries than keys", make(1, 12, 5, 2, 2, 16), {"sinks": sinks_of(2)})
    yield Sample("sinks, no keys", make(2, 3, 0, 2, 1, 16), {"sinks": sinks_of(2)})
    yield Sample("no queries", make(2, 0, 5, 2, 1, 16))
    yield Sample("no keys", make(2, 3, 0, 2, 1, 16))
    yield Sample("no sequences", make(0, 3, 3, 2, 1, 16))
    yield Sample("no columns", make(1, 3, 3, 2, 1, 0))


def errors() -> Iterator[ErrorCase]:
    q, k, v = attention_inputs(torch.float32, 2, 3, 8, 6, 3, 16)
    op = "infini::attention: "
    yield ErrorCase("rank", (q[0], k, v), op + "q must have 4 dimensions, got 3 (shape [3, 6, 16])")
    yield ErrorCase("rank of k", (q, k[0], v), op + "k must have 4 dimensions, got 3 (shape [8, 3, 16])")
    yield ErrorCase("float64", (q.double(), k, v), op + "q must be float32, bfloat16 or float16, got float64")
    yield ErrorCase("k dtype", (q, k.half(), v), op + "k must have the dtype of q, float32, got float16")
    yield ErrorCase("v dtype", (q, k, v.bfloat16()), op + "v must have the dtype of q, float32, got bfloat16")
    yield ErrorCase(
        "batch",
        (q, k[:1], v),
        op + "k must have shape [2, 8, 3, 16] to match the batch size and the head size of q, got [1, 8, 3, 16]",
    )
    yield ErrorCase(
        "head size",
        (q, k[..., :15], v),
        op + "k must have shape [2, 8, 3, 16] to match the batch size and the head size of q, got [2, 8, 3, 15]",
    )
    yield ErrorCase("v shape", (q, k, v[:, 1:]), op + "v must have the shape of k, [2, 8, 3, 16], got [2, 7, 3, 16]")
    yield ErrorCase("heads", (q[:, :, :5], k, v), op + "q must have a multiple of k's 3 heads in dimension 2, got 5")
    yield ErrorCase(
        "no key heads",
        (q, k[:, :, :0], v[:, :, :0]),
        op + "q must have a multiple of k's 0 heads in dimension 2, got 6",
    )
    for i, name in enumerate("qkv"):
        tensors = [q, k, v]
        tensors[i] = tensors[i].transpose(-1, -2).contiguous().transpose(-1, -2)
        strides = str(list(tensors[i].stride()))
        yield ErrorCase(
            f"strided columns of {name}",
            tuple(tensors),
            f"{op}{name} must have stride 1 in its last dimension (call .contiguous() on it), got strides {strides}",
        )
    yield ErrorCase("scale", (q, k, v, None, None, True, torch.inf), op + "scale must be finite in float32, got inf")
    yield ErrorCase(
        "large scale", (q, k, v, None, None, True, -1e39), op + "scale must be finite in float32, got -1e+39"
    )
    yield ErrorCase(
        "NaN scale", (q, k, v, None, None, True, torch.nan), op + "scale must be finite in float32, got nan"
    )
    for name, softcap in {"negative": -1.0, "infinite": torch.inf, "large": 1e39, "NaN": torch.nan}.items():
        said = f"softcap must be 0 (no cap), or positive and finite in float32, got {softcap}".replace("-1.0", "-1")
        yield ErrorCase(f"{name} softcap", (q, k, v), op + said, {"softcap": softcap})
    yield ErrorCase(
        "mask rank",
        (q, k, v, torch.ones(3, 8, dtype=torch.bool)),
        op + "mask must have 4 dimensions, got 2 (shape [3, 8])",
    )
    yield ErrorCase(
        "mask shape",
        (q, k, v, torch.zeros(2, 3, 3, 8)),
        op + "mask must be broadcastable to [2, 6, 3, 8] (batch, heads, queries, keys), got [2, 3, 3, 8]",
    )
    yield ErrorCase(
        "mask dtype", (q, k, v, torch.zeros(1, 1, 3, 8).half()), op + "mask must be bool or float32, got float16"
    )
    yield ErrorCase(
        "mask dtype of half inputs",
        (q.half(), k.half(), v.half(), torch.zeros(1, 1, 3, 8, dtype=torch.int64)),
        op + "mask must be bool, float32 or float16 as q is, got int64",
    )
    yield ErrorCase(
        "kv_lens shape",
        (q, k, v, None, torch.tensor([8])),
        op + "kv_lens must have shape [2] to match the batch size of q, got [1]",
    )
    yield ErrorCase(
        "kv_lens dtype",
        (q, k, v, None, torch.tensor([8.0, 8.0])),
        op + "kv_lens must be int64 or int32, got float32",
    )
    yield ErrorCase(
        "kv_lens too long",
        (q, k, v, None, torch.tensor([8, 9])),
        op + "kv_lens must be 0 to 8, the number of keys in k, got 9 at position 1",
        of_values=True,
    )
    yield ErrorCase(
        "kv_lens negative",
        (q, k, v, None, torch.tensor([-1, 9], dtype=torch.int32)),
        op + "kv_lens must be 0 to 8, the number of keys in k, got -1 at position 0",
        of_values=True,
    )
    of_sinks = {"sinks": torch.ones(6).half()}
    yield ErrorCase("sinks dtype", (q, k, v), op + "sinks must have the dtype of q, float32, got float16", of_sinks)
    for shape in ([5], [6, 1]):
        rule = f"sinks must have shape [6] to match the heads of q, got {shape}"
        yield ErrorCase(f"sinks {shape}", (q, k, v), op + rule, {"sinks": torch.ones(shape)})
    yield ErrorCase(
        "out is a part of the sinks",
        (q[:1, :1], k[:1], v[:1]),
        op + "out must share no memory with sinks, got one whose span of memory overlaps it",
        {"sinks": (memory := torch.zeros(1, 1, 6, 16)).view(-1)[:6], "out": memory},
    )
    yield ErrorCase("meta k", (q, k.to("meta"), v), op + "k must be on the device of q, cpu, got meta")
    yield ErrorCase(
        "out shape",
        (q, k, v),
        op + "out must have the shape of q, [2, 3, 6, 16], got [2, 3, 6, 15]",
        {"out": torch.empty(2, 3, 6, 15)},
    )
    yield ErrorCase(
        "out dtype",
        (q, k, v),
        op + "out must have the dtype of q, float32, got float16",
        {"out": torch.empty(2, 3, 6, 16, dtype=torch.float16)},
    )
    yield ErrorCase(
        "out broadcast",
        (q, k, v),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 96, 16, 1]",
        {"out": torch.empty(1, 3, 6, 16).expand(2, 3, 6, 16)},
    )
    yield ErrorCase(
        "out overlaps q",
        (q[:1], k[:1], v[:1]),
        op + "out must be q itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": q.view(-1)[1 : 1 + 3 * 6 * 16].view(1, 3, 6, 16)},
    )
    square = torch.randn(1, 4, 2, 16)
    yield ErrorCase(
        "out is k",
        (square, square.clone(), (values := square.clone())),
        op + "out must share no memory with v, got one whose span of memory overlaps it",
        {"out": values},
    )


def cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    kv_lens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Cost:
    batch, queries, heads, size = q.shape
    lens = [k.shape[1]] * batch if kv_lens is None else kv_lens.tolist()
    # Of L keys, causal query t of S sees L - S + 1 + t.
    pairs = sum(max(n - t, 0) for n in lens for t in range(queries)) if causal else sum(lens) * queries
    keys = sum(lens) * k.shape[2] * size * k.element_size()
    mask_bytes = 0 if mask is None else mask.untyped_storage().nbytes()
    return Cost(bytes=2 * nbytes(q) + 2 * keys + mask_bytes, flops=4 * heads * size * pairs)


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for name, sizes in {
        "decode 1x32/4x64, 512 keys": (1, 1, 512, 32, 4, 64),
        "decode 1x32/4x64, 2048 keys": (1, 1, 2048, 32, 4, 64),
        "decode 8x32/8x128, 2048 keys": (8, 1, 2048, 32, 8, 128),
        "prefill 512x32/4x64": (1, 512, 512, 32, 4, 64),
    }.items():
        yield Sample(name, attention_inputs(dtype, *sizes))


def cuda_slack(expected: Tensor, q: Tensor, k: Tensor, *_: Any, **__: Any) -> Tensor:
    """Decoding, with at most 16 rows (queries x query heads of a key head), rounds only its result."""
    if q.shape[1] * q.shape[2] <= 16 * k.shape[2]:
        return torch.zeros(())
    return attention_error(expected, q.dtype, max(k.shape[1], q.shape[3]))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    cuda_slack=cuda_slack,
)


# infiniopAttention runs this kernel on a cache into which it first writes the new tokens' keys and values.
FIXED = {"mask": None, "kv_lens": None, "causal": True, "scale": None, "softcap": 0.0, "sinks": None}


def to_c(args: Arguments) -> Arguments | None:
    """Take the first sequence, heads first: its last keys are the new ones, the others are in the cache."""
    inputs = renamed({}, FIXED, args)
    if inputs is None or len(args["q"]) == 0 or args["q"].shape[1] > args["k"].shape[1]:
        return None
    q, k, v = (inputs[name][0].transpose(0, 1) for name in "qkv")
    heads, tokens, size = q.shape
    pos = k.shape[1] - tokens
    spare = unwritten((k.shape[0], tokens + 3, size), k.dtype)
    return {
        "out": unwritten((tokens, heads, size), q.dtype),
        "q": q,
        "k": k[:, pos:],
        "v": v[:, pos:],
        "k_cache": torch.cat((k[:, :pos], spare), 1),
        "v_cache": torch.cat((v[:, :pos], spare), 1),
        "pos": pos,
    }


def c_reference(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, pos: int
) -> dict[str, Tensor]:
    end = pos + q.shape[1]
    caches = {"k_cache": k_cache.double(), "v_cache": v_cache.double()}
    for name, rows in (("k_cache", k), ("v_cache", v)):
        caches[name][:, pos:end] = rows.double()
    if out.numel() == 0:
        return {"out": out, **caches}
    keys, values = (cache[:, :end].transpose(0, 1)[None] for cache in caches.values())
    return {"out": reference(q.transpose(0, 1)[None], keys, values)[0], **caches}


def c_slack(expected: dict[str, Tensor], args: Arguments) -> dict[str, Tensor]:
    """Only `out` may be off: the caches are copied, and exact."""
    q, keys = args["q"], args["k_cache"][:, : args["pos"] + args["q"].shape[1]]
    out = expected["out"]
    return {"out": cuda_slack(out, q.transpose(0, 1)[None], keys.transpose(0, 1)[None])} if out.numel() else {}


def c_args(dtype: torch.dtype, heads: int, kv_heads: int, tokens: int, size: int, pos: int) -> Arguments:
    made = to_c(dict(zip("qkv", attention_inputs(dtype, 1, tokens, pos + tokens, heads, kv_heads, size))) | FIXED)
    assert made is not None
    return made


def c_samples() -> Iterator[CSample]:
    """Yield calls with caches, which torch's attention lacks, and calls without tokens or heads."""
    for dtype in INFO.dtypes:
        kind, tolerance = str(dtype).removeprefix("torch."), INFO.tolerances[dtype]
        for name, sizes in {
            "one of each": (1, 1, 1, 1, 0),
            "no tokens": (4, 2, 0, 16, 3),
            "no heads": (0, 0, 3, 16, 0),
            "no query heads": (0, 2, 3, 16, 0),
        }.items():
            yield CSample(f"{kind} {name}", c_args(dtype, *sizes), tolerance)
        args = c_args(dtype, 6, 2, 5, 40, 7)
        same = {"q": args["q"][:1].expand(6, 5, 40), "v": args["v"][:, :1].expand(2, 5, 40)}
        yield CSample(f"{kind} one q and v for all", {**args, **same}, tolerance)
        args = c_args(dtype, 6, 2, 5, 40, 7)
        caches = torch.stack((args["k_cache"], args["v_cache"]), 1)
        interleaved = {"k_cache": caches[:, 0], "v_cache": caches[:, 1]}
        yield CSample(f"{kind} interleaved caches", {**args, **interleaved}, tolerance)
        args = c_args(dtype, 6, 2, 5, 40, 7)
        for name in "kv":
            args[f"{name}_cache"][:, 7:12] = args[name]
            args[name] = args[f"{name}_cache"][:, 7:12]
        yield CSample(f"{kind} in the cache already", args, tolerance)
        args = c_args(dtype, 1, 1, 1, 40, 7)
        yield CSample(f"{kind} in place", {**args, "out": args["q"]}, tolerance)


def c_errors() -> Iterator[CErrorCase]:
    op = "infini::attention: "
    args = c_args(torch.float32, 4, 2, 3, 8, 5)
    args = {key: value.contiguous() if isinstance(value, Tensor) else value for key, value in args.items()}
    q, k, v, k_cache, v_cache = (args[key] for key in ("q", "k", "v", "k_cache", "v_cache"))
    cases: list[tuple[Arguments, str]] = [
        ({"q": q[0]}, "q must have 3 dimensions, got 2 (shape [3, 8])"),
        ({"q": q.double()}, "q must be float32, bfloat16 or float16, got float64"),
        ({"q": torch.ones(3, 3, 8)}, "q must have a multiple of k's 2 heads in dimension 0, got 3"),
        (
            {"q": torch.ones(4, 3, 16)[..., ::2]},
            "q must have stride 1 in its last dimension (call .contiguous() on it), got strides [48, 16, 2]",
        ),
        ({"k": k[:, :2]}, "k must have shape [2, 3, 8] to match the tokens and the head size of q, got [2, 2, 8]"),
        ({"v": v[:1]}, "v must have the shape of k, [2, 3, 8], got [1, 3, 8]"),
        (
            {"k_cache": k_cache[:1]},
            "k_cache must have shape [2, 11, 8] to match the heads and the head size of k, got [1, 11, 8]",
        ),
        ({"v_cache": v_cache[:, :8]}, "v_cache must have the shape of k_cache, [2, 11, 8], got [2, 8, 8]"),
        (
            {"k_cache": k_cache[:1].expand(2, 11, 8)},
            "k_cache must not be a broadcast view, for it is written to, got strides [0, 8, 1]",
        ),
        (
            {"out": torch.ones(4, 3, 8)},
            "out must have shape [3, 4, 8] to match the tokens and heads of q, got [4, 3, 8]",
        ),
        *(
            (
                {"pos": pos},
                f"k_cache must have room for 3 tokens behind the first {pos}, got 11 rows (shape [2, 11, 8])",
            )
            for pos in (9, 2**64 - 1)
        ),
        *(
            ({key: args[key].half()}, f"{key} must have the dtype of q, float32, got float16")
            for key in ("out", "k", "v", "k_cache", "v_cache")
        ),
    ]
    for changed, rule in cases:
        status = "BAD_TENSOR_SHAPE" if "a multiple of" in rule else status_of(rule)
        yield CErrorCase(rule, {**args, **changed}, status, op + rule)
    overlaps: list[tuple[Arguments, str]] = [
        ({"out": q.view(3, 4, 8)}, "out must be q itself or share no memory with it"),
        ({"k": k_cache[:, 4:7]}, "k_cache must be k itself or share no memory with it"),
        ({"out": v_cache.view(-1)[:96].view(3, 4, 8)}, "out must share no memory with v_cache"),
        ({"q": k_cache.view(-1)[:96].view(4, 3, 8)}, "k_cache must share no memory with q"),
        ({"v": k_cache[:, 5:8]}, "k_cache must share no memory with v"),
    ]
    for changed, rule in overlaps:
        sentence = f"{op}{rule}, got one whose span of memory overlaps it"
        yield CErrorCase(rule, {**args, **changed}, "BAD_PARAM", sentence, "run")


C_OPS = [
    c_op(
        INFO,
        "Attention",
        ["out", "k_cache", "v_cache"],
        samples=c_samples,
        errors=c_errors,
        to_c=to_c,
        reversible=("out", "q", "k", "v", "k_cache", "v_cache"),
        refuses=lambda case: False,  # its tensors have other shapes
        reference=c_reference,
        cuda_slack=c_slack,
    )
]
