"""A patched model is as observable and editable as the original: hooks, captured tensors, layers called one by one.

Calibration, pruning and steering keep what hooks bring without copying it, change weights between two calls, and call
layers themselves. Every family of patch_model, one hook at a time.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_infini.patch import patch_model
from torch_infini.testing.patched_families import FAMILIES, VOCABULARY, Family

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

Mode = Callable[[], AbstractContextManager[Any]]
MODES: dict[str, Mode] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
EVERY = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
EITHER = pytest.mark.parametrize("mode", ["no_grad", pytest.param("inference_mode", marks=pytest.mark.full)])
TOLERANCE = 2e-4  # of float32 models of two layers: different orders of sums


def ids(length: int = 20) -> Tensor:
    return torch.randint(2, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(5))


def pair(family: Family) -> tuple[Any, Any]:
    """The original and the same model patched."""
    original = family.build()
    patched = copy.deepcopy(original)
    assert patch_model(patched).replaced
    return original, patched


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors(one)


def same(actual: Any, expected: Any, what: str) -> None:
    """The same shapes and, to rounding, the same numbers."""
    pairs = list(zip(tensors(actual), tensors(expected), strict=True))
    for mine, theirs in pairs:
        assert mine.shape == theirs.shape, f"{what}: {tuple(mine.shape)}, not {tuple(theirs.shape)}"
        if theirs.is_floating_point():
            difference = (mine.double() - theirs.double()).norm() / theirs.double().norm().clamp(min=1e-6)
            assert difference < TOLERANCE, f"{what}: off by {difference:.2g}"
        else:
            assert torch.equal(mine, theirs), what


def hidden(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Of a module's arguments those that both models have: implementations of attention have masks of their own."""
    return (*args, kwargs.get("hidden_states"), kwargs.get("position_embeddings"))


def captured(model: Any, name: str, way: str, mode: Mode) -> list[Any]:
    """What one hook keeps of one forward, as it came, read when the forward is over."""
    module, kept = model.get_submodule(name), []
    if way == "forward":
        # Eager attention returns its weights too, which the kernel does not store.
        of_attention = name.endswith("self_attn")
        hook = module.register_forward_hook(
            lambda m, args, kwargs, output: kept.append((hidden(args, kwargs), output[0] if of_attention else output)),
            with_kwargs=True,
        )
    else:
        hook = module.register_forward_pre_hook(
            lambda m, args, kwargs: kept.append(hidden(args, kwargs)), with_kwargs=True
        )
    with mode():
        model(ids(), use_cache=False)
    hook.remove()
    return kept


def places(model: Any) -> list[str]:
    """Every module below the head and the decoder that tensors go through."""
    names = [name for name, module in model.named_modules() if name.count(".") >= 1 and not name.endswith("layers")]
    return [name for name in names if not isinstance(model.get_submodule(name), nn.ModuleList)] + ["lm_head"]


@EITHER
@EVERY
def test_hooks_see_what_the_original_shows(family: Family, mode: str) -> None:
    original, patched = pair(family)
    for name in places(original):
        for way in ("forward", "pre"):
            theirs = captured(original, name, way, MODES[mode])
            mine = captured(patched, name, way, MODES[mode])
            assert len(mine) == len(theirs), f"{family.name} {name}: called {len(mine)} times, not {len(theirs)}"
            same(mine, theirs, f"{family.name} {name}, {way} hook")


@EVERY
def test_what_hooks_return_is_not_written(family: Family) -> None:
    """A hook that returns a tensor of its own finds it unchanged, and the second call gives what the first one gave."""
    _, patched = pair(family)
    for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_norm", "k_norm", "o_proj"):
        for name, module in patched.named_modules():
            if not name.endswith(f"layers.0.self_attn.{part}"):
                continue
            saved: list[Tensor] = []

            def give(module: nn.Module, args: Any, output: Tensor, saved: list[Tensor] = saved) -> Tensor:
                if not saved:
                    saved.append(output.clone())
                return saved[0]

            with torch.no_grad():
                hook = module.register_forward_hook(give)
                first = patched(ids(), use_cache=False).logits
                before = saved[0].clone()
                second = patched(ids(), use_cache=False).logits
                hook.remove()
            assert torch.equal(saved[0], before), name
            assert torch.equal(first, second), name


