"""The C libraries as a C user meets them: headers, symbols, dependencies, example, pkg-config; and a soak.

The headers in csrc/include are the definition: what they declare is what the libraries export.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.sanitizers import sanitized
from torch_infini._core.headers import parse
from torch_infini._core.library import ROOT
from torch_infini.compat.libinfiniop import InfiniDeviceEnum, InfiniDtype
from torch_infini.testing.c_ops import LIBRARIES, Handle, address, c_function

CSRC = Path(__file__).resolve().parent.parent / "csrc"
INCLUDE = CSRC / "include"
INTERFACE = parse(INCLUDE)


def shell(*command: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("library", ["libinfinirt", "libinfiniop", "libinfiniccl"])
def test_exports_what_the_headers_declare(library: str) -> None:
    """And what a vendor's library is built against: the runtime's Backend, the ops' tables and their functions."""
    lines = shell("nm", "-D", "--defined-only", str(ROOT / "lib" / f"{library}.so")).splitlines()
    exported = {line.split()[-1] for line in lines}
    declared = {function.name for function in INTERFACE.functions.values() if function.library == library}
    cxx = {name for name in exported if name.startswith("_Z")}
    assert exported - cxx == declared
    names = set(shell("c++filt", *sorted(cxx)).splitlines()) if cxx else set()
    if library == "libinfinirt":
        assert {name for name in names if "infini::runtime::Backend" not in name} == set()
        assert any(name.startswith("infini::runtime::register_backend(") for name in names)
    elif library == "libinfiniop":
        assert {name for name in names if not name.startswith("infini::")} == set()
        tables = set(re.findall(r"^infini::(\w+)::(\w*kernels)$", "\n".join(names), re.MULTILINE))
        assert tables == declared_tables()
    else:
        assert not names


def declared_tables() -> set[tuple[str, str]]:
    """(op, name) of the kernel tables in the ops' headers."""
    found = set()
    for header in (CSRC / "infiniop").glob("*/*.h"):
        text = header.read_text()
        for line in re.findall(r"^extern KernelTable<\w+> (.*?);", text, re.MULTILINE):
            (op,) = re.findall(r"^namespace infini::(\w+) {$", text, re.MULTILINE)
            found |= {(op, name) for name in line.split(", ")}
    return found


@pytest.mark.parametrize("library", ["libinfinirt", "libinfiniop", "libinfiniccl"])
def test_needs_no_torch(library: str) -> None:
    needs = shell("ldd", str(ROOT / "lib" / f"{library}.so"))
    assert "torch" not in needs.replace(str(ROOT), "") and "not found" not in needs, needs


def test_loads_without_torch() -> None:
    """Each with local symbols, as a ctypes user opens them: libinfiniop finds libinfinirt by itself."""
    code = f"""
import ctypes, sys
op = ctypes.CDLL({str(ROOT / "lib" / "libinfiniop.so")!r})
handle = ctypes.c_void_p()
assert op.infiniopCreateHandle(ctypes.byref(handle)) == 0
assert op.infiniopDestroyHandle(handle) == 0
assert op.infiniopDestroyHandle(handle) == 3
rt = ctypes.CDLL({str(ROOT / "lib" / "libinfinirt.so")!r})
rt.infiniGetLastErrorMessage.restype = ctypes.c_char_p
print(rt.infiniGetLastErrorMessage().decode())
assert "torch" not in sys.modules
"""
    assert "infiniopDestroyHandle: handle must be a handle made by infiniopCreateHandle" in shell(
        sys.executable, "-c", code
    )


@pytest.mark.full
def test_headers_are_c99_and_cxx17(tmp_path: Path) -> None:
    """Each by itself in C, included twice; all together in C++."""
    headers = sorted(path.relative_to(INCLUDE) for path in INCLUDE.rglob("*.h"))
    sources = []
    for header in headers:
        source = tmp_path / f"{'_'.join(header.parts)}.c"
        source.write_text(f'#include "{header}"\n#include "{header}"\nint main(void) {{ return 0; }}\n')
        sources.append(str(source))
    assert len(sources) > 40
    flags = ["-Wall", "-Wextra", "-Wstrict-prototypes", "-pedantic", "-Werror", f"-I{INCLUDE}", "-fsyntax-only"]
    shell("cc", "-std=c99", *flags, *sources)
    flags.remove("-Wstrict-prototypes")
    whole = tmp_path / "all.cpp"
    whole.write_text("".join(f'#include "{header}"\n' for header in headers))
    shell("c++", "-std=c++17", *flags, str(whole))


