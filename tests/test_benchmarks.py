"""The benchmark scripts start, measure and write what they say; no time is judged here."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import torch_infini
from torch_infini import _cpu
from torch_infini._cpu import cpu_name
from torch_infini.testing.benchmark import results_of, write_csv

ROOT = Path(__file__).parents[1]


@dataclass
class Point:
    x: float
    y: float | None


def start(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script with the torch_infini of this checkout."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


def test_run(tmp_path: Path) -> None:
    out = tmp_path / "results" / "ops.csv"
    result = start("run.py", "--quick", "--ops", "rms_norm", "--dtypes", "bfloat16", "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert list(row) == [
        "op",
        "sample",
        "dtype",
        "threads",
        "infini_us",
        "infini_out_us",
        "eager_us",
        "compile_us",
        "ratio_to_eager",
        "ratio_to_compile",
        "gb_per_s",
        "limit",
        "share",
        "read_gb_per_s",
        "copy_gb_per_s",
        "note",
        "cpu",
        "capability",
    ]
    assert (row["op"], row["dtype"], row["threads"], row["note"]) == ("rms_norm", "bfloat16", "1", "")
    assert row["limit"]
    for name in ("infini_us", "infini_out_us", "eager_us", "compile_us", "ratio_to_eager", "ratio_to_compile", "share"):
        assert float(row[name]) > 0
    assert "rms_norm" in result.stdout and "share" in result.stdout


def test_c_abi(tmp_path: Path) -> None:
    out = tmp_path / "c-abi.csv"
    arguments = ("--c-abi", "--quick", "--ops", "Gemm,RMSNorm", "--dtypes", "float32", "--out", str(out))
    result = start("run.py", *arguments)
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        gemm, norm = csv.DictReader(file)
    assert (gemm["op"], norm["op"], norm["dtype"], norm["threads"]) == ("Gemm", "RMSNorm", "float32", "1")
    assert gemm["limit"].endswith(" GFLOP/s") and norm["limit"].endswith(" GB/s")
    for name in ("infini_us", "eager_us", "ratio_to_eager", "share"):
        assert float(gemm[name]) > 0 and float(norm[name]) > 0
    assert gemm["compile_us"] == "" and float(norm["compile_us"]) > 0


def test_quantised(tmp_path: Path) -> None:
    out = tmp_path / "quantised.csv"
    result = start("run.py", "--quantised", "--quick", "--dtypes", "bfloat16", "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["op"], row["rows"], row["dtype"], row["quantize_x"]) for row in rows] == [
        ("linear_int8", "1", "bfloat16", "False"),
        ("linear_int8", "8", "bfloat16", "True"),
        ("linear_int4", "1", "bfloat16", "False"),
        ("linear_int4", "8", "bfloat16", "True"),
    ]
    for row in rows:
        for name in ("infini_us", "torch_us", "dense_us", "ratio_to_torch", "ratio_to_dense", "read_gb_per_s", "share"):
            assert float(row[name]) > 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--ops", "no_such_op"], "there is no op 'no_such_op'"), (["--dtypes", "float5"], "'float5' is no dtype")],
)
def test_run_refuses_unknown_names(arguments: list[str], text: str) -> None:
    result = start("run.py", *arguments)
    assert result.returncode == 2 and text in result.stderr


@pytest.mark.parametrize(
    ("script", "option"), [("decode.py", "--layers"), ("compile.py", "--sites"), ("decompose.py", "--out")]
)
def test_models_start(script: str, option: str) -> None:
    pytest.importorskip("transformers")
    result = start(script, "--help")
    assert result.returncode == 0 and option in result.stdout, result.stderr


def test_families(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from torch_infini.testing import rounding_limit, sums_of
    from torch_infini.testing.patched_families import FAMILIES, logits, prompts

    out = tmp_path / "families.csv"
    result = start("families.py", "--quick", "--families", "Qwen3,Mixtral", "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        qwen, mixtral = csv.DictReader(file)
    assert (qwen["family"], qwen["left"], qwen["tokens_equal"]) == ("Qwen3", "0", "True")
    assert (mixtral["left"], mixtral["tokens_equal"]) == ("2", "True")
    for row in (qwen, mixtral):
        model = next(family for family in FAMILIES if family.name == row["family"]).build()
        limit = rounding_limit(logits(model, prompts()), *sums_of(model.config))
        assert float(row["ratio"]) > 0 and 0 < float(row["float32_difference"]) < limit


def test_host_cost(tmp_path: Path) -> None:
    out = tmp_path / "host-cost.csv"
    result = start("host_cost.py", "--ops", "rms_norm,add", "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["op"] for row in rows] == ["rms_norm", "add"]
    names = ("functional_us", "out_us", "replayed_us", "aten_mul_us")
    assert all(float(row[name]) > 0 for row in rows for name in names)
    assert all(float(row["replayed_us"]) < float(row["functional_us"]) for row in rows)


def test_collectives(tmp_path: Path) -> None:
    out = tmp_path / "collectives.csv"
    result = start("collectives.py", "--quick", "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["bytes"], row["ranks"]) for row in rows] == [("8", "2"), ("8192", "2"), ("1048576", "2")]
    for row in rows:
        times = ("torch_us", "async_us", "op_us", "infini_us", "gloo_us", "copy_us", "share_of_copy")
        assert all(float(row[name]) > 0 for name in times)
    assert out.with_suffix(".svg").read_text().count("<polyline") == 4


def test_patched_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "patched-ranks.csv"
    result = start("patched_ranks.py", "--quick", "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["world"] for row in rows] == ["one process", "two ranks, gloo", "two ranks, infiniccl"]
    for row in rows:
        assert all(float(row[f"{form}_tokens_per_second"]) > 0 for form in ("transformers", "patched"))


def test_steps(tmp_path: Path) -> None:
    out = tmp_path / "steps.csv"
    result = start("steps.py", "--quick", "--threads", "1,2", "--steps", "4", "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    cases = [("bfloat16", "decode"), ("int4", "prefill")]
    assert [(row["weights"], row["phase"], row["threads"]) for row in rows] == [
        (*case, count) for case in cases for count in ("1", "2")
    ]
    for row in rows:
        assert float(row["products_ms"]) > 0 and float(row["attention_ms"]) > 0 and float(row["step_ms"]) > 0
        assert (row["weights_gb_per_s"] != "") == (row["phase"] == "decode")
    assert "products" in result.stdout


def test_step_profile(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "step-profile.csv"
    arguments = ["--shape", "tiny", "--weights", "dense", "--weights", "int4", "--batch", "1,2", "--steps", "4"]
    result = start("step_profile.py", *arguments, "--folder", str(tmp_path), "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["weights"], row["batch"]) for row in rows] == [
        (weights, batch) for weights in ("dense", "int4") for batch in ("1", "2")
    ]
    names = ("step", "linear", "attention", "norms_rope_activations", "sampling", "replay", "sampler", "outside")
    assert all(float(row[f"{name}_ms"]) > 0 for row in rows for name in names)
    assert result.stdout.count("\n") == 1 + len(rows)


def test_packed(tmp_path: Path) -> None:
    out = tmp_path / "packed.csv"
    result = start("packed.py", "--quick", "--threads", "1", "--rounds", "1", "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["rows"], row["threads"]) for row in rows] == [("1", "1"), ("20", "1")]
    assert all(float(row[name]) > 0 for row in rows for name in ("packed_ms", "linear_ms", "torch_ms", "share"))


def test_kv_cache(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    short = ["--windows", "2", "--tokens", "24", "--rounds", "2", "--quick", "--out", str(tmp_path)]
    result = start("kv_cache.py", "--error", "demo", "--speed", *short)
    assert result.returncode == 0, result.stderr
    with (tmp_path / "kv-cache-error.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["dtype"], row["cache"]) for row in rows] == [
        ("float32", "float32"),
        ("float32", "int8"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "int8"),
    ]
    assert float(rows[0]["logits_rms"]) == 0
    assert all(0 < float(row["logits_rms"]) < 0.02 for row in rows[1:])
    with (tmp_path / "kv-cache-speed.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["speedup"]) > 0


def test_generate(tmp_path: Path) -> None:
    """The harness, with the two engines that need no environment of their own."""
    pytest.importorskip("transformers")
    out = tmp_path / "generate.csv"
    cells = "--cells decode-16x8,prefill-512,generate --shapes tiny --threads 1 --dtypes bfloat16 --rounds 1 --steps 2"
    peers = ("--peers", "eager,infini", "--folder", str(tmp_path / "peers"), "--out", str(out))
    result = start("generate.py", *cells.split(), *peers)
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["cell"], row["engine"]) for row in rows] == [
        (cell, engine) for cell in ("decode-16x8", "prefill-512", "generate") for engine in ("eager", "infini")
    ]
    for row in rows:
        assert float(row["tokens_per_s"]) > 0 and 0 < float(row["logit_error"]) < 0.02 and row["note"] == ""
        assert bool(row["share_of_limit"]) == (row["cell"] != "prefill-512")
    assert out.with_suffix(".svg").read_text().count("<rect") == 1 + len(rows)


def test_generate_with_the_engine(tmp_path: Path) -> None:
    """Our own engine in every kind of cell; many requests at once beside it."""
    pytest.importorskip("transformers")
    out = tmp_path / "serve.csv"
    cells = "--cells decode-16x8,prefill-512,generate,serve-32,prefix-1024,read --shapes tiny --threads 1 --rounds 1"
    peers = (
        "--dtypes",
        "int8",
        "--peers",
        "eager bfloat16,engine",
        "--steps",
        "2",
        "--folder",
        str(tmp_path / "peers"),
    )
    result = start("generate.py", *cells.split(), *peers, "--out", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["cell"], row["engine"]) for row in rows] == [
        ("decode-16x8", "engine"),
        ("prefill-512", "engine"),
        ("generate", "engine"),
        ("serve-32", "eager bfloat16"),
        ("serve-32", "engine"),
        ("prefix-1024", "engine, other prefix"),
        ("prefix-1024", "engine, same prefix"),
        ("read", "engine"),
        ("read", "engine, plain read"),
        ("read", "engine, plain read, large pages"),
    ]
    for row in rows:
        assert float(row["seconds"]) > 0 and 0 < float(row["logit_error"]) < 0.1 and row["note"] == ""
        assert bool(row["tokens_per_s"]) == (row["cell"] not in ("prefix-1024", "read"))
        assert bool(row["engine_ratio"]) == (row["cell"] != "prefix-1024")
    assert "32 requests at once" in out.with_suffix(".svg").read_text()


def test_generate_tells_why_there_is_no_number(tmp_path: Path) -> None:
    """Errors in a worker, and its end, come back as words."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import generate
    finally:
        sys.path.pop(0)
    process = generate.Process(generate.PEERS["eager"], tmp_path, 1, tmp_path / "log", patience=120)
    with pytest.raises(generate.Failure, match="load: FileNotFoundError"):
        process.ask("load", folder="no_such_folder", variant="eager", dtype="bfloat16", threads=1)
    process.process.kill()
    with pytest.raises(generate.Failure, match="decode: the worker ended with status -9"):
        process.ask("decode", batch=1, context=1, steps=1)


