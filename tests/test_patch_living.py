"""What else people do with a patched model: all ways of generation, copies, other dtypes and devices, hooks.

Tokens and numbers are compared with those of the same model before it was patched.
"""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.tiny_llama import (
    LAYERS,
    VOCABULARY,
    CallCounter,
    calls,
    close,
    greedy,
    identity,
    in_order,
    logits,
    tiny,
    tokens,
)
from torch_infini.patch import patch_model, patched, unpatch_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread", "no_graphs_left")

Model = Any

# Generation


@pytest.mark.full
def test_continuous_batching() -> None:
    """generate_batch takes a patched model as it is, computes over our attention, and leaves it as it was."""
    options = {
        "generation_config": transformers.GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32),
        "warmup": False,
    }
    prompts = [[3, 4, 5, 6], [7, 8, 9], [3, 4, 5, 6, 7, 8]]
    for implementation in ("sdpa", "eager"):
        model = tiny(attn_implementation=implementation, num_hidden_layers=1)
        run = lambda model: [o.generated_tokens for o in model.generate_batch(prompts, **options).values()]
        expected = run(model)
        assert all(len(made) == 6 for made in expected)
        seen: list[str] = []
        with patched(model, strict=True):
            model.model.layers[0].self_attn.register_forward_pre_hook(
                lambda module, args, seen=seen: seen.append(module.config._attn_implementation)
            )
            assert run(model) == expected
            assert set(seen) == {"infini_flash"}
            assert model.config._attn_implementation == "infini"
            if implementation == "sdpa":
                assert run(copy.deepcopy(model)) == expected
            assert greedy(model).shape == (2, 21)
        assert model.config._attn_implementation == implementation and in_order(model)


def test_continuous_batching_that_fails() -> None:
    model = tiny()
    patch_model(model)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        model.init_continuous_batching(generation_config=transformers.GenerationConfig(), workload_hints=7, wrong=1)
    assert model.config._attn_implementation == "infini"


@pytest.mark.parametrize("which", ["model", "assistant", "both"])
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
def test_assistant(which: str, sampling: bool) -> None:
    """Assisted generation crops both caches at every step. One assistant agrees with the model, the other does not."""
    ids = tokens(1)
    for seed in (1, 2):
        model, assistant = tiny(), tiny(seed=seed, num_hidden_layers=1 if seed == 2 else LAYERS)

        def run(model: Model = model, assistant: Model = assistant) -> Tensor:
            torch.manual_seed(3)
            return greedy(model, ids, assistant_model=assistant, do_sample=sampling, max_new_tokens=20)

        expected = run()
        contexts = [
            patched(m) if which in (name, "both") else nullcontext()
            for name, m in (("model", model), ("assistant", assistant))
        ]
        with contexts[0], contexts[1]:
            assert torch.equal(run(), expected)


def word_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", padding_side="left")


def test_pipeline() -> None:
    model, tokenizer = tiny(), word_tokenizer()

    def run() -> Any:
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
        return pipe(["w5 w9 w33", "w7"], max_new_tokens=6, do_sample=False)

    expected = run()
    with patched(model), CallCounter() as counter:
        assert run() == expected
        assert counter.counts["attention"] == 6 * LAYERS
    assert expected[0][0]["generated_text"].count("w") >= 8


def test_streamer() -> None:
    model, tokenizer = tiny(), word_tokenizer()

    class Collected(transformers.TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer)
            self.text = ""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text

    def run() -> str:
        streamer = Collected()
        greedy(model, tokens(1), streamer=streamer)
        return streamer.text

    expected = run()
    assert len(expected.split()) == 21
    with patched(model):
        assert run() == expected


def test_outputs_of_generate() -> None:
    """Scores, logits and hidden states of every step."""
    model = tiny()
    ask = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "max_new_tokens": 4,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
    }
    expected = greedy(model, **ask)
    with patched(model):
        actual = greedy(model, **ask)
    assert torch.equal(actual.sequences, expected.sequences)
    for name in ("scores", "logits"):
        for a, b in zip(actual[name], expected[name], strict=True):
            close(a, b)
    for a, b in zip(actual.hidden_states, expected.hidden_states, strict=True):
        for x, y in zip(a, b, strict=True):
            close(x, y)


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("before", [True, False], ids=["compiled first", "patched first"])
def test_compiled_generate(before: bool) -> None:
    """generate over a compiled forward and a static cache: one graph, as the original's."""
    model = tiny(num_hidden_layers=1)
    expected = greedy(model, cache_implementation="static", max_new_tokens=5)
    compiled = lambda: torch.compile(type(model).forward.__get__(model), fullgraph=True, backend="aot_eager")
    if before:
        model.forward = compiled()
        assert torch.equal(greedy(model, cache_implementation="static", max_new_tokens=5), expected)
    patch_model(model)
    if not before:
        model.forward = compiled()
    assert torch.equal(greedy(model, cache_implementation="static", max_new_tokens=5), expected)
    assert torch.equal(greedy(model, max_new_tokens=5), expected)
    unpatch_model(model)
    del model.forward
    assert torch.equal(greedy(model, max_new_tokens=5), expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "infini"])
