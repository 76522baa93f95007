"""Both names of the cache, `past_key_values` and `cache` (transformers >= 5.24), and attention that has neither."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.fresh_python import run_python
from support.tiny_llama import close, greedy, tiny
from torch_infini.patch import patch_model, unpatch_model

transformers: Any = pytest.importorskip("transformers")
from transformers.models.bart.modeling_bart import BartAttention  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer  # noqa: E402

from torch_infini.patch.layers.attention import Attention  # noqa: E402
from torch_infini.patch.layers.continuous import continuous_attention_forward  # noqa: E402
from torch_infini.patch.layers.linear_attention import forward_with  # noqa: E402
from torch_infini.patch.layers.plain_attention import PlainAttention  # noqa: E402
from torch_infini.patch.own_forward import (  # noqa: E402
    arguments_of,
    cache_name,
    cache_of,
    code_of,
    forwards_of,
    with_older_names,
    with_parameter,
)
from torch_infini.patch.paged.rotation import computes_anew, position_modules  # noqa: E402
from torch_infini.patch.swap import patched_class  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("past_key_values", "cache")
WIDTH = 64


def translated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Take the cache under its older name too, as transformers 5.24 does."""

    @functools.wraps(forward)
    def decorated(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            kwargs["cache"] = kwargs.pop("past_key_values")
        return forward(*args, **kwargs)

    return decorated


class CacheAttention(LlamaAttention):  # type: ignore[misc, valid-type]
    """Llama's attention, which calls the cache `cache` under any release."""

    @translated
    def forward(  # type: ignore[no-untyped-def]
        self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs
    ):
        return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)


class CacheLayer(LlamaDecoderLayer):  # type: ignore[misc, valid-type]
    """Llama's layer over that attention."""

    @translated
    def forward(self, hidden_states, attention_mask=None, position_ids=None, cache=None, **kwargs):  # type: ignore[no-untyped-def]
        x = self.input_layernorm(hidden_states)
        x, _ = self.self_attn(x, attention_mask=attention_mask, position_ids=position_ids, cache=cache, **kwargs)
        hidden_states = hidden_states + x
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class PastAttention(LlamaAttention):  # type: ignore[misc, valid-type]
    """Llama's attention with the older name under any release."""

    def forward(  # type: ignore[no-untyped-def]
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)


class PastLayer(LlamaDecoderLayer):  # type: ignore[misc, valid-type]
    """Llama's layer over that attention."""

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):  # type: ignore[no-untyped-def]
        x, more = self.input_layernorm(hidden_states), {"position_ids": position_ids, **kwargs}
        x, _ = self.self_attn(x, attention_mask=attention_mask, past_key_values=past_key_values, **more)
        hidden_states = hidden_states + x
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class OtherAttention(LlamaAttention):  # type: ignore[misc, valid-type]
    """Attention of a release to come."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, memory=None, **kwargs):  # type: ignore[no-untyped-def]
        return super().forward(hidden_states, position_embeddings, attention_mask, memory, **kwargs)


def model_with(attention: type[nn.Module], layer: type[nn.Module]) -> Any:
    """A tiny Llama with these classes."""
    model = tiny()
    for one in model.model.layers:
        one.__class__, one.self_attn.__class__ = layer, attention
    return model


BY_NAME = {"past_key_values": (PastAttention, PastLayer), "cache": (CacheAttention, CacheLayer)}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def in_steps(model: Any, call: Callable[[Any, Tensor, Any, Any], Tensor]) -> Tensor:
    """Outputs of the first layer for a prompt and two more tokens on one cache; call(layer, x, cos and sin, cache)."""
    cache, found = transformers.DynamicCache(), []
    for start, length in ((0, 5), (5, 1), (6, 1)):
        x = random(1, 7, WIDTH)[:, start : start + length]
        rotation = model.model.rotary_emb(x, torch.arange(start, start + length)[None])
        found.append(call(model.model.layers[0], x.clone(), rotation, cache))
    return torch.cat(found, 1)


def by_layer(name: str) -> Callable[[Any, Tensor, Any, Any], Tensor]:
    return lambda layer, x, rotation, cache: layer(x, position_embeddings=rotation, **{name: cache})


def by_position(layer: Any, x: Tensor, rotation: Any, cache: Any) -> Tensor:
    result: Tensor = layer.self_attn(x, rotation, None, cache)[0]
    return result


@pytest.mark.parametrize("name", NAMES)
def test_either_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patched layers and attention take the cache as their classes do, and compute with our ops."""
    model = model_with(*BY_NAME[name])
    with torch.no_grad():
        before = [in_steps(model, call) for call in (by_layer(name), by_position)]
    # A newer release's own loop calls its layers by the newer name alone.
    generates = name in ("cache", cache_name(LlamaDecoderLayer.forward))
    expected = greedy(model) if generates else None
    patch_model(model, strict=True)
    layer, own = model.model.layers[0], arguments_of(BY_NAME[name][0].forward)
    assert list(inspect.signature(layer.self_attn.forward).parameters) == own
    assert arguments_of(layer.self_attn.compute)[1:] == own
    for one in (model, copy.deepcopy(model)) if generates else ():
        assert greedy(one).tolist() == expected.tolist()
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(Attention, "by_original", None)  # nothing falls back
        for call, one in zip((by_layer(name), by_position), before, strict=True):
            close(in_steps(model, call), one)
    with torch.no_grad():
        attention = lambda one, x, rotation, cache: one.self_attn(x, rotation, **{name: cache})[0]  # noqa: E731
        close(in_steps(model, attention), before[1])
        layer.train(), layer.requires_grad_(False)
        vars(layer.self_attn)["attention_dropout"] = 1e-30  # the original's forward
        close(in_steps(model, by_layer(name)), before[0])
    unpatch_model(model)
    assert type(layer) is BY_NAME[name][1] and type(layer.self_attn) is BY_NAME[name][0]


