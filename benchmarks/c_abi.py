"""Times the C ABI against torch on the same tensors, and against the machine's limits: results/CPU/c-abi.csv.

    python benchmarks/run.py --c-abi --threads 1,2

--ops are names as in infiniopCreate<op>Descriptor. Each op runs through its descriptor into memory that is there
already. The rivals write into the same memory where torch has a way to: eager by out=, compiled by a function that ends
in out.copy_(...). Ratios are the rival's time over ours. Limits: vector_peak.c for products (f16 against the f32 peak);
for the rest the memory bandwidth, read in turns with the contestants. What fits the caches may be faster than that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import torch
import torch.nn.functional as F
from harness import Cases, Row, dtype_name, ratios, taken
from limits import READ_BYTES, measure_peaks, read_once
from op_cases import nbytes
from torch import Tensor

from torch_infini.testing.benchmark import Call, medians
from torch_infini.testing.c_ops import COp, Descriptor
from torch_infini.testing.ops import all_c_ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPS = ("Gemm", "Add", "SwiGLU", "RMSNorm", "CausalSoftmax", "LayerNorm", "RoPE", "RandomSample", "PagedAttention")


@dataclass(frozen=True)
class Case:
    """One call: the op and its arguments, what torch would do (into `out`), and the least work there is."""

    op: str
    name: str
    args: dict[str, Any]
    peer: Callable[..., Any] | None  # eager, and also compiled if `compiled` is True; None: torch takes too long
    bytes: int = 0
    flops: int = 0
    compiled: bool = True
    out: Tensor | None = None  # what the compiled peer copies its result to


def products(dtype: torch.dtype) -> Iterator[Case]:
    shapes = {
        "1024^3": (1024, 1024, 1024),
        "512x14336x4096": (512, 14336, 4096),
        "1x4096x4096": (1, 4096, 4096),
        "1x14336x4096": (1, 14336, 4096),
        "8x4096x4096": (8, 4096, 4096),
    }
    for name, (m, n, k) in shapes.items():
        for layout in ("nn", "nt", "tn") if m > 8 else ("nn", "nt"):
            a = torch.randn(m, k).to(dtype) if layout[0] == "n" else torch.randn(k, m).to(dtype).T
            b = torch.randn(k, n).to(dtype) if layout[1] == "n" else torch.randn(n, k).to(dtype).T
            c = torch.empty(m, n, dtype=dtype)
            args = {"c": c, "a": a, "b": b, "alpha": 1.0, "beta": 0.0}
            work: dict[str, Any] = {"bytes": nbytes(b)} if m == 1 else {"flops": 2 * m * n * k}
            # torch's f16 product runs at a few GFLOP/s or less: one shape and layout is enough to see it.
            slow = dtype == torch.float16 and (m > 8 and (name, layout) != ("1024^3", "nt"))
            peer = None if slow else lambda a=a, b=b, c=c: torch.mm(a, b, out=c)
            yield Case("Gemm", f"{name} {layout}", args, peer, compiled=False, **work)


def rows_of(dtype: torch.dtype) -> Iterator[Case]:
    """512 x 4096, op by op."""
    x, y, z, w, b = (torch.randn(*s).to(dtype) for s in ((512, 4096), (512, 4096), (512, 4096), (4096,), (4096,)))
    size, out = "512x4096", torch.empty(512, 4096, dtype=dtype)
    args: dict[str, Any] = {"c": out, "a": x, "b": y}
    yield Case("Add", size, args, lambda: torch.add(x, y), nbytes(x, y, out), out=out)
    yield Case("SwiGLU", size, args, lambda: F.silu(y) * x, nbytes(x, y, out), out=out)
    args = {"y": out, "x": x, "w": w, "epsilon": 1e-6}
    yield Case("RMSNorm", size, args, lambda: F.rms_norm(x, (4096,), w, 1e-6), nbytes(x, out), out=out)
    yield Case("CausalSoftmax", size, {"y": out, "x": x}, lambda: masked_softmax(x), nbytes(x, out), out=out)
    outputs = {"input_standardization": z, "input_std_deviation": torch.empty(512, dtype=dtype), "output": out}
    args = {**outputs, "input": x, "weight": w, "bias": b, "eps": 1e-5}

    def three_outputs() -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, (4096,), w, b, 1e-5)
        z.copy_((x - mean) * rstd)
        outputs["input_std_deviation"].copy_(rstd.reciprocal().squeeze(-1))
        return y

    yield Case("LayerNorm", f"{size}, torch with the same outputs", args, three_outputs, nbytes(x, z, out), out=out)
    one_output = lambda: F.layer_norm(x, (4096,), w, b, 1e-5)
    yield Case("LayerNorm", f"{size}, torch with one output of three", args, one_output, nbytes(x, z, out), out=out)
    heads, turned = torch.randn(512, 32, 128).to(dtype), torch.empty(512, 32, 128, dtype=dtype)
    angles = torch.arange(512.0)[:, None] * 10000 ** (-torch.arange(64) / 64)
    sin, cos, positions = angles.sin().to(dtype), angles.cos().to(dtype), torch.arange(512)
    args = {"y": turned, "x": heads, "pos_ids": positions, "sin_table": sin, "cos_table": cos, "algo": 1}
    rope = lambda: rotated(heads, sin[positions], cos[positions])
    yield Case("RoPE", "512x32x128", args, rope, nbytes(heads, turned), out=turned)


MASK = torch.ones(512, 4096, dtype=torch.bool).tril(4096 - 512)


def masked_softmax(x: Tensor) -> Tensor:
    return torch.softmax(x.masked_fill(~MASK, -torch.inf), -1)


def rotated(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    sin, cos = sin[:, None], cos[:, None]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def sampling(dtype: torch.dtype) -> Iterator[Case]:
    logits, result = torch.randn(128_256).to(dtype), torch.zeros((), dtype=torch.int64)
    args = {"result": result, "probs": logits, "random_val": 0.7, "topp": 0.9, "topk": 50, "temperature": 0.8}
    yield Case(
        "RandomSample",
        "128256, top-k 50, top-p 0.9 against topk(50)",
        args,
        lambda: torch.topk(logits, 50),
        nbytes(logits),
        compiled=False,
    )
    yield Case(
        "RandomSample",
        "128256, argmax",
        {**args, "topk": 1},
        lambda: torch.argmax(logits),
        nbytes(logits),
        compiled=False,
    )


def paged(dtype: torch.dtype) -> Iterator[Case]:
    sequences, tokens, heads, kv_heads, size, block = 8, 2048, 32, 8, 128, 16
    blocks = sequences * tokens // block
    q, out = torch.randn(sequences, heads, size).to(dtype), torch.empty(sequences, heads, size, dtype=dtype)
    k, v = (torch.randn(blocks, kv_heads, block, size).to(dtype) for _ in range(2))
    tables = torch.randperm(blocks).view(sequences, -1)
    args = {
        "out": out,
        "q": q,
        "k_cache": k,
        "v_cache": v,
        "block_tables": tables,
        "seq_lens": torch.full((sequences,), tokens),
        "alibi_slopes": None,
        "scale": size**-0.5,
    }

    def gathered() -> Tensor:
        """What torch has for it: caches gathered, then SDPA."""
        keys, values = (t[tables].transpose(1, 2).reshape(sequences, kv_heads, tokens, size) for t in (k, v))
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)

    yield Case("PagedAttention", "8 x 2048 tokens, 32/8 x 128", args, gathered, nbytes(k, v), compiled=False)


GROUPS = (products, rows_of, sampling, paged)


def measure(case: Case, op: COp, dtype: torch.dtype, peaks: dict[torch.dtype, float], rounds: int, least: float) -> Row:
    with Descriptor(op, case.args) as descriptor:
        contestants: dict[str, Call] = {"infini": descriptor.bound(case.args)}
        if case.peer is not None:
            contestants["eager"] = case.peer
        if case.compiled:
            torch._dynamo.reset()
            contestants["compile"] = torch.compile(lambda: case.out.copy_(case.peer()))  # type: ignore[union-attr, misc]
            contestants["compile"]()
        if case.bytes:
            contestants["read"] = read_once
        times = medians(contestants, rounds, least)
    if case.bytes:
        bandwidth = READ_BYTES / times["read"]
        limit, bound = f"{bandwidth / 1e9:.0f} GB/s", case.bytes / bandwidth
    else:
        limit, bound = f"{peaks[dtype] / 1e9:.0f} GFLOP/s", case.flops / peaks[dtype]
    rivals = ("eager", "compile")
    share = bound / times["infini"]
    return {**taken(times, "infini", *rivals), **ratios(times, *rivals), "limit": limit, "share": share}


def cases(options: argparse.Namespace) -> Cases:
    ops = {op.name: op for op in all_c_ops() if op.name in options.ops}
    rounds, least = (3, 0.002) if options.quick else (9, 0.02)
    dtypes = [d for d in DTYPES if options.dtypes is None or d in options.dtypes][: 1 if options.quick else None]
    for threads in options.threads:
        peaks = measure_peaks(threads, 0.05 if options.quick else 0.5)
        seen: set[str] = set()
        for dtype, case in ((d, case) for d in dtypes for group in GROUPS for case in group(d)):
            if case.op in ops and not (options.quick and case.op in seen):
                seen.add(case.op)
                key = {"op": case.op, "case": case.name, "dtype": dtype_name(dtype), "threads": threads}
                yield key, partial(measure, case, ops[case.op], dtype, peaks, rounds, least)


def main(argv: Sequence[str] | None = None) -> None:
    quick = "one dtype, the first case of each op, short measurements"
    parser = harness.new_parser(__doc__, "c-abi.csv", threads=[1], quick=quick, ops=OPS, with_dtypes=True)
    options = parser.parse_args(argv)
    harness.run(options, cases(options))


if __name__ == "__main__":
    main()
