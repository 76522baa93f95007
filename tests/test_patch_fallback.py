"""Where patched modules run their original forward: gradients, autocast, hooks, replaced submodules, compilers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.tiny_llama import ALL_CALLS, LAYERS, CallCounter, calls, close, logits, static_cache, tiny, tokens
from torch_infini.patch import patch_model, patched

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
    """Replaces a linear layer, as quantization and adapters do."""

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


@pytest.mark.full
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


def tiny_for(weights: str | None) -> Any:
    """Return a tiny model in the dtype that `weights` needs."""
    return tiny(torch.bfloat16 if weights == "packed" else torch.float32)


@pytest.mark.parametrize("weights", [None, "int8"])
def test_compiled_graph_calls_the_ops(weights: str | None) -> None:
    """The conditions of a call have the same results under the compiler as without it."""
    model, graphs = tiny(num_hidden_layers=1), []
    patch_model(model, weights=weights)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    with torch.no_grad():
        compiled(tokens(), use_cache=False)
    called = Counter(str(n.target).split(".")[1] for g in graphs for n in g.graph.nodes if "infini." in str(n.target))
    assert called.keys() == calls(model, tokens(), use_cache=False).keys()  # norms are not carried between layers there


# Tensors of another layout, and transforms of torch.func


def embeddings(model: nn.Module) -> Tensor:
    """Return embeddings [2, 9, 64]."""
    return model.get_input_embeddings()(tokens()).detach()


def with_weights_of(model: nn.Module) -> nn.Module:
    """Return the original model with the weights of the patched one, dequantized if they are quantized."""
    original = tiny()
    for name, module in original.named_modules():
        if isinstance(module, nn.Linear):
            module.weight.data.copy_(model.get_submodule(name).weight)
    return original


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced": lambda x: torch.stack([x, -x], -1)[..., 0],
    "every second": lambda x: x.repeat_interleave(2, 2)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("weights", [None, "int8", "packed"])
def test_strided_embeddings(weights: str | None, layout: str) -> None:
    """inputs_embeds with a last stride other than 1 are accepted and computed by the ops."""
    model = tiny_for(weights)
    patch_model(model, weights=weights)
    x = embeddings(model)
    strided = LAYOUTS[layout](x)
    assert strided.stride(-1) != 1 and torch.equal(strided, x)
    assert torch.equal(logits(model, inputs_embeds=strided), logits(model, inputs_embeds=x))
    assert calls(model, inputs_embeds=strided) == calls(model, inputs_embeds=x) != {}


@pytest.mark.parametrize(
    "name", ["layers.0.self_attn.q_proj", "layers.0.mlp", "norm", "layers.0", "layers.0.self_attn"]
)
@pytest.mark.parametrize("weights", [None, "int8", "packed"])
def test_strided_input_of_one_module(weights: str | None, name: str) -> None:
    model = tiny_for(weights)
    patch_model(model, weights=weights)
    module, x = model.model.get_submodule(name), embeddings(model)
    kwargs = {}
    if name.endswith(("0", "attn")):
        kwargs = {"position_embeddings": model.model.rotary_emb(x, torch.arange(9)[None]), "attention_mask": None}
    with torch.no_grad():
        actual, expected = module(LAYOUTS["transposed"](x), **kwargs), module(x, **kwargs)
    for a, b in zip(*((y if isinstance(y, tuple) else (y,)) for y in (actual, expected)), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("cache", [False, True], ids=["no cache", "cache"])
def test_vmap(weights: str | None, cache: bool) -> None:
    """torch.vmap over token ids, and over a weight."""
    model, ids = tiny(), tokens()
    patch_model(model, weights=weights)
    expected = logits(with_weights_of(model), ids)
    with torch.no_grad():
        one = lambda ids: model(ids[None], use_cache=cache).logits[0]
        torch.testing.assert_close(torch.vmap(one)(ids), expected, rtol=1e-4, atol=1e-4)
        scales = torch.tensor([0.5, 1.0, 2.0])
        norm = model.model.norm.weight
        name = "model.norm.weight"
        scaled = lambda scale: torch.func.functional_call(model, {name: scale * norm}, (ids,), {"use_cache": cache})
        actual = torch.vmap(lambda scale: scaled(scale).logits)(scales)
        for y, scale in zip(actual, scales, strict=True):
            torch.testing.assert_close(y, scale * expected, rtol=1e-4, atol=1e-4)
    assert calls(model, ids)["attention"] == LAYERS


def test_functional_call() -> None:
    """Other weights for one call: the ops read those; and gradients of them, as the original's."""
    model, original, ids = tiny(), tiny(), tokens()
    patch_model(model)
    other = {name: parameter.detach().clone() for name, parameter in tiny(seed=9).named_parameters()}
    with torch.no_grad(), CallCounter() as counter:
        actual = torch.func.functional_call(model, other, (ids,)).logits
    close(actual, logits(tiny(seed=9), ids))
    assert dict(counter.counts) == ALL_CALLS
    close(logits(model, ids), logits(original, ids))

    def loss(model: nn.Module, weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, weights, (ids,), {"labels": ids}).loss

    actual, expected = (torch.func.grad(lambda weights, m=m: loss(m, weights))(other) for m in (model, original))
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["jvp", "dual", "dual, no_grad"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_forward_mode(weights: str | None, how: str) -> None:
    """Tangents of the embeddings are those of the original (with eager attention: SDPA has none on the CPU)."""
    model = tiny()
    model.set_attn_implementation("eager")
    x = embeddings(model)
    torch.manual_seed(6)
    tangent = torch.randn_like(x)

    def both(model: nn.Module) -> tuple[Tensor, Tensor]:
        run = lambda x: model(inputs_embeds=x, use_cache=False).logits
        if how == "jvp":
            return torch.func.jvp(run, (x,), (tangent,))
        with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(how == "dual"):
            y = torch.autograd.forward_ad.unpack_dual(run(torch.autograd.forward_ad.make_dual(x, tangent)))
            return y.primal.detach(), y.tangent.detach()

    patch_model(model, weights=weights)
    original = with_weights_of(model)
    original.set_attn_implementation("eager")
    actual, expected = both(model), both(original)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-4, atol=1e-4)
    assert calls(model, tokens())["attention"] == LAYERS
