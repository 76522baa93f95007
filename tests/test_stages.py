"""The stages of the tests: one that fails keeps no other from running; the table, the counts and the status say so."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    "test_a.py": """
        import pytest
        def test_passes(): pass
        def test_planted(): assert PASSES
        @pytest.mark.skip
        def test_skipped(): pass
        @pytest.mark.full
        def test_only_in_full(): pass
        """,
    "test_device_a.py": "def test_on_the_device(): pass",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The runner, with a few tests instead of ours."""
    for name in (".ci/stages.py", "pyproject.toml", "torch_infini/_core/cpu.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "torch_infini" / "__init__.py").touch()
    (tmp_path / "tests").mkdir()
    return tmp_path


def run(tree: Path, *stages: str, passes: bool) -> subprocess.CompletedProcess[str]:
    for name, text in TESTS.items():
        lines = text.replace("PASSES", str(passes)).splitlines()
        (tree / "tests" / name).write_text("\n".join(line.removeprefix(" " * 8) for line in lines) + "\n")
    command = [sys.executable, str(tree / ".ci" / "stages.py"), *stages]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(command, env=env, capture_output=True, text=True)


def table(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    lines = done.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("stage "))
    return {
        fields[0]: [*fields[1:4], fields[5]]
        for line in lines[begin + 1 :]
        if len(fields := line.split()) == 6 and fields[5].isdigit()
    }


@pytest.mark.full
def test_a_planted_failure_stops_nothing(tree: Path) -> None:
    done = run(tree, "every", "device", passes=False)
    assert table(done) == {"every": ["2", "1", "1", "1"], "device": ["1", "0", "0", "0"]}, done.stdout
    assert done.stdout.splitlines()[-2:] == ["stages that failed: every", "3 passed, 1 failed, 1 skipped"]
    assert done.returncode == 1
    assert {path.name for path in (tree / "build" / "tests").iterdir()} == {"every.xml", "device.xml"}


@pytest.mark.full
def test_all_pass_and_their_times_are_kept(tree: Path) -> None:
    done = run(tree, "--keep", "tests", "device", passes=True)
    assert table(done) == {"tests": ["2", "0", "1", "0"], "device": ["1", "0", "0", "0"]}, done.stdout
    assert done.stdout.splitlines()[-1] == "3 passed, 0 failed, 1 skipped"
    assert done.returncode == 0
    with (tree / "tests" / "durations.csv").open(newline="") as file:
        kept = list(csv.DictReader(file))
    assert [one["name"] for one in kept if one["what"] == "stage"] == ["tests", "device"]
    assert {one["name"] for one in kept if one["what"] == "test"} >= {"tests/test_a.py::test_passes"}


@pytest.mark.full
def test_a_stage_without_tests_has_failed(tree: Path) -> None:
    """It ran nothing: pytest's status 5."""
    (tree / "pyproject.toml").write_text('[tool.pytest.ini_options]\naddopts = "-k nothing"\nmarkers = ["full: x"]\n')
    done = run(tree, "device", passes=True)
    assert table(done) == {"device": ["0", "0", "0", "5"]}, done.stdout
    assert done.returncode == 1 and done.stdout.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_an_unknown_stage_is_named(tree: Path) -> None:
    done = run(tree, "evry", passes=True)
    assert done.returncode == 2 and "there is no stage 'evry'; there are tests, every, device" in done.stderr
