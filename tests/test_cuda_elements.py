"""elementwise ops, rearrange, embedding and conv on CUDA or its emulation, where tests/test_cuda.py does not reach.

In-place forms, any two layouts, ids out of range, results that must not depend on the batch, more than 2^31 elements.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from support.rounding import ulps
from torch_infini.testing import cuda_device
from torch_infini.testing.ops import OpInfo, all_op_infos
from torch_infini.testing.ops.silu import activations

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")

ops = torch.ops.infini
ELEMENTWISE = ["add", "sub", "mul", "clip", "relu", "gelu", "sigmoid", "silu", "softplus", "tanh", "zeros", "ones"]


def arguments(name: str, x: Tensor) -> tuple[Tensor | float, ...]:
    return {"clip": (-1.0, 1.5)}.get(name, (x.flip(0),) if name in ("add", "sub", "mul") else ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_in_place(name: str, dtype: torch.dtype) -> None:
    for wide in (activations(dtype, 9, 136).to(DEVICE), activations(dtype, 9, 137).to(DEVICE)):
        for x in (wide, wide[:, 3:], wide[:, ::2], wide.t()):
            expected = getattr(ops, name)(x, *arguments(name, x))
            y = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=DEVICE).copy_(x)
            assert getattr(ops, f"{name}_")(y, *arguments(name, x)) is None
            assert torch.equal(y, expected)


def test_softplus_is_right_to_the_last_place() -> None:
    x = torch.cat(
        [torch.linspace(-105, 21, 100_003), torch.logspace(-30, 30, 2001).float(), torch.linspace(-1, 1, 9999)]
    )
    exact = torch.where(x > 20, x.double(), x.double().exp().log1p())
    worst = ulps(ops.softplus(x.to(DEVICE)).cpu(), exact)
    at = worst.argmax()
    assert worst[at] < 1.2, f"{worst[at].item():.2f} ulp at {x[at].item():.9g}"


def in_order(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """77 everywhere, its dimensions in memory in that order; a slice of something larger."""
    wide = torch.full([shape[dim] + 3 for dim in order], 77, dtype=dtype, device=DEVICE)
    back = [order.index(dim) for dim in range(3)]
    return wide[tuple(slice(1, -2) for _ in shape)].permute(back)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64], ids=lambda d: str(d)[6:])
def test_rearrange_between_any_two_layouts(dtype: torch.dtype) -> None:
    shape = (6, 70, 33)
    for source, target in itertools.product(itertools.permutations(range(3)), repeat=2):
        x, out = (in_order(shape, order, dtype) for order in (source, target))
        x.copy_(torch.randint(-128, 128, shape))
        margin = out._base.clone()
        assert ops.rearrange.out(x, out=out) is out
        assert torch.equal(out, x), (source, target)
        out.copy_(torch.full(shape, 77))
        assert torch.equal(out._base, margin), "written beside out"


@pytest.mark.parametrize("side", [15, 16, 31, 32, 33, 63, 64, 65, 97])
def test_rearrange_transposes_every_size_of_tile(side: int) -> None:
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64):
        x = torch.randint(0, 128, (2, side, 64, 130 - side), dtype=torch.uint8).to(dtype).to(DEVICE)
        for order in ((0, 3, 2, 1), (2, 0, 3, 1), (0, 1, 3, 2)):
            assert torch.equal(ops.rearrange(x.permute(order)), x.permute(order).contiguous()), (dtype, order)
        runs = x.view(2, side, -1, 2).transpose(1, 2)  # elements twice as large, up to 16 bytes
        assert torch.equal(ops.rearrange(runs), runs.contiguous()), dtype


@pytest.mark.skipif(DEVICE != "cpu", reason="torch allocates no such memory on a GPU")
def test_rearrange_from_addresses_that_are_not_aligned() -> None:
    values = torch.randn(6, 20)
    memory = bytearray(values.numel() * 4 + 3)
    x = torch.frombuffer(memory, dtype=torch.float32, offset=3, count=values.numel()).view(6, 20).copy_(values)
    assert x.data_ptr() % 4 != 0
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[:, ::3]):
        assert torch.equal(ops.rearrange(view(x)), view(values).contiguous())


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
def test_embedding_of_ids_out_of_range(dtype: torch.dtype, ids_dtype: torch.dtype) -> None:
    largest = torch.iinfo(ids_dtype).max
    ids = torch.tensor([[3, -1, 0], [11, 10, largest], [-largest - 1, 1, 12]], dtype=ids_dtype)
    good = (ids >= 0) & (ids < 11)
    for n in (1, 8, 77, 5125):
        weight = torch.randn(11, n).to(dtype)
        actual = ops.embedding(ids.to(DEVICE), weight.to(DEVICE)).cpu()
        assert torch.equal(actual[good], weight[ids[good].long()])
        assert actual[~good].isnan().all()
    nothing = ops.embedding(ids.to(DEVICE), torch.empty(0, 40, dtype=dtype, device=DEVICE))
    assert nothing.shape == (3, 3, 40) and nothing.isnan().all()


def test_conv_does_not_depend_on_the_batch() -> None:
    x, weight, bias = torch.randn(5, 3, 9, 11), torch.randn(70, 3, 3, 2), torch.randn(70)
    x, weight, bias = x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE)
    parameters = [2, 1], [1, 2], [1, 3]
    whole = ops.conv(x, weight, bias, *parameters)
    for i in range(5):
        assert torch.equal(ops.conv(x[i], weight, bias, *parameters), whole[i])
    last = x.to(memory_format=torch.channels_last)
    out = torch.empty_like(whole).permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert torch.equal(ops.conv.out(last, weight.flip(0).flip(0), bias, *parameters, out=out), whole)


def in_six_dimensions(x: Tensor, weight: Tensor) -> Tensor:
    """The convolution by its definition, stride 1 and no padding."""
    spatial = [slice(None, size - kernel + 1) for size, kernel in zip(x.shape[2:], weight.shape[2:], strict=True)]
    y = torch.zeros(x.shape[0], weight.shape[0], *(s.stop for s in spatial), dtype=torch.float64)
    for at in itertools.product(*map(range, weight.shape[2:])):
        seen = x[(..., *(slice(i, i + s.stop) for i, s in zip(at, spatial, strict=True)))]
        y += torch.einsum("nc...,oc->no...", seen.double(), weight[(..., *at)].double())
    return y


def test_conv_in_six_dimensions() -> None:
    x, weight = torch.randn(2, 2, 3, 4, 3, 2, 3, 4), torch.randn(3, 2, 2, 1, 2, 2, 1, 3)
    actual = ops.conv(x.to(DEVICE), weight.to(DEVICE), None, [1], [0], [1]).cpu()
    torch.testing.assert_close(actual.double(), in_six_dimensions(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE != "cuda", reason="minutes in the emulation")
def test_more_elements_than_32_bits_count() -> None:
    rows, columns = 65537, 65538
    x = torch.zeros(rows, columns, dtype=torch.uint8, device=DEVICE)
    ops.ones_(x)
    assert bool(x.all())
    x[-1] = torch.arange(columns, device=DEVICE) % 251
    x[:, -1] = torch.arange(rows, device=DEVICE) % 241
    for view in (x, x.t(), x[:, 1:]):
        assert torch.equal(ops.rearrange(view), view)
    del x, view
    x = torch.ones(rows, 32800, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -8:] = 2
    y = ops.swiglu(x[:, :32768], x[:, 32:])
    assert bool((y[:-1] == y[0, 0]).all())
    assert torch.equal(y[-1], ops.swiglu(x[-1, :32768], x[-1, 32:]))


def specs() -> list[OpInfo]:
    return [spec for spec in all_op_infos() if spec.name in (*ELEMENTWISE, "swiglu", "geglu")]


@pytest.mark.parametrize("spec", specs(), ids=lambda s: s.name)
def test_zero_strides_and_strange_layouts(spec: OpInfo) -> None:
    """Broadcast in every combination of dimensions gives the bits of the copy."""
    for shape in ((3, 16, 40), (3, 5, 7)):
        for kept in itertools.product((True, False), repeat=3):
            small = activations(torch.bfloat16, *(n if k else 1 for n, k in zip(shape, kept, strict=True))).to(DEVICE)
            x = small.expand(shape)
            others = (x.flip(0),) if len(spec.arguments) > 1 and spec.name != "clip" else ()
            expected = spec.op(x.contiguous(), *(t.contiguous() for t in others))
            assert torch.equal(spec.op(x, *others), expected)
            assert torch.equal(
                spec.op(x.permute(2, 0, 1), *(t.permute(2, 0, 1) for t in others)).permute(1, 2, 0), expected
            )
