"""ssd: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.ssd import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._of_arguments import of_arguments
from ._sequences import sequences


@dataclass(frozen=True)
class SsdCall:
    """The arguments of ssd."""

    out: Tensor
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None = None
    dt_bias: Tensor | None = None
    state: Tensor | None = None
    offsets: Tensor | None = None
    slots: Tensor | None = None
    dt_softplus: bool = False
    dt_min: float | None = None
    dt_max: float | None = None


def recurrence(call: SsdCall, out: Tensor, state: Tensor | None, dtype: torch.dtype) -> None:
    """Write the results of a call, computed token by token in the dtype, into out and state."""
    if not call.x.numel():
        return
    groups = call.x.shape[-2] // call.b.shape[-2]
    x, dt, a = call.x.to(dtype), call.dt.to(dtype), call.a.to(dtype)
    b, c = (t.to(dtype).repeat_interleave(groups, -2) for t in (call.b, call.c))
    dt = dt if call.dt_bias is None else dt + call.dt_bias.to(dtype)
    dt = F.softplus(dt) if call.dt_softplus else dt
    low, high = (-inf if call.dt_min is None else call.dt_min), (inf if call.dt_max is None else call.dt_max)
    dt = dt.clamp(low, high)
    skip = 0 if call.d is None else call.d.to(dtype)[:, None] * x
    y = torch.zeros_like(x)
    for tokens, row in sequences(call.x, 2, call.offsets, call.slots):
        kept = state is not None and row >= 0
        s = state[row].to(dtype) if state is not None and kept else x.new_zeros(*x.shape[-2:], b.shape[-1])
        results = []
        for t in range(x[tokens].shape[0]):
            step = dt[tokens][t, :, None]
            s = s * (step * a[:, None]).exp()[..., None] + (step * x[tokens][t])[..., None] * b[tokens][t, :, None]
            results.append((s * c[tokens][t, :, None]).sum(-1))
        if results:
            y[tokens] = torch.stack(results)
        if state is not None and kept:
            state[row] = s
    out.copy_(y + skip)


def reference(call: SsdCall) -> tuple[Tensor, ...] | Tensor:
    out, state = call.out.double(), None if call.state is None else call.state.double()
    recurrence(call, out, state, torch.float64)
    return out if state is None else (out, state)


def peer(call: SsdCall) -> None:
    recurrence(call, call.out, call.state, torch.float32)


def inputs(
    dtype: torch.dtype,
    *tokens: int,
    heads: int = 2,
    groups: int = 1,
    dims: tuple[int, int] = (16, 16),
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """Make (out, x, dt, a, b, c, d), with time steps that are positive."""
    gen = torch.Generator().manual_seed(sum(tokens) + dims[0] + seed)
    p, n = dims
    x = torch.randn(*tokens, heads, p, generator=gen)
    b, c = torch.randn(*tokens, groups, n, generator=gen), torch.randn(*tokens, groups, n, generator=gen)
    dt = F.softplus(torch.randn(*tokens, heads, generator=gen))
    a = -torch.rand(heads, generator=gen) * 2 - 0.01
    d = torch.randn(heads, generator=gen)
    c = c / max(n, 1) ** 0.5
    out, x, dt, b, c, d = (t.to(dtype) for t in (torch.zeros_like(x), x, dt, b, c, d))
    return out, x, dt, a, b, c, d


def states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("a batch", inputs(dtype, 2, 5))
    yield Sample("without d", inputs(dtype, 2, 5)[:-1])
    yield Sample("groups", inputs(dtype, 2, 3, heads=6, groups=2, dims=(7, 13)))
    yield Sample("a step of each sequence", (*inputs(dtype, 3, 1, heads=4), None, states(3, 4, 16, 16)))
    yield Sample("several steps", (*inputs(dtype, 2, 4, dims=(24, 37)), None, states(2, 2, 24, 37)))
    for dims in ((1, 1), (7, 31), (64, 64), (33, 130)):
        yield Sample(f"chunks, {dims}", (*inputs(dtype, 1, 75, dims=dims), None, states(1, 2, *dims)))
    yield Sample("chunks of many heads", inputs(dtype, 1, 70, heads=20, groups=2))
    for length in (15, 16, 17, 64, 129):
        yield Sample(f"{length} tokens", (*inputs(dtype, length, heads=3), None, states(1, 3, 16, 16)))
    packed = {"offsets": torch.tensor([0, 3, 3, 70, 71, 95])}
    yield Sample("packed", inputs(dtype, 95), packed)
    wide = inputs(dtype, 95, heads=8, dims=(96, 1))
    yield Sample("packed, steps and chunks, wide", wide, {"offsets": torch.tensor([0, 15, 30, 95])})
    slots = torch.tensor([5, 0, -1, 2, 3], dtype=torch.int32)
    args = (*inputs(dtype, 95, heads=4, groups=2), None, states(6, 4, 16, 16))
    yield Sample("packed, with slots", args, {**packed, "slots": slots})
    yield Sample("slots of steps", args, {"offsets": packed["offsets"].int(), "slots": slots})
    out, x, dt, a, b, c, d = inputs(dtype, 2, 70, heads=4, groups=2)
    bias = torch.linspace(-3, 1, 4)
    raw = torch.linspace(-30, 30, 2 * 70 * 4).view(2, 70, 4)[:, torch.randperm(70)].to(dtype)
    kwargs = {"dt_softplus": True, "dt_min": 0.01, "dt_max": 0.7}
    yield Sample("softplus, bias and limits", (out, x, raw, a, b, c, d, bias), kwargs)
    yield Sample(
        "softplus of steps", (out[:, :3], x[:, :3], raw[:, :3], a, b[:, :3], c[:, :3], d, bias.to(dtype)), kwargs
    )
    yield Sample("time steps as they are", (out, x, raw.clamp(-0.01, 1), a, b, c, d))
    yield Sample("float32 parameters", (out, x, dt.float(), a, b, c, d.float(), bias), {"dt_softplus": True})
    yield Sample("a float32 result", (out.float(), x, dt, a, b, c, d))
    yield Sample("nothing remains", (out, x, dt, torch.where(a < -1, -torch.inf, a), b, c, d))
    yield Sample("slow decay", (out, x, dt, a * 1e-3, b, c / 10, d))
    parts = torch.cat((x.flatten(-2), b.flatten(-2), c.flatten(-2)), -1).split((64, 32, 32), -1)
    views = [part.unflatten(-1, shape) for part, shape in zip(parts, ((4, 16), (2, 16), (2, 16)), strict=True)]
    yield Sample("parts of one product", (out, views[0], dt, a, *views[1:], d))
    yield Sample("no tokens", (*inputs(dtype, 2, 0), None, states(2, 2, 16, 16)))
    yield Sample("no heads", (*inputs(dtype, 2, 3, heads=0, groups=0), None, states(2, 0, 16, 16)))
    yield Sample("no columns of x", inputs(dtype, 2, 3, dims=(0, 4)))
    yield Sample("no columns of b", inputs(dtype, 2, 3, dims=(4, 0)))
    yield Sample("several threads", (*inputs(dtype, 1, 130, heads=8, dims=(64, 64)), None, states(1, 8, 64, 64)))


def errors() -> Iterator[ErrorCase]:
    out, x, dt, a, b, c, d = inputs(torch.float32, 2, 3, heads=4, groups=2)
    state = states(2, 4, 16, 16)
    op = "infini::ssd: "
    yield ErrorCase("rank", (out, x[0, 0], dt, a, b, c), op + "x must have 3 to 4 dimensions, got 2 (shape [4, 16])")
    yield ErrorCase(
        "float64", (out, x.double(), dt, a, b, c), op + "x must be float32, bfloat16 or float16, got float64"
    )
    yield ErrorCase(
        "dt shape",
        (out, x, dt[:, :2], a, b, c),
        op + "dt must have shape [2, 3, 4] to match the tokens and heads of x, got [2, 2, 4]",
    )
    yield ErrorCase(
        "dt dtype", (out, x, dt.double(), a, b, c), op + "dt must have the dtype of x, float32, got float64"
    )
    yield ErrorCase("a dtype", (out, x, dt, a.half(), b, c), op + "a must be float32, got float16")
    yield ErrorCase("a shape", (out, x, dt, a[:3], b, c), op + "a must have shape [4] one for each head of x, got [3]")
    yield ErrorCase("b dtype", (out, x, dt, a, b.half(), c), op + "b must have the dtype of x, float32, got float16")
    yield ErrorCase(
        "b's tokens",
        (out, x, dt, a, b[:, :2], c),
        op + "b must have shape [2, 3, 2, 16] to match the tokens of x, got [2, 2, 2, 16]",
    )
    yield ErrorCase(
        "groups",
        (out, x[:, :, :3], dt[:, :, :3], a[:3], b, c),
        op + "x must have a multiple of the 2 groups of b and c, got 3 heads",
    )
    yield ErrorCase(
        "c shape",
        (out, x, dt, a, b, c[..., :8]),
        op + "c must have the shape of b, [2, 3, 2, 16], got [2, 3, 2, 8]",
    )
    yield ErrorCase(
        "d shape", (out, x, dt, a, b, c, d[:2]), op + "d must have shape [4] one for each head of x, got [2]"
    )
    yield ErrorCase(
        "dt_bias dtype",
        (out, x, dt, a, b, c, d, d.double()),
        op + "dt_bias must have the dtype of x, float32, got float64",
    )
    yield ErrorCase(
        "state dtype", (out, x, dt, a, b, c, d, None, state.half()), op + "state must be float32, got float16"
    )
    yield ErrorCase(
        "another model's state",
        (out, x, dt, a, b, c, d, None, state[:, :, :8]),
        op + "state must have shape [2, 4, 16, 16] to match the heads and columns of x and b, got [2, 4, 8, 16]",
    )
    yield ErrorCase(
        "rows of the state",
        (out, x, dt, a, b, c, d, None, state[:1]),
        op + "state must have a row for each of the 2 sequences if there are no slots, got [1, 4, 16, 16]",
    )
    yield ErrorCase(
        "slot",
        (out, x, dt, a, b, c, d, None, state),
        op + "slots must be less than the 2 of state, got 2 for sequence 1",
        {"slots": torch.tensor([0, 2])},
        of_values=True,
    )
    yield ErrorCase(
        "offsets",
        (out[0], x[0], dt[0], a, b[0], c[0]),
        op + "offsets must rise from 0 to the number of tokens, 3, got 2 at position 1",
        {"offsets": torch.tensor([0, 2])},
        of_values=True,
    )
    yield ErrorCase(
        "limits",
        (out, x, dt, a, b, c),
        op + "dt_min must be a number that is at most dt_max, got 2 with 1",
        {"dt_min": 2.0, "dt_max": 1.0},
    )
    yield ErrorCase(
        "out shape", (out[:1], x, dt, a, b, c), op + "out must have the shape of x, [2, 3, 4, 16], got [1, 3, 4, 16]"
    )
    yield ErrorCase(
        "out overlaps x",
        (x, x, dt, a, b, c),
        op + "out must share no memory with x, got one whose span of memory overlaps it",
    )
    yield ErrorCase("meta x", (out, x.to("meta"), dt, a, b, c), op + "x must be on the device of out, cpu, got meta")


def cost(call: SsdCall) -> Cost:
    state = 0 if call.state is None else 2 * nbytes(call.state)
    return Cost(
        bytes=nbytes(call.out, call.x, call.dt, call.a, call.b, call.c, call.d, call.dt_bias) + state,
        flops=2 * call.x.numel() * 2 * call.b.shape[-1],
    )


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for batch, length in ((1, 1), (8, 1), (1, 512)):
        args = (*inputs(dtype, batch, length, heads=64, dims=(64, 128)), None, states(batch, 64, 64, 128))
        yield Sample(f"{batch}x{length}, 64 heads of 64x128", args)


INFO = OpInfo(
    **vars(SPEC),
    reference=of_arguments(SPEC.name, SsdCall, reference),
    samples=samples,
    errors=errors,
    cost=of_arguments(SPEC.name, SsdCall, cost),
    bench=bench,
    peer=of_arguments(SPEC.name, SsdCall, peer),
    # Sums of a hundred products that partly cancel, and products of as many decays.
    tolerances={
        torch.float32: (2e-5, 2e-5),
        torch.bfloat16: (2**-8, 2e-5),
        torch.float16: (2**-11, 2e-5),
    },
)
