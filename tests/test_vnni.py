"""Products of int8 by VNNI: exact at every level, each level's instructions, and AVX-VNNI on CPUs that lack it.

AVX-512 VNNI has the instruction of AVX-VNNI, vpdpbusd on 256 bits, in another encoding. The test of AVX-VNNI takes the
compiler's assembly of the level avx2_vnni, lets the assembler encode that one instruction the other way, and runs the
ops' tests on it.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import torch_infini
from torch_infini._core.library import CPU_CAPABILITIES
from torch_infini.testing import cpu_capability_set_to, kernel_levels
from torch_infini.weights import quantize

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "build" / "native"
SOURCES = (
    "infiniop.int8_gemm.int8_gemm_dot_cpu",
    "infiniop.linear_group8.linear_group8_dot_cpu",
    "infiniop.linear_table4.linear_table4_dot_cpu",
    "infiniop.quantized_linear.quantized_x_dot_cpu",
)
x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the instructions are those of x86-64")


def test_the_tests_know_every_source() -> None:
    """torch_infini.testing.machine.INT8_PRODUCTS names the ops of these; all other tests leave VNNI's levels out."""
    paths = (ROOT / "csrc").rglob("*_dot_cpu.cpp")
    found = {".".join(path.relative_to(ROOT / "csrc").with_suffix("").parts) for path in paths}
    assert found == set(SOURCES)


