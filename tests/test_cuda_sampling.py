"""random_sample on CUDA (or its emulation) where tests/test_cuda.py does not reach.

All bits of u, rows that cannot be sampled beside rows that can, tokens against float64 for every size of block.
"""

from __future__ import annotations

import pytest
import torch

from torch_infini.testing import cuda_device
from torch_infini.testing.ops import Sample
from torch_infini.testing.ops.random_sample import compare, logits_of, settings_for, uniform

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
random_sample = torch.ops.infini.random_sample


def test_all_bits_of_u() -> None:
    """With 2^24 equal logits the token is u: the first i with i + 1 >= u * 2^24. For seed 0 and offset 0 that is the
    published first word of Philox4x32-10, 6627e8d5; others are those of the reference, which is tested against more.
    """
    assert int(uniform(0, 0) * 2**24) == 0x6627E8
    seed, offset = torch.tensor([0, -1, 0x0123456789ABCDEF]), torch.tensor([0, 2**63 - 1, 2**32])
    logits = torch.zeros(1, 2**24, dtype=torch.bfloat16, device=DEVICE).expand(3, -1)
    one, none = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    tokens = random_sample(logits, *(t.to(DEVICE) for t in (one, none, one, seed, offset)))
    expected = [int(uniform(s, o) * 2**24) - 1 for s, o in zip(seed.tolist(), offset.tolist(), strict=True)]
    assert tokens.tolist() == expected


def test_rows_that_cannot_be_sampled() -> None:
    """They say why, and leave their neighbours alone."""
    n = 700
    logits, settings = logits_of(torch.float32, 10, n), settings_for(10, 0.8, 0, 0.9)
    expected = random_sample(logits.to(DEVICE), *(s.to(DEVICE) for s in settings)).cpu()
    temperature, _, top_p, *_ = settings
    logits[1, 9], logits[2, 699], logits[3] = torch.nan, torch.inf, torch.nan
    logits[4] = -torch.inf
    temperature[5], temperature[6], top_p[7], top_p[8] = torch.nan, -0.5, torch.nan, -0.1
    for greedy in (False, True):
        if greedy:
            temperature[1:5] = 0
        tokens = random_sample(logits.to(DEVICE), *(s.to(DEVICE) for s in settings)).tolist()
        assert tokens[1:9] == [-1 - 9, -1 - 699, -1, -1 - n, -2 - n, -2 - n, -2 - n, -2 - n]
        assert [tokens[0], tokens[9]] == [expected[0], expected[9]]


@pytest.mark.parametrize("n", [33, 4096, 4097, 9000, 20000, 33000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_tokens(dtype: torch.dtype, n: int) -> None:
    """Against float64, for a flat row and one with few large logits, by top-k, top-p, both and neither."""
    for spread, temperature in ((3.0, 1.0), (0.02, 1.0), (8.0, 0.3)):
        logits, settings = logits_of(dtype, 4, n, spread=spread), settings_for(4, temperature)
        settings[1].copy_(torch.tensor([0, 0, n // 3, 50]))
        settings[2].copy_(torch.tensor([1.0, 0.9, 1.0, 0.9]))
        tokens = random_sample(logits.to(DEVICE), *(s.to(DEVICE) for s in settings))
        compare(tokens.cpu(), Sample(f"{n} columns, spread {spread}", (logits, *settings)))