def test_other_attention_afterwards(implementation: str) -> None:
    """set_attn_implementation of a patched model."""
    model, ids = tiny(), tokens()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected, made = logits(model, ids, attention_mask=mask), greedy(model, ids, attention_mask=mask)
    with patched(model):
        model.set_attn_implementation(implementation)
        close(logits(model, ids, attention_mask=mask)[mask > 0], expected[mask > 0])
        assert torch.equal(greedy(model, ids, attention_mask=mask), made)
    assert in_order(model)


# Several models, copies, classes


def test_differently_patched_models() -> None:
    """Three models of one class in one process: one fully patched, one in part, one in integers; each as alone."""
    ids = tokens()
    models = [tiny(intermediate_size=128, seed=seed) for seed in (1, 2, 3)]
    expected = [logits(model, ids) for model in models[:2]]
    patch_model(models[0])
    patch_model(models[1], only=["*norm", "*layernorm"])
    patch_model(models[2], weights="int8")
    alone = tiny(intermediate_size=128, seed=3)
    patch_model(alone, weights="int8")
    for _ in range(2):
        close(logits(models[0], ids), expected[0])
        close(logits(models[1], ids), expected[1])
        assert torch.equal(logits(models[2], ids), logits(alone, ids))
    assert calls(models[1], ids) == {"rms_norm": 2 * LAYERS + 1}
    unpatch_model(models[0])
    close(logits(models[1], ids), expected[1])
    assert torch.equal(logits(models[2], ids), logits(alone, ids)) and in_order(models[0])


def test_classes_make_unpatched_modules() -> None:
    """`type(model)(config)` and `type(model).from_pretrained`, as code that copies a model's shape has it."""
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    patch_model(model)
    fresh = type(model)(model.config).eval()
    assert type(fresh) is transformers.LlamaForCausalLM and in_order(fresh)
    fresh.load_state_dict(model.state_dict())
    close(logits(fresh, ids), expected)
    assert type(type(model.model.norm)(64)) is transformers.models.llama.modeling_llama.LlamaRMSNorm
    patch_model(fresh)
    close(logits(fresh, ids), expected)


def test_from_pretrained_of_a_patched_class(tmp_path: Path) -> None:
    model, ids = tiny(), tokens()
    patch_model(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM and in_order(loaded)
    close(logits(loaded, ids), logits(model, ids))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies(how: str, tmp_path: Path) -> None:
    """A copy of a partly patched model is patched in the same parts, runs without the original, and can be undone."""
    model, ids = tiny(tie_word_embeddings=True), tokens()
    expected = logits(model, ids)
    patch_model(model, skip=["model.layers.1.mlp", "lm_head"])
    counts = calls(model, ids)
    if how == "deepcopy":
        clone = copy.deepcopy(model)
    elif how == "pickle":
        clone = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, tmp_path / "model.pt")
        clone = torch.load(tmp_path / "model.pt", weights_only=False)
    del model
    assert clone.lm_head.weight is clone.model.embed_tokens.weight
    assert calls(clone, ids) == counts
    close(logits(clone, ids), expected)
    assert torch.equal(greedy(clone), greedy(clone, use_cache=False))
    unpatch_model(clone)
    assert in_order(clone) and torch.equal(logits(clone, ids), expected)


def test_tied_embeddings() -> None:
    model, ids = tiny(tie_word_embeddings=True), tokens()
    reference = copy.deepcopy(model)
    with patched(model):
        for each in (model, reference):
            each.resize_token_embeddings(140, mean_resizing=False)
            each.tie_weights()
            with torch.no_grad():
                each.model.embed_tokens.weight.copy_(torch.randn(140, 64, generator=torch.Generator().manual_seed(1)))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        close(logits(model, ids), logits(reference, ids))


# dtypes and devices


def test_dtypes() -> None:
    """to(dtype) after patching: half types with ops, float64 without them, and back."""
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    with patched(model):
        served = calls(model, ids)
        exact = logits(model.double(), ids)
        assert exact.dtype == torch.float64 and calls(model, ids) == {}
        close(exact.float(), expected)
        assert torch.equal(greedy(model), greedy(model, use_cache=False))
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            model.to(dtype)
            assert calls(model, ids) == served and logits(model, ids).dtype == dtype
        # bfloat16 on the way; the layers go on with what the parameters are
        assert (logits(model, ids) - expected).norm() < 0.05 * expected.norm()


def test_meta() -> None:
    """A patched model that is moved to another device computes there as the original would."""
    model, ids = tiny(), tokens()
    patch_model(model)
    model.to("meta")
    with torch.no_grad():
        output = model(ids.to("meta"))
    assert output.logits.is_meta and output.logits.shape == (2, 9, VOCABULARY)
    assert calls(model, ids.to("meta")) == {}
    unpatch_model(model)
    assert in_order(model)


