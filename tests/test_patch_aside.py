"""Where patched modules run their original forward: gradients, autocast, hooks, replaced submodules, compilers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from torch_infini.patch import patch_model, patched
from torch_infini.testing.tiny_llama import (
    ALL_CALLS,
    LAYERS,
    CallCounter,
    calls,
    close,
    logits,
    static_cache,
    tiny,
    tokens,
)

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_training(dropout: float, checkpointing: bool) -> None:
    """A training step gives the unpatched model's gradients."""
    model, ids = tiny(attention_dropout=dropout), tokens()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def gradients() -> list[Tensor]:
        torch.manual_seed(4)
        model.train().zero_grad()
        model(ids, labels=ids).loss.backward()
        model.eval()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients()
    with patched(model, strict=True):
        assert all(map(torch.equal, gradients(), expected))
        assert calls(model, ids) == ALL_CALLS


def test_training_some_parameters() -> None:
    """With frozen weights each layer decides for itself: those before the first trained one keep their ops."""
    model, ids = tiny().requires_grad_(False), tokens()
    model.lm_head.weight.requires_grad_(True)
    model(ids).logits.sum().backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    with patched(model, strict=True):
        with CallCounter() as counter:
            model(ids).logits.sum().backward()
        close(model.lm_head.weight.grad, expected, passes=2)
        assert dict(counter.counts) == {**ALL_CALLS, "linear": 2 * LAYERS}


def test_dropout_without_gradients() -> None:
    model, ids = tiny(attention_dropout=0.5).train(), tokens()
    torch.manual_seed(5)
    expected = logits(model, ids)
    with patched(model, strict=True):
        torch.manual_seed(5)
        close(logits(model, ids), expected)
        assert all(module.training for module in model.modules())


def test_autocast() -> None:
    model, ids = tiny(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(model, ids)
        with patched(model, strict=True):
            assert logits(model, ids).dtype == torch.bfloat16
            assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize(
    "name", ["", ".self_attn", ".self_attn.k_proj", ".mlp", ".mlp.act_fn", ".mlp.up_proj", ".post_attention_layernorm"]
)
def test_hooks(name: str) -> None:
    """Hooks that are set before or after patching see, and may change, what they see in the unpatched model."""
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    module = model.get_submodule(f"model.layers.0{name}")
    double = lambda module, args, output: (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output
    hook = module.register_forward_hook(double)
    doubled = logits(model, ids)
    assert not torch.allclose(doubled, expected)
    with patched(model, strict=True):
        close(logits(model, ids), doubled)
        hook.remove()
        close(logits(model, ids), expected)
        hook = module.register_forward_hook(double)
        close(logits(model, ids), doubled)
        hook.remove()
        hook = module.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
        close(logits(model, ids), expected)


def test_hooks_on_all_modules() -> None:
    model, seen = tiny(), Counter()
    count = lambda module, args, output: seen.update([module])
    with patched(model, strict=True):
        hook = nn.modules.module.register_module_forward_hook(count)
        try:
            logits(model, tokens())
        finally:
            hook.remove()
    assert {module for module in model.modules() if not isinstance(module, nn.ModuleList)} == set(seen)


class Adapted(nn.Module):
    """Stands for what quantisation and adapters put in the place of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.base(x)


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.down_proj", "mlp.act_fn"])
def test_submodules_replaced_afterwards(name: str) -> None:
    model, ids = tiny(), tokens()
    parent, child = f"model.layers.0.{name}".rsplit(".", 1)
    parent = model.get_submodule(parent)
    original = getattr(parent, child)
    setattr(parent, child, Adapted(original))
    expected = logits(model, ids)
    setattr(parent, child, original)
    patch_model(model)
    parent._modules[child] = Adapted(original)
    close(logits(model, ids), expected)


def test_compile() -> None:
    """One graph of the whole model, with and without a cache."""
    model, ids = tiny(num_hidden_layers=1), tokens()
    with patched(model, strict=True), torch.no_grad():
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        caches = [static_cache(model), static_cache(model)]
        for part in (ids[:, :5], ids[:, 5:6], ids[:, 6:7]):
            close(
                compiled(part, past_key_values=caches[0]).logits,
                model(part, past_key_values=caches[1]).logits,
            )
