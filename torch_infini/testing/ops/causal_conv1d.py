"""causal_conv1d: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.causal_conv1d import SPEC
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes
from ._of_arguments import of_arguments
from ._sequences import sequences


@dataclass(frozen=True)
class ConvCall:
    """The arguments of causal_conv1d."""

    out: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    state: Tensor | None = None
    offsets: Tensor | None = None
    slots: Tensor | None = None
    silu: bool = False


def convolved(call: ConvCall, out: Tensor, state: Tensor | None, dtype: torch.dtype) -> None:
    """Write the results of a call, computed in the dtype, into out and state."""
    width = call.weight.shape[1]
    bias = None if call.bias is None else call.bias.to(dtype)
    for tokens, row in sequences(call.x, 1, call.offsets, call.slots):
        x = call.x[tokens].to(dtype).mT
        if not x.numel():
            continue
        kept = state is not None and row >= 0
        past = state[row].to(dtype) if state is not None and kept else x.new_zeros(x.shape[0], width - 1)
        both = torch.cat((past, x), 1)
        y = F.conv1d(both[None], call.weight.to(dtype)[:, None], bias, groups=x.shape[0])[0, :, -x.shape[1] :].mT
        out[tokens] = (F.silu(y) if call.silu else y).to(out.dtype)
        if state is not None and kept:
            state[row] = both[:, x.shape[1] :].to(state.dtype)


def reference(call: ConvCall) -> tuple[Tensor, ...] | Tensor:
    out, state = call.out.double(), None if call.state is None else call.state.double()
    convolved(call, out, state, torch.float64)
    return out if state is None else (out, state)


def peer(call: ConvCall) -> None:
    convolved(call, call.out, call.state, call.x.dtype)


def inputs(dtype: torch.dtype, *shape: int, width: int = 4, bias: bool = True) -> tuple[Tensor, ...]:
    """Make (out, x, weight, bias)."""
    g = torch.Generator().manual_seed(shape[-1] + width)
    x, weight = torch.randn(shape, generator=g), torch.randn(shape[-1], width, generator=g) / 2
    made = (torch.zeros(shape), x, weight, *((torch.randn(shape[-1], generator=g),) if bias else ()))
    return tuple(t.to(dtype) for t in made)


def states(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(dtype)


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("a batch", inputs(dtype, 2, 9, 40, bias=False))
    yield Sample("one sequence", inputs(dtype, 11, 37), {"silu": True})
    for width in range(2, 9):
        args = (*inputs(dtype, 2, 13, 21, width=width), states(dtype, 2, 21, width - 1))
        yield Sample(f"width {width}", args, {"silu": width % 2 == 0})
    yield Sample("a step of each sequence", (*inputs(dtype, 5, 1, 130), states(dtype, 5, 130, 3)), {"silu": True})
    yield Sample("fewer tokens than the width", (*inputs(dtype, 3, 2, 8), states(dtype, 3, 8, 3)))
    yield Sample("more columns than are needed", (*inputs(dtype, 3, 2, 24), states(dtype, 3, 24, 4)))
    packed = {"offsets": torch.tensor([0, 4, 4, 5, 17]), "silu": True}
    yield Sample("packed", inputs(dtype, 17, 24), packed)
    slots = torch.tensor([5, 0, -1, 2], dtype=torch.int32)
    yield Sample("packed, with slots", (*inputs(dtype, 17, 24), states(dtype, 6, 24, 3)), {**packed, "slots": slots})
    args = inputs(dtype, 17, 24)
    yield Sample("no bias", (*args[:3], None, states(dtype, 4, 24, 3)), packed)
    yield Sample("int32 offsets", args, {"offsets": packed["offsets"].int()})  # type: ignore[attr-defined]
    out, x, weight, bias = inputs(dtype, 2, 6, 40)
    yield Sample("float32 weight", (out, x, weight.float(), bias.float()))
    yield Sample("channels beside each other", (out, x, weight.t().contiguous().t(), bias))
    yield Sample("one column", (*inputs(dtype, 2, 6, 1), states(dtype, 2, 1, 3)))
    yield Sample("no tokens", (*inputs(dtype, 2, 0, 8), states(dtype, 2, 8, 3)))
    yield Sample("no channels", (*inputs(dtype, 2, 3, 0), states(dtype, 2, 0, 3)))
    yield Sample("no sequences", inputs(dtype, 0, 8), {"offsets": torch.tensor([0])})
    yield Sample("large", (*inputs(dtype, 2, 150, 1300), states(dtype, 2, 1300, 3)), {"silu": True})


def errors() -> Iterator[ErrorCase]:
    out, x, weight, bias = inputs(torch.float32, 2, 6, 8)
    state = states(torch.float32, 2, 8, 3)
    op = "infini::causal_conv1d: "
    yield ErrorCase("rank", (out, x[0, 0], weight), op + "x must have 2 to 3 dimensions, got 1 (shape [8])")
    yield ErrorCase("float64", (out, x.double(), weight), op + "x must be float32, bfloat16 or float16, got float64")
    yield ErrorCase("width", (out, x, weight[:, :1]), op + "weight must have a width of 2 to 8, got [8, 1]")
    yield ErrorCase(
        "channels", (out, x, weight[:7]), op + "weight must have shape [8, 4] to match the channels of x, got [7, 4]"
    )
    yield ErrorCase(
        "bias dtype", (out, x, weight, bias.half()), op + "bias must have the dtype of weight, float32, got float16"
    )
    yield ErrorCase(
        "state dtype",
        (out, x, weight, bias, state.half()),
        op + "state must have the dtype of x, float32, got float16",
    )
    yield ErrorCase(
        "columns",
        (out, x, weight, bias, state[..., :2]),
        op + "state must have at least 3 columns, one less than the width, got [2, 8, 2]",
    )
    yield ErrorCase(
        "rows of the state",
        (out, x, weight, bias, state[:1]),
        op + "state must have a row for each of the 2 sequences if there are no slots, got [1, 8, 3]",
    )
    yield ErrorCase(
        "another model's state",
        (out, x, weight, bias, states(torch.float32, 2, 9, 3)),
        op + "state must have shape [2, 8, 3] to match the channels of x, got [2, 9, 3]",
    )
    yield ErrorCase(
        "offsets of a batch",
        (out, x, weight),
        op + "offsets must be None for a batch, got some for x of shape [2, 6, 8]",
        {"offsets": torch.tensor([0, 2])},
    )
    yield ErrorCase(
        "slots alone", (out, x, weight), op + "slots must be None without a state, got some", {"slots": torch.ones(2)}
    )
    for name, wrong, says in (
        ("falling offsets", [0, 4, 3, 6], "3 at position 2"),
        ("first offset", [1, 4, 5, 6], "1 at position 0"),
        ("last offset", [0, 4, 5, 5], "5 at position 3"),
    ):
        yield ErrorCase(
            name,
            (out[0], x[0], weight),
            op + f"offsets must rise from 0 to the number of tokens, 6, got {says}",
            {"offsets": torch.tensor(wrong)},
            of_values=True,
        )
    yield ErrorCase(
        "slot",
        (out, x, weight, bias, state),
        op + "slots must be less than the 2 of state, got 2 for sequence 1",
        {"slots": torch.tensor([0, 2])},
        of_values=True,
    )
    yield ErrorCase(
        "a slot twice",
        (out, x, weight, bias, state),
        op + "slots must differ from sequence to sequence, got 1 twice",
        {"slots": torch.tensor([1, 1])},
        of_values=True,
    )
    yield ErrorCase("out shape", (out[:1], x, weight), op + "out must have the shape of x, [2, 6, 8], got [1, 6, 8]")
    yield ErrorCase(
        "out overlaps x",
        (x, x, weight),
        op + "out must share no memory with x, got one whose span of memory overlaps it",
    )
    yield ErrorCase(
        "meta weight", (out, x, weight.to("meta")), op + "weight must be on the device of out, cpu, got meta"
    )


def cost(call: ConvCall) -> Cost:
    state = 0 if call.state is None else 2 * nbytes(call.state)
    return Cost(
        bytes=nbytes(call.out, call.x, call.weight, call.bias) + state,
        flops=2 * call.x.numel() * call.weight.shape[1],
    )


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    for batch, length in ((1, 1), (8, 1), (1, 512)):
        args = (*inputs(dtype, batch, length, 8192), states(dtype, batch, 8192, 3))
        yield Sample(f"{batch}x{length}x8192, width 4", args, {"silu": True})


INFO = OpInfo(
    **vars(SPEC),
    reference=of_arguments(SPEC.name, ConvCall, reference),
    samples=samples,
    errors=errors,
    cost=of_arguments(SPEC.name, ConvCall, cost),
    bench=bench,
    peer=of_arguments(SPEC.name, ConvCall, peer),
)