def test_model_on_meta() -> None:
    """A model without memory is left, each module with its reason, and says so where it has to be all."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(tiny().config)
    before = identity(model)
    with pytest.raises(ValueError, match="is on meta"):
        patch_model(model, strict=True)
    assert identity(model) == before
    report = patch_model(model)
    assert all(row.op == "left" for row in report.rows), str(report)
    assert {row.reason.partition(" is ")[2].partition(":")[0] for row in report.left} == {"on meta", ""}, str(report)
    assert model.config._attn_implementation == "sdpa"
    unpatch_model(model)
    assert identity(model) == before


@pytest.mark.parametrize("part", ["layers.0", "layers.1.self_attn", "norm", "rotary_emb", "embed_tokens", "head"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_several_devices(part: str, weights: str | None) -> None:
    """Parts on another device are left; the rest is patched, and works again when all is back."""
    model, ids = tiny(), tokens()
    state = copy.deepcopy(model.state_dict())
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    expected = logits(model, ids)
    away = model.lm_head if part == "head" else model.model.get_submodule(part)
    name = "lm_head" if part == "head" else f"model.{part}"
    away.to("meta")
    report = patch_model(model, weights=weights)
    for row in report.rows:
        inside = row.name == name or row.name.startswith(f"{name}.")
        if inside:
            assert row.op == "left" and ("meta" in row.reason or "was left" in row.reason), row
        elif part not in ("embed_tokens", "rotary_emb") and not name.startswith(row.name):
            assert row.op != "left", row
    assert report.replaced
    away.to_empty(device="cpu")
    if weights is None:
        model.load_state_dict(state)
        for key, value in buffers.items():
            model.get_buffer(key).copy_(value)
        if part == "rotary_emb":
            model.model.rotary_emb.original_inv_freq = buffers["model.rotary_emb.inv_freq"]
        close(logits(model, ids), expected)
        unpatch_model(model)
        assert in_order(model)


def test_nan() -> None:
    """Weights with NaN give what they give in the original; verify warns that it could not compare."""
    model, ids = tiny(), tokens()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
        model.model.embed_tokens.weight[5] = torch.inf
    expected = logits(model, ids)
    sentence = "the logits have NaN at 64 of 64 tokens, and those of the original at 64; they should have none"
    with pytest.raises(ValueError, match=f"strict=True, but {sentence}"):
        patch_model(model, strict=True, verify=True)
    assert in_order(model) and torch.equal(logits(model, ids).isnan(), expected.isnan())
    with pytest.warns(UserWarning, match=sentence):
        report = patch_model(model, verify=True)
    assert not report.left and report.verification.agreement == 0
    assert torch.equal(logits(model, ids).isnan(), expected.isnan())
    assert report.verification is not None and report.verification.difference != report.verification.difference
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 0
    fine = torch.full_like(ids, 9)
    clone = copy.deepcopy(model)
    unpatch_model(clone)
    close(logits(model, fine), logits(clone, fine))


# Hooks


def test_hooks_that_bring_gradients() -> None:
    """A frozen model into which a hook adds something learned, on any module: its gradient is the original's."""
    places = ["embed_tokens", "layers.0", "layers.0.self_attn", "layers.0.self_attn.k_proj", "layers.1.mlp.up_proj"]
    places += ["layers.0.input_layernorm", "layers.1.mlp.act_fn", "layers.1.post_attention_layernorm", "norm"]
    model, ids = tiny().requires_grad_(False), tokens()
    first = lambda output: output[0] if isinstance(output, tuple) else output
    shapes: list[torch.Size] = []
    for place in places:
        module = model.model.get_submodule(place)
        with torch.no_grad():  # a number for each element: the sum of all their gradients would be lost in rounding
            hook = module.register_forward_hook(lambda module, args, output: shapes.append(first(output).shape))
            model(ids)
            hook.remove()
        learned = torch.zeros(shapes.pop(), requires_grad=True)

        def add(module: Any, args: Any, output: Any, learned: Tensor = learned) -> Any:
            if isinstance(output, tuple):
                return (output[0] + learned, *output[1:])
            return output + learned

        hook = module.register_forward_hook(add)
        gradient = lambda learned=learned: torch.autograd.grad(model(ids).logits.square().mean(), learned)[0]
        expected = gradient()
        assert expected.abs().max() > 0
        with patched(model):
            close(gradient(), expected, passes=2, what=place)
        hook.remove()


def test_backward_hooks() -> None:
    model, ids = tiny(), tokens()
    seen: list[Tensor] = []
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp", "model.norm", "lm_head"]
    hooks = [
        model.get_submodule(name).register_full_backward_hook(lambda m, inputs, outputs: seen.append(outputs[0]))
        for name in names
    ]
    model(ids).logits.square().mean().backward()
    expected, seen = seen, []
    assert len(expected) == len(names)
    with patched(model):
        model(ids).logits.square().mean().backward()
    assert all(map(torch.equal, seen, expected)) and len(seen) == len(names)
    for hook in hooks:
        hook.remove()
