"""CONTRIBUTING.md's "Add an op", followed word for word in a copy of the tree: it builds, and its tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_add_an_op(tmp_path: Path) -> None:
    # With the objects built so far (times kept), so that only the new op is compiled.
    for folder in ("csrc", "torch_infini", "tests", "build"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "model"))
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / file, tmp_path / file)
    blocks = re.findall(r"```\w+ (\S+)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert len(blocks) == 5
    for name, text in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(*arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run("setup.py", "-q", "build_ext", "--inplace")
    run("-m", "pytest", "-q", "tests/test_ops.py", "tests/test_docs.py", "-k", "scale")
