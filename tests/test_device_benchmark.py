"""benchmarks/device.py starts, measures both devices and writes its columns; no time is judged."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.full
def test_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "device.csv"
    command = [sys.executable, str(ROOT / "benchmarks" / "device.py"), "--quick", "--rounds", "1", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["case"] for row in rows][:2] == ["add", "add out"] and rows[-1]["case"] == "generate tiny"
    assert all(float(row[column]) > 0 for row in rows for column in ("infini_us", "backing_us", "ratio"))
    assert {row["backing"] for row in rows} == {"cpu"}
