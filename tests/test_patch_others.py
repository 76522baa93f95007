"""patch_model beside other libraries: layers that they replaced, adapters before and after, offloading.

Tokens and numbers are compared with those of the same model before it was patched.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_infini
from support.tiny_llama import LAYERS, calls, close, greedy, in_order, logits, tiny, tokens
from torch_infini.patch import is_patched, patch_model, patched, unpatch_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread", "no_graphs_left")

Model = Any

# Layers of other libraries


class OwnLinear(nn.Linear):
    """Stands for the quantized linear layers of other libraries: another class, another forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.round(decimals=1))


class OwnTensor(Tensor):
    """Stands for a quantized weight: a subclass that is computed with in its own way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return 2 * func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def own_class(model: Model) -> None:
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OwnLinear


def own_tensors(model: Model) -> None:
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(module.weight.detach().as_subclass(OwnTensor), requires_grad=False)


def int8_weights(model: Model) -> None:
    """Integers and a scale in the place of a weight, as others store them."""

    class Int8(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
            self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight * self.scale).T

    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8(child))


def dynamic(model: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.ao.quantization.quantize_dynamic(model.model, {nn.Linear}, torch.qint8, inplace=True)
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"torch.ao.quantization: {error}")


@pytest.mark.parametrize("change", [own_class, own_tensors, int8_weights, dynamic], ids=lambda change: change.__name__)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_quantized_by_others(change: Callable[[Model], None], weights: str | None) -> None:
    """Their layers compute what they compute; the rest is patched around them."""
    model, ids = tiny(), tokens()
    plain = logits(model, ids)
    change(model)
    expected, made = logits(model, ids), greedy(model)
    assert not torch.allclose(expected, plain)
    theirs = {name: m for name, m in model.model.layers.named_modules() if hasattr(m, "in_features")}
    report = patch_model(model, weights=weights, skip=["lm_head"] if weights else [])
    close(logits(model, ids), expected)
    assert torch.equal(greedy(model), made)
    assert {name: m for name, m in model.model.layers.named_modules() if hasattr(m, "in_features")} == theirs
    assert report.counts["rms_norm"] == 2 * LAYERS + 1
    unpatch_model(model)
    assert in_order(model) and torch.equal(logits(model, ids), expected)


def test_torchao() -> None:
    """A model in torchao's int8: patched around its weights."""
    ao = pytest.importorskip("torchao.quantization")
    model, ids = tiny(), tokens()
    ao.quantize_(model, ao.Int8WeightOnlyConfig())
    expected = logits(model, ids)
    report = patch_model(model)
    close(logits(model, ids), expected)
    assert report.counts["rms_norm"] == 2 * LAYERS + 1


def test_parametrised() -> None:
    """Parametrised and pruned weights, before and after patching, in projections and in patched modules themselves."""
    from torch.nn.utils import parametrize, prune

    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    places = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.0.input_layernorm"]
    places += ["model.layers.1.post_attention_layernorm", "model.norm", "lm_head"]

    def change(model: Model) -> None:
        for place in places:
            parametrize.register_parametrization(model.get_submodule(place), "weight", Double())
        torch.manual_seed(3)
        prune.random_unstructured(model.model.layers[1].mlp.down_proj, "weight", amount=0.5)

    ids, reference = tokens(), tiny().requires_grad_(False)
    plain = logits(reference, ids)
    change(reference)
    expected = logits(reference, ids)
    assert not torch.allclose(expected, plain)
    for first in (True, False):
        model = tiny().requires_grad_(False)
        if first:
            patch_model(model)
        change(model)
        if not first:
            patch_model(model)
        close(logits(model, ids), expected)
        close(logits(copy.deepcopy(model), ids), expected)
        assert calls(model, ids)["attention"] == LAYERS
        unpatch_model(model)
        assert in_order(model) and torch.equal(logits(model, ids), expected)
        for place in places:
            parametrize.remove_parametrizations(model.get_submodule(place), "weight")
        prune.remove(model.model.layers[1].mlp.down_proj, "weight")
        assert {name: type(m) for name, m in model.named_modules()} == {
            name: type(m) for name, m in tiny().named_modules()
        }
        close(logits(model, ids), expected)