def test_installed_headers_are_these() -> None:
    installed = ROOT / "include"
    names = {path.relative_to(INCLUDE) for path in INCLUDE.rglob("*.h")}
    assert {path.relative_to(installed) for path in installed.rglob("*.h")} == names
    for name in names:
        assert (installed / name).read_bytes() == (INCLUDE / name).read_bytes()


def test_every_declaration_is_parsed() -> None:
    """The ctypes signatures come from the headers: the parser misses nothing that is declared."""
    declared = sum(path.read_text().count("INFINI_API ") for path in INCLUDE.rglob("*.h"))
    assert len(INTERFACE.functions) == declared - 1  # less the definition of the macro itself
    launch = INTERFACE.functions["infinirtStreamLaunchHostFunction"]
    assert [argument.name for argument in launch.arguments] == ["stream", "function", "data", "release"]
    assert launch.arguments[3].type == "function"


@pytest.mark.parametrize(
    ("python", "c", "prefix"),
    [(InfiniDtype, "infiniDtype_t", "INFINI_DTYPE_"), (InfiniDeviceEnum, "infiniDevice_t", "INFINI_DEVICE_")],
)
def test_enums_have_the_headers_values(python: type, c: str, prefix: str) -> None:
    values = {name.removeprefix(prefix): value for name, value in INTERFACE.enums[c].items()}
    values.pop("TYPE_COUNT", None)
    assert {member.name: member.value for member in python} == values  # type: ignore[attr-defined]


def expected_of_the_example() -> torch.Tensor:
    x = torch.tensor([[1.0, 2, 3, 4], [-4, 3, -2, 1]], dtype=torch.float64)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * torch.tensor([1, 1, 1, 2.0])
    return normed @ torch.cat([torch.eye(3), torch.ones(1, 3)]).double()


def numbers(text: str) -> torch.Tensor:
    return torch.tensor([[float(word) for word in line.split()] for line in text.splitlines()], dtype=torch.float64)


EXAMPLE = CSRC / "example" / "rms_norm_gemm.c"
STRICT = ["-std=c99", "-Wall", "-Werror"]


def test_example(tmp_path: Path) -> None:
    binary, lib = str(tmp_path / "example"), str(ROOT / "lib")
    links = [f"-I{ROOT / 'include'}", f"-L{lib}", "-linfiniop", "-linfinirt", f"-Wl,-rpath,{lib}"]
    shell("cc", *STRICT, str(EXAMPLE), *links, "-o", binary)
    torch.testing.assert_close(numbers(shell(binary)), expected_of_the_example(), rtol=0, atol=6e-6)


def test_example_of_collectives(tmp_path: Path) -> None:
    """Two processes, each with a line."""
    binary, lib = str(tmp_path / "example"), str(ROOT / "lib")
    links = [f"-I{ROOT / 'include'}", f"-L{lib}", "-linfiniccl", "-linfinirt", f"-Wl,-rpath,{lib}"]
    shell("cc", *STRICT, str(CSRC / "example" / "all_reduce.c"), *links, "-o", binary)
    assert shell(binary) == "0 3 6 9, 0.5\n" * 2


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config")
def test_pkg_config(tmp_path: Path) -> None:
    path = str(ROOT / "lib" / "pkgconfig")
    flags = shlex.split(shell("pkg-config", "--cflags", "--libs", "infini", PKG_CONFIG_PATH=path))
    binary = str(tmp_path / "example")
    shell("cc", *STRICT, str(EXAMPLE), *flags, "-o", binary)
    torch.testing.assert_close(numbers(shell(binary)), expected_of_the_example(), rtol=0, atol=6e-6)


