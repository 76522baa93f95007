"""The native library: what it exports, what its objects share, how loading it fails, and the choice of kernels."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import torch_infini
from support.fresh_python import run_python
from torch_infini._core.library import CPU_CAPABILITIES, PATH, RUNTIME, check_torch, load, set_cpu_capability
from torch_infini.testing import cpu_capability_set_to, threads_set_to

ROOT = Path(__file__).resolve().parent.parent


def nm(*arguments: str) -> list[list[str]]:
    lines = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split() for line in lines if line.strip()]


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return run_python(code, env=env)


def test_exports_only_what_python_calls() -> None:
    exported = {fields[-1] for fields in nm("-D", "--defined-only", str(PATH))}
    programs = {f"infiniTorchProgram{name}" for name in ("Begin", "End", "Replay", "Destroy")} | {
        "infiniTorchChecksOnly",
        "infiniTorchComputeOn",
    }
    products = {"infiniTorchLibraryFrom", "infiniTorchLibraryBelow", "infiniTorchSetLibraryFrom"}
    attention = {f"infiniTorch{name}" for name in ("AttentionFrom", "AttentionQueries", "SetAttentionFrom")}
    groups = {"infiniTorchGroupAdd", "infiniTorchGroupRemove"}
    assert exported == programs | products | attention | groups | {"infiniTorchSeesAutograd"}


def test_instruction_sets_share_no_symbol() -> None:
    """Or the linker might pick one level's copy of a function for every machine."""
    owners = defaultdict(set)
    native = ROOT / "build" / "native"
    objects = sorted([*native.glob("*_cpu.*.o"), *native.glob("*_tiles.*.o")])
    assert objects, "build/native holds no kernel objects: run make build"
    for path in objects:
        level = path.name.split(".")[-2]
        for fields in nm(str(path)):
            # Exception tables refer to this pointer; it is data, the same for all.
            if fields[-2] in "WVu" and fields[-1] != "DW.ref.__gxx_personality_v0":
                owners[fields[-1]].add(level)
    shared = {name: levels for name, levels in owners.items() if len(levels) > 1}
    assert not shared


@pytest.mark.parametrize("capability", CPU_CAPABILITIES)
def test_environment_lowers_the_capability(capability: str) -> None:
    """To the next one that the machine has: a setting serves different machines. Set by hand, it is an error."""
    has = torch_infini.cpu_capabilities()
    lower = [name for name in CPU_CAPABILITIES[: CPU_CAPABILITIES.index(capability) + 1] if name in has]
    done = python("import torch_infini; print(torch_infini.cpu_capability())", INFINI_CPU_CAPABILITY=capability)
    assert done.stdout.strip() == lower[-1], done.stderr
    if capability not in has:
        with pytest.raises(ValueError) as caught:
            set_cpu_capability(capability)
        rule = f"infini: the CPU capability must be one of {', '.join(has)} on this machine"
        assert str(caught.value) == f"{rule}, got {capability}"


def test_emulated_tiles() -> None:
    """They add a level to any machine's own; what it lacks below stays missing."""
    code = "import torch_infini as t; print(t.cpu_capability(), *t.cpu_capabilities())"
    real = python(code, INFINI_EMULATE="").stdout.split()[1:]
    wanted = [*[name for name in real if name != "avx512_amx"], "avx512_amx"]
    assert python(code, INFINI_EMULATE="amx").stdout.split() == ["avx512_amx", *wanted]
    lower = python(code, INFINI_EMULATE="amx", INFINI_CPU_CAPABILITY=wanted[0]).stdout.split()
    assert lower == [wanted[0], *wanted]
    done = python("import torch_infini", INFINI_EMULATE="tpu")
    assert done.stderr.splitlines()[-1] == ("ImportError: infini: INFINI_EMULATE must be amx or not be set, got 'tpu'")


def test_has_capability() -> None:
    for name in torch_infini.cpu_capabilities():
        assert RUNTIME.infinirtCpuHasCapability(name.encode()) == 1
    assert RUNTIME.infinirtCpuHasCapability(b"sse9") == RUNTIME.infinirtCpuHasCapability(None) == -1
    assert RUNTIME.infiniGetLastErrorMessage().decode() == "infinirtCpuHasCapability: name must not be NULL"


def test_unknown_capability() -> None:
    choice = f"{', '.join(CPU_CAPABILITIES[:-1])} or {CPU_CAPABILITIES[-1]}"
    done = python("import torch_infini", INFINI_CPU_CAPABILITY="sse9")
    assert done.stderr.splitlines()[-1] == (f"ImportError: infini: INFINI_CPU_CAPABILITY must be {choice}, got 'sse9'")
    with pytest.raises(ValueError, match=f"must be {choice}, got 'mmx'"):
        set_cpu_capability("mmx")


