"""Environments that the wheel is tried in: what is planned, what a row says; a torch that is not known."""

from __future__ import annotations

import csv
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from support.fresh_python import run_python

ROOT = Path(__file__).resolve().parent.parent
NEWER = """
import torch
torch.__version__ = torch.torch_version.TorchVersion("9.9.0")
import torch_infini
x, w = torch.randn(3, 8), torch.ones(8)
want = torch.nn.functional.rms_norm(x, (8,), w, 1e-6)
assert torch.allclose(torch.ops.infini.rms_norm(x, w, 1e-6), want, atol=1e-5)
try:
    torch_infini.device.enable()
except ImportError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def matrix() -> Any:
    spec = importlib.util.spec_from_file_location("ci_matrix", ROOT / ".ci" / "matrix.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_plan_has_every_python_and_torch(matrix: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """All Pythons of the wheel, torch from the oldest on, and transformers 4, the oldest 5 and the newest."""
    assert {one.python for one in matrix.PLAN} == {f"3.{minor}" for minor in range(10, 15)}
    assert {one.torch.rsplit(".", 1)[0] for one in matrix.PLAN} >= {"2.11", "2.12", "2.13", "2.14"}
    assert {one.transformers for one in matrix.PLAN} == {"4.57.1", "5.0.0", "pinned", "newest"}
    assert matrix.main(["--plan"]) == 0 and len(set(capsys.readouterr().out.splitlines())) == len(matrix.PLAN)
    assert matrix.main(["--plan", "--only", "4.57.1"]) == 0
    assert capsys.readouterr().out == "Python 3.11, torch 2.13.0, transformers 4.57.1\n"
    assert matrix.pinned("transformers").startswith("5.")
    with pytest.raises(SystemExit, match="matrix: --only must be a part of a line that --plan prints, got '2.99'"):
        matrix.main(["--only", "2.99"])


def test_the_table_has_the_plan(matrix: Any) -> None:
    """Of the rows that are kept, each is of the plan, has been tried, and says why where it did not go well."""
    with (ROOT / "docs" / "matrix.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    tried = set(matrix.read_results(ROOT / "docs" / "matrix.csv"))
    assert tried <= set(matrix.PLAN) and len(tried) == len(rows) >= 6
    for row in rows:
        results = {row[name] for name in ("ops", "readme", "infinilm")}
        assert tuple(row) == matrix.COLUMNS and results <= {"ok", "failed", "-"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])
        assert bool(row["found"]) != (results == {"-"}) and bool(row["why"]) == (
            not row["found"] or "failed" in results
        )


def test_rows_are_kept(matrix: Any, tmp_path: Path) -> None:
    """A run of some rows leaves the others; those that are not planned are left out."""
    plan = matrix.PLAN
    rows = {one: {**dict.fromkeys(matrix.COLUMNS, ""), **one._asdict(), "why": "a, b"} for one in reversed(plan)}
    rows[matrix.Environment("3.9", "2.0.0")] = dict.fromkeys(matrix.COLUMNS, "")
    matrix.write_results(tmp_path / "matrix.csv", rows)
    assert list(matrix.read_results(tmp_path / "matrix.csv").items()) == [(one, rows[one]) for one in plan]


def test_what_is_not_there_is_said(matrix: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "WORK", tmp_path)
    row = matrix.Trial(matrix.Environment("3.99", "2.13.0"), tmp_path / "a.whl", False).make()
    assert row["why"] == "there is no Python 3.99 on this machine" and row["ops"] == "-" and not row["found"]
    assert not list(tmp_path.iterdir())
    assert matrix.sentence("a\nFAILED  rms_norm on cpu: x\ndoctor: 1 failed\n\n") == "rms_norm on cpu: x"
    assert (
        matrix.sentence("Traceback\n  TypeError: y\n") == "TypeError: y" and matrix.sentence("\n") == "it said nothing"
    )


def test_a_torch_that_is_not_known() -> None:
    """Ops run, for the library needs the stable ABI alone; the device, built for one release, says what to do."""
    done = run_python(NEWER)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1 and "9.9" in done.stdout and "build" in done.stdout