def test_llama_cpp_where_there_is_amx() -> None:
    """Its quantised weights crash there: it is built without, in an environment of its own, and results say so."""
    pytest.importorskip("transformers")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import generate
    finally:
        sys.path.pop(0)
    plain, without = generate.llama_cpp(amx=False), generate.llama_cpp(amx=True)
    assert (plain.variables, plain.note) == ({}, "") and plain.name != without.name
    assert "-mno-amx-int8" in without.variables["CMAKE_ARGS"] and "without AMX" in without.note


def test_results_name_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every CSV says which CPU and kernels it is of; each kind of CPU has a folder."""
    file = tmp_path / "new" / "rows.csv"
    write_csv(file, [Point(1.23456, None)], Point)
    with file.open(newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert row == {"x": "1.235", "y": "", "cpu": cpu_name(), "capability": torch_infini.cpu_capability()}
    for vendor, family, model, name in (
        ("AuthenticAMD", 26, 2, "Zen 5"),
        ("AuthenticAMD", 25, 17, "Zen 4"),
        ("AuthenticAMD", 25, 1, "Zen 3"),
        ("GenuineIntel", 6, 143, "Sapphire Rapids"),
        ("GenuineIntel", 6, 200, "Intel"),
        ("CyrixInstead", 5, 4, "CyrixInstead"),
    ):
        known = {"vendor_id": vendor, "cpu family": str(family), "model": str(model), "model name": "A CPU"}
        monkeypatch.setattr(_cpu, "facts", lambda known=known: known)
        assert (_cpu.microarchitecture(), _cpu.cpu_name()) == (name, f"A CPU, {name}")
    hidden = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "167", "flags": "fpu amx_bf16 amx_tile"}
    monkeypatch.setattr(_cpu, "facts", lambda: hidden)
    assert _cpu.folder_name() == "xeon-amx"
    monkeypatch.setattr(_cpu, "facts", lambda: {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "97"})
    assert results_of(str(tmp_path / "run.py")) == tmp_path / "results" / "zen-4"


def test_gpu(tmp_path: Path) -> None:
    """The GPU's script, on what is here: shapes, peers, the static cache of the models."""
    out = tmp_path / "gpu.csv"
    result = start("gpu.py", "--quick", "--csv", str(out))
    assert result.returncode == 0, result.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["case"].split()[0] for row in rows} >= {"rms_norm", "swiglu", "random_sample", "linear_int4", "decode"}
    assert not [row for row in rows if " fails" in row["note"]]
    assert all(float(row["infini_us"]) > 0 and float(row["share"]) > 0 for row in rows)
    refused = start("gpu.py", "--only", "rms")
    assert refused.returncode == 2 and "--only must name some of norms, " in refused.stderr


