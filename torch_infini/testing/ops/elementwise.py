"""The elementwise ops: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...ops import FLOATS as FLOAT_DTYPES
from ...ops import REGISTRY
from ...ops.elementwise import clip_in_aten
from ..c_door import c_op, unwritten
from ..c_layouts import every_layout
from ..c_ops import DTYPES, CErrorCase, COp, CSample, Described
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .silu import INFO as SILU
from .silu import activations, as_held_by, special_values
from .swiglu import INFO as SWIGLU

# Shared by the ops with one input.

FLOATS = "float32, bfloat16, float16 or float64"
NUMBERS = "float32, bfloat16, float16, float64, int32 or int64"
SHAPES = (512, 4096), (16384, 4096), (1, 2048)


def unary_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", (activations(dtype, 3, n),))
    yield Sample("scalar", (activations(dtype),))
    yield Sample("one dimension", (activations(dtype, 100_001),))
    yield Sample("four dimensions", (activations(dtype, 2, 3, 4, 32),))
    yield Sample("transposed", (activations(dtype, 769, 5).t(),))
    yield Sample("permuted", (activations(dtype, 3, 5, 6, 4).permute(1, 3, 0, 2),))
    yield Sample("short rows", (activations(dtype, 1, 3).expand(40, 3),))
    yield Sample("broadcast", (activations(dtype, 5, 1).expand(5, 300),))
    yield Sample("float64", (activations(torch.float64, 3, 40),))
    yield Sample("no rows", (activations(dtype, 0, 16),))
    yield Sample("no columns", (activations(dtype, 4, 0),))
    yield Sample("large", (activations(dtype, 70, 2051),))
    yield Sample("special values", (special_values(dtype),))


def refused_outs(op: str, x: Tensor, like: str, *others: Tensor) -> Iterator[ErrorCase]:
    """Yield calls with outs that no op accepts for an x of [2, 16]."""
    yield ErrorCase(
        "out shape",
        (x, *others),
        op + f"out must have the shape of {like}, [2, 16], got [2, 15]",
        {"out": torch.empty(2, 15)},
    )
    yield ErrorCase(
        "out broadcast",
        (x, *others),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(1, 16).expand(2, 16)},
    )


def refused_outs_of_computation(op: str, x: Tensor, *others: Tensor) -> Iterator[ErrorCase]:
    """Yield calls with outs that only the fills accept, which do not read x."""
    yield ErrorCase(
        "out dtype",
        (x, *others),
        op + "out must have the dtype of x, float32, got float16",
        {"out": torch.empty(2, 16).half()},
    )
    base = torch.ones(3, 16)
    yield ErrorCase(
        "out overlaps",
        (base[:2], *others),
        op + "out must be x itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": base[1:]},
    )


def unary_errors(name: str) -> Iterator[ErrorCase]:
    x, op = activations(torch.float32, 2, 16), f"infini::{name}: "
    yield ErrorCase("integers", (x.int(),), op + f"x must be {FLOATS}, got int32")
    yield from refused_outs(op, x, "x")
    yield from refused_outs_of_computation(op, x)


def unary_bench(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in SHAPES:
        yield Sample("x".join(map(str, shape)), (activations(dtype, *shape),))


def unary(name: str, formula: Callable[[Tensor], Tensor], flops: int, peer: Callable[..., Tensor]) -> OpInfo:
    """Make the OpInfo of an op with one input: formula in float64, operations per element, torch's equivalent."""

    def reference(x: Tensor) -> Tensor:
        return as_held_by(x.dtype, formula(x.double()))

    return OpInfo(
        **vars(REGISTRY[name]),
        reference=reference,
        samples=unary_samples,
        errors=lambda: unary_errors(name),
        cost=lambda x: Cost(bytes=2 * nbytes(x), flops=flops * x.numel()),
        bench=unary_bench,
        peer=peer,
    )


# The ops with two inputs.


