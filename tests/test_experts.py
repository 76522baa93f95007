"""fused_experts beyond the registry's tests, and the experts of patched models: forms, routing, hooks, compile."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

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
    with pytest.raises(
        ValueError,
        match="infini::fused_experts: activation must be one of swiglu, geglu, .*, relu2_no_mul, got 'relu'",
    ):
        fused_experts(*inputs(torch.float32, 1, 8, 4, 2, 1), activation="relu")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ["swiglu_oai", "swiglu_clamped"])
def test_clamps_of_special_numbers(activation: str, interleaved: bool) -> None:
    """NaN and infinity are clamped as torch clamps them: an expert for each pair of gate and up, which its bias is."""
    numbers = torch.tensor([-torch.inf, -1e30, -7.5, -0.0, 0.5, 6.9, 7.0, 7.1, 1e30, torch.inf, torch.nan])
    pairs = torch.cartesian_prod(numbers, numbers)
    count = len(pairs)
    gate, up = pairs[:, 0].clamp(max=7), pairs[:, 1].clamp(-7, 7)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1) if activation == "swiglu_oai" else silu(gate) * up
    zeros, ones, index = torch.zeros(count, 2, 1), torch.ones(count, 1, 1), torch.arange(count)[:, None]
    x, bias = torch.zeros(count, 1), {"gate_up_bias": pairs, "interleaved": interleaved}
    found = fused_experts(x, zeros, ones, index, torch.ones(count, 1), activation, **bias)  # type: ignore[arg-type]
    torch.testing.assert_close(found[:, 0], expected, equal_nan=True)


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


def quantized_model(kind: str, weights: str) -> tuple[Any, Tensor]:
    """Return a patched model with quantized weights, and ids."""
    model = build(kind)
    report = torch_infini.patch_model(model, weights=weights)
    assert not any("experts" in row.name and row.reason for row in report.rows)
    return model, torch.randint(5, 120, (2, 23), generator=torch.Generator().manual_seed(0))


def experts_of(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if name.endswith("mlp.experts")]


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", TYPES)
def test_quantized_types(kind: str, weights: str) -> None:
    """Experts are quantized too, and the logits are those of a model that has the dequantized weights.

    int8 rounds a run of the input to 127 steps, twice a block: up to 4 % of the logits' spread over a few layers. More
    where a router then chooses another expert, so the median over tokens counts.
    """
    pytest.importorskip("transformers")
    model, ids = quantized_model(kind, weights)
    original = build(kind)
    for name, module in model.named_modules():
        for weight in getattr(module, "freed", ()):
            own = original.get_submodule(name).get_parameter(weight)
            with torch.no_grad():
                own.copy_(getattr(module, weight))
    assert len(experts_of(model)) >= 3 and all(not module._parameters for _, module in experts_of(model))
    found, expected = logits(model, ids), logits(original, ids)
    assert float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median()) < 0.05
    count = sum(p.numel() for p in original.parameters())
    assert torch_infini.describe(model).parameters == count == torch_infini.describe(original).parameters


def test_quantized_experts_in_the_engine() -> None:
    pytest.importorskip("transformers")
    model, ids = quantized_model("qwen3_moe", "int4")
    llm = LLM(model, block_size=4, chunk_size=8, cache_blocks=40)
    (output,) = llm.generate([ids[0].tolist()], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert llm.engine.model.is_recordable
    scores = logits(model, torch.tensor([ids[0].tolist() + list(output.token_ids)]))[0, 22:-1]
    assert list(output.token_ids) == scores.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_quantized_experts_are_saved(kind: str, tmp_path: Path) -> None:
    """load_patched and transformers' from_pretrained give the same bits; a copy and a pickle too."""
    transformers = pytest.importorskip("transformers")
    model, ids = quantized_model(kind, "int4")
    expected = logits(model, ids)
    assert torch.equal(logits(deepcopy(model), ids), expected)
    torch_infini.save_patched(model, tmp_path)
    assert torch.equal(logits(torch_infini.load_patched(tmp_path), ids), expected)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    assert torch.equal(logits(opened, ids), expected)


def test_quantized_experts_to_another_dtype() -> None:
    pytest.importorskip("transformers")
    model, ids = quantized_model("qwen3_moe", "int8")
    expected = logits(model, ids)
    model.bfloat16()
    name, module = experts_of(model)[0]
    assert module.down_proj.dtype == torch.bfloat16, name
    assert all(b.dtype in (torch.uint8, torch.float32) for b in module._buffers.values())
    found = logits(model, ids).float()
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_quantized_experts_are_read_only_and_differentiable() -> None:
    """An assignment raises; a gradient of the input is that through the dequantized weights."""
    pytest.importorskip("transformers")
    model, _ = quantized_model("qwen3_moe", "int8")
    original = build("qwen3_moe")
    name, module = experts_of(model)[0]
    with pytest.raises(ValueError, match="must not be written to"):
        module.down_proj.mul_(2)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    index, weights = torch.tensor([[0, 1]] * 7), torch.full((7, 2), 0.5)
    other: Any = original.get_submodule(name)
    with torch.no_grad():
        for own in ("gate_up_proj", "down_proj"):
            other.get_parameter(own).copy_(getattr(module, own))
    (found,) = torch.autograd.grad(module(x, index, weights).sum(), x)
    (expected,) = torch.autograd.grad(other(x, index, weights).sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_budget_with_experts() -> None:
    """The mean bits of a model are kept, experts included."""
    pytest.importorskip("transformers")
    model, ids = quantized_model("qwen3_moe", "auto:7")
    assert logits(model, ids).isfinite().all()
    formats = {module.plan.format for module in model.modules() if hasattr(module, "freed")}
    assert formats == {"group8", "table4"}
    quantized = [module for module in model.modules() if hasattr(module, "freed")]
    bits = 8 * sum(b.nbytes for module in quantized for b in module._buffers.values())
    # Rows of these small models are padded to whole blocks.
    assert bits <= 7 * sum(module.weight_count for module in quantized)


def test_experts_that_stay() -> None:
    """What cannot be quantized stays dense, with its reason in the report."""
    pytest.importorskip("transformers")
    model = build("qwen3_moe")
    with torch.no_grad():
        experts_of(model)[1][1].down_proj[1, 2, 3] = torch.nan
    rows = {row.name: row for row in torch_infini.patch_model(model, weights="int8").rows}
    reasons = [rows[name].reason for name, _ in experts_of(model)]
    assert reasons[1] == "its weights contain infinity or NaN, which cannot be quantized"
    assert not any(reasons[:1] + reasons[2:])
    model = build("qwen3_moe")
    rows = {row.name: row for row in torch_infini.patch_model(model, weights="w8a16").rows}
    for name, module in experts_of(model):
        assert rows[name].reason == "experts can have the formats group8, table4, not w8a16"
        assert len(module._parameters) == 2


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"format": "w8a16", "group": 0}, "one of the formats of experts, group8, table4"),
        ({"format": "no", "group": 0}, "format"),
    ],
)
def test_saved_description_of_experts(entry: dict[str, Any], says: str, tmp_path: Path) -> None:
    import json

    pytest.importorskip("transformers")
    model, _ = quantized_model("qwen3_moe", "int8")
    torch_infini.save_patched(model, tmp_path)
    name = experts_of(model)[0][0]
    for file in ("torch_infini.json", "config.json"):
        values = json.loads((tmp_path / file).read_text())
        (values if "quantized" in values else values["quantization_config"])["quantized"][name] = entry
        (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=says):
        torch_infini.load_patched(tmp_path)
