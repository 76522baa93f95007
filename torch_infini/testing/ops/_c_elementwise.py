"""The elementwise ops and fills of the C ABI, described for tests, fuzzer and benchmarks: one table.

The kernel is csrc/infiniop/elementwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..c_ops import DTYPES, CErrorCase, COp, CSample, Described
from .silu import special_values

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = (*FLOATS, torch.int32, torch.int64)
FLOAT_NAMES = "float32, bfloat16, float16 or float64"
BYTE = 1  # INFINI_DTYPE_BYTE, which torch has no name for


@dataclass(frozen=True)
class Row:
    """One op.

    Attributes:
        formula: Of the inputs, in float64 (or as integers, which wrap around).
        names: Of the tensors, the output first.
        sharp: (relative, absolute) error that float32 must keep for any input, however small the result; the absolute
            one is where the formula leaves float's range before its result does.
    """

    c_name: str
    name: str
    formula: Callable[..., Tensor]
    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    sharp: tuple[float, float] = (5e-7, 5e-45)
    flushed: float = 0  # what may come out as 0 in a half type


def relu(x: Tensor) -> Tensor:
    return torch.where(x < 0, 0.0, x)


def clip(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """A bound that is a NaN does not bound; where low > high, low."""
    x = torch.where(x > high, high, x)
    return torch.where(x < low, low, x)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


ROWS = (
    Row("Add", "add", lambda a, b: a + b, ("c", "a", "b"), NUMBERS),
    Row("Sub", "sub", lambda a, b: a - b, ("c", "a", "b")),
    Row("Mul", "mul", lambda a, b: a * b, ("c", "a", "b")),
    Row("Clip", "clip", clip, ("y", "x", "min_val", "max_val")),
    Row("Relu", "relu", relu, ("y", "x")),
    Row(
        "Gelu",
        "gelu",
        lambda x: 0.5 * x * torch.special.erfc(-x / math.sqrt(2)),
        ("output", "input"),
        sharp=(1e-6, 5e-45),
    ),
    Row("Sigmoid", "sigmoid", lambda x: 1 / (1 + torch.exp(-x)), ("y", "x"), sharp=(5e-7, 4e-39)),
    Row("Silu", "silu", silu, ("output", "input"), sharp=(5e-7, 4e-37), flushed=9e-37),  # fast_quotient
    Row("Softplus", "softplus", lambda x: torch.where(x > 20, x, x.exp().log1p()), ("y", "x")),
    Row("Tanh", "tanh", torch.tanh, ("output", "input")),
    Row("SwiGLU", "swiglu", lambda up, gate: silu(gate) * up, ("c", "a", "b"), sharp=(5e-7, 4e-36)),
)


def as_held_by(dtype: torch.dtype, value: Tensor) -> Tensor:
    """float64 values, those turned into infinities that round to one."""
    return torch.where(value.to(dtype).isinf(), value * torch.inf, value)


def reference(row: Row) -> Callable[..., dict[str, Tensor]]:
    def expected(**args: Tensor) -> dict[str, Tensor]:
        inputs = [args[name] for name in row.names[1:]]
        dtype = inputs[0].dtype
        if not dtype.is_floating_point:
            return {row.names[0]: row.formula(*inputs)}
        return {row.names[0]: as_held_by(dtype, row.formula(*(x.double() for x in inputs)))}

    return expected


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, dtype=dtype)
    return (torch.randn(shape) * 3).to(dtype)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, 77).to(dtype)


def tensors(row: Row, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    return {row.names[0]: filled(shape, dtype), **{name: values(shape, dtype) for name in row.names[1:]}}


def backwards(t: Tensor) -> Described:
    """The elements of a matrix, found from its last one on."""
    rows, columns = t.shape
    return Described(t, (rows, columns), (-columns, -1), rows * columns - 1)


def wider(t: Tensor) -> Tensor:
    """The same values, 3 apart in the last dimension."""
    wide = t.repeat_interleave(3, -1)
    return wide[..., 1::3]


def layouts(row: Row, dtype: torch.dtype) -> Iterator[CSample]:
    """Each pattern of strides, with a length that fills several blocks of the kernel and ends within a vector."""
    out, first, *others = row.names
    last = row.names[-1]
    shape = (7, 613)
    args = tensors(row, shape, dtype)
    yield CSample("transposed input", {**args, first: values(shape[::-1], dtype).T})
    yield CSample("transposed output", {**args, out: filled(shape[::-1], dtype).T})
    yield CSample("all transposed", {key: t.T for key, t in tensors(row, shape[::-1], dtype).items()})
    yield CSample("strided input", {**args, last: wider(args[last])})
    yield CSample("strided output", {**tensors(row, shape, dtype), out: wider(args[out])})
    yield CSample("negative strides in", {**tensors(row, shape, dtype), first: backwards(args[first])})
    yield CSample("negative strides out", {**tensors(row, shape, dtype), out: backwards(args[out])})
    yield CSample("one row for all", {**tensors(row, shape, dtype), last: values((1, 613), dtype).expand(shape)})
    yield CSample("one column for all", {**tensors(row, shape, dtype), last: values((7, 1), dtype).expand(shape)})
    yield CSample("one number for all", {**tensors(row, shape, dtype), first: values((1, 1), dtype).expand(shape)})
    args = tensors(row, shape, dtype)
    yield CSample("in place", {**args, out: args[first]})
    args = {key: wider(t) for key, t in tensors(row, shape, dtype).items()}
    yield CSample("in place, strided", {**args, out: args[last]})
    args = tensors(row, (40, 3), dtype)
    yield CSample("short rows", {**args, first: values((1, 3), dtype).expand(40, 3)})
    args = tensors(row, (5, 4, 3, 6), dtype)
    args[first] = values((3, 5, 6, 4), dtype).permute(1, 3, 0, 2)
    yield CSample("four dimensions, permuted", args)
    if others:
        args = tensors(row, shape, dtype)
        yield CSample("one tensor twice", {**args, last: args[first]})


def special(row: Row, dtype: torch.dtype) -> CSample:
    """Zeros, infinities, NaN and the smallest and largest numbers, each op's every pair; results near 0 are sharp."""
    if len(row.names) == 2:
        x = special_values(dtype)
        x = torch.cat([x, (torch.linspace(-110, 110, 5001)).to(dtype), torch.logspace(-7, 1.3, 2001).to(dtype)])
        x = torch.cat([x, -x])
        # Rounding to a half type; AVX-512 BF16 takes denormals for zero.
        coarse = {torch.float16: (2**-11 + 1e-5, 2**-25), torch.bfloat16: (2**-8 + 1e-5, 1.2e-38)}
        tolerance = {torch.float32: row.sharp, torch.float64: (1e-12, 1e-300)}.get(dtype)
        if tolerance is None:
            rtol, atol = coarse[dtype]
            tolerance = rtol, max(atol, row.sharp[1], row.flushed)
        return CSample("special values", {row.names[0]: filled(x.shape, dtype), row.names[1]: x}, tolerance)
    info = torch.finfo(dtype)
    few = torch.tensor([0.0, -0.0, 1.0, -2.5, info.max, -info.max, torch.inf, -torch.inf, torch.nan]).to(dtype)
    axes = torch.meshgrid(*[few] * (len(row.names) - 1), indexing="ij")
    inputs = {name: axis.contiguous() for name, axis in zip(row.names[1:], axes, strict=True)}
    return CSample("special values", {row.names[0]: filled(axes[0].shape, dtype), **inputs})


