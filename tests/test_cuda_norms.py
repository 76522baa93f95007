"""Norms and softmaxes on CUDA (or its emulation) where tests/test_cuda.py does not reach.

Lines side by side against lines in rows, bit by bit; lines beyond registers; many lines in one block.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from test_add_rms_norm import assert_in_place, assert_mode
from torch_infini.ops.rms_norm import ROUNDINGS
from torch_infini.testing import check_against_reference, cuda_device
from torch_infini.testing.ops import OP_INFOS, Sample

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
infini = torch.ops.infini

ALONG_ANY: dict[str, Callable[[Tensor, int], Tensor]] = {
    "softmax": infini.softmax,
    "log_softmax": infini.log_softmax,
    "lp_norm 1": lambda x, dim: infini.lp_norm(x, 1, dim, 1e-6),
    "lp_norm 2": lambda x, dim: infini.lp_norm(x, 2, dim, 1e-6),
    "lp_norm 3": lambda x, dim: infini.lp_norm(x, 3, dim, 1e-6),
}


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    flat = lambda t: t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)  # noqa: E731
    return torch.equal(flat(a), flat(b))


# Of 8 halves a vector: one warp of a row, some warps, and more vectors than fit registers.
@pytest.mark.parametrize("n", [1, 37, 300, 2500, 17000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALONG_ANY)
def test_bits_do_not_depend_on_the_axis(name: str, dtype: torch.dtype, n: int) -> None:
    """The lines of [2, n, 5] along dimension 1 lie side by side; those of its transpose are rows."""
    op = ALONG_ANY[name]
    x = values(2, n, 5, dtype=dtype)
    rows = op(x.transpose(1, 2).contiguous().to(DEVICE), -1).cpu()
    assert same_bits(op(x.to(DEVICE), 1).cpu().transpose(1, 2), rows)
    assert same_bits(op(x.to(DEVICE).transpose(1, 2), -1).cpu(), rows)
    every_other = values(2, 5, n, dtype=dtype).repeat_interleave(2, -1).to(DEVICE)[..., ::2]
    assert same_bits(op(every_other, -1).cpu(), op(every_other.contiguous(), -1).cpu())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_of_adjacent_rows(dtype: torch.dtype) -> None:
    for n in (1, 37, 300, 2500, 17000):
        x, weight, bias = values(n, 3, dtype=dtype).to(DEVICE).t(), values(n, dtype=dtype), values(n, dtype=dtype)
        expected = infini.layer_norm(x.contiguous(), weight.to(DEVICE), bias.to(DEVICE), 1e-5).cpu()
        assert same_bits(infini.layer_norm(x, weight.to(DEVICE), bias.to(DEVICE), 1e-5).cpu(), expected)


@pytest.mark.parametrize("n", [4096, 16384, 16385, 20001])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "lp_norm"])
def test_long_rows(name: str, n: int) -> None:
    sample = Sample(f"{n} columns", (values(2, n, dtype=torch.bfloat16),))
    actual = getattr(infini, name)(sample.args[0].to(DEVICE))
    check_against_reference(OP_INFOS[name], sample, torch.bfloat16, actual.cpu(), on_cuda=True)


def test_lines_of_one_block_need_other_units() -> None:
    """lp_norm scales by the largest element where squares overflow or vanish: here in some lines of a block."""
    x = values(4, 24)
    x[1] *= 1e30
    x[3] *= 1e-30
    for dim, y in ((-1, x), (0, x.t().contiguous())):
        got = infini.lp_norm(y.to(DEVICE), 2, dim, 0.0).cpu()
        torch.testing.assert_close(got.double(), torch.nn.functional.normalize(y.double(), dim=dim, eps=0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_causal_softmax_reads_nothing_hidden(dtype: torch.dtype) -> None:
    """What a row does not see changes no bit, wherever in a vector it begins to hide."""
    x = values(2, 21, 40, dtype=dtype)
    hidden = torch.ones(21, 40).triu(40 - 21 + 1).bool()
    expected = infini.causal_softmax(x.to(DEVICE)).cpu()
    assert (expected[:, hidden] == 0).all()
    for y in (x.masked_fill(hidden, torch.nan), x.masked_fill(hidden, torch.inf)):
        assert same_bits(infini.causal_softmax(y.to(DEVICE)).cpu(), expected)
        columns = y.transpose(1, 2).contiguous().to(DEVICE).transpose(1, 2)
        assert same_bits(infini.causal_softmax(columns).cpu(), expected)


@pytest.mark.parametrize("k", [1, 5, 60])
def test_topksoftmax_of_long_rows(k: int) -> None:
    x = values(3, 17001, dtype=torch.bfloat16)
    for normalize in (False, True):
        weights, indices = infini.topksoftmax(x.to(DEVICE), k, normalize)
        order = x.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(indices.cpu().long(), order)
        expected = x.double().softmax(-1).gather(-1, order)
        if normalize:
            expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(weights.cpu().double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_roundings_of_add_rms_norm(rounding: str, dtype: torch.dtype) -> None:
    assert DEVICE is not None
    assert_mode(rounding, DEVICE, dtype)
    assert_in_place(rounding, DEVICE, dtype)
