"""The C++ programs of tests/cpp on libinfinicore_cpp_api, compiled against the headers and libraries as installed.

Each program checks many things, prints what fails and answers 1 then. On emulated or real CUDA they run there as well.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from torch_infini._library import ROOT, emulates_cuda
from torch_infini.testing import sanitized

SOURCES = Path(__file__).resolve().parent / "cpp"
INCLUDE = SOURCES.parent.parent / "csrc" / "include"
DEVICES = ["CPU", *(["NVIDIA"] if emulates_cuda() or torch.cuda.is_available() else [])]
LIBRARIES = ("infinicore_cpp_api", "infiniop", "infiniccl", "infinirt")


def compiled(source: Path, folder: Path) -> Path:
    """The program of a source; where the libraries were built with sanitizers, so is it."""
    lib = Path(os.environ.get("INFINI_LIBRARIES") or ROOT / "lib")
    program = folder / source.stem
    flags = ["-fsanitize=address,undefined", "-fno-sanitize=vptr"] if sanitized() else []
    libraries = [f"-l{name}" for name in LIBRARIES]
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", *flags, f"-I{INCLUDE}", str(source), "-o", str(program)]
    done = subprocess.run(
        [*command, f"-L{lib}", *libraries, "-pthread", f"-Wl,-rpath,{lib}"], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return program


@pytest.mark.parametrize("name", sorted(path.stem for path in SOURCES.glob("*.cpp")))
def test_program(name: str, tmp_path: Path) -> None:
    program = compiled(SOURCES / f"{name}.cpp", tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    environment["ASAN_OPTIONS"] = "detect_leaks=1:allocator_may_return_null=1"  # no Python here that keeps memory
    for device in DEVICES:
        done = subprocess.run(
            [str(program), device, str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment
        )
        assert done.returncode == 0, f"{device}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
