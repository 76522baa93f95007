"""fused_experts: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...ops._block_panels import PANEL as PANEL_OF_BLOCKS
from ...ops._block_panels import blocks_of
from ...ops._blocks import KINDS
from ...ops._panels import GROUP8, PANEL, TABLE4, Panels
from ...ops.fused_experts import ACTIVATIONS, SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._of_arguments import of_arguments
from .linear import inputs as linear_inputs
from .linear_block_panels import in_panels
from .linear_blocks import BY_NUMBER, random_weight
from .linear_blocks import INFO as LINEAR_BLOCKS
from .linear_group8 import INFO as LINEAR_GROUP8
from .linear_table4 import INFO as LINEAR_TABLE4

ACTIVATION_NAMES = list(ACTIVATIONS)


@dataclass(frozen=True)
class Weights:
    """The weights of one product, of all experts: dense, in panels, in blocks, or in panels of blocks."""

    data: Tensor
    scales: Tensor | None
    bias: Tensor | None
    kind: int

    def blocks(self, e: int) -> Tensor:
        """Return the weight of expert e in rows of blocks."""
        is_packed = self.data.shape[-1] == PANEL_OF_BLOCKS * BY_NUMBER[self.kind].bytes
        return blocks_of(self.data[e], self.kind) if is_packed else self.data[e]

    def product(self, x: Tensor, e: int) -> Tensor:
        """Return x @ weight^T + bias of expert e, rounded to the dtype of x, as float64."""
        bias = None if self.bias is None else self.bias[e]
        if self.scales is not None:
            info = LINEAR_GROUP8 if self.data.shape[-1] == GROUP8.block_bytes else LINEAR_TABLE4
            y: Tensor = info.reference(x, self.data[e], self.scales[e], bias).double()
        elif self.kind >= 0:
            y = LINEAR_BLOCKS.reference(x, self.blocks(e), self.kind, bias)
        else:
            y = x.double() @ self.data[e].double().t() + (0 if bias is None else bias.double())
        return y.to(x.dtype).double()

    def linear(self, x: Tensor, e: int) -> Tensor:
        """Return the same in the dtype of x, computed with a dense weight."""
        return torch.nn.functional.linear(
            x, self.dense(e, x.shape[1], x.dtype), None if self.bias is None else self.bias[e]
        )

    def dense(self, e: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return the weight of expert e."""
        if self.scales is not None:
            panels = GROUP8 if self.data.shape[-1] == GROUP8.block_bytes else TABLE4
            return panels.dequantize(self.data[e], self.scales[e], columns, dtype)
        return BY_NUMBER[self.kind].dequantize(self.blocks(e)).to(dtype) if self.kind >= 0 else self.data[e]

    @property
    def nbytes_of_one(self) -> int:
        return nbytes(*(one[:1] for one in (self.data, self.scales, self.bias) if one is not None))


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
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    interleaved: bool = False
    alpha: float = 1.702
    limit: float = 7.0
    gate_up_kind: int = -1
    down_kind: int = -1
    weights_on_input: bool = False
    first_expert: int = 0
    total_experts: int = -1

    def given(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the inputs of an expert."""
        x = self.x[tokens]
        return (x * self.weights[tokens, places, None]).to(x.dtype) if self.weights_on_input else x

    def weighted(self, results: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the results of an expert as they are summed."""
        return results if self.weights_on_input else results * self.weights[tokens, places, None]

    @property
    def first(self) -> Weights:
        return Weights(self.gate_up, self.gate_up_scales, self.gate_up_bias, self.gate_up_kind)

    @property
    def second(self) -> Weights:
        return Weights(self.down, self.down_scales, self.down_bias, self.down_kind)

    def activate(self, both: Tensor) -> Tensor:
        """Return act(gate, up) of the results of the first product."""
        if not self.has_gate:
            return torch.nn.functional.relu(both) ** 2
        gate, up = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        if ACTIVATION_NAMES[self.activation] in ("swiglu_oai", "swiglu_clamped"):
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if ACTIVATION_NAMES[self.activation] == "swiglu_oai":
            return gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        if ACTIVATION_NAMES[self.activation] == "geglu":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        return torch.nn.functional.silu(gate) * up

    @property
    def inner(self) -> int:
        """Columns of an expert's hidden values."""
        rows = (self.gate_up if self.gate_up_scales is None else self.gate_up_scales).shape[1]
        if self.gate_up_kind >= 0 and self.gate_up.shape[-1] != BY_NUMBER[self.gate_up_kind].bytes:
            rows *= PANEL_OF_BLOCKS
        return rows // 2 if self.has_gate else rows

    @property
    def has_gate(self) -> bool:
        return ACTIVATION_NAMES[self.activation] != "relu2_no_mul"

    def chosen(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each expert that a token chose, the tokens, and its place among the choices of each."""
        for e in self.index.unique().tolist():
            if 0 <= e - self.first_expert < len(self.gate_up):
                yield e - self.first_expert, *torch.where(self.index == e)


def reference(call: ExpertsCall) -> Tensor:
    """Round where the op rounds; products, activations and the sum over experts are in float64."""
    x = call.x
    y = torch.zeros(x.shape, dtype=torch.float64)
    for e, tokens, places in call.chosen():
        h = call.activate(call.first.product(call.given(tokens, places), e)).to(x.dtype)
        y.index_add_(0, tokens, call.weighted(call.second.product(h, e), tokens, places))
    return y


def peer(call: ExpertsCall) -> Tensor:
    """A loop over the chosen experts, as transformers has it, with their weights in the dtype of x."""
    x = call.x
    y = torch.zeros_like(x)
    for e, tokens, places in call.chosen():
        h = call.second.linear(call.activate(call.first.linear(call.given(tokens, places), e)), e)
        y.index_add_(0, tokens, call.weighted(h, tokens, places).to(x.dtype))
    return y


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


def biases(dtype: torch.dtype, experts: int, inner: int, hidden: int) -> dict[str, Tensor]:
    """Return biases, a quarter of the products' size: results stay near 1, as the tolerances have it."""
    g = torch.Generator().manual_seed(experts)
    made = {"gate_up_bias": (experts, 2 * inner), "down_bias": (experts, hidden)}
    return {name: (torch.randn(shape, generator=g) / 4).to(dtype) for name, shape in made.items()}


def in_blocks(dtype: torch.dtype, kinds: tuple[str, str], *sizes: int) -> Sample:
    """Return a sample with weights in blocks of the kinds of gate_up and down; sizes: of inputs, from tokens on."""
    tokens, hidden, inner, experts, k = sizes
    x, _, _, index, weights = inputs(dtype, tokens, hidden, inner, experts, k)
    first, second = (KINDS[name] for name in kinds)
    gate_up = random_weight(first, experts * 2 * inner, hidden).unflatten(0, (experts, 2 * inner))
    down = random_weight(second, experts * hidden, inner).unflatten(0, (experts, hidden))
    named = biases(dtype, experts, inner, hidden) | {"limit": 1.0}
    named |= {"gate_up_kind": first.number, "down_kind": second.number}
    args = (x, gate_up.clone(), down.clone(), index, weights, ACTIVATIONS["swiglu_oai"])
    return Sample(
        f"{kinds[0]} and {kinds[1]}, {sizes[0]} tokens", args, named, contiguous=("gate_up", "down"), cpu_only=True
    )


def experts_in_panels(weight: Tensor, kind: int) -> Tensor:
    """Return the weights of experts in blocks, of a multiple of 16 rows each, in panels."""
    experts, n = weight.shape[:2]
    return in_panels(weight.flatten(0, 1), kind).unflatten(0, (experts, n // PANEL_OF_BLOCKS))


def in_block_panels(dtype: torch.dtype, kinds: tuple[str, str], *sizes: int, rows: tuple[str, ...] = ()) -> Sample:
    """Return the sample of in_blocks with weights in panels, but those that `rows` names."""
    sample = in_blocks(dtype, kinds, *sizes)
    x, gate_up, down, *rest = sample.args
    if "gate_up" not in rows:
        gate_up = experts_in_panels(gate_up, KINDS[kinds[0]].number)
    if "down" not in rows:
        down = experts_in_panels(down, KINDS[kinds[1]].number)
    _, hidden, inner, _, k = sizes
    shape = f"{hidden} columns, {inner} inside, {k} chosen"
    name = f"panels of {sample.name}, {shape}{''.join(f', {one} in rows' for one in rows)}"
    return Sample(name, (x, gate_up, down, *rest), sample.kwargs, contiguous=("gate_up", "down"), cpu_only=True)


def of_columns(dtype: torch.dtype, tokens: int, hidden: int, inner: int, experts: int, k: int) -> tuple[Tensor, ...]:
    """Return the arguments of inputs with weights of adjacent columns: transposed views."""
    x, gate_up, down, index, weights = inputs(dtype, tokens, hidden, inner, experts, k)
    gate_up, down = (w.transpose(1, 2).contiguous().transpose(1, 2) for w in (gate_up, down))
    return x, gate_up, down, index, weights


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

    oai = ACTIVATIONS["swiglu_oai"]
    few = inputs(dtype, 6, 64, 32, 4, 2)
    yield Sample("swiglu_oai", (*few, oai), {"limit": 0.5})
    yield Sample("swiglu_oai without limit", (*few, oai), {"limit": float("inf"), "alpha": 0.5})
    yield Sample("swiglu_clamped", (*few, ACTIVATIONS["swiglu_clamped"]), {"limit": 0.5})
    relu2 = ACTIVATIONS["relu2_no_mul"]
    for tokens, inner in ((1, 33), (9, 48)):
        x, gate_up, down, index, weights = inputs(dtype, tokens, 64, inner, 4, 2)
        both = biases(dtype, 4, inner, 64)
        both["gate_up_bias"] = both["gate_up_bias"][:, :inner].contiguous()
        yield Sample(f"without gate, {inner} inside", (x, gate_up[:, :inner], down, index, weights, relu2), both)
    yield Sample("interleaved", few, {"interleaved": True})
    for tokens, of_weights in ((1, None), (9, torch.float32)):
        name = f"weights {'in float32 ' if of_weights else ''}on the input, {tokens} tokens"
        yield Sample(name, inputs(dtype, tokens, 65, 32, 4, 2, of_weights), {"weights_on_input": True})
    for tokens in (1, 40):
        x, gate_up, down, index, weights = inputs(dtype, tokens, 64, 32, 9, 3)
        for first, end in ((0, 4), (4, 9), (9, 9)):
            given = (x, gate_up[first:end], down[first:end], index, weights)
            shared = {"first_expert": first, "total_experts": 9}
            yield Sample(f"experts {first} to {end} of 9, {tokens} tokens", given, shared)
    both = biases(dtype, 4, 32, 64)
    yield Sample("down_bias alone", few, {"down_bias": both["down_bias"]})
    # Rows that are adjacent again would be multiplied by linear, whose sums have another order.
    kept = ("gate_up", "down")
    x, gate_up, down, index, weights = of_columns(dtype, 6, 64, 32, 4, 2)
    yield Sample("columns", (x, gate_up, down, index, weights), as_laid_out=kept)
    yield Sample("gate_up of columns, down of rows", (x, gate_up, few[2], index, weights), both, as_laid_out=kept)
    for tokens, hidden, inner in ((1, 32, 16), (3, 33, 1), (40, 96, 13)):
        what = f"as in gpt-oss, {tokens} tokens, {inner} inside"
        named = biases(dtype, 4, inner, hidden) | {"interleaved": True, "limit": 1.0}
        yield Sample(f"rows {what}", (*inputs(dtype, tokens, hidden, inner, 4, 2), oai), named)
        yield Sample(f"columns {what}", (*of_columns(dtype, tokens, hidden, inner, 4, 2), oai), named, as_laid_out=kept)
    yield Sample("columns, no tokens", of_columns(dtype, 0, 32, 16, 4, 2), biases(dtype, 4, 16, 32))
    yield Sample("columns, nothing inside", of_columns(dtype, 3, 32, 0, 4, 2), biases(dtype, 4, 0, 32))
    yield Sample("columns, several threads", of_columns(dtype, 2, 512, 300, 4, 2), as_laid_out=kept)
    for tokens in (1, 5, 140):
        yield in_blocks(dtype, ("mxfp4", "mxfp4"), tokens, 96, 64, 3, 2)
    if dtype != torch.bfloat16:  # for which linear_blocks may round elements, that of MXFP4 to themselves
        yield in_blocks(dtype, ("q8_0", "iq4_nl"), 5, 96, 64, 3, 2)

    for tokens in (0, 1, 5, 33):
        yield in_block_panels(dtype, ("mxfp4", "mxfp4"), tokens, 96, 64, 3, 2)
    yield in_block_panels(dtype, ("mxfp4", "mxfp4"), 3, 64, 0, 3, 2)
    yield in_block_panels(dtype, ("mxfp4", "mxfp4"), 3, 32, 32, 3, 0)
    yield in_block_panels(dtype, ("mxfp4", "mxfp4"), 5, 64, 32, 8, 8, rows=("gate_up",))
    yield in_block_panels(dtype, ("mxfp4", "mxfp4"), 5, 64, 32, 8, 1, rows=("down",))
    if dtype != torch.bfloat16:
        yield in_block_panels(dtype, ("q6_k", "int4_64"), 5, 256, 64, 3, 2)

    def quantized_in_panels(name: str, gate_up: Panels, down: Panels, *sizes: int, activation: int = 0) -> Sample:
        args = quantized(gate_up, down, dtype, *sizes, activation=activation)
        return Sample(name, args, contiguous=("gate_up", "down"), cpu_only=True)

    for name, panels in (("group8", GROUP8), ("table4", TABLE4)):
        for tokens in (1, 3, 40):
            yield quantized_in_panels(f"{name}, {tokens} tokens", panels, panels, tokens, 96, 48, 8, 2)
        for hidden, inner in ((1, 1), (7, 31), (65, 33), (769, 130)):
            yield quantized_in_panels(
                f"{name}, {hidden} columns, {inner} inside", panels, panels, 5, hidden, inner, 4, 3
            )
        yield quantized_in_panels(f"{name}, no tokens", panels, panels, 0, 32, 16, 4, 2)
        yield quantized_in_panels(f"{name}, nothing inside", panels, panels, 3, 32, 0, 4, 2)
        yield quantized_in_panels(f"{name}, geglu", panels, panels, 6, 64, 32, 4, 2, activation=1)
    yield quantized_in_panels("gate and up in 4 bits, down in 8", TABLE4, GROUP8, 5, 96, 48, 4, 2)
    for name, panels in (("group8", GROUP8), ("table4", TABLE4)):
        args = quantized(panels, panels, dtype, 5, 96, 41, 4, 2, activation=ACTIVATIONS["swiglu_oai"])
        named = biases(dtype, 4, 41, 96) | {"interleaved": True, "limit": 1.0}
        yield Sample(f"{name}, as in gpt-oss", args, named, contiguous=("gate_up", "down"), cpu_only=True)
    args = quantized(GROUP8, GROUP8, dtype, 5, 96, 48, 4, 2)
    down = inputs(dtype, 5, 96, 48, 4, 2)[2]
    yield Sample(
        "gate and up in 8 bits, down dense", (*args[:2], down, *args[3:7]), contiguous=("gate_up",), cpu_only=True
    )


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
        op + "gate_up must have an even second dimension, gate and up, got [4, 15, 16]",
    )
    yield ErrorCase(
        "gate_up of other columns",
        (x[:, :12].contiguous(), gate_up, down, index, weights),
        op + "gate_up must have shape [4, 16, 12] to match the last dimension of x, got [4, 16, 16]",
    )
    apart = torch.empty(4, 16, 32)[..., ::2]
    yield ErrorCase(
        "gate_up's elements apart",
        (x, apart, down, index, weights),
        op + "gate_up must have stride 1 in one of its last two dimensions, got strides [512, 32, 2]",
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
    yield ErrorCase(
        "activation",
        (x, *rest, 5),
        op + "activation must be 0 (swiglu), 1 (geglu), 2 (swiglu_oai), 3 (swiglu_clamped) or 4 (relu2_no_mul), got 5",
    )
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
        "expert of no rank",
        (x, gate_up, down, torch.full_like(index, 9), weights),
        op + "index must be from 0 to 8, one of total_experts, got 9 at [0, 0]",
        {"total_experts": 9},
        of_values=True,
    )
    yield ErrorCase(
        "fewer in total",
        (x, *rest),
        op + "total_experts must be at least 4, the experts of gate_up, got 3",
        {"total_experts": 3},
    )
    yield ErrorCase(
        "negative total",
        (x, *rest),
        op + "total_experts must be at least 4, the experts of gate_up, got -2",
        {"total_experts": -2},
    )
    for total, start, most in ((9, 6, 5), (-1, 1, 0), (9, -1, 5)):
        yield ErrorCase(
            f"first of {total} is {start}",
            (x, *rest),
            op + f"first_expert must be from 0 to {most}, for gate_up has 4 of {max(total, 4)} experts, got {start}",
            {"first_expert": start, "total_experts": total},
        )
    size = "blocks of 1088 bytes (group8) or 576 (table4)"
    _, gate8, down8, *_, gate_scales, down_scales = quantized(GROUP8, GROUP8, torch.float32, 2, 16, 8, 4, 2)
    for name, of, says in (
        (
            "gate_up_scales alone",
            (gate8, down8, 0, gate_scales),
            "down must be given with down_scales or down_kind if it is uint8, got neither",
        ),
        (
            "down_scales alone",
            (gate8, down8, 0, None, down_scales),
            "gate_up must be given with gate_up_scales or gate_up_kind if it is uint8, got neither",
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
            "gate_up_scales must have an even second dimension, gate and up, got [4, 15]",
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
            "dense down with scales",
            (gate8, down, 0, gate_scales, down_scales),
            "down must have 4 dimensions, got 3 (shape [4, 16, 8])",
        ),
    ):
        first, second, *others = of
        yield ErrorCase(name, (x, first, second, index, weights, *others), op + says)
    both = biases(torch.float32, 4, 8, 16)
    yield ErrorCase(
        "bias of other experts",
        (x, *rest),
        op + "gate_up_bias must have shape [4, 16] to match the rows of gate_up, got [3, 16]",
        {"gate_up_bias": both["gate_up_bias"][:3]},
    )
    yield ErrorCase(
        "bias dtype",
        (x, *rest),
        op + "down_bias must have the dtype of x, float32, got float16",
        {"down_bias": both["down_bias"].half()},
    )
    yield ErrorCase(
        "bias apart",
        (x, *rest),
        op + "down_bias must have stride 1 in its last dimension (call .contiguous() on it), got strides [32, 2]",
        {"down_bias": torch.empty(4, 32)[:, ::2]},
    )
    yield ErrorCase("limit", (x, *rest), op + "limit must be at least 0, got -1", {"limit": -1.0})
    yield ErrorCase("limit NaN", (x, *rest), op + "limit must be at least 0, got nan", {"limit": float("nan")})
    blocks = torch.zeros(4, 16, 1, 17, dtype=torch.uint8)
    mxfp4 = {"gate_up_kind": KINDS["mxfp4"].number}
    yield ErrorCase(
        "columns in blocks",
        (x, blocks, *rest[1:]),
        op + "gate_up must have rows of a multiple of 32 elements, for they are blocks of mxfp4, got 16",
        mxfp4,
    )
    wide = torch.zeros(2, 32)
    yield ErrorCase(
        "blocks of another size",
        (wide, blocks[..., :16], *rest[1:]),
        op + "gate_up must have shape [4, 16, 1, 17] to match the last dimension of x, got [4, 16, 1, 16]",
        mxfp4,
    )
    yield ErrorCase(
        "blocks apart",
        (wide, torch.zeros(4, 16, 1, 34, dtype=torch.uint8)[..., ::2], *rest[1:]),
        op + "gate_up must have the blocks of a row adjacent (call .contiguous() on it), got strides [544, 34, 34, 2]",
        mxfp4,
    )
    yield ErrorCase(
        "blocks with scales",
        (wide, blocks, *rest[1:], 0, torch.ones(4, 16)),
        op + "gate_up_scales must be None for weights in blocks, got a tensor",
        mxfp4,
    )
    panels = torch.zeros(4, 1, 1, 16 * 17, dtype=torch.uint8)
    yield ErrorCase(
        "panels of other columns",
        (torch.zeros(2, 64), panels, *rest[1:]),
        op + "gate_up must have shape [4, 1, 2, 272] to match the last dimension of x, got [4, 1, 1, 272]",
        mxfp4,
    )
    yield ErrorCase(
        "columns in panels of blocks",
        (x, panels, *rest[1:]),
        op + "gate_up must have rows of a multiple of 32 elements, for they are blocks of mxfp4, got 16",
        mxfp4,
    )
    yield ErrorCase(
        "panels of blocks apart",
        (wide, panels.repeat(1, 2, 1, 1)[:, :1], *rest[1:]),
        op + "gate_up must be contiguous, got strides [544, 272, 272, 1]",
        mxfp4,
    )
    yield ErrorCase(
        "panels of blocks with scales",
        (wide, panels, *rest[1:], 0, torch.ones(4, 16)),
        op + "gate_up_scales must be None for weights in blocks, got a tensor",
        mxfp4,
    )
    yield ErrorCase(
        "panels that are not full",
        (torch.zeros(2, 24), torch.zeros(4, 64, 24), panels.repeat(1, 2, 1, 1), *rest[2:]),
        op + "down must have a multiple of 16 rows, for they are in panels, got 24",
        {"down_kind": KINDS["mxfp4"].number},
    )
    fp8 = KINDS["fp8"]
    yield ErrorCase(
        "a kind without panels",
        (torch.zeros(2, fp8.elements), torch.zeros(4, 1, 1, 16 * fp8.bytes, dtype=torch.uint8), *rest[1:]),
        op + "gate_up must have an even second dimension, gate and up, got [4, 1, 1, 2112]",
        {"gate_up_kind": fp8.number},
    )
    yield ErrorCase(
        "kind",
        (x, *rest),
        op
        + "down_kind must be one of "
        + ", ".join(f"{kind.number} ({kind.name})" for kind in sorted(KINDS.values(), key=lambda kind: kind.number))
        + ", or -1 for weights that are not in blocks, got 5",
        {"down_kind": 5},
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


def cost(call: ExpertsCall) -> Cost:
    one = call.first.nbytes_of_one + call.second.nbytes_of_one
    return Cost(
        bytes=2 * nbytes(call.x) + nbytes(call.index, call.weights) + len(call.index.unique()) * one,
        flops=2 * call.index.numel() * (3 if call.has_gate else 2) * call.x.shape[1] * call.inner,
    )


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    experts = 32
    for tokens in (1, 8, 256):
        # Random numbers for one expert, and its rows quantized for one panel: times do not depend on the values.
        x, *one, _, _ = inputs(dtype, tokens, 2048, 768, 1, 1)
        *_, index, weights = inputs(dtype, tokens, 1, 1, experts, 8)
        shape = f"{tokens} tokens, {experts} experts of 2048 x 768, 8 chosen"
        yield Sample(shape, (x, *(w.repeat(experts, 1, 1) for w in one), index, weights))
        columns = (w.transpose(1, 2).contiguous().repeat(experts, 1, 1).transpose(1, 2) for w in one)
        yield Sample(f"columns, {shape}", (x, *columns, index, weights))
        for name, panels in (("group8", GROUP8), ("table4", TABLE4)):
            few = [packed(panels, w[:, :PANEL]) for w in one]
            panels_of = [w.shape[1] // PANEL for w in one]
            blocks = [p.repeat(experts, n, 1, 1) for (p, _), n in zip(few, panels_of, strict=True)]
            scales = [s.repeat(experts, n) for (_, s), n in zip(few, panels_of, strict=True)]
            yield Sample(f"{name}, {shape}", (x, *blocks, index, weights, 0, *scales))
        # Models hold other dtypes in rows, and the peer decodes panels in plain torch, which takes seconds.
        for name in ("q4_k", "mxfp4") if dtype == torch.bfloat16 and tokens == 1 else ():
            number = KINDS[name].number
            kinds = {"gate_up_kind": number, "down_kind": number}
            few_rows = [random_weight(KINDS[name], PANEL_OF_BLOCKS, w.shape[2])[None] for w in one]
            times = [w.shape[1] // PANEL_OF_BLOCKS for w in one]
            rows = [w.repeat(experts, n, 1, 1) for w, n in zip(few_rows, times, strict=True)]
            yield Sample(f"{name}, {shape}", (x, *rows, index, weights), kinds)
            rows = [experts_in_panels(w, number).repeat(experts, n, 1, 1) for w, n in zip(few_rows, times, strict=True)]
            yield Sample(f"{name} in panels, {shape}", (x, *rows, index, weights), kinds)


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
