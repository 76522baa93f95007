"""Compiles C++ programs against the headers and libraries as installed, and runs them: tests/cpp and csrc/example.

A program of tests/cpp takes the device's type and a folder, checks many things and prints what fails.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from torch_infini._library import PATH, ROOT
from torch_infini.testing import sanitized

SOURCES = Path(__file__).resolve().parent / "cpp"
PROGRAMS = sorted(path.stem for path in SOURCES.glob("*.cpp"))
EXAMPLES = SOURCES.parent.parent / "csrc" / "example"
LIBRARIES = ("infinicore_cpp_api", "infiniop", "infiniccl", "infinirt")


def compiled(source: Path, folder: Path) -> Path:
    """The program of a source; where the libraries were built with sanitizers, so is it."""
    lib, program = PATH.parent, folder / source.stem
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize=vptr"] if sanitized() else []
    links = [f"-L{lib}", *(f"-l{name}" for name in LIBRARIES), "-pthread", f"-Wl,-rpath,{lib}"]
    command = [os.environ.get("CXX", "c++"), *flags, str(source), "-o", str(program), *links]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def started(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """The program after its end, whether it succeeded or not."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    environment["ASAN_OPTIONS"] = "detect_leaks=1:allocator_may_return_null=1"  # no Python here that keeps memory
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, env=environment)


def run(*command: str | Path) -> str:
    """What the program prints; it has to succeed."""
    done = started(*command)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
