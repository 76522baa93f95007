"""fused_experts: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...ops.fused_experts import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from .linear import inputs as linear_inputs


def activate(x: Tensor, activation: int) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh") if activation else torch.nn.functional.silu(x)


def reference(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, activation: int = 0) -> Tensor:
    """Round where the op rounds; products, activations and the sum over experts are in float64."""

    def rounded(value: Tensor) -> Tensor:
        return value.to(x.dtype).double()

    y = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(index.shape[0]):
        for j in range(index.shape[1]):
            e = int(index[t, j])
            gate, up = rounded(gate_up[e].double() @ x[t].double()).chunk(2)
            y[t] += weights[t, j].double() * rounded(down[e].double() @ rounded(activate(gate, activation) * up))
    return y


def peer(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, activation: int = 0) -> Tensor:
    """A loop over the chosen experts, as transformers has it."""
    y = torch.zeros_like(x)
    for e in index.unique().tolist():
        tokens, places = torch.where(index == e)
        gate, up = torch.nn.functional.linear(x[tokens], gate_up[e]).chunk(2, -1)
        h = torch.nn.functional.linear(activate(gate, activation) * up, down[e])
        y.index_add_(0, tokens, (h * weights[tokens, places, None]).to(x.dtype))
    return y


def inputs(
    dtype: torch.dtype,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    k: int,
    weights_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Make (x, gate_up, down, index, weights); each token has k different experts where there are as many."""
    g = torch.Generator().manual_seed(seed)
    x, gate_up, _ = linear_inputs(dtype, tokens, k=hidden, n=experts * 2 * inner, seed=seed)
    _, down, _ = linear_inputs(dtype, 1, k=inner, n=experts * hidden, seed=seed + 1)
    order = torch.rand(tokens, max(experts, k), generator=g).argsort(1)[:, :k] % max(experts, 1)
    weights = torch.rand(tokens, k, generator=g).softmax(1).to(weights_dtype or dtype)
    return x, gate_up.view(experts, 2 * inner, hidden), down.view(experts, hidden, inner), order, weights


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    for tokens in (1, 2, 3, 9, 40):
        yield Sample(f"{tokens} tokens", inputs(dtype, tokens, 96, 48, 8, 2))
    for hidden, inner in ((1, 1), (7, 31), (65, 33), (769, 130)):
        yield Sample(f"{hidden} columns, {inner} inside", inputs(dtype, 5, hidden, inner, 4, 3))
    yield Sample("float32 weights", inputs(dtype, 6, 64, 32, 4, 2, torch.float32))
    yield Sample("geglu", (*inputs(dtype, 6, 64, 32, 4, 2), 1))
    yield Sample("one expert", inputs(dtype, 4, 32, 16, 1, 1))
    yield Sample("all experts", inputs(dtype, 4, 32, 16, 6, 6))
    yield Sample("many experts", inputs(dtype, 7, 32, 16, 130, 8))
    x, gate_up, down, index, weights = inputs(dtype, 5, 48, 16, 4, 2)
    yield Sample("an expert twice", (x, gate_up, down, torch.full_like(index, 2), weights))
    yield Sample("int32 index", (x, gate_up, down, index.int(), weights))
    yield Sample("no tokens", inputs(dtype, 0, 32, 16, 4, 2))
    yield Sample("no experts are chosen", inputs(dtype, 3, 32, 16, 4, 0))
    yield Sample("nothing inside", inputs(dtype, 3, 32, 0, 4, 2))
    yield Sample("several threads", inputs(dtype, 2, 512, 300, 4, 2))
    yield Sample("more tokens than are computed at once", inputs(dtype, 1030, 8, 4, 3, 1))


