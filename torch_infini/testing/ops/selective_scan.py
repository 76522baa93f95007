"""selective_scan: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.selective_scan import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._of_arguments import of_arguments
from ._sequences import sequences


@dataclass(frozen=True)
class ScanCall:
    """The arguments of selective_scan."""

    out: Tensor
    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor | None = None
    dt_bias: Tensor | None = None
    z: Tensor | None = None
    state: Tensor | None = None
    offsets: Tensor | None = None
    slots: Tensor | None = None
    dt_softplus: bool = False


def recurrence(call: ScanCall, out: Tensor, state: Tensor | None, dtype: torch.dtype) -> None:
    """Write the results of a call, computed token by token in the dtype, into out and state."""
    if not call.x.numel():
        return
    x, dt, a, b, c = (t.to(dtype) for t in (call.x, call.dt, call.a, call.b, call.c))
    dt = dt if call.dt_bias is None else dt + call.dt_bias.to(dtype)
    dt = F.softplus(dt) if call.dt_softplus else dt
    y = torch.zeros_like(x)
    for tokens, row in sequences(call.x, 1, call.offsets, call.slots):
        kept = state is not None and row >= 0
        s = state[row].to(dtype) if state is not None and kept else torch.zeros_like(a)
        results = []
        for t in range(x[tokens].shape[0]):
            step = dt[tokens][t, :, None]
            s = s * (step * a).exp() + step * x[tokens][t, :, None] * b[tokens][t]
            results.append((s * c[tokens][t]).sum(-1))
        if results:
            y[tokens] = torch.stack(results)
        if state is not None and kept:
            state[row] = s
    y = y if call.d is None else y + call.d.to(dtype) * x
    out.copy_(y if call.z is None else y * F.silu(call.z.to(dtype)))


def reference(call: ScanCall) -> tuple[Tensor, ...] | Tensor:
    out, state = call.out.double(), None if call.state is None else call.state.double()
    recurrence(call, out, state, torch.float64)
    return out if state is None else (out, state)


def peer(call: ScanCall) -> None:
    recurrence(call, call.out, call.state, torch.float32)


def inputs(
    dtype: torch.dtype, *tokens: int, channels: int = 32, columns: int = 16, seed: int = 0
) -> tuple[Tensor, ...]:
    """Make (out, x, dt, a, b, c, d), with time steps that are positive."""
    gen = torch.Generator().manual_seed(sum(tokens) + channels + seed)
    x = torch.randn(*tokens, channels, generator=gen)
    b, c = torch.randn(*tokens, columns, generator=gen), torch.randn(*tokens, columns, generator=gen)
    dt = F.softplus(torch.randn(*tokens, channels, generator=gen) - 1)
    a = -torch.rand(channels, columns, generator=gen) * columns - 0.01
    d = torch.randn(channels, generator=gen)
    out, x, dt, b, c, d = (t.to(dtype) for t in (torch.zeros_like(x), x, dt, b, c / max(columns, 1) ** 0.5, d))
    return out, x, dt, a, b, c, d


def states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("a batch", inputs(dtype, 2, 5))
    yield Sample("without d", inputs(dtype, 2, 5)[:-1])
    yield Sample("a step of each sequence", (*inputs(dtype, 3, 1), None, None, states(3, 32, 16)))
    for channels, columns in ((1, 1), (7, 31), (130, 4), (70, 16)):
        for length in (3, 75):
            made = inputs(dtype, 1, length, channels=channels, columns=columns)
            yield Sample(f"{length} tokens, {channels}x{columns}", (*made, None, None, states(1, channels, columns)))
    for length in (7, 8, 64, 129):
        yield Sample(f"{length} tokens", (*inputs(dtype, length), None, None, states(1, 32, 16)))
    packed = {"offsets": torch.tensor([0, 3, 3, 70, 71, 95])}
    yield Sample("packed", inputs(dtype, 95), packed)
    slots = torch.tensor([5, 0, -1, 2, 3], dtype=torch.int32)
    with_states = (*inputs(dtype, 95), None, None, states(6, 32, 16))
    yield Sample("packed, with slots", with_states, {**packed, "slots": slots})
    yield Sample("slots of steps", with_states, {"offsets": packed["offsets"].int(), "slots": slots})
    for length in (4, 70):
        out, x, dt, a, b, c, d = inputs(dtype, 2, length, channels=37)
        z, bias = 3 * x.flip(1), torch.linspace(-3, 1, 37)
        raw = torch.linspace(-30, 30, x.numel())[torch.randperm(x.numel())].view_as(x).to(dtype)
        yield Sample(f"a gate, {length} tokens", (out, x, dt, a, b, c, d, None, z))
        yield Sample(f"softplus and bias, {length} tokens", (out, x, raw, a, b, c, d, bias, z), {"dt_softplus": True})
        yield Sample(
            f"float32 parameters, {length} tokens",
            (out, x, raw.float(), a, b, c, d.float(), bias),
            {"dt_softplus": True},
        )
        yield Sample(f"a float32 result, {length} tokens", (out.float(), x, dt, a, b, c, d))
        strided = torch.cat((dt, z), 1).mT.contiguous().mT.split(length, 1)
        yield Sample(f"tokens last, {length} tokens", (out, x, strided[0], a, b, c, d, None, strided[1]))
    yield Sample("time steps as they are", (out, x, raw.clamp(-0.01, 1), a, b, c, d))
    yield Sample("nothing remains", (out, x, dt, torch.where(a < -8, -torch.inf, a), b, c, d))
    yield Sample("slow decay", (out, x, dt, a * 1e-3, b, c / 10, d))
    yield Sample("parts of one product", (out, x, dt, a, *torch.cat((b, c), -1).split(16, -1), d))
    yield Sample("no tokens", (*inputs(dtype, 2, 0), None, None, states(2, 32, 16)))
    yield Sample("no channels", (*inputs(dtype, 2, 3, channels=0), None, None, states(2, 0, 16)))
    yield Sample("no columns", inputs(dtype, 2, 9, columns=0))
    yield Sample("several threads", (*inputs(dtype, 1, 130, channels=256), None, None, states(1, 256, 16)))


def errors() -> Iterator[ErrorCase]:
    out, x, dt, a, b, c, d = inputs(torch.float32, 2, 3)
    state = states(2, 32, 16)
    op = "infini::selective_scan: "
    yield ErrorCase("rank", (out, x[0, 0], dt, a, b, c), op + "x must have 2 to 3 dimensions, got 1 (shape [32])")
    yield ErrorCase(
        "float64", (out, x.double(), dt, a, b, c), op + "x must be float32, bfloat16 or float16, got float64"
    )
    yield ErrorCase(
        "dt shape", (out, x, dt[:, :2], a, b, c), op + "dt must have the shape of x, [2, 3, 32], got [2, 2, 32]"
    )
    yield ErrorCase(
        "dt dtype", (out, x, dt.double(), a, b, c), op + "dt must have the dtype of x, float32, got float64"
    )
    yield ErrorCase("a dtype", (out, x, dt, a.half(), b, c), op + "a must be float32, got float16")
    yield ErrorCase(
        "a shape",
        (out, x, dt, a[:3], b, c),
        op + "a must have shape [32, 16] to match the channels of x, got [3, 16]",
    )
    yield ErrorCase("b dtype", (out, x, dt, a, b.half(), c), op + "b must have the dtype of x, float32, got float16")
    yield ErrorCase(
        "b's tokens",
        (out, x, dt, a, b[:, :2], c),
        op + "b must have shape [2, 3, 16] to match the tokens of x and the columns of a, got [2, 2, 16]",
    )
    yield ErrorCase(
        "c shape", (out, x, dt, a, b, c[..., :8]), op + "c must have the shape of b, [2, 3, 16], got [2, 3, 8]"
    )
    yield ErrorCase(
        "d shape", (out, x, dt, a, b, c, d[:2]), op + "d must have shape [32] one for each channel of x, got [2]"
    )
    yield ErrorCase(
        "dt_bias dtype",
        (out, x, dt, a, b, c, d, d.double()),
        op + "dt_bias must have the dtype of x, float32, got float64",
    )
    yield ErrorCase(
        "z shape",
        (out, x, dt, a, b, c, d, None, x[..., :8]),
        op + "z must have the shape of x, [2, 3, 32], got [2, 3, 8]",
    )
    yield ErrorCase(
        "state dtype", (out, x, dt, a, b, c, d, None, None, state.half()), op + "state must be float32, got float16"
    )
    yield ErrorCase(
        "another model's state",
        (out, x, dt, a, b, c, d, None, None, state[:, :, :8]),
        op + "state must have shape [2, 32, 16] to match the channels and columns of a, got [2, 32, 8]",
    )
    yield ErrorCase(
        "rows of the state",
        (out, x, dt, a, b, c, d, None, None, state[:1]),
        op + "state must have a row for each of the 2 sequences if there are no slots, got [1, 32, 16]",
    )
    yield ErrorCase(
        "slot",
        (out, x, dt, a, b, c, d, None, None, state),
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
        "out shape", (out[:1], x, dt, a, b, c), op + "out must have the shape of x, [2, 3, 32], got [1, 3, 32]"
    )
    yield ErrorCase(
        "out overlaps x",
        (x, x, dt, a, b, c),
        op + "out must share no memory with x, got one whose span of memory overlaps it",
    )
    yield ErrorCase("meta x", (out, x.to("meta"), dt, a, b, c), op + "x must be on the device of out, cpu, got meta")


def cost(call: ScanCall) -> Cost:
    state = 0 if call.state is None else 2 * nbytes(call.state)
    return Cost(
        bytes=nbytes(call.out, call.x, call.dt, call.a, call.b, call.c, call.d, call.dt_bias, call.z) + state,
        flops=2 * call.x.numel() * 3 * call.a.shape[1],
    )


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for batch, length in ((1, 1), (8, 1), (1, 512)):
        args = (*inputs(dtype, batch, length, channels=4096), None, None, states(batch, 4096, 16))
        yield Sample(f"{batch}x{length}, 4096 channels of 16", args)


INFO = OpInfo(
    **vars(SPEC),
    reference=of_arguments(SPEC.name, ScanCall, reference),
    samples=samples,
    errors=errors,
    cost=of_arguments(SPEC.name, ScanCall, cost),
    bench=bench,
    peer=of_arguments(SPEC.name, ScanCall, peer),
    # Sums of products that partly cancel, and products of a hundred decays.
    tolerances={
        torch.float32: (2e-5, 2e-5),
        torch.bfloat16: (2**-8, 2e-5),
        torch.float16: (2**-11, 2e-5),
    },
)
