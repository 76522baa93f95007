"""Quantized products of many rows on CUDA or its emulation, which cuBLAS multiplies slice by slice: around the number
of rows from which it does, cut into slices, in every layout, and captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.c_runtime import CPU, NVIDIA, ok
from support.cuda_calls import allocations, captured, check, here
from torch_infini.testing import cuda_device
from torch_infini.testing.c_ops import Descriptor
from torch_infini.testing.ops import OP_INFOS, all_c_ops
from torch_infini.testing.ops.quantized_linear import CUBLAS_ROWS_FROM, inputs_int4, inputs_int8
from torch_infini.testing.ops.scaled_mm_int8 import inputs as inputs_mm

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CUBLAS_BYTES = 2**25  # its own workspace
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
by_op = pytest.mark.parametrize(
    ("name", "make"), [("linear_int8", inputs_int8), ("linear_int4", inputs_int4)], ids=["int8", "int4"]
)


def workspace_of(call: Callable[[], Any]) -> int:
    """The bytes of the largest tensor that a call makes."""
    return max(allocations(call))


@pytest.mark.parametrize("name", ["linear_int8", "linear_int4", "x quantized", "scaled_mm_int8", "int4, x quantized"])
def test_where_cublas_begins(name: str) -> None:
    """A workspace for cuBLAS is needed from that number of rows on, and only where it multiplies."""
    if name == "scaled_mm_int8":
        first = 64
        a, b, a_scale, *rest = inputs_mm(torch.bfloat16, first, 48, 64)
        a, b, a_scale, *rest = here(a, b, a_scale, *rest)
        call = lambda rows: OP_INFOS[name].op(a[:rows], b, a_scale[:rows], *rest)  # noqa: E731
    else:
        make = inputs_int4 if "int4" in name else inputs_int8
        of = "linear_int4" if "int4" in name else "linear_int8"
        first = 64 if "x quantized" in name else CUBLAS_ROWS_FROM[of]
        x, *given = here(*make(torch.bfloat16, first, k=64, n=48))
        op = OP_INFOS[of].op
        call = lambda rows: op(x[:rows], *given, quantize_x="x quantized" in name)  # noqa: E731
    assert workspace_of(lambda: call(first - 1)) < 2**20
    most = workspace_of(lambda: call(first))
    if name == "int4, x quantized":
        assert most < 2**20
    else:
        assert CUBLAS_BYTES < most < CUBLAS_BYTES + 2**20


@pytest.mark.full(beyond=12)
@by_dtype
@pytest.mark.parametrize("rows", [33, 63, 64, 65, 128, 129, 200])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_odd_sizes(dtype: torch.dtype, rows: int, bias: bool) -> None:
    for k, n in ((1, 1), (7, 67), (333, 1), (333, 67), (640, 64)):
        check("linear_int8", *inputs_int8(dtype, rows, k=k, n=n, bias=bias))
    check("linear_int8", *inputs_int8(dtype, rows, k=130, n=37, bias=bias, scales_dtype=dtype))
    for group, k, n in ((32, 32, 1), (32, 352, 67), (64, 448, 64), (128, 384, 33)):
        for zeros in (False, True):
            check("linear_int4", *inputs_int4(dtype, rows, k=k, n=n, group=group, zeros=zeros, bias=bias))
    check("linear_int4", *inputs_int4(dtype, rows, k=192, n=37, bias=bias, scales_dtype=torch.float32))


@by_dtype
@pytest.mark.parametrize("n", [1, 2, 35, 64])
@pytest.mark.parametrize("k", [5, 64, 333, 640])
def test_sums_of_integers_have_the_bits_of_few_rows(dtype: torch.dtype, n: int, k: int) -> None:
    """Those that cuBLAS does not take (rows of weights that are not aligned, a single one) too."""
    x, weight, *rest = here(*inputs_int8(dtype, 200, k=k, n=n, bias=True))
    op, mm = OP_INFOS["linear_int8"].op, OP_INFOS["scaled_mm_int8"].op
    alone = torch.cat([op(part, weight, *rest, True) for part in x.split(25)])
    a, b, a_scale, b_scale, bias, _ = here(*inputs_mm(dtype, 200, n, k))
    parts = zip(a.split(25), a_scale.split(25), strict=True)
    mm_alone = torch.cat([mm(part, b, scale, b_scale, bias, dtype) for part, scale in parts])
    for rows in (64, 65, 128, 129, 200):
        assert torch.equal(op(x[:rows], weight, *rest, True), alone[:rows]), rows
        assert torch.equal(mm(a[:rows], b, a_scale[:rows], b_scale, bias, dtype), mm_alone[:rows]), rows


@by_dtype
def test_scaled_mm_in_any_layout(dtype: torch.dtype) -> None:
    a, b, a_scale, b_scale, bias, _ = inputs_mm(dtype, 70, 36, 128)
    wide, tall = torch.zeros(70, 160, dtype=torch.int8), torch.zeros(36, 160, dtype=torch.int8)
    expected = check("scaled_mm_int8", a, b, a_scale, b_scale, bias, dtype)
    for first in (0, 4, 3):  # aligned as cuBLAS wants it, and not
        x, weight = wide[:, first : first + 128], tall[:, first : first + 128]
        x.copy_(a), weight.copy_(b.t())
        strided = (a_scale.repeat_interleave(2)[::2], b_scale.repeat_interleave(3)[::3], bias.repeat_interleave(2)[::2])
        assert torch.equal(check("scaled_mm_int8", x, weight.t(), *strided, dtype), expected)
    assert torch.equal(check("scaled_mm_int8", a, b.contiguous(), a_scale, b_scale, bias, dtype), expected)
    out = torch.full((70, 50), 77, dtype=dtype).to(DEVICE)
    OP_INFOS["scaled_mm_int8"].out(*here(a, b, a_scale, b_scale, bias), dtype, out=out[:, 3:39])
    assert torch.equal(out[:, 3:39].cpu(), expected)
    assert (out[:, :3] == 77).all() and (out[:, 39:] == 77).all()


@by_dtype
@pytest.mark.parametrize("n", [64, 65, 129, 130, 200])
def test_slices(dtype: torch.dtype, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 64 rows of the weight, with 1, 2 and 8 left over; the workspace is that of a slice."""
    calls = [("linear_int8", inputs_int8(dtype, 70, k=128, n=n, bias=bias)) for bias in (False, True)]
    calls += [("linear_int4", inputs_int4(dtype, 70, k=128, n=n, bias=bias)) for bias in (False, True)]
    for name, args in calls:
        whole = check(name, *args)
        monkeypatch.setenv("INFINI_SLICE_BYTES", "1")
        sliced = check(name, *args)
        monkeypatch.delenv("INFINI_SLICE_BYTES")
        assert DEVICE == "cuda" or torch.equal(sliced, whole)  # cuBLAS may choose another kernel
    x, *rest = here(*inputs_int8(dtype, 70, k=128, n=n, bias=True))
    a, b, *scales = here(*inputs_mm(dtype, 70, n, 128))
    integers = lambda: (OP_INFOS["linear_int8"].op(x, *rest, True), OP_INFOS["scaled_mm_int8"].op(a, b, *scales))
    whole = integers()
    monkeypatch.setenv("INFINI_SLICE_BYTES", str(64 * 70 * 4))
    assert all(map(torch.equal, integers(), whole))


