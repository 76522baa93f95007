"""fused_experts: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...ops._panels import GROUP8, PANEL, TABLE4, Panels
from ...ops.fused_experts import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._of_arguments import of_arguments
from .linear import inputs as linear_inputs
from .linear_group8 import INFO as LINEAR_GROUP8
from .linear_table4 import INFO as LINEAR_TABLE4


def activate(x: Tensor, activation: int) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh") if activation else torch.nn.functional.silu(x)


def product(x: Tensor, weights: Tensor, scales: Tensor | None, e: int) -> Tensor:
    """Return x @ weight^T of expert e, rounded to the dtype of x, as float64."""
    if scales is None:
        return (x.double() @ weights[e].double().t()).to(x.dtype).double()
    info = LINEAR_GROUP8 if weights.shape[-1] == GROUP8.block_bytes else LINEAR_TABLE4
    result: Tensor = info.reference(x, weights[e], scales[e])
    return result


@dataclass(frozen=True, kw_only=True)
class ExpertsCall:
    """The arguments of a call of fused_experts."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    index: Tensor
    weights: Tensor
    activation: int = 0
    gate_up_scales: Tensor | None = None
    down_scales: Tensor | None = None

    @property
    def inner(self) -> int:
        """Columns of an expert's hidden values."""
        return (self.gate_up if self.gate_up_scales is None else self.gate_up_scales).shape[1] // 2

    def chosen(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each expert that a token chose, the tokens, and its place among the choices of each."""
        for e in self.index.unique().tolist():
            yield e, *torch.where(self.index == e)


def reference(call: ExpertsCall) -> Tensor:
    """Round where the op rounds; products, activations and the sum over experts are in float64."""
    x = call.x
    y = torch.zeros(x.shape, dtype=torch.float64)
    for e, tokens, places in call.chosen():
        gate, up = product(x[tokens], call.gate_up, call.gate_up_scales, e).chunk(2, -1)
        h = (activate(gate, call.activation) * up).to(x.dtype)
        results = product(h, call.down, call.down_scales, e)
        y.index_add_(0, tokens, results * call.weights[tokens, places, None].double())
    return y


def peer(call: ExpertsCall) -> Tensor:
    """A loop over the chosen experts, as transformers has it, with their weights in the dtype of x."""
    x = call.x
    y = torch.zeros_like(x)
    for e, tokens, places in call.chosen():
        gate_up = dense(call.gate_up, call.gate_up_scales, e, x.shape[1], x.dtype)
        down = dense(call.down, call.down_scales, e, call.inner, x.dtype)
        gate, up = torch.nn.functional.linear(x[tokens], gate_up).chunk(2, -1)
        h = torch.nn.functional.linear(activate(gate, call.activation) * up, down)
        y.index_add_(0, tokens, (h * call.weights[tokens, places, None]).to(x.dtype))
    return y


def dense(weights: Tensor, scales: Tensor | None, e: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the weight of expert e."""
    if scales is None:
        return weights[e]
    panels = GROUP8 if weights.shape[-1] == GROUP8.block_bytes else TABLE4
    return panels.dequantize(weights[e], scales[e], columns, dtype)


def packed(panels: Panels, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize the weights [experts, n, k] of all experts."""
    experts, n, k = weights.shape
    to = torch.full((experts, *panels.packed_shape(n, k)), 0x7D, dtype=torch.uint8)
    scales = torch.zeros(experts, n)
    for e in range(experts):
        elements, group_scales, scales[e] = panels.quantize(weights[e])
        panels.put_rows(to[e], torch.arange(n), elements, group_scales)
    return to, scales


def quantized(gate_up_in: Panels, down_in: Panels, *sizes: Any, activation: int = 0) -> tuple[Any, ...]:
    """Make the arguments of the op with quantized weights; sizes: the arguments of inputs."""
    x, index, weights, *of = packed_inputs(gate_up_in, down_in, *sizes)
    gate_up, gate_up_scales, down, down_scales = (part.clone() for part in of)
    return x.clone(), gate_up, down, index.clone(), weights.clone(), activation, gate_up_scales, down_scales


@lru_cache(64)  # quantizing in plain torch takes most of the samples' time, and tests make them many times
def packed_inputs(gate_up_in: Panels, down_in: Panels, *sizes: Any) -> tuple[Tensor, ...]:
    """Return (x, index, weights, gate_up, gate_up_scales, down, down_scales), not to be written."""
    x, gate_up, down, index, weights = inputs(*sizes)
    return x, index, weights, *packed(gate_up_in, gate_up), *packed(down_in, down)


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

    def in_panels(name: str, gate_up: Panels, down: Panels, *sizes: int, activation: int = 0) -> Sample:
        args = quantized(gate_up, down, dtype, *sizes, activation=activation)
        return Sample(name, args, contiguous=("gate_up", "down"))

    for name, panels in (("group8", GROUP8), ("table4", TABLE4)):
        for tokens in (1, 3, 40):
            yield in_panels(f"{name}, {tokens} tokens", panels, panels, tokens, 96, 48, 8, 2)
        for hidden, inner in ((1, 1), (7, 31), (65, 33), (769, 130)):
            yield in_panels(f"{name}, {hidden} columns, {inner} inside", panels, panels, 5, hidden, inner, 4, 3)
        yield in_panels(f"{name}, no tokens", panels, panels, 0, 32, 16, 4, 2)
        yield in_panels(f"{name}, nothing inside", panels, panels, 3, 32, 0, 4, 2)
        yield in_panels(f"{name}, geglu", panels, panels, 6, 64, 32, 4, 2, activation=1)
    yield in_panels("gate and up in 4 bits, down in 8", TABLE4, GROUP8, 5, 96, 48, 4, 2)


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
    size = "blocks of 1088 bytes (group8) or 576 (table4)"
    _, gate8, down8, *_, gate_scales, down_scales = quantized(GROUP8, GROUP8, torch.float32, 2, 16, 8, 4, 2)
    for name, of, says in (
        (
            "gate_up_scales alone",
            (gate8, down8, 0, gate_scales),
            "down_scales must be given with gate_up_scales, got None",
        ),
        (
            "down_scales alone",
            (gate8, down8, 0, None, down_scales),
            "gate_up_scales must be given with down_scales, got None",
        ),
        (
            "dense with scales",
            (gate_up, down, 0, gate_scales, down_scales),
            "gate_up must have 4 dimensions, got 3 (shape [4, 16, 16])",
        ),
        (
            "scales dtype",
            (gate8, down8, 0, gate_scales.half(), down_scales),
            "gate_up_scales must be float32, got float16",
        ),
        (
            "scales rank",
            (gate8, down8, 0, gate_scales[0], down_scales),
            "gate_up_scales must have 2 dimensions, got 1 (shape [16])",
        ),
        (
            "scales of gate without up",
            (gate8, down8, 0, gate_scales[:, :15], down_scales),
            "gate_up_scales must have an even second dimension, gate above up, got [4, 15]",
        ),
        (
            "scales of other experts",
            (gate8, down8, 0, gate_scales[:3], down_scales),
            "gate_up_scales must have shape [4, 16] to match the experts of gate_up, got [3, 16]",
        ),
        ("block size", (gate8[..., :1000], down8, 0, gate_scales, down_scales), f"gate_up must have {size}, got 1000"),
        (
            "panels",
            (gate8[:, :0], down8, 0, gate_scales, down_scales),
            "gate_up must have shape [4, 1, 1, 1088] to match gate_up_scales and x, got [4, 0, 1, 1088]",
        ),
        (
            "panels apart",
            (gate8[::2], down8[:2], 0, gate_scales[:2], down_scales[:2]),
            "gate_up must be contiguous, got strides [2176, 1088, 1088, 1]",
        ),
        (
            "panels dtype",
            (gate8.view(torch.int8), down8, 0, gate_scales, down_scales),
            "gate_up must be uint8, got int8",
        ),
        (
            "down_scales of other columns",
            (gate8, down8, 0, gate_scales, down_scales[:, :15]),
            "down_scales must have shape [4, 16] to match gate_up and x, got [4, 15]",
        ),
        (
            "down dense",
            (gate8, down, 0, gate_scales, down_scales),
            "down must have 4 dimensions, got 3 (shape [4, 16, 8])",
        ),
    ):
        first, second, *others = of
        yield ErrorCase(name, (x, first, second, index, weights, *others), op + says)
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


def cost(call: ExpertsCall) -> Cost:
    of_experts = (call.gate_up, call.down, call.gate_up_scales, call.down_scales)
    one = nbytes(*(tensor[:1] for tensor in of_experts if tensor is not None))
    return Cost(
        bytes=2 * nbytes(call.x) + nbytes(call.index, call.weights) + len(call.index.unique()) * one,
        flops=2 * call.index.numel() * 3 * call.x.shape[1] * call.inner,
    )


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    experts = 32
    for tokens in (1, 8, 256):
        # Random numbers for one expert, and its rows quantized for one panel: times do not depend on the values.
        x, *one, _, _ = inputs(dtype, tokens, 2048, 768, 1, 1)
        *_, index, weights = inputs(dtype, tokens, 1, 1, experts, 8)
        shape = f"{tokens} tokens, {experts} experts of 2048 x 768, 8 chosen"
        yield Sample(shape, (x, *(w.repeat(experts, 1, 1) for w in one), index, weights))
        for name, panels in (("group8", GROUP8), ("table4", TABLE4)):
            few = [packed(panels, w[:, :PANEL]) for w in one]
            panels_of = [w.shape[1] // PANEL for w in one]
            blocks = [p.repeat(experts, n, 1, 1) for (p, _), n in zip(few, panels_of, strict=True)]
            scales = [s.repeat(experts, n) for (_, s), n in zip(few, panels_of, strict=True)]
            yield Sample(f"{name}, {shape}", (x, *blocks, index, weights, 0, *scales))


INFO = OpInfo(
    **vars(SPEC),
    reference=of_arguments(SPEC.name, ExpertsCall, reference),
    samples=samples,
    errors=errors,
    cost=of_arguments(SPEC.name, ExpertsCall, cost),
    bench=bench,
    peer=of_arguments(SPEC.name, ExpertsCall, peer),
    # Where a product lies between two numbers, float and float64 round it to different ones: by one step in some of
    # the numbers that are summed up again.
    tolerances={
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (2**-7, 2**-7),
        torch.float16: (2**-10, 2**-10),
    },
)
