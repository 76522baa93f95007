"""Weights of int8 and int4: ranges, errors and packing; what linear_int8 and linear_int4 make of it, to the bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import torch_infini
from torch_infini._core import library
from torch_infini.testing import cpu_capability_set_to, kernel_levels, threads_set_to
from torch_infini.testing.ops.quantized_linear import inputs_int4, inputs_int8
from torch_infini.weights import quantize

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MODULE = "torch_infini.weights."


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_is_half_a_step_off_at_most(dtype: torch.dtype) -> None:
    weight = torch.randn(37, 100).to(dtype)
    weight[3] = 0
    q, scales = quantize.quantize_int8(weight)
    assert (q.dtype, q.shape, scales.dtype, scales.shape) == (torch.int8, (37, 100), torch.float32, (37,))
    assert (q.abs().amax(1) == torch.where(torch.arange(37) == 3, 0, 127)).all() and scales[3] == 0
    back = quantize.dequantize_int8(q, scales, torch.float64)
    assert ((back - weight.double()).abs() <= scales[:, None].double() * 0.5001).all()


@pytest.mark.parametrize("group", quantize.GROUP_SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_int4_is_half_a_step_off_at_most(dtype: torch.dtype, group: int) -> None:
    weight = (torch.randn(37, 384) + 0.3).to(dtype)
    weight[5, :group] = 0.7109375  # one value alone: scale 0
    packed, scales, zeros = quantize.quantize_int4(weight, group)
    assert (packed.dtype, packed.shape) == (torch.uint8, (37, 192))
    assert scales.dtype == zeros.dtype == dtype and scales.shape == zeros.shape == (37, 384 // group)
    values = quantize.unpack_int4(packed).view(37, -1, group)
    assert (values.amax(-1) >= torch.where(scales > 0, 14, 0)).all() and (values.amin(-1) <= 8).all()
    back = quantize.dequantize_int4(packed, scales, zeros, torch.float64).view(37, -1, group)
    # Half a step, and what scale and zero lose by rounding where the range ends.
    unit = {torch.float32: 2**-24, torch.bfloat16: 2**-9, torch.float16: 2**-12}[dtype]
    ends = unit * (zeros.double().abs() + 8 * scales.double())
    off = (back - weight.double().view(37, -1, group)).abs().amax(-1)
    assert (off <= scales.double() * 0.5001 + ends).all()
    assert torch.equal(back[5, 0], weight[5, :group].double())


def test_pack_int4_order() -> None:
    values = torch.arange(16).repeat(3, 2)
    packed = quantize.pack_int4(values)
    assert packed[0, :2].tolist() == [0x10, 0x32]
    assert torch.equal(quantize.unpack_int4(packed), values.to(torch.uint8))


def test_integer_zero_points() -> None:
    """zero = (8 - z) * scale, as the docstring says."""
    values, points, scales = torch.randint(0, 16, (5, 64)), torch.randint(0, 16, (5, 2)), torch.rand(5, 2)
    want = ((values.view(5, 2, 32) - points[..., None]) * scales[..., None]).view(5, 64)
    got = quantize.dequantize_int4(quantize.pack_int4(values), scales, (8 - points) * scales)
    torch.testing.assert_close(got, want)


W = torch.ones(2, 64)
ERRORS: list[tuple[Any, tuple[Any, ...], str]] = [
    (quantize.quantize_int8, (W.double(),), "weight must be float32, bfloat16 or float16, got float64"),
    (quantize.quantize_int8, (W[0],), "weight must have 2 dimensions, got 1 (shape [64])"),
    (quantize.quantize_int8, (W / 0,), "weight must be finite, got infinity or NaN in it"),
    (quantize.quantize_int4, (W.long(),), "weight must be float32, bfloat16 or float16, got int64"),
    (quantize.quantize_int4, (W, 16), "group_size must be 32, 64 or 128, got 16"),
    (quantize.quantize_int4, (W, 128), "weight must have rows that are a multiple of group_size, 128, got 64"),
    (quantize.pack_int4, (W[:, :3].int(),), "values must have 2 dimensions, the second even, got shape [2, 3]"),
    (quantize.pack_int4, (W,), "values must be integers from 0 to 15, got float32"),
    (quantize.pack_int4, (W.int() * 16,), "values must be integers from 0 to 15, got 16 to 16"),
    (quantize.pack_int4, (-W.int(),), "values must be integers from 0 to 15, got -1 to -1"),
]


@pytest.mark.parametrize(("function", "args", "message"), ERRORS)
def test_errors(function: Any, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        function(*args)
    assert str(caught.value) == f"{MODULE}{function.__name__}: {message}"


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    weight = torch.ones(shape)
    q, scales = quantize.quantize_int8(weight)
    assert quantize.dequantize_int8(q, scales).shape == shape
    assert quantize.dequantize_int4(*quantize.quantize_int4(weight)).shape == shape


def test_rows_of_a_larger_memory() -> None:
    """`out` is written where it lies and returned; what is around it stays."""
    weight = torch.randn(3, 128)
    q, scales = torch.full((5, 130), 99, dtype=torch.int8), torch.full((5,), 99.0)
    outs = q[1:4, 1:129], scales[1:4]
    assert all(a is b for a, b in zip(quantize.quantize_int8(weight, out=outs), outs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(outs, quantize.quantize_int8(weight), strict=True))
    assert (q[0] == 99).all() and (q[4] == 99).all() and (q[:, 0] == 99).all() and (q[:, 129] == 99).all()
    packed, scales, zeros = torch.full((5, 66), 99, dtype=torch.uint8), torch.zeros(5, 4), torch.zeros(5, 4)
    outs4 = packed[1:4, 1:65], scales[1:4, 1:3], zeros[1:4, 1:3]
    assert all(a is b for a, b in zip(quantize.quantize_int4(weight, out=outs4), outs4, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(outs4, quantize.quantize_int4(weight), strict=True))
    assert (packed[0] == 99).all() and (packed[:, 65] == 99).all() and (zeros[:, 3] == 0).all()


def test_weights_of_any_strides() -> None:
    """Columns apart, a row repeated, and a parameter: the bits of a contiguous copy, and no gradient."""
    weight = torch.nn.Parameter(torch.randn(64, 64))
    for view in (weight, weight.t(), weight[:, ::2], weight[:1].expand(5, 64)):
        for function in (quantize.quantize_int8, lambda w: quantize.quantize_int4(w, 32)):
            got, want = function(view), function(view.detach().clone(memory_format=torch.contiguous_format))
            assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_layer(dtype: torch.dtype) -> None:
    """From a float weight to a product that is as near as its integers allow."""
    weight, x = (torch.randn(96, 256) / 16).to(dtype), torch.randn(3, 256).to(dtype)
    exact = x.double() @ weight.double().t()
    q, scales = quantize.quantize_int8(weight)
    y8 = torch_infini.ops.linear_int8(x, q, scales)
    y4 = torch_infini.ops.linear_int4(x, *quantize.quantize_int4(weight))
    assert (y8.double() - exact).abs().max() < 0.06 and (y4.double() - exact).abs().max() < 0.6


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_of_a_row_depend_on_no_other(dtype: torch.dtype, capability: str) -> None:
    """Alone, and among 1 to 45 others; for a part of the weight's rows, whatever stream they are in."""
    with cpu_capability_set_to(capability):
        for k, n in ((333, 61), (20000, 11)):
            x, q, scales, _ = inputs_int8(dtype, 45, k=k, n=n)
            all_rows = torch_infini.ops.linear_int8(x, q, scales)
            for count in (1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 20, 32, 33):
                assert torch.equal(bits(torch_infini.ops.linear_int8(x[:count], q, scales)), bits(all_rows[:count]))
            assert torch.equal(torch_infini.ops.linear_int8(x[:1], q[5:], scales[5:]), all_rows[:1, 5:])
        for group in (32, 128):
            for k, n in ((896, 61), (20480, 11)):
                x, *rest, _ = inputs_int4(dtype, 45, k=k, n=n, group=group)
                all_rows = torch_infini.ops.linear_int4(x, *rest)
                for count in (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 20, 32, 33):
                    assert torch.equal(bits(torch_infini.ops.linear_int4(x[:count], *rest)), bits(all_rows[:count]))
                part = torch_infini.ops.linear_int4(x[:1], *(t[5:] for t in rest))
                assert torch.equal(part, all_rows[:1, 5:])


