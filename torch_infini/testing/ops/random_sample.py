"""random_sample: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops.random_sample import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._int32 import with_int32


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Compute Philox4x32-10 in Python integers: the kernel's reference."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def low_half(value: int) -> int:
    return value & 0xFFFFFFFF


def uniform(seed: int, offset: int) -> float:
    """Return the u of a row."""
    key, counter = ((low_half(value), low_half(value >> 32)) for value in (seed, offset))
    return (philox(key, (*counter, 0, 0))[0] >> 8) * 2.0**-24


# A row's (logits, u, temperature, top_k, top_p).
Row = tuple[Tensor, float, float, int, float]


def sorted_row(logits: Tensor, u: float, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor, float]:
    """Return (order, cumulative weights, limit) of one row in float64; greedy rows have limit 0."""
    x = logits.double()
    n = x.numel()
    values, order = x.sort(descending=True, stable=True)
    if temperature == 0 or top_k == 1 or top_p == 0:
        return order, torch.ones_like(values), 0.0
    cumulative = ((values - values[0]) / temperature).exp().cumsum(0)
    kept = cumulative[(min(top_k, n) if top_k > 0 else n) - 1]
    return order, cumulative, u * min(kept.item(), min(top_p, 1.0) * cumulative[-1].item())


def drawn(row: Row) -> int:
    """Return the token of a row."""
    order, cumulative, limit = sorted_row(*row)
    return int(order[(cumulative >= limit).int().argmax()])


def check_token(token: int, row: Row, where: str, rounding: float = 4e-6) -> None:
    """Require the reference's token, or one whose share of the cumulative weights is within rounding of the limit."""
    wanted, n = drawn(row), row[0].numel()
    assert 0 <= token < n, f"{where} gives {token}, of {n} tokens"
    if token == wanted:
        return
    order, cumulative, limit = sorted_row(*row)
    place = int((order == token).nonzero())
    below, reached = cumulative[place - 1].item() if place else 0.0, cumulative[place].item()
    # Float arithmetic: each weight has a relative error of up to 2e-6 where it matters, and so has their sum.
    near = below <= limit * (1 + rounding) and reached >= limit * (1 - rounding)
    assert near and limit > 0, (
        f"{where} gives {token} (cumulative weight {below!r} to {reached!r}), expected {wanted}, for the limit is "
        f"{limit!r}"
    )


def rows_of(sample_args: tuple[Tensor, ...]) -> Iterator[Row]:
    logits, *settings = sample_args
    lists = (setting.reshape(-1).tolist() for setting in settings)
    for row, temperature, top_k, top_p, seed, offset in zip(logits.reshape(-1, logits.shape[-1]), *lists, strict=True):
        yield row, uniform(seed, offset), temperature, top_k, top_p


def reference(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, offset: Tensor
) -> Tensor:
    tokens = [drawn(row) for row in rows_of((logits, temperature, top_k, top_p, seed, offset))]
    return torch.tensor(tokens, dtype=torch.int64).view(logits.shape[:-1])


def compare(actual: Tensor, sample: Sample) -> None:
    assert actual.dtype == torch.int64 and actual.shape == sample.args[0].shape[:-1]
    for i, (token, row) in enumerate(zip(actual.reshape(-1).tolist(), rows_of(sample.args), strict=True)):
        check_token(token, row, f"{sample.name}: row {i}")


def peer(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """Sample as serving code does: argmax if all rows are greedy, topk if all have a limit, else a full sort; one
    generator for all rows.
    """
    if (temperature == 0).all():
        return logits.argmax(-1)
    n = logits.shape[-1]
    widest = n if (top_k <= 0).any() else min(int(top_k.max().clamp(min=1)) if top_k.numel() else 1, n)
    scaled = logits.float() / temperature.clamp(min=1e-5).unsqueeze(-1)
    values, ids = scaled.topk(widest) if widest < n else scaled.sort(descending=True, stable=True)
    total = torch.logsumexp(scaled, -1, keepdim=True)
    probabilities = (values - total).exp()
    before = probabilities.cumsum(-1) - probabilities
    place = torch.arange(widest, device=logits.device)
    dropped = (before >= top_p.unsqueeze(-1)) | ((place >= top_k.unsqueeze(-1)) & (top_k > 0).unsqueeze(-1))
    dropped[..., 0] = False
    noise = torch.empty_like(values).exponential_()
    drawn = (probabilities.masked_fill(dropped, 0.0) / noise).argmax(-1, keepdim=True)
    drawn = torch.where((temperature == 0).unsqueeze(-1), 0, drawn)
    return ids.gather(-1, drawn).squeeze(-1)


def settings_for(rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> tuple[Tensor, ...]:
    """Make (temperature, top_k, top_p, seed, offset): equal for all rows except seed and offset."""
    index = torch.arange(rows)
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), top_p),
        index * 0x123456789ABCDEF - 3,
        index * 7 + 2**33,
    )


