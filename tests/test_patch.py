"""patch_model on tiny random LLaMAs: same numbers, same tokens, one instance only, undone to the bit.

Everything is compared with the same model before it was patched, or with an unpatched copy of it.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_infini
from torch_infini.patch import PatchReport, is_patched, patch_model, unpatch_model
from torch_infini.testing import threads_set_to

transformers = pytest.importorskip("transformers")

LAYERS = 2
PROMPT = 9
Model = transformers.PreTrainedModel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models gain nothing from several, and lose much to them on a busy machine."""
    with threads_set_to(1):
        yield


def config(**changes: Any) -> transformers.LlamaConfig:
    values = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # large enough that tokens depend on all of the model
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    }
    return transformers.LlamaConfig(**{**values, **changes})


def tiny(dtype: torch.dtype = torch.float32, cls: type[Model] = transformers.LlamaForCausalLM, **changes: Any) -> Model:
    torch.manual_seed(1)
    model = cls(config(**changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms' weights are ones, biases zeros: neither would show a mistake
                parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else 0))
    return model.to(dtype)


def tokens(batch: int = 2, length: int = PROMPT) -> Tensor:
    return torch.randint(2, 128, (batch, length), generator=torch.Generator().manual_seed(2))


def logits(model: Model, *args: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(*args, **kwargs).logits


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def identity(model: nn.Module) -> dict[str, tuple[type, dict[str, Any]]]:
    """All that a patch may touch: each module's class and attributes."""
    return {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}


def config_values(model: Model) -> dict[str, Any]:
    return dict(vars(model.config))


class CallCounter(TorchDispatchMode):
    """Counts the infini ops that the body calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "infini":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


ALL_CALLS = {
    "fused_linear": 2 * LAYERS,
    "linear": 2 * LAYERS + 1,
    "qkv_rope_cache": LAYERS,
    "attention": LAYERS,
    "swiglu": LAYERS,
    "rms_norm": 1,
    "add_rms_norm": 2 * LAYERS,
}
UNCACHED_CALLS = {**{name: count for name, count in ALL_CALLS.items() if name != "qkv_rope_cache"}, "rope_": LAYERS}


def calls(model: Model, *args: Any, **kwargs: Any) -> dict[str, int]:
    with CallCounter() as counter, torch.no_grad():
        model(*args, **kwargs)
    return dict(counter.counts)


@contextmanager
def patched(model: nn.Module) -> Iterator[nn.Module]:
    patch_model(model, strict=True)
    yield model
    unpatch_model(model)


# Numbers


VARIANTS = {
    "GQA": {},
    "MHA": {"num_key_value_heads": 4},
    "MQA": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "head_dim": {"head_dim": 32},
    "eps": {"rms_norm_eps": 1e-2},
    "eager": {"attn_implementation": "eager"},
    "swish": {"hidden_act": "swish"},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "dynamic rope": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits(variant: str) -> None:
    model, ids = tiny(**VARIANTS[variant]), tokens()
    expected = logits(model, ids)
    with patched(model):
        close(logits(model, ids), expected)
        with torch.inference_mode():
            close(model(ids).logits, expected)
        assert calls(model, ids) == ALL_CALLS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_logits(dtype: torch.dtype) -> None:
    """The patched half-precision model is as near to the float32 model as the unpatched one."""
    model, ids = tiny(dtype), tokens(4, 33)
    exact = logits(copy.deepcopy(model).float(), ids)
    distance = lambda: (logits(model, ids).float() - exact).norm()
    unpatched = distance()
    with patched(model):
        assert logits(model, ids).dtype == dtype
        assert calls(model, ids) == ALL_CALLS
        assert distance() <= 1.1 * unpatched


def test_base_model() -> None:
    model, ids = tiny(cls=transformers.LlamaModel), tokens()
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with patched(model):
            close(model(ids).last_hidden_state, expected)


def test_one_token_and_one_sequence() -> None:
    model = tiny()
    for ids in (tokens(1, 1), tokens(1, 2), tokens(3, 1)):
        expected = logits(model, ids)
        with patched(model):
            close(logits(model, ids), expected)


def test_masks() -> None:
    """Padding on either side, packed sequences, own 4-dimensional masks, attention in both directions."""
    model, ids = tiny(), tokens()
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :4], right[1, -3:] = 0, 0
    window = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril().triu(-2).expand(2, 1, -1, -1)
    additive = torch.zeros(2, 1, PROMPT, PROMPT).masked_fill(~window, torch.finfo(torch.float32).min)
    prefix = torch.ones(PROMPT, PROMPT, dtype=torch.bool).tril(4).expand(2, 1, -1, -1)  # sees later tokens too
    packed = torch.cat((torch.arange(4), torch.arange(PROMPT - 4))).expand(2, -1)
    cases: dict[str, dict[str, Any]] = {
        "left": {"attention_mask": left, "position_ids": (left.cumsum(-1) - 1).clamp(min=0)},
        "right": {"attention_mask": right},
        "window": {"attention_mask": window},
        "additive": {"attention_mask": additive},
        "prefix": {"attention_mask": prefix},
        "packed": {"position_ids": packed, "use_cache": False},
        "both directions": {"is_causal": False},
        "no cache": {"use_cache": False},
        "last only": {"logits_to_keep": 1},
    }
    expected = {name: logits(model, ids, **kwargs) for name, kwargs in cases.items()}
    assert not torch.allclose(expected["packed"], expected["no cache"])
    with patched(model):
        for name, kwargs in cases.items():
            close(logits(model, ids, **kwargs), expected[name])
            if name != "both directions":  # runs the original forward, which calls attention alone
                expected_calls = UNCACHED_CALLS if kwargs.get("use_cache") is False else ALL_CALLS
                assert calls(model, ids, **kwargs) == expected_calls, name


def test_hidden_states_and_attentions() -> None:
    """Whole attention matrices come from the original forward, even where the unpatched model would not give any."""
    eager, ids = tiny(attn_implementation="eager"), tokens()
    ask = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected = eager(ids, **ask)
        for model in (eager, tiny()):
            patch_model(model)
            outputs = model(ids, **ask)
            assert len(outputs.hidden_states) == LAYERS + 1 and len(outputs.attentions) == LAYERS
            for actual, wanted in zip(
                (*outputs.hidden_states, *outputs.attentions, outputs.logits),
                (*expected.hidden_states, *expected.attentions, expected.logits),
                strict=True,
            ):
                close(actual, wanted)


def test_attention_in_both_directions() -> None:
    """As those who make embeddings of a decoder set it: on the modules."""
    model, ids = tiny(), tokens()
    causal = logits(model, ids)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    expected = logits(model, ids)
    assert not torch.allclose(expected, causal)
    with patched(model):
        close(logits(model, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_softcap(dtype: torch.dtype) -> None:
    """What transformers calls with a softcap, as Gemma 2 does, against Gemma 2's own attention."""
    from torch_infini.patch.interface import attention_forward

    eager = transformers.models.gemma2.modeling_gemma2.eager_attention_forward
    module = nn.Module().eval()
    module.num_key_value_groups, module.is_causal = 2, True
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, 11, 16, generator=g).to(dtype) * 3 for heads in (4, 2, 2))
    mask = torch.zeros(11, 11, dtype=dtype).masked_fill(torch.ones(11, 11).triu(1) > 0, torch.finfo(dtype).min)
    exact, weights = eager(module, *(t.double() for t in (q, k, v)), mask.double(), scaling=0.5, softcap=4.0)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for given in (None, mask[None, None], mask[None, None] == 0):
        for more in ({}, {"output_attentions": True}):
            with CallCounter() as counter:
                actual = attention_forward(module, q, k, v, given, scaling=0.5, softcap=4.0, **more)
            assert counter.counts["attention"] == (0 if more else 1)
            torch.testing.assert_close(actual[0].double(), exact, rtol=tolerance, atol=tolerance)
            if more:
                torch.testing.assert_close(actual[1].double(), weights, rtol=tolerance, atol=tolerance)
    with CallCounter() as counter:  # gradients: plain torch, for the kernel has no backward and SDPA no cap
        followed = attention_forward(module, q.requires_grad_(), k, v, None, scaling=0.5, softcap=4.0)[0]
    assert followed.requires_grad and not counter.counts
    torch.testing.assert_close(followed.double(), exact, rtol=tolerance, atol=tolerance)