@pytest.fixture(scope="module")
def gpu() -> Any:
    """benchmarks/gpu.py, imported: what it plans needs no GPU."""
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", ROOT / "benchmarks" / "gpu.py")
    assert spec and spec.loader
    module = sys.modules["benchmarks_gpu"] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        del sys.modules["benchmarks_gpu"]


def cases_of(gpu: Any) -> list[Any]:
    return [case for name in gpu.CASES for case in gpu.CASES[name](False)]


def test_gpu_plans_the_goals_first(gpu: Any) -> None:
    """All cases fit into the default time with torch.compile to spare; with little of it, those with goals go first."""
    cases = cases_of(gpu)
    everything = gpu.planned(cases, gpu.SECONDS - 20)
    assert gpu.SECONDS <= 480 and not everything.left_out
    assert sum(case.seconds for case in cases) < gpu.SECONDS - 150
    goals = [case for case in cases if case.priority == 0]
    assert {case.name for case in goals} > {case.name for case in cases if case.us or case.share}
    short = gpu.planned(cases, sum(case.seconds for case in goals) + 1)
    assert [case.name for case in short.cases] == [case.name for case in goals]
    assert len(short.cases) + len(short.left_out) == len(cases)
    assert not gpu.planned(cases, 0).cases


def test_gpu_has_the_cases_of_the_page(gpu: Any) -> None:
    """Each goal of docs/gpu.md is that of a case, and each case with a goal is on the page, but for plain linear."""
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        goals = importlib.import_module("gpu_report").GOALS
    finally:
        sys.path.remove(str(ROOT / ".ci"))
    by_name = {case.name: case for case in cases_of(gpu)}
    shown = {name for _, _, names in goals for name in names}
    assert shown <= by_name.keys()
    assert {name for name, case in by_name.items() if case.priority == 0} - shown == {"linear 1x4096x14336"}
    for _, goal, names in goals:
        for name in names:
            stated = gpu.goal_of(by_name[name]).replace("300 us", "0.3 ms")
            assert goal == stated or (name.startswith("decode") and "of the weights' limit" in goal)
    wanted = {f"linear {rows}x4096x14336" for rows in (32, 64, 128, 256, 512)}
    wanted |= {f"linear_int{bits} {rows}x4096x14336" for bits in (4, 8) for rows in (16, 64, 512, 2048)}
    wanted |= {"paged_attention 64x4096 32/8x128 int8 cache", "paged_attention 1x2048 32/8x128, capacity 131072"}
    wanted |= {"attention 8192 queries, 8192 keys, 32/8x128", "random_sample 1x128256 top-p 0.9"}
    assert wanted <= by_name.keys()