def test_slices_bound_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power of two rows that fit: of unpacked weights for few rows of x, of sums for many."""
    for rows, k, n, limit, slice in (
        (129, 512, 300, 2**18, 256),
        (200, 32, 400, 2**18, 256),
        (200, 32, 400, 2**17, 128),
    ):
        x, weight, scales, _ = here(*inputs_int8(torch.bfloat16, rows, k=k, n=n))
        call = lambda: OP_INFOS["linear_int8"].op(x, weight, scales)  # noqa: B023, E731
        whole = workspace_of(call)
        monkeypatch.setenv("INFINI_SLICE_BYTES", str(limit))
        sliced = workspace_of(call)
        monkeypatch.delenv("INFINI_SLICE_BYTES")
        saved = (n - slice) * (2 * k + 4 * rows)
        assert abs(whole - sliced - saved) <= 1024, (rows, k)


def test_a_descriptor_keeps_the_slices_of_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What INFINI_SLICE_BYTES says when it is run does not matter: the workspace was made before."""
    op = next(op for op in all_c_ops() if op.name == "I8Gemm")
    a, b, a_scale, b_scale, bias, _ = here(*inputs_mm(torch.bfloat16, 70, 512, 64))
    args = {"out": a_scale.new_empty(70, 512, dtype=torch.bfloat16), "bias": bias, "x": a, "x_scale": a_scale}
    args |= {"weights": b, "weights_scale": b_scale}
    ok("SetDevice", NVIDIA, 0)
    try:
        monkeypatch.setenv("INFINI_SLICE_BYTES", "1")
        with Descriptor(op, args) as descriptor:
            monkeypatch.delenv("INFINI_SLICE_BYTES")
            size = descriptor.workspace_size()
            room = torch.full((size + 2**20,), 77, dtype=torch.uint8, device=DEVICE)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", lambda *_, **__: room[:size])
                run = descriptor.bound(args)
            run()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
    finally:
        ok("SetDevice", CPU, 0)
    assert (room[size:] == 77).all()
    assert torch.equal(args["out"], OP_INFOS["scaled_mm_int8"].op(a, b, a_scale, b_scale, bias))


