"""python -m torch_infini: what the commands print, and the sentence that each bad input gets."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_infini.__main__ import main
from torch_infini._core.library import cpu_tiles
from torch_infini.commands import doctor
from torch_infini.testing.ops import OP_INFOS

ROOT = Path(__file__).resolve().parent.parent


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "env")
    assert status == 0
    assert "cpu_capability" in out
    status, out, _ = run(capsys, "env", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["cpu_capability"] in facts["cpu_capabilities"]
    assert facts["torch_infini"]
    assert facts["cuda_build"] in ("no", "yes", "emulated on the CPU")
    registered = torch._C._dispatch_has_kernel_for_dispatch_key("infini::rms_norm", "CUDA")
    assert (facts["cuda_kernels"] == "registered") == registered
    assert (
        registered or facts["cuda_kernels"] == "not registered: this torch has no CUDA" or facts["cuda_build"] != "yes"
    )
    assert len(facts["cuda_devices"]) == torch.cuda.device_count()


def test_ops(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "ops")
    header, *lines = (re.split("  +", line) for line in out.splitlines())
    assert header == ["op", "backends", "dtypes", "out", "inplace", "fake", "decomposition", "schema"]
    assert [line[0] for line in lines] == sorted(OP_INFOS)
    shown = {line[0]: dict(zip(header, line, strict=True)) for line in lines}
    _, out, _ = run(capsys, "ops", "--json")
    rows = {row["op"]: row for row in json.loads(out)}
    assert list(rows) == sorted(OP_INFOS)
    for name, spec in OP_INFOS.items():
        row = rows[name]
        assert row["schema"] == spec.schema
        assert "cpu" in row["backends"].split()
        assert row["out"] == ("out" in getattr(torch.ops.infini, name).overloads()) == bool(spec.outputs)
        assert row["inplace"] == hasattr(torch.ops.infini, f"{name}_") == bool(spec.inplace)
        assert row["fake"] is True
        assert row["decomposition"] == bool(spec.decomposition)
        text = {key: ("-", "yes")[value] if isinstance(value, bool) else value for key, value in row.items()}
        assert shown[name] == {key: text[key] for key in header}


def test_ops_tells_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An op with neither kernel nor fake, but with a decomposition."""
    library = torch.library.Library("infini", "FRAGMENT")
    library.define("unfinished(Tensor x) -> Tensor")
    spec = dataclasses.replace(OP_INFOS["rms_norm"], name="unfinished", decomposition=lambda x: x)
    monkeypatch.setattr("torch_infini.testing.ops.all_op_infos", lambda: iter([spec]))
    _, out, _ = run(capsys, "ops")
    library._destroy()
    header, line = (re.split("  +", line) for line in out.splitlines())
    shown = dict(zip(header, line, strict=True))
    assert (shown["backends"], shown["fake"], shown["decomposition"]) == ("-", "-", "yes")


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a few ops: tests/test_ops.py holds all of them against their references, at every level."""
    status, out, _ = run(capsys, "doctor", "--verbose", "--ops", "rms_norm,linear,random_sample")
    assert status == 0, out
    assert "rms_norm on cpu, baseline" in out and "linear on cpu, baseline" in out
    assert f"tile registers (AMX): {cpu_tiles() or 'in use'}" in out
    assert "dense products of bfloat16: torch_infini" in out
    assert ", 0 failed" in out
    status, _, err = run(capsys, "doctor", "--ops", "rms_norm,norm")
    assert status != 0 and "there is no op 'norm'; `python -m torch_infini ops` lists them" in err


def test_doctor_finds_faults(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("off by one")

    monkeypatch.setattr(doctor, "checks", lambda ops: iter([("good", lambda: None), ("bad", fail)]))
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "FAILED  bad: off by one" in out
    assert "1 checks passed, 1 failed" in out


def test_unknown_command() -> None:
    done = subprocess.run([sys.executable, "-m", "torch_infini", "fly"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "invalid choice: 'fly'" in done.stderr


class TestDemo:
    """The main job, on the model that comes with the package."""

    def test_equal_tokens(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, out, _ = run(capsys, "demo", "--max-new-tokens", "24", "--runs", "1")
        assert status == 0, out
        assert "tokens equal   yes" in out
        assert "of the memory-bandwidth limit" in out
        unpatched, patched = out.split("--- unpatched ---")[1].split("tokens equal")[0].split("--- patched ---")
        assert unpatched.strip() == patched.strip()
        assert unpatched.strip().startswith("A class definition")
        assert len(unpatched.split()) > 8

    def test_bfloat16(self, capsys: pytest.CaptureFixture[str]) -> None:
        _, out, _ = run(capsys, "demo", "--max-new-tokens", "4", "--runs", "1", "--dtype", "bfloat16")
        assert "bfloat16" in out

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--prompt", "  "], "--prompt must not be empty"),
            (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
            (["--runs", "-1"], "--runs must be at least 1, got -1"),
            (["--model", "no/such"], "--model must be a folder, got no/such, which does not exist"),
        ],
    )
    def test_bad_input(self, capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
        status, _, err = run(capsys, "demo", *arguments)
        assert status == 2
        assert err == f"torch_infini demo: {sentence}\n"

    def test_too_many_tokens(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, _, err = run(capsys, "demo", "--max-new-tokens", "1000000")
        assert status == 2
        assert "--max-new-tokens must be at most" in err

    def test_folder_without_config(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        status, _, err = run(capsys, "demo", "--model", str(tmp_path))
        assert status == 2
        rule = "--model must be a Hugging Face model folder"
        assert err == f"torch_infini demo: {rule}, got {tmp_path}, which has no config.json\n"

    def test_another_family(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        status, _, err = run(capsys, "demo", "--model", str(tmp_path))
        assert status == 2
        assert err == f"torch_infini demo: --model must be of the llama family, got gpt2 in {tmp_path}\n"

    def test_broken_config(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{")
        status, _, err = run(capsys, "demo", "--model", str(tmp_path))
        assert status == 2
        assert err.startswith("torch_infini demo: --model must have a readable config.json, got ")

    def test_no_weights(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        status, _, err = run(capsys, "demo", "--model", str(tmp_path))
        assert status == 2
        assert err.startswith("torch_infini demo: --model must hold weights and a tokenizer, got ")


def test_module_runs() -> None:
    """As a user types it, in a separate process."""
    done = subprocess.run(
        [sys.executable, "-m", "torch_infini", "env", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["library"] == "libtorch_infini.so"
