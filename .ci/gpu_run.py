"""The first minutes on a machine with a GPU: `make gpu` (docs/gpu.md).

    python .ci/gpu_run.py --out results --archive libraries.tar.xz
    python .ci/gpu_run.py --dry                                       # the stages and their commands, on any machine

Checks that there is a GPU and that torch has our CUDA kernels, and stops where not: all tests would be skipped. Then
come the stages: tests, doctor, the four tools of compute-sanitizer, benchmarks, each with its time limit; one
that fails, hangs or dies stops none of the others. The folder --out gets report.md, log.txt, tests.xml and gpu.csv. The
exit status is 0 only where something ran and nothing failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_archive  # noqa: E402
import gpu_report  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
UNPACKED = ROOT / "build" / "gpu" / "libraries"
MOST_LOG = 2 << 20  # bytes that a stage may leave in log.txt
GRACE = 10.0  # seconds from SIGINT, on which pytest writes its XML, to SIGKILL
OUTCOMES = PASSED, FAILED, TIMED_OUT, NOT_RUN = "passed", "FAILED", "TIMED OUT", "not run"


@dataclass(frozen=True)
class Stage:
    """A command under a time limit.

    tool: a program without which the stage is not run. unsupported: printed where the machine cannot do this at all:
    the stage counts as not run. ran: looks at what the stage has written, and says what is missing ("" if nothing).
    "{seconds}" in the command becomes a little less than the limit, for programs that plan with it.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    tool: str = ""
    unsupported: str = ""
    ran: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Result:
    """The outcome of a stage (one of OUTCOMES), how long it took, and a few words."""

    name: str
    outcome: str
    seconds: float
    detail: str = ""


def tests_ran(xml: Path) -> str:
    """Why the tests prove nothing; empty if some ran."""
    try:
        tests = gpu_report.read_tests(xml)
    except ValueError as error:
        return str(error)
    return "" if tests.ran else f"no test ran: all {tests.skipped} were skipped"


def times_measured(path: Path) -> str:
    return "" if any(row["infini_us"] for row in gpu_report.read_times(path)) else "nothing was measured"


