"""A C++ module of a caller beside _infinicore, whose threads drop the last handles of tensors that Python made."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from support.fresh_python import run_python
from torch_infini._core.library import PATH, ROOT

pybind11 = pytest.importorskip("pybind11")
SOURCE = Path(__file__).resolve().parent / "extension" / "engine.cpp"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the compiled module is."""
    made: Path = tmp_path_factory.mktemp("extension")
    lib = PATH.parent
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    flags += [f"-I{ROOT / 'include'}", f"-isystem{pybind11.get_include()}", f"-isystem{sysconfig.get_path('include')}"]
    links = [f"-L{lib}", "-linfinicore_cpp_api", f"-Wl,-rpath,{lib}", "-pthread"]
    target = made / f"engine{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = [*shlex.split(os.environ.get("CXX", "c++")), *flags, str(SOURCE), "-o", str(target), *links]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


BEGIN = """
import threading, time, weakref
import numpy, torch
import torch_infini.compat.infinicore as ic
from engine import Engine

engine = Engine()
numbers = list(range(6))

def array():
    return numpy.arange(6.0)

def drop(make):
    '''Keep a tensor in the engine alone, and let its thread drop it.'''
    x = make()
    assert x.to_numpy().tolist() == numbers
    engine.keep(x._underlying)
    del x
    engine.drop_in_a_thread()
"""
MADE = {
    "from_list": "ic.from_list(numbers)",
    "from_list of another dtype": "ic.from_list(numbers, dtype=ic.float32)",
    "from_numpy": "ic.from_numpy(array())",
    "from_torch": "ic.from_torch(torch.arange(6.0))",
    "from_torch of numpy's memory": "ic.from_torch(torch.from_numpy(array()))",
    "from_dlpack of torch's": "ic.from_dlpack(torch.arange(6.0))",
    "from_dlpack of numpy's": "ic.from_dlpack(array())",
}


def run(code: str, folder: Path) -> None:
    paths = [str(ROOT.parent), str(folder)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = run_python(BEGIN + code, env=env, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.full
@pytest.mark.parametrize("how", MADE)
def test_a_thread_drops_the_last_handle(how: str, folder: Path) -> None:
    """200 times, while its caller holds the GIL and waits for it: a thread that waited for the GIL would hang."""
    run(f"for _ in range(200):\n    drop(lambda: {MADE[how]})\nprint('done')", folder)


@pytest.mark.full
def test_what_was_dropped_is_released(folder: Path) -> None:
    """By the main thread's interpreter, or in another thread by the next call; each once, and all of many."""
    run(
        """
def watched(left):
    memory = array()
    left.append(weakref.ref(memory))
    return ic.from_torch(torch.from_numpy(memory))

left = []
for _ in range(100):
    drop(lambda: watched(left))
time.sleep(0)  # takes the GIL anew, where Python 3.11 looks for what a thread asked for
assert not any(ref() is not None for ref in left) and len(left) == 100

def elsewhere():
    for _ in range(100):  # in one call, so more than Python's own queue of such calls has room for
        engine.keep(watched(left)._underlying)
    engine.drop_in_a_thread()
    ic.zeros([1], dtype=ic.float32, device="cpu")
    still.extend(ref for ref in left if ref() is not None)

left, still = [], []
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
assert len(left) == 100 and not still
print("done")
""",
        folder,
    )


def test_handles_dropped_at_the_end(folder: Path) -> None:
    """A thread drops some after the interpreter has begun to end."""
    run(
        """
import atexit
engine.keep(ic.from_torch(torch.arange(6.0))._underlying)

class Last:
    def __del__(self):
        engine.drop_in_a_thread()

import builtins
builtins.last = Last()
print("done", flush=True)
""",
        folder,
    )