# Generation


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "beams, static": {"num_beams": 3, "cache_implementation": "static"},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "chunked prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("kind", GENERATION)
def test_generate(kind: str, padded: bool) -> None:
    model = tiny()
    ids = tokens(1 if kind == "prompt lookup" else 3)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
        if len(ids) > 1:
            mask[1, :1] = 0
        ids = ids.masked_fill(mask == 0, 0)

    def generate() -> Tensor:
        torch.manual_seed(3)
        return model.generate(ids, attention_mask=mask, max_new_tokens=14, **{"do_sample": False, **GENERATION[kind]})

    expected = generate()
    assert len(set(expected[0, PROMPT:].tolist())) > 4
    with patched(model), CallCounter() as counter:
        assert torch.equal(generate(), expected)
        assert counter.counts["attention"] and counter.counts["attention"] * 2 == counter.counts["fused_linear"]


def static_cache(model: Model) -> Any:
    return transformers.StaticCache(config=model.config, max_cache_len=24)


def dynamic_cache(model: Model) -> Any:
    return transformers.DynamicCache(config=model.config)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("make_cache", [dynamic_cache, static_cache])
def test_continuation(make_cache: Callable[[Model], Any], padded: bool) -> None:
    """Calls of several tokens that continue a cache, as with a cached prefix: 4, then 1, 3 and 1."""
    model, ids = tiny(), tokens()
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def run() -> list[Tensor]:
        cache, results, start = make_cache(model), [], 0
        for count in (4, 1, 3, 1):
            end = start + count
            kwargs = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]} if padded else {}
            results.append(logits(model, ids[:, start:end], past_key_values=cache, **kwargs))
            start = end
        return results

    expected = run()
    with patched(model):
        for actual, wanted in zip(run(), expected, strict=True):
            close(actual, wanted)
    if not padded:
        close(torch.cat(expected, 1), logits(model, ids))


