"""The emulation of CUDA (csrc/emulation) is as strict as the hardware: small kernels with one fault each.

tests/test_cuda*.py run the ops' kernels in it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="fibers switch stacks on x86-64")

CODE = r"""
#include "cuda/async_copy.cuh"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/vectors.cuh"
#include "cuda/packed32.cuh"

#include <cstdio>
#include <cstdlib>
#include <string>

using namespace infini;

void emulation::enqueue(cudaStream_t, std::function<void()> work) { work(); }

alignas(64) static float memory[4096];
static float result[64];

__global__ void load_vector(const float *from) {
    cuda::grid_dependency_sync();
    const auto vector = cuda::load(from, true, 4);
    result[threadIdx.x] = vector.values[0];
}
__global__ void store_vector(float *to) {
    cuda::grid_dependency_sync();
    cuda::store(to, cuda::Vector<float>{{1, 2, 3, 4}}, true, 4);
}
__global__ void load_packed32(const float *from) {
    cuda::grid_dependency_sync();
    result[threadIdx.x] = static_cast<float>(cuda::load_packed32<float, 4>(from, true, 4).values[0]);
}
__global__ void store_packed32(float *to) {
    cuda::grid_dependency_sync();
    cuda::store_packed32(to, cuda::Vector<float>{{1, 2, 3, 4}}, true, 4);
}
__global__ void copy(int to, const float *from) {
    cuda::grid_dependency_sync();
    float *const shared = cuda::dynamic_shared<float>();
    cuda::async_copy(shared + to, from);
    cuda::async_commit();
    cuda::async_wait<0>();
    result[0] = shared[to];
}
__global__ void load_matrices(int first) {
    cuda::grid_dependency_sync();
    uint32_t out[4];
    cuda::load_matrices(out, cuda::dynamic_shared<float>() + first + 4 * threadIdx.x);
}

// Copies a word of which the first two bytes are wanted; the others become zeros, and those behind stay.
__global__ void copy_word(const uint8_t *from) {
    cuda::grid_dependency_sync();
    uint32_t *const shared = cuda::dynamic_shared<uint32_t>();
    shared[0] = shared[1] = 0xffffffff;
    cuda::async_copy<4>(shared, from, 2);
    cuda::async_commit();
    cuda::async_wait<0>();
    result[0] = shared[0] == (from[0] | from[1] << 8) && shared[1] == 0xffffffff;
}
// Whether a matrix transposed in registers is what ldmatrix gives transposed.
__global__ void transpose() {
    cuda::grid_dependency_sync();
    uint16_t *const shared = cuda::dynamic_shared<uint16_t>();
    shared[threadIdx.x] = threadIdx.x * 37;
    shared[threadIdx.x + 32] = threadIdx.x * 41 + 1;
    __syncwarp();
    uint32_t there[4], across[4];
    cuda::load_matrices(there, shared + threadIdx.x % 8 * 8);
    cuda::load_matrices_transposed(across, shared + threadIdx.x % 8 * 8);
    result[threadIdx.x] = cuda::transpose_matrix(there[0]) == across[0];
}

// Sums 16 vectors through a ring of three; kLeft: groups that may be under way where one is read.
template <int kLeft> __global__ void through_a_ring(const float *from) {
    cuda::grid_dependency_sync();
    float *const ring = cuda::dynamic_shared<float>();
    const auto start = [&](int i) {
        if (i < 16) {
            cuda::async_copy(ring + i % 3 * 4, from + 4 * i);
        }
        cuda::async_commit();
    };
    start(0);
    start(1);
    float sum = 0;
    for (int i = 0; i < 16; ++i) {
        cuda::async_wait<kLeft>();
        __syncwarp();
        start(i + 2);
        sum += ring[i % 3 * 4 + 1];
    }
    result[0] = sum;
}

// The first block writes to static shared memory; the second one only reads.
__global__ void read_what_nothing_wrote() {
    cuda::grid_dependency_sync();
    INFINI_SHARED(row, float[32]);
    if (blockIdx.x == 0) {
        row[threadIdx.x] = 1;
    }
    __syncthreads();
    result[blockIdx.x * 32 + threadIdx.x] = row[threadIdx.x];
}

