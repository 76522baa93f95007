"""Models of other families than Llama's: norms, MLPs, attention's function and linear layers are replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.tiny_llama import close, config_values, identity, tokens
from torch_infini.patch import is_patched, load_patched, patch_model, save_patched, unpatch_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

# LayerNorms and MLPs without gates; learned positions, a parallel residual, partial rotation, a norm without weights,
# norms of 1 + weight, encoders, rotation of interleaved pairs, an ungated MLP in Llama's layers, or a third branch.
DECODERS = (
    "opt",
    "gpt_neox",
    "phi",
    "olmo",
    "nemotron",
    "cohere",
    "arcee",
    "gpt_bigcode",
    "modernbert-decoder",
    "lfm2",
    "gpt2",
    "gemma4_text",
)
LATENT = ("deepseek_v3", "glm4_moe_lite", "youtu")  # values are narrower than keys
SINKS = ("flint", "granite_swa", "mimo_v2_flash")
ENCODERS = ("bert", "electra")
ONCE = pytest.mark.parametrize("kind", DECODERS + LATENT + SINKS)
EACH = pytest.mark.parametrize("kind", DECODERS + ENCODERS + LATENT + SINKS)


def model_of(kind: str) -> Any:
    from torch_infini.testing.causal_types import build  # imports transformers

    torch.manual_seed(0)
    return build(kind)


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(input_ids=ids, **more).logits
    return result


def padded(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return mask


@EACH
def test_results_and_unpatching(kind: str) -> None:
    """Padded batches too; afterwards everything is as it was."""
    model, ids = model_of(kind), tokens()
    mask = padded(ids)
    before, values = identity(model), config_values(model)
    expected, masked = logits(model, ids), logits(model, ids, attention_mask=mask)
    report = patch_model(model, strict=True)
    assert "layer_norm" in report.counts or kind in ("arcee", "lfm2", "gemma4_text", *LATENT, *SINKS)
    assert sum(report.counts.get(op, 0) for op in ("linear", "matmul", "fused_linear, swiglu, linear")) > 4
    assert model.config._attn_implementation == "infini" and is_patched(model)
    close(logits(model, ids), expected)
    close(logits(model, ids, attention_mask=mask)[1], masked[1])
    close(logits(model, ids, attention_mask=mask)[0, 4:], masked[0, 4:])
    unpatch_model(model)
    assert identity(model) == before and config_values(model) == values
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.full(beyond=3)
@ONCE
def test_generate(kind: str) -> None:
    model, ids = model_of(kind), tokens()

    def generate() -> Tensor:
        result: Tensor = model.generate(
            ids, attention_mask=padded(ids), max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1
        )
        return result

    expected = generate()
    patch_model(model)
    assert torch.equal(generate(), expected)


@EACH
def test_hooks_see_what_the_original_shows(kind: str) -> None:
    """Of every module: a layer's parts are called as they were."""
    model, ids = model_of(kind), tokens()
    seen: dict[str, list[Tensor]] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if isinstance(value, Tensor) and value.is_floating_point():
                seen.setdefault(name, []).append(value.detach().clone())

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    logits(model, ids)
    expected = {name: list(values) for name, values in seen.items()}
    patch_model(model)
    seen.clear()
    logits(model, ids)
    assert seen.keys() == expected.keys() and len(seen) > 10
    for name, values in expected.items():
        for actual, value in zip(seen[name], values, strict=True):
            close(actual, value, what=name)


@pytest.mark.full(beyond=2)
@EACH
def test_gradients_are_the_originals(kind: str) -> None:
    model, ids = model_of(kind), tokens()

    def gradients() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids).logits.float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients()
    patch_model(model)
    for actual, value in zip(gradients(), expected, strict=True):
        close(actual, value, passes=2)


@pytest.mark.full(beyond=2)
@EACH
def test_compile(kind: str) -> None:
    torch._dynamo.reset()  # type: ignore[no-untyped-call]  # its limit is for all models of a process
    model, ids = model_of(kind), tokens()
    patch_model(model)
    expected = logits(model, ids)
    close(logits(torch.compile(model, fullgraph=True, backend="aot_eager"), ids), expected)


@pytest.mark.full(beyond=2)
@pytest.mark.parametrize("kind", [kind for kind in DECODERS + ENCODERS + LATENT + SINKS if kind != "gpt2"])
def test_integer_weights_are_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    model, ids = model_of(kind), tokens()
    expected = logits(model, ids)
    report = patch_model(model, weights="int8", strict=True)
    assert report.counts["linear_group8"] >= 8
    actual = logits(model, ids)
    # LFM2's convolutions multiply three quantized products with each other, and their errors add.
    bound = 0.08 if kind == "lfm2" else 0.05
    assert (actual - expected).norm() < bound * expected.norm()
    save_patched(model, tmp_path)
    assert torch.equal(logits(load_patched(tmp_path), ids), actual)


