"""rope, paged_caching and qkv_rope_cache on CUDA (or its emulation) where tests/test_cuda.py does not reach.

Indices out of range, tokens that share a slot, enough tokens for two heads a thread and several tokens a block.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_infini.testing import call, check_against_reference, cuda_device, relayout
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops.qkv_rope_cache import inputs as qkv_inputs
from torch_infini.testing.ops.rope import angles

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
HALVES = (torch.bfloat16, torch.float16)
infini = torch.ops.infini


def moved(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(DEVICE) for t in tensors)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_positions_of_every_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(4, 2, 24)
    cos, sin = angles(100, 9, torch.float32)
    positions = torch.tensor([99, 0, 7, 42])
    expected = OP_INFOS["rope"].reference(x, cos, sin, positions)
    got = infini.rope(*moved(x, cos, sin, positions.to(dtype)))
    torch.testing.assert_close(got.cpu().double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64], ids=str)
def test_position_out_of_range_gives_nan(dtype: torch.dtype, interleaved: bool) -> None:
    """In the columns that are turned; the others pass, and other tokens have their bits."""
    x = torch.randn(6, 3, 40).to(dtype)
    cos, sin = angles(50, 16, dtype)
    good = torch.tensor([0, 49, 3, 4, 5, 6])
    bad = torch.tensor([0, 49, -1, 50, 2**62, -(2**63)])
    expected = infini.rope(*moved(x, cos, sin, good), interleaved).cpu()
    got = infini.rope(*moved(x, cos, sin, bad), interleaved).cpu()
    assert torch.equal(got[:2], expected[:2])
    assert got[2:, :, :32].isnan().all()
    assert torch.equal(got[2:, :, 32:], x[2:, :, 32:])
    in_place = x.to(DEVICE, copy=True)
    infini.rope_(in_place, *moved(cos, sin, bad), interleaved)
    torch.testing.assert_close(in_place.cpu(), got, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_fused_with_bad_indices(dtype: torch.dtype, interleaved: bool) -> None:
    """A bad position makes NaN of q and k, not of v; a bad slot is skipped, its q is written all the same."""
    args = qkv_inputs(dtype, [5, 6, 47, 7, 8, 9], 4, 2, 64)
    q, k_cache, v_cache, qkv, cos, sin, positions, _ = args
    bad_positions = positions.clone()
    bad_positions[1] = 50
    slots = torch.tensor([5, 6, 48, 2**62, -(2**63), 9])
    want = OP_INFOS["qkv_rope_cache"].reference(*args[:-1], torch.tensor([5, 6, -1, -1, -1, 9]), interleaved)
    got = moved(q, k_cache, v_cache)
    infini.qkv_rope_cache(*got, *moved(qkv, cos, sin, bad_positions, slots), interleaved)
    got = tuple(t.cpu() for t in got)
    assert got[0][1].isnan().all() and got[1][0, :, 6].isnan().all()
    want[0][1] = want[1][0, :, 6] = torch.nan
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("columns", [8, 37])
@pytest.mark.parametrize("tokens", [2, 33, 700, 3000])
def test_of_tokens_with_one_slot_the_last_stays(tokens: int, columns: int) -> None:
    g = torch.Generator().manual_seed(tokens)
    caches = torch.zeros(2, 4, 1, 16, columns)
    rows = torch.arange(1.0, tokens + 1).view(tokens, 1, 1).expand(tokens, 1, columns).contiguous()
    slots = torch.randint(-8, 64 + 8, (tokens,), generator=g)  # some skipped, some outside
    if tokens == 2:
        slots = torch.tensor([9, 9])
    last = torch.zeros(64)
    for t, slot in enumerate(slots.tolist()):
        if 0 <= slot < 64:
            last[slot] = t + 1
    k_cache, v_cache = moved(*caches)
    infini.paged_caching(k_cache, v_cache, *moved(rows, 2 * rows, slots))
    expected = last.view(4, 1, 16, 1).expand(4, 1, 16, columns)
    assert torch.equal(k_cache.cpu(), expected) and torch.equal(v_cache.cpu(), 2 * expected)


def test_keys_that_lie_in_the_cache_are_copied_first() -> None:
    memory = torch.randn(2, 3, 2, 16, 8)
    k, v = memory[0, 0].transpose(0, 1), memory[0, 1].transpose(0, 1)  # 16 tokens out of k_cache's first blocks
    slots = torch.arange(16).flip(0) + 3
    expected = OP_INFOS["paged_caching"].reference(memory[0], memory[1], k.clone(), v.clone(), slots)
    on_device = memory.to(DEVICE, copy=True)
    k, v = on_device[0, 0].transpose(0, 1), on_device[0, 1].transpose(0, 1)
    infini.paged_caching(on_device[0], on_device[1], k, v, slots.to(DEVICE))
    assert torch.equal(on_device.cpu().double(), torch.stack(expected))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("in_place", [False, True], ids=["out", "in place"])
def test_two_heads_a_thread(in_place: bool, interleaved: bool) -> None:
    """Many tokens of an odd number of heads have the bits of one at a time."""
    x = torch.randn(600, 29, 132).bfloat16()
    cos, sin = angles(600, 64, torch.float32)
    x, cos, sin = moved(x, cos, sin)
    y = x.clone()
    if in_place:
        infini.rope_(y, cos, sin, None, interleaved)
    else:
        y = infini.rope(x, cos, sin, None, interleaved)
    for t in (0, 1, 299, 599):
        one = infini.rope(x[t : t + 1], cos[t : t + 1], sin[t : t + 1], None, interleaved)
        assert torch.equal(y[t : t + 1], one)


@pytest.mark.parametrize("layout", ["strided rows", "misaligned"])
def test_fused_many_tokens(layout: str) -> None:
    """Threads with a head of q and one of k; several tokens a block; as the reference."""
    spec = OP_INFOS["qkv_rope_cache"]
    slots = torch.randperm(4096, generator=torch.Generator().manual_seed(0))[:3400].tolist()
    slots[100] = slots[3000] = slots[7]
    args = qkv_inputs(torch.bfloat16, slots, 3, 1, 128, 16, 256)
    sample = Sample("many tokens", args)
    on_device = Sample("many tokens", moved(*(relayout(layout, a) for a in args)))
    got = tuple(t.cpu() for t in call(spec, on_device))
    check_against_reference(spec, sample, torch.bfloat16, got, on_cuda=True)