def samples(row: Row) -> Callable[[], Iterator[CSample]]:
    def every() -> Iterator[CSample]:
        for dtype in row.dtypes:
            for shape in ((), (1,), (17,), (2, 3, 769), (3, 0, 5), (64, 2051)):
                yield CSample(f"{dtype} {shape}", tensors(row, shape, dtype))
            for sample in layouts(row, dtype):
                yield CSample(f"{dtype} {sample.name}", sample.args)
            if dtype.is_floating_point:
                yield special(row, dtype)

    return every


def errors(row: Row) -> Callable[[], Iterator[CErrorCase]]:
    out, first, *_ = row.names
    last = row.names[-1]
    op = f"infini::{row.name}: "

    def every() -> Iterator[CErrorCase]:
        args = tensors(row, (2, 3), torch.float32)
        names = FLOAT_NAMES if row.dtypes == FLOATS else "float32, bfloat16, float16, float64, int32 or int64"
        yield CErrorCase(
            "integers of 16 bits",
            tensors(row, (2, 3), torch.int16),
            "BAD_TENSOR_DTYPE",
            op + f"{out} must be {names}, got int16",
        )
        yield CErrorCase(
            "dtypes differ",
            {**args, last: args[last].half()},
            "BAD_TENSOR_DTYPE",
            op + f"{last} must have the dtype of {out}, float32, got float16",
        )
        yield CErrorCase(
            "shapes differ",
            {**args, last: torch.ones(3)},
            "BAD_TENSOR_SHAPE",
            op + f"{last} must have the shape of {out}, [2, 3], got [3]",
        )
        yield CErrorCase(
            "no broadcast by shape",
            {**args, first: torch.ones(1, 3)},
            "BAD_TENSOR_SHAPE",
            op + f"{first} must have the shape of {out}, [2, 3], got [1, 3]",
        )
        yield CErrorCase(
            "broadcast output",
            {**args, out: torch.ones(1, 3).expand(2, 3)},
            "BAD_TENSOR_STRIDES",
            op + f"{out} must not be a broadcast view, for it is written to, got strides [0, 1]",
        )
        buffer = torch.ones(3, 3)
        for key in row.names[1:]:
            yield CErrorCase(
                f"overlap with {key}",
                {**args, key: buffer[:2], out: buffer[1:]},
                "BAD_PARAM",
                op + f"{out} must be {key} itself or share no memory with it, got one whose span of memory overlaps it",
                at="run",
            )
        square = torch.ones(3, 3)
        yield CErrorCase(
            "transposed onto itself",
            {**tensors(row, (3, 3), torch.float32), first: square.T, out: square},
            "BAD_PARAM",
            op + f"{out} must be {first} itself or share no memory with it, got one whose span of memory overlaps it",
            at="run",
        )

    return every


