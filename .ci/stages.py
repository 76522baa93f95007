"""Runs stages of the tests one after another, whatever fails, and prints a table of them at the end.

    python .ci/stages.py tests                    # make test
    python .ci/stages.py every device ...         # make test-full; names of STAGES
    python .ci/stages.py --sample every ...       # make test-ci: an eighth of the tests marked `full`, by the commit
    python .ci/stages.py --keep every device ...  # also writes tests/durations.csv, which CONTRIBUTING.md shows

Each stage writes build/tests/STAGE.xml (JUnit), with the time of every test. The exit status is 1 if a stage failed.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "tests"
DURATIONS = ROOT / "tests" / "durations.csv"
LONGEST = 20
PYTEST = ("-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")

# In processes of their own: emulated CUDA needs other libraries, the device infini stays torch.accelerator.
OTHERS = ("--ignore-glob=tests/test_cuda*", "--ignore-glob=tests/test_device*")
# What a CPU without AVX-512, and one with SSE2 alone, get: whole models and the engine. Tests of ops take every level.
LEVELED = ("tests/test_models.py", "tests/test_decode.py", "tests/test_patch_generation.py")
TILED = tuple(
    f"tests/test_{name}.py"
    for name in ("linear", "linear_packed", "fused_linear", "matmul", "conv", "quantize", "infiniop", "ops")
)
TILED_TESTS = (
    "avx512_amx and (linear or gemm or matmul or conv or int8 or integer or bits or finite or Gemm or Conv or "
    "AttentionPrefill or attention and bfloat16 and not layouts)"
)


@dataclass(frozen=True)
class Stage:
    """A run of pytest, or the target of make that stands in `make`."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    make: tuple[str, ...] = ()


def files(pattern: str) -> tuple[str, ...]:
    return tuple(sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob(pattern)))


ONE_THREAD = {"OMP_NUM_THREADS": "1"}
EMULATED = {**ONE_THREAD, "INFINI_LIBRARIES": str(ROOT / "build" / "native" / "emulated")}
SHARE = 8  # of the tests marked `full` --sample runs one in so many: others for each commit, so that a few have run all


def commit() -> str:
    """The commit that is checked out; empty where there is no repository."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else ""


STAGES = {
    # Every op, every interface, every family once.
    "tests": Stage((*OTHERS, "-m", "not full")),
    # The same and all that is marked `full`.
    "every": Stage(OTHERS),
    "device": Stage(files("test_device*.py"), ONE_THREAD),
    # The kernels of the level avx512_amx in emulated tile registers (csrc/emulation/tile_registers.h), on any machine.
    "tiles": Stage((*TILED, "-k", TILED_TESTS), {"INFINI_EMULATE": "amx", "INFINI_CPU_CAPABILITY": "avx512_amx"}),
    "avx2": Stage(LEVELED, {"INFINI_CPU_CAPABILITY": "avx2"}),
    "baseline": Stage(LEVELED, {"INFINI_CPU_CAPABILITY": "baseline"}),
    # The CUDA kernels compiled for the host (csrc/emulation): their threads run one after another.
    "emulated": Stage(files("test_cuda*.py"), EMULATED),
    "format": Stage(make=("check-format",)),
    # mypy has one thread; nvcc takes the other core meanwhile.
    "types, cuda": Stage(make=("-j2", "-O", "check-types", "check-cuda", "SAMPLE=--sample")),
}


@dataclass
class Outcome:
    """What a stage came to."""

    name: str
    status: int
    seconds: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0


def run(name: str, stage: Stage, report: Path, environment: Mapping[str, str]) -> Outcome:
    report.unlink(missing_ok=True)
    if stage.make:
        command = ["make", "--no-print-directory", *stage.make]
    else:
        command = [sys.executable, *PYTEST, f"--junit-xml={report}", *stage.arguments]
    print(f"== {name}", flush=True)
    start = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment, **stage.environment}).returncode
    outcome = Outcome(name, status, time.monotonic() - start)
    if stage.make:
        outcome.passed, outcome.failed = int(status == 0), int(status != 0)
    elif report.is_file():
        (suite,) = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
        tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
        outcome.failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
        outcome.passed, outcome.skipped = tests - outcome.failed - skipped, skipped
    return outcome


def durations(report: Path) -> list[tuple[float, str]]:
    """The seconds of each test of a stage, set-up included, with its name as pytest takes it."""
    if not report.is_file():
        return []
    cases = xml.etree.ElementTree.parse(report).getroot().iter("testcase")
    return [
        (float(case.attrib["time"]), f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}")
        for case in cases
    ]


def cpu() -> str:
    sys.path.insert(0, str(ROOT))
    from torch_infini._core.cpu import cpu_name

    return cpu_name()


def keep(outcomes: Sequence[Outcome]) -> None:
    """Write the stages and the longest tests into tests/durations.csv."""
    machine = cpu()
    longest: dict[str, float] = {}  # of each test, which may be in several stages
    for seconds, name in (case for stage in STAGES for case in durations(REPORTS / f"{stage}.xml")):
        longest[name] = max(seconds, longest.get(name, 0.0))
    tests = sorted(((seconds, name) for name, seconds in longest.items()), reverse=True)
    with DURATIONS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("what", "name", "seconds", "tests", "machine"))
        for one in outcomes:
            writer.writerow(("stage", one.name, f"{one.seconds:.0f}", one.passed + one.failed + one.skipped, machine))
        for seconds, name in tests[:LONGEST]:
            writer.writerow(("test", name, f"{seconds:.1f}", 1, machine))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--keep", action="store_true", help="write tests/durations.csv")
    parser.add_argument("--sample", action="store_true", help=f"of the tests marked `full` one in {SHARE}")
    options = parser.parse_args()
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"there is no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    REPORTS.mkdir(parents=True, exist_ok=True)
    environment = {"INFINI_TEST_SAMPLE": f"{SHARE}:{commit()}"} if options.sample else {}
    outcomes = [run(name, STAGES[name], REPORTS / f"{name}.xml", environment) for name in options.stages]
    print(f"\n{'stage':14}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}  status")
    for one in outcomes:
        print(f"{one.name:14}{one.passed:8}{one.failed:8}{one.skipped:9}{one.seconds:9.0f}  {one.status}")
    if options.keep:
        keep(outcomes)
    passed, failed, skipped = (sum(getattr(one, key) for one in outcomes) for key in ("passed", "failed", "skipped"))
    bad = [one.name for one in outcomes if one.status]
    if bad:
        print(f"stages that failed: {'; '.join(bad)}")
        failed = max(failed, len(bad))  # a stage can fail without a test: no report, no memory
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
