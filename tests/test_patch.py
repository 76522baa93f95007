"""patch_model on tiny random LLaMAs: same numbers, one instance only, undone to the bit.

Everything is compared with the same model before it was patched, or with an unpatched copy of it.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from support.rounding import assert_same_but_rounding
from support.tiny_llama import (
    ALL_CALLS,
    LAYERS,
    PROMPT,
    UNCACHED_CALLS,
    CallCounter,
    calls,
    close,
    config,
    config_values,
    identity,
    logits,
    tiny,
    tokens,
)
from torch_infini.patch import is_patched, patch_model, patched, unpatch_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


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
    with patched(model, strict=True):
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
    with patched(model, strict=True):
        assert logits(model, ids).dtype == dtype
        assert calls(model, ids) == ALL_CALLS
        assert distance() <= 1.1 * unpatched


def test_base_model() -> None:
    model, ids = tiny(cls="LlamaModel"), tokens()
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        with patched(model, strict=True):
            close(model(ids).last_hidden_state, expected)


def test_one_token_and_one_sequence() -> None:
    model = tiny()
    for ids in (tokens(1, 1), tokens(1, 2), tokens(3, 1)):
        expected = logits(model, ids)
        with patched(model, strict=True):
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
    with patched(model, strict=True):
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
    """is_causal set on the modules, as embedding models made of decoders do."""
    model, ids = tiny(), tokens()
    causal = logits(model, ids)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    expected = logits(model, ids)
    assert not torch.allclose(expected, causal)
    with patched(model, strict=True):
        close(logits(model, ids), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_softcap(dtype: torch.dtype) -> None:
    """What transformers calls with a softcap, as Gemma 2 does, against Gemma 2's own attention."""
    from torch_infini.patch.layers.interface import attention_forward

    eager = transformers.models.gemma2.modeling_gemma2.eager_attention_forward
    module = nn.Module().eval()
    module.num_key_value_groups, module.is_causal = 2, True
    g = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, heads, 11, 16, generator=g).to(dtype) * 3 for heads in (4, 2, 2))
    mask = torch.zeros(11, 11, dtype=dtype).masked_fill(torch.ones(11, 11).triu(1) > 0, torch.finfo(dtype).min)
    exact, weights = eager(module, *(t.double() for t in (q, k, v)), mask.double(), scaling=0.5, softcap=4.0)
    # Scores, weights, results, one behind the other; 16 terms in a score.
    near = lambda actual, exact: assert_same_but_rounding(actual, exact.to(dtype), terms=16, depth=3)
    for given in (None, mask[None, None], mask[None, None] == 0):
        for more in ({}, {"output_attentions": True}):
            with CallCounter() as counter:
                actual = attention_forward(module, q, k, v, given, scaling=0.5, softcap=4.0, **more)
            assert counter.counts["attention"] == (0 if more else 1)
            near(actual[0], exact)
            if more:
                near(actual[1], weights)
    with CallCounter() as counter:  # gradients: plain torch, for the kernel has no backward and SDPA no cap
        followed = attention_forward(module, q.requires_grad_(), k, v, None, scaling=0.5, softcap=4.0)[0]
    assert followed.requires_grad and not counter.counts
    near(followed, exact)


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
    clone = copy.deepcopy(model)
    unpatch_model(model)
    assert is_patched(clone) and calls(clone, ids) == ALL_CALLS
    close(logits(clone, ids), expected)
    assert clone.config is not model.config and clone.config._attn_implementation == "infini"
    unpatch_model(clone)
    assert torch.equal(logits(clone, ids), expected) and calls(clone, ids) == {}
    assert clone.config._attn_implementation == "sdpa" and clone.config is clone.model.layers[0].self_attn.config


def test_pickle() -> None:
    model, ids = tiny(), tokens()
    patch_model(model)
    clone = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(clone, ids), logits(model, ids)) and calls(clone, ids) == ALL_CALLS
    unpatch_model(clone)
    assert calls(clone, ids) == {}


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