// c = first + 16 products of x and 1.
__global__ void add_by_tensor_cores(float first, float x) {
    cuda::grid_dependency_sync();
    const uint32_t pair = cuda::narrow<bf16>(x).bits * 0x10001u, one = cuda::narrow<bf16>(1).bits * 0x10001u;
    const uint32_t a[4] = {pair, pair, pair, pair};
    float c[4] = {first, first, first, first};
    cuda::mma<bf16>(c, a, one, one);
    result[threadIdx.x] = c[3];
}

__global__ void wait_for_nothing() {}
__global__ void wait_in_some_threads() {
    if (threadIdx.x != 5) {
        cuda::grid_dependency_sync();
    }
}
__global__ void wait_twice() {
    cuda::grid_dependency_sync();
    cuda::grid_dependency_sync();
}

static void wanted(float value, int count = 32) {
    for (int i = 0; i < count; ++i) {
        if (!(result[i] == value)) {
            throw Error(INFINI_STATUS_INTERNAL_ERROR, message("wrong numbers: ", result[i], ", not ", value));
        }
    }
}

template <typename... P> static void run(void (*kernel)(P...), int threads, const std::common_type_t<P> &...args) {
    cuda::launch(ExecutionContext{}, kernel, dim3(1), dim3(threads), 8192, args...);
}

int main(int, char **arguments) {
    const int at = std::atoi(arguments[2]); // elements of 4 bytes from an address that is aligned
    const std::string name = arguments[1];
    for (int i = 0; i < 4096; ++i) {
        memory[i] = static_cast<float>(i);
    }
    try {
        if (name == "load a vector") { run(load_vector, 1, memory + at); }
        if (name == "store a vector") { run(store_vector, 1, memory + at); }
        if (name == "vector load") { run(load_packed32, 1, memory + at); }
        if (name == "vector store") { run(store_packed32, 1, memory + at); }
        if (name == "copy from") { run(copy, 1, 0, memory + at); wanted(static_cast<float>(at), 1); }
        if (name == "copy to") { run(copy, 1, at, memory); wanted(0, 1); }
        if (name == "copy a word") {
            run(copy_word, 1, reinterpret_cast<const uint8_t *>(memory + 7) + at);
            wanted(1, 1);
        }
        if (name == "transpose") { run(transpose, 32); wanted(1); }
        if (name == "load matrices") { run(load_matrices, 32, at); }
        if (name == "wait") { run(through_a_ring<1>, 1, memory); wanted(496, 1); }
        if (name == "wait too little") { run(through_a_ring<2>, 1, memory); wanted(496, 1); }
        if (name == "wait for nothing") { run(wait_for_nothing, 32); }
        if (name == "wait in some threads") { run(wait_in_some_threads, 32); }
        if (name == "wait twice") { run(wait_twice, 32); }
        if (name == "shared memory") {
            cuda::launch(ExecutionContext{}, read_what_nothing_wrote, dim3(2), dim3(32), 0);
            wanted(1, 32);
            wanted(1, 64);
        }
        if (name == "tensor cores") {
            run(add_by_tensor_cores, 32, 1.0f, 0x1p-3f);
            wanted(3);
            run(add_by_tensor_cores, 32, 1.0f, 0x1p-25f); // below the last bit that is kept beside 1
            wanted(1);
            run(add_by_tensor_cores, 32, 1.0f, 0x1.8p-24f); // of which one bit is kept
            wanted(1 + 0x1p-20f);
            run(add_by_tensor_cores, 32, -1.0f, -0x1.8p-24f);
            wanted(-1 - 0x1p-20f);
            run(add_by_tensor_cores, 32, 1.0f, -0x1p-24f); // nothing is lost: the sum is below 1
            wanted(1 - 0x1p-20f);
            run(add_by_tensor_cores, 32, 0.0f, INFINITY);
            wanted(INFINITY);
        }
    } catch (const Error &error) {
        std::puts(error.what());
        return 1;
    }
    std::puts("fine");
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], str]:
    """run(name, offset): what the program says."""
    compiler = shutil.which(os.environ.get("CXX", "g++").split()[-1])
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("emulation")
    source, program = folder / "kernels.cpp", folder / "kernels"
    source.write_text(CODE)
    flags = (
        "-std=c++17 -O1 -DINFINI_EMULATION -fsanitize=alignment -fno-sanitize-recover=alignment -Wno-unknown-pragmas"
    )
    folders = [f"-I{ROOT}/csrc/{name}" for name in ("emulation", "include", "common")]
    sources = [str(source), str(ROOT / "csrc/emulation/emulator.cpp")]
    objects = [folder / f"{i}.o" for i in range(len(sources))]
    command = [compiler, *flags.split(), *folders, "-c"]
    both = [subprocess.Popen([*command, text, "-o", made]) for text, made in zip(sources, objects, strict=True)]
    assert [process.wait() for process in both] == [0, 0]
    # Without the sanitizer's own library: emulator.cpp answers for it.
    subprocess.run([compiler, *objects, "-o", program], check=True)

    def call(name: str, offset: int = 0) -> str:
        done = subprocess.run([program, name, str(offset)], capture_output=True, text=True)
        assert done.returncode in (0, 1), done
        return done.stdout.strip()

    return call


