"""The benchmark scripts start, measure and write what they say; no time is judged here."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torch_infini
from torch_infini._core import cpu
from torch_infini._core.bandwidth import read_bandwidth
from torch_infini.ops._blocks import KINDS
from torch_infini.testing.benchmark import interleaved_medians
from torch_infini.weights import best, served

ROOT = Path(__file__).parents[1]
PROVENANCE = ["cpu", "capability", "torch", "commit", "command"]
Rows = list[dict[str, str]]


@pytest.fixture(scope="module", autouse=True)
def path() -> Iterator[None]:
    """The scripts import each other by their names."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    return importlib.import_module("harness")


@pytest.fixture(scope="module")
def engines() -> ModuleType:
    """benchmarks/peers/engines.py."""
    return importlib.import_module("peers.engines")


Output = pytest.CaptureFixture[str]


def start(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, with the torch_infini of this checkout."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


def called(script: str, *arguments: str) -> int:
    """The exit status of a script that runs here: to import torch takes longer than most of them.

    What they hold their times against is measured on 8 MiB here.
    """
    module = importlib.import_module(script.removesuffix(".py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(ROOT / "benchmarks" / script), *arguments])
        for name in {path.stem for path in (ROOT / "benchmarks").glob("*.py")} & sys.modules.keys():
            if hasattr(sys.modules[name], "read_bandwidth"):
                patch.setattr(sys.modules[name], "read_bandwidth", lambda *_, **__: read_bandwidth(0.01, 8))
        try:
            return int(module.main() or 0)
        except SystemExit as end:
            return int(end.code or 0)


@pytest.fixture
def measured(harness: Any, capsys: Output) -> Callable[..., Rows]:
    """The rows that a command writes to `out`, a file; in all of them these columns are above 0."""

    def run(out: Path, command: str, positive: str = "", alone: bool = False) -> Rows:
        script, *arguments = [*shlex.split(command), "--out", str(out)]
        if alone:
            result = start(script, *arguments)
            status, stdout, stderr = result.returncode, result.stdout, result.stderr
        else:
            status = called(script, *arguments)
            stdout, stderr = capsys.readouterr()
        assert status == 0, stderr
        rows: Rows = harness.read_csv(out)
        assert f"{len(rows)} rows in {out}" in stdout and list(rows[0])[0] in stdout
        assert list(rows[0])[-len(PROVENANCE) :] == PROVENANCE and all(row["threads"] for row in rows)
        assert all(float(row[name]) > 0 for row in rows for name in positive.split())
        return rows

    return run


def values(rows: Rows, *names: str) -> list[tuple[str, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


@pytest.mark.full
def test_run(measured: Any, tmp_path: Path) -> None:
    out = tmp_path / "results" / "ops.csv"
    times = "infini_us infini_out_us eager_us compile_us ratio_to_eager ratio_to_compile"
    command = "run.py --quick --ops rms_norm --dtypes bfloat16 --no-compile"  # test_c_abi compiles
    (row,) = measured(
        out,
        command,
        "infini_us infini_out_us eager_us ratio_to_eager share gb_per_s read_gb_per_s copy_gb_per_s",
        alone=True,
    )
    columns = f"op sample dtype threads {times} gb_per_s limit share read_gb_per_s copy_gb_per_s note"
    assert list(row) == [*columns.split(), *PROVENANCE]
    assert values([row], "op", "dtype", "threads", "note") == [("rms_norm", "bfloat16", "1", "")]
    assert row["limit"] and row["compile_us"] == row["ratio_to_compile"] == ""
    assert row["command"].startswith("python benchmarks/run.py --quick --ops rms_norm ")
    again = measured(out, "run.py --quick --ops rms_norm,silu --dtypes bfloat16 --no-compile --resume")
    assert again[0] == row and values(again[1:], "op", "compile_us") == [("silu", "")]


@pytest.mark.full
def test_c_abi(measured: Any, tmp_path: Path) -> None:
    command = "run.py --c-abi --quick --ops Gemm,RMSNorm --dtypes float32"
    gemm, norm = measured(tmp_path / "c.csv", command, "infini_us eager_us ratio_to_eager share")
    assert (gemm["op"], norm["op"], norm["dtype"], norm["threads"]) == ("Gemm", "RMSNorm", "float32", "1")
    assert gemm["limit"].endswith(" GFLOP/s") and norm["limit"].endswith(" GB/s")
    assert gemm["compile_us"] == ""
    assert float(norm["compile_us"]) > 0 and float(norm["ratio_to_compile"]) > 0


@pytest.mark.full
def test_quantized(measured: Any, tmp_path: Path) -> None:
    positive = "infini_us torch_us dense_us ratio_to_torch ratio_to_dense read_gb_per_s share"
    command = "run.py --quantized --quick --dtypes bfloat16 --ops "
    rows = measured(tmp_path / "q.csv", command + "linear_int8,linear_int4,linear_group8,linear_table4", positive)
    assert values(rows, "op", "rows", "dtype", "quantize_x") == [
        (op, *case)
        for op in ("linear_int8", "linear_int4")
        for case in (("1", "bfloat16", "False"), ("8", "bfloat16", "True"))
    ] + [(op, "8", "bfloat16", "True") for op in ("linear_group8", "linear_table4")]
    blocks = measured(tmp_path / "b.csv", command + "linear_blocks", "infini_us dense_us ratio_to_dense share")
    assert values(blocks, "op", "rows", "torch_us") == [(f"linear_blocks {kind}", "1", "") for kind in KINDS]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("run.py --ops no_such_op", "there is no op 'no_such_op'; there are "),
        ("run.py --c-abi --ops rms_norm", "there is no op 'rms_norm'; there are Gemm, "),
        ("run.py --dtypes float5", "'float5' is no dtype"),
        ("decode.py --threads 0", "must be an integer of at least 1, got '0'"),
        ("families.py --families Eliza", "there is no family 'Eliza'"),
        ("gpu.py --only rms", "there is no group of cases 'rms'; there are norms, "),
    ],
)
def test_bad_arguments(command: str, text: str, capsys: Output) -> None:
    pytest.importorskip("transformers")
    assert called(*command.split()) == 2 and text in capsys.readouterr().err


SCRIPTS = [path.name for path in sorted((ROOT / "benchmarks").glob("*.py")) if "new_parser(" in path.read_text()]


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "harness.py"])
def test_scripts_start(script: str, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """As the main module; decompose.py and compile.py are not run: they take minutes, and half a minute of Inductor."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "benchmarks" / script), run_name="__main__")
    assert end.value.code == 0 and "--out" in capsys.readouterr().out


@pytest.mark.full
def test_decode(measured: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = "decode.py --quick --layers 1 --tokens 2 --rounds 1 --threads 2"
    rows = measured(tmp_path / "decode.csv", command, "tokens_per_s ratio_to_unpatched resident_mib")
    phases = ("decode at 16", "decode at 512", "prefill")
    assert values(rows, "phase", "variant", "threads") == [
        (phase, variant, "2") for phase in phases for variant in ("unpatched", "patched", "packed")
    ]
    assert all(bool(row["weights_gb_per_s"]) == (row["phase"] != "prefill") for row in rows)


@pytest.mark.full
def test_families(measured: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from support.rounding import rounding_limit, sums_of
    from torch_infini.testing.patched_families import FAMILIES, logits, prompts

    command = "families.py --quick --families Qwen3,Mixtral"
    rows = measured(tmp_path / "families.csv", command, "ratio float32_difference")
    assert values(rows, "family", "left", "tokens_equal") == [("Qwen3", "0", "True"), ("Mixtral", "0", "True")]
    for row in rows:
        model = next(family for family in FAMILIES if family.name == row["family"]).build()
        assert float(row["float32_difference"]) < rounding_limit(logits(model, prompts()), *sums_of(model.config))


@pytest.mark.full
def test_host_cost(measured: Any, tmp_path: Path) -> None:
    positive = "functional_us out_us replayed_us aten_mul_us aten_mul_out_us"
    rows = measured(tmp_path / "host-cost.csv", "host_cost.py --ops rms_norm,add", positive)
    assert values(rows, "op") == [("rms_norm",), ("add",)]
    assert all(float(row["replayed_us"]) < float(row["functional_us"]) for row in rows)


@pytest.mark.full
def test_record(measured: Any, tmp_path: Path) -> None:
    rows = measured(tmp_path / "record.csv", "record.py --hidden 64 --rows 1", "record_us eager_us ratio_to_eager")
    assert values(rows, "ops", "hidden", "rows") == [("infini", "64", "1"), ("torch", "64", "1")]
    assert float(rows[0]["program_us"]) > 0 and rows[1]["program_us"] == ""


@pytest.mark.full
def test_infinilm(measured: Any, tmp_path: Path) -> None:
    """In a process of its own: imported here, the script would stand in the way of the name infinilm."""
    pytest.importorskip("transformers")
    positive = "infinilm_tokens_per_s infini_tokens_per_s ratio"
    rows = measured(tmp_path / "infinilm.csv", "infinilm.py --quick --rounds 1", positive, alone=True)
    cells = ("decode-16", "decode-16 async", "serve-32", "serve-32 async")
    assert values(rows, "shape", "cell", "threads") == [("tiny", cell, "1") for cell in cells]


@pytest.mark.full
def test_collectives(measured: Any, tmp_path: Path) -> None:
    out = tmp_path / "collectives.csv"
    positive = "torch_us async_us op_us infini_us gloo_us ratio_to_gloo copy_us share_of_copy"
    rows = measured(out, "collectives.py --quick", positive)
    assert values(rows, "bytes", "ranks") == [("8", "2"), ("8192", "2"), ("1048576", "2")]
    assert out.with_suffix(".svg").read_text().count("<polyline") == 4


@pytest.mark.full
def test_patched_ranks(measured: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    positive = "transformers_tokens_per_second patched_tokens_per_second"
    rows = measured(tmp_path / "patched-ranks.csv", "patched_ranks.py --quick", positive)
    worlds = [("one process", "2"), ("two ranks, gloo", "1"), ("two ranks, infiniccl", "1")]
    assert values(rows, "world", "threads") == worlds


@pytest.mark.full
def test_steps(measured: Any, tmp_path: Path) -> None:
    command = "steps.py --quick --threads 1,2 --steps 4"
    rows = measured(tmp_path / "steps.csv", command, "products_ms attention_ms step_ms")
    cases = [("bfloat16", "decode"), ("int4", "prefill")]
    assert values(rows, "weights", "phase", "threads") == [(*case, count) for case in cases for count in ("1", "2")]
    assert all((row["weights_gb_per_s"] != "") == (row["phase"] == "decode") for row in rows)


@pytest.mark.full
def test_serving(measured: Any, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    positive = "generate_tokens_per_s streams_tokens_per_s served_tokens_per_s ratio ttft_ms itl_ms"
    rows = measured(tmp_path / "serving.csv", "serving.py --quick --threads 1", positive)
    assert values(rows, "shape", "clients", "threads") == [("tiny", "4", "1")]


@pytest.mark.full
def test_serving_peers(measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With this package's server in the place of others, which are not installed for tests; one cannot start."""
    pytest.importorskip("aiohttp")
    servers = importlib.import_module("peers.servers")
    same = replace(servers.SERVERS["torch_infini"], version="again")
    monkeypatch.setitem(servers.SERVERS, "llama-server", same)
    monkeypatch.setitem(servers.SERVERS, "vllm", replace(same, command=("-c", "raise SystemExit('no such model')")))
    out = tmp_path / "serving-peers.csv"
    command = f"serving_peers.py --quick --threads 1 --peers llama-server,vllm --folder {tmp_path}"
    rows = measured(out, command)
    names = ["torch_infini", "llama-server", "vllm"]
    assert values(rows, "clients", "server") == [(clients, name) for clients in ("1", "4") for name in names]
    for row in rows:
        assert ("no such model" in row["note"]) == (row["server"] == "vllm") != bool(row["tokens_per_s"])
        assert (float(row["infini_ratio"]) > 0) if row["tokens_per_s"] else row["infini_ratio"] == ""
    # A file that has everything is only read.
    assert called(*shlex.split(command), "--out", str(out), "--resume") == 0
    assert importlib.import_module("harness").read_csv(out) == rows
    markdown = importlib.import_module("table").TABLES["serving_peers"](tmp_path)
    assert markdown.startswith("| model, clients, threads | torch_infini | llama-server | vLLM | torch_infini to")
    assert markdown.count("| tiny, ") == 2 and markdown.count("| - |") == 2


def test_a_server_that_makes_other_numbers_of_tokens_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    serving, failure = importlib.import_module("serving"), importlib.import_module("peers.engines").Failure
    results = importlib.import_module("torch_infini.commands.load.results")

    async def run_load(target: Any, prompts: list[Any], **more: Any) -> tuple[Any, Any]:
        done = [results.Result(at, output_tokens=made) for at, made in enumerate((64, 12))]
        return target, results.Summary(done, 1.0)

    monkeypatch.setattr(serving, "run_load", run_load)
    with pytest.raises(failure, match="has 12 tokens instead of 64"):
        serving.over_http("http://127.0.0.1:1", serving.random_prompts(2, 4, 64, 0, 100))


def test_answers_that_are_read_at_once_have_no_gaps() -> None:
    pytest.importorskip("aiohttp")
    medians = importlib.import_module("serving").medians
    assert medians([0.25, 0.5, 1.0], []) == {"ttft_ms": 500.0, "itl_ms": 0.0}
    assert medians([0.5], [0.25, 0.5, 1.0]) == {"ttft_ms": 500.0, "itl_ms": 500.0}


def test_the_ratio_of_servers_is_of_rounds() -> None:
    pytest.importorskip("aiohttp")
    peers = importlib.import_module("serving_peers")

    def rates(*values: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": value, "ttft_ms": 1.0, "itl_ms": 1.0} for value in values]

    rounds = {"torch_infini": rates(10, 20, 30), "a": rates(5, 10, 10), "b": rates(2, 40, 15)}
    assert peers.summed_up("torch_infini", rounds) == {
        "tokens_per_s": 20,
        "ttft_ms": 1,
        "itl_ms": 1,
        "infini_ratio": 2,  # of 10 / 5, 20 / 40 and 30 / 15
    }
    assert peers.summed_up("a", rounds)["infini_ratio"] == 2
    assert "infini_ratio" not in peers.summed_up("a", {"a": rounds["a"]})


@pytest.mark.full
def test_step_profile(measured: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = "step_profile.py --shape tiny --weights dense --weights int4 --batch 1,2 --steps 4 --folder"
    parts = ("step", "linear", "attention", "norms_rope_activations", "sampling", "replay", "sampler", "outside")
    positive = " ".join(f"{name}_ms" for name in parts)
    rows = measured(tmp_path / "step-profile.csv", f"{command} {tmp_path}", positive)
    assert values(rows, "weights", "batch") == [(w, batch) for w in ("dense", "int4") for batch in ("1", "2")]


@pytest.mark.full
def test_packed(measured: Any, tmp_path: Path) -> None:
    command = "packed.py --quick --threads 1 --rounds 1"
    rows = measured(tmp_path / "packed.csv", command, "packed_ms linear_ms torch_ms share")
    assert values(rows, "rows", "threads") == [("1", "1"), ("20", "1")]


def test_kv_cache(harness: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    command = "kv_cache.py --error demo --speed --windows 2 --tokens 24 --rounds 2 --quick --out"
    assert called(*command.split(), str(tmp_path)) == 0
    rows = harness.read_csv(tmp_path / "kv-cache-error.csv")
    floats = ("float32", "bfloat16")
    assert values(rows, "dtype", "cache") == [(dtype, cache) for dtype in floats for cache in (dtype, "int8")]
    assert float(rows[0]["logits_rms"]) == 0
    assert all(0 < float(row["logits_rms"]) < 0.02 for row in rows[1:])
    (row,) = harness.read_csv(tmp_path / "kv-cache-speed.csv")
    assert float(row["speedup"]) > 0


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where generate.py keeps a checkpoint and its reference."""
    return tmp_path_factory.mktemp("peers")


@pytest.fixture
def unbuildable(engines: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives a peer an environment that pip cannot make."""

    def let(peer: str) -> None:
        broken = engines.Environment("broken", (("install", "--no-index", "no-such-package"),), "import nothing")
        monkeypatch.setitem(engines.PEERS, peer, replace(engines.PEERS[peer], environment=broken))

    return let


@pytest.mark.full
def test_generate(measured: Any, tmp_path: Path, peers: Path) -> None:
    """The processes of the engines, with the two that need no environment of their own."""
    pytest.importorskip("transformers")
    out = tmp_path / "generate.csv"
    cells = "--cells decode-16x8,prefill-512,generate --shapes tiny --threads 1 --dtypes bfloat16 --rounds 1 --steps 2"
    command = f"generate.py {cells} --peers eager,infini --folder {peers}"
    rows = measured(out, command, "tokens_per_s logit_error")
    assert values(rows, "cell", "engine", "note") == [
        (cell, engine, "") for cell in ("decode-16x8", "prefill-512", "generate") for engine in ("eager", "infini")
    ]
    for row in rows:
        assert float(row["logit_error"]) < 0.02 and bool(row["share_of_limit"]) == (row["cell"] != "prefill-512")
    assert out.with_suffix(".svg").read_text().count("<rect") == 1 + len(rows)


@pytest.mark.full
def test_generate_with_the_engine(measured: Any, tmp_path: Path, peers: Path) -> None:
    """Our own engine in every kind of cell; many requests at once beside it."""
    pytest.importorskip("transformers")
    out = tmp_path / "serve.csv"
    cells = "--cells decode-16x8,prefill-512,generate,serve-32,prefix-1024,read --shapes tiny --threads 1 --rounds 1"
    command = f"generate.py {cells} --steps 2 --dtypes int8 --folder {peers} --peers 'eager bfloat16,engine'"
    rows = measured(out, command, "seconds logit_error")
    assert values(rows, "cell", "engine") == [
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
        assert float(row["logit_error"]) < 0.1 and row["note"] == ""
        assert bool(row["tokens_per_s"]) == (row["cell"] not in ("prefix-1024", "read"))
        assert bool(row["engine_ratio"]) == (row["cell"] != "prefix-1024")
    assert "32 requests at once" in out.with_suffix(".svg").read_text()


@pytest.mark.full
def test_error_bits(measured: Any, tmp_path: Path, peers: Path, unbuildable: Callable[[str], None]) -> None:
    """Of the engine, what `weights=` may be; a peer that cannot be built has words in place of numbers."""
    pytest.importorskip("transformers")
    unbuildable("ik_llama.cpp")
    out = tmp_path / "error-bits.csv"
    rows = measured(out, f"error_bits.py --shapes tiny --peers ik_llama.cpp,engine --folder {peers}")
    ours = {row["format"]: row for row in rows if row["engine"] == "engine"}
    assert tuple(ours) == served() and all(row["note"] == "" for row in ours.values())
    bits, errors = (
        {name: float(row[column]) for name, row in ours.items()} for column in ("bits_per_weight", "logit_error")
    )
    rows_of_weights, weights = 2 * 1024 + 512, 2 * 147456 + 65536  # two layers and the head
    stored = {"int8": 8, "group8": 8.5}[best("int8", "cpu").name]
    assert bits["int8"] == pytest.approx(stored + 32 * rows_of_weights / weights, abs=1e-3)
    assert 4.5 < bits["int4"] < 6 and errors["int8"] < errors["int4"] < 0.2
    theirs = [row for row in rows if row["engine"] == "ik_llama.cpp"]
    assert values(theirs, "bits_per_weight", "logit_error") == [("", "")] * 3
    assert all(row["note"].startswith("could not be installed: ") for row in theirs)
    drawing = out.with_suffix(".svg").read_text()
    assert drawing.count("<circle") == len(ours) + 3 and all(f">{name}<" in drawing for name in ours)


def test_names_in_a_plot_are_apart() -> None:
    """Whatever is there already, the nearest box that is free."""
    plot = importlib.import_module("plot")
    first = plot.free_box(100, 50, 30, [])
    assert first == (109, 44, 139, 56)
    second = plot.free_box(100, 50, 30, [first])
    third = plot.free_box(100, 50, 30, [first, second])
    assert second == (61, 44, 91, 56)
    assert not any(plot.overlap(a, b) for a, b in ((first, second), (first, third), (second, third)))


FAILING = """
import sys
sys.path.insert(0, {folder!r})
import protocol

class Failing(protocol.Worker):
    def load(self, folder, variant, dtype, threads):
        open(folder)

protocol.serve(Failing())
"""


def test_generate_tells_why_there_is_no_number(engines: Any, tmp_path: Path) -> None:
    """Errors in a worker, and its end, come back as words."""
    worker = tmp_path / "worker.py"
    worker.write_text(FAILING.format(folder=str(ROOT / "benchmarks" / "peers")))
    peer = engines.Peer(str(worker), {})
    process = engines.Process(peer, tmp_path, 1, tmp_path / "log", patience=120)
    with pytest.raises(engines.Failure, match="load: FileNotFoundError"):
        process.ask("load", folder="no_such_folder", variant="eager", dtype="bfloat16", threads=1)
    process.process.kill()
    with pytest.raises(engines.Failure, match="decode: the worker ended with status -9"):
        process.ask("decode", batch=1, context=1, steps=1)


def test_llama_cpp_where_there_is_amx(engines: Any) -> None:
    """Its quantized weights crash there: it is built without, in an environment of its own, and results say so."""
    plain, without = engines.llama_cpp(amx=False), engines.llama_cpp(amx=True)
    assert (plain.variables, plain.note) == ({}, "") and plain.name != without.name
    assert "-mno-amx-int8" in without.variables["CMAKE_ARGS"] and "without AMX" in without.note


def test_peers_have_their_files(engines: Any) -> None:
    """Their workers, and what their builds read."""
    scripts = {engines.WORKERS / peer.script for peer in engines.PEERS.values()}
    (include,) = re.findall("INCLUDE='(.*)'", engines.IK_LLAMA_CPP.variables["CMAKE_ARGS"])
    assert all(path.is_file() for path in (*scripts, Path(include)))


@pytest.mark.full
def test_generate_where_a_peer_cannot_be_built(
    measured: Any, tmp_path: Path, peers: Path, unbuildable: Callable[[str], None]
) -> None:
    """It stands in the CSV in words, in the first run and in the next one."""
    pytest.importorskip("transformers")
    unbuildable("OpenVINO")
    command = "generate.py --cells generate --shapes tiny --threads 1 --dtypes int8 --rounds 1 --peers OpenVINO"
    for _ in range(2):
        (row,) = measured(tmp_path / "generate.csv", f"{command} --folder {peers}")
        assert row["engine"] == "OpenVINO" and row["tokens_per_s"] == ""
        assert row["note"].startswith("could not be installed: ") and "no-such-package" in row["note"]


def test_names_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of CPU has a folder."""
    for vendor, family, model, name in (
        ("AuthenticAMD", 26, 2, "Zen 5"),
        ("AuthenticAMD", 25, 17, "Zen 4"),
        ("AuthenticAMD", 25, 1, "Zen 3"),
        ("GenuineIntel", 6, 143, "Sapphire Rapids"),
        ("GenuineIntel", 6, 200, "Intel"),
        ("CyrixInstead", 5, 4, "CyrixInstead"),
    ):
        known = {"vendor_id": vendor, "cpu family": str(family), "model": str(model), "model name": "A CPU"}
        monkeypatch.setattr(cpu, "facts", lambda known=known: known)
        assert (cpu.microarchitecture(), cpu.cpu_name()) == (name, f"A CPU, {name}")
    hidden = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "167", "flags": "fpu amx_bf16 amx_tile"}
    monkeypatch.setattr(cpu, "facts", lambda: hidden)
    assert cpu.folder_name() == "xeon-amx"
    monkeypatch.setattr(cpu, "facts", lambda: {"vendor_id": "AuthenticAMD", "cpu family": "25", "model": "97"})
    assert cpu.folder_name() == "zen-4"


def test_results(harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row says which CPU, kernels, torch and commit it is of, and by which command; None is an empty cell."""
    file = tmp_path / "new" / "rows.csv"
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "run.py"), "--out", str(ROOT / "my rows.csv")])
    with harness.Results(file, "x y z", {"driver": 1}) as results:
        results.add({"x": 1.23456, "z": None})
        assert harness.read_csv(file) == [
            {
                "x": "1.235",
                "y": "",
                "z": "",
                "threads": str(torch.get_num_threads()),
                "driver": "1",
                "cpu": cpu.cpu_name(),
                "capability": torch_infini.cpu_capability(),
                "torch": torch.__version__,
                "commit": harness.commit(),
                "command": "python benchmarks/run.py --out 'my rows.csv'",
            }
        ]  # before the run is over
        with pytest.raises(ValueError, match=r"rows.csv must have the columns \['x', .*\], got \['w'\]"):
            results.add({"x": 1, "w": 2})
        results.add({"x": "one", "y": True, "threads": 7})
    assert values(harness.read_csv(file), "x", "y", "threads")[1] == ("one", "True", "7")


def test_cases(harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases are measured with their numbers of threads; --resume leaves out those that the file has."""
    file, measured = tmp_path / "rows.csv", []

    def measure(name: str) -> Rows:
        measured.append((name, torch.get_num_threads(), torch.is_grad_enabled()))
        return [{"phase": phase} for phase in "xy"]

    def run(names: str, *more: str) -> Rows:
        options = harness.new_parser("", "").parse_args(["--out", str(file), *more])
        cases = (({"case": n, "threads": t}, lambda n=n: measure(n)) for n in names for t in (2, 1))
        harness.run(options, cases)
        return harness.read_csv(file)

    before = torch.get_num_threads()
    monkeypatch.setattr(harness, "commit", lambda: "older")
    run("a")
    monkeypatch.setattr(harness, "commit", lambda: "newer")
    rows = run("ab", "--resume")
    assert measured == [(name, threads, False) for name in "ab" for threads in (2, 1)]
    assert torch.get_num_threads() == before
    assert values(rows, "case", "threads", "phase", "commit") == [
        (name, threads, phase, commit)
        for name, commit in (("a", "older"), ("b", "newer"))
        for threads in "21"
        for phase in "xy"
    ]
    assert values(run("c"), "case") == 4 * [("c",)]


def test_commit(harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed files count, but for the results that benchmarks themselves write."""
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    assert harness.commit() == ""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    files = (tmp_path / "code", results / "rows")
    for file in files:
        file.write_text("1")
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init",), ("add", "."), (*who, "commit", "-m", "first")):
        assert harness.git(*command) is not None
    clean = harness.commit()
    assert len(clean) == 10
    files[1].write_text("2")
    assert harness.commit() == clean
    files[0].write_text("2")
    assert harness.commit() == clean + "+changes"


def test_interleaved_medians() -> None:
    """All take turns in every round; the first round does not count."""
    calls: list[str] = []
    times = {"a": iter([9.0, 1.0, 5.0, 3.0]), "b": iter([9.0, 4.0, 4.0, 7.0])}

    def measurement(name: str) -> dict[str, float]:
        calls.append(name)
        return {"": next(times[name])}

    found = interleaved_medians({n: lambda n=n: measurement(n) for n in times}, 3, before=lambda: calls.append("."))
    assert found == {("a", ""): 3.0, ("b", ""): 4.0} and "".join(calls) == ".ab" * 4


def test_results_are_tabulated_and_drawn(harness: Any) -> None:
    """Of every kind of CPU there are tables, and the committed plots are those of the CSV files beside them."""
    table, plot = importlib.import_module("table"), importlib.import_module("plot")
    folders = [folder for folder in harness.RESULTS.parent.iterdir() if folder.is_dir() and folder.name != "gpu"]
    for folder in folders:
        tables = [text for text in (markdown(folder) for markdown in table.TABLES.values()) if text]
        assert len(tables) >= 3 and all(text.startswith("| ") and "\n| " in text for text in tables)
    drawings = [path for folder in folders for path in folder.glob("*.svg")]
    assert drawings and not [path for path in drawings if plot.drawn(path.with_suffix(".csv")) != path.read_text()]


@pytest.mark.full
def test_gpu(measured: Any, tmp_path: Path) -> None:
    """The GPU's script, on what is here: shapes, peers, the static cache of the models."""
    rows = measured(tmp_path / "gpu.csv", "gpu.py --quick", "infini_us share", alone=True)
    assert {row["case"].split()[0] for row in rows} >= {"rms_norm", "swiglu", "random_sample", "linear_int4", "decode"}
    assert not [row for row in rows if " fails" in row["note"]]


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """benchmarks/gpu.py, imported: what it plans needs no GPU."""
    return importlib.import_module("gpu")


@pytest.fixture(scope="module")
def gpu_measure(gpu: Any) -> ModuleType:
    return importlib.import_module("gpu_measure")


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


def test_gpu_has_the_cases_of_the_page(gpu: Any, gpu_measure: Any) -> None:
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
            stated = gpu_measure.goal_of(by_name[name]).replace("300 us", "0.3 ms")
            assert goal == stated or (name.startswith("decode") and "of the weights' limit" in goal)
    wanted = {f"linear {rows}x4096x14336" for rows in (32, 64, 128, 256, 512)}
    wanted |= {f"linear_int{bits} {rows}x4096x14336" for bits in (4, 8) for rows in (16, 64, 512, 2048)}
    wanted |= {f"linear_{name} {rows}x4096x14336" for name in ("group8", "table4") for rows in (1, 16, 512)}
    wanted |= {"paged_attention 64x4096 32/8x128 int8 cache", "paged_attention 1x2048 32/8x128, capacity 131072"}
    wanted |= {"attention 8192 queries, 8192 keys, 32/8x128", "random_sample 1x128256 top-p 0.9"}
    assert wanted <= by_name.keys()


def test_gpu_data_exceeds_the_cache(gpu_measure: Any) -> None:
    l2 = 60 * 2**20
    for size in (16 * 1024, 4 * 2**20, l2, 2 * l2, 10 * l2):
        assert gpu_measure.sets_for(size, l2) * size >= 2 * l2
    assert gpu_measure.sets_for(10 * l2, l2) == 1
    assert gpu_measure.sets_for(0, l2) == gpu_measure.sets_for(1, l2) == gpu_measure.MOST_SETS


def test_gpu_goes_on_after_a_failure(gpu: Any, harness: Any, tmp_path: Path) -> None:
    """A case that fails is a row; where the GPU is lost the next process goes on behind it; late cases are told."""
    machine = gpu.Machine("a GPU", "1", 4e12, 1)
    path = tmp_path / "gpu.csv"

    def fails(*_: Any) -> Any:
        raise RuntimeError("misaligned address\nand more")

    def works(case: Any, machine: Any, rounds: int, with_compile: bool) -> Any:
        return gpu.row_of(case, infini_us=2.5, note="with compile" if with_compile else "")

    cases = [
        gpu.Case("a", works, compile_seconds=400),
        gpu.Case("b", fails),
        gpu.Case("c", works, compile_seconds=None),
    ]
    cases += [gpu.Case("d", works, compile_seconds=500), gpu.Case("too long", works, seconds=1000)]
    plan = gpu.Plan(cases[:4], [gpu.Case("e", works)])
    deadline = time.monotonic() + 600

    def run(plan: Any, lost: bool = False) -> Rows:
        results = harness.Results(path, gpu.COLUMNS)
        assert gpu.run_cases(plan, machine, 1, deadline, results, lost=lambda: lost) is lost
        return harness.read_csv(path)

    assert values(run(plan), "case", "infini_us", "note") == [
        ("a", "2.5", "with compile"),
        ("b", "", "infini fails: RuntimeError: misaligned address"),
        ("c", "2.5", ""),
        ("d", "2.5", "with compile"),
        ("e", "", "not run: no time for it"),
    ]
    assert values(run(gpu.Plan([*cases[3:], cases[0]])), "case", "note") == [
        ("d", ""),
        ("too long", "not run: the time was up"),
        ("a", "with compile"),
    ]
    assert values(run(plan, lost=True), "case") == [("a",), ("b",)]


def test_gpu_goes_on_in_a_new_process(gpu: Any, harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the GPU is lost, the script starts itself for what has no row yet; the failure is its exit status."""
    path, started = tmp_path / "gpu.csv", []
    work = lambda fail: lambda case, machine, *_: 1 / 0 if fail else gpu.row_of(case, infini_us=1.0)
    norms = lambda quick: [gpu.Case("first", work(True)), gpu.Case("second", work(False))]
    monkeypatch.setattr(gpu, "CASES", {"norms": norms})
    monkeypatch.setattr(gpu, "look_at_machine", lambda quick: gpu.Machine("a GPU", "1", 4e12, 1))
    lost = {"lost": True}
    monkeypatch.setattr(gpu.run_cases, "__defaults__", (lambda: lost["lost"],))
    monkeypatch.setattr(gpu.os, "execv", lambda program, command: started.append(command))
    gpu.main(["--quick", "--csv", str(path)])
    ((_, script, *arguments),) = started
    assert Path(script) == ROOT / "benchmarks" / "gpu.py" and "--resume" in arguments and "--quick" in arguments
    assert values(harness.read_csv(path), "case") == [("first",)]
    lost["lost"] = False
    assert gpu.main(arguments) == 1
    assert values(harness.read_csv(path), "case", "infini_us") == [("first", ""), ("second", "1.0")]


@pytest.mark.full
def test_paged_models(measured: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    positive = "ratio ratio_32 transformers_tokens_per_second engine_tokens_per_second_32"
    rows = measured(tmp_path / "paged-models.csv", "paged_models.py --quick --families Gemma3", positive)
    assert values(rows, "family", "recorded") == [("Gemma3", "True")]


@pytest.mark.full
def test_continuous(measured: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    positive = "ratio patched_ratio paged_eager_tokens_per_second sdpa_tokens_per_second packed_tokens_per_second"
    rows = measured(tmp_path / "continuous.csv", "continuous.py --quick --families Llama", positive)
    assert values(rows, "family") == [("Llama",)]