def pair(dtype: torch.dtype, shape: tuple[int, ...], other: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    return activations(dtype, *shape), activations(dtype, *(shape if other is None else other), seed=1)


def combined(dtype: torch.dtype, inputs: int = 2) -> tuple[Tensor, ...]:
    """Combine zeros, infinities, NaN, the largest numbers and a few others, each with each."""
    largest = torch.finfo(dtype).max
    few = torch.tensor([0.0, -0.0, 1.0, -2.5, largest, -largest, torch.inf, -torch.inf, torch.nan]).to(dtype)
    return tuple(axis.contiguous() for axis in torch.meshgrid(*[few] * inputs, indexing="ij"))


def binary_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Broadcast only `other`, so that x can be overwritten; tests/test_elementwise.py tests the rest."""
    for n in (7, 769):
        yield Sample(f"{n} columns", pair(dtype, (3, n)))
    yield Sample("one row for all", pair(dtype, (5, 300), (300,)))
    yield Sample("one column for all", pair(dtype, (5, 300), (5, 1)))
    yield Sample("one number for all", pair(dtype, (5, 300), ()))
    yield Sample("one column", pair(dtype, (3, 1)))
    yield Sample("5125 columns", pair(dtype, (3, 5125)))
    yield Sample("scalars", pair(dtype, ()))
    yield Sample("one dimension", pair(dtype, (50_001,)))
    yield Sample("four dimensions", pair(dtype, (2, 3, 4, 32), (3, 1, 32)))
    yield Sample("transposed", (activations(dtype, 5, 300), activations(dtype, 300, 5, seed=1).t()))
    yield Sample(
        "permuted", (activations(dtype, 3, 5, 6, 4).permute(1, 3, 0, 2), activations(dtype, 5, 4, 3, 6, seed=1))
    )
    yield Sample("short rows", pair(dtype, (40, 3), (3,)))
    yield Sample("broadcast views", (activations(dtype, 5, 1).expand(5, 300), activations(dtype, 300).expand(5, 300)))
    yield Sample("float64", pair(torch.float64, (3, 40), (40,)))
    yield Sample("no rows", pair(dtype, (0, 16), (1, 16)))
    yield Sample("no columns", pair(dtype, (4, 0), (4, 1)))
    yield Sample("large", pair(dtype, (50, 2051)))
    yield Sample("large, one row for all", pair(dtype, (50, 2051), (2051,)))
    if dtype.is_floating_point:
        yield Sample("special values", combined(dtype))


def integer_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Yield integer samples, for add."""
    yield from binary_samples(dtype)
    for integers in (torch.int32, torch.int64):
        x = torch.arange(-20, 20, dtype=integers).view(4, 10) * 1001
        yield Sample(f"{integers}"[6:], (x, x[:, :1] + 3))
        most = torch.full((70,), torch.iinfo(integers).max, dtype=integers)
        yield Sample(f"{integers}"[6:] + " wraps around", (most, torch.arange(70, dtype=integers)))


def binary_errors(name: str, dtypes: str) -> Iterator[ErrorCase]:
    (x, other), op = pair(torch.float32, (2, 16)), f"infini::{name}: "
    yield ErrorCase("short integers", (x.short(), other.short()), op + f"x must be {dtypes}, got int16")
    yield ErrorCase("dtypes", (x, other.half()), op + "other must have the dtype of x, float32, got float16")
    yield ErrorCase("shapes", (x, other[:, :15]), op + "other must broadcast with x, of shape [2, 16], got [2, 15]")
    yield ErrorCase("meta other", (x, other.to("meta")), op + "other must be on the device of x, cpu, got meta")
    yield from refused_outs(op, x, "x and other broadcast together", other)
    yield from refused_outs_of_computation(op, x, other)
    base = torch.ones(3, 16)
    yield ErrorCase(
        "out overlaps other",
        (x, base[:2]),
        op + "out must be other itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": base[1:]},
    )
    yield ErrorCase(
        "out is a broadcast other",
        (x, base[0]),
        op + "out must be other itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": base[:2]},
    )


def binary_cost(x: Tensor, other: Tensor) -> Cost:
    elements = torch.broadcast_shapes(x.shape, other.shape).numel()
    return Cost(bytes=nbytes(x, other) + elements * x.element_size(), flops=elements)