# Adapters


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    return peft.LoraConfig(**{"r": 4, "target_modules": targets, "init_lora_weights": False, **changes})


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("head", [False, True], ids=["layers", "with head"])
def test_lora_before(dora: bool, head: bool) -> None:
    """Adapters are there when the model is patched: on, off, merged, unmerged, unloaded."""
    peft = pytest.importorskip("peft")
    targets = ["k_proj", "gate_proj", "lm_head"] if head else ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    model, ids = tiny(), tokens()
    adapted = peft.get_peft_model(model, lora(use_dora=dora, target_modules=targets)).eval()
    expected, made = logits(adapted, ids), greedy(adapted)
    with adapted.disable_adapter():
        plain = logits(adapted, ids)
    assert not torch.allclose(expected, plain)
    report = patch_model(adapted)
    assert not report.left  # an adapter around the head is a separate module
    close(logits(adapted, ids), expected)
    assert torch.equal(greedy(adapted), made)
    with adapted.disable_adapter():
        close(logits(adapted, ids), plain)
    adapted.merge_adapter()
    close(logits(adapted, ids), expected)
    adapted.unmerge_adapter()
    close(logits(adapted, ids), expected)
    merged = adapted.merge_and_unload()
    close(logits(merged, ids), expected)
    counts = calls(merged, ids)
    assert counts["fused_linear"] == 2 * LAYERS and counts["attention"] == LAYERS
    unpatch_model(adapted)
    assert in_order(merged)


@pytest.mark.parametrize("first", ["adapters", "patch"])
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "copy"])
def test_unloaded(first: str, copied: bool) -> None:
    """A model taken out of its PeftModel is patched, all agree on it, and there is a way back and forth."""
    peft = pytest.importorskip("peft")
    model, ids = tiny(), tokens()
    config = model.config
    if first == "patch":
        patch_model(model)
    adapted = peft.get_peft_model(model, lora()).eval()
    if first == "adapters":
        patch_model(adapted)
    merged = adapted.merge_and_unload()
    if copied:
        merged = copy.deepcopy(merged)
    expected = logits(merged, ids)
    assert is_patched(merged) and is_patched(merged.model) and patch_model(merged).already_patched
    assert is_patched(adapted) and patch_model(adapted).already_patched
    unpatch_model(merged)
    assert in_order(merged) and not is_patched(merged) and not is_patched(merged.model)
    assert merged.config._attn_implementation == "sdpa" and (copied or merged.config is config)
    close(logits(merged, ids), expected)
    if not copied:
        assert not is_patched(adapted) and adapted.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="model must be patched, got a LlamaForCausalLM that is not"):
        unpatch_model(merged)
    report = patch_model(merged, strict=True)
    assert not report.already_patched and is_patched(merged)
    close(logits(merged, ids), expected)


