"""Times the C ABI against torch on the same tensors, and against the machine's limits; writes CSV.

    python benchmarks/run.py --c-abi --threads 1,2

Each op runs through its descriptor into memory that is there already. The rivals write into the same memory where torch
has a way to: eager by out=, compiled by a function that ends in out.copy_(...). Ratios are the rival's time over ours.
Limits: vector_peak.c for products (f16 against the f32 peak); for the rest the memory bandwidth, read in turns with the
contestants: a dot product of two vectors, 256 MiB together. What fits the caches may be faster than that.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_infini.testing import threads_set_to
from torch_infini.testing.benchmark import Call, medians, write_csv
from torch_infini.testing.c_ops import COp, Descriptor, all_c_ops

HERE = Path(__file__).parent
READ = torch.ones(2, 1 << 25)  # 256 MiB
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


@dataclass
class Row:
    """One line of the CSV; microseconds, None where there is no such rival."""

    op: str
    case: str
    dtype: str
    threads: int
    infini_us: float
    eager_us: float | None
    compile_us: float | None
    ratio_to_eager: float | None
    ratio_to_compile: float | None
    limit: str
    share: float


def measure_peaks(threads: int, seconds: float) -> dict[torch.dtype, float]:
    """Operations a second, by dtype; of int8, 0 where the machine has no VNNI."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/peak.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, str(HERE / "vector_peak.c"), "-o", path], check=True)
        library = ctypes.CDLL(path)

        def peak(name: str) -> float:
            function = library[name]
            function.restype = ctypes.c_double
            with ThreadPoolExecutor(threads) as pool:
                return sum(pool.map(function, [ctypes.c_double(seconds)] * threads))

        f32, bf16, int8 = peak("f32_peak"), peak("bf16_peak"), peak("int8_peak")
    return {torch.float32: f32, torch.float16: f32, torch.bfloat16: bf16 or f32, torch.int8: int8}


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


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
            work = {"bytes": nbytes(b)} if m == 1 else {"flops": 2 * m * n * k}
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


def names() -> list[str]:
    """The ops that are timed."""
    return ["Gemm", "Add", "SwiGLU", "RMSNorm", "CausalSoftmax", "LayerNorm", "RoPE", "RandomSample", "PagedAttention"]


def measure(case: Case, op: COp, dtype: torch.dtype, peaks: dict[torch.dtype, float], rounds: int, least: float) -> Row:
    with Descriptor(op, case.args) as descriptor:
        contestants: dict[str, Call] = {"infini": descriptor.bound(case.args)}
        if case.peer is not None:
            contestants["eager"] = case.peer
        if case.compiled:
            torch._dynamo.reset()
            contestants["compile"] = torch.compile(lambda: case.out.copy_(case.peer()))  # type: ignore[union-attr]
            contestants["compile"]()
        if case.bytes:
            contestants["read"] = lambda: torch.dot(*READ)
        times = medians(contestants, rounds, least)
    if case.bytes:
        bandwidth = nbytes(*READ) / times["read"]
        limit, bound = f"{bandwidth / 1e9:.0f} GB/s", case.bytes / bandwidth
    else:
        limit, bound = f"{peaks[dtype] / 1e9:.0f} GFLOP/s", case.flops / peaks[dtype]
    microseconds = {name: times[name] * 1e6 if name in times else None for name in ("eager", "compile")}
    ratios = {name: times[name] / times["infini"] if name in times else None for name in ("eager", "compile")}
    return Row(
        op=op.name,
        case=case.name,
        dtype=str(dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        infini_us=times["infini"] * 1e6,
        eager_us=microseconds["eager"],
        compile_us=microseconds["compile"],
        ratio_to_eager=ratios["eager"],
        ratio_to_compile=ratios["compile"],
        limit=limit,
        share=bound / times["infini"],
    )


def line(row: Row) -> str:
    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        f"{row.op:15} {row.case:46} {row.dtype:9} {row.threads:2} {row.infini_us:>10.1f} {number(row.eager_us, 1):>10} "
        f"{number(row.compile_us, 1):>10} {number(row.ratio_to_eager, 2):>7} {number(row.ratio_to_compile, 2):>7} "
        f"{row.share:6.0%} of {row.limit}"
    )


HEADER = (
    f"{'op':15} {'case':46} {'dtype':9} {'th':>2} {'infini us':>10} {'eager us':>10} {'compile us':>10} "
    f"{'/eager':>7} {'/comp.':>7} {'share':>6}"
)


def run(
    names: Sequence[str] | None, dtypes: Sequence[torch.dtype] | None, threads: Sequence[int], quick: bool
) -> list[Row]:
    """Measure and print. Quick: one dtype, the first case of each op, short measurements."""
    ops = {op.name: op for op in all_c_ops()}
    rounds, least = (3, 0.002) if quick else (9, 0.02)
    rows: list[Row] = []
    for count in threads:
        with threads_set_to(count), torch.no_grad():
            peaks = measure_peaks(count, 0.05 if quick else 0.5)
            print(f"{count} thread(s)\n{HEADER}")
            seen: set[str] = set()
            for dtype in [d for d in DTYPES if dtypes is None or d in dtypes][: 1 if quick else None]:
                for case in (case for group in GROUPS for case in group(dtype)):
                    if (names is not None and case.op not in names) or (quick and case.op in seen):
                        continue
                    seen.add(case.op)
                    rows.append(measure(case, ops[case.op], dtype, peaks, rounds, least))
                    print(line(rows[-1]), flush=True)
    return rows


def write(path: Path, rows: Sequence[Row]) -> None:
    write_csv(path, rows, Row)
    print(f"{len(rows)} rows in {path}")
