"""Whether an output shares memory with an input is judged by elements: by brute force, and through every kind of door.

csrc/common/overlap.cpp is compiled by itself here, behind a C function.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torch_infini.testing.c_ops import CError, Descriptor, call
from torch_infini.testing.ops import all_c_ops

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SIZES = {3: 1, 12: 2, 13: 4, 14: 8, 18: 16}  # infiniDtype_t: bytes of an element

DOOR = r"""
#include "check.h"
using infini::TensorView;
static TensorView view(long address, int dtype, int ndim, const long *shape, const long *strides) {
    TensorView v;
    v.data = reinterpret_cast<void *>(address);
    v.dtype = static_cast<infiniDtype_t>(dtype);
    v.ndim = ndim;
    for (int i = 0; i < ndim; ++i) {
        v.shape[i] = shape[i];
        v.strides[i] = strides[i];
    }
    return v;
}
extern "C" int overlap(long a, int a_dtype, int a_ndim, const long *a_shape, const long *a_strides,
                       long b, int b_dtype, int b_ndim, const long *b_shape, const long *b_strides) {
    return infini::overlap(view(a, a_dtype, a_ndim, a_shape, a_strides), view(b, b_dtype, b_ndim, b_shape, b_strides));
}
"""

View = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # address, dtype, shape, strides in elements


@pytest.fixture(scope="module")
def overlap(tmp_path_factory: pytest.TempPathFactory) -> Callable[[View, View], bool]:
    folder = tmp_path_factory.mktemp("overlap")
    (folder / "door.cpp").write_text(DOOR)
    sources = [str(folder / "door.cpp"), str(CSRC / "common" / "overlap.cpp")]
    includes = [f"-I{CSRC / 'common'}", f"-I{CSRC / 'include'}"]
    done = subprocess.run(
        ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", *includes, *sources, "-o", str(folder / "door.so")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(folder / "door.so")).overlap

    def flat(view: View) -> tuple[object, ...]:
        at, dtype, shape, strides = view
        longs = ctypes.c_long * len(shape)
        return ctypes.c_long(at), dtype, len(shape), longs(*shape), longs(*strides)

    return lambda a, b: bool(function(*flat(a), *flat(b)))


def touched(view: View) -> set[int]:
    """Every byte of every element."""
    at, dtype, shape, strides = view
    starts = {at}
    for size, stride in zip(shape, strides, strict=True):
        starts = {start + i * stride * SIZES[dtype] for start in starts for i in range(size)}
    return {start + byte for start in starts for byte in range(SIZES[dtype])}


def random_view(rng: random.Random) -> View:
    ndim = rng.randint(0, 4)
    shape = [rng.choice((0, 1, 2, 2, 3, 3, 3, 4, 4, 5, 5, 7)) for _ in range(ndim)]
    strides = [rng.choice((0, 1, 1, 2, 3, 4, 6, 8, 12, 5, 7, 9, 24, -1, -2, -3, -4, -6)) for _ in range(ndim)]
    return 4096 + rng.randint(-60, 60), rng.choice(list(SIZES)), tuple(shape), tuple(strides)


def narrowed_pair(rng: random.Random) -> tuple[View, View]:
    """Two slices of one buffer, as programs make them."""
    buffer = torch.empty([rng.randint(1, 6) for _ in range(rng.randint(1, 4))], device="meta")

    def slice_of(t: Tensor) -> View:
        for dim in range(t.dim()):
            begin = rng.randint(0, t.shape[dim] - 1)
            t = t[
                (slice(None),) * dim + (slice(begin, rng.randint(begin + 1, t.shape[dim]), rng.choice((1, 1, 2, 3))),)
            ]
        order = list(range(t.dim()))
        rng.shuffle(order)
        t = t.permute(order)
        return 4096 + 4 * t.storage_offset(), 13, tuple(t.shape), tuple(t.stride())

    return slice_of(buffer), slice_of(buffer)


def test_against_brute_force(overlap: Callable[[View, View], bool]) -> None:
    rng, apart, spans = random.Random(0), 0, 0
    for i in range(12_000):
        a, b = narrowed_pair(rng) if i % 3 == 0 else (random_view(rng), random_view(rng))
        bytes_a, bytes_b = touched(a) if 0 not in a[2] else set(), touched(b) if 0 not in b[2] else set()
        expected = not bytes_a.isdisjoint(bytes_b)
        assert overlap(a, b) == overlap(b, a) == expected, (a, b)
        if bytes_a and bytes_b and min(bytes_a) <= max(bytes_b) and min(bytes_b) <= max(bytes_a):
            spans += 1
            apart += not expected
    assert spans > 4_000 and apart > 500  # that is what was asked


def test_large_views(overlap: Callable[[View, View], bool]) -> None:
    """Exact where the shapes are those of models, without looking at elements one by one."""
    base, n, d = 1 << 40, 1 << 20, 11008
    gate = (base, 13, (n, d), (2 * d, 1))
    assert not overlap(gate, (base + 4 * d, 13, (n, d), (2 * d, 1)))  # the other half
    assert overlap(gate, (base + 4 * d - 4, 13, (n, d), (2 * d, 1)))  # one column too early
    assert not overlap(gate, (base + 4 * d, 12, (n, 2 * d), (4 * d, 1)))  # the same bytes as halves
    heads = (base, 12, (n, 32, 128), (40 * 128, 128, 1))  # the queries of a fused projection
    assert not overlap(heads, (base + 2 * 32 * 128, 12, (4, n, 128), (128, 40 * 128, 1)))
    assert overlap(heads, (base + 2 * 32 * 128 - 2, 12, (4, n, 128), (128, 40 * 128, 1)))
    even = (base, 13, (n, n), (2 * n, 2))
    assert not overlap(even, (base + 4, 13, (n, n), (2 * n, 2)))
    assert overlap(even, (base + 2, 13, (n, n), (2 * n, 2)))  # by half an element
    assert not overlap(even, (base + 8 * n * n - 4, 13, (n, n), (-2 * n, -2)))
    assert overlap((base, 13, (n, n), (n, 1)), (base, 13, (n, n), (1, n)))  # transposed
    huge = (base, 14, (2**29, 2**30), (2**30, 1))
    assert not overlap(huge, (base + 8 * 2**59, 14, (3,), (1,)))
    assert overlap(huge, (base + 8 * 2**59 - 8, 14, (3,), (-(2**28),)))


def test_entangled_strides(overlap: Callable[[View, View], bool]) -> None:
    """Where an answer would take long, it comes all the same, as an overlap: there is never a wrong "no"."""
    rng, base = random.Random(1), 1 << 40
    steps = tuple(rng.randrange(900_000, 1_000_000) for _ in range(8))
    sums = (base, 3, (9,) * 8, steps)
    guesses = 0
    for _ in range(50):
        element = base + sum(rng.randrange(9) * step for step in steps)
        assert overlap(sums, (element, 3, (), ())) and overlap((element, 3, (), ()), sums)
        guesses += overlap(sums, (base + rng.randrange(20_000_000, 40_000_000), 3, (), ()))
    assert guesses > 10  # about one address in two holds an element, and the others are not told apart


# ---- the ops ----


def halves(rows: int = 5, d: int = 24, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    buffer = torch.randn(rows, 2 * d).to(dtype)
    return buffer, buffer[:, :d], buffer[:, d:]


def in_place_calls() -> Iterator[tuple[str, Callable[..., Tensor], Callable[..., Tensor], bool]]:
    """Op, its out form, and whether it takes two tensors."""
    infini = torch.ops.infini
    for name in ("add", "sub", "mul", "swiglu", "geglu"):
        yield name, getattr(infini, name).out, getattr(infini, name), True
    for name in ("silu", "gelu", "relu", "sigmoid", "softmax", "rearrange"):
        yield name, getattr(infini, name).out, getattr(infini, name), False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", list(in_place_calls()), ids=lambda case: case[0])
def test_torch_ops_on_halves(case: tuple[str, Callable[..., Tensor], Callable[..., Tensor], bool], dtype) -> None:
    name, out_form, form, binary = case
    dim = (-1,) if name == "softmax" else ()
    for which in (0, 1):
        buffer, *parts = halves(dtype=dtype)
        inputs = [part.clone() for part in parts] if binary else [parts[1 - which].clone()]
        expected = form(*inputs, *dim)
        untouched = parts[1 - which].clone()
        given = parts if binary else [parts[1 - which]]
        out_form(*given, *dim, out=parts[which])
        assert torch.equal(parts[which], expected) and torch.equal(parts[1 - which], untouched)
    _, left, right = halves(dtype=dtype)
    with pytest.raises(RuntimeError, match="share no memory with it"):
        out_form(*([left, right] if binary else [left]), *dim, out=torch.as_strided(left, (5, 24), (48, 1), 1))


def test_products_and_norms_on_halves() -> None:
    infini, (_, x, y), w = torch.ops.infini, halves(), torch.randn(24, 24)
    expected = infini.linear(x, w)
    infini.linear.out(x, w, None, out=y)
    assert torch.equal(y, expected)
    _, x, y = halves()
    expected = infini.rms_norm(x, w[0], 1e-6)
    infini.rms_norm.out(x, w[0], 1e-6, out=y)
    assert torch.equal(y, expected)


C_OPS = {op.name: op for op in all_c_ops()}


@pytest.mark.parametrize("name", ["SwiGLU", "Add", "Mul", "Sub"])
def test_c_ops_on_halves(name: str) -> None:
    """infiniopSwiGLU(out = gate) on a fused buffer, and its kin."""
    op = C_OPS[name]
    sample = next(iter(op.samples()))
    keys = [key for key, value in sample.args.items() if isinstance(value, Tensor)]
    out, (first, second) = op.outputs[0], [key for key in keys if key not in op.outputs]
    for written in (first, second):
        _, left, right = halves()
        apart = {first: left.clone(), second: right.clone(), out: torch.empty(5, 24)}
        call(op, apart)
        args = {first: left, second: right}
        call(op, {key: {**args, out: args[written]}[key] for key in keys})
        assert torch.equal(args[written], apart[out])
    _, left, right = halves()
    shifted = torch.as_strided(left, (5, 24), (48, 1), 1)
    with Descriptor(op, {first: left, second: right, out: shifted}) as descriptor, pytest.raises(CError) as caught:
        descriptor.run({first: left, second: right, out: shifted})
    assert caught.value.status == "BAD_PARAM" and "share no memory with it" in str(caught.value)