def test_wrapped_and_compiled() -> None:
    """A patched model inside of other modules: each is patched, and can be taken back from the outside."""
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    wrappers = (nn.Sequential, torch.compile, lambda model: nn.ModuleDict({"policy": model, "value": nn.Linear(2, 2)}))
    for wrap in wrappers:
        report = patch_model(model)
        outside = wrap(model)
        assert is_patched(outside) and patch_model(outside).rows == report.rows
        unpatch_model(outside)
        assert in_order(model) and not is_patched(outside) and torch.equal(logits(model, ids), expected)
    patch_model(nn.Sequential(model))  # and from the inside
    assert is_patched(model) and patch_model(model).already_patched
    unpatch_model(model)
    assert in_order(model) and not is_patched(model)
    assert not is_patched(None) and not is_patched(nn.Linear(2, 2)) and torch_infini.is_patched is is_patched
    # Of two models that one module holds, one is patched.
    other = tiny()
    patch_model(model)
    pair = nn.ModuleList([other, model])
    with pytest.raises(ValueError, match="got 1: first call unpatch_model with this model"):
        patch_model(pair)
    unpatch_model(pair)
    assert in_order(pair)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_lora_after(dora: bool) -> None:
    """Adapters are put into a patched model, trained there, and merged or taken out."""
    peft = pytest.importorskip("peft")
    model, reference, ids = tiny(), tiny(), tokens()
    plain = logits(model, ids)
    patch_model(model)
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, lora(use_dora=dora))
    torch.manual_seed(5)
    original = peft.get_peft_model(reference, lora(use_dora=dora))
    for each in (adapted, original):
        torch.manual_seed(6)
        optimiser = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            each.train()(ids, labels=ids).loss.backward()
            optimiser.step()
        each.eval()
    expected = logits(original, ids)
    for (name, a), (_, b) in zip(adapted.named_parameters(), original.named_parameters(), strict=True):
        close(a, b, passes=4, what=name)  # two steps, forward and backward
    close(logits(adapted, ids), expected, passes=5)
    assert torch.equal(greedy(adapted), greedy(original))
    assert calls(adapted, ids)["attention"] == LAYERS
    with adapted.disable_adapter():
        close(logits(adapted, ids), plain)
    merged = adapted.merge_and_unload()
    assert merged is model and is_patched(model)
    close(logits(model, ids), logits(original.merge_and_unload(), ids), passes=5)
    unpatch_model(model)
    assert in_order(model)


def test_several_adapters() -> None:
    peft = pytest.importorskip("peft")
    model, ids = tiny(), tokens()
    adapted = peft.get_peft_model(model, lora())
    adapted.add_adapter("other", lora(target_modules=["k_proj", "gate_proj"]))
    expected = {}
    for name in ("default", "other"):
        adapted.set_adapter(name)
        expected[name] = logits(adapted, ids)
    with patched(adapted):
        for name in ("default", "other", "default"):
            adapted.set_adapter(name)
            close(logits(adapted, ids), expected[name])
        adapted.delete_adapter("other")
        close(logits(adapted, ids), expected["default"])


def test_adapters_saved_and_loaded(tmp_path: Path) -> None:
    """save_pretrained of adapters on a patched model, and PeftModel.from_pretrained on another patched one."""
    peft = pytest.importorskip("peft")
    ids, models = tokens(), [tiny(), tiny()]
    for model in models:
        patch_model(model)
    adapted = peft.get_peft_model(models[0], lora())
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(models[1], tmp_path)
    assert torch.equal(logits(loaded, ids), logits(adapted, ids))
    loaded = peft.PeftModel.from_pretrained(tiny(), tmp_path)
    close(logits(loaded, ids), logits(adapted, ids))


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig", "IA3Config"])
def test_other_adapters(kind: str) -> None:
    """Learned keys and values, learned tokens, learned scales: numbers and gradients."""
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if kind == "IA3Config":
        options |= {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
        options |= {"init_ia3_weights": False}
    else:
        options |= {"num_virtual_tokens": 3}
    ids = tokens()
    for first in (True, False):
        model = tiny()
        if not first:
            patch_model(model)
        unpatched = tiny()
        torch.manual_seed(6)
        adapted = peft.get_peft_model(model, getattr(peft, kind)(**options))
        torch.manual_seed(6)
        reference = peft.get_peft_model(unpatched, getattr(peft, kind)(**options))
        if first:
            patch_model(adapted)
        for each in (adapted, reference):
            each.train().zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
            each.eval()
        gradients = [
            [p.grad for p in each.parameters() if p.requires_grad and p.grad is not None]
            for each in (adapted, reference)
        ]
        assert gradients[1] and len(gradients[0]) == len(gradients[1])
        for a, b in zip(*gradients, strict=True):
            assert b.abs().max() > 0
            close(a, b, passes=2)
        with torch.no_grad():
            close(adapted(input_ids=ids).logits, reference(input_ids=ids).logits)
        made = [greedy(each, attention_mask=torch.ones_like(ids)) for each in (adapted, reference)]
        assert torch.equal(*made)


# accelerate


def offloaded(kind: str, model: Model, folder: Path) -> Model:
    accelerate = pytest.importorskip("accelerate")
    cpu = torch.device("cpu")
    if kind == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=cpu)
    if kind == "disk_offload":
        return accelerate.disk_offload(model, str(folder), execution_device=cpu)
    pieces = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    pieces |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
    return accelerate.dispatch_model(model, pieces, main_device="cpu", offload_dir=str(folder), force_hooks=True)


