"""gated_delta_rule: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.gated_delta_rule import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._of_arguments import of_arguments
from ._sequences import sequences


@dataclass(frozen=True)
class DeltaCall:
    """The arguments of gated_delta_rule."""

    out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor | None = None
    offsets: Tensor | None = None
    slots: Tensor | None = None
    scale: float | None = None
    l2norm: bool = False


def recurrence(call: DeltaCall, out: Tensor, state: Tensor | None, dtype: torch.dtype) -> None:
    """Write the results of a call, computed token by token in the dtype, into out and state."""
    if not call.v.numel():
        return
    groups = call.v.shape[-2] // call.q.shape[-2]
    scale = max(call.q.shape[-1], 1) ** -0.5 if call.scale is None else call.scale

    def heads(x: Tensor) -> Tensor:
        x = x.to(dtype)
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if call.l2norm else x
        return x.repeat_interleave(groups, -2)

    q, k, v = heads(call.q) * scale, heads(call.k), call.v.to(dtype)
    decay, beta = call.g.to(dtype).exp(), call.beta.to(dtype)
    for tokens, row in sequences(call.q, 2, call.offsets, call.slots):
        kept = state is not None and row >= 0
        s = state[row].to(dtype) if state is not None and kept else v.new_zeros(v.shape[-2], q.shape[-1], v.shape[-1])
        results = []
        for t in range(q[tokens].shape[0]):
            s = s * decay[tokens][t, :, None, None]
            key = k[tokens][t, :, :, None]
            u = beta[tokens][t, :, None] * (v[tokens][t] - (key * s).sum(-2))
            s = s + key * u[:, None]
            results.append((q[tokens][t, :, :, None] * s).sum(-2))
        if results:
            out[tokens] = torch.stack(results).to(out.dtype)
        if state is not None and kept:
            state[row] = s


def reference(call: DeltaCall) -> tuple[Tensor, ...] | Tensor:
    out, state = call.out.double(), None if call.state is None else call.state.double()
    recurrence(call, out, state, torch.float64)
    return out if state is None else (out, state)


def peer(call: DeltaCall) -> None:
    recurrence(call, call.out, call.state, torch.float32)


def inputs(
    dtype: torch.dtype, *tokens: int, heads: tuple[int, int] = (2, 2), dims: tuple[int, int] = (16, 16), seed: int = 0
) -> tuple[Tensor, ...]:
    """Make (out, q, k, v, g, beta), with rows of k of length 1."""
    gen = torch.Generator().manual_seed(sum(tokens) + dims[0] + seed)
    (hk, hv), (dk, dv) = heads, dims
    q, k = torch.randn(*tokens, hk, dk, generator=gen), torch.randn(*tokens, hk, dk, generator=gen)
    v = torch.randn(*tokens, hv, dv, generator=gen)
    g = -F.softplus(torch.randn(*tokens, hv, generator=gen))
    beta = torch.rand(*tokens, hv, generator=gen)
    out, q, k, v, beta = (t.to(dtype) for t in (torch.zeros_like(v), q, F.normalize(k, dim=-1), v, beta))
    return out, q, k, v, g, beta


def states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("a batch", inputs(dtype, 2, 5))
    yield Sample("groups", inputs(dtype, 2, 3, heads=(2, 6), dims=(7, 13)))
    yield Sample("a step of each sequence", (*inputs(dtype, 3, 1, heads=(2, 4)), states(3, 4, 16, 16)))
    yield Sample("several steps", (*inputs(dtype, 2, 4, dims=(24, 37)), states(2, 2, 24, 37)), {"l2norm": True})
    for dims in ((1, 1), (7, 31), (64, 64), (130, 96)):
        yield Sample(f"chunks, {dims}", (*inputs(dtype, 1, 75, dims=dims), states(1, 2, *dims)), {"l2norm": True})
    for length in (15, 16, 17, 64, 129):
        yield Sample(f"{length} tokens", (*inputs(dtype, length, heads=(1, 2)), states(1, 2, 16, 16)))
    packed = {"offsets": torch.tensor([0, 3, 3, 70, 71, 95])}
    yield Sample("packed", inputs(dtype, 95), packed)
    slots = torch.tensor([5, 0, -1, 2, 3], dtype=torch.int32)
    args = (*inputs(dtype, 95, heads=(2, 4)), states(6, 4, 16, 16))
    yield Sample("packed, with slots", args, {**packed, "slots": slots, "scale": 0.7})
    yield Sample("slots of steps", (*args[:1], *args[1:]), {"offsets": packed["offsets"].int(), "slots": slots})
    out, q, k, v, g, beta = inputs(dtype, 2, 70)
    yield Sample("gates in one dtype", (out, q, k, v, g.to(dtype), beta))
    yield Sample("float32 beta", (out, q, k, v, g, beta.float()))
    yield Sample("nothing remains", (out, q, k, v, torch.where(g < -1, -torch.inf, g), beta))
    yield Sample("slow decay", (out, q, k, v, g * 1e-3, beta))
    yield Sample("parts of one product", (out, *torch.cat((q, k, v), -1).chunk(3, -1), g, beta))
    yield Sample("no tokens", (*inputs(dtype, 2, 0), states(2, 2, 16, 16)))
    yield Sample("no heads", (*inputs(dtype, 2, 3, heads=(0, 0)), states(2, 0, 16, 16)))
    yield Sample("no columns of k", inputs(dtype, 2, 3, dims=(0, 4)))
    yield Sample("no columns of v", inputs(dtype, 2, 3, dims=(4, 0)))
    yield Sample("several threads", (*inputs(dtype, 1, 130, heads=(2, 4), dims=(64, 64)), states(1, 4, 64, 64)))


def errors() -> Iterator[ErrorCase]:
    out, q, k, v, g, beta = inputs(torch.float32, 2, 3, heads=(2, 4))
    state = states(2, 4, 16, 16)
    op = "infini::gated_delta_rule: "
    rest = (g, beta)
    yield ErrorCase("rank", (out, q[0, 0], k, v, *rest), op + "q must have 3 to 4 dimensions, got 2 (shape [2, 16])")
    yield ErrorCase(
        "float64", (out, q.double(), k, v, *rest), op + "q must be float32, bfloat16 or float16, got float64"
    )
    yield ErrorCase(
        "k shape", (out, q, k[:, :2], v, *rest), op + "k must have the shape of q, [2, 3, 2, 16], got [2, 2, 2, 16]"
    )
    yield ErrorCase("v dtype", (out, q, k, v.half(), *rest), op + "v must have the dtype of q, float32, got float16")
    yield ErrorCase(
        "v's tokens",
        (out, q, k, v[:, :2], *rest),
        op + "v must have shape [2, 3, 4, 16] to match the tokens of q, got [2, 2, 4, 16]",
    )
    yield ErrorCase(
        "heads", (out, q, k, v[:, :, :3], *rest), op + "v must have a multiple of the 2 heads of q and k, got 3"
    )
    yield ErrorCase(
        "g shape",
        (out, q, k, v, g[:, :, :2], beta),
        op + "g must have shape [2, 3, 4] to match the tokens and heads of v, got [2, 3, 2]",
    )
    yield ErrorCase(
        "beta dtype",
        (out, q, k, v, g, beta.double()),
        op + "beta must have the dtype of q, float32, got float64",
    )
    yield ErrorCase("state dtype", (out, q, k, v, *rest, state.half()), op + "state must be float32, got float16")
    yield ErrorCase(
        "another model's state",
        (out, q, k, v, *rest, state[:, :, :8]),
        op + "state must have shape [2, 4, 16, 16] to match the heads and columns of k and v, got [2, 4, 8, 16]",
    )
    yield ErrorCase(
        "rows of the state",
        (out, q, k, v, *rest, state[:1]),
        op + "state must have a row for each of the 2 sequences if there are no slots, got [1, 4, 16, 16]",
    )
    yield ErrorCase(
        "slot",
        (out, q, k, v, *rest, state),
        op + "slots must be less than the 2 of state, got 2 for sequence 1",
        {"slots": torch.tensor([0, 2])},
        of_values=True,
    )
    yield ErrorCase(
        "offsets",
        (out[0], q[0], k[0], v[0], g[0], beta[0]),
        op + "offsets must rise from 0 to the number of tokens, 3, got 2 at position 1",
        {"offsets": torch.tensor([0, 2])},
        of_values=True,
    )
    yield ErrorCase(
        "scale", (out, q, k, v, *rest), op + "scale must be a finite number, got nan", {"scale": float("nan")}
    )
    yield ErrorCase(
        "out shape", (out[:1], q, k, v, *rest), op + "out must have the shape of v, [2, 3, 4, 16], got [1, 3, 4, 16]"
    )
    yield ErrorCase(
        "out overlaps v",
        (v, q, k, v, *rest),
        op + "out must share no memory with v, got one whose span of memory overlaps it",
    )
    yield ErrorCase("meta q", (out, q.to("meta"), k, v, *rest), op + "q must be on the device of out, cpu, got meta")


def cost(call: DeltaCall) -> Cost:
    state = 0 if call.state is None else 2 * nbytes(call.state)
    dk, dv = call.q.shape[-1], call.v.shape[-1]
    return Cost(
        bytes=nbytes(call.out, call.q, call.k, call.v, call.g, call.beta) + state,
        flops=2 * call.g.numel() * 3 * dk * dv,
    )


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for batch, length in ((1, 1), (8, 1), (1, 512)):
        args = (*inputs(dtype, batch, length, heads=(16, 32), dims=(128, 128)), states(batch, 32, 128, 128))
        yield Sample(f"{batch}x{length}, 16/32 heads of 128x128", args, {"l2norm": True})


INFO = OpInfo(
    **vars(SPEC),
    reference=of_arguments(SPEC.name, DeltaCall, reference),
    samples=samples,
    errors=errors,
    cost=of_arguments(SPEC.name, DeltaCall, cost),
    bench=bench,
    peer=of_arguments(SPEC.name, DeltaCall, peer),
    # In chunks, sums of a hundred products that partly cancel are solved for one after the other.
    tolerances={
        torch.float32: (2e-5, 2e-5),
        torch.bfloat16: (2**-8, 2e-5),
        torch.float16: (2**-11, 2e-5),
    },
)
