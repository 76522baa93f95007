"""`make gpu` without a GPU: its stages, its report, the archive of libraries, and conftest.py where a GPU is lost."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / ".ci"))
gpu: Any = importlib.import_module("gpu_run")
gpu_archive: Any = importlib.import_module("gpu_archive")
PYTHON_MODULE = "_infinicore.cpython-312-x86_64-linux-gnu.so"
gpu_report: Any = importlib.import_module("gpu_report")
sys.path.remove(str(ROOT / ".ci"))


def stage(name: str, code: str, seconds: float = 30, **more: Any) -> Any:
    return gpu.Stage(name, (sys.executable, "-S", "-c", code), seconds, **more)


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


# ---- the stages ----


def test_no_stage_stops_the_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.txt"
    stages = [
        stage(
            "hangs", "import signal, time; signal.signal(2, signal.SIG_IGN); print('h', flush=True); time.sleep(60)", 1
        ),
        stage("fails", "print('before'); raise SystemExit(7)"),
        stage("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        gpu.Stage("is not there", (str(tmp_path / "nothing"),), 30),
        stage("has no tool", "print('never')", tool="no-such-program"),
        stage("cannot", "print('Device not supported'); raise SystemExit(1)", unsupported="Device not supported"),
        stage("did nothing", "print('0 tests')", ran=lambda: "no test ran"),
        stage("works", "import os; print('done', os.environ['THREADS'])", environment={"THREADS": "2"}),
    ]
    results = gpu.run_stages(stages, log, 60, grace=0.2)
    assert [(r.name, r.outcome) for r in results] == [
        ("hangs", "TIMED OUT"),
        ("fails", "FAILED"),
        ("dies", "FAILED"),
        ("is not there", "FAILED"),
        ("has no tool", "not run"),
        ("cannot", "not run"),
        ("did nothing", "FAILED"),
        ("works", "passed"),
    ]
    details = {r.name: r.detail for r in results}
    assert details["hangs"] == "ended after 1 s"
    assert details["fails"] == "exit status 7"
    assert details["dies"] == "died of SIGSEGV"
    assert details["is not there"].startswith("could not be started: ")
    assert details["has no tool"] == "no-such-program is not on PATH"
    assert details["did nothing"] == "no test ran"
    assert results[0].seconds < 20
    text = log.read_text()
    assert "==== fails: " in text and "\nbefore\n" in text and text.endswith("\ndone 2\n")
    assert "== works: passed" in capsys.readouterr().out


def test_a_stage_may_end_itself_and_leaves_no_process(tmp_path: Path) -> None:
    """At its limit a stage is interrupted, as by Ctrl-C: pytest then writes its XML. Its children go with it."""
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "try:\n    pathlib.Path(sys.argv[1]).write_text(str(child.pid))\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    pathlib.Path(sys.argv[2]).write_text('interrupted')\n"
    )
    pid, note = tmp_path / "pid", tmp_path / "note"
    # A shell that runs tests in the background ignores SIGINT, and so would all below it.
    prefix = "import signal; signal.signal(2, signal.default_int_handler)\n"
    python = (sys.executable, "-S", "-c", prefix + code, str(pid), str(note))
    result = gpu.run_stage(gpu.Stage("ends", python, 9), tmp_path / "log.txt", 2)
    assert result.outcome == "TIMED OUT" and note.read_text() == "interrupted"
    for _ in range(100):
        status = Path("/proc", pid.read_text(), "status")
        if not status.exists() or "State:\tZ" in status.read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the child still runs")


def test_time_is_shared(tmp_path: Path) -> None:
    """The last stage gets what is left; without any left a stage is not run. Programs are told their seconds."""
    show = "import sys; print('given', sys.argv[1])"
    given = lambda name, seconds: gpu.Stage(name, (sys.executable, "-S", "-c", show, "{seconds}"), seconds)
    log = tmp_path / "log.txt"
    gpu.run_stages([given("first", 40), given("last", 20)], log, 300)
    first, last = (int(line.split()[1]) for line in log.read_text().splitlines() if line.startswith("given"))
    assert first == 25 and 200 < last <= 285
    (result,) = gpu.run_stages([given("late", 40)], log, 0)
    assert (result.outcome, result.detail) == ("not run", "no time was left")


def test_long_output_is_shortened(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("earlier\n")
    gpu.run_stage(stage("talks", "print('x' * 9_000_000); print('the end')"), log, 30)
    text = log.read_text()
    assert text.startswith("earlier\n") and text.endswith("the end\n") and "... left out ..." in text
    assert len(text) < gpu.MOST_LOG + 1000


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["passed", "passed"], 0),
        (["passed", "not run"], 0),
        (["passed", "FAILED"], 1),
        (["TIMED OUT", "passed"], 1),
        (["not run", "not run"], 1),
        ([], 1),
    ],
)
def test_exit_status(outcomes: list[str], status: int) -> None:
    assert gpu.exit_status([gpu.Result("a stage", outcome, 1.0) for outcome in outcomes]) == status


def test_dry() -> None:
    done = start(".ci/gpu_run.py", "--dry", "--out", "somewhere")
    assert done.returncode == 0, done.stderr
    names = [line.split(",")[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert names == ["tests", "doctor", "memcheck", "racecheck", "initcheck", "synccheck", "benchmarks"]
    assert done.stdout.count("PYTORCH_NO_CUDA_MEMORY_CACHING=1") == 4
    files = sorted(f"tests/{path.name}" for path in (ROOT / "tests").glob("test_cuda*.py"))
    assert len(files) >= 14 and " ".join(files) in done.stdout
    assert "--max-worker-restart" in done.stdout and "INFINI_TEST_SECONDS=" in done.stdout
    assert sum(one.seconds for one in gpu.all_stages(Path("out"))) <= 570
    chosen = start(".ci/gpu_run.py", "--dry", "--stages", "memcheck,doctor")
    assert re.findall("^(.*), at most", chosen.stdout, re.MULTILINE) == ["memcheck", "doctor"]
    refused = start(".ci/gpu_run.py", "--dry", "--stages", "doctor,lint")
    assert refused.returncode == 2 and "--stages must name some of tests, doctor, " in refused.stderr


def test_without_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = start(".ci/gpu_run.py", "--out", str(out), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("gpu: there is no GPU here: torch is ")
    assert "Nothing was run" in done.stderr and "DRY=1" in done.stderr
    assert not out.exists()


FACTS = {
    "torch_infini": "0.1.0",
    "torch": "2.11.0+cu130",
    "python": "3.12.3",
    "transformers": None,
    "cuda_driver": "13.0",
    "cuda_build": "yes",
    "cuda_kernels": "registered",
    "cuda_devices": ["a GPU (compute capability 9.0, 140.0 GiB)"],
}


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({}, ""),
        ({"cuda_build": "no"}, "env says cuda_build: no"),
        ({"cuda_build": "emulated on the CPU"}, "env says cuda_build: emulated"),
        ({"cuda_kernels": "not registered: this torch has no CUDA"}, "env says cuda_kernels: not registered"),
        ({"cuda_devices": []}, "env sees no GPU"),
    ],
)
def test_missing_kernels(changed: dict[str, Any], part: str) -> None:
    said = gpu.missing_kernels({**FACTS, **changed})
    assert part in said and bool(part) == bool(said)


def test_missing_gpu() -> None:
    found = {"torch": "2.11.0+cu130", "cuda": "13.0", "there": False, "archs": []}
    assert gpu.missing_gpu(found) == "there is no GPU here: torch is 2.11.0+cu130, and no GPU that it can use"
    assert gpu.missing_gpu({**found, "there": True}) == ""
    assert "No module named" in gpu.missing_gpu(gpu.ask(sys.executable, "-c", "import no_such_torch"))
    assert gpu.missing_kernels("cannot be loaded") == "torch_infini does not load: cannot be loaded"


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With a made-up GPU and stages: what lies in the folder afterwards, and what is left of an earlier run."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "gpu.csv").write_text("of an earlier run")
    write = "import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    xml = out / "tests.xml"
    stages = [
        gpu.Stage(
            "tests",
            (sys.executable, "-S", "-c", write, str(xml), XML),
            30,
            ran=lambda: gpu.tests_ran(out / "tests.xml"),
        ),
        stage("memcheck", "print('never')", tool="no-such-program"),
    ]
    found = {"torch": "2.11.0+cu130", "cuda": "13.0", "there": True, "archs": ["9.0"]}
    monkeypatch.setattr(gpu, "ask", lambda *_, **__: found)
    monkeypatch.setattr(gpu, "prepare", lambda archive, archs, environment, log: (environment, FACTS, ""))
    monkeypatch.setattr(gpu, "all_stages", lambda out: stages)
    assert gpu.main(["--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["log.txt", "report.md", "tests.xml"]
    report = (out / "report.md").read_text()
    assert "* GPU: a GPU (compute capability 9.0, 140.0 GiB)" in report and "1 passed, 3 failed" in report
    assert "| memcheck | not run | 0 | no-such-program is not on PATH |" in report
    assert report in capsys.readouterr().out
    skipped = '<testsuites><testsuite><testcase classname="t" name="a"><skipped/></testcase></testsuite></testsuites>'
    stages[0] = dataclasses.replace(stages[0], command=(*stages[0].command[:-1], skipped))
    assert gpu.main(["--out", str(out)]) == 1
    assert "| tests | FAILED |" in (out / "report.md").read_text()
    monkeypatch.setattr(gpu, "prepare", lambda *_: ({}, None, "env says cuda_kernels: not registered"))
    assert gpu.main(["--out", str(out)]) == 1
    said = capsys.readouterr()
    assert "gpu: env says cuda_kernels: not registered. Nothing was tested.\n" in said.err
    assert not (out / "report.md").exists()


# ---- the libraries ----


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "tree" / "csrc").mkdir(parents=True)
    (tmp_path / "tree" / "csrc" / "op.cu").write_text("// a kernel\n")
    lib = tmp_path / "tree" / "lib"
    lib.mkdir()
    for name in (*gpu_archive.LIBRARIES, PYTHON_MODULE):
        (lib / name).write_bytes(name.encode() * 1000)
    return tmp_path / "tree"


def test_archive(tmp_path: Path, sources: Path) -> None:
    archive, folder = tmp_path / "made" / "libraries.tar.xz", tmp_path / "unpacked"
    digest = gpu_archive.digest_of_sources(sources)
    gpu_archive.pack(sources / "lib", digest, archive)
    gpu_archive.unpack(archive, digest, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted((*gpu_archive.LIBRARIES, PYTHON_MODULE))
    assert (folder / "libinfinirt.so").read_bytes() == b"libinfinirt.so" * 1000
    (sources / "csrc" / "op.cu").write_text("// another kernel\n")
    with pytest.raises(ValueError, match="must be of the sources that are here"):
        gpu_archive.unpack(archive, gpu_archive.digest_of_sources(sources), folder)


def test_other_archives_are_refused(tmp_path: Path, sources: Path) -> None:
    foreign, broken = tmp_path / "foreign.tar", tmp_path / "broken.tar.xz"
    with tarfile.open(foreign, "w") as tar:
        tar.add(sources / "csrc" / "op.cu", "../op.cu")
    broken.write_bytes(b"\xfd7zXZ\0 and no more")
    for archive in (foreign, broken):
        with pytest.raises(ValueError, match="must be an archive of `make gpu-archive`"):
            gpu_archive.unpack(archive, "", tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists() and not (tmp_path / "op.cu").exists()


@pytest.fixture
def python(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    """Makes a program in Python's place: `env --json` prints these facts, setup.py fails."""

    def make(facts: dict[str, Any]) -> str:
        program = tmp_path / "python"
        program.write_text(
            '#!/bin/sh\ncase "$*" in\n'
            f"*--json) test -n \"$INFINI_LIBRARIES\" || exit 9; echo '{json.dumps(facts)}' ;;\n"
            "*setup.py*) echo built for $TORCH_CUDA_ARCH_LIST; exit 3 ;;\nesac\n"
        )
        program.chmod(0o755)
        return str(program)

    return make