CXX_EXAMPLE = CSRC.parent / "tests" / "cpp" / "test_context_example.cpp"


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="no pkg-config")
def test_pkg_config_of_infinicore(tmp_path: Path) -> None:
    path = str(ROOT / "lib" / "pkgconfig")
    flags = shlex.split(shell("pkg-config", "--cflags", "--libs", "infinicore", PKG_CONFIG_PATH=path))
    binary = str(tmp_path / "example")
    shell("g++", str(CXX_EXAMPLE), *flags, "-o", binary)
    assert "product: 0, 32" in shell(binary)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_cmake(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(example CXX)\nfind_package(infini REQUIRED)\n"
        f'add_executable(example "{CXX_EXAMPLE}")\ntarget_link_libraries(example infini::infinicore_cpp_api)\n'
    )
    shell("cmake", "-S", str(tmp_path), "-B", str(tmp_path), f"-Dinfini_DIR={ROOT / 'lib' / 'cmake' / 'infini'}")
    shell("cmake", "--build", str(tmp_path))
    assert "product: 0, 32" in shell(str(tmp_path / "example"))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_soak() -> None:
    """100,000 times create, run, destroy: memory stays where it was."""
    op = LIBRARIES["libinfiniop"]
    x, w = torch.randn(4, 64), torch.ones(64)
    shapes = [(ctypes.c_size_t * 2)(4, 64), (ctypes.c_size_t * 1)(64)]
    tensors = [ctypes.c_void_p(), ctypes.c_void_p()]
    desc, size = ctypes.c_void_p(), ctypes.c_size_t()
    data, weight, none, zero = address(x), address(w), ctypes.c_void_p(None), ctypes.c_size_t(0)
    epsilon = ctypes.c_float(1e-5)

    def cycle(handle: ctypes.c_void_p) -> int:
        failed = op.infiniopCreateTensorDescriptor(ctypes.byref(tensors[0]), ctypes.c_size_t(2), shapes[0], none, 13)
        failed |= op.infiniopCreateTensorDescriptor(ctypes.byref(tensors[1]), ctypes.c_size_t(1), shapes[1], none, 13)
        failed |= op.infiniopCreateRMSNormDescriptor(
            handle, ctypes.byref(desc), tensors[0], tensors[0], tensors[1], epsilon
        )
        failed |= op.infiniopDestroyTensorDescriptor(tensors[0]) | op.infiniopDestroyTensorDescriptor(tensors[1])
        failed |= op.infiniopGetRMSNormWorkspaceSize(desc, ctypes.byref(size))
        failed |= op.infiniopRMSNorm(desc, none, zero, data, data, weight, none)
        return failed | op.infiniopDestroyRMSNormDescriptor(desc)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    with Handle() as handle:
        failed = 0
        for _ in range(2_000):
            failed |= cycle(handle)
        before = resident()
        for _ in range(100_000):
            failed |= cycle(handle)
        assert failed == 0
        assert sanitized() or resident() - before < 256  # pages: a leak of 16 bytes a cycle would be 390


def test_tensor_descriptors_that_cannot_be() -> None:
    create, desc = c_function("infiniopCreateTensorDescriptor"), ctypes.c_void_p()

    def refused(ndim: int, shape: list[int] | None, strides: list[int] | None, dtype: int) -> str:
        with pytest.raises(Exception) as caught:  # noqa: B017 -- its status is part of what is returned
            create(
                ctypes.byref(desc),
                ctypes.c_size_t(ndim),
                None if shape is None else (ctypes.c_size_t * len(shape))(*shape),
                None if strides is None else (ctypes.c_ssize_t * len(strides))(*strides),
                dtype,
            )
        assert not desc
        return f"{caught.value.status}: {caught.value}"  # type: ignore[attr-defined]

    name = "infiniopCreateTensorDescriptor: "
    assert refused(2, None, None, 13) == f"NULL_POINTER: {name}shape must not be NULL"
    assert refused(9, [1] * 9, None, 13) == f"BAD_TENSOR_SHAPE: {name}ndim must be at most 8, got 9"
    for dtype in (0, 20, -1, 2**31 - 1):
        assert refused(1, [1], None, dtype) == (
            f"BAD_TENSOR_DTYPE: {name}dtype must be 1 to 19 (infiniDtype_t), got {dtype}"
        )
    assert refused(1, [2**63], None, 13).startswith(f"BAD_TENSOR_SHAPE: {name}shape must be below 2^63")
    assert refused(2, [2**32, 2**32], None, 7).startswith(f"BAD_TENSOR_SHAPE: {name}shape must describe less than 2^63")
    assert refused(3, [0, 2**62, 2**62], None, 7).startswith(f"BAD_TENSOR_SHAPE: {name}shape must describe less than")
    for stride in (2**62, -(2**62), -(2**63)):
        assert refused(1, [4], [stride], 13).startswith(f"BAD_TENSOR_STRIDES: {name}strides must reach less than 2^63")