def test_cache_of_an_unpatched_model() -> None:
    """A cache that the unpatched model has begun is continued by the patched one."""
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    cache = dynamic_cache(model)
    logits(model, ids[:, :5], past_key_values=cache)
    with patched(model):
        close(logits(model, ids[:, 5:], past_key_values=cache), expected[:, 5:])


# One instance, and back


def test_unpatch_restores_everything() -> None:
    model, ids = tiny(), tokens()
    before, values, expected = identity(model), config_values(model), logits(model, ids)
    patch_model(model)
    assert is_patched(model) and identity(model) != before and model.config._attn_implementation == "infini"
    logits(model, ids)
    assert unpatch_model(model) is None
    assert not is_patched(model) and identity(model) == before and config_values(model) == values
    assert torch.equal(logits(model, ids), expected)


def test_only_one_of_two_models() -> None:
    shared = config()
    one, two = transformers.LlamaForCausalLM(shared).eval(), transformers.LlamaForCausalLM(shared).eval()
    before, values, expected = identity(two), config_values(two), logits(two, tokens())
    patch_model(one)
    assert identity(two) == before and config_values(two) == values
    assert calls(two, tokens()) == {} and calls(one, tokens()) == ALL_CALLS
    assert torch.equal(logits(two, tokens()), expected)
    two.config.use_cache = False
    one.config.pad_token_id = 7
    unpatch_model(one)
    assert one.config is shared and shared._attn_implementation == "sdpa"
    assert (shared.use_cache, shared.pad_token_id) == (False, 7)  # what was set meanwhile stays


def test_patching_twice() -> None:
    model = tiny()
    first = patch_model(model)
    before = identity(model)
    second = patch_model(model, strict=True)
    assert second.already_patched and not first.already_patched
    assert second.rows == first.rows and identity(model) == before
    assert str(second).startswith("LlamaForCausalLM (llama) was patched already: 13 modules replaced, 0 left\n")
    unpatch_model(model)
    assert patch_model(model) == first