@pytest.mark.parametrize("capability", kernel_levels())
def test_every_integer_counts_exactly(capability: str) -> None:
    """A row of x that picks one element gives the weight itself: all of int8, and each nibble in each place."""
    with cpu_capability_set_to(capability):
        for dtype in FLOATS:
            x = torch.eye(256).to(dtype)
            q = torch.stack([torch.arange(-128, 128).roll(i) for i in (0, 1, 77)]).to(torch.int8)
            assert torch.equal(torch_infini.ops.linear_int8(x, q, torch.ones(3)), q.t().to(dtype))
            values = torch.stack([(torch.arange(256) + i) % 16 for i in range(16)])
            packed, scales = quantize.pack_int4(values), torch.ones(16, 4)
            assert torch.equal(torch_infini.ops.linear_int4(x, packed, scales), (values - 8).t().to(dtype))


def test_infinity_and_nan_stay_in_their_row() -> None:
    for dtype in FLOATS:
        x, q, scales, _ = inputs_int8(dtype, 3, k=45, n=20)
        q[q == 0] = 1
        x[1, 44], x[2, 3] = torch.inf, torch.nan
        y = torch_infini.ops.linear_int8(x, q, scales)
        assert y[0].isfinite().all() and y[1].isinf().all() and y[2].isnan().all()
        x, *rest, _ = inputs_int4(dtype, 3, k=96, n=20, group=32)
        x[1, 90], x[2, 3] = torch.nan, torch.nan
        y = torch_infini.ops.linear_int4(x, *rest)
        assert y[0].isfinite().all() and y[1].isnan().all() and y[2].isnan().all()


