"""fused_experts beyond the registry's tests, and the experts of patched models: forms, routing, hooks, compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_infini
from torch_infini import LLM, SamplingParams
from torch_infini.ops import fused_experts, linear
from torch_infini.testing.causal_types import build
from torch_infini.testing.ops.fused_experts import INFO, inputs

TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "ernie4_5_moe", "olmoe")


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def test_a_token_does_not_depend_on_others() -> None:
    """Alone, in a batch, and in another order: the same bits, as of linear."""
    x, gate_up, down, index, weights = inputs(torch.bfloat16, 37, 96, 40, 8, 3)
    together = fused_experts(x, gate_up, down, index, weights)
    for t in (0, 5, 36):
        assert torch.equal(
            fused_experts(x[t : t + 1], gate_up, down, index[t : t + 1], weights[t : t + 1])[0], together[t]
        )
    order = torch.randperm(37, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fused_experts(x[order], gate_up, down, index[order], weights[order]), together[order])


def test_products_are_those_of_linear() -> None:
    x, gate_up, down, _, _ = inputs(torch.bfloat16, 1, 96, 40, 4, 1)
    one = torch.ones(1, 1)
    h = torch_infini.ops.swiglu(linear(x, gate_up[2]))
    assert torch.equal(fused_experts(x, gate_up, down, torch.tensor([[2]]), one), linear(h, down[2]))


def test_nan_stays_with_its_token() -> None:
    x, gate_up, down, index, weights = inputs(torch.float32, 4, 32, 16, 4, 2)
    expected = fused_experts(x, gate_up, down, index, weights)
    weights[1, 0] = torch.nan
    x[3, 5] = torch.inf
    found = fused_experts(x, gate_up, down, index, weights)
    assert found[1].isnan().all() and not found[3].isfinite().any()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_unknown_activation() -> None:
    with pytest.raises(ValueError, match="infini::fused_experts: activation must be 'swiglu' or 'geglu', got 'relu'"):
        fused_experts(*inputs(torch.float32, 1, 8, 4, 2, 1), activation="relu")


def test_peer() -> None:
    """What benchmarks compare with computes the same."""
    args = inputs(torch.float32, 9, 48, 24, 6, 2)
    torch.testing.assert_close(INFO.peer(*args), fused_experts(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_types(kind: str) -> None:
    """Their experts are computed by the op, and tokens that the engine makes are the model's own."""
    pytest.importorskip("transformers")
    model = build(kind)
    ids = torch.randint(5, 120, (2, 23), generator=torch.Generator().manual_seed(0))
    expected = logits(model, ids)
    report = torch_infini.patch_model(model)
    assert report.counts["fused_experts"] >= 3
    assert not any("experts" in row.reason for row in report.left)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-3, atol=1e-4)
    llm = LLM(model, block_size=4, chunk_size=8, cache_blocks=40)
    (output,) = llm.generate([ids[0].tolist()], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert llm.engine.model.is_recordable
    scores = logits(model, torch.tensor([ids[0].tolist() + list(output.token_ids)]))[0, 22:-1]
    assert list(output.token_ids) == scores.argmax(-1).tolist()
    torch_infini.unpatch_model(model)
    assert torch.equal(logits(model, ids), expected)


def test_experts_are_observed_and_edited() -> None:
    """A hook sees what the original shows; a changed weight counts at the next call."""
    pytest.importorskip("transformers")
    model: Any = build("qwen3_moe")
    ids = torch.randint(5, 120, (1, 9), generator=torch.Generator().manual_seed(0))
    seen: list[Tensor] = []
    experts = model.model.layers[1].mlp.experts
    hook = experts.register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    logits(model, ids)
    with torch_infini.patch.patched(model):
        logits(model, ids)
        torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
        hook.remove()
        with torch.no_grad():
            experts.down_proj.mul_(2)
        changed = logits(model, ids)
    torch.testing.assert_close(changed, logits(model, ids), rtol=1e-3, atol=1e-4)


def test_training_runs_the_original() -> None:
    pytest.importorskip("transformers")
    model: Any = build("qwen3_moe")
    ids = torch.randint(5, 120, (1, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = model.model.layers[1].mlp.experts.down_proj.grad.clone()
    model.zero_grad()
    torch_infini.patch_model(model)
    model(input_ids=ids, labels=ids).loss.backward()
    torch.testing.assert_close(model.model.layers[1].mlp.experts.down_proj.grad, expected, rtol=1e-3, atol=1e-6)


def test_compiled() -> None:
    """No graph breaks at the experts, and the result is the patched model's."""
    pytest.importorskip("transformers")
    model: Any = build("qwen3_moe")
    torch_infini.patch_model(model)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    block = model.model.layers[1].mlp
    with torch.no_grad():
        expected = block(x[None])
        found = torch.compile(block, backend="aot_eager", fullgraph=True)(x[None])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
