"""The cases of gpu.py, by group: what docs/gpu.md has goals for, and more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_measure import DEVICE, GPU, Case, Machine, Peer, Work, measure, nbytes
from gpu_models import measure_model
from harness import Row
from op_cases import Case as OpCase
from op_cases import Sample, info_of, quantize_rows
from torch import Tensor

from torch_infini._core.attention import torch_attention_from_set_to
from torch_infini.weights import FORMATS, quantize

BF16 = torch.bfloat16


def case_of(name: str, work: Callable[[], Work], **more: Any) -> Case:
    """A case whose work is set up when its turn comes."""

    def run(case: Case, machine: Machine, rounds: int, with_compile: bool) -> Row:
        with torch.device(DEVICE):
            set_up = work()
        return measure(set_up, case, machine, rounds, with_compile)

    more.setdefault("priority", 0 if more.get("share") or more.get("us") else 1)
    return Case(name, run, **more)


def op_case(op: str, name: str, make: Callable[[], Sample], **more: Any) -> Case:
    """A case of an op of the registry, with the peer that its description names."""

    def work() -> Work:
        case = OpCase(info_of(op), make())
        return Work(make, case.info.op, {"eager": Peer(case.peer)}, case.cost.bytes, case.cost.flops)

    return case_of(f"{op} {name}", work, **more)


def norms(quick: bool) -> Iterator[Case]:
    def sample(rows: int, n: int, tensors: int) -> Callable[[], Sample]:
        return lambda: Sample(
            "", (*(torch.randn(rows, n, dtype=BF16) for _ in range(tensors)), torch.randn(n).to(BF16))
        )

    n = 256 if quick else 8192
    yield op_case("rms_norm", f"{n}x{n}", sample(n, n, 1), share=0.85)
    yield op_case("add_rms_norm", f"{n}x{n}", sample(n, n, 2), share=0.85)
    for rows in (1, 64):
        yield op_case("rms_norm", f"{rows}x4096", sample(rows, 4096, 1), us=4, seconds=6)


def activations(quick: bool) -> Iterator[Case]:
    rows, n = (16, 256) if quick else (8192, 14336)
    make = lambda: Sample("", tuple(torch.randn(rows, n, dtype=BF16) for _ in range(2)))
    yield op_case("swiglu", f"{rows}x{n}", make, share=0.88)


def rope(quick: bool) -> Iterator[Case]:
    for tokens in (1, 64):

        def make(tokens: int = tokens) -> Sample:
            heads, kv_heads, size, blocks = 32, 8, 128, 64
            cache = lambda: torch.zeros(blocks, kv_heads, 16, size, dtype=BF16)
            slots = torch.randperm(blocks * 16)[:tokens]
            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, dtype=BF16)
            tables = (torch.rand(8192, size // 2) for _ in range(2))
            q = torch.empty(tokens, heads, size, dtype=BF16)
            return Sample("", (q, cache(), cache(), qkv, *tables, torch.randint(8192, (tokens,)), slots))

        yield op_case("qkv_rope_cache", f"{tokens} tokens 32/8x128", make, us=4)


def decode_attention(quick: bool) -> Iterator[Case]:
    def sample(batch: int, length: int, capacity: int = 0, int8: bool = False) -> Callable[[], Sample]:
        def make() -> Sample:
            blocks = batch * length // 16
            cache = lambda: torch.randn(blocks, 8, 16, 128, dtype=BF16)
            q, k, v = torch.randn(batch, 32, 128, dtype=BF16), cache(), cache()
            tables = torch.zeros(batch, max(capacity, length) // 16, dtype=torch.int64)
            tables[:, : length // 16] = torch.randperm(blocks).view(batch, -1)
            args = (tables, torch.full((batch,), length))
            if not int8:
                return Sample("", (q, k, v, *args))
            (k, k_scales), (v, v_scales) = quantize_rows(k), quantize_rows(v)
            return Sample("", (q, k, v, *args), {"k_scales": k_scales, "v_scales": v_scales})

        return make

    many, one = ((2, 64), (1, 48)) if quick else ((64, 4096), (1, 2048))
    shape = lambda sizes: f"{sizes[0]}x{sizes[1]} 32/8x128"
    yield op_case("paged_attention", shape(many), sample(*many), share=0.70, seconds=8)
    yield op_case("paged_attention", shape(one), sample(*one), us=15)
    # 264 bytes a key instead of 512 at 1.3 times the speed.
    of_int8 = sample(*many, int8=True)
    yield op_case("paged_attention", f"{shape(many)} int8 cache", of_int8, share=0.47, seconds=8, compile_seconds=None)
    capacity = 1024 if quick else 131072
    yield case_of(
        f"paged_attention {shape(one)}, capacity {capacity}",
        lambda: Work(
            make := sample(*one, capacity=capacity),
            info_of("paged_attention").op,
            {},  # the op's peer would gather the whole capacity
            OpCase(info_of("paged_attention"), make()).cost.bytes,
        ),
    )


def prefill_attention(quick: bool) -> Iterator[Case]:
    def sample(queries: int, keys: int) -> Callable[[], Sample]:
        def make() -> Sample:
            tensors = (torch.randn(1, n, heads, 128, dtype=BF16) for n, heads in ((queries, 32), (keys, 8), (keys, 8)))
            return Sample("", tuple(tensors))

        return make

    info = info_of("attention")

    def ours(*args: Any) -> Tensor:
        with torch_attention_from_set_to(None):
            return info.op(*args)

    sizes = ((32, 32), (8, 64)) if quick else ((2048, 2048), (8192, 8192), (512, 8192))
    for queries, keys in sizes:
        yield op_case("attention", f"{queries} queries, {keys} keys, 32/8x128", sample(queries, keys), seconds=6)
    queries, keys = sizes[0]  # which torch computes, if our kernel is not asked for
    yield case_of(
        f"attention, our kernel, {queries} queries, {keys} keys, 32/8x128",
        lambda: Work(make := sample(queries, keys), ours, {}, (cost := OpCase(info, make()).cost).bytes, cost.flops),
        compile_seconds=None,
    )


def sampling(quick: bool) -> Iterator[Case]:
    n = 1000 if quick else 128256
    for rows in (2 if quick else 128, 1):

        def make(rows: int = rows) -> Sample:
            settings = (torch.ones(rows), torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 0.9))
            seeds = (torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
            return Sample("", (torch.randn(rows, n).mul(3).to(BF16), *settings, *seeds))

        goal = {"us": 300.0} if rows > 1 else {}
        yield op_case("random_sample", f"{rows}x{n} top-p 0.9", make, compile_seconds=None, **goal)


def dense(quick: bool) -> Iterator[Case]:
    k, n = (256, 512) if quick else (4096, 14336)
    for rows in (1, 32, 64, 128, 256, 512):
        make = lambda rows=rows: Sample("", (torch.randn(rows, k, dtype=BF16), torch.randn(n, k, dtype=BF16) / k**0.5))
        goal = {"share": 0.85} if rows == 1 else {}
        yield op_case("linear", f"{rows}x{k}x{n}", make, **goal)


def quantized(quick: bool) -> Iterator[Case]:
    """Against torch on the weight in bfloat16 (eager), and against torch's own op for weights of so many bits."""
    k, n, group = (256, 512, 64) if quick else (4096, 14336, 64)
    linear = torch.nn.functional.linear
    x_and_weight = lambda rows: (torch.randn(rows, k, dtype=BF16), (torch.randn(n, k) / k**0.5).to(BF16))
    in_bf16 = lambda sample: Sample("", (sample.args[0], torch.randn(n, k, dtype=BF16) / k**0.5))

    def int8_work(rows: int) -> Work:
        def make() -> Sample:
            x, weight = x_and_weight(rows)
            return Sample("", (x, *quantize.quantize_int8(weight)))

        own = lambda sample: Sample("", (*sample.args[:2], sample.args[2].to(BF16)))
        peers = {"eager": Peer(linear, in_bf16), "torch": Peer(torch.ops.aten._weight_int8pack_mm, own)}
        return Work(make, info_of("linear_int8").op, peers, nbytes(make()), 2 * rows * k * n)

    def int4_work(rows: int) -> Work:
        def make() -> Sample:
            x, weight = x_and_weight(rows)
            return Sample("", (x, *quantize.quantize_int4(weight, group)))

        def own(sample: Sample) -> Sample:
            # torch packs [n, k / 2] bytes, the first of a pair in the upper half, and wants [k / group, n, 2]
            x, q, scales, zeros = sample.args
            packed = torch.ops.aten._convert_weight_to_int4pack((q << 4) | (q >> 4), 8)
            return Sample("", (x, packed, group, torch.stack((scales, zeros), -1).transpose(0, 1).contiguous()))

        peers = {"eager": Peer(linear, in_bf16)}
        if GPU:
            peers["torch"] = Peer(torch.ops.aten._weight_int4pack_mm, own)
        return Work(make, info_of("linear_int4").op, peers, nbytes(make()), 2 * rows * k * n)

    def panels_work(name: str, rows: int) -> Work:
        def make() -> Sample:  # any bytes are a weight
            packed = torch.randint(256, FORMATS[name].kinds(n, k, 0, BF16)["weight"].shape, dtype=torch.uint8)
            return Sample("", (torch.randn(rows, k, dtype=BF16), packed, torch.rand(n) / 1e4))

        peers = {"eager": Peer(linear, in_bf16)}
        return Work(make, info_of(f"linear_{name}").op, peers, nbytes(make()), 2 * rows * k * n)

    for rows in (1, 16) if quick else (1, 16, 63, 64, 512, 2048):  # cuBLAS multiplies from 64 on
        for op, work, goal in (("linear_int8", int8_work, 0.75), ("linear_int4", int4_work, 0.60)):
            share = goal if rows == 1 else None
            yield case_of(f"{op} {rows}x{k}x{n}", lambda w=work, r=rows: w(r), share=share, compile_seconds=None)
    for rows in (1, 16) if quick else (1, 16, 512):
        for name in ("group8", "table4"):
            work_of = lambda r=rows, f=name: panels_work(f, r)
            yield case_of(f"linear_{name} {rows}x{k}x{n}", work_of, compile_seconds=None)


def models(quick: bool) -> Iterator[Case]:
    shapes = [("tiny", None), ("tiny", "int8")]
    if not quick:
        shapes = [(shape, weights) for weights in (None, "int8", "int4") for shape in ("1.1B", "8B")]
    for shape, weights in shapes:

        def run(
            case: Case, machine: Machine, rounds: int, with_compile: bool, shape: str = shape, weights: Any = weights
        ) -> Row:
            return measure_model(case, shape, weights, machine, with_compile, quick)

        name = f"decode {shape} {weights or 'bfloat16'}, a graph"
        seconds, compile_seconds = (25, 60) if shape == "8B" else (12, 40)
        if weights is None:
            yield Case(name, run, seconds, priority=0, compile_seconds=compile_seconds)
        else:
            yield Case(name, run, seconds, priority=2, compile_seconds=None)


CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "norms": norms,
    "activations": activations,
    "rope": rope,
    "attention": decode_attention,
    "sampling": sampling,
    "quantized": quantized,
    "linear": dense,
    "prefill": prefill_attention,
    "model": models,
}
