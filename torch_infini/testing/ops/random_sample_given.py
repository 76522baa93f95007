"""random_sample_given: reference, samples, error cases, cost and benchmarks; infiniopRandomSample is the same op."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from ...ops import FLOATS
from ...ops.random_sample_given import SPEC
from ..c_door import Arguments, c_op, unwritten
from ..c_ops import CErrorCase, CSample, Described
from ..op_info import TOLERANCES, Cost, ErrorCase, OpInfo, Sample, nbytes
from .random_sample import Row, check_token, drawn, logits_of, rows_of
from .random_sample import samples as samples_of_rows

DTYPES = (*FLOATS, torch.float64)


def row_of(logits: Tensor, random_val: float, topp: float = 1.0, topk: int = 0, temperature: float = 1.0) -> Row:
    """Return the row that a call draws from, with its numbers rounded to float32."""
    u, rounded_temperature, p = (ctypes.c_float(value).value for value in (random_val, temperature, topp))
    return logits, u, rounded_temperature, topk, p


def reference(logits: Tensor, random_val: float, topp: float = 1.0, topk: int = 0, temperature: float = 1.0) -> Tensor:
    return torch.tensor(drawn(row_of(logits, random_val, topp, topk, temperature)), dtype=torch.int32)


def compare(actual: Tensor, sample: Sample) -> None:
    assert not actual.dtype.is_floating_point and actual.dim() == 0
    row = row_of(*sample.args)
    check_token(int(actual), row, sample.name, 1e-12 if row[0].dtype == torch.float64 else 4e-6)


def peer(logits: Tensor, random_val: float, topp: float = 1.0, topk: int = 0, temperature: float = 1.0) -> Tensor:
    """Sample as callers without the op do: a full sort, and the first sum of probabilities that reaches the limit."""
    if 0 in (random_val, topp, temperature) or topk == 1:
        return logits.argmax(-1)
    values, order = logits.float().sort(descending=True, stable=True)
    sums = (values / temperature).softmax(-1).cumsum(-1)
    kept = sums[topk - 1] if 0 < topk < logits.numel() else sums[-1]
    limit = random_val * torch.minimum(kept, topp * sums[-1])
    return order[torch.searchsorted(sums, limit).clamp(max=logits.numel() - 1)].int()


# random_val, topp, topk, temperature
NUMBERS = {
    "greedy by random_val": (0.0, 0.9, 5, 0.8),
    "greedy by topp": (0.5, 0.0, 5, 0.8),
    "greedy by topk": (0.5, 0.9, 1, 0.8),
    "greedy by temperature": (0.5, 0.9, 5, 0.0),
    "the end": (1.0, 2.0, -7, 2.0),
    "near the start": (1e-6, 0.9, 3, 0.1),
}


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    """Yield some rows of each of random_sample's samples, and extreme numbers, which no seed draws."""
    for i, sample in enumerate(samples_of_rows(dtype)):
        rows = list(rows_of(sample.args))
        for row in range(i % max(len(rows), 1), len(rows), 11):
            logits, u, temperature, topk, topp = rows[row]
            yield Sample(f"{sample.name}, row {row}", (logits.clone(), u, topp, topk, temperature))
    for name, numbers in NUMBERS.items():
        for n in (1, 2, 37, 3001):
            yield Sample(f"{name}, {n}", (logits_of(dtype, n, seed=n), *numbers))
    masked = logits_of(dtype, 40)
    masked[torch.arange(40) % 3 != 1] = -torch.inf
    yield Sample("all that is not masked kept", (masked, 1.0))
    # Numbers that float32 rounds: to 0, and to 1.
    yield Sample("a random number below float32", (logits_of(dtype, 40), 1e-60))
    yield Sample("a temperature below float32", (logits_of(dtype, 40), 0.9, 1.0, 0, 1e-60))
    yield Sample("a random number near 1", (logits_of(dtype, 40), 1 - 1e-12))
    # The low 32 bits alone would be other limits.
    yield Sample("a topk beyond int32", (logits_of(dtype, 40), 0.99, 1.0, 2**32 + 1))
    yield Sample("a topk below int32", (logits_of(dtype, 40), 0.99, 1.0, 1 - 2**32))
    yield Sample("a whole vocabulary", (logits_of(dtype, 128_256), 0.83, 0.9, 50, 1.0))