def test_randomsamplebatch_is_not_there() -> None:
    with pytest.raises(RuntimeError) as caught:
        c_function("infiniopCreateRandomSampleBatchDescriptor")(None, None, None, None)
    assert caught.value.status == "NOT_IMPLEMENTED"  # type: ignore[attr-defined]


ENGINE = r"""
#include <infinicore.h>
#include <infiniop.h>
#include <infiniccl.h>
{more}
__C __export infiniStatus_t engine_devices(int *count);
__C __export size_t engine_relu(float *x, size_t n);

infiniStatus_t engine_devices(int *count) { return infinirtGetDeviceCount(INFINI_DEVICE_CPU, count); }

size_t engine_relu(float *x, size_t n) {
    infiniopHandle_t handle;
    infiniopTensorDescriptor_t tensor;
    infiniopReluDescriptor_t relu;
    if (infiniopCreateHandle(&handle) || infiniopCreateTensorDescriptor(&tensor, 1, &n, NULL, INFINI_DTYPE_F32) ||
        infiniopCreateReluDescriptor(handle, &relu, tensor, tensor) || infiniopRelu(relu, NULL, 0, x, x, NULL) ||
        infiniopDestroyReluDescriptor(relu) || infiniopDestroyTensorDescriptor(tensor) ||
        infiniopDestroyHandle(handle)) {
        return 0;
    }
    return n;
}
"""


@pytest.mark.parametrize("language", ["c", "c++"])
def test_a_callers_own_functions(language: str, tmp_path: Path) -> None:
    """__C and __export as engines declare theirs with; the compilers' headers may follow infinicore.h."""
    more = "#include <vector>\n#include <algorithm>" if language == "c++" else "#include <stdio.h>"
    more += "\n#if defined(__x86_64__)\n#include <immintrin.h>\n#include <x86intrin.h>\n#endif"
    source, library, lib = tmp_path / f"engine.{language[0]}", tmp_path / "engine.so", str(ROOT / "lib")
    source.write_text(ENGINE.replace("{more}", more))
    compiler = ["cc", "-std=c99"] if language == "c" else ["c++", "-std=c++17", "-x", "c++"]
    links = [f"-I{ROOT / 'include'}", f"-L{lib}", "-linfiniop", "-linfinirt", f"-Wl,-rpath,{lib}"]
    flags = ["-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC"]
    shell(*compiler, *flags, str(source), *links, "-o", str(library))
    engine, count = ctypes.CDLL(str(library)), ctypes.c_int()
    assert engine.engine_devices(ctypes.byref(count)) == 0 and count.value == 1
    x = (ctypes.c_float * 3)(-1.0, 0.5, -0.0)
    assert engine.engine_relu(x, ctypes.c_size_t(3)) == 3 and list(x) == [0.0, 0.5, 0.0]