def all_stages(out: Path, python: str = sys.executable) -> list[Stage]:
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    xdist = ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart", "30"]
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", f"--junitxml={out / 'tests.xml'}"]
    pytest += ["--continue-on-collection-errors"]  # a file that lacks something is one failure
    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").glob("test_cuda*.py"))]
    stages = [
        Stage(
            "tests",
            (*pytest, *(xdist if importlib.util.find_spec("xdist") else []), *files),
            150,
            {"INFINI_TEST_SECONDS": "90", "OMP_NUM_THREADS": "2"},
            ran=lambda: tests_ran(out / "tests.xml"),
        ),
        Stage("doctor", (python, "-m", "torch_infini", "doctor"), 100),
    ]
    for tool, seconds in (("memcheck", 50), ("racecheck", 60), ("initcheck", 40), ("synccheck", 40)):
        # Of memory that torch's allocator keeps, the tools cannot tell what is in use.
        samples = (python, ".ci/gpu_samples.py", "--seconds", "{seconds}")
        stages.append(
            Stage(
                tool,
                ("compute-sanitizer", "--tool", tool, "--error-exitcode", "3", *samples),
                seconds,
                {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"},
                tool="compute-sanitizer",
                unsupported="Device not supported",
            )
        )
    csv = out / "gpu.csv"
    command = (python, "benchmarks/gpu.py", "--csv", str(csv), "--seconds", "{seconds}")
    stages.append(Stage("benchmarks", command, 110, ran=lambda: times_measured(csv)))
    return stages


def command_of(stage: Stage, seconds: float) -> list[str]:
    # The programs look at the clock between two pieces of work only.
    return [part.replace("{seconds}", str(int(max(seconds - 15, seconds / 2)))) for part in stage.command]


def end(process: subprocess.Popen[bytes], grace: float) -> None:
    """Interrupt the process; then kill it, with all that it started."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace)
    kill_group(process)
    process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def shorten(log: Path, start: int, most: int = MOST_LOG) -> None:
    """Leave out the middle of what follows `start` where it is longer than that."""
    with log.open("r+b") as file:
        file.seek(start)
        text = file.read()
        if len(text) > most:
            file.seek(start)
            file.write(text[: most // 2] + b"\n... left out ...\n" + text[-(most // 2) :])
            file.truncate()


def run_stage(
    stage: Stage, log: Path, seconds: float, environment: Mapping[str, str] | None = None, grace: float = GRACE
) -> Result:
    """Run a stage for at most that long, its output appended to the log; whatever becomes of it, this returns."""
    if stage.tool and not shutil.which(stage.tool):
        return Result(stage.name, NOT_RUN, 0, f"{stage.tool} is not on PATH")
    if seconds <= 0:
        return Result(stage.name, NOT_RUN, 0, "no time was left")
    command = command_of(stage, seconds)
    env = {**(os.environ if environment is None else environment), **stage.environment}
    begin = time.monotonic()
    timed_out = False
    with log.open("ab") as file:
        file.write(f"\n==== {stage.name}: {shlex.join(command)}\n".encode())
        file.flush()
        start = file.tell()
        try:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            return Result(stage.name, FAILED, 0, f"could not be started: {error}")
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
            end(process, grace)
        except BaseException:
            end(process, 0)
            raise
        kill_group(process)  # what it has left running
    took = time.monotonic() - begin
    shorten(log, start)
    said = log.read_bytes()[start:].decode(errors="replace")
    print("\n".join(said.splitlines()[-12:]), flush=True)
    if timed_out:
        return Result(stage.name, TIMED_OUT, took, f"ended after {seconds:.0f} s")
    if stage.unsupported and process.returncode and stage.unsupported in said:
        return Result(stage.name, NOT_RUN, took, stage.unsupported)
    if process.returncode < 0:
        return Result(stage.name, FAILED, took, f"died of {signal.Signals(-process.returncode).name}")
    if process.returncode:
        return Result(stage.name, FAILED, took, f"exit status {process.returncode}")
    missing = stage.ran()
    return Result(stage.name, FAILED if missing else PASSED, took, missing)


def run_stages(
    stages: Sequence[Stage],
    log: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
    grace: float = GRACE,
) -> list[Result]:
    """One after another, within `seconds` in all; the last stage gets all the time that the others leave."""
    deadline = time.monotonic() + seconds
    results = []
    for stage in stages:
        left = deadline - time.monotonic()
        limit = left if stage is stages[-1] else min(stage.seconds, left)
        print(f"== {stage.name}: at most {max(limit, 0):.0f} s", flush=True)
        results.append(run_stage(stage, log, limit, environment, grace))
        print(f"== {stage.name}: {results[-1].outcome}, {results[-1].seconds:.0f} s {results[-1].detail}", flush=True)
    return results


def exit_status(results: Sequence[Result]) -> int:
    """0 where something ran and nothing failed."""
    outcomes = [result.outcome for result in results]
    return int(PASSED not in outcomes or FAILED in outcomes or TIMED_OUT in outcomes)


# ---- the machine and the libraries ----


def ask(*command: str, environment: Mapping[str, str] | None = None) -> Any:
    """The JSON that a command prints last; a str, what it said, where it failed."""
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    try:
        return json.loads(done.stdout)
    except ValueError:
        return f"no JSON: {done.stdout[-200:]!r}"


LOOK = """
import json, torch
c = torch.cuda
there = c.is_available()
archs = sorted({"%d.%d" % c.get_device_capability(i) for i in range(c.device_count())}) if there else []
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "there": there, "archs": archs}))
"""


def missing_gpu(found: Any) -> str:
    """Why torch cannot use a GPU here, of what LOOK printed; empty where it can."""
    if isinstance(found, str):
        return f"this Python must have torch >= 2.11 with CUDA, but importing torch failed: {found}"
    if found["there"]:
        return ""
    why = "and no GPU that it can use" if found["cuda"] else "which is a CPU build"
    return f"there is no GPU here: torch is {found['torch']}, {why}"


def missing_kernels(facts: Any) -> str:
    """Why the CUDA kernels cannot be called, of what `env --json` printed; empty where they can."""
    if isinstance(facts, str):
        return f"torch_infini does not load: {facts}"
    if facts["cuda_build"] != "yes":
        return f"these libraries must be built with CUDA kernels, but env says cuda_build: {facts['cuda_build']}"
    if facts["cuda_kernels"] != "registered":
        return f"torch {facts['torch']} must have our CUDA kernels, but env says cuda_kernels: {facts['cuda_kernels']}"
    return "" if facts["cuda_devices"] else "env sees no GPU"


def with_libraries(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment in which torch_infini loads the libraries of that folder."""
    headers = ROOT / "torch_infini" / "include"  # which a build would have copied
    if not headers.is_dir():
        shutil.copytree(ROOT / "csrc" / "include", headers)
    return {**environment, "INFINI_LIBRARIES": str(folder)}


def env_facts(environment: Mapping[str, str], python: str) -> Any:
    return ask(python, "-m", "torch_infini", "env", "--json", environment=environment)


