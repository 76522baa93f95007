"""softmax and log_softmax along any dimension.

The kernel is csrc/infiniop/softmax.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._registry import Cost, ErrorCase, OpSpec, Sample, nbytes


def softmax(x: Tensor, dim: int = -1, *, out: Tensor | None = None) -> Tensor:
    """Turn the values along a dimension into weights that add up to 1.

    y = exp(x - m) / sum of exp(x - m) along dim, m the largest x there; in float32, rounded once.
    torch.ops.infini.softmax_(x, dim) overwrites x.

    Args:
        x: One dimension at least, float32, bfloat16 or float16; any strides.
        dim: The dimension; negative ones count from the last.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous. Where all x are -inf, or one is inf or NaN, all results are NaN, as
        torch.softmax has it.

    Raises:
        RuntimeError: For a rank, shape, dtype or dim that cannot be served, or an out that overlaps x.

    Equivalent to:
        >>> y = torch.softmax(x, dim)

    Source: Bridle, Probabilistic Interpretation of Feedforward Classification Network Outputs, 1990.
    """
    if out is None:
        return torch.ops.infini.softmax.default(x, dim)
    return torch.ops.infini.softmax.out(x, dim, out=out)


def log_softmax(x: Tensor, dim: int = -1, *, out: Tensor | None = None) -> Tensor:
    """Logarithms of softmax: log-probabilities from logits.

    y = x - m - log(sum of exp(x - m)) along dim, m the largest x there; in float32, rounded once.
    torch.ops.infini.log_softmax_(x, dim) overwrites x.

    Args:
        x: One dimension at least, float32, bfloat16 or float16; any strides.
        dim: The dimension; negative ones count from the last.
        out: Written and returned instead of a new tensor: of any of the three dtypes (float32 keeps what half types
            would round), or x itself.

    Returns:
        The shape and dtype of x, contiguous. Where all x are -inf, or one is inf or NaN, all results are NaN, as
        torch.log_softmax has it.

    Raises:
        RuntimeError: For a rank, shape, dtype or dim that cannot be served, or an out that overlaps x.

    Equivalent to:
        >>> y = torch.log_softmax(x, dim)

    Source: Bridle, Probabilistic Interpretation of Feedforward Classification Network Outputs, 1990.
    """
    if out is None:
        return torch.ops.infini.log_softmax.default(x, dim)
    return torch.ops.infini.log_softmax.out(x, dim, out=out)


def fake(x: Tensor, dim: int = -1) -> Tensor:
    return x.new_empty(x.shape)


def softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x.double(), dim)


def log_softmax_reference(x: Tensor, dim: int = -1) -> Tensor:
    return torch.log_softmax(x.double(), dim)


def softmax_peer(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x, dim)


def log_softmax_peer(x: Tensor, dim: int = -1) -> Tensor:
    return torch.log_softmax(x, dim)


def softmax_decomposition(x: Tensor, dim: int = -1) -> Tensor:
    return torch.softmax(x.float(), dim).to(x.dtype, memory_format=torch.contiguous_format)


def log_softmax_decomposition(x: Tensor, dim: int = -1) -> Tensor:
    return torch.log_softmax(x.float(), dim).to(x.dtype, memory_format=torch.contiguous_format)


def scores(dtype: torch.dtype, *shape: int) -> Tensor:
    """Values as they come before a softmax: a spread of 3."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", (scores(dtype, 3, n),))
    yield Sample("one dimension", (scores(dtype, 64),))
    for dim in range(-3, 3):
        yield Sample(f"dimension {dim} of three", (scores(dtype, 5, 40, 37), dim))
    yield Sample("eight dimensions", (scores(dtype, 1, 2, 1, 3, 4, 1, 2, 5), 4))
    yield Sample("no rows", (scores(dtype, 0, 16),))
    yield Sample("no columns", (scores(dtype, 4, 0),))
    yield Sample("no rows, along them", (scores(dtype, 0, 16), 0))
    yield Sample("large", (scores(dtype, 150, 1024),))
    yield Sample("large, along the rows", (scores(dtype, 150, 1000), 0))
    large = scores(dtype, 3, 40)
    large[0] += 3e4  # would overflow without the maximum
    large[1] *= 1e3  # all but one exponential vanish
    large[2] -= 3e4  # all would vanish without the maximum
    yield Sample("large values", (large,))
    special = scores(dtype, 5, 20)
    special[0, ::2] = -torch.inf
    special[1] = -torch.inf
    special[2, 3] = torch.inf
    special[3, 3] = torch.nan
    yield Sample("infinities and NaN", (special,))
    yield Sample("strided columns", (scores(dtype, 4, 90)[:, ::2],))
    yield Sample("transposed", (scores(dtype, 50, 20).t(),))
    yield Sample("transposed, along the rows", (scores(dtype, 50, 20).t(), 0))
    yield Sample("a broadcast x", (scores(dtype, 1, 9).expand(4, 9),))
    yield Sample("along a broadcast dimension", (scores(dtype, 1, 9).expand(4, 9), 0))