MISALIGNED = {
    "load a vector": "an access to 'const struct Vector'",
    "store a vector": "an access to 'struct Vector'",
    "vector load": "a load of a vector",
    "vector store": "a store of a vector",
    "copy from": "cp.async from global memory",
    "copy to": "cp.async to shared memory",
    "load matrices": "ldmatrix",
}


@pytest.mark.parametrize("name", MISALIGNED)
def test_misaligned_accesses(run: Callable[..., str], name: str) -> None:
    """An address that is no multiple of the access's size ends the kernel with its name, as it does on a GPU."""
    assert run(name) == "fine" and run(name, 4) == "fine"
    for offset, multiple in ((1, 4), (2, 8)):
        said = run(name, offset)
        assert said.startswith(f"infini: emulated kernel: misaligned address: {MISALIGNED[name]}"), said
        assert f" at a multiple of {multiple} bytes, must be one of 16 (block 0, 0, 0; thread " in said


def test_a_wait_for_too_few_copies(run: Callable[..., str]) -> None:
    assert run("wait") == "fine"
    assert run("wait too little").startswith("wrong numbers: ")


@pytest.mark.parametrize(
    ("name", "calls", "thread"),
    [("wait for nothing", 0, r"\d+"), ("wait in some threads", 0, "5"), ("wait twice", 2, r"\d+")],
)
def test_a_kernel_that_may_overtake_the_one_before(run: Callable[..., str], name: str, calls: int, thread: str) -> None:
    said = run(name)
    rule = r"infini: emulated kernel: every thread must call cuda::grid_dependency_sync\(\) once, got "
    assert re.fullmatch(rf"{rule}{calls} calls \(block 0, 0, 0; thread {thread}, 0, 0\)", said), said


def test_copies_of_words(run: Callable[..., str]) -> None:
    assert run("copy a word") == "fine" and run("copy a word", 4) == "fine"
    said = run("copy a word", 2)
    assert said.startswith("infini: emulated kernel: misaligned address: cp.async from global memory"), said
    assert "must be one of 4 " in said


def test_matrices_are_transposed(run: Callable[..., str]) -> None:
    assert run("transpose") == "fine"


def test_static_shared_memory_keeps_nothing(run: Callable[..., str]) -> None:
    """What the block before wrote is gone."""
    assert run("shared memory") in ("wrong numbers: nan, not 1", "wrong numbers: -nan, not 1")


def test_tensor_cores_truncate(run: Callable[..., str]) -> None:
    assert run("tensor cores") == "fine"


def test_all_static_shared_memory_is_known() -> None:
    """__shared__ itself would be memory that the emulation cannot poison."""
    sources = [path for suffix in ("*.cu", "*.cuh", "*.h") for path in (ROOT / "csrc").rglob(suffix)]
    uses = [str(path.relative_to(ROOT)) for path in sources if "__shared__" in path.read_text()]
    assert uses == ["csrc/common/cuda/launch.cuh"]