def with_entry_points(environment: Mapping[str, str], python: str) -> dict[str, str]:
    """The environment in which torch finds backend="infini", as where the package is installed."""
    folder = UNPACKED.parent / "metadata"
    folder.mkdir(parents=True, exist_ok=True)
    command = [python, "-W", "ignore", "setup.py", "-q", "egg_info", "--egg-base", str(folder)]
    if subprocess.run(command, cwd=ROOT).returncode:
        print("gpu: the package's metadata could not be written: tests of torch.compile will fail", flush=True)
    return {**environment, "PYTHONPATH": os.pathsep.join([environment["PYTHONPATH"], str(folder)])}


def prepare(
    archive: Path | None, archs: Sequence[str], environment: dict[str, str], log: Path, python: str = sys.executable
) -> tuple[dict[str, str], Any, str]:
    """Libraries that have CUDA kernels: of the archive, if it loads, or built here.

    Returns:
        The environment that loads them, what env says of them, and what is missing ("": nothing).
    """
    if archive:
        try:
            gpu_archive.unpack(archive, gpu_archive.digest_of_sources(ROOT), UNPACKED)
            loaded = with_libraries(environment, UNPACKED)
            facts = env_facts(loaded, python)
            missing = missing_kernels(facts)
        except (OSError, ValueError) as error:
            facts, missing = None, str(error)
        if not missing:
            return loaded, facts, ""
        print(f"gpu: the libraries of {archive} are not used: {missing}", flush=True)
    build = Stage(
        "build",
        (python, "-W", "ignore", "setup.py", "-q", "build_ext", "--inplace"),
        300,
        {"TORCH_CUDA_ARCH_LIST": os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(archs)},
    )
    built = run_stage(build, log, build.seconds, environment)
    if built.outcome != PASSED:
        return environment, None, f"the build failed ({built.detail}): {log} has what it said"
    facts = env_facts(environment, python)
    return environment, facts, missing_kernels(facts)


def show(stages: Sequence[Stage]) -> None:
    """The stages and their commands, for --dry."""
    for stage in stages:
        settings = " ".join(f"{name}={value}" for name, value in stage.environment.items())
        print(f"{stage.name}, at most {stage.seconds:.0f} s:")
        print(f"  {settings + ' ' if settings else ''}{shlex.join(command_of(stage, stage.seconds))}")


def write_report(out: Path, facts: Mapping[str, Any], results: Sequence[Result]) -> None:
    try:
        tests = gpu_report.read_tests(out / "tests.xml") if (out / "tests.xml").exists() else None
    except ValueError:
        tests = None  # the stage says so
    shown = {name: facts[name] for name in ("torch_infini", "torch", "python", "transformers", "cuda_driver")}
    shown["GPU"] = ", ".join(facts["cuda_devices"])
    stages = [(r.name, r.outcome, r.seconds, r.detail) for r in results]
    rows = gpu_report.read_times(out / "gpu.csv")
    (out / "report.md").write_text(gpu_report.report(shown, stages, tests, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "gpu" / "results", help="the folder of the results"
    )
    parser.add_argument(
        "--archive", type=Path, help="libraries of `make gpu-archive`: nothing is compiled if they load"
    )
    parser.add_argument("--stages", help="some of them in this order, separated by commas")
    parser.add_argument("--seconds", type=float, default=570, help="for all together, from the start")
    parser.add_argument("--dry", action="store_true", help="list the stages and their commands, and run none")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    out = options.out.resolve()
    stages = all_stages(out)
    if options.stages:
        by_name = {stage.name: stage for stage in stages}
        if unknown := set(options.stages.split(",")) - by_name.keys():
            parser.error(f"--stages must name some of {', '.join(by_name)}, got {', '.join(sorted(unknown))}")
        stages = [by_name[name] for name in options.stages.split(",")]
    if options.dry:
        show(stages)
        return 0
    found = ask(sys.executable, "-c", LOOK)
    if missing := missing_gpu(found):
        print(f"gpu: {missing}. Nothing was run; --dry (make gpu DRY=1) lists what would be.", file=sys.stderr)
        return 1
    out.mkdir(parents=True, exist_ok=True)
    for name in ("report.md", "log.txt", "tests.xml", "gpu.csv"):  # of an earlier run
        (out / name).unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    environment = with_entry_points(environment, sys.executable)
    environment, facts, missing = prepare(options.archive, found["archs"], environment, out / "log.txt")
    if missing:
        print(f"gpu: {missing}. Nothing was tested.", file=sys.stderr)
        return 1
    print(f"gpu: {', '.join(facts['cuda_devices'])}, torch {facts['torch']}, driver {facts['cuda_driver']}", flush=True)
    left = options.seconds - (time.monotonic() - begin)
    results = run_stages(stages, out / "log.txt", left, environment)
    write_report(out, facts, results)
    print((out / "report.md").read_text())
    return exit_status(results)


if __name__ == "__main__":
    sys.exit(main())