def test_the_older_name_of_a_newer_class() -> None:
    """The original's forward translates it, so that it runs."""
    model = model_with(CacheAttention, CacheLayer)
    with torch.no_grad():
        before = in_steps(model, by_layer("cache"))
        patch_model(model, strict=True)
        close(in_steps(model, by_layer("past_key_values")), before)


def test_gradients_of_a_cache() -> None:
    """A learned prefix gets its gradient under either name."""
    for name in NAMES:
        model = model_with(*BY_NAME[name])
        model.requires_grad_(False)
        patch_model(model, strict=True)
        cache = transformers.DynamicCache()
        prefix = random(1, 2, 3, 16).requires_grad_()
        cache.update(prefix, prefix * 1, 0)
        x = random(1, 2, WIDTH)
        rotation = model.model.rotary_emb(x, torch.arange(3, 5)[None])
        by_layer(name)(model.model.layers[0], x, rotation, cache).sum().backward()
        assert prefix.grad is not None and prefix.grad.abs().max() > 0


def test_attention_with_another_argument_is_left() -> None:
    model = model_with(OtherAttention, LlamaDecoderLayer)
    report = patch_model(model)
    reasons = {row.reason for row in report.left if row.name.endswith("self_attn")}
    assert reasons == {
        "its forward must have an argument past_key_values or cache, got (hidden_states, position_embeddings, "
        "attention_mask, memory, kwargs)"
    }
    with pytest.raises(ValueError, match=r"self_attn \(its forward must have an argument past_key_values or cache"):
        patch_model(model_with(OtherAttention, LlamaDecoderLayer), strict=True)


@pytest.mark.parametrize(("attention", "layer"), [(PastAttention, CacheLayer), (CacheAttention, PastLayer)])
def test_a_layer_that_renames_the_cache_is_left(attention: type[nn.Module], layer: type[nn.Module]) -> None:
    """What it passes on is not what it was called with."""
    model = model_with(attention, layer)
    report = patch_model(model)
    names = [cache_name(cls.forward) for cls in (layer, attention)]
    reasons = {row.reason for row in report.left if row.name.rpartition(".")[2].isdigit()}
    assert reasons == {f"its argument {names[0]} is {names[1]} of its attention"}


def test_attention_without_its_own_projections() -> None:
    """BART's, under either name."""

    class Newer(BartAttention):  # type: ignore[misc, valid-type]
        @translated
        def forward(self, hidden_states, key_value_states=None, cache=None, attention_mask=None, **kwargs):  # type: ignore[no-untyped-def]
            past = {cache_name(BartAttention.forward): cache}
            return super().forward(hidden_states, key_value_states, attention_mask=attention_mask, **past, **kwargs)

    for cls in (BartAttention, Newer):
        plan = PlainAttention.plans(cls(64, 4, config=transformers.BartConfig(d_model=64)))[0]
        assert plan.cache == cache_name(cls.forward) and plan.cache in plan.arguments


def test_no_cost_of_the_older_name() -> None:
    """The class of an older release has the function itself; a newer one's a copy that all share."""

    class Again(CacheAttention):
        pass

    assert patched_class(Attention, PastAttention).forward is Attention.forward
    newer = [patched_class(Attention, cls).forward for cls in (CacheAttention, Again)]
    assert newer[0] is newer[1] is not Attention.forward
    with pytest.raises(ValueError, match="cannot call past_key_values hidden_states"):
        with_parameter(Attention.forward, "past_key_values", "hidden_states")  # type: ignore[arg-type]


def test_code_below_decorators() -> None:
    code = code_of(CacheLayer.forward)
    assert code is not None and "self_attn" in code.co_names and code_of(len) is None
    assert cache_name(CacheLayer.forward) == "cache" and cache_name(nn.Linear.forward) == ""