def errors() -> Iterator[ErrorCase]:
    x, gate_up, down, index, weights = inputs(torch.float32, 2, 16, 8, 4, 2)
    op = "infini::fused_experts: "
    rest = (gate_up, down, index, weights)
    yield ErrorCase("x rank", (x[0], *rest), op + "x must have 2 dimensions, got 1 (shape [16])")
    yield ErrorCase("float64", (x.double(), *rest), op + "x must be float32, bfloat16 or float16, got float64")
    yield ErrorCase(
        "x's columns apart",
        (torch.cat((x, x), 1)[:, ::2], *rest),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [32, 2]",
    )
    yield ErrorCase(
        "gate_up rank",
        (x, gate_up[0], down, index, weights),
        op + "gate_up must have 3 dimensions, got 2 (shape [16, 16])",
    )
    yield ErrorCase(
        "gate_up dtype",
        (x, gate_up.half(), down, index, weights),
        op + "gate_up must have the dtype of x, float32, got float16",
    )
    yield ErrorCase(
        "gate without up",
        (x, gate_up[:, :15], down, index, weights),
        op + "gate_up must have an even second dimension, gate above up, got [4, 15, 16]",
    )
    yield ErrorCase(
        "gate_up of other columns",
        (x[:, :12].contiguous(), gate_up, down, index, weights),
        op + "gate_up must have shape [4, 16, 12] to match the last dimension of x, got [4, 16, 16]",
    )
    yield ErrorCase(
        "gate_up transposed",
        (x, gate_up.transpose(1, 2), down, index, weights),
        op + "gate_up must have stride 1 in its last dimension (call .contiguous() on it), got strides [256, 1, 16]",
    )
    yield ErrorCase(
        "down of other experts",
        (x, gate_up, down[:3], index, weights),
        op + "down must have shape [4, 16, 8] to match gate_up and x, got [3, 16, 8]",
    )
    yield ErrorCase(
        "index dtype",
        (x, gate_up, down, index.float(), weights),
        op + "index must be int64 or int32, got float32",
    )
    yield ErrorCase(
        "index of other tokens",
        (x, gate_up, down, index[:1], weights[:1]),
        op + "index must have shape [2, 2] to match the rows of x, got [1, 2]",
    )
    yield ErrorCase(
        "weights shape",
        (x, gate_up, down, index, weights[:, :1]),
        op + "weights must have the shape of index, [2, 2], got [2, 1]",
    )
    yield ErrorCase(
        "weights dtype",
        (x, gate_up, down, index, weights.double()),
        op + "weights must have the dtype of x, float32, got float64",
    )
    yield ErrorCase("activation", (x, *rest, 2), op + "activation must be 0 (swiglu) or 1 (geglu), got 2")
    yield ErrorCase(
        "no experts",
        (x, gate_up[:0], down[:0], index, weights),
        op + "gate_up must have experts, for index has some, got [0, 16, 16]",
        of_values=True,
    )
    for wrong in (-1, 4):
        bad = index.clone()
        bad[1, 0] = wrong
        yield ErrorCase(
            f"expert {wrong}",
            (x, gate_up, down, bad, weights),
            op + f"index must be from 0 to 3, the experts of gate_up, got {wrong} at [1, 0]",
            of_values=True,
        )
    yield ErrorCase(
        "meta gate_up",
        (x, gate_up.to("meta"), down, index, weights),
        op + "gate_up must be on the device of x, cpu, got meta",
    )

    def out(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return {"out": torch.empty(shape, dtype=dtype)}

    yield ErrorCase("out shape", (x, *rest), op + "out must have shape [2, 16], that of x, got [16, 2]", out(16, 2))
    yield ErrorCase(
        "out dtype",
        (x, *rest),
        op + "out must have the dtype of x, float32, got float16",
        out(2, 16, dtype=torch.half),
    )
    yield ErrorCase(
        "out overlaps x",
        (x, *rest),
        op + "out must share no memory with x, got one whose span of memory overlaps it",
        {"out": x},
    )
    yield ErrorCase(
        "out overlaps down",
        (x, *rest),
        op + "out must share no memory with down, got one whose span of memory overlaps it",
        {"out": down.view(-1)[:32].view(2, 16)},
    )


def cost(x: Tensor, gate_up: Tensor, down: Tensor, index: Tensor, weights: Tensor, activation: int = 0) -> Cost:
    chosen = len(index.unique())
    of_expert = (gate_up[:1].numel() + down[:1].numel()) * x.element_size()
    return Cost(
        bytes=2 * nbytes(x) + nbytes(index, weights) + chosen * of_expert,
        flops=2 * index.numel() * (gate_up[:1].numel() + down[:1].numel()),
    )


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for tokens in (1, 8, 256):
        yield Sample(f"{tokens} tokens, 32 experts of 2048 x 768, 8 chosen", inputs(dtype, tokens, 2048, 768, 32, 8))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
    # Where a product lies between two numbers, float and float64 round it to different ones: by one step in some of
    # the numbers that are summed up again.
    tolerances={
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (2**-7, 2**-7),
        torch.float16: (2**-10, 2**-10),
    },
)