# ---- quantize_x ----


@pytest.mark.parametrize("capability", kernel_levels("linear_int8"))
@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_with_quantized_x_depend_on_no_other_row(dtype: torch.dtype, capability: str) -> None:
    """Alone and among others, for a part of the weight's rows, and whatever the thread count."""
    int8, int4 = torch_infini.ops.linear_int8, torch_infini.ops.linear_int4
    with cpu_capability_set_to(capability):
        calls = [(int8, inputs_int8(dtype, 50, k=1333, n=261))]
        calls += [(int4, inputs_int4(dtype, 50, k=896, n=261, group=group)) for group in (32, 128)]
        for op, (x, *rest, _) in calls:
            all_rows = op(x, *rest, quantize_x=True)
            for count in (1, 2, 4, 7, 8, 12, 13, 16, 24, 25, 33):
                assert torch.equal(bits(op(x[:count], *rest, quantize_x=True)), bits(all_rows[:count])), count
            for count in (1, 5, 30):
                part = op(x[:count], *(t[7:] for t in rest), quantize_x=True)
                assert torch.equal(bits(part), bits(all_rows[:count, 7:].contiguous())), count
            for threads in (1, 2, 3):
                with threads_set_to(threads):
                    for count in (1, 8, 50):
                        assert torch.equal(bits(op(x[:count], *rest, quantize_x=True)), bits(all_rows[:count]))


@pytest.mark.parametrize("capability", kernel_levels("linear_int8"))
def test_every_integer_counts_exactly_with_quantized_x(capability: str) -> None:
    """Rows that are integers of which the largest is 127: nothing is lost, and int8 products are those of integers."""
    with cpu_capability_set_to(capability):
        x = torch.randint(-127, 128, (20, 256))
        x[:, 5] = 127
        q = torch.stack([torch.arange(-128, 128).roll(i) for i in (0, 1, 77)]).to(torch.int8)
        values = torch.stack([(torch.arange(256) + i) % 16 for i in range(16)])
        packed, scales = quantize.pack_int4(values), torch.ones(16, 4)
        for rows in (1, 2, 20):
            y = torch_infini.ops.linear_int8(x[:rows].float(), q, torch.ones(3), quantize_x=True)
            assert torch.equal(y, (x[:rows] @ q.long().t()).float())
            y = torch_infini.ops.linear_int4(x[:rows].float(), packed, scales, scales, quantize_x=True)
            assert torch.equal(y, (x[:rows] @ (values - 7).t()).float())


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_x_is_quantized_as_a_weight_is(rows: int) -> None:
    """Ties, and scales that are denormal or nearly too large for the dtype."""
    for dtype, sizes in ((torch.float32, (1e-44, 1e-39, 1, 3e38)), (torch.float16, (6e-8, 1, 6e4))):
        for size in sizes:
            x = (torch.arange(-127, 128) / 254 * size).expand(rows, 255).to(dtype)
            eye = torch.zeros(255, 255, dtype=torch.int8)
            eye.fill_diagonal_(1)
            q, scales = quantize.quantize_int8(x)
            want = q * scales[:, None]
            got = torch_infini.ops.linear_int8(x, eye, torch.ones(255), quantize_x=True)
            assert torch.equal(got, want.to(dtype)), (dtype, size)


