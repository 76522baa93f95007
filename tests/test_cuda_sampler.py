"""Sampler on CUDA (or its emulation): settings that travel in one copy, and rows that the kernel cannot sample."""

from __future__ import annotations

import pytest
import torch

from torch_infini.engine.sampler import Row, Sampled, Sampler
from torch_infini.engine.sampling_params import SamplingParams
from torch_infini.testing import cuda_device

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")

VARIED = [
    SamplingParams.greedy(logprobs=3),
    SamplingParams(top_p=0.9, top_k=30),
    SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingParams(min_p=0.1, logit_bias={3: 2.0}, logprobs=2),
    SamplingParams(min_tokens=9, stop_token_ids=[1]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_stand_alone(dtype: torch.dtype) -> None:
    rows = [Row(VARIED[i % 5], i, [2, 3], list(range(i))) for i in range(10)]
    logits = torch.randn(10, 700).mul(3).to(DEVICE, dtype)
    sampler = Sampler()
    for _ in range(3):  # the same settings' tensors, written again
        together = sampler(logits.clone(), rows)
        assert all(result.error is None and 0 <= result.token < 700 for result in together)
        for i, row in enumerate(rows):
            (alone,) = sampler(logits[i : i + 1].clone(), [row])
            assert alone.token == together[i].token
    greedy = torch.log_softmax(logits[0].float(), -1)
    assert together[0].token == int(greedy.argmax())
    assert together[0].logprob == pytest.approx(greedy.max().item(), abs=1e-5)


@pytest.mark.parametrize("params", VARIED, ids=repr)
def test_bad_rows_by_themselves(params: SamplingParams) -> None:
    rows = [Row(params, seed, [2, 3], []) for seed in range(5)]
    logits = torch.randn(5, 300, device=DEVICE)
    expected = Sampler()(logits.clone(), rows)
    logits[1, 7], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    results = Sampler()(logits, rows)
    says = "torch_infini.Sampler: logits must "
    assert results == [
        expected[0],
        Sampled(-1, error=says + "have neither NaN nor +infinity, got nan for token 7"),
        Sampled(-1, error=says + "have neither NaN nor +infinity, got inf for token 9"),
        Sampled(-1, error=says + "leave a token to draw, got -infinity for all"),
        expected[4],
    ]