def errors_of(name: str) -> Iterator[ErrorCase]:
    """What both refuse."""
    x = scores(torch.float32, 3, 8)
    op = f"infini::{name}: "
    yield ErrorCase("scalar", (x[0, 0],), op + "x must have 1 to 8 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (x.double(),), op + "x must be float32, bfloat16 or float16, got float64")
    for dim in (2, -3):
        yield ErrorCase(f"dimension {dim}", (x, dim), op + f"dim must be in [-2, 1], got {dim}")
    yield ErrorCase("a dim of more than 32 bits", (x, 2**32), op + "dim must be a dimension of x, got 4294967296")
    yield ErrorCase(
        "out shape", (x,), op + "out must have the shape of x, [3, 8], got [3, 7]", {"out": torch.empty(3, 7)}
    )
    yield ErrorCase(
        "broadcast out",
        (x,),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 1]",
        {"out": torch.empty(8).expand(3, 8)},
    )
    yield ErrorCase(
        "out overlaps",
        (x[:2],),
        op + "out must be x itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": x[1:]},
    )


def softmax_errors() -> Iterator[ErrorCase]:
    yield from errors_of("softmax")
    yield ErrorCase(
        "out dtype",
        (scores(torch.float32, 3, 8),),
        "infini::softmax: out must have the dtype of x, float32, got float16",
        {"out": torch.empty(3, 8, dtype=torch.float16)},
    )


def log_softmax_errors() -> Iterator[ErrorCase]:
    yield from errors_of("log_softmax")
    yield ErrorCase(
        "out dtype",
        (scores(torch.float32, 3, 8),),
        "infini::log_softmax: out must be float32, bfloat16 or float16, got float64",
        {"out": torch.empty(3, 8, dtype=torch.float64)},
    )


def cost(x: Tensor, dim: int = -1) -> Cost:
    return Cost(bytes=2 * nbytes(x), flops=20 * x.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("512x4096", (scores(dtype, 512, 4096),))
    yield Sample("32x512x512", (scores(dtype, 32, 512, 512),))
    yield Sample("1x32000", (scores(dtype, 1, 32000),))


SPECS = [
    OpSpec(
        name="softmax",
        schema="(Tensor x, int dim=-1) -> Tensor",
        function=softmax,
        fake=fake,
        reference=softmax_reference,
        samples=samples,
        errors=softmax_errors,
        cost=cost,
        bench=bench,
        peer=softmax_peer,
        inplace="x",
        decomposition=softmax_decomposition,
    ),
    OpSpec(
        name="log_softmax",
        schema="(Tensor x, int dim=-1) -> Tensor",
        function=log_softmax,
        fake=fake,
        reference=log_softmax_reference,
        samples=samples,
        errors=log_softmax_errors,
        cost=cost,
        bench=bench,
        peer=log_softmax_peer,
        inplace="x",
        decomposition=log_softmax_decomposition,
    ),
]