# Norms without weights or at other places, heads of several sizes, shared keys and values, experts beside an MLP,
# sparse MLPs, scaled residuals, complex rotation, layers that do not rotate, cross-attention.
IN_PARTS = (
    "gemma4_unified_text",
    "gemma4",
    "gemma3n_text",
    "nanochat",
    "bitnet",
    "minicpm3",
    "deepseek_v2",
    "beam",
    "mllama",
)
IN_PARTS += ("qwen4_exp_text", "musicgen_melody", "diffllama")  # norms of groups, several embeddings, torch's norm
FEW = pytest.mark.parametrize(
    "kind", [*IN_PARTS[:3], *(pytest.param(kind, marks=pytest.mark.full) for kind in IN_PARTS[3:])]
)


@FEW
def test_replaced_in_parts(kind: str) -> None:
    """What is left keeps its forward, and calls replaced modules alone; no key of the state changes."""
    from torch_infini.patch.layers.interface_attention import calls_interface

    model, ids = model_of(kind), tokens()
    before, values, keys = identity(model), config_values(model), list(model.state_dict())
    expected, masked = logits(model, ids), logits(model, ids, attention_mask=padded(ids))
    report = patch_model(model)
    assert report.left == report.in_parts
    assert not any(row.op == "left" for row in report.rows)
    assert {module.config._attn_implementation for module in model.modules() if calls_interface(module)} == {"infini"}
    assert list(model.state_dict()) == keys
    close(logits(model, ids), expected)
    close(logits(model, ids, attention_mask=padded(ids))[0, 4:], masked[0, 4:])
    unpatch_model(model)
    assert identity(model) == before and config_values(model) == values
    assert torch.equal(logits(model, ids), expected)


# Attention in a method, or all in a forward.
OWN_ATTENTION = ("gptj", "codegen", "gpt_neox_japanese", "mvp", "xglm", "megatron-bert", "rembert", "big_bird")


@pytest.mark.parametrize(
    "kind", ["gpt_neo", "trocr", *(pytest.param(kind, marks=pytest.mark.full) for kind in OWN_ATTENTION)]
)
def test_attention_of_its_own(kind: str) -> None:
    """Its forward stays, also with a cache, weights that are asked for, and gradients."""
    model, ids = model_of(kind), tokens()
    mask = padded(ids)
    # A release of transformers may have moved one to its table of attention functions, of which only eager has weights.
    patched = "infini" if model.config._attn_implementation == "sdpa" else "eager"
    model.set_attn_implementation("eager")

    def results() -> list[Tensor]:
        found = model(input_ids=ids, output_attentions=True)
        model.zero_grad(set_to_none=True)
        found.logits.square().mean().backward()
        words = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
        padding = logits(model, ids, attention_mask=mask)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [logits(model, ids), padding[0, 4:], padding[1], words.float(), *found.attentions, *grads]

    expected, before = results(), identity(model)
    report = patch_model(model, strict=True)
    assert report.counts["attention"] >= 4 and model.config._attn_implementation == patched
    for actual, value in zip(results(), expected, strict=True):
        close(actual, value, passes=2)
    unpatch_model(model)
    assert identity(model) == before


def test_sparse_mlp() -> None:
    """Gemma 3n's; another formula with its names stays as it was."""
    model, ids = model_of("gemma3n_text"), tokens()
    kind = type(model.model.layers[0].mlp)

    class Other(kind):  # type: ignore[misc, valid-type]
        """Of another quantile."""

        def _gaussian_topk(self, inputs: Tensor) -> Tensor:
            return nn.functional.relu(inputs - inputs.mean(-1, keepdim=True))

    model.model.layers[2].mlp.__class__ = Other
    expected = logits(model, ids)
    report = patch_model(model)
    whole = {row.name for row in report.replaced if row.name.endswith(".mlp")}
    assert whole == {f"model.layers.{i}.mlp" for i in (0, 1, 3)}
    close(logits(model, ids), expected)


def test_shared_keys_and_values_are_cached_once() -> None:
    """Gemma 4's last layers read those of the layers before them."""
    from torch_infini.patch.paged import PagedModel
    from torch_infini.patch.paged.sites import find_sites

    model = model_of("gemma4_text")
    sites = list(find_sites(model, tokens()[:1], 64)[0].attention.values())
    assert [(site.layer, site.writes, site.head_dim) for site in sites] == [
        (0, True, 16),
        (1, True, 32),
        (0, False, 16),
        (1, False, 32),
    ]
    assert PagedModel(model).bytes_per_token(torch.float32) == 2 * 2 * (16 + 32) * 4


