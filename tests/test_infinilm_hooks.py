"""infinilm.HookRegistry: callbacks see the values that transformers' modules have.

A pass without callbacks leaves nothing in the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.rounding import assert_same_but_rounding, sums_of
from torch_infini.compat.infinilm import AutoConfig, HookRegistry, InferEngine, StaticKVCacheConfig
from torch_infini.compat.infinilm.hooks import NAMES
from torch_infini.testing.checkpoints import SMALL, random_model

pytestmark = pytest.mark.usefixtures("one_thread")

OF_THE_MODEL = ("embed_tokens", "norm", "lm_head")
QK_NORMS = ("q_norm", "k_norm")


def build(folder: Path, family: str = "llama") -> tuple[Any, InferEngine]:
    """A small transformers model of two layers, and an engine with its parameters."""
    model = random_model(family, num_hidden_layers=2)
    model.config.save_pretrained(folder)
    engine = InferEngine(AutoConfig.from_pretrained(folder), cache_config=StaticKVCacheConfig(2, 32))
    for name, parameter in model.state_dict().items():
        engine.load_param(name, parameter)
    return model, engine


def tokens(rows: int, columns: int) -> Tensor:
    return torch.randint(SMALL["vocab_size"], (rows, columns), generator=torch.Generator().manual_seed(2))


def forward(engine: InferEngine, ids: Tensor, past: int = 0) -> Tensor:
    lengths = torch.full((len(ids),), past)
    return engine.forward(InferEngine.Input(ids, cache_lengths=lengths, top_k=1)).output_ids


def modules(model: Any, name: str) -> dict[int, Any]:
    """transformers' modules whose results a name stands for, by layer."""
    if name in OF_THE_MODEL:
        return {-1: model.lm_head if name == "lm_head" else getattr(model.model, name)}
    found = {}
    for i, layer in enumerate(model.model.layers):
        inside = [part for part in (layer.self_attn, layer.mlp, layer) if hasattr(part, name)]
        found[i] = layer if name == "layer" else getattr(inside[0], name)
    return found


def expected_of(model: Any, name: str, ids: Tensor) -> dict[int, Tensor]:
    """What transformers' modules give, tokens of all rows one behind the other."""
    seen: dict[int, Tensor] = {}

    def note(layer: int) -> Any:
        return lambda module, args, y: seen.update({layer: (y[0] if isinstance(y, tuple) else y).flatten(0, 1)})

    handles = [module.register_forward_hook(note(layer)) for layer, module in modules(model, name).items()]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    if name == "lm_head":
        seen[-1] = seen[-1].view(*ids.shape, -1)[:, -1]
    return seen


@pytest.mark.parametrize("family", ("llama", "qwen3"))
def test_values_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model, engine = build(tmp_path, family)
    names = [name for name in NAMES if family == "qwen3" or name not in QK_NORMS]
    registry, seen = HookRegistry(), {}
    for name in names:
        registry.register_hook(name, lambda name, tensor, layer: seen.update({(name, layer): tensor}))
    engine.register_hooks(registry)
    ids = tokens(2, 7)
    forward(engine, ids)
    layers = {name: [-1] if name in OF_THE_MODEL else [0, 1] for name in names}
    assert set(seen) == {(name, layer) for name in names for layer in layers[name]}
    for name in names:
        expected = expected_of(model, name, ids)
        for layer in layers[name]:
            assert_same_but_rounding(seen[name, layer], expected[layer], *sums_of(model.config), what=f"{name} {layer}")


def test_each_name_alone_and_in_the_order_of_the_computation(tmp_path: Path) -> None:
    """What one callback sees does not depend on there being others."""
    _, engine = build(tmp_path, "qwen3")
    ids = tokens(1, 5)
    calls: list[tuple[str, int]] = []
    together: dict[tuple[str, int], Tensor] = {}
    registry = HookRegistry()
    engine.register_hooks(registry)

    def see(name: str, tensor: Tensor, layer: int) -> None:
        calls.append((name, layer))
        together[name, layer] = tensor

    for name in NAMES:
        registry.register_hook(name, see)
    forward(engine, ids)
    order = [name for name in NAMES if name not in ("embed_tokens", "layer", "norm", "lm_head")]
    per_layer = [[(name, i) for name in order] for i in range(2)]
    assert calls == [
        ("embed_tokens", -1),
        *per_layer[0],
        ("layer", 0),
        *per_layer[1],
        ("layer", 1),
        ("norm", -1),
        ("lm_head", -1),
    ]
    for name in NAMES:
        before = dict(together)
        together.clear()
        registry.clear()
        registry.register_hook(name, see)
        forward(engine, ids)
        assert together.keys() == {key for key in before if key[0] == name}
        assert all(torch.equal(tensor, before[key]) for key, tensor in together.items())
        together.update(before)