def errors() -> Iterator[ErrorCase]:
    op = "infini::random_sample_given: "
    x = logits_of(torch.float32, 200)
    yield ErrorCase("scalar", (x[0], 0.5), op + "logits must have 1 dimension, got 0 (shape [])")
    yield ErrorCase("two dimensions", (x[None], 0.5), op + "logits must have 1 dimension, got 2 (shape [1, 200])")
    yield ErrorCase("integers", (x.int(), 0.5), op + "logits must be float32, bfloat16, float16 or float64, got int32")
    yield ErrorCase("no elements", (x[:0], 0.5), op + "logits must have 1 to 16777216 elements, got 0")
    yield ErrorCase(
        "one number for all",
        (x[:1].expand(200), 0.5),
        op + "logits must have stride 1 in its last dimension (call .contiguous() on it), got strides [0]",
    )
    yield ErrorCase(
        "every second",
        (x[::2], 0.5),
        op + "logits must have stride 1 in its last dimension (call .contiguous() on it), got strides [2]",
    )
    of_number = "must be a finite number of at least 0, got"
    for name, numbers, rule in (
        ("random_val above 1", (1.5,), "random_val must be at least 0 and at most 1, got 1.5"),
        ("random_val below 0", (-0.5,), "random_val must be at least 0 and at most 1, got -0.5"),
        ("random_val nan", (torch.nan,), "random_val must be at least 0 and at most 1, got nan"),
        ("topp infinite", (0.5, torch.inf), f"topp {of_number} inf"),
        ("topp below 0", (0.5, -0.5), f"topp {of_number} -0.5"),
        ("temperature below 0", (0.5, 1.0, 0, -1.0), f"temperature {of_number} -1"),
        ("temperature nan", (0.5, 1.0, 0, torch.nan), f"temperature {of_number} nan"),
        (
            "temperature beyond float32",
            (0.5, 1.0, 0, 1e39),
            "temperature must be a finite number of at least 0 and at most 3.40282e+38, got 1e+39",
        ),
    ):
        yield ErrorCase(name, (x, *numbers), op + rule)
    yield ErrorCase(
        "out of one dimension",
        (x, 0.5),
        op + "out must have 0 dimensions, got 1 (shape [1])",
        {"out": torch.zeros(1).int()},
    )
    yield ErrorCase(
        "out of floats",
        (x, 0.5),
        op + "out must be int64, int32, int16, int8, uint64, uint32, uint16 or uint8, got float32",
        {"out": torch.tensor(0.0)},
    )
    yield ErrorCase(
        "out too small", (x, 0.5), op + "out must hold the indices up to 199, got int8", {"out": torch.tensor(0).char()}
    )
    memory = torch.zeros(8)
    yield ErrorCase(
        "out overlaps",
        (memory, 0.5),
        op + "out must share no memory with logits, got one whose span of memory overlaps it",
        {"out": memory.view(torch.int32)[3]},
    )
    for dtype in DTYPES:
        infinite, nan, masked = (x.to(dtype, copy=True) for _ in range(3))
        infinite[150], nan[150], masked[:] = torch.inf, torch.nan, -torch.inf
        for logits, rule in (
            (infinite, "be below +infinity and not NaN, got inf at 150"),
            (nan, "be below +infinity and not NaN, got nan at 150"),
            (masked, "have a value above -infinity, got none"),
        ):
            yield ErrorCase(f"{dtype} {rule}", (logits, 0.5), f"{op}logits must {rule}", of_values=True)


def cost(logits: Tensor, random_val: float, topp: float = 1.0, topk: int = 0, temperature: float = 1.0) -> Cost:
    return Cost(bytes=nbytes(logits) + 4)


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    logits = logits_of(dtype, 128_256)
    yield Sample("128256, top-k 50, top-p 0.9", (logits, 0.4, 0.9, 50, 0.8))
    yield Sample("128256, greedy", (logits, 0.4, 0.9, 1, 0.8))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    dtypes=DTYPES,
    tolerances={**TOLERANCES, torch.float64: (0.0, 0.0)},
    compare=compare,
)

NUMBERED = ("random_val", "topp", "temperature")  # the prefixes of names of invalid numbers
RESULTS = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))


def c_args(logits: Tensor | Described, result: torch.dtype = torch.int64, random_val: float = 0.4) -> Arguments:
    numbers = {"random_val": random_val, "topp": 1.0, "topk": 0, "temperature": 1.0}
    return {"result": unwritten((), result), "probs": logits, **numbers}


def c_samples() -> Iterator[CSample]:
    """Yield a stride that torch rejects, and indices of each dtype."""
    for dtype in DTYPES:
        one = Described(logits_of(dtype, 40), (1,), (0,), 7)
        yield CSample(f"{str(dtype)[6:]} one element of any stride", c_args(one))
    for result in RESULTS:
        yield CSample(f"{str(result)[6:]} result", c_args(logits_of(torch.float32, 128), result))


def c_errors() -> Iterator[CErrorCase]:
    """Yield calls with invalid numbers, which are passed to the run, not to the descriptor."""
    for case in errors():
        if case.name.startswith(NUMBERED):
            numbers = dict(zip(SPEC.arguments[1:], case.args[1:], strict=False))
            if all(abs(value) < 1e38 or not abs(value) < torch.inf for value in numbers.values()):
                message = case.message.replace("random_sample_given", "random_sample")
                yield CErrorCase(case.name, {**c_args(case.args[0]), **numbers}, "BAD_PARAM", message, "run")


C_OPS = [
    c_op(
        INFO,
        "RandomSample",
        ["result"],
        {"logits": "probs"},
        samples=c_samples,
        errors=c_errors,
        words={"logits": "probs", "out": "result", "random_sample_given": "random_sample"},
        statuses={"no elements": "BAD_TENSOR_SHAPE"},
        refuses=lambda case: not case.name.startswith(NUMBERED),
    )
]
