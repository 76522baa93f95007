"""Run scripts as `python -m torch_infini run` does: by that command, or by its function in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch_infini.compat.infinicore as infinicore
from torch_infini import compat
from torch_infini.commands import run as command

ROOT = Path(__file__).resolve().parent.parent.parent


class Done(NamedTuple):
    """What a script printed, and its exit status."""

    stdout: str
    stderr: str
    returncode: int

    def shown(self) -> dict[str, Any]:
        """The values of the lines of JSON that it printed, by name."""
        lines = [json.loads(line) for line in self.stdout.splitlines() if line.startswith('{"name"')]
        names = [line["name"] for line in lines]
        assert len(names) == len(set(names)), f"shown twice: {sorted(n for n in names if names.count(n) > 1)}"
        return {line["name"]: line["value"] for line in lines}


def python_path() -> str:
    """This repository, then what the caller put in front of the environment: another release of transformers."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def run_process(
    script: Path, *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 300
) -> Done:
    """Run the command line in a process of its own."""
    everything = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", **(environment or {})}
    line = [sys.executable, "-m", "torch_infini", "run", str(script), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, env=everything, timeout=timeout)
    return Done(done.stdout, done.stderr, done.returncode)


def run_here(script: Path, *arguments: str) -> Done:
    """Run it by the function that the command line calls, in this process, which has torch already; undo what it set.

    What a script's own writes to file descriptors 1 and 2 (C++ prints) say is not in the result.
    """
    before, methods = dict(sys.modules), dict(vars(infinicore.Tensor))
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = command.run(Namespace(script=[str(script), *arguments], module=None, replace=False))
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        compat.uninstall()
        sys.argv, sys.path[:], sys.modules["__main__"] = argv, path, main
        for name in set(vars(infinicore.Tensor)) - set(methods):
            delattr(infinicore.Tensor, name)
        for name, method in methods.items():
            if vars(infinicore.Tensor)[name] is not method:  # Tensor.to_numpy = infini_to_numpy
                setattr(infinicore.Tensor, name, method)
        for name in set(sys.modules) - set(before):
            place = getattr(sys.modules[name], "__file__", None)
            if place is not None and Path(place).parent == script.parent:  # its own helpers
                del sys.modules[name]
    return Done(out.getvalue(), err.getvalue(), status)