def test_gpu_data_exceeds_the_cache(gpu: Any) -> None:
    l2 = 60 * 2**20
    for size in (16 * 1024, 4 * 2**20, l2, 2 * l2, 10 * l2):
        assert gpu.sets_for(size, l2) * size >= 2 * l2
    assert gpu.sets_for(10 * l2, l2) == 1
    assert gpu.sets_for(0, l2) == gpu.sets_for(1, l2) == gpu.MOST_SETS


def test_gpu_goes_on_after_a_failure(gpu: Any, tmp_path: Path) -> None:
    """A case that fails is a row; where the GPU is lost the next process goes on behind it; late cases are told."""
    machine = gpu.Machine("a GPU", "1", 4e12, 1)
    path = tmp_path / "gpu.csv"

    def fails(*_: Any) -> Any:
        raise RuntimeError("misaligned address\nand more")

    def works(case: Any, machine: Any, rounds: int, with_compile: bool) -> Any:
        return gpu.row_of(case, machine, infini_us=2.5, note="with compile" if with_compile else "")

    cases = [
        gpu.Case("a", works, compile_seconds=400),
        gpu.Case("b", fails),
        gpu.Case("c", works, compile_seconds=None),
    ]
    cases += [gpu.Case("d", works, compile_seconds=500), gpu.Case("too long", works, seconds=1000)]
    plan = gpu.Plan(cases[:4], [gpu.Case("e", works)])
    save = lambda rows: write_csv(path, rows, gpu.Row)
    rows: list[Any] = []
    deadline = time.monotonic() + 600
    assert gpu.run_cases(plan, machine, 1, deadline, save, rows, lost=lambda: False) is False
    assert [(row.case, row.infini_us, row.note) for row in rows] == [
        ("a", 2.5, "with compile"),
        ("b", None, "infini fails: RuntimeError: misaligned address"),
        ("c", 2.5, ""),
        ("d", 2.5, "with compile"),
        ("e", None, "not run: no time for it"),
    ]
    assert gpu.read_rows(path) == rows
    rows = []
    assert (
        gpu.run_cases(gpu.Plan([*cases[3:], cases[0]]), machine, 1, deadline, save, rows, lost=lambda: False) is False
    )
    assert [(row.case, row.note) for row in rows] == [
        ("d", ""),
        ("too long", "not run: the time was up"),
        ("a", "with compile"),
    ]
    rows = []
    assert gpu.run_cases(plan, machine, 1, deadline, save, rows, lost=lambda: True) is True
    assert [row.case for row in gpu.read_rows(path)] == ["a", "b"]


