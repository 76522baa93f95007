"""A patched layer determines once which modules it computes without calling them, and again after a change of that.

Each change is made between two calls, or within one, of a model that has cached its dispatch.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_infini
from torch_infini.patch import patch_model, unpatch_model
from torch_infini.patch.layers.ways import DISPATCH
from torch_infini.testing.patched_families import FAMILIES, VOCABULARY, Family

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

PACKAGE = str(Path(torch_infini.__file__).parent)
EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
NAMES = ("self_attn", "mlp", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "act_fn")


def ids() -> Tensor:
    return torch.randint(2, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(5))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(ids()).logits


def llama() -> Any:
    return next(family for family in FAMILIES if family.name == "Llama").build()


def pair() -> tuple[Any, Any]:
    """The original and a patched model that has cached its dispatch."""
    original = llama()
    model = copy.deepcopy(original)
    assert patch_model(model).replaced
    logits(model)
    assert all(vars(layer)[DISPATCH] is not None for layer in model.model.layers)
    return original, model


def close(actual: Tensor, expected: Tensor) -> None:
    assert (actual - expected).norm() <= 2e-4 * expected.norm()


@EVERY
def test_calls_of_a_decode_step(family: Family) -> None:
    """A step of two layers makes at most 40 calls of this package, more for norms and experts that Llama lacks."""
    model = family.build()
    patch_model(model)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_name] += 1

    with torch.no_grad():
        cache = transformers.DynamicCache(config=model.config)
        model(ids(), past_key_values=cache)
        model(ids()[:, :1], past_key_values=cache)
        sys.setprofile(count)
        try:
            model(ids()[:, :1], past_key_values=cache)
        finally:
            sys.setprofile(None)
    assert calls["make_dispatch"] == 0, "the cached dispatch is used"
    assert len(model.model.layers) == 2
    assert sum(calls.values()) <= (40 if family.name == "Llama" else 75 if family.experts else 65), calls


@pytest.mark.parametrize("name", NAMES)
def test_hooks_that_come_and_go(name: str) -> None:
    """A hook is called from the next call on, and not after it was removed."""
    original, model = pair()
    module = next(
        module
        for path, module in model.named_modules()
        if path.endswith(f"layers.1.{name}")
        or path.endswith(f"layers.1.self_attn.{name}")
        or path.endswith(f"layers.1.mlp.{name}")
    )
    seen = []
    for register in (module.register_forward_hook, module.register_forward_pre_hook):
        handle = register(lambda *args: seen.append(args))
        close(logits(model), logits(original))
        assert len(seen) == 1
        handle.remove()
        close(logits(model), logits(original))
        assert len(seen) == 1
        seen.clear()


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def another_class(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.__class__ = Doubled


def another_module(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    new = Doubled(attention.o_proj.in_features, attention.o_proj.out_features, bias=False)
    new.weight = attention.o_proj.weight
    attention.o_proj = new


def another_forward(model: Any) -> None:
    module = model.model.layers[0].self_attn.v_proj
    forward = module.forward
    module.forward = lambda x: 2 * forward(x)


def another_weight(model: Any) -> None:
    module = model.model.layers[0].mlp.gate_proj
    module.weight = nn.Parameter(2 * module.weight)


def another_activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def another_norm(model: Any) -> None:
    norms = [layer.input_layernorm for layer in model.model.layers]
    model.model.layers[1].input_layernorm = copy.deepcopy(norms[0])
    model.model.layers[1].input_layernorm.weight = nn.Parameter(3 * norms[1].weight)


def hooks_in_a_new_dict(model: Any) -> None:
    module = model.model.layers[0].mlp.up_proj
    module._forward_hooks = type(module._forward_hooks)()
    module.register_forward_hook(lambda module, args, result: 2 * result)


def compiled_alone(model: Any) -> None:
    module = model.model.layers[0].self_attn.k_proj
    module._compiled_call_impl = lambda x: 2 * module._call_impl(x)


CHANGES = (
    another_class,
    another_module,
    another_forward,
    another_weight,
    another_activation,
    another_norm,
    hooks_in_a_new_dict,
    compiled_alone,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes(change: Callable[[Any], None]) -> None:
    original, model = pair()
    before = logits(model)
    for one in (original, model):
        change(one)
    expected = logits(original)
    assert (expected - before).norm() > 1e-3 * before.norm(), "the change is seen"
    close(logits(model), expected)


def test_a_change_within_a_call() -> None:
    """A projection that is called may change those after it, which are then called as well."""
    original, model = pair()
    seen: dict[int, list[int]] = {}
    for one in (original, model):
        layer = one.model.layers[0]
        mine = seen[id(one)] = []

        def first(*args: Any, layer: Any = layer, mine: list[int] = mine) -> None:
            layer.self_attn.o_proj.register_forward_hook(lambda *args: mine.append(1))
            layer.mlp.down_proj.register_forward_hook(lambda *args: mine.append(2))

        layer.self_attn.q_proj.register_forward_hook(first)
    close(logits(model), logits(original))
    assert seen[id(model)] == seen[id(original)] == [1, 2]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_have_a_dispatch_of_their_own(copied: Callable[[Any], Any]) -> None:
    """A copy reads its own weights."""
    _, model = pair()
    before = logits(model)
    other = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    close(logits(other), before)


def test_replicas_have_a_dispatch_of_their_own() -> None:
    """torch.nn.DataParallel copies a module's dict, dispatches included, and then puts other modules into it."""
    _, model = pair()
    layer = model.model.layers[0]
    replica = layer._replicate_for_data_parallel()
    assert vars(replica)[DISPATCH] is vars(layer)[DISPATCH]
    for name, child in layer._modules.items():
        replica._modules[name] = copy.deepcopy(child)
    x = torch.randn(1, 3, layer.self_attn.q_proj.in_features)
    arguments = {"position_embeddings": model.model.rotary_emb(x, torch.arange(3)[None]), "attention_mask": None}
    with torch.no_grad():
        expected = layer(x, **arguments)
        for parameter in layer.parameters():
            parameter.zero_()
        close(replica(x, **arguments), expected)


def test_nothing_is_left() -> None:
    _, model = pair()
    unpatch_model(model)
    assert not any(DISPATCH in vars(module) for module in model.modules())
