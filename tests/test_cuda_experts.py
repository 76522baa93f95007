"""fused_experts on CUDA (or its emulation) where tests/test_cuda.py does not reach.

Tiles of many rows that end within an expert, unaligned rows, more tokens than at a time, indices that are no expert,
and what only the CPU has.
"""

from __future__ import annotations

import pytest
import torch

from torch_infini.testing import call, check_against_reference, cuda_device, moved, on_cpu
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops.fused_experts import inputs, of_columns

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
SPEC = OP_INFOS["fused_experts"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check(sample: Sample, dtype: torch.dtype) -> None:
    check_against_reference(SPEC, sample, dtype, on_cpu(call(SPEC, moved(sample, DEVICE))), on_cuda=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", [inputs, of_columns])
@pytest.mark.parametrize(("hidden", "inner"), [(130, 33), (72, 64)])
def test_many_rows(make: object, hidden: int, inner: int, dtype: torch.dtype) -> None:
    assert callable(make)
    check(Sample(f"{hidden}, {inner}", make(dtype, 170, hidden, inner, 3, 2)), dtype)


def test_all_tokens_to_one_expert() -> None:
    x, gate_up, down, index, weights = inputs(torch.bfloat16, 150, 64, 32, 40, 4)
    check(Sample("", (x, gate_up, down, torch.full_like(index, 39), weights)), torch.bfloat16)


def test_more_tokens_than_at_a_time() -> None:
    check(Sample("", inputs(torch.float32, 4100, 8, 4, 3, 1)), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Of the tile: 64 rows for 160 tokens, 8 for one."""
    x, gate_up, down, index, weights = moved(Sample("", inputs(dtype, 160, 96, 48, 2, 2)), DEVICE).args
    whole = torch.ops.infini.fused_experts(x, gate_up, down, index, weights)
    for t in (0, 77, 159):
        row = slice(t, t + 1)
        alone = torch.ops.infini.fused_experts(x[row], gate_up, down, index[row], weights[row])
        assert torch.equal(alone, whole[row])


@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
def test_no_expert(wrong: int) -> None:
    """NaN for the token; the others have their bits."""
    x, gate_up, down, index, weights = inputs(torch.float32, 5, 32, 16, 4, 2)
    bad = index.clone()
    bad[3, 1] = wrong
    expected, got = (
        call(SPEC, moved(Sample("", (x, gate_up, down, one, weights)), DEVICE)).cpu() for one in (index, bad)
    )
    others = [0, 1, 2, 4]
    assert bool(got[3].isnan().all()) and torch.equal(got[others], expected[others])


def test_what_only_the_cpu_has() -> None:
    quantized = next(sample for sample in SPEC.samples(torch.float32) if sample.cpu_only)
    with pytest.raises(RuntimeError, match="gate_up must be in the dtype of x on CUDA, got quantized weights"):
        call(SPEC, moved(quantized, DEVICE))
    x, gate_up, down, index, weights = inputs(torch.float32, 1, 2, 1, 4097, 1)
    with pytest.raises(RuntimeError, match="gate_up must have at most 4096 experts on CUDA, got 4097"):
        call(SPEC, moved(Sample("", (x, gate_up, down, index, weights)), DEVICE))