@pytest.mark.parametrize("capability", kernel_levels("linear_int8"))
def test_sums_are_exact(capability: str) -> None:
    """Bytes at both ends of their range, and the deepest product, where a sum of unsigned bytes does not fit int32."""
    with cpu_capability_set_to(capability):
        for k in (1, 5, 31, 64, 257, 1000, 131071):
            w = torch.randint(-128, 128, (37, k), dtype=torch.int8)
            w[0], w[1], w[2, ::2] = 127, -128, -128
            for m in (1, 2, 3, 4, 5, 6, 7, 13, 25) if k < 2000 else (1, 2, 13):
                x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
                x[0], x[-1] = 127, -128
                got = torch_infini.ops.scaled_mm_int8(x, w.t(), torch.ones(m), torch.ones(37), out_dtype=torch.float32)
                want = (x.double() @ w.double().t()).float()  # exact in float64, then rounded once
                assert torch.equal(got, want), (m, k)
        for group in quantize.GROUP_SIZES:
            for k in (group, 3 * group, 1152):
                values = torch.randint(0, 16, (37, k))
                values[0], values[1] = 0, 15
                packed, ones = quantize.pack_int4(values), torch.ones(37, k // group)
                for m in (1, 2, 3, 4, 5, 6, 7, 13, 25):
                    x = torch.randint(-127, 128, (m, k)).float()
                    x[:, 0] = 127
                    x[0], x[-1] = 127, -127
                    got = torch_infini.ops.linear_int4(x, packed, ones, quantize_x=True)
                    assert torch.equal(got, (x.double() @ (values - 8).double().t()).float()), (m, k, group)


def instructions(name: str) -> list[tuple[str, str]]:
    """Bytes and text of each instruction of an object."""
    dump = ["objdump", "-d", "--insn-width=16", str(NATIVE / name)]
    lines = subprocess.run(dump, capture_output=True, text=True, check=True).stdout.splitlines()
    return [(parts[1], parts[2]) for parts in (line.split("\t") for line in lines) if len(parts) == 3]


@x86
@pytest.mark.parametrize("source", SOURCES)
def test_instructions(source: str) -> None:
    """Each level has its own instruction for products, and none that its CPUs lack."""
    for level, width, has_dots in (
        ("avx2", "%ymm", False),
        ("avx2_vnni", "%ymm", True),
        ("avx512", "%zmm", False),
        ("avx512_vnni", "%zmm", True),
    ):
        code = instructions(f"{source}.{level}.o")
        assert sum(width in text for _, text in code) > 500, level
        dots = [text for _, text in code if "vpdpbusd" in text]
        assert bool(dots) == has_dots and all(width in text for text in dots), level
        assert not any(re.match("vcvtne2?ps2bf16|vdpbf16ps", text) for _, text in code), level
        if width == "%ymm":  # a first byte of 62 is AVX-512's
            wide = [text for encoded, text in code if encoded.startswith("62") or re.search(r"%zmm|%k\d", text)]
            assert not wide, (level, wide[:3])


def command(target: str, output: Path) -> list[str]:
    """That by which the build makes an object or library, in NATIVE; into another file."""
    ninja = shutil.which("ninja", path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    assert ninja
    tool = [ninja, "-C", str(NATIVE), "-t", "commands", target]
    done = subprocess.run(tool, capture_output=True, text=True, check=True)
    arguments = shlex.split(done.stdout.strip().splitlines()[-1])
    arguments[arguments.index("-o") + 1] = str(output)
    if "-MF" in arguments:
        arguments[arguments.index("-MF") + 1] = os.devnull
    return arguments


def build_libraries(folder: Path) -> None:
    """Those of the build, but they hold AVX-VNNI to be there, and its instruction has the encoding of AVX-512."""
    objects = {}
    for source in SOURCES:
        name = f"{source}.avx2_vnni.o"
        assembly, encoded = folder / f"{name}.s", folder / name
        compiler = command(name, assembly)
        compiler[compiler.index("-c")] = "-S"
        subprocess.run(compiler, cwd=NATIVE, check=True)
        text, count = re.subn(r"\{vex\}\s+vpdpbusd", "vpdpbusd", assembly.read_text())
        assert count > 100
        assembly.write_text(text)
        subprocess.run([compiler[0], "-c", str(assembly), "-o", str(encoded)], check=True)
        objects[name] = str(encoded)
    name, text = "infinirt.cpu.capability.o", (ROOT / "csrc" / "infinirt" / "cpu" / "capability.cpp").read_text()
    detects = "bool has_avx_vnni() {\n"
    assert detects in text
    (folder / "capability.cpp").write_text(text.replace(detects, f"{detects}    return true;\n"))
    compiler = command(name, folder / name)
    compiler[compiler.index("-c") + 1] = str(folder / "capability.cpp")
    subprocess.run(compiler, cwd=NATIVE, check=True)
    objects[name] = str(folder / name)
    for library in ("libinfinirt.so", "libinfiniop.so", "libtorch_infini.so"):
        linker = [objects.get(argument, argument) for argument in command(library, folder / library)]
        subprocess.run(linker, cwd=NATIVE, check=True)
    shutil.copy(NATIVE / "libinfiniccl.so", folder)


# Each op at two levels, in a separate process: the signal that ends it, or 0.
SIGNALS = """
import os, resource, torch
import torch_infini as t
from torch_infini.testing import cpu_capability_set_to
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
q, x, ones = torch.ones(40, 64, dtype=torch.int8), torch.ones(3, 64), torch.ones(40)
packed, scales = t.weights.pack_int4(torch.ones(40, 64, dtype=torch.int64)), torch.ones(40, 2)
calls = (
    lambda: t.ops.scaled_mm_int8(q[:3], q.t(), ones[:3], ones, out_dtype=torch.float32),
    lambda: t.ops.linear_int8(x, q, ones, quantize_x=True),
    lambda: t.ops.linear_int4(x, packed, scales, quantize_x=True),
)
for level in ("avx2", "avx2_vnni"):
    for call in calls:
        child = os.fork()
        if child == 0:
            with cpu_capability_set_to(level):
                call()
            os._exit(0)
        print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


@pytest.mark.full
@x86
@pytest.mark.skipif("avx512_vnni" not in torch_infini.cpu_capabilities(), reason="the CPU has no AVX-512 VNNI")
def test_avx_vnni_in_the_encoding_of_avx512(tmp_path: Path) -> None:
    """The level's dispatch and kernels, by the tests of their ops."""
    build_libraries(tmp_path)
    environment = {**os.environ, "INFINI_LIBRARIES": str(tmp_path), "INFINI_CPU_CAPABILITY": "avx2_vnni"}

    def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env={**environment, **variables}, cwd=ROOT)

    code = "import torch_infini as t; print(t.cpu_capability(), *t.cpu_capabilities())"
    shown = python("-c", code)
    levels = sorted({*torch_infini.cpu_capabilities(), "avx2_vnni"}, key=CPU_CAPABILITIES.index)
    assert shown.stdout.split() == ["avx2_vnni", *levels], shown.stderr
    files = [f"tests/test_{name}.py" for name in ("vnni", "quantize", "infiniop", "ops")]
    chosen = "avx2_vnni and (exact or bits or finite or Int8Gemm or (reference and int))"
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed.group(1)) >= 15, done.stdout[-1000:]

    # That they ran the level's own kernels: those of the build are illegal on a CPU without AVX-VNNI.
    if "avx2_vnni" not in torch_infini.cpu_capabilities():
        build = tmp_path / "build"
        build.mkdir()
        for folder, name in ((tmp_path, "infinirt"), *((NATIVE, n) for n in ("infiniop", "infiniccl", "torch_infini"))):
            shutil.copy(folder / f"lib{name}.so", build)
        ended = python("-c", SIGNALS, INFINI_LIBRARIES=str(build))
        assert ended.stdout.split() == ["0"] * 3 + [str(int(signal.SIGILL))] * 3, (ended.stdout, ended.stderr)