def test_capability_scope() -> None:
    before = torch_infini.cpu_capability()
    lowest = CPU_CAPABILITIES[0]
    with cpu_capability_set_to(lowest):
        assert torch_infini.cpu_capability() == lowest
    assert torch_infini.cpu_capability() == before


def test_torch_too_old() -> None:
    with pytest.raises(ImportError) as caught:
        check_torch("2.10.1+cpu")
    assert str(caught.value) == (
        "torch_infini needs torch >= 2.11, found 2.10.1+cpu: run `pip install 'torch>=2.11'` "
        "(nothing has to be rebuilt)."
    )
    check_torch("2.11.0")
    check_torch("3.0.0a0+git1234")


def test_not_built(tmp_path: Path) -> None:
    with pytest.raises(ImportError) as caught:
        load(tmp_path / "libtorch_infini.so")
    assert str(caught.value) == (
        "torch_infini is not built: libtorch_infini.so is missing; run `make build` in a checkout, or `pip install .`."
    )


def test_libraries_of_a_folder_without_them(tmp_path: Path) -> None:
    done = python("import torch_infini", INFINI_LIBRARIES=str(tmp_path))
    assert done.stderr.splitlines()[-1] == (
        "ImportError: torch_infini: INFINI_LIBRARIES must be a folder with libtorch_infini.so (`make test-emulated` "
        f"builds one), or not be set, got {tmp_path}"
    )


def test_foreign_library(tmp_path: Path) -> None:
    broken = tmp_path / "libtorch_infini.so"
    broken.write_bytes(b"\x7fELF of another machine")
    with pytest.raises(ImportError, match="cannot be loaded on .* rebuild it here with `pip install --force-reinstall"):
        load(broken)


def test_a_program_does_not_import_the_compiler() -> None:
    code = "import sys, torch, torch_infini\nfrom torch_infini.runtime import program\nx = torch.ones(4)\n"
    done = python(code + "program(lambda: torch.ops.infini.silu(x).view(2, 2))\nprint('torch._dynamo' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def test_import_does_not_import_transformers() -> None:
    done = python("import sys, torch_infini; print('transformers' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_one_thread_pool_with_torch() -> None:
    """Our regions run on torch's OpenMP threads: using both leaves no more threads than torch alone."""
    code = (
        "import os, torch, torch_infini\n"
        "torch.set_num_threads(2)\n"
        "x, w = torch.randn(4096, 4096), torch.ones(4096)\n"
        "torch.ops.aten.silu(x)\n"
        "alone = len(os.listdir('/proc/self/task'))\n"
        "torch.ops.infini.rms_norm(x, w)\n"
        "print(alone, len(os.listdir('/proc/self/task')))"
    )
    alone, both = python(code, OMP_NUM_THREADS="2").stdout.split()
    assert alone == both


def test_no_tensor_and_no_memory() -> None:
    x, w = torch.ones(3, 8), torch.ones(8)
    with pytest.raises(RuntimeError) as caught:
        torch.ops.infini.rms_norm(None, w)
    assert str(caught.value) == "infini::rms_norm: x must be a tensor, got None"
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError) as caught:
        torch.ops.infini.rms_norm(x, w)
    assert str(caught.value) == "infini::rms_norm: x must have its memory allocated, got shape [3, 8] without any"


def test_more_threads_than_rows() -> None:
    x, w = torch.randn(2, 100_000), torch.ones(100_000)
    with threads_set_to(8):
        many = torch.ops.infini.rms_norm(x, w)
    with threads_set_to(1):
        assert torch.equal(torch.ops.infini.rms_norm(x, w), many)


def test_release_threads() -> None:
    """The team of the calling thread ends, and the next region has another: OpenMP counts all that there are."""
    code = """
import os, time, torch
from torch_infini._core import library
tasks = lambda: len(os.listdir("/proc/self/task"))
x = torch.ones(1 << 20)
torch.set_num_threads(3)
x.exp()
team = tasks()
library.release_threads()
for _ in range(500):
    if tasks() == team - 2:
        break
    time.sleep(0.01)
released = tasks()
x.exp()
print(team - released, tasks() - released, torch.get_num_threads())
"""
    run = python(code)
    assert run.stdout.split() == ["2", "2", "3"], run.stderr


def test_the_engine_of_a_thread_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that has loaded the model keeps no team beside the engine's."""
    from torch_infini._core import library
    from torch_infini.engine import LLM, AsyncLLM
    from torch_infini.testing.checkpoints import random_model

    random_model("llama").save_pretrained(tmp_path)
    ended: list[str] = []
    monkeypatch.setattr(library, "release_threads", lambda: ended.append(threading.current_thread().name))
    llm = LLM(tmp_path, cache_blocks=16, progress=False)
    AsyncLLM(llm).close()
    assert ended == [threading.current_thread().name]