OFFLOADS = pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload", "dispatch_model"])


@OFFLOADS
def test_offload_before(kind: str, tmp_path: Path) -> None:
    """Weights that come when they are needed: such modules are left, and the model runs as it did."""
    model, ids = tiny(), tokens()
    plain = logits(model, ids)
    offloaded(kind, model, tmp_path)
    expected, made = logits(model, ids), greedy(model)
    close(expected, plain)
    report = patch_model(model)
    assert any("without device_map or offloading" in row.reason for row in report.left)
    close(logits(model, ids), expected)
    assert torch.equal(greedy(model), made)
    unpatch_model(model)
    assert in_order(model) and torch.equal(logits(model, ids), expected)


@OFFLOADS
@pytest.mark.parametrize("weights", [None, "int8"])
def test_offload_after(kind: str, weights: str | None, tmp_path: Path) -> None:
    """A patched model with weights moved out runs as before, and can be unpatched meanwhile or afterwards."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny(), tokens()
    original = logits(model, ids)
    patch_model(model, weights=weights)
    expected, made = logits(model, ids), greedy(model)
    offloaded(kind, model, tmp_path)
    assert any(p.is_meta for p in model.parameters())
    close(logits(model, ids), expected)
    assert torch.equal(greedy(model), made)
    if weights is None:
        unpatch_model(model)
        assert in_order(model)
        close(logits(model, ids), original)
        patch_model(model)
        close(logits(model, ids), original)
    accelerate.hooks.remove_hook_from_submodules(model)
    if weights is None:
        unpatch_model(model)
    if kind == "cpu_offload" and weights is None:
        close(logits(model, ids), original)


def test_device_map(tmp_path: Path) -> None:
    """from_pretrained with device_map="auto" on a machine without an accelerator."""
    pytest.importorskip("accelerate")
    tiny().save_pretrained(tmp_path)
    for device_map in ("auto", "cpu", {"": "cpu"}):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        expected = logits(model, tokens())
        with patched(model, strict=True):
            close(logits(model, tokens()), expected)
            assert calls(model, tokens())["attention"] == LAYERS


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("first", ["patched", "prepared"])
def test_accelerator(precision: str, first: str) -> None:
    """Accelerator().prepare, a step of training, unwrap_model."""
    accelerate = pytest.importorskip("accelerate")
    ids = tokens()

    def step(patching: str | None) -> tuple[Model, Tensor, list[Tensor]]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model = tiny()
        if patching == "patched":
            patch_model(model)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimiser = accelerator.prepare(model.train(), optimiser)
        if patching == "prepared":
            patch_model(prepared)
        accelerator.backward(prepared(ids, labels=ids).loss)
        optimiser.step()
        model.eval()
        result = logits(prepared, ids)
        assert result.dtype == torch.float32
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        return unwrapped, result, [p.detach() for p in unwrapped.parameters()]

    _, expected, parameters = step(None)
    model, actual, trained = step(first)
    assert all(map(torch.equal, trained, parameters))
    close(actual, expected)
    assert is_patched(model) and calls(model, ids)["attention"] == LAYERS
    unpatch_model(model)
    assert in_order(model)
