"""Processes for tests of the device infini that need one in which it is not enabled yet, or that may crash."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from torch_infini.testing.processes import forking

ROOT = Path(__file__).resolve().parent.parent.parent
Result = TypeVar("Result")


def in_process(function: Callable[..., Result], *arguments: object) -> Result:
    """Call a function of a test file in a process that has imported torch_infini and nothing else.

    What it raises is raised here; a crash raises BrokenProcessPool.
    """
    with ProcessPoolExecutor(1, mp_context=forking()) as pool:
        return pool.submit(function, *arguments).result()


def run_code(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that has imported nothing; TORCH_INFINI_DEVICE is not set unless it is given."""
    everything = {name: value for name, value in os.environ.items() if name != "TORCH_INFINI_DEVICE"}
    everything |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=everything)
