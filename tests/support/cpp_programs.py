"""Compiles C++ programs against the headers and libraries as installed, and runs them: tests/cpp and csrc/example.

A program of tests/cpp takes the device's type and a folder, checks many things and prints what fails.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from torch_infini._core.library import PATH, ROOT

from .sanitizers import sanitized

SOURCES = Path(__file__).resolve().parent.parent / "cpp"
PROGRAMS = sorted(path.stem for path in SOURCES.glob("*.cpp"))
EXAMPLES = SOURCES.parent.parent / "csrc" / "example"
BUILD = SOURCES.parent.parent / "build" / "cpp"
LIBRARIES = ("infinicore_cpp_api", "infiniop", "infiniccl", "infinirt")


def compiled(source: Path, folder: Path) -> Path:
    """The program of a source, in a folder; where the libraries were built with sanitizers, so is it.

    What was compiled from the same text before, be it for other libraries of the interface, is taken from build/cpp.
    """
    compiler, lib = os.environ.get("CXX", "c++"), PATH.parent
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize=vptr"] if sanitized() else []
    texts = hashlib.sha256(" ".join([compiler, *flags]).encode())
    headers = [*(ROOT / "include").rglob("*.h*"), *source.parent.glob("*.h")]
    for path in (source, *sorted(headers)):
        texts.update(path.read_bytes())
    kept = BUILD / f"{source.stem}-{texts.hexdigest()[:16]}"
    if not kept.exists():
        links = [f"-L{lib}", *(f"-l{name}" for name in LIBRARIES), "-pthread"]
        made = folder / f"{source.stem}.new"
        command = [compiler, *flags, f"-I{ROOT / 'include'}", str(source), "-o", str(made), *links]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        BUILD.mkdir(parents=True, exist_ok=True)
        shutil.copy2(made, f"{kept}.{os.getpid()}")
        os.replace(f"{kept}.{os.getpid()}", kept)  # whole at once: another process may look for it
    program = folder / source.stem
    shutil.copy2(kept, program)
    return program


def started(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """The program after its end, whether it succeeded or not."""
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    environment["ASAN_OPTIONS"] = "detect_leaks=1:allocator_may_return_null=1"  # no Python here that keeps memory
    environment["OMP_NUM_THREADS"] = "1"
    environment["LD_LIBRARY_PATH"] = str(PATH.parent)
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, env=environment)


def run(*command: str | Path) -> str:
    """What the program prints; it has to succeed."""
    done = started(*command)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