def logits_of(dtype: torch.dtype, *shape: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n in (1, 7, 769, 5125):
        yield Sample(f"{n} columns", (logits_of(dtype, 5, n), *settings_for(5)))
        yield Sample(f"{n} columns, top-k", (logits_of(dtype, 5, n, seed=1), *settings_for(5, 0.7, 50)))
        yield Sample(f"{n} columns, top-p", (logits_of(dtype, 5, n, seed=2), *settings_for(5, 1.3, 0, 0.9)))
    yield Sample("one dimension", (logits_of(dtype, 64), *(s.view(()) for s in settings_for(1, 0.8, 20, 0.95))))
    yield Sample("no rows", (logits_of(dtype, 0, 16), *settings_for(0)))

    # Every setting in turn, so that neighbours differ.
    temperatures, ks, ps = [0.0, 0.6, 1.0, 1e-30, 1e30, 5.0], [0, 1, 2, 40, 600, 10**6, -1], [1.0, 0.0, 0.5, 0.95, 2.0]
    rows = 60
    mixed = settings_for(rows)
    choices: tuple[list[float] | list[int], ...] = (temperatures, ks, ps)
    for setting, values in zip(mixed, choices):
        setting.copy_(torch.tensor([values[i % len(values)] for i in range(rows)], dtype=setting.dtype))
    yield Sample("mixed settings", (logits_of(dtype, rows, 1003), *mixed))
    yield with_int32(Sample("mixed settings", (logits_of(dtype, rows, 1003), *mixed)))

    # If all logits are equal, the token shows all bits of u, and every token must be the reference's.
    yield Sample("equal logits", (torch.full((20, 4096), -2.5, dtype=dtype), *settings_for(20)))
    yield Sample("equal logits, top-k", (torch.full((20, 4096), -2.5, dtype=dtype), *settings_for(20, 1.0, 1000)))
    signed = torch.where(logits_of(dtype, 20, 4096) < 0, -0.0, 0.0).to(dtype)
    yield Sample("signed zeros", (signed, *settings_for(20)))
    yield Sample("signed zeros, top-k", (signed, *settings_for(20, 1.0, 1000)))
    ties = logits_of(dtype, 20, 3000).round()
    yield Sample("ties", (ties, *settings_for(20, 2.0)))
    yield Sample("ties, top-k", (ties, *settings_for(20, 2.0, 300, 0.99)))

    masked = logits_of(dtype, 6, 700)
    masked[:, 3:] = -torch.inf
    masked[1, :3], masked[1, 699] = -torch.inf, -5
    yield Sample("masked", (masked, *settings_for(6)))
    yield Sample("masked, top-k", (masked, *settings_for(6, 1.0, 50)))
    yield Sample("ascending", (torch.linspace(-8, 8, 9001).repeat(3, 1).to(dtype), *settings_for(3, 1.0, 50, 0.9)))
    peaked = logits_of(dtype, 3, 40000)
    peaked[:, 20000] = 30
    yield Sample("large", (peaked, *settings_for(3, 1.0, 0, 0.9)))
    yield Sample("large, top-k", (logits_of(dtype, 3, 40000), *settings_for(3, 1.0, 50, 0.9)))
    extreme = torch.finfo(dtype).max
    yield Sample("extreme", (torch.tensor([[extreme, -extreme, 0, extreme]], dtype=dtype), *settings_for(1)))


def errors() -> Iterator[ErrorCase]:
    op = "infini::random_sample: "
    x = logits_of(torch.float32, 2, 16)
    good = settings_for(2)

    def settings(**changed: Tensor) -> tuple[Tensor, ...]:
        names = ("temperature", "top_k", "top_p", "seed", "offset")
        return tuple(changed.get(name, value) for name, value in zip(names, good))

    def with_value(value: float, row: int, column: int | slice) -> Tensor:
        bad = x.clone()
        bad[row, column] = value
        return bad

    def second(value: float) -> Tensor:
        return torch.tensor([1.0, value])

    yield ErrorCase("scalar", (x[0, 0], *good), op + "logits must have 1 to 2 dimensions, got 0 (shape [])")
    yield ErrorCase("float64", (x.double(), *good), op + "logits must be float32, bfloat16 or float16, got float64")
    yield ErrorCase(
        "transposed",
        (x.t(), *good),
        op + "logits must have stride 1 in its last dimension (call .contiguous() on it), got strides [1, 16]",
    )
    yield ErrorCase("no columns", (x[:, :0], *good), op + "logits must have 1 to 16777216 columns, got 0")
    yield ErrorCase(
        "too many columns",
        (torch.empty(0, 2**24 + 1), *settings_for(0)),
        op + "logits must have 1 to 16777216 columns, got 16777217",
    )
    for name, (value, dtype) in {
        "temperature": (good[0], "float32"),
        "top_k": (good[1], "int64 or int32"),
        "top_p": (good[2], "float32"),
        "seed": (good[3], "int64 or int32"),
        "offset": (good[4], "int64 or int32"),
    }.items():
        yield ErrorCase(
            f"{name} rows",
            (x, *settings(**{name: value[:1]})),
            op + f"{name} must have shape [2] to match the rows of logits, got [1]",
        )
        yield ErrorCase(
            f"{name} dtype", (x, *settings(**{name: value.bool()})), op + f"{name} must be {dtype}, got bool"
        )
    yield ErrorCase(
        "one row", (x[0], *good), op + "temperature must have shape [] for logits of one dimension, got [2]"
    )
    for number, text in ((-0.5, "-0.5"), (torch.nan, "nan"), (torch.inf, "inf")):
        yield ErrorCase(
            f"temperature {text}",
            (x, *settings(temperature=second(number))),
            op + f"temperature must be a finite number of at least 0, got {text} in row 1",
            of_values=True,
        )
    for number, text in ((-0.5, "-0.5"), (torch.nan, "nan")):
        yield ErrorCase(
            f"top_p {text}",
            (x, *settings(top_p=second(number))),
            op + f"top_p must be a number of at least 0, got {text} in row 1",
            of_values=True,
        )
    rule = op + "logits must be below +infinity and not NaN, got "
    yield ErrorCase("NaN", (with_value(torch.nan, 1, 9), *good), rule + "nan at row 1, column 9", of_values=True)
    yield ErrorCase("infinity", (with_value(torch.inf, 0, 15), *good), rule + "inf at row 0, column 15", of_values=True)
    yield ErrorCase(
        "NaN, first maximum",
        (with_value(torch.nan, 1, 0), *settings_for(2, 0.0)),
        rule + "nan at row 1, column 0",
        of_values=True,
    )
    yield ErrorCase(
        "all NaN", (with_value(torch.nan, 0, slice(None)), *good), rule + "nan at row 0, column 0", of_values=True
    )
    yield ErrorCase(
        "all masked",
        (with_value(-torch.inf, 1, slice(None)), *good),
        op + "logits must have a value above -infinity in every row, got none in row 1",
        of_values=True,
    )
    yield ErrorCase(
        "meta seed", (x, *settings(seed=good[3].to("meta"))), op + "seed must be on the device of logits, cpu, got meta"
    )
    yield ErrorCase(
        "out shape",
        (x, *good),
        op + "out must have shape [2] to match the rows of logits, got [3]",
        {"out": torch.empty(3, dtype=torch.int64)},
    )
    yield ErrorCase("out dtype", (x, *good), op + "out must be int64, got int32", {"out": torch.empty(2).int()})
    yield ErrorCase(
        "out broadcast",
        (x, *good),
        op + "out must not be a broadcast view, for it is written to, got strides [0]",
        {"out": torch.empty(1, dtype=torch.int64).expand(2)},
    )
    shared = torch.zeros(3, dtype=torch.int64)
    yield ErrorCase(
        "out overlaps",
        (x, *settings(offset=shared[:2])),
        op + "out must be offset itself or share no memory with it, got one whose span of memory overlaps it",
        {"out": shared[1:]},
    )


def cost(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, offset: Tensor) -> Cost:
    settings = nbytes(temperature, top_k, top_p, seed, offset)
    return Cost(bytes=nbytes(logits) + settings + 8 * temperature.numel())


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    logits = logits_of(dtype, 1, 128256)
    yield Sample("1x128256, greedy", (logits, *settings_for(1, 0.0)))
    yield Sample("1x128256, top-k 50", (logits, *settings_for(1, 1.0, 50)))
    yield Sample("1x128256, top-k 50, top-p 0.9", (logits, *settings_for(1, 0.8, 50, 0.9)))
    yield Sample("1x128256, top-p 0.9", (logits, *settings_for(1, 1.0, 0, 0.9)))
    yield Sample("8x32000, top-k 50, top-p 0.9", (logits_of(dtype, 8, 32000), *settings_for(8, 0.8, 50, 0.9)))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    compare=compare,
)