def fill_reference(value: int) -> Callable[..., dict[str, Tensor]]:
    return lambda y, x: {"y": torch.full(y.shape, value, dtype=torch.float64).to(y.dtype)}


def fill_samples() -> Iterator[CSample]:
    for dtype in DTYPES:
        for shape in ((), (17,), (2, 3, 769), (3, 0, 5)):
            yield CSample(f"{dtype} {shape}", {"y": filled(shape, dtype), "x": torch.ones(shape)})
        base = filled((7, 1024), dtype)
        yield CSample(f"{dtype} strided", {"y": base[:, 5:900:3], "x": torch.ones(7, 299)})
        yield CSample(f"{dtype} transposed", {"y": filled((300, 7), dtype).T, "x": torch.ones(7, 300)})
        y = filled((7, 96), dtype)
        yield CSample(f"{dtype} over x", {"y": y, "x": y})
    yield CSample("large", {"y": filled((64, 2051), torch.float32), "x": torch.ones(64, 2051)})
    base = filled((7, 300), torch.float32)
    yield CSample("negative strides", {"y": backwards(base), "x": torch.ones(7, 300)})
    y = Described(filled((400,), torch.uint8), (400,), (1,), 0, BYTE)
    yield CSample("byte", {"y": y, "x": torch.ones(400)})
    yield CSample("x without memory", {"y": filled((5,), torch.float16), "x": torch.ones(1).expand(5)})


def fill_errors(name: str) -> Callable[[], Iterator[CErrorCase]]:
    op = f"infini::{name}: "

    def every() -> Iterator[CErrorCase]:
        yield CErrorCase(
            "complex",
            {"y": Described(torch.ones(8), (4,), (1,), 0, 17), "x": torch.ones(4)},
            "BAD_TENSOR_DTYPE",
            op + "y must be byte, bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float8, float16, "
            "float32, float64 or bfloat16, got complex64",
        )
        yield CErrorCase(
            "shapes differ",
            {"y": torch.ones(2, 3), "x": torch.ones(3, 2)},
            "BAD_TENSOR_SHAPE",
            op + "x must have the shape of y, [2, 3], got [3, 2]",
        )
        yield CErrorCase(
            "broadcast output",
            {"y": torch.ones(1, 3).expand(2, 3), "x": torch.ones(2, 3)},
            "BAD_TENSOR_STRIDES",
            op + "y must not be a broadcast view, for it is written to, got strides [0, 1]",
        )

    return every


C_OPS = [COp(row.c_name, [row.names[0]], reference(row), samples(row), errors(row)) for row in ROWS] + [
    COp(name.title(), ["y"], fill_reference(value), fill_samples, fill_errors(name))
    for name, value in (("zeros", 0), ("ones", 1))
]