SYNCHRONISES_NEVER = r"""
#include <infiniop.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#define CHECK(call) \
    if ((call) != INFINI_STATUS_SUCCESS) { \
        puts(infiniGetLastErrorMessage()); \
        return 1; \
    }

int main(void) {
    const size_t n = 3000;
    infiniopHandle_t handle;
    infiniopTensorDescriptor_t tensor;
    infiniopAddDescriptor_t add;
    infinirtStream_t stream;
    CHECK(infiniopCreateHandle(&handle));
    CHECK(infiniopCreateTensorDescriptor(&tensor, 1, &n, NULL, INFINI_DTYPE_F32));
    CHECK(infiniopCreateAddDescriptor(handle, &add, tensor, tensor, tensor));
    CHECK(infinirtStreamCreate(&stream));
    for (int round = 0; round < 5000; ++round) {
        float *a = malloc(n * sizeof *a), *b = malloc(n * sizeof *b), *c = calloc(n, sizeof *c);
        void *copy;
        for (size_t i = 0; i < n; ++i) {
            a[i] = (float)i;
            b[i] = (float)round;
        }
        CHECK(infinirtMallocAsync(&copy, n * sizeof *c, stream));
        CHECK(infiniopAdd(add, NULL, 0, c, a, b, stream));
        CHECK(infinirtMemcpyAsync(copy, c, n * sizeof *c, INFINIRT_MEMCPY_H2D, stream));
        for (size_t i = 0; i < n; ++i) {
            if (c[i] != (float)(i + round) || ((float *)copy)[i] != c[i]) {
                printf("round %d, element %zu: %g\n", round, i, (double)c[i]);
                return 1;
            }
        }
        memset(a, 0xff, n * sizeof *a);
        free(a);
        free(b);
        free(c);
        CHECK(infinirtFreeAsync(copy, stream));
    }
    puts("right");
    return 0;
}
"""


def test_results_are_there_without_a_synchronise(tmp_path: Path) -> None:
    """As programs written for the reference read them: a stream of the CPU has done its work on return."""
    source, binary, lib = tmp_path / "program.c", str(tmp_path / "program"), str(ROOT / "lib")
    source.write_text(SYNCHRONISES_NEVER)
    links = [f"-I{ROOT / 'include'}", f"-L{lib}", "-linfiniop", "-linfinirt", f"-Wl,-rpath,{lib}"]
    shell("cc", *STRICT, str(source), *links, "-o", binary)
    assert shell(binary) == "right\n"


OUT_OF_MEMORY = r"""
#include <infiniop.h>
#include <stdio.h>
#include <sys/resource.h>

int main(void) {
    const struct rlimit little = {64 << 20, 64 << 20};
    const size_t n = 4;
    infiniopTensorDescriptor_t tensor;
    void *memory;
    infiniStatus_t status = INFINI_STATUS_SUCCESS;
    setrlimit(RLIMIT_AS, &little);
    if (infinirtMalloc(&memory, 1 << 28) != INFINI_STATUS_INTERNAL_ERROR) {
        return 1;
    }
    puts(infiniGetLastErrorMessage());
    for (int i = 0; i < 10000000 && status == INFINI_STATUS_SUCCESS; ++i) {
        status = infiniopCreateTensorDescriptor(&tensor, 1, &n, NULL, INFINI_DTYPE_F32);
    }
    printf("%d %s\n", (int)status, infiniGetLastErrorMessage());
    return 0;
}
"""


@pytest.mark.skipif(sanitized(), reason="sanitizers need the address space")
def test_out_of_memory_is_one_sentence(tmp_path: Path) -> None:
    source, binary, lib = tmp_path / "program.c", str(tmp_path / "program"), str(ROOT / "lib")
    source.write_text(OUT_OF_MEMORY)
    links = [f"-I{ROOT / 'include'}", f"-L{lib}", "-linfiniop", "-linfinirt", f"-Wl,-rpath,{lib}"]
    shell("cc", *STRICT, str(source), *links, "-o", binary)
    assert shell(binary, OMP_NUM_THREADS="1") == (
        "infinirtMalloc: no memory for 268435456 bytes on cpu 0\n"
        "1 infiniopCreateTensorDescriptor: no memory for the records of this call\n"
    )


@pytest.mark.skipif(sanitized(), reason="sanitizers need the address space")
def test_no_memory_for_scratch_names_the_op() -> None:
    code = """
import resource, torch, torch_infini
x, w, out = torch.randn(64, 32768), torch.randn(128, 32768), torch.empty(64, 128)
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 20),) * 2)
try:
    torch.ops.infini.linear.out(x, w, None, out=out)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    said = shell(sys.executable, "-c", code, OMP_NUM_THREADS="1", PYTHONPATH=str(CSRC.parent), INFINI_PRODUCTS="ours")
    assert re.fullmatch(r"infini::linear: no memory for \d{7,} bytes of scratch\n", said), said