def test_callbacks_own_what_they_see(tmp_path: Path) -> None:
    """Writing there does not change the pass."""
    _, engine = build(tmp_path, "qwen3")
    ids = tokens(2, 5)
    expected = forward(engine, ids)
    registry = HookRegistry()
    for name in NAMES:
        registry.register_hook(name, lambda name, tensor, layer: tensor.zero_())
    engine.register_hooks(registry)
    assert torch.equal(forward(engine, ids), expected)


def test_a_registry_is_alive(tmp_path: Path) -> None:
    """Callbacks come and go between passes; several may see one tensor; one registry may serve several engines."""
    (tmp_path / "other").mkdir()
    engines = [build(tmp_path)[1], build(tmp_path / "other", "qwen2")[1]]
    ids, seen = tokens(1, 3), []
    registry = HookRegistry()
    assert not registry.has_hooks()
    for engine in engines:
        engine.register_hooks(registry)
    registry.register_hook("mlp", lambda name, tensor, layer: seen.append(("first", layer)))
    registry.register_hook("mlp", lambda name, tensor, layer: seen.append(("second", layer)))
    assert registry.has_hooks()
    both = [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
    for engine in engines:
        forward(engine, ids)
        assert seen == both
        seen.clear()
    engines[0].register_hooks(None)
    forward(engines[0], ids)
    assert seen == []
    forward(engines[1], ids)
    assert seen == both
    registry.clear()
    forward(engines[1], ids)
    assert seen == both and not registry.has_hooks()


def hooks_in(engine: InferEngine) -> int:
    """What taps a model."""
    modules = list(engine._rank.model.modules())
    return sum(len(m._forward_hooks) for m in modules) + sum("after" in vars(m) for m in modules)


def test_nothing_is_left_in_the_model(tmp_path: Path) -> None:
    _, engine = build(tmp_path, "qwen3")
    ids, during = tokens(1, 3), []
    registry = HookRegistry()
    engine.register_hooks(registry)
    for name in NAMES:
        registry.register_hook(name, lambda name, tensor, layer: during.append(hooks_in(engine)))
    forward(engine, ids)
    assert min(during) > len(NAMES) and hooks_in(engine) == 0

    class Stop(Exception):
        pass

    def stop(name: str, tensor: Tensor, layer: int) -> None:
        raise Stop

    registry.clear()
    registry.register_hook("norm", stop)
    with pytest.raises(Stop):
        forward(engine, ids)
    assert hooks_in(engine) == 0
    with pytest.raises(ValueError, match="cache_lengths must be at most"):  # the pass did not end
        forward(engine, ids, past=3)
    registry.clear()
    forward(engine, ids)


def test_names_are_checked(tmp_path: Path) -> None:
    _, engine = build(tmp_path)
    known = ", ".join(name for name in NAMES if name not in QK_NORMS)
    for name in ("attention", "q_norm"):
        registry = HookRegistry()
        registry.register_hook(name, print)
        message = f"infinilm.HookRegistry: name must be one of {known}, got '{name}'"
        with pytest.raises(ValueError) as error:
            engine.register_hooks(registry)
        assert str(error.value) == message
        registry.clear()
        engine.register_hooks(registry)
        registry.register_hook(name, print)
        with pytest.raises(ValueError) as error:
            forward(engine, tokens(1, 3))
        assert str(error.value) == message
    with pytest.raises(TypeError) as other:
        registry.register_hook("norm", "print")
    assert str(other.value) == ("infinilm.HookRegistry.register_hook: callback must be callable, got str")
    with pytest.raises(TypeError) as other:
        engine.register_hooks({"norm": print})
    assert str(other.value) == "infinilm.InferEngine: registry must be a HookRegistry, got dict"