@pytest.mark.parametrize("capability", kernel_levels("linear_int8"))
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_gives_nan(value: float, capability: str) -> None:
    with cpu_capability_set_to(capability):
        for dtype in FLOATS:
            for rows in (1, 3, 20):
                x, *rest = inputs_int8(dtype, rows, k=45, n=20, bias=True)
                x[-1, 44] = value
                y = torch_infini.ops.linear_int8(x, *rest, quantize_x=True)
                assert y[:-1].isfinite().all() and y[-1].isnan().all()
                x, *rest = inputs_int4(dtype, rows, k=96, n=20, group=32, bias=True)
                x[-1, 3] = value
                y = torch_infini.ops.linear_int4(x, *rest, quantize_x=True)
                assert y[:-1].isfinite().all() and y[-1].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_layer_with_quantized_x(dtype: torch.dtype) -> None:
    weight, x = (torch.randn(96, 256) / 16).to(dtype), torch.randn(20, 256).to(dtype)
    exact = x.double() @ weight.double().t()
    y8 = torch_infini.ops.linear_int8(x, *quantize.quantize_int8(weight), quantize_x=True)
    y4 = torch_infini.ops.linear_int4(x, *quantize.quantize_int4(weight), quantize_x=True)
    assert (y8.double() - exact).abs().max() < 0.1 and (y4.double() - exact).abs().max() < 0.6


@pytest.mark.parametrize("capability", ["baseline", "avx512", "avx2_vnni", "avx512_amx", "neon_dotprod"])
def test_when_layers_quantize_x(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU multiplies integers; few rows with int8 weights only for layers that promise bits by row."""
    monkeypatch.setattr(library, "capability", capability)
    multiplies = capability in ("avx2_vnni", "avx512_amx", "neon_dotprod")
    for shape, rows in (((0, 8), 0), ((8,), 1), ((3, 8), 3), ((1, 3, 8), 3), ((2, 2, 8), 4), ((500, 8), 500)):
        x = torch.zeros(shape)
        assert quantize.quantizes_x(x, 8) == (multiplies and rows >= 4), shape
        assert quantize.quantizes_x(x, 4) == quantize.quantizes_x(x, 4, same_bits=True) == multiplies
        assert quantize.quantizes_x(x, 8, same_bits=True) == multiplies
        assert not quantize.quantizes_x(x.to("meta"), 8, same_bits=True)


@pytest.mark.parametrize("bits", [0, 2, 16, 8.5, "8", None])
def test_other_bits_are_refused(bits: object) -> None:
    """Also where the CPU would not quantize x anyway."""
    rule = re.escape(f"torch_infini.weights.quantizes_x: bits must be 4 or 8, got {bits!r}")
    for device in ("cpu", "meta"):
        with pytest.raises(ValueError, match=f"{rule}$"):
            quantize.quantizes_x(torch.zeros(5, 8, device=device), bits)


def test_layers_of_the_engine_promise_bits_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_infini.nn.Linear quantizes a single row as it quantizes many; the patched layer does not, with int8."""
    from torch_infini.nn import Linear

    calls = []
    for bits in (8, 4):
        monkeypatch.setattr(
            f"torch_infini.weights.int{bits}.quantizes_x",
            lambda *args, **kwargs: calls.append((args[1], kwargs)) or False,
        )
    for bits in (8, 4):
        layer = Linear(64, 3, format=f"int{bits}")
        layer.load(torch.randn(3, 64))
        layer(torch.randn(1, 64))
    assert calls == [(8, {"same_bits": True}), (4, {"same_bits": True})]
