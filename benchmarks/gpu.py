"""Times the CUDA kernels against torch on one GPU: build/gpu/results/gpu.csv.

    python benchmarks/gpu.py                              # or make bench-cuda: all cases, in eight minutes at most
    python benchmarks/gpu.py --only norms,model --quick
    python benchmarks/gpu.py --seconds 90                 # the cases that have goals first, torch.compile last

Every contestant is captured in a CUDA graph that calls it on several sets of inputs, together at least twice the L2
cache, so that each call finds its data in memory; the graphs take turns, and the median over the rounds counts. What
cannot be captured runs eagerly, and the note says so. The share is of the bandwidth of a large copy, measured in the
same run: the bytes that must move, over the time, over that. Goals are those of docs/gpu.md;
torch_us is the time of torch's own op for the same, where it has one.

A case that fails is a row with a note; the next one runs, in a new process if the GPU's context is lost. The exit
status is 1 where one of our kernels failed. Without a GPU, --quick runs the same code on whatever kernels are loaded,
to see that it works: its times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import harness
import torch
from gpu_cases import CASES
from gpu_measure import GPU, Case, Machine, look_at_machine, row_of
from harness import RESULTS, Results, first_line

ROUNDS = 15
SECONDS = 480.0
FAILS = "infini fails"
COLUMNS = "case infini_us eager_us compile_us torch_us bytes share tflop_per_s data_mb goal met note"


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


def context_is_lost() -> bool:
    """Whether this process cannot go on: the GPU refuses its work after an illegal access, or torch after a capture."""
    try:
        torch.rand(1, device="cuda").item() if GPU else None
    except Exception:
        return True
    return False


def run_cases(
    plan: Plan,
    machine: Machine,
    rounds: int,
    deadline: float,
    results: Results,
    lost: Callable[[], bool] = context_is_lost,
) -> bool:
    """Add a row for each case of the plan. torch.compile is timed while all later cases fit as well.

    Returns:
        Whether the context was lost: the cases after that one have no row yet.
    """
    for number, case in enumerate(plan.cases):
        left = deadline - time.monotonic()
        if case.seconds > left:
            results.add(row_of(case, note="not run: the time was up"))
            continue
        spare = left - sum(later.seconds for later in plan.cases[number:])
        with_compile = case.compile_seconds is not None and case.compile_seconds <= spare
        try:
            row = case.run(case, machine, rounds, with_compile)
        except Exception as error:  # whatever it is, it is the result of this case
            row = row_of(case, note=f"{FAILS}: {first_line(error)}")
        results.add(row)
        if (" fails: " in row["note"] or " not captured: " in row["note"]) and lost():
            return True
        if GPU:
            torch.cuda.empty_cache()
    for case in plan.left_out:
        results.add(row_of(case, note="not run: no time for it"))
    return False


def again_command(options: argparse.Namespace, seconds: float) -> list[str]:
    """The command that measures what has no row yet, in a process whose GPU works again."""
    command = [sys.executable, __file__, "--out", str(options.out), "--seconds", f"{seconds:.0f}", "--resume"]
    return command + ["--only", ",".join(options.only)] + (["--quick"] if options.quick else [])


def main(argv: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    parser = harness.new_parser(__doc__, "gpu.csv", quick="small shapes and few rounds")
    parser.set_defaults(out=RESULTS.parent.parent.parent / "build" / "gpu" / "results" / "gpu.csv")
    groups = harness.names("group of cases", [*CASES])
    parser.add_argument("--only", type=groups, default=[*CASES], help=f"some of: {', '.join(CASES)}; commas between")
    help_text = f"for all together; what does not fit is left out (default: {SECONDS:.0f})"
    parser.add_argument("--seconds", type=float, default=SECONDS, help=help_text)
    options = parser.parse_args(argv)
    if not GPU and not options.quick:
        parser.error("there is no GPU: only --quick runs without one")
    torch.manual_seed(0)
    machine = look_at_machine(options.quick)
    facts = {"copy_gb_per_s": machine.copy / 1e9, "gpu": machine.gpu, "driver": machine.driver}
    with Results(options.out, COLUMNS, facts, options.resume) as results:
        cases = [
            case for name in options.only for case in CASES[name](options.quick) if not results.has(case=case.name)
        ]
        deadline = start + options.seconds
        plan = planned(cases, deadline - time.monotonic())
        if run_cases(plan, machine, 3 if options.quick else ROUNDS, deadline, results):
            print(
                f"after {results.rows[-1]['case']} the GPU refuses all work: the rest goes on in a new process",
                flush=True,
            )
            command = again_command(options, max(deadline - time.monotonic(), 0))
            os.execv(command[0], command)
    return int(any(FAILS in row["note"] for row in results.rows))


if __name__ == "__main__":
    sys.exit(main())