def test_gpu_goes_on_in_a_new_process(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the GPU is lost, the script starts itself for what has no row yet; the failure is its exit status."""
    path, started = tmp_path / "gpu.csv", []
    work = lambda fail: lambda case, machine, *_: 1 / 0 if fail else gpu.row_of(case, machine, infini_us=1.0)
    norms = lambda quick: [gpu.Case("first", work(True)), gpu.Case("second", work(False))]
    monkeypatch.setattr(gpu, "CASES", {"norms": norms})
    monkeypatch.setattr(gpu, "look_at_machine", lambda quick: gpu.Machine("a GPU", "1", 4e12, 1))
    lost = {"lost": True}
    monkeypatch.setattr(gpu.run_cases, "__defaults__", (lambda: lost["lost"],))
    monkeypatch.setattr(gpu.os, "execv", lambda program, command: started.append(command))
    gpu.main(["--quick", "--csv", str(path)])
    ((_, script, *arguments),) = started
    assert Path(script) == ROOT / "benchmarks" / "gpu.py" and "--resume" in arguments and "--quick" in arguments
    assert [row.case for row in gpu.read_rows(path)] == ["first"]
    lost["lost"] = False
    assert gpu.main(arguments) == 1
    assert [(row.case, row.infini_us) for row in gpu.read_rows(path)] == [("first", None), ("second", 1.0)]