def test_prepare(
    tmp_path: Path, sources: Path, python: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The archive's libraries are used where they load; otherwise they are built, and the build's failure is told."""
    monkeypatch.setattr(gpu, "UNPACKED", tmp_path / "unpacked")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    environment = {name: value for name, value in os.environ.items() if name != "INFINI_LIBRARIES"}
    archive, log = tmp_path / "libraries.tar.xz", tmp_path / "log.txt"
    gpu_archive.pack(sources / "lib", gpu_archive.digest_of_sources(ROOT), archive)
    loaded, facts, missing = gpu.prepare(archive, ["9.0"], environment, log, python(FACTS))
    assert (missing, facts) == ("", FACTS)
    assert loaded["INFINI_LIBRARIES"] == str(tmp_path / "unpacked")
    assert not log.exists()
    without = python({**FACTS, "cuda_kernels": "not registered: this torch has no CUDA"})
    _, _, missing = gpu.prepare(archive, ["9.0"], environment, log, without)
    assert "are not used: torch 2.11.0+cu130 must have our CUDA kernels" in capsys.readouterr().out
    assert missing.startswith("the build failed (exit status 3)")
    assert "built for 9.0" in log.read_text()
    _, _, missing = gpu.prepare(tmp_path / "none.tar.xz", ["9.0"], environment, log, without)
    assert "No such file" in capsys.readouterr().out and missing.startswith("the build failed")


def test_samples_without_cuda_are_a_failure() -> None:
    refused = start(".ci/gpu_samples.py", CUDA_VISIBLE_DEVICES="", INFINI_LIBRARIES="")
    assert refused.returncode == 1 and "nothing ran" in refused.stdout, refused.stderr


CUDA_TORCH = """
extern "C" int aoti_torch_get_current_cuda_stream(int, void **) { return 1; }
"""
KERNEL = """
#include "rms_norm/rms_norm.h"
namespace infini::rms_norm {
static void run_on_cuda(const ExecutionContext &, const Args &) {}
static const RegisteredKernel<Args> registered{kernels, INFINI_DEVICE_NVIDIA, run_on_cuda};
}
"""
LOADED = """
import ctypes, sys, torch
for path in sys.argv[2:]:
    ctypes.CDLL(path, ctypes.RTLD_LOCAL)
torch.ops.load_library(sys.argv[1])
print(*(torch._C._dispatch_has_kernel_for_dispatch_key("infini::rms_norm", key) for key in ("CPU", "CUDA")))
"""


@pytest.mark.full
def test_one_build_serves_torches_with_and_without_cuda(tmp_path: Path) -> None:
    """The library, beside a CUDA kernel in a torch without CUDA, registers it where a torch with CUDA is loaded.

    That torch is a made-up libtorch_cuda.so. A library without CUDA kernels registers none.
    """
    native, cxx = ROOT / "build" / "native", shlex.split(os.environ.get("CXX", "g++"))
    torch_cuda, kernel, source = (tmp_path / name for name in ("libtorch_cuda.so", "libkernel.so", "kernel.cpp"))
    (tmp_path / "torch.cpp").write_text(CUDA_TORCH)
    source.write_text(KERNEL)
    shared = [*cxx, "-shared", "-fPIC", "-std=c++17"]
    subprocess.run(
        [*shared, str(tmp_path / "torch.cpp"), "-o", str(torch_cuda), f"-Wl,-soname,{torch_cuda.name}"], check=True
    )
    include = [f"-I{ROOT}/csrc/{name}" for name in ("include", "common", "infiniop")]
    needed = [f"-L{native}", f"-Wl,-rpath,{native}", "-linfiniop", "-linfinirt"]
    subprocess.run([*shared, str(source), *include, *needed, "-o", str(kernel)], check=True)
    library = native / "libtorch_infini.so"
    has_cuda = "infiniop.rms_norm.rms_norm.cuda.o" in (native / "build.ninja").read_text()
    for others, registered in (
        ((kernel,), "True False"),
        ((kernel, torch_cuda), "True True"),
        ((torch_cuda,), f"True {has_cuda}"),
    ):
        assert start("-c", LOADED, *map(str, (library, *others))).stdout.strip() == registered


# ---- the report ----

XML = """<?xml version="1.0"?><testsuites><testsuite name="pytest" tests="7">
<testcase classname="tests.test_cuda" name="test_a"/>
<testcase classname="tests.test_cuda" name="test_b"><failure message="AssertionError: off&#10;by">x</failure></testcase>
<testcase classname="tests.test_cuda" name="test_b"><error message="worker 'gw0' crashed">crashed</error></testcase>
<testcase classname="tests.test_cuda" name="test_c"><error>no message</error></testcase>
<testcase classname="tests.test_cuda" name="test_d"><skipped message="needs two GPUs"/></testcase>
<testcase classname="tests.test_cuda_norms" name="test_a"/>
<testcase classname="tests.test_cuda_norms" name="test_a"><error message="in teardown"/></testcase>
</testsuite></testsuites>"""


def row(case: str, us: str = "", **more: str) -> dict[str, str]:
    names = ("eager_us", "compile_us", "torch_us", "share", "goal", "met", "note")
    return {"case": case, "infini_us": us, "gpu": "NVIDIA A100-SXM4", **dict.fromkeys(names, ""), **more}


ROWS = [
    row("rms_norm 8192x8192", "70.2", eager_us="300", share="0.9123", goal="0.85 of copy", met="yes"),
    row("add_rms_norm 8192x8192", "150", share="0.7", goal="0.85 of copy", met="no"),
    row("rms_norm 1x4096", "2.91", share="0.001", goal="4 us", met="yes"),
    row("random_sample 128x128256 top-p 0.9", "140", goal="300 us", met="yes"),
    row("linear_int8 1x4096x14336", note="infini fails: RuntimeError: a|b"),
    row(
        "decode 1.1B bfloat16, a graph",
        "700",
        eager_us="7000",
        share="0.5",
        goal="0.45 of the weights' limit",
        met="yes",
    ),
]


def test_tests_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(XML)
    tests = gpu_report.read_tests(path)
    assert (tests.passed, tests.skipped, tests.ran) == (1, 1, 4)
    assert tests.failures == {
        "tests.test_cuda::test_b": "AssertionError: off",
        "tests.test_cuda::test_c": "no message",
        "tests.test_cuda_norms::test_a": "in teardown",
    }
    assert gpu.tests_ran(path) == ""
    skipped = '<testcase classname="t" name="a"><skipped/></testcase>'
    path.write_text(f"<testsuites><testsuite>{skipped}</testsuite></testsuites>")
    assert gpu.tests_ran(path) == "no test ran: all 1 were skipped"
    path.write_text("<testsuites>")
    assert gpu.tests_ran(path).startswith("tests.xml cannot be read: ")
    assert gpu.tests_ran(tmp_path / "none.xml").startswith("none.xml cannot be read: ")


def test_goals_table() -> None:
    table = gpu_report.goals_table({"A100": ROWS})
    cells = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2].removesuffix(" |") for line in table[2:]}
    assert cells["rms_norm, add_rms_norm, 8192 x 8192 bf16"] == "0.91 of copy; 0.70 of copy (goal missed)"
    assert cells["rms_norm, 1 to 64 rows of 4096, in a graph"] == "2.9 us; not measured"
    assert cells["top-p 0.9 over 128 x 128,256 logits"] == "0.14 ms"
    assert cells["int8 linear, one row, 4096 x 14336"] == "infini fails: RuntimeError: a/b"
    assert cells["decode of the 1.1B shape, batch 1, a graph"] == "0.50 of the weights' limit, 10.0 times eager"
    assert cells["int4 linear, one row, 4096 x 14336"] == "not measured"


def test_the_page_has_the_table_of_the_results(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert gpu_report.with_measurements(page, gpu_report.kept_results()) == page
    assert "0.70 of copy (goal missed)" in gpu_report.with_measurements(page, {"A100": ROWS})
    assert "| case | goal | measured |" in gpu_report.with_measurements(page, gpu_report.kept_results(tmp_path))
    with pytest.raises(ValueError, match="must have one table"):
        gpu_report.with_measurements(page.replace("| goal |", "| found |"), {"A100": ROWS})


def test_results_are_kept_by_gpu(tmp_path: Path) -> None:
    """A later run replaces the cases that it has figures of."""
    rows = ROWS
    assert gpu_report.keep(rows, tmp_path) == tmp_path / "a100-sxm4.csv"
    later = [{**rows[0], "infini_us": "60"}, {**rows[1], "infini_us": ""}]
    gpu_report.keep(later, tmp_path)
    gpu_report.keep([{**rows[0], "gpu": "NVIDIA H200"}], tmp_path)
    kept = gpu_report.kept_results(tmp_path)
    assert [*kept] == ["NVIDIA A100-SXM4", "NVIDIA H200"]
    times = {row["case"]: row["infini_us"] for row in kept["NVIDIA A100-SXM4"]}
    assert times == {row["case"]: row["infini_us"] for row in ROWS if row["infini_us"]} | {rows[0]["case"]: "60"}
    header = gpu_report.goals_table(kept)[0]
    assert header == "| case | goal | NVIDIA A100-SXM4 | NVIDIA H200 |"


def test_report(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(XML)
    tests = gpu_report.read_tests(path)
    stages = [("tests", "FAILED", 81.6, "exit status 1"), ("racecheck", "not run", 0.0, "Device not supported")]
    text = gpu_report.report({"GPU": "a GPU"}, stages, tests, ROWS)
    assert "* GPU: a GPU\n" in text
    assert "| tests | FAILED | 82 | exit status 1 |\n" in text
    assert "1 passed, 3 failed, 1 skipped\n" in text
    assert "* `tests.test_cuda::test_b`: AssertionError: off\n" in text
    assert "| rms_norm 8192x8192 | 70.2 | 300 |" in text
    many = dataclasses.replace(tests, failures={f"test_{i}": "bad" for i in range(100)})
    assert "* and 40 more in tests.xml\n" in gpu_report.report({}, stages, many, [])
    empty = gpu_report.report({}, stages, gpu_report.Tests(skipped=9), [])
    assert "0 passed, 0 failed, 9 skipped: no test ran\n" in empty
    assert "## Tests" not in gpu_report.report({}, stages, None, [])
    ended = gpu_report.report({}, [("tests", "TIMED OUT", 200.0, "")], tests, [])
    assert "1 passed, 3 failed, 1 skipped; ended at the time limit: the tests that were running are counted" in ended


# ---- conftest.py: a lost GPU, and tests that hang ----

# Instead of torch: importing it takes seconds in each of the processes.
TORCH = """
class cuda:
    lost = False
    is_initialized = lambda: True
    def synchronize():
        if cuda.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\\nand more")
def manual_seed(seed):
    pass
"""
LOSING = """
import time
import pytest, torch

@pytest.mark.parametrize("number", range(6))
def test_one(number):
    if number == 1:
        torch.cuda.lost = True
        assert not "the kernel wrote out of bounds"
    assert not torch.cuda.lost
    if number == 3:
        time.sleep(60)
    assert number != 4, "an ordinary failure"
"""


@pytest.mark.full
def test_a_lost_gpu_and_a_hang_cost_one_test_each(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "test_losing.py").write_text(LOSING)
    xml = tmp_path / "tests.xml"
    pytest_ = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    xdist = ("-p", "xdist", "-n", "1", "--max-worker-restart", "5", f"--junitxml={xml}")
    environment = {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "INFINI_TEST_SECONDS": "3"}
    done = start(*pytest_, *xdist, str(tmp_path), **environment)
    tests = gpu_report.read_tests(xml)
    said = done.stdout + done.stderr
    assert tests.passed == 3, said
    messages = {name.partition("::")[2]: message for name, message in tests.failures.items()}
    assert sorted(messages) == ["test_one[1]", "test_one[3]", "test_one[4]"]
    assert messages["test_one[1]"] == "AssertionError: assert not 'the kernel wrote out of bounds'"
    assert "crashed while running" in messages["test_one[3]"]
    assert "an ordinary failure" in messages["test_one[4]"]
    assert "this process can use the GPU no more: CUDA error: an illegal memory access was encountered\n" in said
    assert "Timeout (0:00:03)!" in said and 'test_losing.py", line ' in said
