"""Tile registers: the level avx512_amx, emulated on any machine. `make test-tiles` runs the ops' tests at that level.

The emulation itself is tested by a C++ program, which runs on the registers as well where there are some.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_infini
from torch_infini._core.library import cpu_tiles

ROOT = Path(__file__).resolve().parent.parent
REAL = "avx512_amx" in torch_infini.cpu_capabilities() and not cpu_tiles()

# Products of random tiles of all shapes, against sums in the order of Intel's manual; prints a number for their bits.
PRODUCTS = r"""
#include <cmath>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <sys/syscall.h>
#include <unistd.h>

#include "tile_registers.h"

using namespace infini::INFINI_LEVEL;

static uint64_t state = 1;
static uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33);
}
static float wide(uint16_t bits) {
    const uint32_t u = static_cast<uint32_t>((bits & 0x7f80) == 0 ? bits & 0x8000 : bits) << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}
static float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

int main() {
    syscall(SYS_arch_prctl, 0x1023, 18);
    uint64_t hash = 0;
    for (int round = 0; round < 300; ++round) {
        const int m = 1 + next() % 16, n = 1 + next() % 16, k = 1 + next() % 16, kind = round % 3;
        alignas(64) uint16_t a[16][32] = {}, b[16][32] = {};
        alignas(64) float sums[16][16], wanted[16][16];
        int32_t whole[16][16], whole_wanted[16][16];
        for (auto *tile : {a, b}) {
            for (int i = 0; i < 16; ++i) {
                for (int j = 0; j < 32; ++j) { // normal numbers, and now and then denormal and tiny ones
                    const uint32_t r = next();
                    const uint32_t exponent = r % 41 == 0 ? 0x0300 : 0x3f00 + (r & 0x100);
                    tile[i][j] = kind ? r : r % 37 == 0 ? r & 0x807f : (r & 0x80ff) | exponent;
                }
            }
        }
        for (int i = 0; i < 256; ++i) {
            sums[0][i] = static_cast<float>(static_cast<int>(next() % 2000) - 1000) / 64;
            whole[0][i] = static_cast<int32_t>(next());
        }
        std::memcpy(wanted, sums, sizeof sums);
        std::memcpy(whole_wanted, whole, sizeof whole);
        for (int i = 0; i < m; ++i) {
            for (int j = 0; j < n; ++j) {
                float part[2] = {};
                for (int w = 0; w < k; ++w) {
                    for (int h = 0; h < 2; ++h) {
                        part[h] = flushed(std::fma(wide(a[i][2 * w + h]), wide(b[w][2 * j + h]), part[h]));
                    }
                    for (int byte = 0; byte < 4; ++byte) {
                        const auto x = reinterpret_cast<const uint8_t *>(a[i])[4 * w + byte];
                        const auto y = reinterpret_cast<const int8_t *>(b[w])[4 * j + byte];
                        const int product = kind == 1 ? static_cast<int8_t>(x) * y : x * y;
                        whole_wanted[i][j] = static_cast<int32_t>(static_cast<uint32_t>(whole_wanted[i][j]) + product);
                    }
                }
                wanted[i][j] = flushed(flushed(wanted[i][j]) + flushed(part[0] + part[1]));
            }
        }
        TileShapes shapes;
        shapes.rows[0] = shapes.rows[1] = m;
        shapes.rows[2] = k;
        shapes.row_bytes[0] = shapes.row_bytes[2] = 4 * n;
        shapes.row_bytes[1] = 4 * k;
        {
            const TileScope scope(shapes);
            tile_load<1>(a, 64);
            tile_load<2>(b, 64);
            if (kind == 0) {
                tile_load<0>(sums, 64);
                tile_dot_bfloat16<0, 1, 2>();
                tile_store<0>(sums, 64);
            } else {
                tile_load<0>(whole, 64);
                kind == 1 ? tile_dot_int8<0, 1, 2>() : tile_dot_uint8<0, 1, 2>();
                tile_store<0>(whole, 64);
            }
        }
        const void *came = kind == 0 ? (void *)sums : (void *)whole;
        if (std::memcmp(came, kind == 0 ? (void *)wanted : (void *)whole_wanted, sizeof sums) != 0) {
            std::printf("round %d: %d x %d x %d of kind %d differ\n", round, m, n, k, kind);
            return 1;
        }
        for (int i = 0; i < 512; ++i) {
            hash = hash * 31 + static_cast<const uint16_t *>(came)[i];
        }
    }
    std::printf("%llx\n", static_cast<unsigned long long>(hash));
}
"""

# What a CPU refuses, each by itself.
FAULTS = r"""
#include <cstdlib>

