"""rope: reference, samples, error cases, cost and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from ...ops.rope import SPEC
from ..c_door import Arguments, backwards, c_op, unwritten
from ..c_ops import CErrorCase, CSample, Described
from ..op_info import Cost, ErrorCase, OpInfo, Sample, nbytes


def reference(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False
) -> Tensor:
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    c, s = cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    )
    y = x.double().clone()
    x0, x1 = y[..., first].clone(), y[..., second].clone()
    y[..., first] = x0 * c - x1 * s
    y[..., second] = x1 * c + x0 * s
    return y


def peer(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False) -> Tensor:
    """Rotate as Hugging Face's Llama and GPT-J do: cos and sin for every column, and a rotated copy of x."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    rotated, passed = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if interleaved:
        c, s = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        turned = torch.stack((-rotated[..., 1::2], rotated[..., ::2]), -1).flatten(-2)
    else:
        c, s = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        first, second = rotated.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    y = (rotated * c.unsqueeze(-2) + turned * s.unsqueeze(-2)).to(x.dtype)
    return torch.cat((y, passed), -1) if passed.shape[-1] else y


def angles(rows: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Make (cos, sin) [rows, half] as in Llama, base 10000."""
    frequencies = 10000.0 ** -(torch.arange(half) / max(half, 1))
    angle = torch.arange(rows).unsqueeze(-1) * frequencies
    return angle.cos().to(dtype), angle.sin().to(dtype)


def inputs(dtype: torch.dtype, *shape: int, half: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Make (x, cos, sin) with a row of cos and sin for each token."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return (x.to(dtype), *angles(shape[-3], shape[-1] // 2 if half is None else half, dtype))


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    yield Sample("llama", inputs(dtype, 5, 4, 64))
    yield Sample("batch", inputs(dtype, 2, 5, 3, 32))
    yield Sample("gpt-j", (*inputs(dtype, 5, 4, 64), None, True))
    x, cos, sin = inputs(dtype, 2, 3, 4, 16)
    tables = angles(40, 8, dtype)
    yield Sample("positions for each entry", (x, *tables, torch.tensor([[39, 0, 7], [1, 1, 38]])))
    yield Sample("positions for all", (x, *tables, torch.tensor([39, 0, 7])))
    yield Sample("positions [1, S], int32", (x, *tables, torch.tensor([[39, 0, 7]], dtype=torch.int32)))
    yield Sample("positions without batch", (x[0], *tables, torch.tensor([[39, 0, 7]]), True))
    yield Sample("cos for each entry", (x, torch.stack((cos, sin)), torch.stack((sin, cos))))
    yield Sample("cos [1, S]", (x, cos[None], sin[None]))
    yield Sample("cos expanded", (x, cos.expand(2, 3, 8), sin.expand(2, 3, 8)))
    yield Sample("one cos for all tokens", (x, cos[1:2].expand(3, 8), sin[1:2].expand(3, 8)))
    yield Sample("half of a full-width cos", (x, torch.cat((cos, cos), -1)[:, :8], torch.cat((sin, sin), -1)[:, :8]))
    yield Sample("a transposed view", (x.transpose(1, 2).contiguous().transpose(1, 2), cos, sin))
    yield Sample("a slice of a fused product", (inputs(dtype, 3, 12, 16)[0][:, 4:8], cos, sin))
    yield Sample("a broadcast x", (x[:, :, :1].expand(2, 3, 4, 16), cos, sin))
    wide = torch.promote_types(dtype, torch.float32)
    for interleaved in (False, True):
        layout = "gpt-j" if interleaved else "llama"
        for half in (1, 7, 33, 769):
            yield Sample(f"{layout}, {half} pairs", (*inputs(dtype, 3, 2, 2 * half), None, interleaved))
            partial = inputs(dtype, 3, 2, 2 * half + 5, half=half)
            yield Sample(f"{layout}, {half} pairs, 5 columns pass", (*partial, None, interleaved))
        x, cos, sin = inputs(dtype, 4, 3, 100)
        yield Sample(f"{layout}, float32 cos", (x, *angles(4, 50, wide), None, interleaved))
        yield Sample(f"{layout}, no pairs", (x, cos[:, :0], sin[:, :0], None, interleaved))
        yield Sample(f"{layout}, large", (*inputs(dtype, 2, 65, 32, 128), None, interleaved))
    yield Sample("one column", inputs(dtype, 3, 2, 1))
    yield Sample("no columns", inputs(dtype, 3, 2, 0))
    yield Sample("no tokens", inputs(dtype, 0, 2, 8))
    yield Sample("no heads", inputs(dtype, 3, 0, 8))
    yield Sample("no batch", (torch.empty(0, 3, 2, 8, dtype=dtype), *angles(3, 4, dtype)))
    yield Sample("no tokens, no rows", (*inputs(dtype, 0, 2, 8), torch.empty(0, dtype=torch.int64)))


def errors() -> Iterator[ErrorCase]:
    x, cos, sin = inputs(torch.float32, 2, 3, 4, 16)
    op = "infini::rope: "
    where = torch.tensor([[0, 1, 2], [2, 3, -1]])
    yield ErrorCase(
        "two dimensions", (x[0, 0], cos, sin, where), op + "x must have 3 to 4 dimensions, got 2 (shape [4, 16])"
    )
    yield ErrorCase("integers", (x.int(), cos, sin), op + "x must be float32, bfloat16, float16 or float64, got int32")
    yield ErrorCase("float64 with float32", (x.double(), cos, sin), op + "cos must be float64 as x is, got float32")
    yield ErrorCase(
        "strided columns",
        (x[..., ::2], cos[:, :4], sin[:, :4]),
        op + "x must have stride 1 in its last dimension (call .contiguous() on it), got strides [192, 64, 16, 2]",
    )
    wide = torch.ones(3, 9)
    yield ErrorCase(
        "cos too wide",
        (x, wide, wide),
        op + "cos must have at most 8 columns, half the last dimension of x, got 9 (shape [3, 9])",
    )
    yield ErrorCase(
        "cos dtype", (x.half(), cos.bfloat16(), sin), op + "cos must be float16 as x is, or float32, got bfloat16"
    )
    yield ErrorCase("cos rank", (x, cos[0], sin[0]), op + "cos must have 2 to 3 dimensions, got 1 (shape [8])")
    yield ErrorCase(
        "cos tokens",
        (x, cos[:2], sin[:2]),
        op + "cos must have shape [3, R/2] or [2 or 1, 3, R/2] to match x, got [2, 8]",
    )
    yield ErrorCase(
        "cos batch",
        (x, cos.expand(3, 3, 8), sin.expand(3, 3, 8)),
        op + "cos must have shape [3, R/2] or [2 or 1, 3, R/2] to match x, got [3, 3, 8]",
    )
    yield ErrorCase(
        "cos strides",
        (x[..., :8], cos[:, ::2], sin[:, ::2]),
        op + "cos must have stride 1 in its last dimension (call .contiguous() on it), got strides [8, 2]",
    )
    yield ErrorCase("sin shape", (x, cos, sin[:, :7]), op + "sin must have the shape of cos, [3, 8], got [3, 7]")
    yield ErrorCase("sin dtype", (x, cos, sin.half()), op + "sin must have the dtype of cos, float32, got float16")
    yield ErrorCase(
        "sin strides",
        (x[..., :8], cos[:, :4], sin[:, ::2]),
        op + "sin must have stride 1 in its last dimension (call .contiguous() on it), got strides [8, 2]",
    )
    yield ErrorCase("meta cos", (x, cos.to("meta"), sin), op + "cos must be on the device of x, cpu, got meta")
    for dtype in (torch.int64, torch.int8, torch.uint8):
        yield ErrorCase(
            f"{str(dtype)[6:]} position too large",
            (x, cos, sin, torch.tensor([[0, 1, 2], [2, 100, 7]]).to(dtype)),
            op + "positions must be at least 0 and less than 3, the rows of cos, got 100 at [1, 1]",
            of_values=True,
        )
    for dtype in (torch.int32, torch.int8):
        yield ErrorCase(
            f"{str(dtype)[6:]} position negative",
            (x, cos, sin, where[1].flip(0).to(dtype)),
            op + "positions must be at least 0 and less than 3, the rows of cos, got -1 at [0]",
            of_values=True,
        )
    yield ErrorCase(
        "positions dtype",
        (x, cos, sin, where.double()),
        op + "positions must be int64, int32, int16, int8, uint64, uint32, uint16 or uint8, got float64",
    )
    yield ErrorCase(
        "positions rank", (x, cos, sin, where[0, 0]), op + "positions must have 1 to 2 dimensions, got 0 (shape [])"
    )
    yield ErrorCase(
        "positions shape",
        (x, cos, sin, where[:, :2]),
        op + "positions must have shape [3] or [2 or 1, 3] to match x, got [2, 2]",
    )
    yield ErrorCase(
        "positions without batch",
        (x[0], cos, sin, where),
        op + "positions must have shape [3] or [1, 3] to match x, got [2, 3]",
    )
    yield ErrorCase(
        "table of each entry",
        (x, cos[None], sin[None], where),
        op + "cos must have 2 dimensions, got 3 (shape [1, 3, 8])",
    )
    yield ErrorCase(
        "out shape",
        (x, cos, sin),
        op + "out must have the shape of x, [2, 3, 4, 16], got [2, 3, 4, 15]",
        {"out": torch.empty(2, 3, 4, 15)},
    )
    yield ErrorCase(
        "out dtype",
        (x, cos, sin),
        op + "out must have the dtype of x, float32, got float16",
        {"out": torch.empty(2, 3, 4, 16, dtype=torch.float16)},
    )
    yield ErrorCase(
        "out strides",
        (x, cos, sin),
        op + "out must have stride 1 in its last dimension (call .contiguous() on it), got strides [384, 128, 32, 2]",
        {"out": torch.empty(2, 3, 4, 32)[..., ::2]},
    )
    yield ErrorCase(
        "broadcast out",
        (x, cos, sin),
        op + "out must not be a broadcast view, for it is written to, got strides [0, 64, 16, 1]",
        {"out": torch.empty(3, 4, 16).expand(2, 3, 4, 16)},
    )
    memory = torch.zeros(1000)
    overlap = "itself or share no memory with it, got one whose span of memory overlaps it"
    out = {"out": memory[:384].view(2, 3, 4, 16)}
    yield ErrorCase("out overlaps x", (memory[1:385].view(2, 3, 4, 16), cos, sin), op + f"out must be x {overlap}", out)
    yield ErrorCase("out overlaps cos", (x, memory[:24].view(3, 8), sin), op + f"out must be cos {overlap}", out)
    yield ErrorCase("out overlaps sin", (x, cos, memory[:24].view(3, 8)), op + f"out must be sin {overlap}", out)
    yield ErrorCase(
        "out overlaps positions",
        (x, cos, sin, memory.view(torch.int32)[:3]),
        op + f"out must be positions {overlap}",
        out,
    )


def cost(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False) -> Cost:
    tokens = x.numel() // max(x.shape[-1] * x.shape[-2], 1)
    angles = 2 * min(cos.numel(), tokens * cos.shape[-1]) * cos.element_size()
    return Cost(bytes=2 * nbytes(x) + angles + nbytes(positions), flops=6 * tokens * x.shape[-2] * cos.shape[-1])


def bench(dtype: torch.dtype) -> Iterator[Sample]:
    tables = angles(8192, 64, dtype)
    for tokens in (512, 8192, 1):
        x = inputs(dtype, tokens, 32, 128)
        yield Sample(f"{tokens}x32x128", x)
        yield Sample(f"{tokens}x32x128, gpt-j", (*x, None, True))
        yield Sample(f"{tokens}x32x128, positions", (x[0], *tables, torch.arange(tokens).flip(0)))


INFO = OpInfo(
    **vars(SPEC),
    reference=reference,
    samples=samples,
    errors=errors,
    cost=cost,
    bench=bench,
    peer=peer,
)


GPT_J, GPT_NEOX = 0, 1  # values of the C operator's argument algo
POSITIONS = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))


def to_c(args: Arguments) -> Arguments | None:
    """Pass a row of cos per token as a table with positions in order; all columns of a head are rotated."""
    x, cos, positions = args["x"], args["cos"], args["positions"]
    if 2 * cos.shape[-1] < x.shape[-1] or (positions is None and cos.shape[:-1] != x.shape[-3:-2]):
        return None
    return {
        "x": x,
        "pos_ids": torch.arange(cos.shape[0]) if positions is None else positions,
        "sin_table": args["sin"],
        "cos_table": cos,
        "algo": GPT_J if args["interleaved"] else GPT_NEOX,
    }


def to_torch(args: Arguments) -> Arguments:
    tables = {"cos": args["cos_table"], "sin": args["sin_table"]}
    return {"x": args["x"], **tables, "positions": args["pos_ids"], "interleaved": args["algo"] == GPT_J}


def c_args(dtype: torch.dtype, algo: int = GPT_NEOX) -> Arguments:
    """Make arguments for 3 sequences of 5 tokens, anywhere in a table of 50 rows."""
    x, cos, sin = inputs(dtype, 3, 5, 4, 40)
    cos, sin = angles(50, 20, dtype)
    where = torch.randint(50, (3, 5), generator=torch.Generator().manual_seed(0))
    return {
        "y": unwritten(x.shape, dtype),
        "x": x,
        "pos_ids": where,
        "sin_table": sin,
        "cos_table": cos,
        "algo": algo,
    }


def c_samples() -> Iterator[Sample | CSample]:
    """Yield strides that torch lacks or that differ from tensor to tensor, and positions of each dtype."""
    for dtype, algo in product((*INFO.dtypes, torch.float64), (GPT_J, GPT_NEOX)):
        kind = f"{str(dtype)[6:]} {('GPT-J', 'GPT-NeoX')[algo]}"
        yield Sample(f"{kind} large", (*inputs(dtype, 2, 50, 8, 128), None, algo == GPT_J))
        args = c_args(dtype, algo)
        args["y"] = torch.cat((args["y"], args["y"]), -1)[..., 40:]
        args["x"] = args["x"].transpose(1, 2).contiguous().transpose(1, 2)
        args["pos_ids"] = args["pos_ids"].T.contiguous().T
        args["sin_table"] = torch.cat((args["sin_table"], args["sin_table"]), -1)[:, 20:]
        args["cos_table"] = torch.cat((args["cos_table"], args["cos_table"]), -1)[:, :20]
        yield CSample(f"{kind} strides of each", args)
        args = c_args(dtype, algo)
        args["x"] = args["x"][:, :, :1].expand(3, 5, 4, 40)
        args["y"] = backwards(args["y"])
        args["pos_ids"] = Described(args["pos_ids"], (3, 5), (-5, -1), 14)
        yield CSample(f"{kind} broadcast and negative strides", args)
    for positions in POSITIONS:
        args = c_args(torch.float32)
        yield CSample(f"{str(positions)[6:]} positions", {**args, "pos_ids": args["pos_ids"].to(positions)})


def c_errors() -> Iterator[CErrorCase]:
    args, op = c_args(torch.float32), "infini::rope: "
    rule = "infiniopCreateRoPEDescriptor: algo must be 0 (GPT_J) or 1 (GPT_NEOX), got "
    for algo in (2, -1):
        yield CErrorCase(f"algo {algo}", {**args, "algo": algo}, "BAD_PARAM", f"{rule}{algo}")
    odd = {**args, "x": torch.ones(3, 5, 4, 41), "y": torch.ones(3, 5, 4, 41)}
    rule = "x must have an even number of columns, got 41 (shape [3, 5, 4, 41])"
    yield CErrorCase("odd columns", odd, "BAD_TENSOR_SHAPE", op + rule)
    partial = {**args, "cos_table": args["cos_table"][:, :3], "sin_table": args["sin_table"][:, :3]}
    rule = "cos must have 20 columns, half the last dimension of x, got 3 (shape [50, 3])"
    yield CErrorCase("partial", partial, "BAD_TENSOR_SHAPE", op + rule)


C_OPS = [
    c_op(
        INFO,
        "RoPE",
        ["y"],
        samples=c_samples,
        errors=c_errors,
        to_c=to_c,
        to_torch=to_torch,
        dtypes=(*INFO.dtypes, torch.float64),
        largest=100_000,
        reversible=("y", "x", "pos_ids", "sin_table", "cos_table"),
    )
]