@pytest.mark.parametrize("text", ["0", "-1", "64K", "", "1e9", "99999999999999999999"])
def test_slice_bytes_must_be_a_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, *rest = here(*inputs_int8(torch.float32, 64, k=8, n=8))
    monkeypatch.setenv("INFINI_SLICE_BYTES", text)
    with pytest.raises(RuntimeError) as caught:
        OP_INFOS["linear_int8"].op(x, *rest)
    assert str(caught.value) == f"infini: INFINI_SLICE_BYTES must be a number of bytes, at least 1, got {text}"


@by_dtype
@by_op
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_layouts(name: str, make: Callable[..., Any], dtype: torch.dtype, bias: bool) -> None:
    """Rows of x and y that lie evenly, unevenly, upon one another, and at any address; weights likewise."""
    x, weight, *rest = make(dtype, 3, 40, k=128, n=66, bias=bias)
    spec = OP_INFOS[name]
    expected = check(name, x, weight, *rest)

    def same(actual: Tensor) -> bool:
        return DEVICE == "cuda" or torch.equal(actual, expected)  # cuBLAS may choose another kernel

    assert same(check(name, x.transpose(0, 1).contiguous().transpose(0, 1), weight, *rest))
    room = torch.zeros(3, 41, 140, dtype=dtype)
    for first in (8, 1):
        inner = room[:, :40, first : first + 128]
        assert same(check(name, inner.copy_(x), weight, *rest))
    assert torch.equal(check(name, x[:1, :1].expand(3, 40, 128), weight, *rest)[2, 39:], expected[0, :1])
    assert torch.equal(
        check(name, x.view(-1)[: 119 + 128].as_strided((120, 128), (1, 1)), weight, *rest)[0], expected[0, 0]
    )

    packed = weight.shape[1]
    wide = torch.zeros(66, packed + 9, dtype=weight.dtype)
    for first in (8, 4, 1):
        moved = wide[:, first : first + packed].copy_(weight)
        assert same(check(name, x, moved, *rest))
    scales = [t if t is None else torch.stack((t, t))[1] for t in rest]
    apart = [t if t is None or t.dim() < 2 else torch.cat((t, t), 1)[:, : t.shape[1]] for t in scales]
    assert same(check(name, x, weight, *apart))

    args = here(x, weight, *rest)
    for step, first in ((80, 8), (67, 1)):
        out = torch.full((3, 41, step), 77, dtype=dtype).to(DEVICE)
        for y in (out[:, :40, first : first + 66], out.view(41, 3, step).transpose(0, 1)[:, :40, first : first + 66]):
            out.fill_(77)
            spec.out(*args, out=y)
            assert same(y.cpu())
            y.fill_(77)
            assert (out == 77).all()


@by_dtype
@by_op
def test_infinity_and_nan_stay_in_their_row(name: str, make: Callable[..., Any], dtype: torch.dtype) -> None:
    x, *rest = here(*make(dtype, 70, k=128, n=30, bias=True))
    op = OP_INFOS[name].op
    for quantize_x in (False, True):
        clean = op(x, *rest, quantize_x)
        bad = x.clone()
        bad[1, 127], bad[69, 0] = torch.nan, torch.inf
        y = op(bad, *rest, quantize_x)
        assert y[1].isnan().all() and not y[69].isfinite().any()
        assert torch.equal(y[[0, *range(2, 69)]], clean[[0, *range(2, 69)]])


def test_scales_beyond_float16() -> None:
    """int8 weights are exact whatever their scales: those that float16 cannot hold with them."""
    x, weight, scales, _ = inputs_int8(torch.float16, 64, k=256, n=20)
    for size in (2.0**-12, 2.0**12):
        check("linear_int8", x / size, weight, scales * 1e3 * size)
    assert (check("linear_int8", x / 2**12, weight, scales * 2**22).abs().max()) > 500  # 1 / 16 * 2**-12 * 2**22 * 127


@by_op
@pytest.mark.parametrize("quantize_x", [False, True], ids=["", "x quantized"])
def test_replay_on_other_weights(
    name: str, make: Callable[..., Any], quantize_x: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFINI_SLICE_BYTES", "1")
    op = OP_INFOS[name].op
    given = here(*make(torch.bfloat16, 2, 35, k=128, n=130, bias=True))
    others = [t.clone() if t.dtype.is_floating_point else t.flip(0).contiguous() for t in given]
    others[0], others[2] = others[0].flip(-1), others[2] * 1.5
    uneven = given[0].transpose(0, 1)  # x is copied
    result, replay = captured(lambda: op(uneven, *given[1:], quantize_x))
    for there, new in zip(given, others, strict=True):
        there.copy_(new)
    result.fill_(77)
    replay()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(result, op(others[0].transpose(0, 1), *others[1:], quantize_x))