def test_deepcopy() -> None:
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    patch_model(model)
    twin = copy.deepcopy(model)
    unpatch_model(model)
    assert is_patched(twin) and calls(twin, ids) == ALL_CALLS
    close(logits(twin, ids), expected)
    assert twin.config is not model.config and twin.config._attn_implementation == "infini"
    unpatch_model(twin)
    assert torch.equal(logits(twin, ids), expected) and calls(twin, ids) == {}
    assert twin.config._attn_implementation == "sdpa" and twin.config is twin.model.layers[0].self_attn.config


def test_pickle() -> None:
    model, ids = tiny(), tokens()
    patch_model(model)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(twin, ids), logits(model, ids)) and calls(twin, ids) == ALL_CALLS
    unpatch_model(twin)
    assert calls(twin, ids) == {}


def test_a_layer_in_two_places() -> None:
    model, ids = tiny(), tokens()
    model.model.layers[1] = model.model.layers[0]
    before, expected = identity(model), logits(model, ids, use_cache=False)
    report = patch_model(model, strict=True)
    assert report.counts["add_rms_norm"] == LAYERS
    close(logits(model, ids, use_cache=False), expected)
    unpatch_model(model)
    assert identity(model) == before


def test_names_and_classes_stay() -> None:
    model = tiny()
    before = {name: type(module) for name, module in model.named_modules()}
    keys, pointers = list(model.state_dict()), [p.data_ptr() for p in model.parameters()]
    patch_model(model)
    for name, module in model.named_modules():
        assert isinstance(module, before[name]) and type(module).__name__ == before[name].__name__
    assert list(model.state_dict()) == keys and [p.data_ptr() for p in model.parameters()] == pointers
    assert "(mlp): LlamaMLP[infini](" in str(model)


def test_save_and_load(tmp_path: Any) -> None:
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    patch_model(model)
    model.save_pretrained(tmp_path)
    assert "infini" not in (tmp_path / "config.json").read_text()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert not is_patched(loaded) and torch.equal(logits(loaded, ids), expected)
    # And the other way: weights may be loaded or exchanged while the model is patched.
    other = tiny(rms_norm_eps=1e-5).state_dict()
    with torch.no_grad():
        for assign in (False, True):
            changed = {name: value * (0.9 if assign else 1.1) for name, value in other.items()}
            model.load_state_dict(changed, assign=assign)
            loaded.load_state_dict(changed)
            close(logits(model, ids), logits(loaded, ids))
    close(logits(model.to(torch.float64).to(torch.float32), ids), logits(loaded, ids))


# Stepping aside


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
    with patched(model):
        assert all(map(torch.equal, gradients(), expected))
        assert calls(model, ids) == ALL_CALLS


def test_training_some_parameters() -> None:
    """With frozen weights each layer decides for itself: those before the first trained one keep their ops."""
    model, ids = tiny().requires_grad_(False), tokens()
    model.lm_head.weight.requires_grad_(True)
    model(ids).logits.sum().backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    with patched(model):
        with CallCounter() as counter:
            model(ids).logits.sum().backward()
        torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=1e-5, atol=1e-3)
        assert dict(counter.counts) == {**ALL_CALLS, "linear": 2 * LAYERS}


def test_dropout_without_gradients() -> None:
    model, ids = tiny(attention_dropout=0.5).train(), tokens()
    torch.manual_seed(5)
    expected = logits(model, ids)
    with patched(model):
        torch.manual_seed(5)
        close(logits(model, ids), expected)
        assert all(module.training for module in model.modules())


