"""Compiles C++ programs against the libraries under test and runs them: those of tests/cpp and of csrc/example."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from torch_infini._library import PATH, ROOT

TESTS = Path(__file__).resolve().parent
EXAMPLES = TESTS.parent / "csrc" / "example"
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]


def compiled(source: Path, binary: Path, *flags: str) -> Path:
    """The program, which finds libinfinicore_cpp_api where torch_infini finds its library."""
    lib = PATH.parent
    links = [f"-L{lib}", "-linfinicore_cpp_api", "-linfiniccl", "-linfinirt", "-pthread", f"-Wl,-rpath,{lib}"]
    command = [os.environ.get("CXX", "c++"), *STRICT, f"-I{ROOT / 'include'}", str(source), *flags, *links]
    done = subprocess.run([*command, "-o", str(binary)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return binary


def run(*command: str | Path) -> str:
    """What the program prints; it has to succeed."""
    done = started(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def started(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """The program after its end, whether it succeeded or not."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, env=env)