def test_weightless_norm() -> None:
    """Of any number of columns, which only a call tells; its formula is checked as that of others."""
    from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm

    class HalvedNorm(NanoChatRMSNorm):
        """Another formula."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    model = model_of("nanochat")
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(0))
    expected = model.model.norm(x.bfloat16())
    model.model.layers[1].input_layernorm.__class__ = HalvedNorm
    report = patch_model(model)
    assert {row.name: row.reason for row in report.left if row.op == "left"} == {
        "model.layers.1.input_layernorm": "its own forward gives a different result"
    }
    with torch.no_grad():
        assert torch.equal(model.model.norm(x.bfloat16()), expected)
    close(model.model.layers[0].input_layernorm(x), NanoChatRMSNorm()(x))


def test_what_is_left_is_named() -> None:
    """In the words of the field."""
    for kind, reason in {
        "bloom": "it does not call transformers' attention interface",
        "recurrent_gemma": "no op computes a RecurrentGemmaRglru",
    }.items():
        assert reason in {row.reason for row in patch_model(model_of(kind)).left}, kind


@pytest.mark.parametrize("kind", ["T5", "UMT5"])
def test_relative_positions(kind: str) -> None:
    """Their bias joins the scores: in the encoder, with padding, and in the decoder, token by token."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "num_layers": 2, "num_heads": 4, "d_model": 64, "d_kv": 16, "d_ff": 128}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, decoder_start_token_id=0, eos_token_id=None)
    model, ids = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval(), tokens()
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.normal_(weight)  # so that it matters
    mask = padded(ids)

    def results() -> tuple[Tensor, ...]:
        made = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
        plain, masked = (logits(model, ids, decoder_input_ids=ids, **more) for more in ({}, {"attention_mask": mask}))
        return made, plain, masked

    expected, before = results(), identity(model)
    patch_model(model, strict=True)
    made, *actual = results()
    assert torch.equal(made, expected[0])
    for some, others in zip(actual, expected[1:], strict=True):
        close(some, others)
    unpatch_model(model)
    assert identity(model) == before


def test_attention_of_one_layer_is_skipped() -> None:
    """Then the function stays the original's in all layers, and the report says so."""
    model, ids = model_of("opt"), tokens()
    implementation, expected = model.config._attn_implementation, logits(model, ids)
    report = patch_model(model, skip=["model.decoder.layers.0"])
    assert "attention" not in report.counts and model.config._attn_implementation == implementation
    (row,) = (row for row in report.left if row.name == "model.decoder.layers.1.self_attn")
    assert row.reason == "other attention of the model keeps its function, and they share one"
    close(logits(model, ids), expected)


def test_attention_of_another_formula_is_left() -> None:
    """Where two tokens through the whole model give other results, the modules keep the function that they had."""
    model, ids = model_of("opt"), tokens()
    attention = model.model.decoder.layers[1].self_attn
    kept = type(attention).forward

    class Doubled(type(attention)):  # type: ignore[misc]
        """Twice what another function than the original's gives."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output, *more = kept(self, *args, **kwargs)
            return (output * (1 + (self.config._attn_implementation == "infini")), *more)

    Doubled.forward.__code__ = Doubled.forward.__code__.replace(
        co_names=(*Doubled.forward.__code__.co_names, "ALL_ATTENTION_FUNCTIONS")
    )
    attention.__class__ = Doubled
    implementation, expected = model.config._attn_implementation, logits(model, ids)
    report = patch_model(model)
    left = {row.name: row.reason for row in report.left}
    assert len(left) == len(model.model.decoder.layers) and all("different results" in one for one in left.values())
    assert model.config._attn_implementation == implementation
    close(logits(model, ids), expected)


def test_described() -> None:
    """LayerNorms in layers with Llama's names are described as such."""
    from torch_infini.patch import describe

    layer = describe(model_of("stablelm")).layers[0]
    assert {norm.rounding for norm in layer.norms} == {"layer_norm"} and len(layer.norms) == 2
    assert "mean 0 and variance 1" in str(describe(model_of("stablelm")))


@pytest.mark.parametrize("name", ["BertModel", "LlamaModel", "LlamaForSequenceClassification"])
def test_save_pretrained_keeps_integer_weights(name: str, tmp_path: Path) -> None:
    """Of models without `generate` too, and of a decoder alone."""
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, name)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(0)
    model = cls(cls.config_class(**sizes, vocab_size=100, pad_token_id=0)).eval()
    patch_model(model, weights="int8")
    model.save_pretrained(tmp_path)
    ids = tokens() % 100
    with torch.no_grad():
        for loaded in (load_patched(tmp_path), cls.from_pretrained(tmp_path, trust_remote_code=False)):
            assert torch.equal(loaded(ids)[0], model(ids)[0])