def test_autocast() -> None:
    model, ids = tiny(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(model, ids)
        with patched(model):
            assert logits(model, ids).dtype == torch.bfloat16
            torch.testing.assert_close(logits(model, ids), expected)


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
    with patched(model):
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
    with patched(model):
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
    with patched(model), torch.no_grad():
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


# What is left, and errors


class ScaledMLP(transformers.models.llama.modeling_llama.LlamaMLP):
    """Has the names and shapes of LlamaMLP, and in some layers another formula."""

    scale = 1.1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class OtherRounding(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    """Multiplies by the weight before it rounds, as some families do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(
            x.dtype
        )


class UnitOffset(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    """Gemma's: the scale is 1 + weight, rounded at the end."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Centred(transformers.models.llama.modeling_llama.LlamaRMSNorm):
    """No RMSNorm: it takes the mean away."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


# Norms, and the number of their rounding in torch.ops.infini.rms_norm; None: none of them.
ROUNDINGS: dict[type[nn.Module], int | None] = {
    transformers.models.llama.modeling_llama.LlamaRMSNorm: 1,
    OtherRounding: 0,
    UnitOffset: 2,
    Centred: None,
}


class ScaledByPosition(transformers.models.llama.modeling_llama.LlamaAttention):
    """Follows the positions, where they are far, in another way than through cos and sin."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, weights = super().forward(hidden_states, *args, **kwargs)
        return output * (1 + 0.1 * (kwargs["position_ids"].max() > 8192)), weights


def scale_by_position(model: Model) -> None:
    for layer in model.model.layers:
        layer.self_attn.__class__ = ScaledByPosition


def scale_mlp(model: Model) -> None:
    for layer in model.model.layers:
        layer.mlp.__class__ = ScaledMLP
    model.model.layers[0].mlp.scale = 1.0


def bind_forward(model: Model) -> None:
    attention = model.model.layers[0].self_attn
    attention.forward = attention.forward


def own_part(model: Model) -> None:
    attention = model.model.layers[0].self_attn
    attention.sinks = nn.Parameter(torch.zeros(4))


class RaisingMLP(transformers.models.llama.modeling_llama.LlamaMLP):
    """Fails on the small input by which it is checked, as a module does that needs more than it is given there."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] == 3:
            raise ValueError("no such thing as three tokens")
        return super().forward(x)


def raising_mlp(model: Model) -> None:
    model.model.layers[1].mlp.__class__ = RaisingMLP


def another_layer(model: Model) -> None:
    model.model.layers[0].extra = nn.Linear(2, 2)


def another_norm(model: Model) -> None:
    model.model.layers[0].post_attention_layernorm = nn.LayerNorm(64)


def mixed_mlp(model: Model) -> None:
    model.model.layers[0].mlp.up_proj.bfloat16()


def replace_forward(model: Model) -> None:
    norm = model.model.layers[0].post_attention_layernorm
    norm.forward = lambda x: 2 * x


def double_head(model: Model) -> None:
    model.lm_head.double()


def meta_mlp(model: Model) -> None:
    model.model.layers[1].mlp.up_proj.to("meta")


def own_parameter(model: Model) -> None:
    class Buffer(nn.Parameter):
        pass

    model.model.layers[0].mlp.up_proj.weight = Buffer(model.model.layers[0].mlp.up_proj.weight.detach())


def asks_for_attentions(model: Model) -> None:
    model.config.output_attentions = True


LEFT: dict[Callable[[Model], None], dict[str, str]] = {
    scale_mlp: {"model.layers.1.mlp": "its own forward computes something else"},
    scale_by_position: {
        f"model.layers.{i}.self_attn": "its own forward computes something else" for i in range(LAYERS)
    },
    bind_forward: {"model.layers.0.self_attn": "its forward was replaced on the instance"},
    own_part: {"model.layers.0.self_attn": "it has parts that are not known: sinks"},
    raising_mlp: {"model.layers.1.mlp": "it cannot be checked against its own forward: no such thing as three tokens"},
    another_layer: {"model.layers.0": "its submodules are not self_attn, mlp and norms: extra, mlp, self_attn"},
    another_norm: {
        "model.layers.0": "its norms (input_layernorm) stand as in no layout that is known",
    },
    replace_forward: {
        "model.layers.0": "its post_attention_layernorm was left",
        "model.layers.0.post_attention_layernorm": "its forward was replaced on the instance",
    },
    double_head: {"lm_head": "weight is float64, not float32, bfloat16 or float16"},
    meta_mlp: {"model.layers.1.mlp": "up_proj.weight is on meta, not cpu"},
    mixed_mlp: {"model.layers.0.mlp": "its parameters have several dtypes"},
    own_parameter: {"model.layers.0.mlp": "up_proj.weight is a Buffer, not a plain parameter"},
    asks_for_attentions: {
        f"model.layers.{i}.self_attn": "config.output_attentions is set, and the kernel stores no attention weights"
        for i in range(LAYERS)
    },
}


@pytest.mark.parametrize("change", LEFT, ids=lambda change: change.__name__)
def test_left(change: Callable[[Model], None]) -> None:
    model, ids = tiny(attn_implementation="eager"), tokens()
    change(model)
    runs = change not in (double_head, meta_mlp, mixed_mlp)
    expected = logits(model, ids) if runs else None
    before, values = identity(model), config_values(model)
    listed = "; ".join(f"{name} ({reason})" for name, reason in LEFT[change].items())
    with pytest.raises(ValueError) as caught:
        patch_model(model, strict=True)
    assert str(caught.value) == f"torch_infini.patch_model: strict=True, but these would be left: {listed}"
    assert identity(model) == before and config_values(model) == values
    report = patch_model(model)
    assert {row.name: row.reason for row in report.left} == LEFT[change]
    assert len(report.replaced) == len(report.rows) - len(report.left)
    attention_left = any("self_attn" in name for name in LEFT[change])
    assert model.config._attn_implementation == ("eager" if attention_left else "infini")
    if runs:
        close(logits(model, ids), expected)
    unpatch_model(model)
    assert identity(model) == before and config_values(model) == values


@pytest.mark.parametrize("cls", ROUNDINGS, ids=lambda cls: cls.__name__)
def test_roundings(cls: type[nn.Module]) -> None:
    """Where a norm rounds is found out even in float32 with weights of ones, where it makes no difference."""
    model = tiny()
    norm = model.model.norm
    norm.__class__ = cls
    norm.weight.data.fill_(1)
    report = patch_model(model)
    assert [(row.name, row.reason) for row in report.left] == (
        [("model.norm", "its own forward computes something else")] if ROUNDINGS[cls] is None else []
    )
    if ROUNDINGS[cls] is None:
        return
    norm.weight.data.uniform_(0.5, 1.5)
    model.bfloat16()
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        expected = cls.forward(norm, x)
        others = [torch.ops.infini.rms_norm(x, norm.weight, norm.variance_epsilon, i) for i in range(3)]
        assert (norm(x) != expected).sum() <= 4  # of 4096: where the order of the sum decides
    assert norm._infini_plan.rounding == ROUNDINGS[cls]
    assert all((other != expected).sum() > 100 for i, other in enumerate(others) if i != ROUNDINGS[cls])


def test_other_activation() -> None:
    model, ids = tiny(hidden_act="gelu"), tokens()
    expected = logits(model, ids)
    report = patch_model(model)
    reason = "its activation is GELUActivation, neither SiLU nor GELU by tanh"
    assert [row.reason for row in report.left] == [reason] * LAYERS
    close(logits(model, ids), expected)


def test_report() -> None:
    model = tiny()
    scale_mlp(model)
    report = patch_model(model)
    assert isinstance(report, PatchReport)
    assert str(report) == (
        "LlamaForCausalLM (llama) patched: 12 modules replaced, 1 left\n"
        "  2 x  model.layers.*                           LlamaDecoderLayer     add_rms_norm\n"
        "  2 x  model.layers.*.self_attn                 LlamaAttention        fused_linear, rope, attention, linear"
        "  24.6 k parameters  98.3 kB\n"
        "  1 x  model.layers.*.mlp                       ScaledMLP             fused_linear, swiglu, linear         "
        "  30.7 k parameters  123 kB\n"
        "  2 x  model.layers.*.input_layernorm           LlamaRMSNorm          rms_norm                             "
        "  128 parameters     512 B\n"
        "  2 x  model.layers.*.post_attention_layernorm  LlamaRMSNorm          rms_norm                             "
        "  128 parameters     512 B\n"
        "  1 x  model.layers.*.mlp                       ScaledMLP             left                                 "
        "  30.7 k parameters  123 kB: its own forward computes something else\n"
        "  1 x  model.norm                               LlamaRMSNorm          rms_norm                             "
        "  64 parameters      256 B\n"
        "  1 x  model.rotary_emb                         LlamaRotaryEmbedding  rope (sliced once for all layers)\n"
        "  1 x  lm_head                                  Linear                linear                               "
        "  8.19 k parameters  32.8 kB"
    )
    assert sum(row.parameters for row in report.rows) == model.num_parameters() - 64 * 128
    assert report.counts["rms_norm"] == 2 * LAYERS + 1 and report.counts["left"] == 1


def test_unknown_family() -> None:
    wanted = "it has no decoder of the Llama family (embed_tokens, layers with self_attn and mlp, norm, rotary_emb)"
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    )
    for model, name in ((gpt2, "GPT2LMHeadModel"), (nn.Linear(2, 2), "Linear")):
        before = identity(model)
        report = patch_model(model)
        assert str(report) == f"{name} not patched: {wanted}" and not report.rows
        assert identity(model) == before and not is_patched(model)
        with pytest.raises(ValueError) as caught:
            patch_model(model, strict=True)
        assert str(caught.value) == f"torch_infini.patch_model: strict=True, but {name} cannot be: {wanted}"
    with pytest.raises(TypeError) as caught:
        patch_model(None)
    assert str(caught.value) == "torch_infini.patch_model: model must be a torch.nn.Module, got NoneType"


def test_unpatch_of_an_unpatched_model() -> None:
    for model in (tiny(), nn.Linear(2, 2), None):
        with pytest.raises(ValueError) as caught:
            unpatch_model(model)
        name = type(model).__name__
        assert str(caught.value) == f"torch_infini.unpatch_model: model must be patched, got a {name} that is not."


@pytest.mark.parametrize("first", ["outer", "inner"])
def test_part_of_a_patched_model(first: str) -> None:
    model = tiny()
    one, two = (model, model.model) if first == "outer" else (model.model, model)
    patch_model(one)
    before = identity(model)
    with pytest.raises(ValueError) as caught:
        patch_model(two)
    part = "layers.0" if first == "outer" else "model.layers.0"
    assert str(caught.value) == (
        f"torch_infini.patch_model: model must not contain patched modules, got {part}: "
        "first call unpatch_model with the model that patch_model was called with."
    )
    assert identity(model) == before


@pytest.mark.parametrize(("function", "call"), [("swap", 0), ("swap", 7), ("replace_config", 0)])
def test_failure_changes_nothing(monkeypatch: pytest.MonkeyPatch, function: str, call: int) -> None:
    import torch_infini.patch.apply as module

    real, count = getattr(module, function), iter(range(100))

    def failing(*args: Any) -> None:
        if next(count) == call:
            raise RuntimeError("planted")
        real(*args)

    monkeypatch.setattr(module, function, failing)
    model = tiny().train()
    before, values = identity(model), config_values(model)
    with pytest.raises(RuntimeError, match="planted"):
        patch_model(model)
    assert identity(model) == before and config_values(model) == values and not is_patched(model)


def test_import_is_cheap() -> None:
    """`import torch_infini` leaves transformers alone, and without it patch_model says what is missing."""
    code = (
        "import sys, torch, torch_infini\n"
        "assert 'transformers' not in sys.modules\n"
        "sys.modules['transformers'] = None\n"
        "try: torch_infini.patch_model(torch.nn.Identity())\n"
        "except ImportError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "torch_infini.patch_model needs transformers: run `pip install 'transformers>=5,<6'`.\n"


def test_exports() -> None:
    assert torch_infini.patch_model is patch_model and torch_infini.unpatch_model is unpatch_model
    assert torch_infini.PatchReport is PatchReport
