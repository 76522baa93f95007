"""Patched and compiled models on CUDA against the unpatched: the same tokens in float32, no larger error in halves.

On a GPU where there is one; else, with the emulated libraries, on CPU tensors that go through the CUDA kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.tiny_llama import ALL_CALLS, CallCounter, calls, greedy, logits, tiny, tokens
from torch_infini import patch_model
from torch_infini.patch.layers import quantized_linear
from torch_infini.testing import cuda_device
from torch_infini.testing.causal_types import VOCABULARY, build
from torch_infini.weights import quantize

pytest.importorskip("transformers")
DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
on_a_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="no GPU: torch captures nothing on the CPU")


def model_on_cuda(**changes: Any) -> Any:
    return tiny(**changes).to(DEVICE)


def ids_on_cuda(*size: int) -> Tensor:
    return tokens(*size).to(DEVICE)


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "none": {"use_cache": False},
}


@pytest.mark.parametrize("cache", CACHES)
def test_tokens(cache: str) -> None:
    model, ids = model_on_cuda(), ids_on_cuda(3)
    expected = greedy(model, ids, **CACHES[cache])
    report = patch_model(model, strict=True)
    assert not report.left
    with CallCounter() as counter:
        assert torch.equal(greedy(model, ids, **CACHES[cache]), expected)
    assert counter.counts["attention"] > 0


def test_left_padding() -> None:
    model, ids = model_on_cuda(), ids_on_cuda(3)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    ids = ids.masked_fill(mask == 0, 0)
    expected = greedy(model, ids, attention_mask=mask)
    patch_model(model, strict=True)
    assert torch.equal(greedy(model, ids, attention_mask=mask), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_error_of_halves(dtype: torch.dtype) -> None:
    """Against float64; several prompts, for each alone may be lucky."""
    ids = ids_on_cuda(8, 40)
    exact = logits(tiny(torch.float64), tokens(8, 40))
    model = model_on_cuda(dtype=dtype)

    def error() -> float:
        return float((logits(model, ids).cpu().double() - exact).norm() / exact.norm())

    before = error()
    assert calls(model, ids) == {}
    patch_model(model, strict=True)
    assert error() <= 1.1 * before
    assert calls(model, ids) == ALL_CALLS


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integer_weights(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a model with the dequantized weights; on CUDA x is not quantized."""
    monkeypatch.setattr(quantize, "MULTIPLIES_INTEGERS", ())
    model, plain, ids = model_on_cuda(), model_on_cuda(), ids_on_cuda()
    patch_model(model, weights=weights, strict=True)
    for name, module in model.named_modules():
        if isinstance(module, quantized_linear.QuantizedLinear):
            plain.get_submodule(name).weight.data = torch.Tensor(module.weight.detach())
    torch.testing.assert_close(logits(model, ids), logits(plain, ids), rtol=2e-4, atol=2e-4)
    assert torch.equal(greedy(model, ids), greedy(plain, ids))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "falcon_h1", "mamba2", "mamba"])
def test_models_with_states(kind: str) -> None:
    """The gated delta rule, short convolutions, state spaces of both kinds: prompts, and steps from their states."""
    original, model = (build(kind).to(DEVICE) for _ in range(2))
    report = patch_model(model)
    assert not report.left or report.in_parts
    ids = torch.randint(5, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with CallCounter() as counter:
        torch.testing.assert_close(logits(model, ids), logits(original, ids), rtol=2e-4, atol=2e-4)
        assert torch.equal(greedy(model, ids), greedy(original, ids))
    assert sum(counter.counts[op] for op in ("causal_conv1d", "gated_delta_rule", "ssd", "selective_scan")) > 0


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "llama4_text", "nemotron_h"])
def test_experts(kind: str) -> None:
    """Rows, interleaved columns with biases, weights on the input, and squared ReLU without gate."""
    original, model = (build(kind).to(DEVICE) for _ in range(2))
    assert not patch_model(model).left
    ids = torch.randint(5, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with CallCounter() as counter:
        torch.testing.assert_close(logits(model, ids), logits(original, ids), rtol=2e-4, atol=2e-4)
        assert torch.equal(greedy(model, ids), greedy(original, ids))
    assert counter.counts["fused_experts"] > 0


@pytest.mark.full
def test_compiled(no_graphs_left: None) -> None:
    model, ids = model_on_cuda(), ids_on_cuda()
    expected = logits(model, ids)
    compiled = torch.compile(model, backend="infini", fullgraph=True)
    torch.testing.assert_close(logits(compiled, ids, use_cache=False), expected, rtol=1e-4, atol=1e-4)


@on_a_gpu
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_captured_decode(weights: str | None) -> None:
    """A step over a static cache, captured once: its replays give the tokens of steps that run one by one."""
    from transformers import StaticCache

    model, ids = model_on_cuda(dtype=torch.bfloat16), ids_on_cuda(2)
    patch_model(model, weights=weights, strict=True)

    def decode(captured: bool, steps: int = 12) -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=40)
        first = logits(model, ids, past_key_values=cache)[:, -1:].argmax(-1)
        token, position, result = first.clone(), torch.full_like(first, ids.shape[1]), []

        def step() -> None:
            new = logits(model, token, past_key_values=cache, position_ids=position)[:, -1:].argmax(-1)
            token.copy_(new)
            position.add_(1)

        run = step
        if captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                step()  # warms up
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for layer in cache.layers:  # what warming up wrote is written again
                layer.cumulative_length.fill_(ids.shape[1])
            token.copy_(first)
            position.fill_(ids.shape[1])
            run = graph.replay
        for _ in range(steps):
            run()
            result.append(token.clone())
        return torch.cat(result, 1)

    assert torch.equal(decode(True), decode(False))
