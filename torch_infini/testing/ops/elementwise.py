"""The elementwise ops: reference, samples, refused calls, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...ops import REGISTRY
from ...ops.elementwise import clip_in_aten
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .silu import activations, as_held_by, special_values

# What the ops of one tensor share.

FLOATS = "float32, bfloat16, float16 or float64"
SHAPES = (512, 4096), (16384, 4096), (1, 2048)


def unary_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", (activations(dtype, 3, n),))
    yield Sample("scalar", (activations(dtype),))
    yield Sample("one dimension", (activations(dtype, 100_001),))
    yield Sample("four dimensions", (activations(dtype, 2, 3, 4, 32),))
    yield Sample("transposed", (activations(dtype, 769, 5).t(),))
    yield Sample("broadcast", (activations(dtype, 5, 1).expand(5, 300),))
    yield Sample("float64", (activations(torch.float64, 3, 40),))
    yield Sample("no rows", (activations(dtype, 0, 16),))
    yield Sample("no columns", (activations(dtype, 4, 0),))
    yield Sample("large", (activations(dtype, 70, 2051),))
    yield Sample("special values", (special_values(dtype),))


def refused_outs(op: str, x: Tensor, like: str, *others: Tensor) -> Iterator[ErrorCase]:
    """Outs that no op takes for an x of [2, 16]."""
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
    """Outs that no op takes but the fills, which do not read x."""
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
    """What proves an op of one tensor: formula in float64, operations for an element, what torch has."""

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


# The ops of two tensors.


def pair(dtype: torch.dtype, shape: tuple[int, ...], other: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
    return activations(dtype, *shape), activations(dtype, *(shape if other is None else other), seed=1)


def every_pair(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Zeros, infinities, NaN, the largest numbers and a few others, each with each."""
    largest = torch.finfo(dtype).max
    few = torch.tensor([0.0, -0.0, 1.0, -2.5, largest, -largest, torch.inf, -torch.inf, torch.nan]).to(dtype)
    x, other = torch.meshgrid(few, few, indexing="ij")
    return x.contiguous(), other.contiguous()


def binary_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Here only other is broadcast, so that x can be overwritten; tests/test_elementwise.py has the rest."""
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
    yield Sample("broadcast views", (activations(dtype, 5, 1).expand(5, 300), activations(dtype, 300).expand(5, 300)))
    yield Sample("float64", pair(torch.float64, (3, 40), (40,)))
    yield Sample("no rows", pair(dtype, (0, 16), (1, 16)))
    yield Sample("no columns", pair(dtype, (4, 0), (4, 1)))
    yield Sample("large", pair(dtype, (50, 2051)))
    yield Sample("large, one row for all", pair(dtype, (50, 2051), (2051,)))
    yield Sample("special values", every_pair(dtype))


def integer_samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Those of add."""
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
    """What proves an op of two tensors; dtypes: as its message lists them."""

    def reference(x: Tensor, other: Tensor) -> Tensor:
        if not x.is_floating_point():
            return peer(x, other).double()
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
    bounds = ((), (-1.0, 1.0), (None, 0.7), (-0.1,), (3.0, -2.0), (torch.nan, 1.0), (0.0, torch.nan))
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
    """What proves an op that writes one value."""
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
    binary("add", torch.add, "float32, bfloat16, float16, float64, int32 or int64", integer_samples),
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
