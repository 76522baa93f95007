"""The elementwise ops beyond what tests/test_ops.py asks of every op.

Broadcasting, torch's rules for clip, aliases; softplus to the last place.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from support.rounding import ulps
from torch_infini.ops.rms_norm import ROUNDINGS
from torch_infini.testing import cpu_capability_set_to, kernel_levels
from torch_infini.testing.ops import OP_INFOS
from torch_infini.testing.ops.rms_norm import norm_inputs

ops = torch.ops.infini
BINARY = ["add", "sub", "mul"]


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((), (3,)),
        ((1,), (5, 7)),
        ((5, 1), (1, 7)),
        ((7,), (2, 3, 1)),
        ((1, 3, 1, 5), (2, 1, 4, 1)),
        ((1, 4), (0, 4)),
        ((1, 1), (0,)),
        ((1,) * 8, (2,)),
    ],
)
def test_broadcasting(name: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    for shapes in ((left, right), (right, left)):
        x, other = (torch.randn(shape) for shape in shapes)
        expected = getattr(torch, name)(x, other)
        out = torch.full_like(expected, 77)
        assert getattr(ops, name).out(x, other, out=out) is out
        for actual in (getattr(ops, name)(x, other), out):
            assert actual.shape == expected.shape and actual.is_contiguous()
            assert torch.equal(actual, expected)
        assert getattr(ops, name)(x.to("meta"), other.to("meta")).shape == expected.shape


@pytest.mark.parametrize("name", BINARY)
def test_in_place(name: str) -> None:
    x = torch.randn(4, 6)
    in_place = getattr(ops, f"{name}_")
    for other in (x, x.clone(), torch.randn(6), torch.randn(4, 1), torch.tensor(3.0)):
        y = x.clone()
        expected = getattr(torch, name)(y, y if other is x else other)
        assert in_place(y, y if other is x else other) is None
        assert torch.equal(y, expected)
    rule = f"infini::{name}: x must "
    cases = {
        "have the shape of x and other broadcast together, [3, 4, 6], got [4, 6]": (x, torch.randn(3, 4, 6)),
        "be other itself or share no memory with it, got one whose span of memory overlaps it": (x, x[1]),
        "not be a broadcast view, for it is written to, got strides [0, 1]": (torch.randn(6).expand(4, 6), x),
    }
    for text, args in cases.items():
        before = args[0].clone()
        with pytest.raises(RuntimeError) as caught:
            in_place(*args)
        assert str(caught.value) == rule + text
        assert torch.equal(args[0], before)


@pytest.mark.parametrize("name", BINARY)
def test_out_is_other(name: str) -> None:
    x, other = torch.randn(3, 5), torch.randn(3, 5)
    expected = getattr(torch, name)(x, other)
    getattr(ops, name).out(x, other, out=other)
    assert torch.equal(other, expected)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=lambda d: str(d)[6:]
)
def test_clip_is_torchs(dtype: torch.dtype) -> None:
    """Bit by bit, bounds that are NaN, crossed, infinite or no number of the dtype included."""
    x = torch.tensor([0.1, -0.1, 1.0, -3.3, 100.0, 0.0, torch.inf, -torch.inf, torch.nan]).to(dtype).repeat(9)
    numbers = [None, 0.1, -0.1, 1, -2.5, 1.001, torch.inf, -torch.inf, torch.nan]
    for low, high in itertools.product(numbers, numbers):
        actual = ops.clip(x, low, high)
        expected = x if low is None and high is None else torch.clip(x, low, high)
        assert torch.equal(actual.nan_to_num(7.25), expected.nan_to_num(7.25)), (low, high)
        assert torch.equal(actual.isnan(), expected.isnan()), (low, high)
        y = x.clone()
        ops.clip_(y, low, high)
        assert torch.equal(y.view(torch.uint8), actual.view(torch.uint8)), (low, high)


@pytest.mark.parametrize(("name", "value"), [("ones", 1), ("zeros", 0)])
def test_fills_take_the_dtype_of_out(name: str, value: int) -> None:
    x = torch.full((4, 5), 7.0)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool):
        out = torch.full((4, 5), 5).to(dtype)
        getattr(ops, name).out(x, out=out)
        assert torch.equal(out, torch.full((4, 5), value).to(dtype)) and torch.all(x == 7)
    getattr(ops, name).out(x, out=x.view(5, 4).t())  # over x's own memory, which is not read
    assert torch.all(x == value)


@pytest.mark.parametrize("name", sorted(name for name, spec in OP_INFOS.items() if spec.decomposition))
def test_decompositions_give_contiguous_results_of_their_own(name: str) -> None:
    """As the ops do, whatever the strides of x; else a graph in which one stands would change its views."""
    spec = OP_INFOS[name]
    for dtype, sample in ((d, s) for d in spec.dtypes for s in spec.samples(d)):
        first, *rest = sample.args
        if first.dim() < 2:
            continue
        moved = first.transpose(0, 1).contiguous().transpose(0, 1)
        actual = spec.decomposition(moved, *rest, **sample.kwargs)
        for t in actual if isinstance(actual, tuple) else (actual,):
            assert t.is_contiguous(), f"{dtype} {sample.name}"
            assert t.untyped_storage()._cdata != moved.untyped_storage()._cdata, f"{dtype} {sample.name}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_decompositions_of_norms_round_where_the_ops_do(rounding: str, dtype: torch.dtype) -> None:
    """Of another order of rounding many elements would differ; of another order of additions few do."""
    x, weight = norm_inputs(dtype, 40, 2048)
    args = (weight, 1e-6, ROUNDINGS[rounding])
    norm, add_norm = OP_INFOS["rms_norm"], OP_INFOS["add_rms_norm"]
    assert norm.decomposition and add_norm.decomposition
    for actual, expected in (
        (norm.decomposition(x, *args), norm.op(x, *args)),
        *zip(add_norm.decomposition(x, x.flip(0), *args), add_norm.op(x, x.flip(0), *args)),
    ):
        assert (actual != expected).double().mean() < 0.002


def softplus_inputs() -> torch.Tensor:
    """A dense range, and where the formula changes: near 0 and the threshold, the smallest and the largest numbers."""
    ends = torch.tensor([20.0, -20.0, 0.0, -87.33654, -103.2789, -103.9721])
    near = (ends.view(torch.int32)[:, None] + torch.arange(-300, 300)).to(torch.int32).view(torch.float32).flatten()
    small = torch.logspace(-30, 30, 20_001).to(torch.float32)
    denormal = torch.arange(1, 2000, dtype=torch.int32).view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38])
    dense = torch.linspace(-105, 21, 200_003)
    return torch.cat([dense, near, small, -small, denormal, -denormal, special])


@pytest.mark.parametrize("capability", kernel_levels())
def test_softplus_is_right_to_the_last_place(capability: str) -> None:
    x = softplus_inputs()
    with cpu_capability_set_to(capability):
        actual = ops.softplus(x)
    exact = torch.where(x > 20, x.double(), x.double().exp().log1p())
    assert torch.equal(actual.isnan(), exact.isnan())
    assert torch.equal(actual.isinf(), exact.isinf())
    worst = ulps(actual, exact).nan_to_num(0)
    at = worst.argmax()
    assert worst[at] < 1.2, f"{worst[at].item():.2f} ulp at {x[at].item():.9g}: {actual[at].item():.9g}"


HALVES = [torch.bfloat16, torch.float16]


def every_half(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 numbers of a half type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


# The ops that give an element for an element, in float64.
EXACT = {
    "gelu": lambda x: x / 2 * torch.special.erfc(-x / 2**0.5),
    "ones": torch.ones_like,
    "rearrange": torch.clone,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "softplus": torch.nn.functional.softplus,
    "tanh": torch.tanh,
    "zeros": torch.zeros_like,
}


def test_exact_formulas_of_all_ops_of_one_tensor() -> None:
    names = {name for name, spec in OP_INFOS.items() if len(spec.op._schema.arguments) == 1}
    assert names - {"causal_softmax", "quantize_int8"} == set(EXACT)  # these are of whole rows


@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("name", sorted(EXACT))
def test_every_half_is_rounded_once(name: str, capability: str, dtype: torch.dtype) -> None:
    """Denormal inputs and results too: y is what some number within the error of float rounds to.

    That is the nearest to the exact result, but where this is so near the middle of two that float cannot tell. The
    errors are formulas.h's: exponentials for half types lose 2e-7 with each 1 of the exponent, gelu's tail 1.6e-5.
    Where e^-x leaves float's range, sigmoid and silu give 0.
    """
    x = every_half(dtype)
    x64 = x.double()
    exact = EXACT[name](x64)
    error = (
        4e-7 + 2e-7 * x64.abs().clamp(max=110)
        if name not in ("relu", "rearrange", "ones", "zeros")
        else torch.zeros_like(x64)
    )
    if name == "gelu":
        error = 2e-5 + 1e-7 * x64.square().clamp(max=225)  # the exponential of -x^2 / 2
    margin = (error * exact.abs()).nan_to_num(0, 0)
    low, high = (exact - margin).to(dtype), (exact + margin).to(dtype)
    with cpu_capability_set_to(capability):
        y = getattr(ops, name)(x)
    right = ((low <= y) & (y <= high)) | (y.isnan() & exact.isnan())
    if name in ("sigmoid", "silu"):
        right |= (y == 0) & (x64 < -88.7)
    assert right.all(), [(a.item(), b.item(), c.item()) for a, b, c in zip(x[~right], y[~right], exact[~right])][:5]
    assert ((low != high) & ~exact.isnan()).double().mean() < 0.05, "the margin must seldom matter"


@pytest.mark.parametrize("capability", kernel_levels())
def test_tanh_keeps_the_sign_of_zero(capability: str) -> None:
    zeros = torch.tensor([0.0, -0.0] * 20)
    for dtype in (*HALVES, torch.float32, torch.float64):
        with cpu_capability_set_to(capability):
            assert torch.equal(torch.signbit(ops.tanh(zeros.to(dtype))), torch.signbit(zeros))


@pytest.mark.parametrize("capability", kernel_levels())
def test_denormal_bfloat16(capability: str) -> None:
    """Results below 2^-126 are rounded as all others are."""
    x = every_half(torch.bfloat16)
    x = x[(x.abs() < 1e-36) & (x != 0)]
    other = x.flip(0)[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    for name, y in (
        ("add", other),
        ("sub", other),
        ("mul", torch.full_like(x, 0.3)),
        ("mul", torch.full_like(x, 100.0)),
    ):
        with cpu_capability_set_to(capability):
            actual = getattr(ops, name)(x, y)
        expected = getattr(torch, name)(x.float(), y.float()).to(torch.bfloat16)
        assert torch.equal(actual, expected), name
    one = torch.ones(len(x), dtype=torch.bfloat16)
    with cpu_capability_set_to(capability):
        assert torch.equal(ops.swiglu(torch.full_like(x, 40), x), (x.float() * 40).to(torch.bfloat16))
        assert torch.equal(ops.clip(x, -1.0, 1.0), x)
        assert torch.equal(ops.layer_norm(one[None, :], x, x, 1e-5)[0], x)  # the weight times 0, and the bias
