"""Times the CUDA kernels against torch on one GPU: a table, and results/gpu.csv.

    python benchmarks/gpu.py                              # or make bench-cuda: all cases, in eight minutes at most
    python benchmarks/gpu.py --only norms,model --quick
    python benchmarks/gpu.py --seconds 90                 # the cases that have goals first, torch.compile last

Every contestant is captured in a CUDA graph that calls it on several sets of inputs, together at least twice the L2
cache, so that each call finds its data in memory; the graphs take turns, and the median over the rounds counts. What
cannot be captured runs eagerly, and the note says so. The share is of the bandwidth of a large copy, measured in the
same run: the bytes that must move, over the time, over that. Goals are those of docs/gpu.md.

A case that fails is a row with a note; the next one runs, in a new process if the GPU's context is lost. The CSV has
each row as soon as it is measured. The exit status is 1 where one of our kernels failed. Without a GPU, --quick runs
the same code on whatever kernels are loaded, to see that it works: its times mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_infini import quantize
from torch_infini._attention import torch_attention_from_set_to
from torch_infini.testing.benchmark import Call, write_csv
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops._int8_cache import quantise

RESULTS = Path(__file__).parent / "results"
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ROUNDS = 15
SECONDS = 480.0
MOST_SETS = 8192
BF16 = torch.bfloat16


@dataclass
class Work:
    """What a case calls, and on what.

    make gives fresh inputs at each call. bytes, flops: what a call must move and compute.
    """

    make: Callable[[], Sample]
    infini: Callable[..., Any]
    peers: Mapping[str, Peer]
    bytes: int = 0
    flops: int = 0


@dataclass
class Peer:
    """A function for the same, and what it makes of a set of inputs beforehand, such as weights in its own format."""

    function: Callable[..., Any]
    prepare: Callable[[Sample], Sample] = lambda sample: sample


@dataclass
class Case:
    """One line of the table, planned before anything of it is made.

    run measures it: it is given the machine, the number of rounds, and whether to time torch.compile too. seconds: what
    that takes at most, without torch.compile. share, us: the goal that docs/gpu.md states, the share of the copy
    bandwidth at least, microseconds at most. priority: the lowest goes first.
    """

    name: str
    run: Callable[[Case, Machine, int, bool], Row]
    seconds: float = 4.0
    priority: int = 1
    share: float | None = None
    us: float | None = None
    compile_seconds: float | None = 10.0  # what torch.compile adds at most; None: it is not timed


@dataclass
class Row:
    """One line of the CSV; times in microseconds, None where there is none (the note says why)."""

    case: str
    infini_us: float | None = None
    eager_us: float | None = None
    compile_us: float | None = None
    torch_us: float | None = None  # torch's own op for the same, where it has one
    bytes: int | None = None
    share: float | None = None
    tflop_per_s: float | None = None
    data_mb: float | None = None  # all sets of inputs
    goal: str = ""
    met: str = ""
    copy_gb_per_s: float | None = None
    gpu: str = ""
    driver: str = ""
    torch: str = ""
    note: str = ""


@dataclass
class Machine:
    """What the run found: the GPU, its driver, the bandwidth of a large copy in bytes a second, the bytes of the L2."""

    gpu: str
    driver: str
    copy: float
    l2: int


# ---- planning ----


@dataclass
class Plan:
    """The cases to run, in order, and those that there is no time for."""

    cases: list[Case] = field(default_factory=list)
    left_out: list[Case] = field(default_factory=list)


def planned(cases: Sequence[Case], seconds: float) -> Plan:
    """What fits into that time, by priority."""
    plan = Plan()
    left = seconds
    for case in sorted(cases, key=lambda case: case.priority):
        fits = case.seconds <= left
        (plan.cases if fits else plan.left_out).append(case)
        left -= case.seconds if fits else 0
    return plan


def sets_for(nbytes: int, l2: int) -> int:
    """How many sets of inputs of that size are together at least twice the L2 cache."""
    return max(1, min(MOST_SETS, -(-2 * l2 // max(nbytes, 1))))


def goal_of(case: Case) -> str:
    return f"{case.us:g} us" if case.us else f"{case.share:.2f} of copy" if case.share else ""


def row_of(case: Case, machine: Machine, **values: Any) -> Row:
    about = {
        "copy_gb_per_s": machine.copy / 1e9,
        "gpu": machine.gpu,
        "driver": machine.driver,
        "torch": torch.__version__,
    }
    return Row(case.name, **{"goal": goal_of(case), **about, **values})


def context_is_lost() -> bool:
    """Whether the GPU refuses all further work of this process, as after an illegal access."""
    try:
        torch.cuda.synchronize() if GPU else None
    except Exception:
        return True
    return False


def run_cases(
    plan: Plan,
    machine: Machine,
    rounds: int,
    deadline: float,
    save: Callable[[list[Row]], None],
    rows: list[Row],
    lost: Callable[[], bool] = context_is_lost,
) -> bool:
    """Add a row for each case of the plan, saved as it comes. torch.compile is timed while all later cases fit as well.

    Returns:
        Whether the context was lost: the cases after that one have no row yet.
    """
    for number, case in enumerate(plan.cases):
        left = deadline - time.monotonic()
        if case.seconds > left:
            rows.append(row_of(case, machine, note="not run: the time was up"))
            save(rows)
            continue
        spare = left - sum(later.seconds for later in plan.cases[number:])
        with_compile = case.compile_seconds is not None and case.compile_seconds <= spare
        try:
            row = case.run(case, machine, rounds, with_compile)
        except Exception as error:  # whatever it is, it is the result of this case
            row = row_of(case, machine, note=f"{FAILS}: {first_line(error)}")
        rows.append(row)
        save(rows)
        if " fails: " in row.note and lost():
            return True
        if GPU:
            torch.cuda.empty_cache()
    for case in plan.left_out:
        rows.append(row_of(case, machine, note="not run: no time for it"))
    save(rows)
    return False


FAILS = "infini fails"


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
            try:
                torch.cuda.synchronize() if GPU else None
                call()
                runs[name] = call
                notes.append(f"{name} not captured: {first_line(error)}")
            except Exception as second:
                notes.append(f"{name} fails: {first_line(second)}")
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):  # the first does not count
        for name in list(runs):
            try:
                times[name].append(seconds_of(runs[name]))
            except Exception as error:
                notes.append(f"{name} fails: {first_line(error)}")
                del runs[name], times[name]
    return {name: statistics.median(values[1:]) / each for name, values in times.items()}, notes


def nbytes(sample: Sample) -> int:
    return sum(v.numel() * v.element_size() for v in (*sample.args, *sample.kwargs.values()) if isinstance(v, Tensor))


def measure(work: Work, case: Case, machine: Machine, rounds: int, with_compile: bool) -> Row:
    with torch.device(DEVICE):
        first = work.make()
        count = sets_for(nbytes(first), machine.l2) if GPU else 1
        sets = [first] + [work.make() for _ in range(count - 1)]
        peers = dict(work.peers)
        if with_compile and GPU and "eager" in peers:
            peers["compile"] = Peer(torch.compile(peers["eager"].function, dynamic=False), peers["eager"].prepare)
        notes = []
        calls = {"infini": over_all(work.infini, sets)}
        for name, peer in peers.items():
            try:
                calls[name] = over_all(peer.function, [peer.prepare(sample) for sample in sets])
            except Exception as error:
                notes.append(f"{name} fails: {first_line(error)}")
        times, more = time_all(calls, count, rounds)
    notes += more
    data = count * nbytes(first)
    if GPU and data < 2 * machine.l2:
        notes.append("the data is in the L2 cache")
    us = {name: value * 1e6 for name, value in times.items()}
    ours = times.get("infini")
    share = work.bytes / ours / machine.copy if ours and work.bytes else None
    met = ours is not None and (case.us is None or us["infini"] <= case.us)
    met = met and (case.share is None or (share is not None and share >= case.share))
    return row_of(
        case,
        machine,
        **{f"{name}_us": value for name, value in us.items()},
        bytes=work.bytes,
        share=share,
        tflop_per_s=work.flops / ours / 1e12 if ours and work.flops else None,
        data_mb=data / 1e6,
        met=("yes" if met else "no") if goal_of(case) else "",
        note="; ".join(notes),
    )


def over_all(function: Callable[..., Any], sets: Sequence[Sample]) -> Call:
    def call() -> None:
        with torch.no_grad(), torch.device(DEVICE):
            for sample in sets:
                function(*sample.args, **sample.kwargs)

    return call


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
        spec = OP_INFOS[op]
        sample = make()
        cost = spec.cost(*sample.args, **sample.kwargs)
        return Work(make, spec.op, {"eager": Peer(spec.peer)}, cost.bytes, cost.flops)

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
            (k, k_scales), (v, v_scales) = quantise(k), quantise(v)
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
            OP_INFOS["paged_attention"].op,
            {},  # the op's peer would gather the whole capacity
            OP_INFOS["paged_attention"].cost(*make().args).bytes,
        ),
    )


def prefill_attention(quick: bool) -> Iterator[Case]:
    def sample(queries: int, keys: int) -> Callable[[], Sample]:
        def make() -> Sample:
            tensors = (torch.randn(1, n, heads, 128, dtype=BF16) for n, heads in ((queries, 32), (keys, 8), (keys, 8)))
            return Sample("", tuple(tensors))

        return make

    spec = OP_INFOS["attention"]

    def ours(*args: Any) -> Tensor:
        with torch_attention_from_set_to(None):
            return spec.op(*args)

    sizes = ((32, 32), (8, 64)) if quick else ((2048, 2048), (8192, 8192), (512, 8192))
    for queries, keys in sizes:
        yield op_case("attention", f"{queries} queries, {keys} keys, 32/8x128", sample(queries, keys), seconds=6)
    queries, keys = sizes[0]  # which torch computes, if our kernel is not asked for
    yield case_of(
        f"attention, our kernel, {queries} queries, {keys} keys, 32/8x128",
        lambda: Work(make := sample(queries, keys), ours, {}, (cost := spec.cost(*make().args)).bytes, cost.flops),
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


def quantised(quick: bool) -> Iterator[Case]:
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
        return Work(make, OP_INFOS["linear_int8"].op, peers, nbytes(make()), 2 * rows * k * n)

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
        return Work(make, OP_INFOS["linear_int4"].op, peers, nbytes(make()), 2 * rows * k * n)

    for rows in (1, 16) if quick else (1, 16, 63, 64, 512, 2048):  # cuBLAS multiplies from 64 on
        for op, work, goal in (("linear_int8", int8_work, 0.75), ("linear_int4", int4_work, 0.60)):
            share = goal if rows == 1 else None
            yield case_of(f"{op} {rows}x{k}x{n}", lambda w=work, r=rows: w(r), share=share, compile_seconds=None)


def models(quick: bool) -> Iterator[Case]:
    from gpu_models import measure_model

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
    "quantised": quantised,
    "linear": dense,
    "prefill": prefill_attention,
    "model": models,
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


def read_rows(path: Path) -> list[Row]:
    """The rows that an earlier process has written."""
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    text = {f.name for f in fields(Row) if f.type == "str"}
    number = lambda name, value: value if name in text else float(value) if value else None
    return [Row(**{f.name: number(f.name, line[f.name]) for f in fields(Row)}) for line in lines]


def again_command(options: argparse.Namespace, seconds: float) -> list[str]:
    """The command that measures what has no row yet, in a process whose GPU works again."""
    command = [sys.executable, __file__, "--csv", str(options.csv), "--seconds", f"{seconds:.0f}", "--resume"]
    return command + (["--only", options.only] if options.only else []) + (["--quick"] if options.quick else [])


def main(arguments: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"some of: {', '.join(CASES)}; commas between")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds, to see that it works")
    parser.add_argument("--csv", type=Path, default=RESULTS / "gpu.csv")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="for all together; what does not fit is left out"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows of the CSV, and measure the others")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",") if options.only else list(CASES)
    if unknown := set(wanted) - CASES.keys():
        parser.error(f"--only must name some of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    if not GPU and not options.quick:
        parser.error("there is no GPU: only --quick runs without one")
    torch.manual_seed(0)
    machine = look_at_machine(options.quick)
    print(f"{machine.gpu}, driver {machine.driver}, torch {torch.__version__}, copy {machine.copy / 1e9:.0f} GB/s")
    rows = read_rows(options.csv) if options.resume and options.csv.is_file() else []
    measured = {row.case for row in rows}
    cases = [case for name in wanted for case in CASES[name](options.quick) if case.name not in measured]
    deadline = start + options.seconds
    plan = planned(cases, deadline - time.monotonic())
    save = lambda rows: write_csv(options.csv, rows, Row)
    lost = run_cases(plan, machine, 3 if options.quick else ROUNDS, deadline, save, rows)
    if lost:
        print(f"after {rows[-1].case} the GPU refuses all work: the rest goes on in a new process", flush=True)
        command = again_command(options, max(deadline - time.monotonic(), 0))
        os.execv(command[0], command)
    show(rows)
    return int(any(FAILS in row.note for row in rows))


if __name__ == "__main__":
    sys.exit(main())