#include "tile_registers.h"

using namespace infini::INFINI_LEVEL;

int main(int, char **arguments) {
    alignas(64) static char memory[16][64];
    TileShapes shapes = full_tiles();
    switch (std::atoi(arguments[1])) {
    case 0: tile_zero<0>(); break;
    case 1: shapes.palette = 2; tiles_configure(shapes); break;
    case 2: shapes.rows[3] = 17; tiles_configure(shapes); break;
    case 3: shapes.rows[2] = 0; shapes.row_bytes[2] = 0; tiles_configure(shapes); tile_load<2>(memory, 64); break;
    case 4: shapes.rows[2] = 8; tiles_configure(shapes); tile_dot_bfloat16<0, 1, 2>(); break;
    case 5: shapes.rows[0] = 8; tiles_configure(shapes); tile_dot_int8<0, 1, 2>(); break;
    case 6: tiles_configure(shapes); tiles_release(); tile_store<0>(memory, 64); break;
    case 7: tiles_configure(shapes); tiles_configure(shapes); break;
    case 8: shapes.rows[9] = 1; tiles_configure(shapes); break;
    case 9: { // rows that a smaller load leaves out are 0, not what was there
        for (auto &row : memory) { row[0] = 1; }
        tiles_configure(shapes); tile_load<1>(memory, 64); tile_load<2>(memory, 64); tiles_release();
        shapes.rows[1] = shapes.rows[0] = 3; tiles_configure(shapes);
        tile_load<0>(memory, 64); tile_load<1>(memory, 64); tile_dot_int8<0, 1, 2>(); tile_store<0>(memory, 64);
        for (auto &row : memory) { if (row[0] != 1) { return 2; } }
        tiles_release();
        return 0;
    }
    }
    return 3;
}
"""


def compiled(folder: Path, name: str, code: str, *flags: str) -> Path:
    source, program = folder / f"{name}.cpp", folder / name
    source.write_text(code)
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        f"-I{ROOT}/csrc/common",
        str(source),
        "-o",
        str(program),
    ]
    subprocess.run([*command, *flags], check=True)
    return program


def test_arithmetic(tmp_path: Path) -> None:
    """Sums in the order of the manual, to the bit; and the registers agree where there are some."""
    emulated = compiled(tmp_path, "emulated", PRODUCTS, "-DINFINI_EMULATED_TILES")
    first = subprocess.run([emulated], capture_output=True, text=True)
    assert first.returncode == 0, first.stdout
    if REAL:
        amx = compiled(tmp_path, "amx", PRODUCTS, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
        assert subprocess.run([amx], capture_output=True, text=True).stdout == first.stdout


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="tile registers are x86-64's")
def test_registers_compile(tmp_path: Path) -> None:
    """On machines without them too: the assembler knows every instruction."""
    flags = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
    program = compiled(tmp_path, "amx", PRODUCTS, *flags)
    text = subprocess.run(["objdump", "-d", program], capture_output=True, text=True, check=True).stdout
    for name in ("ldtilecfg", "tilerelease", "tileloadd", "tilestored", "tdpbf16ps", "tdpbssd", "tdpbusd"):
        assert name in text, name
    # The order of the operands: sum, left, right in Intel's notation is right, left, sum here.
    assert "tdpbf16ps %tmm2,%tmm1,%tmm0" in text


REFUSED = {
    0: "no configuration is loaded (tile 0)",
    1: "the palette is not 1 (tile 0)",
    2: "the configuration has a shape that no tile can have (tile 3)",
    3: "the configuration leaves this tile out (tile 2)",
    4: "the shapes of a product do not match (tile 0)",
    5: "the shapes of a product do not match (tile 0)",
    6: "no configuration is loaded (tile 0)",
    7: "configured anew without a release (tile 0)",
    8: "the configuration has a shape that no tile can have (tile 9)",
}


def test_faults(tmp_path: Path) -> None:
    program = compiled(tmp_path, "faults", FAULTS, "-DINFINI_EMULATED_TILES")
    for number, sentence in REFUSED.items():
        done = subprocess.run([program, str(number)], capture_output=True, text=True)
        assert done.stderr == f"infini: emulated tiles: {sentence}\n", number
        assert done.returncode < 0
    assert subprocess.run([program, "9"]).returncode == 0


# A product at the emulated level, its bits alone and among others, on one thread and two; in a separate process.
SAME_BITS = """
import torch, torch_infini
from torch_infini.testing import threads_set_to
assert torch_infini.cpu_capability() == "avx512_amx"
g = torch.Generator().manual_seed(0)
x, w = (torch.randn(n, 1100, generator=g).bfloat16() for n in (130, 300))
packed = torch.empty(-(-300 // 48), 550, 48, 2, dtype=torch.bfloat16)
torch.ops.infini.pack_linear(packed, w, 0)
ops = torch.ops.infini
ways = {
    "linear": lambda x: ops.linear(x, w),
    "fused_linear": lambda x: ops.fused_linear(x, w[:100], w[100:]),
    "linear_packed": lambda x: ops.linear_packed(x, packed, 300),
    "matmul": lambda x: ops.matmul(x, w.t()),
    "matmul of rows": lambda x: ops.matmul(x, w.t().contiguous()),
    "matmul of columns": lambda x: ops.matmul(x.t().contiguous().t(), w.t()),
}
# Integers are exact in bfloat16, so that an int8 weight adds in the order of a dense one.
q, ones = torch.randint(-128, 128, (300, 1100), dtype=torch.int8, generator=g), torch.ones(300)
assert torch.equal(ops.linear_int8(x, q, ones), ops.linear(x, q.bfloat16()))
expected = ways["linear"](x)
assert (expected.double() - x.double() @ w.double().t()).abs().max() < 0.6
for name, way in ways.items():
    for rows in (1, 16, 17, 33, 97, 130):
        for threads in (1, 2):
            with threads_set_to(threads):
                assert torch.equal(way(x[:rows]), expected[:rows]), (name, rows, threads)
# Rows in parts of which the last ones are few enough to be multiplied in another way: two threads, or two passes.
# Or so many that w is copied into panels, k in several stretches.
for m, k, n in ((200, 4100, 20), (193, 85000, 33), (1040, 2700, 40)):
    x, w = (torch.randn(rows, k, generator=g).bfloat16() for rows in (m, n))
    with threads_set_to(2):
        y, z = ops.linear(x, w), ops.matmul(x, w.t())
        if m > 1024:
            packed = torch.empty(1, k // 2, 48, 2, dtype=torch.bfloat16)
            ops.pack_linear(packed, w, 0)
            assert torch.equal(ops.linear_packed(x, packed, n), y)
            assert torch.equal(ops.matmul(x, w.t().contiguous()), y)
    for first in (0, 7, 1023) if m > 1024 else range(0, m, 32):
        alone = ops.linear(x[first : first + 32], w)
        assert torch.equal(y[first : first + 32], alone) and torch.equal(z[first : first + 32], alone), (m, first)
# Quantized weights: rows in passes, in batches of any size and on any number of threads.
q8 = (torch.randint(-127, 128, (70, 192), dtype=torch.int8, generator=g), torch.rand(70, generator=g))
q4 = [
    (torch.randint(0, 256, (70, 96), dtype=torch.uint8, generator=g), *torch.rand(2, 70, 192 // group, generator=g))
    for group in (32, 64)
]
for op, weight in ((ops.linear_int8, q8), (ops.linear_int4, q4[0]), (ops.linear_int4, q4[1])):
    for quantize_x in (False, True):
        x = torch.randn(1100, 192, generator=g).bfloat16()
        for threads in (1, 2):
            with threads_set_to(threads):
                y = op(x, *weight, quantize_x=quantize_x)
                # Rows that are not quantized are multiplied in tiles from 5 on, in another order.
                for first, last in ((0, 5), (1024, 1033), (1060, 1100), (3, 100), *((7, 8), (9, 22)) * quantize_x):
                    alone = op(x[first:last], *weight, quantize_x=quantize_x)
                    assert torch.equal(alone, y[first:last]), (op, quantize_x, threads, first, last)
x, w = (torch.randn(rows, 700, generator=g) for rows in (300, 70))
for name, block in (("table4", 576), ("group8", 1088)):
    weight = torch.zeros(5, 11, block, dtype=torch.uint8), torch.zeros(70)
    getattr(ops, f"quantize_{name}")(*weight, w, 0)
    op = getattr(ops, f"linear_{name}")
    for threads in (1, 2):
        with threads_set_to(threads):
            y = op(x, *weight)
            for first, last in ((0, 1), (7, 8), (9, 22), (3, 100), (280, 297)):
                assert torch.equal(op(x[first:last], *weight), y[first:last]), (name, threads, first, last)
print("same bits")
"""


# Attention at the emulated level. Before each call, another one leaves NaN wherever it has computed: what a tile holds
# behind the last row, key or column of a block must not get into any result.
ATTENTION = """
import math
import torch, torch_infini
from torch_infini.testing.ops.paged_attention import inputs
from torch_infini.testing import threads_set_to
assert torch_infini.cpu_capability() == "avx512_amx"
g = torch.Generator().manual_seed(0)
ops = torch.ops.infini
nan = torch.full((1, 97, 2, 128), torch.nan, dtype=torch.bfloat16)

def attend(op, *args, **kwargs):
    ops.attention(nan, nan, nan)
    return op(*args, **kwargs)

def normal(*shape):
    return torch.randn(shape, generator=g).bfloat16()

# A sum that cancels shows what adds it up: in tiles, even and odd products by themselves.
q, k = torch.zeros(2, 1, 13, 1, 32, dtype=torch.bfloat16)
q[..., :3], k[:, 0, :, :3] = 1, torch.tensor([2.0**24, 1, -(2.0**24)])
v = torch.zeros_like(k)
v[:, 0] = 1
scores = lambda rows: attend(ops.attention, q[:, :rows], k[:, :2], v[:, :2], causal=False, scale=1.0)
assert torch.equal(scores(13), torch.full_like(q, 1 / (1 + math.exp(-1)))), "13 rows are not in tiles"
assert torch.equal(scores(12), torch.full_like(q[:, :12], 0.5)), "12 rows are in tiles"

# Probabilities of more than bfloat16's 8 bits: averages of values with a mean near 0.
q, k = normal(1, 1, 1, 32).expand(1, 13, 1, 32), normal(1, 40, 1, 32)
weights = (q[0, 0, 0].double() @ k[0, :, 0].double().T * 32**-0.5).softmax(-1)
v = torch.randn(40, 32, dtype=torch.float64, generator=g)
v = (v - weights @ v).bfloat16()
error = (attend(ops.attention, q, k, v[None, :, None], causal=False) - weights @ v.double()).abs().max()
assert error < 2.0**-15, error

# In a batch, paged, with any number of threads: the bits of each sequence alone, its keys contiguous.
for size, block, heads, kv_heads in ((72, 5, 2, 2), (128, 32, 7, 1), (31, 16, 3, 3)):
    lengths, queries = (150, 37, 9, 129, 131, 700), (150, 14, 9, 97, 1, 13)
    q, k_cache, v_cache, tables, lens, starts = inputs(
        torch.bfloat16, lengths, heads, kv_heads, size, block, queries)
    slots = [tables[b, torch.arange(n) // block] * block + torch.arange(n) % block for b, n in enumerate(lengths)]
    unused = torch.ones(k_cache.shape[0] * block, dtype=torch.bool)
    unused[torch.cat(slots)] = False
    unused = unused.view(-1, 1, block, 1)
    expected = []
    for b, slot in enumerate(slots):
        k, v = (c.transpose(1, 2).flatten(0, 1)[slot][None] for c in (k_cache, v_cache))
        one = q[starts[b] : starts[b + 1]][None]
        with threads_set_to(1):
            expected.append(attend(ops.attention, one, k, v)[0])
        # The last of its queries as a separate chunk, and keys with the heads far apart.
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
        chunk = attend(ops.attention, one[:, -13:], k, v)[0]
        if queries[b] > 12:
            assert torch.equal(chunk, expected[-1][-13:]), ("chunk", size, heads, b)
    expected = torch.cat(expected)
    assert expected.isfinite().all(), (size, heads)
    k_cache, v_cache = (c.masked_fill(unused, torch.nan) for c in (k_cache, v_cache))
    for threads in (1, 2):
        with threads_set_to(threads):
            together = attend(ops.paged_attention_prefill, q, k_cache, v_cache, tables, lens, starts)
        assert torch.equal(together, expected), (size, block, heads, threads)

    # Integers are bfloat16 as they are; scales of keys and values meet scores and probabilities.
    k_cache, v_cache = torch.randint(-9, 10, (2, *k_cache.shape), generator=g, dtype=torch.int8)
    scales = torch.full(k_cache.shape[:3], torch.nan).masked_fill(~unused[..., 0], 0.25)
    integers = attend(ops.paged_attention_prefill, q, k_cache, v_cache, tables, lens, starts, k_scales=scales,
                      v_scales=scales)
    k_cache, v_cache = (c.bfloat16().masked_fill(unused, torch.nan) / 4 for c in (k_cache, v_cache))
    wanted = attend(ops.paged_attention_prefill, q, k_cache, v_cache, tables, lens, starts)
    assert torch.equal(integers[: starts[2]], wanted[: starts[2]]), ("int8", size, block, heads)
print("same bits")
"""


def at_tile_level(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "INFINI_EMULATE": "" if REAL else "amx", "INFINI_CPU_CAPABILITY": "avx512_amx"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)


@pytest.mark.full
def test_same_bits_from_every_door() -> None:
    """A row of x has the same bits alone or with others, from every op and in every layout: one order of the sum."""
    done = at_tile_level(SAME_BITS)
    assert done.stdout == "same bits\n", done.stderr


def test_attention() -> None:
    """Which rows are multiplied in tiles, and how exactly; their bits alone and in a batch, in any layout."""
    done = at_tile_level(ATTENTION)
    assert done.stdout == "same bits\n", done.stderr


# What the programs below share. Fresh memory is full of NaN.
SHARED = r"""
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "tensor_view.h"

static int planted = 0; // which of the faults that were planted in the sources is made

using namespace infini;

namespace infini::cpu {
void *scratch(size_t bytes) {
    static void *memory = nullptr;
    std::free(memory);
    memory = std::aligned_alloc(64, (bytes + 4095) / 4096 * 4096);
    std::memset(memory, 0xff, bytes);
    return memory;
}
} // namespace infini::cpu

static uint32_t state = 1;
static int next(int low, int high) {
    state = state * 1664525u + 1013904223u;
    return low + static_cast<int>((state >> 8) % static_cast<uint32_t>(high - low + 1));
}

static TensorView matrix(void *data, infiniDtype_t dtype, int64_t rows, int64_t columns, int64_t pitch) {
    TensorView view;
    view.data = data;
    view.dtype = dtype;
    view.ndim = 2;
    view.shape[0] = rows;
    view.shape[1] = columns;
    view.strides[0] = pitch;
    view.strides[1] = 1;
    return view;
}

static TensorView row(void *data, infiniDtype_t dtype, int64_t n) {
    TensorView view = matrix(data, dtype, n, 1, 1);
    view.ndim = 1;
    return view;
}
"""

# linear_int8 and linear_int4 in emulated tiles of integers, which float sums exactly, against sums of integers:
# strided, misaligned, several pieces of k, an end of k within a step.
QUANTIZED = (
    SHARED
    + r"""
#include "quantized_linear/quantized_linear_tiles.cpp"
#include "quantized_linear/quantized_x_tiles.cpp"

// A float of few bits as T.
static void put(float *to, double value) { *to = static_cast<float>(value); }
static void put(bf16 *to, double value) {
    const float x = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to->bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// group 0: int8. T: of x.
template <typename T> bool right(int64_t m, int64_t n, int64_t k, int64_t group, bool quantize, bool zeros) {
    const infiniDtype_t dtype = sizeof(T) == 2 ? INFINI_DTYPE_BF16 : INFINI_DTYPE_F32;
    const int64_t groups = group > 0 ? k / group : 1, bytes = group > 0 ? k / 2 : k;
    const int64_t x_pitch = k + 5, y_pitch = n + 3, w_pitch = bytes + 7;
    std::vector<T> x(m * x_pitch), y(m * y_pitch), bias(n);
    std::vector<uint8_t> w(n * w_pitch + 1);
    std::vector<float> scale(n * groups), zero(n * groups);
    std::vector<int> xs(m * k), q(n * k);
    for (int64_t i = 0; i < m * k; ++i) {
        xs[i] = quantize ? i % k == k / 2 ? 127 : next(-127, 127) : next(-3, 3);
        put(&x[i / k * x_pitch + i % k], xs[i]);
    }
    for (int64_t i = 0; i < n * k; ++i) {
        uint8_t &byte = w[1 + i / k * w_pitch + (group > 0 ? i % k / 2 : i % k)];
        q[i] = group > 0 ? next(-8, 7) : next(-128, 127);
        byte = static_cast<uint8_t>(group > 0 ? byte | (q[i] + 8) << i % 2 * 4 : q[i]);
    }
    for (int64_t i = 0; i < n * groups; ++i) {
        scale[i] = 0.5f * static_cast<float>(1 << next(0, 2));
        zero[i] = static_cast<float>(next(-2, 2));
    }
    for (int64_t i = 0; i < n; ++i) {
        put(&bias[i], next(-9, 9));
    }
    quantized_linear::Args a;
    a.y = matrix(y.data(), dtype, m, n, y_pitch);
    a.x = matrix(x.data(), dtype, m, k, x_pitch);
    a.weight = matrix(w.data() + 1, group > 0 ? INFINI_DTYPE_U8 : INFINI_DTYPE_I8, n, bytes, w_pitch);
    a.scales = matrix(scale.data(), INFINI_DTYPE_F32, n, groups, groups);
    a.scales.ndim = group > 0 ? 2 : 1;
    a.bias = row(bias.data(), dtype, n);
    a.quantize_x = quantize;
    if (zeros) {
        a.zeros = matrix(zero.data(), INFINI_DTYPE_F32, n, groups, groups);
    }
    namespace tiles = quantized_linear::emulated_amx;
    if (quantize) {
        group > 0 ? tiles::int4_quantized_x_tile_kernel(a) : tiles::int8_quantized_x_tile_kernel(a);
    } else {
        group > 0 ? tiles::int4_tile_kernel(a) : tiles::int8_tile_kernel(a);
    }
    std::vector<T> want(m * y_pitch);
    for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
            double sum = 0;
            for (int64_t g = 0; g < groups; ++g) {
                for (int64_t e = g * (k / groups); e < (g + 1) * (k / groups); ++e) {
                    sum += xs[i * k + e] * (q[j * k + e] * scale[j * groups + g] + (zeros ? zero[j * groups + g] : 0));
                }
            }
            float of_bias = 0;
            std::memcpy(reinterpret_cast<char *>(&of_bias) + 4 - sizeof(T), &bias[j], sizeof(T));
            put(&want[i * y_pitch + j], sum + of_bias);
        }
    }
    if (std::memcmp(y.data(), want.data(), want.size() * sizeof(T)) == 0) {
        return true;
    }
    std::printf("%d rows, %d -> %d, groups of %d%s: wrong\n", (int)m, (int)k, (int)n, (int)group,
                quantize ? ", x quantized" : "");
    return false;
}

int main(int, char **arguments) {
    planted = std::atoi(arguments[1]);
    bool all = true;
    for (const bool quantize : {false, true}) {
        for (const int64_t k : {75, quantize ? 5200 : 2700}) { // so many rows that weights are copied into panels
            all = all && (quantize ? right<float> : right<bf16>)(1030, 70, k, 0, quantize, false);
        }
        for (const int64_t m : {1, 19, 130}) {
            const int64_t n = m == 19 ? 70 : 35;
            const auto check = quantize ? &right<float> : &right<bf16>;
            for (const int64_t k : {1, 75, 1100}) {
                all = all && check(m, n, k, 0, quantize, false);
            }
            for (const int64_t group : {32, 64, 128}) {
                for (const int64_t k : {3 * group, int64_t{1152}}) {
                    all = all && check(m, n, k, group, quantize, k < 1000 || group > 32);
                }
            }
        }
    }
    return all ? 0 : 1;
}
"""
)

# Faults 1 to 10: a line, and what makes the fault of it if it is `planted`.
PLANTED = [
    ("nibble_tiles.h", "first + group", "(planted == 1 ? group : first + group)"),  # another group's scale
    ("nibble_tiles.h", "in_piece / steps * kPairRows", "(planted == 2 ? 0 : in_piece / steps * kPairRows)"),
    ("nibble_tiles.h", "step / steps * x_pitch", "(planted == 3 ? in_piece : step) / steps * x_pitch"),
    ("tile_loops.h", "std::memset(sums, 0, kPairSums * 4)", "std::memset(sums, 0, planted == 4 ? 0 : kPairSums * 4)"),
    ("tile_loops.h", "groups.part(of_groups()), true", "groups.part(of_groups()), planted != 5 || step == 0"),
    ("quantized_x_tiles.cpp", "q + g * padded + group, 0,", "q + g * padded + group, planted == 6,"),
    ("quantized_linear_tiles.cpp", "widen(from, left, at)", "widen(from, left - (planted == 7), at)"),  # the end of k
    (
        "tile_loops.h",
        "first == 0, PrefetchSpan{}",
        "planted != 8 && first == 0, PrefetchSpan{}",
    ),
    ("tile_loops.h", "? block * pairs + pair :", "? planted == 9 ? block : block * pairs + pair :"),
    ("tile_loops.h", "from(first - from,", "from(planted == 10 ? 0 : first - from,"),
]


def plant(
    folder: Path,
    code: str,
    faults: list[tuple[str, str, str]],
    sources: tuple[str, ...],
    only_wide: tuple[int, ...] = (),
) -> None:
    """The program finds nothing wrong, and each fault where it is planted; also as it is built for CPUs with tiles."""
    for name in sources:
        shutil.copytree(ROOT / "csrc" / "infiniop" / name, folder / name)
    for name, line, fault in faults:
        (path,) = folder.rglob(name)
        assert line in path.read_text(), f"{line!r} is not in {name}"
        path.write_text(path.read_text().replace(line, fault))
    flags = ("-w", "-fopenmp", "-DINFINI_EMULATED_TILES", f"-I{folder}", f"-I{ROOT}/csrc/include")
    builds = {"narrow": flags}
    if "avx512_bf16" in torch_infini.cpu_capabilities():  # what surrounds the tiles, as on a CPU that has them
        vectors = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16")
        builds["wide"] = (*flags, *vectors, "-mavx512vnni")
    for build, options in builds.items():
        program = compiled(folder, build, code, *options)
        for planted in range(len(faults) + 1):
            if planted in only_wide and build != "wide":
                continue
            environment = {**os.environ, "OMP_NUM_THREADS": "2"}
            done = subprocess.run([program, str(planted)], capture_output=True, text=True, env=environment)
            assert done.returncode == (planted > 0), (build, planted, done.stdout, done.stderr)
            assert done.stdout.endswith(": wrong\n") == (planted > 0), (build, planted, done.stdout)


@pytest.mark.full
def test_planted_faults(tmp_path: Path) -> None:
    """Quantized weights in tiles, right to the bit; and each of several faults is found."""
    plant(tmp_path, QUANTIZED, PLANTED, ("gemm", "int8_gemm", "quantized_linear"))


# linear, linear_packed and gemm with bfloat16: a row or two alone, in vector registers, has the bits that it has among
# 40, in tiles. Row 1 of x and some of w are so small that their products are denormals.
DENSE = (
    SHARED
    + r"""
#include "linear/linear_tiles.cpp"
#include "linear_packed/linear_packed_tiles.cpp"
#include "gemm/gemm_tiles.cpp"

static bf16 number(int exponent) {
    bf16 x;
    x.bits = static_cast<uint16_t>(next(0, 1) << 15 | (127 + exponent + next(0, 1)) << 7 | next(0, 127));
    return x;
}

static bool right(int64_t n, int64_t k) {
    const int64_t m = 40, x_pitch = k + 5, w_pitch = k + 3, words = (k + 1) / 2, panels = (n + 47) / 48;
    std::vector<bf16> x(m * x_pitch), w(n * w_pitch), bias(n), packed(panels * words * 96);
    for (int64_t i = 0; i < m * k; ++i) {
        x[i / k * x_pitch + i % k] = number(i / k == 1 ? -66 : 0);
    }
    for (int64_t i = 0; i < n * k; ++i) {
        const int64_t row = i / k, e = i % k;
        w[row * w_pitch + e] = number(row % 5 == 2 ? -61 : 0);
        packed[((row / 48 * words + e / 2) * 48 + row % 48) * 2 + e % 2] = w[row * w_pitch + e];
    }
    for (bf16 &value : bias) {
        value = number(0);
    }
    bool same = true;
    for (int way = 0; way < 4; ++way) {
        const auto multiply = [&](int64_t first, int64_t rows, bf16 *to) {
            const TensorView from = matrix(x.data() + first * x_pitch, INFINI_DTYPE_BF16, rows, k, x_pitch);
            const TensorView y = matrix(to, INFINI_DTYPE_BF16, rows, n, n);
            const TensorView of_w = matrix(w.data(), INFINI_DTYPE_BF16, n, k, w_pitch);
            if (way < 2) {
                linear::Args a;
                a.x = from, a.y = y, a.weight[0] = of_w, a.weights = 1;
                if (way == 1) {
                    a.bias[0] = row(bias.data(), INFINI_DTYPE_BF16, n);
                }
                linear::emulated_amx::tile_kernel(a);
            } else if (way == 2) {
                linear_packed::Args a;
                a.x = from, a.y = y, a.n = n;
                a.weight = matrix(packed.data(), INFINI_DTYPE_BF16, panels, words, words);
                linear_packed::emulated_amx::tile_kernel(a);
            } else {
                gemm::Args a;
                a.a = from, a.c = y, a.b = matrix(w.data(), INFINI_DTYPE_BF16, k, n, 1);
                a.b.strides[1] = w_pitch;
                gemm::emulated_amx::tile_kernel(a);
            }
        };
        std::vector<bf16> all(m * n), some(2 * n);
        multiply(0, m, all.data());
        for (int64_t first = 0; first < 3; ++first) {
            for (int64_t rows = 1; rows <= 2; ++rows) {
                multiply(first, rows, some.data());
                if (std::memcmp(some.data(), all.data() + first * n, rows * n * sizeof(bf16)) != 0) {
                    std::printf("way %d, %d rows, %d -> %d: wrong\n", way, (int)rows, (int)k, (int)n);
                    same = false;
                }
            }
        }
    }
    return same;
}

int main(int, char **arguments) {
    planted = std::atoi(arguments[1]);
    bool all = true;
    for (const int64_t n : {1, 35, 300}) {
        for (const int64_t k : {1, 33, 512, 1100}) {
            all = right(n, k) && all;
        }
    }
    return all ? 0 : 1;
}
"""
)

FEW_ROWS = [
    ("few_tile_rows.h", "static_cast<size_t>(k - i)", "static_cast<size_t>(k - i - (planted == 1))"),
    ("few_tile_rows.h", "? column + r : 0", "? column + (planted == 2 && column ? r ^ 1 : r) : 0"),
    ("few_tile_rows.h", "load(steps + row * pitch)", "load(steps + (planted == 3 ? 0 : row) * pitch)"),
    ("few_tile_rows.h", "counts[s] = there ?", "counts[s] = planted == 4 && s == kStreams - 1 ? 0 : there ?"),
    ("linear_packed_tiles.cpp", "splat(x[kM + m])", "splat(x[planted == 5 ? m : kM + m])"),
    ("linear_packed_tiles.cpp", "step + kTmmRows < words", "step + kTmmRows + (planted == 6) < words"),
    ("few_tile_rows.h", "before | 0x8040", "planted == 7 ? before : before | 0x8040"),  # where the vectors are wide
]


@pytest.mark.full
def test_few_rows(tmp_path: Path) -> None:
    """A row or two in vector registers: the tiles' bits; and each of several faults is found."""
    plant(tmp_path, DENSE, FEW_ROWS, ("gemm", "linear", "linear_packed"), only_wide=(7,))