def binary_bench(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in SHAPES:
        yield Sample("x".join(map(str, shape)), pair(dtype, shape))
    yield Sample("512x4096 with 4096", pair(dtype, (512, 4096), (4096,)))


def binary(
    name: str,
    peer: Callable[..., Tensor],
    dtypes: str = FLOATS,
    samples: Callable[[torch.dtype], Iterator[Sample]] = binary_samples,
) -> OpInfo:
    """Make the OpInfo of an op with two inputs; dtypes: as listed in its message."""

    def reference(x: Tensor, other: Tensor) -> Tensor:
        if not x.is_floating_point():
            return peer(x, other)  # float64 has too few bits for int64
        return as_held_by(x.dtype, peer(x.double(), other.double()))

    return OpInfo(
        **vars(REGISTRY[name]),
        reference=reference,
        samples=samples,
        errors=lambda: binary_errors(name, dtypes),
        cost=binary_cost,
        bench=binary_bench,
        peer=peer,
    )


# clip.


def clip_reference(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return as_held_by(x.dtype, clip_in_aten(x.double(), min, max))


def clip_samples(dtype: torch.dtype) -> Iterator[Sample]:
    bounds: tuple[tuple[float | None, ...], ...] = (
        (),
        (-1.0, 1.0),
        (None, 0.7),
        (-0.1,),
        (3.0, -2.0),
        (torch.nan, 1.0),
        (0.0, torch.nan),
    )
    bounds += ((-torch.inf, torch.inf), (torch.inf,), (None, -torch.inf), (-1e300, 1e300), (1e300,), (-0.0, 0.0))
    for low_and_high in bounds:
        yield Sample(f"769 columns, {low_and_high}", (activations(dtype, 3, 769), *low_and_high))
    for sample in unary_samples(dtype):
        yield Sample(sample.name, (*sample.args, -2.3, 1.7))
    for low_and_high in ((), (-1.0, 1.0), (1.0, -1.0), (None, 1.0), (torch.nan,)):
        yield Sample(f"special values, {low_and_high}", (special_values(dtype), *low_and_high))


def clip_bench(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in unary_bench(dtype):
        yield Sample(sample.name, (*sample.args, -1.0, 1.0))


# The fills.


def fill_samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield from unary_samples(dtype)
    for other in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        yield Sample(f"{other}"[6:], (torch.zeros(3, 50, dtype=other),))


def fill_errors(name: str) -> Iterator[ErrorCase]:
    x, op = activations(torch.float32, 2, 16), f"infini::{name}: "
    some = "float64, float32, bfloat16, float16, bool or an integer of 8 to 64 bits"
    yield ErrorCase("complex", (x.to(torch.complex64),), op + f"x must be {some}, got complex64")
    yield from refused_outs(op, x, "x")


def fill(name: str, value: float) -> OpInfo:
    """Make the OpInfo of an op that fills with one value."""
    return OpInfo(
        **vars(REGISTRY[name]),
        reference=lambda x: torch.full(x.shape, value, dtype=torch.float64),
        samples=fill_samples,
        errors=lambda: fill_errors(name),
        cost=lambda x: Cost(bytes=nbytes(x)),
        bench=unary_bench,
        peer=lambda x: x.new_full(x.shape, value),
    )


INFOS = (
    binary("add", torch.add, NUMBERS, integer_samples),
    binary("sub", torch.sub),
    binary("mul", torch.mul),
    OpInfo(
        **vars(REGISTRY["clip"]),
        reference=clip_reference,
        samples=clip_samples,
        errors=lambda: unary_errors("clip"),
        cost=lambda x, min=None, max=None: Cost(bytes=2 * nbytes(x), flops=2 * x.numel()),
        bench=clip_bench,
        peer=clip_in_aten,
    ),
    unary("relu", torch.relu, 1, torch.relu),
    unary("gelu", lambda x: x / 2 * torch.special.erfc(-x / 2**0.5), 4, torch.nn.functional.gelu),
    unary("sigmoid", lambda x: 1 / (1 + torch.exp(-x)), 3, torch.sigmoid),
    unary("tanh", torch.tanh, 3, torch.tanh),
    unary("softplus", lambda x: torch.where(x > 20, x, x.exp().log1p()), 3, torch.nn.functional.softplus),
    fill("ones", 1),
    fill("zeros", 0),
)


# The C operators: inputs of equal shape, also in float64; clip's bounds are tensors.

C_FLOATS = (*FLOAT_DTYPES, torch.float64)
C_NUMBERS = (*C_FLOATS, torch.int32, torch.int64)
C_SHAPE = (7, 613)  # several blocks of the kernel, the last one partial
BYTE = 1  # INFINI_DTYPE_BYTE, which torch lacks

# The (relative, absolute) error that float32 must not exceed for any x, however small the result; the absolute error
# covers where the formula leaves float's range before its result does.
SHARP = {"gelu": (1e-6, 5e-45), "sigmoid": (5e-7, 4e-39), "silu": (5e-7, 4e-37)}
FLUSHED = {"silu": 9e-37}  # results below this may be 0 in a half type: fast_quotient


def clip_reference_of_tensors(x: Tensor, min: Tensor, max: Tensor) -> Tensor:
    """Compute clip by tensors: a NaN bound has no effect; if min > max, the result is min."""
    x64 = torch.where(x > max, max, x)
    return as_held_by(x.dtype, torch.where(x64 < min, min, x64).double())


def c_calls(inputs: int, dtype: torch.dtype) -> Iterator[Sample]:
    """Yield the samples of the torch ops, for any number of inputs, except the longest."""
    if inputs == 2:
        long = ("one dimension", "large, one row for all")
        yield from (sample for sample in binary_samples(dtype) if sample.name not in long)
        return
    for sample in unary_samples(dtype):
        x = sample.args[0]
        if sample.name not in ("one dimension", "special values"):
            yield Sample(sample.name, (x, *(activations(x.dtype, *x.shape, seed=i) for i in range(1, inputs))))
    if inputs > 1:
        yield Sample("special values", combined(dtype, inputs))


def to_c(names: dict[str, str], args: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(map(names.__getitem__, args), torch.broadcast_tensors(*args.values()), strict=True))


def special_c_samples(name: str, out: str, x_name: str) -> Iterator[CSample]:
    """Yield the smallest and largest numbers; results near 0 must be precise."""
    # The error of rounding to a half type; CUDA's approximations flush denormals to zero.
    coarse = {torch.float16: (2**-11 + 1e-5, 2**-25), torch.bfloat16: (2**-8 + 1e-5, 1.2e-38)}
    sharp = SHARP.get(name, (5e-7, 5e-45))
    for dtype in C_FLOATS:
        x = special_values(dtype)
        x = torch.cat([x, torch.linspace(-110, 110, 5001).to(dtype), torch.logspace(-7, 1.3, 2001).to(dtype)])
        x = torch.cat([x, -x])
        tolerance = {torch.float32: sharp, torch.float64: (1e-12, 1e-300)}.get(dtype)
        if tolerance is None:
            relative, absolute = coarse[dtype]
            tolerance = relative, max(absolute, sharp[1], FLUSHED.get(name, 0))
        yield CSample(f"{dtype} special values", {out: unwritten(x.shape, dtype), x_name: x}, tolerance)


def c_errors(name: str, out: str, inputs: list[str], dtypes: str) -> Iterator[CErrorCase]:
    """Yield calls that must fail. The output comes first: inputs must match its dtype and shape."""
    first, last, op = inputs[0], inputs[-1], f"infini::{name}: "

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        return {key: torch.ones(shape, dtype=dtype) for key in (out, *inputs)}

    for what, args, status, rule in (
        ("integers of 16 bits", ones(2, 3, dtype=torch.int16), "DTYPE", f"{out} must be {dtypes}, got int16"),
        ("dtypes differ", {last: torch.ones(2, 3).half()}, "DTYPE",
         f"{last} must have the dtype of {out}, float32, got float16"),
        ("shapes differ", {last: torch.ones(3)}, "SHAPE", f"{last} must have the shape of {out}, [2, 3], got [3]"),
        ("no broadcast by shape", {first: torch.ones(1, 3)}, "SHAPE",
         f"{first} must have the shape of {out}, [2, 3], got [1, 3]"),
        ("broadcast output", {out: torch.ones(1, 3).expand(2, 3)}, "STRIDES",
         f"{out} must not be a broadcast view, for it is written to, got strides [0, 1]"),
    ):  # fmt: skip
        yield CErrorCase(what, ones(2, 3) | args, f"BAD_TENSOR_{status}", op + rule)
    buffer, square = torch.ones(3, 3), torch.ones(3, 3)
    overlaps = [(f"overlap with {key}", key, {key: buffer[:2], out: buffer[1:]}) for key in inputs]
    for what, key, args in (*overlaps, ("transposed", first, ones(3, 3) | {first: square.T, out: square})):
        rule = f"{out} must be {key} itself or share no memory with it, got one whose span of memory overlaps it"
        yield CErrorCase(what, ones(2, 3) | args, "BAD_PARAM", op + rule, at="run")


def c_elementwise(info: OpInfo, c_name: str, out: str, names: dict[str, str], dtypes: str = FLOATS) -> COp:
    """Make the C operator of an op; names: the header's name for each argument, in its order."""
    inputs = list(names.values())

    def varied(dtype: torch.dtype) -> Iterator[Sample]:
        yield Sample("", tuple(activations(dtype, *C_SHAPE, seed=i) for i in range(len(inputs))))

    return c_op(
        replace(info, samples=lambda dtype: c_calls(len(inputs), dtype), errors=tuple),
        c_name,
        [out],
        names,
        samples=lambda: special_c_samples(info.name, out, inputs[0]) if len(inputs) == 1 else (),
        errors=lambda: c_errors(info.name, out, inputs, dtypes),
        to_c=lambda args: to_c(names, args),
        dtypes=C_FLOATS if dtypes == FLOATS else C_NUMBERS,
        variants=lambda args: every_layout(args, [out]),
        varied=varied,
    )


def c_fill_calls(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((17,), (), (2, 3, 769), (3, 0, 5)):
        yield Sample(str(list(shape)), (torch.ones(shape).to(dtype),))


def c_fill_samples() -> Iterator[CSample]:
    """Yield calls in which x, which is not read, has another dtype, is large, or has no memory."""
    for dtype in DTYPES:
        base = unwritten((7, 1024), dtype)
        yield CSample(f"{dtype} for float32", {"y": base[:, 5:900:3], "x": torch.ones(7, 299)})
    yield CSample("large", {"y": unwritten((64, 2051), torch.float32), "x": torch.ones(64, 2051)})
    y = Described(unwritten((400,), torch.uint8), (400,), (1,), 0, BYTE)
    yield CSample("byte", {"y": y, "x": torch.ones(400)})
    yield CSample("x without memory", {"y": unwritten((5,), torch.float16), "x": torch.ones(1).expand(5)})


def c_fill_errors(name: str) -> Iterator[CErrorCase]:
    op, ones, complex64 = f"infini::{name}: ", torch.ones(2, 3), 17
    names = "byte, bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float8, float16, float32, float64"
    for what, y, status, rule in (
        ("complex", Described(torch.ones(12), (2, 3), (3, 1), 0, complex64), "DTYPE",
         f"y must be {names} or bfloat16, got complex64"),
        ("shapes differ", torch.ones(3, 2), "SHAPE", "x must have the shape of y, [3, 2], got [2, 3]"),
        ("broadcast output", torch.ones(1, 3).expand(2, 3), "STRIDES",
         "y must not be a broadcast view, for it is written to, got strides [0, 1]"),
    ):  # fmt: skip
        yield CErrorCase(what, {"y": y, "x": ones}, f"BAD_TENSOR_{status}", op + rule)


def c_fill(info: OpInfo) -> COp:
    return c_op(
        replace(info, samples=c_fill_calls, errors=tuple),
        info.name.title(),
        ["y"],
        samples=c_fill_samples,
        errors=lambda: c_fill_errors(info.name),
        dtypes=tuple(DTYPES),
        variants=lambda args: (call for call in every_layout(args, ["y"]) if "out" in call[0]),
        varied=lambda dtype: [Sample("", (torch.ones(7, 300).to(dtype),))],
    )


BY_NAME = {info.name: info for info in (*INFOS, SILU, SWIGLU)}
BY_NAME["clip"] = replace(BY_NAME["clip"], reference=clip_reference_of_tensors)
C_OPS = [
    c_elementwise(BY_NAME["add"], "Add", "c", {"x": "a", "other": "b"}, NUMBERS),
    c_elementwise(BY_NAME["sub"], "Sub", "c", {"x": "a", "other": "b"}),
    c_elementwise(BY_NAME["mul"], "Mul", "c", {"x": "a", "other": "b"}),
    c_elementwise(BY_NAME["clip"], "Clip", "y", {"x": "x", "min": "min_val", "max": "max_val"}),
    c_elementwise(BY_NAME["relu"], "Relu", "y", {"x": "x"}),
    c_elementwise(BY_NAME["gelu"], "Gelu", "output", {"x": "input"}),
    c_elementwise(BY_NAME["sigmoid"], "Sigmoid", "y", {"x": "x"}),
    c_elementwise(BY_NAME["silu"], "Silu", "output", {"x": "input"}),
    c_elementwise(BY_NAME["softplus"], "Softplus", "y", {"x": "x"}),
    c_elementwise(BY_NAME["tanh"], "Tanh", "output", {"x": "input"}),
    c_elementwise(BY_NAME["swiglu"], "SwiGLU", "c", {"up": "a", "gate": "b"}),
    c_fill(BY_NAME["zeros"]),
    c_fill(BY_NAME["ones"]),
]
