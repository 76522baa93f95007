"""Times the CUDA kernels against torch on one GPU: a table, and results/gpu.csv.

    python benchmarks/gpu.py                 # or make bench-cuda
    python benchmarks/gpu.py --only rms_norm,model --quick

Every contestant is captured in a CUDA graph that calls it on several sets of inputs, together at least twice the L2
cache, so that each call finds its data in memory; the graphs take turns, and the median over the rounds counts. What
cannot be captured runs eagerly, and the note says so. The share is of the bandwidth of a large copy, measured in the
same run: the bytes that must move, over the time, over that. Goals are those of docs/gpu.md. Without a GPU, --quick
runs the same code on whatever kernels are loaded, to see that it works: its times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_infini import quantize
from torch_infini.ops import REGISTRY, Sample
from torch_infini.testing.benchmark import Call, write_csv

RESULTS = Path(__file__).parent / "results"
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ROUNDS = 15
BF16 = torch.bfloat16


@dataclass
class Case:
    """One line of the table: what is called, on what, and the goal that docs/gpu.md states.

    make gives fresh inputs at each call; infini and the peers take them. bytes: what a call must move.
    """

    name: str
    make: Callable[[], Sample]
    infini: Callable[..., Any]
    peers: Mapping[str, Callable[..., Any]]
    bytes: int = 0
    share: float | None = None  # of the copy bandwidth, at least
    us: float | None = None  # at most
    repeats: int = 1  # calls on each set of inputs in a graph: for those that are over in microseconds


@dataclass
class Row:
    """One line of the CSV; times in microseconds, None where there is none (the note says why)."""

    case: str
    infini_us: float
    eager_us: float | None
    compile_us: float | None
    torch_us: float | None  # torch's own op for the same, where it has one
    bytes: int
    share: float | None
    goal: str
    met: str
    copy_gb_per_s: float
    gpu: str
    driver: str
    torch: str
    note: str = ""


@dataclass
class Machine:
    """What the run found: the name of the GPU, driver, and the bandwidth of a large copy in bytes a second."""

    gpu: str
    driver: str
    copy: float
    l2: int


# ---- timing ----


def seconds_of(run: Call) -> float:
    if not GPU:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def captured(call: Call) -> Call:
    """The call as the replay of a graph; raises where it cannot be captured."""
    if not GPU:
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120] if text else ''}"


def time_all(calls: Mapping[str, Call], each: int, rounds: int) -> tuple[dict[str, float], list[str]]:
    """(median seconds of one of the `each` calls that a contestant makes, what was not as it should be)."""
    runs: dict[str, Call] = {}
    notes = []
    for name, call in calls.items():
        try:
            call()
            runs[name] = captured(call)
        except Exception as error:  # whatever torch or the compiler raises is a result to report
            if name == "infini":
                raise
            try:
                torch.cuda.synchronize() if GPU else None
                call()
                runs[name] = call
                notes.append(f"{name} not captured: {first_line(error)}")
            except Exception as second:
                notes.append(f"{name} fails: {first_line(second)}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        seconds_of(run)
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds_of(run))
    return {name: statistics.median(values) / each for name, values in times.items()}, notes


def on_device(value: Any) -> Any:
    return value.to(DEVICE) if isinstance(value, Tensor) else value


def nbytes(sample: Sample) -> int:
    return sum(v.numel() * v.element_size() for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, Tensor))


def measure(case: Case, machine: Machine, rounds: int) -> Row:
    with torch.device(DEVICE):
        first = case.make()
        count = max(1, min(64, -(-2 * machine.l2 // max(nbytes(first), 1)))) if GPU else 1
        sets = [first] + [case.make() for _ in range(count - 1)]

        def over_all(function: Callable[..., Any]) -> Call:
            def call() -> None:
                with torch.no_grad(), torch.device(DEVICE):
                    for sample in sets:
                        for _ in range(case.repeats):
                            function(*sample.args, **sample.kwargs)

            return call

        calls = {"infini": over_all(case.infini), **{name: over_all(peer) for name, peer in case.peers.items()}}
        times, notes = time_all(calls, len(sets) * case.repeats, rounds)
    us = {name: value * 1e6 for name, value in times.items()}
    share = case.bytes / times["infini"] / machine.copy if case.bytes else None
    met = all(
        (case.us is None or us["infini"] <= case.us, case.share is None or (share is not None and share >= case.share))
    )
    goal = f"{case.us:g} us" if case.us else f"{case.share:.2f} of copy" if case.share else ""
    return Row(
        case.name,
        us["infini"],
        us.get("eager"),
        us.get("compile"),
        us.get("torch"),
        case.bytes,
        share,
        goal,
        ("yes" if met else "no") if goal else "",
        machine.copy / 1e9,
        machine.gpu,
        machine.driver,
        torch.__version__,
        "; ".join(notes),
    )


def look_at_machine(quick: bool) -> Machine:
    size = (1 << 22) if quick else (1 << 30)
    x, y = (torch.empty(size, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    x.random_(0, 255)
    copy = captured(lambda: y.copy_(x))
    copy()
    best = min(seconds_of(copy) for _ in range(10))
    if not GPU:
        return Machine("none", "none", 2 * size / best, 1)
    properties = torch.cuda.get_device_properties(0)
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return Machine(properties.name, str(driver), 2 * size / best, properties.L2_cache_size)


# ---- the cases ----


def op_case(op: str, name: str, make: Callable[[], Sample], with_compile: bool = True, **goal: Any) -> Case:
    """A case of an op of the registry, with the peer that its description names."""
    spec = REGISTRY[op]
    sample = make()
    peers: dict[str, Callable[..., Any]] = {"eager": spec.peer}
    if with_compile and GPU:
        peers["compile"] = torch.compile(spec.peer, dynamic=False)
    return Case(f"{op} {name}", make, spec.op, peers, spec.cost(*sample.args, **sample.kwargs).bytes, **goal)


def norms(quick: bool) -> Iterator[Case]:
    def sample(rows: int, n: int, tensors: int) -> Callable[[], Sample]:
        return lambda: Sample(
            "", (*(torch.randn(rows, n, dtype=BF16) for _ in range(tensors)), torch.randn(n).to(BF16))
        )

    n = 256 if quick else 8192
    yield op_case("rms_norm", f"{n}x{n}", sample(n, n, 1), share=0.85)
    yield op_case("add_rms_norm", f"{n}x{n}", sample(n, n, 2), share=0.85)
    for rows in (1, 64):
        yield op_case("rms_norm", f"{rows}x4096", sample(rows, 4096, 1), us=4, repeats=4)


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

        yield op_case("qkv_rope_cache", f"{tokens} tokens 32/8x128", make, us=4, repeats=4)


def decode_attention(quick: bool) -> Iterator[Case]:
    for batch, length in ((2, 64), (1, 48)) if quick else ((64, 4096), (1, 2048)):

        def make(batch: int = batch, length: int = length) -> Sample:
            blocks = batch * length // 16
            cache = lambda: torch.randn(blocks, 8, 16, 128, dtype=BF16)
            tables = torch.randperm(blocks).view(batch, -1)
            lengths = torch.full((batch,), length)
            return Sample("", (torch.randn(batch, 32, 128, dtype=BF16), cache(), cache(), tables, lengths))

        goal = {"share": 0.70} if batch > 1 else {"us": 15}
        yield op_case("paged_attention", f"{batch}x{length} 32/8x128", make, **goal)


def sampling(quick: bool) -> Iterator[Case]:
    rows, n = (2, 1000) if quick else (128, 128256)

    def make() -> Sample:
        settings = (torch.ones(rows), torch.zeros(rows, dtype=torch.int64), torch.full((rows,), 0.9))
        seeds = (torch.arange(rows), torch.zeros(rows, dtype=torch.int64))
        return Sample("", (torch.randn(rows, n).mul(3).to(BF16), *settings, *seeds))

    yield op_case("random_sample", f"{rows}x{n} top-p 0.9", make, with_compile=False, us=300)


def quantised(quick: bool) -> Iterator[Case]:
    k, n = (256, 512) if quick else (4096, 14336)
    weight = torch.randn(n, k, device=DEVICE) / k**0.5
    x = lambda: torch.randn(1, k, dtype=BF16)
    dense = lambda w: lambda x, *_: torch.nn.functional.linear(x, w)

    q8, s8 = quantize.quantize_int8(weight.to(BF16))
    torch8 = lambda x, q, s: torch.ops.aten._weight_int8pack_mm(x, q, s.to(BF16))
    peers = {"eager": dense(weight.to(BF16)), "torch": torch8}
    make8 = lambda: Sample("", (x(), q8.clone(), s8.clone()))
    yield Case(f"linear_int8 1x{k}x{n}", make8, REGISTRY["linear_int8"].op, peers, nbytes(make8()), share=0.75)

    q4, s4, z4 = quantize.quantize_int4(weight.to(BF16), 64)
    peers = {"eager": dense(weight.to(BF16))}
    if GPU:  # torch packs [n, k / 2] bytes, the first of a pair in the upper half, and wants [k / group, n, 2]
        swapped = (q4 << 4) | (q4 >> 4)
        packed = torch.ops.aten._convert_weight_to_int4pack(swapped, 8)
        both = torch.stack((s4, z4), -1).transpose(0, 1).contiguous()
        peers["torch"] = lambda x, *_: torch.ops.aten._weight_int4pack_mm(x, packed, 64, both)
    make4 = lambda: Sample("", (x(), q4.clone(), s4.clone(), z4.clone()))
    yield Case(f"linear_int4 1x{k}x{n}", make4, REGISTRY["linear_int4"].op, peers, nbytes(make4()), share=0.60)

    make = lambda: Sample("", (x(), weight.to(BF16)))
    yield op_case("linear", f"1x{k}x{n}", make, share=0.85)


CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "norms": norms,
    "activations": activations,
    "rope": rope,
    "attention": decode_attention,
    "sampling": sampling,
    "quantised": quantised,
}


def show(rows: Sequence[Row]) -> None:
    """The table that people read."""
    print(f"{'case':<42} {'infini':>9} {'eager':>9} {'compile':>9} {'torch':>9}  {'share':>5}  goal")
    cell = lambda value: "-" if value is None else f"{value:.1f}"
    for row in rows:
        share = "" if row.share is None else f"{row.share:.2f}"
        goal = f"{row.goal}: {row.met}" if row.goal else ""
        times = "  ".join(f"{cell(v):>8}" for v in (row.infini_us, row.eager_us, row.compile_us, row.torch_us))
        print(f"{row.case:<42}  {times}  {share:>5}  {goal}{'  [' + row.note + ']' if row.note else ''}")


def main(arguments: Sequence[str] | None = None) -> None:
    from gpu_models import measure_models

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of: {', '.join((*CASES, 'model'))}; commas between")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds, to see that it works")
    parser.add_argument("--csv", type=Path, default=RESULTS / "gpu.csv")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",") if options.only else [*CASES, "model"]
    if unknown := set(wanted) - {*CASES, "model"}:
        parser.error(f"--only must name some of {', '.join((*CASES, 'model'))}, got {', '.join(sorted(unknown))}")
    if not GPU and not options.quick:
        parser.error("there is no GPU: only --quick runs without one")
    torch.manual_seed(0)
    machine = look_at_machine(options.quick)
    print(f"{machine.gpu}, driver {machine.driver}, torch {torch.__version__}, copy {machine.copy / 1e9:.0f} GB/s")
    rounds = 3 if options.quick else ROUNDS
    rows: list[Row] = []
    for name in wanted:
        if name == "model":
            rows += measure_models(machine, options.quick)
        else:
            with torch.device(DEVICE):
                cases = list(CASES[name](options.quick))
            rows += [measure(case, machine, rounds) for case in cases]
        write_csv(options.csv, rows, Row)  # after each part: what is measured is kept
    show(rows)


if __name__ == "__main__":
    main()
