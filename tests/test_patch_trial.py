"""The run of two tokens before a model counts as patched, and what verify=True makes of a difference or of NaN.

Neither may leave a trace in the model; a patched model that fails is taken back.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.tiny_llama import calls, close, config_values, greedy, identity, logits, tiny, tokens
from torch_infini.patch import is_patched, patch_model
from torch_infini.patch.layers.attention import Attention
from torch_infini.patch.layers.mlp import GatedMLP

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

Model = Any


def deepseek_v2(**changes: Any) -> Model:
    """Its rotary embedding returns one complex tensor."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None}
    sizes |= {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "pad_token_id": 0}
    sizes |= {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    torch.manual_seed(0)
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**{**sizes, **changes})).eval()


def test_deepseek_v2() -> None:
    model, ids = deepseek_v2(), tokens()
    expected, wanted = logits(model, ids), greedy(model)
    report = patch_model(model)
    assert not report.left and not report.untried and "model.rotary_emb" not in {row.name for row in report.rows}
    close(logits(model, ids), expected)
    assert torch.equal(greedy(model), wanted)


# A patched model that fails


def planted(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("planted\nin two lines")


def wrong(self: nn.Module, ways: Any, x: Tensor) -> Tensor:
    return self.original_compute(ways, x) * 1.01


def not_a_number(self: nn.Module, ways: Any, x: Tensor) -> Tensor:
    return self.original_compute(ways, x) * torch.nan


FAULTS = {
    planted: "patched, it does not run 2 tokens: RuntimeError: planted",
    wrong: "patched, it gives different results for 2 tokens: results of about",
    not_a_number: "patched, it gives NaN or infinity for 2 tokens where the original gives numbers",
}


@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault(fault: Any, weights: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer calls compute, which no probe of an MLP calls from a layer; so a fault there shows only in the whole."""
    monkeypatch.setattr(GatedMLP, "original_compute", GatedMLP.compute, raising=False)
    monkeypatch.setattr(GatedMLP, "forward", lambda self, x: self.original_compute(self.make_dispatch(), x))
    monkeypatch.setattr(GatedMLP, "compute", fault)
    model, ids = tiny().train(), tokens()
    before, values, expected = identity(model), config_values(model), logits(model.eval(), ids)
    model.train()
    report = patch_model(model, weights=weights, verify=True)
    assert report.reason.startswith(FAULTS[fault]) and not report.rows and not report.replaced
    assert str(report).startswith(f"LlamaForCausalLM not patched: {FAULTS[fault]}")
    assert identity(model) == before and config_values(model) == values and not is_patched(model) and model.training
    with pytest.raises(ValueError) as caught:
        patch_model(model, weights=weights, strict=True)
    assert str(caught.value).startswith(
        f"torch_infini.patch_model: strict=True, but LlamaForCausalLM cannot be: {FAULTS[fault]}"
    )
    assert identity(model) == before and torch.equal(logits(model.eval(), ids), expected)


def test_no_trace() -> None:
    """Hooks are not called, and counters, buffers, caches, generators, modes and compiled calls stay as they were."""

    class Counting(transformers.models.llama.modeling_llama.LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            self.buffer.add_(torch.rand(1))
            self.seen = args
            return super().forward(*args, **kwargs)

    model = tiny().train()
    model.model.__class__ = Counting
    model.model.count = 0
    model.model.register_buffer("buffer", torch.zeros(1))
    called = []
    model.register_forward_hook(lambda *args: called.append(args))
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *args: called.append(args))
    model.compile(backend=planted)
    compiled = model._compiled_call_impl
    random = torch.get_rng_state()
    report = patch_model(model, verify=True)
    assert report.replaced and not report.untried and report.verification is not None
    assert model.model.count == 0 and model.model.buffer == 0 and not hasattr(model.model, "seen") and called == []
    assert torch.equal(torch.get_rng_state(), random) and all(module.training for module in model.modules())
    assert model._compiled_call_impl is compiled and len(model._forward_hooks) == 1
    model._compiled_call_impl = None
    model(tokens())
    assert model.model.count == 1 and len(called) == 2


def test_model_that_needs_more() -> None:
    """Where the model needs more than tokens, its decoder is run; where that does, too, the report says so."""

    class Asking(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, pixels: Tensor | None = None, **kwargs: Any) -> Any:
            assert pixels is not None, "no pixels"
            return super().forward(*args, **kwargs)

    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    model.__class__ = Asking
    report = patch_model(model, strict=True)
    assert not report.untried
    close(logits(model, ids, pixels=ids), expected)
    model = tiny()

    class Narrow(type(model.model)):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("input_ids") is not None and kwargs["input_ids"].shape[1] == 2:
                raise ValueError("not so few")
            return super().forward(*args, **kwargs)

    model.model.__class__ = Narrow
    report = patch_model(model)
    assert report.untried == "the original does not run 2 tokens: ValueError: not so few"
    assert "\n  not tried as a whole: the original does not run 2 tokens: ValueError: not so few" in str(report)
    assert report.replaced and not report.left
    close(logits(model, ids), expected)


def test_model_on_meta() -> None:
    model = tiny()
    model.model.layers[1].mlp.up_proj.to("meta")
    report = patch_model(model)
    assert report.untried == "model.layers.1.mlp.up_proj.weight is on meta" and report.replaced


def test_nan_of_the_original() -> None:
    """Where the original gives NaN for some tokens, the others are compared."""
    model = tiny()
    with torch.no_grad():
        model.model.embed_tokens.weight[64] = torch.nan  # the first of the two tokens
        model.model.embed_tokens.weight[42] = torch.nan
    report = patch_model(model, strict=True)
    assert report.replaced and not report.untried
    model = tiny(attn_implementation="sdpa")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3, 4] = torch.nan  # SDPA may make numbers of it
    report = patch_model(model, strict=True)
    assert report.replaced and report.untried in (
        "",
        "model.layers.0.self_attn.q_proj.weight has NaN or infinity in it",
    )


def test_hooks_that_make_weights() -> None:
    """Pruning keeps no parameter `weight`: a hook makes it. In the trial modules with hooks still count as such."""
    from torch.nn.utils import prune

    model, ids = tiny(), tokens()
    torch.manual_seed(3)
    prune.random_unstructured(model.model.layers[1].mlp.down_proj, "weight", amount=0.5)
    expected = logits(model, ids)
    report = patch_model(model, strict=True)
    assert report.replaced and not report.untried
    close(logits(model, ids), expected)


# verify=True


def later(factor: float) -> Any:
    """Another formula from the fifth token on: neither probes of an MLP in a layer nor two tokens show it."""

    def compute(self: nn.Module, ways: Any, x: Tensor) -> Tensor:
        y = self.original_compute(ways, x)
        return torch.cat([y[:, :4], y[:, 4:] * factor], 1)

    return compute


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("factor", [1.5, float("nan")])
def test_verify(factor: float, weights: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatedMLP, "original_compute", GatedMLP.compute, raising=False)
    monkeypatch.setattr(GatedMLP, "forward", lambda self, x: self.original_compute(self.make_dispatch(), x))
    monkeypatch.setattr(GatedMLP, "compute", later(factor))
    model = tiny(dtype, intermediate_size=128)
    before = identity(model)
    if weights is not None and factor == 1.5:  # less than what integers may change
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            patch_model(model, verify=True, weights=weights, strict=True)
        return
    sentence = (
        "the logits differ from the original's by " if factor == 1.5 else r"the logits have NaN at 6\d of 64 tokens"
    )
    with pytest.raises(ValueError, match="strict=True, but " + sentence) as caught:
        patch_model(model, verify=True, weights=weights, strict=True)
    stays = "it stays patched, because its weights are quantized"
    if weights is None:
        assert identity(model) == before and not is_patched(model) and stays not in str(caught.value)
    else:
        assert is_patched(model) and str(caught.value).endswith(stays)
        assert len(calls(model, tokens())) > 0
        model = tiny(dtype, intermediate_size=128)
    with pytest.warns(UserWarning, match=f"^torch_infini.patch_model: {sentence}") as warned:
        report = patch_model(model, verify=True, weights=weights)
    assert warned[0].filename == __file__
    assert is_patched(model) and report.verification is not None
    assert report.verification.fault in str(warned[0].message) and report.verification.fault
    assert "  not verified: " in str(report)
    if factor == 1.5:
        assert report.verification.error > report.verification.explained > 0
    else:
        assert report.verification.agreement <= 4 / 64 and "top-1 agreement 100" not in str(report)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1), (torch.float32, 30), (torch.bfloat16, 1), (torch.bfloat16, 30), (torch.float16, 1)],
    ids=str,
)
@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_no_warning(weights: str | None, size: float, dtype: torch.dtype) -> None:
    """Roundings are none, nor are integers, also where large weights amplify both; dropout plays no part."""
    model = tiny(torch.float32, intermediate_size=128, attention_dropout=0.5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(size)
    model.to(dtype).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = patch_model(model, verify=True, weights=weights, strict=True)
    found = report.verification
    assert found is not None and not found.fault and found.error <= found.explained
    if size == 1 and weights is None:
        assert found.explained < (1e-2 if dtype == torch.float32 else 0.2)


def test_softmax_of_large_scores() -> None:
    """Two tokens with large scores: the effect of rounding is measured, not guessed."""
    model = tiny()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1e3)
    assert patch_model(model, strict=True).replaced
    assert isinstance(model.model.layers[0].self_attn, Attention)