def test_classes_that_pass_arguments_on() -> None:
    """The nearest that names the cache counts, until one takes no *args."""

    class Passing(CacheAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    class Naming(CacheAttention):
        def forward(self, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
            return super().forward(*args, cache=past_key_values, **kwargs)

    class Unnamed(CacheAttention):
        def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **kwargs)

    found = [cache_of(cls) for cls in (Passing, Naming, Unnamed)]
    assert found == ["cache", "past_key_values", ""]
    assert forwards_of(Passing)[1:] == forwards_of(Naming)[1:] == [CacheAttention.forward]
    assert patched_class(Attention, Naming).forward is Attention.forward


def recurrent(self: Any, hidden_states: Any, cache: Any = None) -> Any:
    return hidden_states, cache


def test_older_names_without_decorators() -> None:
    class Mixer(nn.Module):
        forward = translated(recurrent)

    made = forward_with(Mixer, {}, "test")
    for name in ("cache", "cache_params", "past_key_values"):
        assert made(None, 1, **{name: 2}) == (1, 2)
    assert with_older_names(recurrent)(None, 1, 2) == (1, 2)
    Mixer.forward = recurrent  # type: ignore[method-assign]
    assert forward_with(Mixer, {}, "test").__code__ is recurrent.__code__


@pytest.mark.parametrize("name", NAMES)
def test_what_generation_does_with_a_cache(name: str) -> None:
    class Model:
        device = torch.device("cpu")

        def prepare_inputs_for_generation(self, ids: Any, past_key_values: Any = None, use_cache: Any = None) -> Any:
            return {name: past_key_values if past_key_values.get_seq_length() < 3 else None}

    if name == "cache":
        own: Any = Model.prepare_inputs_for_generation
        Model.prepare_inputs_for_generation = with_parameter(own, "past_key_values", name)  # type: ignore[method-assign]
    assert [computes_anew(Model(), length) for length in (2, 3)] == [False, True]


@pytest.mark.parametrize("name", NAMES)
def test_positions_that_count_from_a_cache(name: str) -> None:
    def forward(self: Any, ids: Any, past_key_values_length: int = 0, position_ids: Any = None) -> None:
        pass

    own = forward if name == "past_key_values" else with_parameter(forward, "past_key_values_length", "cache_length")
    module = type("Positions", (nn.Embedding,), {"forward": own})(4, 4)
    assert position_modules(nn.Sequential(module, nn.Embedding(4, 4))) == [module]


def test_continuous_batching_after_the_cache() -> None:
    """Since 5.24 attention itself asks the cache, and the function gets all keys."""
    q, k, v = random(1, 4, 3, 16), random(1, 2, 7, 16), random(1, 2, 7, 16)
    lengths = {"cu_seq_lens_q": torch.tensor([0, 1, 3]), "cu_seq_lens_k": torch.tensor([0, 5, 7])}
    found, _ = continuous_attention_forward(nn.Identity(), q, k, v, None, **lengths)
    for rows, keys in ((slice(0, 1), slice(0, 5)), (slice(1, 3), slice(5, 7))):
        parts = q[:, :, rows], *(x[:, :, keys].repeat_interleave(2, 1) for x in (k, v))
        mask = torch.ones(rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool)
        mask = mask.tril(keys.stop - keys.start - (rows.stop - rows.start))
        expected = nn.functional.scaled_dot_product_attention(*parts, mask).transpose(1, 2)
        torch.testing.assert_close(found[:, rows], expected)


def test_every_door_asks_for_transformers() -> None:
    """Without transformers, or with release 4, each says what to install."""
    code = (
        "import json, pathlib, sys, tempfile, types, torch, torch_infini\n"
        "folder = tempfile.mkdtemp()\n"
        "pathlib.Path(folder, 'config.json').write_text(json.dumps({'model_type': 'gemma3_text'}))\n"
        "old = types.ModuleType('transformers')\n"
        "old.__version__ = '4.57.1'\n"
        "for module in (None, old):\n"
        "    sys.modules['transformers'] = module\n"
        "    for name in ('load', 'load_patched', 'describe', 'LLM'):\n"
        "        try: getattr(torch_infini, name)(folder)\n"
        "        except ImportError as error: print(error)\n"
    )
    said = run_python(code, check=True).stdout.splitlines()
    install = "run `pip install 'transformers>=5,<5.25'`."
    doors = [f"torch_infini.{name} needs transformers" for name in ("load", "load_patched", "describe", "LLM")]
    assert said == [f"{door}: {install}" for door in doors] + [f"{door} >= 5, got 4.57.1: {install}" for door in doors]


@pytest.mark.parametrize("name", NAMES)
def test_attention_that_passes_its_arguments_on(name: str) -> None:
    """Its names are those of the class it derives from."""
    attention, layer = BY_NAME[name]

    class Passing(attention):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = model_with(Passing, layer)
    with torch.no_grad():
        before = in_steps(model, by_layer(name))
        patch_model(model, strict=True)
        assert arguments_of(type(model.model.layers[0].self_attn).forward)[3] == name
        close(in_steps(model, by_layer(name)), before)
        vars(model.model.layers[0].self_attn)["attention_dropout"] = 1e-30
        model.model.layers[0].train()
        model.requires_grad_(False)
        close(in_steps(model, by_layer(name)), before)
