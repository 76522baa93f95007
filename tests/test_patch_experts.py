"""Patched experts of other forms than Mixtral's: transposed, with biases, clamped and interleaved, scaled inputs."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import torch_infini
from torch_infini import LLM, SamplingParams
from torch_infini.ops.fused_experts import ACTIVATIONS
from torch_infini.patch.layers.experts import Experts, ExpertsPlan
from torch_infini.patch.layers.grouped import GroupedLinear
from torch_infini.patch.layers.mixture import InputScaledMixture
from torch_infini.testing import causal_types
from torch_infini.testing.causal_types import build

FORMS = {
    "gpt_oss": ("swiglu_oai", True, True),
    "minimax_m3_vl_text": ("swiglu_oai", False, False),
    "deepseek_v4": ("swiglu_clamped", False, False),
    "aria_text": ("swiglu", True, False),
    "llama4_text": ("swiglu", True, False),
    "nemotron_h": ("relu2_no_mul", False, False),
}  # activation, transposed, interleaved


def ids_of(*shape: int) -> Tensor:
    return torch.randint(5, 120, shape, generator=torch.Generator().manual_seed(0))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


def experts_of(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def tensors_of(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def large(model: Any) -> Any:
    """Make gate and up so large that a limit of 7 clamps some, and biases count."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate_up_proj"):
                parameter.mul_(20)
            elif name.endswith("_proj_bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize("kind", FORMS)
def test_types(kind: str) -> None:
    """Their experts are taken, with the logits of the original, also where gate and up are clamped."""
    model = large(build(kind))
    ids = ids_of(2, 23)
    expected = logits(model, ids)
    names = {name: parameter.shape for name, parameter in model.state_dict().items()}
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    report = torch_infini.patch_model(model)
    assert not any("experts" in row.name.rpartition(".")[2] for row in report.left if "shared" not in row.name)
    (plan,) = {vars(module)["_infini_plan"] for _, module in experts_of(model)}
    assert isinstance(plan, ExpertsPlan)
    activation = next(name for name, number in ACTIVATIONS.items() if number == plan.activation)
    assert (activation, plan.transposed, plan.interleaved) == FORMS[kind]
    found = logits(model, ids)
    assert distance(found, expected) < 5e-6
    # The parameters are the original ones, of which the op reads views.
    assert {name: parameter.shape for name, parameter in model.state_dict().items()} == names
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == pointers
    torch_infini.unpatch_model(model)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text"])
def test_observed_and_edited(kind: str) -> None:
    """A hook sees what the original shows; a changed weight or bias counts at the next call."""
    model = large(build(kind))
    ids = ids_of(1, 9)
    name = "model.layers.1.mlp" if kind == "gpt_oss" else "model.layers.1.feed_forward"
    block, seen = model.get_submodule(name), []
    hooks = [
        part.register_forward_hook(lambda module, args, output: seen.append(output))
        for part in (block.experts, block.router)
    ]
    logits(model, ids)
    count = len(seen)
    torch_infini.patch_model(model)
    logits(model, ids)
    for one, other in zip(seen[count:], seen[:count], strict=True):
        for found, expected in zip(tensors_of(one), tensors_of(other), strict=True):
            assert torch.equal(found, expected) or distance(found, expected) < 1e-5
    for hook in hooks:
        hook.remove()
    before = logits(model, ids)
    with torch.no_grad():
        block.experts.down_proj.mul_(2)
        if kind == "gpt_oss":
            block.experts.gate_up_proj_bias.add_(1)
    changed = logits(model, ids)
    assert distance(changed, before) > 1e-2
    torch_infini.unpatch_model(model)
    assert distance(changed, logits(model, ids)) < 1e-5


@pytest.mark.parametrize("top_k", [1, 2])
def test_llama4_computes_the_chosen_experts(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token goes through top_k experts, and not through all; the logits are the original's."""
    monkeypatch.setitem(causal_types.MORE, "llama4_text", {"num_experts_per_tok": top_k})
    model = build("llama4_text")
    ids = ids_of(2, 9)
    expected = logits(model, ids)
    report = torch_infini.patch_model(model)
    assert not report.left and sum(isinstance(module, InputScaledMixture) for module in model.modules()) == 4
    seen: list[tuple[int, ...]] = []
    product = Experts.product

    def spied(self: Experts, x: Tensor, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(tuple(index.shape))
        return product(self, x, index, *args, **kwargs)

    monkeypatch.setattr(Experts, "product", spied)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)
    assert seen == [(18, top_k)] * 4
    # With a hook on the experts the original block runs, and its call of the experts is computed by the op.
    model.get_submodule("model.layers.0.feed_forward.experts").register_forward_hook(lambda *args: None)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-5)
    assert seen[4:] == [(18 * 4, 1)] + [(18, top_k)] * 3


@pytest.mark.parametrize("kind", ["gpt_oss", "aria_text", "llama4_text"])
def test_engine(kind: str) -> None:
    """Tokens that the engine makes are the model's own, with recorded decode steps."""
    model = build(kind)
    ids = ids_of(1, 23)
    expected = deepcopy(model)
    llm = LLM(model, block_size=4, chunk_size=8, cache_blocks=40)
    (output,) = llm.generate([ids[0].tolist()], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert llm.engine.model.is_recordable
    scores = logits(expected, torch.tensor([ids[0].tolist() + list(output.token_ids)]))[0, 22:-1]
    assert list(output.token_ids) == scores.argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text"])
def test_compiled(kind: str) -> None:
    """No graph breaks at the mixture, and the result is the patched model's."""
    model = large(build(kind))
    torch_infini.patch_model(model)
    layer = model.get_submodule("model.layers.1")
    block: Any = layer._modules["mlp" if kind == "gpt_oss" else "feed_forward"]
    x = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = block(x)
        compiled: Any = torch.compile(block, backend="aot_eager", fullgraph=True)
        found = compiled(x)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_training_runs_the_original() -> None:
    for kind in ("gpt_oss", "llama4_text"):
        model = build(kind)
        ids = ids_of(1, 9)
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if "experts" in name}
        model.zero_grad()
        torch_infini.patch_model(model)
        model(input_ids=ids, labels=ids).loss.backward()
        for name, expected in gradients.items():
            torch.testing.assert_close(model.get_parameter(name).grad, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["gpt_oss", "llama4_text", "nemotron_h"])
def test_quantized(kind: str, weights: str, tmp_path: Path) -> None:
    """Logits are those of a model with the dequantized weights, in the original's shapes; folders keep the bits."""
    model, original = build(kind), build(kind)
    ids = ids_of(2, 23)
    torch_infini.patch_model(model, weights=weights)
    for name, module in model.named_modules():
        for weight in getattr(module, "freed", ()):
            own = original.get_submodule(name).get_parameter(weight)
            assert getattr(module, weight).shape == own.shape
            with torch.no_grad():
                own.copy_(getattr(module, weight))
    found, expected = logits(model, ids), logits(original, ids)
    assert float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median()) < 0.05
    assert torch.equal(logits(deepcopy(model), ids), found)
    torch_infini.save_patched(model, tmp_path)
    assert torch.equal(logits(torch_infini.load_patched(tmp_path), ids), found)