def steps(model: Any) -> tuple[Tensor, list[dict[str, Any]]]:
    """The first layer's input and each layer's keyword arguments, as the decoder passes them."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda m, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids(), use_cache=False)
    for hook in hooks:
        hook.remove()
    parameters = [inspect.signature(type(layer).forward).parameters for layer in model.model.layers]
    assert all("hidden_states" in names for names in parameters)
    (args, kwargs), *_ = seen
    first = args[0] if args else kwargs["hidden_states"]
    return first.clone(), [{k: v for k, v in kwargs.items() if k != "hidden_states"} for _, kwargs in seen]


def walk(model: Any, between: Callable[[Any, int, Tensor], Any] = lambda model, i, x: x) -> Tensor:
    """Call the layers one by one, and what happens between two of them; then the norm."""
    x, arguments = steps(model)
    for i, (layer, kwargs) in enumerate(zip(model.model.layers, arguments, strict=True)):
        x = layer(x, **kwargs)
        x = x[0] if isinstance(x, tuple) else x
        x = between(model, i, x)
    y: Tensor = model.model.norm(x)
    return y


def first_norm(model: Any, index: int) -> Any:
    """The norm that meets a layer's input; after the last layer, and where layers begin with none, the decoder's."""
    layers = model.model.layers
    norms = getattr(layers[index], "input_layernorm", None) if index < len(layers) else None
    return model.model.norm if norms is None else norms


def scaled(model: Any, i: int, x: Tensor) -> Tensor:
    with torch.no_grad():
        first_norm(model, i + 1).weight.mul_(1.5)
    return x


def scaled_data(model: Any, i: int, x: Tensor) -> Tensor:
    first_norm(model, i + 1).weight.data.mul_(1.5)
    return x


def replaced(model: Any, i: int, x: Tensor) -> Tensor:
    norm = first_norm(model, i + 1)
    norm.weight = nn.Parameter(norm.weight.detach() * 1.5)
    return x


def loaded(model: Any, i: int, x: Tensor) -> Tensor:
    norm = first_norm(model, i + 1)
    norm.load_state_dict({name: value * 1.5 for name, value in norm.state_dict().items()})
    return x


def other_eps(model: Any, i: int, x: Tensor) -> Tensor:
    norm = first_norm(model, i + 1)
    setattr(norm, "eps" if hasattr(norm, "eps") else "variance_epsilon", 0.5)
    return x


def added(model: Any, i: int, x: Tensor) -> Tensor:
    x += 0.5
    return x


def hooked(model: Any, i: int, x: Tensor) -> Tensor:
    first_norm(model, i + 1).register_forward_hook(lambda module, args, output: output * 0.5)
    return x


@EITHER
@pytest.mark.parametrize("between", [scaled, scaled_data, replaced, loaded, other_eps, added, hooked])
@EVERY
def test_layers_one_by_one(family: Family, between: Callable[[Any, int, Tensor], Any], mode: str) -> None:
    """Whatever changes between two layers is what the next one computes with."""
    original, patched = pair(family)
    with MODES[mode]():
        expected, actual = walk(original, between), walk(patched, between)
    same(actual, expected, f"{family.name}, {between.__name__}")


@EITHER
@EVERY
def test_a_norm_gives_its_result_anew(family: Family, mode: str) -> None:
    _, patched = pair(family)
    with MODES[mode]():
        kept: list[Tensor] = []
        walk(patched, lambda model, i, x: kept.append(x) or x)
        norm = patched.model.norm
        first = norm(kept[-1])
        copied = first.clone()
        first.zero_()
        assert torch.equal(norm(kept[-1]), copied)


@EVERY
def test_a_fold_of_scales_moves_nothing(family: Family) -> None:
    """SmoothQuant's: what a norm's weight is divided by, the layers that follow it are multiplied by."""
    if "Gemma" in family.name or not hasattr(family.build().model.layers[1], "input_layernorm"):
        pytest.skip("its norms have no plain weight before attention")
    _, patched = pair(family)
    scales = torch.rand(patched.config.hidden_size) + 0.5

    def fold(model: Any, i: int, x: Tensor) -> Tensor:
        layer = model.model.layers[1]
        if i == 0:
            layer.input_layernorm.weight.div_(scales)
            for name in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
                if hasattr(layer.self_attn, name):
                    getattr(layer.self_attn, name).weight.mul_(scales)
        return x

    with torch.no_grad():
        same(walk(patched, fold), walk(patched), family.name)


@EVERY
def test_inputs_for_calibration(family: Family) -> None:
    """GPTQ's and AWQ's: the products of what each linear layer takes, summed when the layer's forward is over."""

    def hessians(model: Any) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}

        def between(model: Any, i: int, x: Tensor) -> Tensor:
            for hook in hooks:
                hook.remove()
            for name, taken in kept.items():
                rows = taken.flatten(0, -2).double()
                sums[name] = rows.t() @ rows
            return x

        kept: dict[str, Tensor] = {}
        hooks = [
            module.register_forward_hook(lambda m, args, output, name=name: kept.__setitem__(name, args[0]))
            for name, module in model.model.layers[0].named_modules()
            if isinstance(module, nn.Linear)
        ]
        with torch.no_grad():
            walk(model, between)
        return sums

    original, patched = pair(family)
    expected, actual = hessians(original), hessians(patched)
    assert expected.keys() == actual.keys()
    for name, sums in expected.items():
        same(actual[name], sums, f"{family.name} {name}")


@EVERY
def test_parametrized_and_weight_normed_modules(family: Family) -> None:
    original, patched = pair(family)
    for model in (original, patched):
        torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].self_attn.o_proj)
        norm = first_norm(model, 1)
        torch.nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    with torch.no_grad():
        expected, actual = (model(ids(), use_cache=False).logits for model in (original, patched))
    same(actual, expected, family.name)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight
