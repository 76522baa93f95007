"""How gpu.py measures a case: contestants captured in CUDA graphs over several sets of inputs, in turns.

Without a GPU the same code times whatever kernels are loaded, uncaptured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import Row, first_line
from op_cases import Sample
from torch import Tensor

from torch_infini.testing.benchmark import Call

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
MOST_SETS = 8192


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
class Machine:
    """What the run found: the GPU, its driver, the bandwidth of a large copy in bytes a second, the bytes of the L2."""

    gpu: str
    driver: str
    copy: float
    l2: int


def sets_for(nbytes: int, l2: int) -> int:
    """How many sets of inputs of that size are together at least twice the L2 cache."""
    return max(1, min(MOST_SETS, -(-2 * l2 // max(nbytes, 1))))


def goal_of(case: Case) -> str:
    return f"{case.us:g} us" if case.us else f"{case.share:.2f} of copy" if case.share else ""


def row_of(case: Case, **values: Any) -> Row:
    return {"case": case.name, "goal": goal_of(case), "note": "", **values}


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
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception:
        # torch's generator would go on as if captured, and refuse to make inputs for the next case.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator("cuda").graphsafe_get_state())
        raise
    return graph.replay


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
    copy = lambda: y.copy_(x)  # not captured: in a graph it came out at two thirds of what others measured
    copy()
    best = min(seconds_of(copy) for _ in range(10))
    if not GPU:
        return Machine("none", "none", 2 * size / best, 1)
    properties = torch.cuda.get_device_properties(0)
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return Machine(properties.name, str(driver), 2 * size / best, properties.L2_cache_size)