class ListedExperts(torch.nn.Module):
    """Experts that are modules in a list, as models with code of their own have them."""

    def __init__(self, block: Any, returns_pair: bool) -> None:
        super().__init__()
        self.gate, self.top_k, self.returns_pair = torch.nn.Linear(64, 4, bias=False), 2, returns_pair
        kind = type(build("qwen3").model.layers[0].mlp)
        self.experts = torch.nn.ModuleList(kind(block.experts.config) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, hidden_states: Tensor) -> Any:
        x = hidden_states.flatten(0, -2)
        scores = self.gate(x)
        weights, index = scores.softmax(-1).topk(self.top_k, -1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, place = torch.where(index == e)
            y.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        y = y.view_as(hidden_states)
        return (y, scores) if self.returns_pair else y


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_experts_in_a_list(kind: str) -> None:
    """Each is computed as the gated MLP that it is, with its own tokens; the loop over them stays."""
    model = build(kind)
    torch.manual_seed(0)
    config = build("qwen3").config
    for layer in model.model.layers:
        layer.mlp.experts.config = config
        layer.mlp = ListedExperts(layer.mlp, returns_pair=kind == "gpt_oss").eval()
    ids = ids_of(1, 9)
    expected = logits(model, ids)
    report = torch_infini.patch_model(model)
    assert not any("mlp" in row.name for row in report.left)
    assert report.counts["fused_linear, swiglu, linear"] == 4 * 4
    assert distance(logits(model, ids), expected) < 5e-6
    torch_infini.unpatch_model(model)
    assert torch.equal(logits(model, ids), expected)


def test_jetmoe() -> None:
    """The products of its parallel experts, in the MLP and in attention, for rows that are sorted by expert."""
    model = build("jetmoe")
    ids = ids_of(2, 9)
    expected = logits(model, ids)
    report = torch_infini.patch_model(model)
    assert not report.left
    assert sum(isinstance(module, GroupedLinear) for module in model.modules()) == 16
    assert distance(logits(model, ids), expected) < 5e-6
    grouped = next(module for module in model.modules() if isinstance(module, GroupedLinear))
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (gradient,) = torch.autograd.grad(grouped(rows, [2, 0, 3, 0]).sum(), rows)
    assert gradient.isfinite().all()


def test_budget() -> None:
    """The mean bits of a model are kept with transposed experts too."""
    model = build("gpt_oss")
    torch_infini.patch_model(model, weights="auto:6")
    assert logits(model, ids_of(1, 9)).isfinite().all()
    assert all(len(module._buffers) == 4 for _, module in experts_of(model))
