"""What else people do with a model, before and after patch_model: generation, adapters, offloading, bad input.

Tokens and numbers are compared with those of the same model before it was patched.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torch_infini.patch import is_patched, patch_model, patched, unpatch_model
from torch_infini.patch.memory import moved
from torch_infini.patch.swap import Patched
from torch_infini.testing.tiny_llama import (
    LAYERS,
    VOCABULARY,
    CallCounter,
    calls,
    close,
    identity,
    logits,
    tiny,
    tokens,
)

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

Model = Any


@pytest.fixture(autouse=True)
def no_hooks_left() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def greedy(model: Model, ids: Tensor | None = None, **kwargs: Any) -> Tensor:
    values = {"max_new_tokens": 12, "do_sample": False, "input_ids": tokens() if ids is None else ids, **kwargs}
    return model.generate(**values)


def in_order(module: nn.Module) -> bool:
    """Whether nothing of a patch is left in it."""
    return not any(
        isinstance(m, Patched) or any(name.startswith("_infini_") for name in vars(m)) for m in module.modules()
    )


# Generation


def test_continuous_batching() -> None:
    """generate_batch takes a patched model as it is, with the model's own attention, and leaves it as it was."""
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
            assert set(seen) == {"sdpa" if implementation == "sdpa" else "paged|eager"}
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
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, tmp_path / "model.pt")
        twin = torch.load(tmp_path / "model.pt", weights_only=False)
    del model
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert calls(twin, ids) == counts
    close(logits(twin, ids), expected)
    assert torch.equal(greedy(twin), greedy(twin, use_cache=False))
    unpatch_model(twin)
    assert in_order(twin) and torch.equal(logits(twin, ids), expected)


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
        torch.testing.assert_close(exact.float(), expected, rtol=1e-4, atol=1e-4)
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
    with pytest.raises(ValueError, match="is on meta, not cpu"):
        patch_model(model, strict=True)
    assert identity(model) == before
    report = patch_model(model)
    assert all(row.op == "left" for row in report.rows), str(report)
    assert {row.reason.partition(" is ")[2] for row in report.left} == {"on meta, not cpu", ""}, str(report)
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
    """Weights with NaN give what they give in the original; verify says so."""
    model, ids = tiny(), tokens()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
        model.model.embed_tokens.weight[5] = torch.inf
    expected = logits(model, ids)
    report = patch_model(model, strict=True, verify=True)
    assert torch.equal(logits(model, ids).isnan(), expected.isnan())
    assert report.verification is not None and report.verification.difference != report.verification.difference
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 0
    fine = torch.full_like(ids, 9)
    twin = copy.deepcopy(model)
    unpatch_model(twin)
    close(logits(model, fine), logits(twin, fine))


# Layers of other libraries


class OwnLinear(nn.Linear):
    """Stands for the quantised linear layers of other libraries: another class, another forward."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.round(decimals=1))


class OwnTensor(Tensor):
    """Stands for a quantised weight: a subclass that is computed with in its own way."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return 2 * func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


def own_class(model: Model) -> None:
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OwnLinear


def own_tensors(model: Model) -> None:
    for module in model.model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(module.weight.detach().as_subclass(OwnTensor), requires_grad=False)


def int8_weights(model: Model) -> None:
    """Integers and a scale in the place of a weight, as others store them."""

    class Int8(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
            self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight * self.scale).T

    for module in list(model.model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8(child))


def dynamic(model: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.ao.quantization.quantize_dynamic(model.model, {nn.Linear}, torch.qint8, inplace=True)
        except (AttributeError, RuntimeError) as error:
            pytest.skip(f"torch.ao.quantization: {error}")


@pytest.mark.parametrize("change", [own_class, own_tensors, int8_weights, dynamic], ids=lambda change: change.__name__)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_quantised_by_others(change: Callable[[Model], None], weights: str | None) -> None:
    """Their layers compute what they compute; the rest is patched around them."""
    model, ids = tiny(), tokens()
    plain = logits(model, ids)
    change(model)
    expected, made = logits(model, ids), greedy(model)
    assert not torch.allclose(expected, plain)
    theirs = {name: m for name, m in model.model.layers.named_modules() if hasattr(m, "in_features")}
    report = patch_model(model, weights=weights, skip=["lm_head"] if weights else [])
    close(logits(model, ids), expected)
    assert torch.equal(greedy(model), made)
    assert {name: m for name, m in model.model.layers.named_modules() if hasattr(m, "in_features")} == theirs
    assert report.counts["rms_norm"] == 2 * LAYERS + 1
    unpatch_model(model)
    assert in_order(model) and torch.equal(logits(model, ids), expected)


def test_torchao() -> None:
    """A model in torchao's int8: patched around its weights."""
    ao = pytest.importorskip("torchao.quantization")
    model, ids = tiny(), tokens()
    ao.quantize_(model, ao.Int8WeightOnlyConfig())
    expected = logits(model, ids)
    report = patch_model(model)
    close(logits(model, ids), expected)
    assert report.counts["rms_norm"] == 2 * LAYERS + 1


def test_parametrised() -> None:
    """Parametrised and pruned weights, before and after patching, in projections and in patched modules themselves."""
    from torch.nn.utils import parametrize, prune

    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    places = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.0.input_layernorm"]
    places += ["model.layers.1.post_attention_layernorm", "model.norm", "lm_head"]

    def change(model: Model) -> None:
        for place in places:
            parametrize.register_parametrization(model.get_submodule(place), "weight", Double())
        torch.manual_seed(3)
        prune.random_unstructured(model.model.layers[1].mlp.down_proj, "weight", amount=0.5)

    ids, reference = tokens(), tiny().requires_grad_(False)
    plain = logits(reference, ids)
    change(reference)
    expected = logits(reference, ids)
    assert not torch.allclose(expected, plain)
    near = lambda actual: torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # they are large
    for first in (True, False):
        model = tiny().requires_grad_(False)
        if first:
            patch_model(model)
        change(model)
        if not first:
            patch_model(model)
        near(logits(model, ids))
        near(logits(copy.deepcopy(model), ids))
        assert calls(model, ids)["attention"] == LAYERS
        unpatch_model(model)
        assert in_order(model) and torch.equal(logits(model, ids), expected)
        for place in places:
            parametrize.remove_parametrizations(model.get_submodule(place), "weight")
        prune.remove(model.model.layers[1].mlp.down_proj, "weight")
        assert {name: type(m) for name, m in model.named_modules()} == {
            name: type(m) for name, m in tiny().named_modules()
        }
        near(logits(model, ids))


# Hooks


def test_hooks_that_bring_gradients() -> None:
    """A frozen model into which a hook adds something learned, on any module: its gradient is the original's."""
    places = ["embed_tokens", "layers.0", "layers.0.self_attn", "layers.0.self_attn.k_proj", "layers.1.mlp.up_proj"]
    places += ["layers.0.input_layernorm", "layers.1.mlp.act_fn", "layers.1.post_attention_layernorm", "norm"]
    model, ids = tiny().requires_grad_(False), tokens()
    for place in places:
        module = model.model.get_submodule(place)
        learned = torch.zeros(1, requires_grad=True)

        def add(module: Any, args: Any, output: Any, learned: Tensor = learned) -> Any:
            if isinstance(output, tuple):
                return (output[0] + learned, *output[1:])
            return output + learned

        hook = module.register_forward_hook(add)
        gradient = lambda learned=learned: torch.autograd.grad(model(ids).logits.square().mean(), learned)[0]
        expected = gradient()
        assert expected.abs() > 0
        with patched(model):
            torch.testing.assert_close(gradient(), expected, rtol=1e-4, atol=1e-6, msg=place)
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


# Adapters


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    return peft.LoraConfig(**{"r": 4, "target_modules": targets, "init_lora_weights": False, **changes})


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("head", [False, True], ids=["layers", "with head"])
def test_lora_before(dora: bool, head: bool) -> None:
    """Adapters are there when the model is patched: on, off, merged, unmerged, unloaded."""
    peft = pytest.importorskip("peft")
    targets = ["k_proj", "gate_proj", "lm_head"] if head else ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    model, ids = tiny(), tokens()
    adapted = peft.get_peft_model(model, lora(use_dora=dora, target_modules=targets)).eval()
    expected, made = logits(adapted, ids), greedy(adapted)
    with adapted.disable_adapter():
        plain = logits(adapted, ids)
    assert not torch.allclose(expected, plain)
    report = patch_model(adapted)
    assert not report.left  # an adapter around the head is a module of its own
    close(logits(adapted, ids), expected)
    assert torch.equal(greedy(adapted), made)
    with adapted.disable_adapter():
        close(logits(adapted, ids), plain)
    adapted.merge_adapter()
    torch.testing.assert_close(logits(adapted, ids), expected, rtol=1e-4, atol=1e-4)
    adapted.unmerge_adapter()
    torch.testing.assert_close(logits(adapted, ids), expected, rtol=1e-4, atol=1e-4)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), expected, rtol=1e-4, atol=1e-4)
    counts = calls(merged, ids)
    assert counts["fused_linear"] == 2 * LAYERS and counts["attention"] == LAYERS
    unpatch_model(adapted)
    assert in_order(merged)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_lora_after(dora: bool) -> None:
    """Adapters are put into a patched model, trained there, and merged or taken out."""
    peft = pytest.importorskip("peft")
    model, reference, ids = tiny(), tiny(), tokens()
    plain = logits(model, ids)
    patch_model(model)
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, lora(use_dora=dora))
    torch.manual_seed(5)
    original = peft.get_peft_model(reference, lora(use_dora=dora))
    for each in (adapted, original):
        torch.manual_seed(6)
        optimiser = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            optimiser.zero_grad()
            each.train()(ids, labels=ids).loss.backward()
            optimiser.step()
        each.eval()
    expected = logits(original, ids)
    for (name, a), (_, b) in zip(adapted.named_parameters(), original.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(logits(adapted, ids), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(greedy(adapted), greedy(original))
    assert calls(adapted, ids)["attention"] == LAYERS
    with adapted.disable_adapter():
        close(logits(adapted, ids), plain)
    merged = adapted.merge_and_unload()
    assert merged is model and is_patched(model)
    torch.testing.assert_close(logits(model, ids), logits(original.merge_and_unload(), ids), rtol=1e-4, atol=1e-4)
    unpatch_model(model)
    assert in_order(model)


def test_several_adapters() -> None:
    peft = pytest.importorskip("peft")
    model, ids = tiny(), tokens()
    adapted = peft.get_peft_model(model, lora())
    adapted.add_adapter("other", lora(target_modules=["k_proj", "gate_proj"]))
    expected = {}
    for name in ("default", "other"):
        adapted.set_adapter(name)
        expected[name] = logits(adapted, ids)
    with patched(adapted):
        for name in ("default", "other", "default"):
            adapted.set_adapter(name)
            close(logits(adapted, ids), expected[name])
        adapted.delete_adapter("other")
        close(logits(adapted, ids), expected["default"])


def test_adapters_saved_and_loaded(tmp_path: Path) -> None:
    """save_pretrained of adapters on a patched model, and PeftModel.from_pretrained on another patched one."""
    peft = pytest.importorskip("peft")
    ids, models = tokens(), [tiny(), tiny()]
    for model in models:
        patch_model(model)
    adapted = peft.get_peft_model(models[0], lora())
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(models[1], tmp_path)
    assert torch.equal(logits(loaded, ids), logits(adapted, ids))
    loaded = peft.PeftModel.from_pretrained(tiny(), tmp_path)
    close(logits(loaded, ids), logits(adapted, ids))


@pytest.mark.parametrize("kind", ["PrefixTuningConfig", "PromptTuningConfig", "IA3Config"])
def test_other_adapters(kind: str) -> None:
    """Learned keys and values, learned tokens, learned scales: numbers and gradients."""
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    if kind == "IA3Config":
        options |= {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
        options |= {"init_ia3_weights": False}
    else:
        options |= {"num_virtual_tokens": 3}
    ids = tokens()
    for first in (True, False):
        model = tiny()
        if not first:
            patch_model(model)
        unpatched = tiny()
        torch.manual_seed(5)
        adapted = peft.get_peft_model(model, getattr(peft, kind)(**options))
        torch.manual_seed(5)
        reference = peft.get_peft_model(unpatched, getattr(peft, kind)(**options))
        if first:
            patch_model(adapted)
        for each in (adapted, reference):
            each.train().zero_grad()
            each(input_ids=ids, labels=ids).loss.backward()
            each.eval()
        gradients = [
            [p.grad for p in each.parameters() if p.requires_grad and p.grad is not None]
            for each in (adapted, reference)
        ]
        assert gradients[1] and len(gradients[0]) == len(gradients[1])
        for a, b in zip(*gradients, strict=True):
            assert b.abs().max() > 0
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            close(adapted(input_ids=ids).logits, reference(input_ids=ids).logits)
        made = [greedy(each, attention_mask=torch.ones_like(ids)) for each in (adapted, reference)]
        assert torch.equal(*made)


# accelerate


def offloaded(kind: str, model: Model, folder: Path) -> Model:
    accelerate = pytest.importorskip("accelerate")
    cpu = torch.device("cpu")
    if kind == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=cpu)
    if kind == "disk_offload":
        return accelerate.disk_offload(model, str(folder), execution_device=cpu)
    pieces = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    pieces |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
    return accelerate.dispatch_model(model, pieces, main_device="cpu", offload_dir=str(folder), force_hooks=True)


OFFLOADS = pytest.mark.parametrize("kind", ["cpu_offload", "disk_offload", "dispatch_model"])


@OFFLOADS
def test_offload_before(kind: str, tmp_path: Path) -> None:
    """Weights that come when they are needed: such modules are left, and the model runs as it did."""
    model, ids = tiny(), tokens()
    plain = logits(model, ids)
    offloaded(kind, model, tmp_path)
    expected, made = logits(model, ids), greedy(model)
    close(expected, plain)
    report = patch_model(model)
    assert any("meta" in row.reason or "forward was replaced" in row.reason for row in report.left)
    close(logits(model, ids), expected)
    assert torch.equal(greedy(model), made)
    unpatch_model(model)
    assert in_order(model) and torch.equal(logits(model, ids), expected)


@OFFLOADS
@pytest.mark.parametrize("weights", [None, "int8"])
def test_offload_after(kind: str, weights: str | None, tmp_path: Path) -> None:
    """A patched model whose weights are moved out runs as it did, and can be unpatched meanwhile or afterwards."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = tiny(), tokens()
    original = logits(model, ids)
    patch_model(model, weights=weights)
    expected, made = logits(model, ids), greedy(model)
    offloaded(kind, model, tmp_path)
    assert any(p.is_meta for p in model.parameters())
    close(logits(model, ids), expected)
    assert torch.equal(greedy(model), made)
    if weights is None:
        unpatch_model(model)
        assert in_order(model)
        close(logits(model, ids), original)
        patch_model(model)
        close(logits(model, ids), original)
    accelerate.hooks.remove_hook_from_submodules(model)
    if weights is None:
        unpatch_model(model)
    if kind == "cpu_offload" and weights is None:
        close(logits(model, ids), original)


def test_device_map(tmp_path: Path) -> None:
    """from_pretrained with device_map="auto" on a machine without an accelerator."""
    pytest.importorskip("accelerate")
    tiny().save_pretrained(tmp_path)
    for device_map in ("auto", "cpu", {"": "cpu"}):
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, device_map=device_map)
        expected = logits(model, tokens())
        with patched(model, strict=True):
            close(logits(model, tokens()), expected)
            assert calls(model, tokens())["attention"] == LAYERS


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("first", ["patched", "prepared"])
def test_accelerator(precision: str, first: str) -> None:
    """Accelerator().prepare, a step of training, unwrap_model."""
    accelerate = pytest.importorskip("accelerate")
    ids = tokens()

    def step(patching: str | None) -> tuple[Model, Tensor, list[Tensor]]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model = tiny()
        if patching == "patched":
            patch_model(model)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimiser = accelerator.prepare(model.train(), optimiser)
        if patching == "prepared":
            patch_model(prepared)
        accelerator.backward(prepared(ids, labels=ids).loss)
        optimiser.step()
        model.eval()
        result = logits(prepared, ids)
        assert result.dtype == torch.float32
        unwrapped = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False)
        return unwrapped, result, [p.detach() for p in unwrapped.parameters()]

    _, expected, parameters = step(None)
    model, actual, trained = step(first)
    assert all(map(torch.equal, trained, parameters))
    close(actual, expected)
    assert is_patched(model) and calls(model, ids)["attention"] == LAYERS
    unpatch_model(model)
    assert in_order(model)


# Options


def test_context() -> None:
    model, ids = tiny(), tokens()
    before, expected = identity(model), logits(model, ids)
    with patched(model, skip=["lm_head"]) as report:
        assert is_patched(model) and [row.name for row in report.left] == ["lm_head"]
        with pytest.raises(ValueError, match="model must not be patched already"), patched(model):
            pass
        assert is_patched(model)
    assert identity(model) == before
    with pytest.raises(ZeroDivisionError), patched(model):
        1 / 0  # noqa: B018
    assert identity(model) == before
    with patched(model):  # undone in the body
        unpatch_model(model)
    assert identity(model) == before and torch.equal(logits(model, ids), expected)
    with patched(nn.Linear(2, 2)) as report:
        assert report.reason
    with pytest.raises(ValueError, match="strict=True"), patched(nn.Linear(2, 2), strict=True):
        pass
    with pytest.raises(TypeError), patched(None):
        pass


def test_only_and_skip() -> None:
    model, ids = tiny(), tokens()
    expected = logits(model, ids)
    cases: list[tuple[dict[str, Any], dict[str, int]]] = [
        ({"only": []}, {}),
        ({"only": ["lm_head"]}, {"linear": 1}),
        ({"only": ["*.mlp"], "skip": ["model.layers.1"]}, {"fused_linear": 1, "linear": 1, "swiglu": 1}),
        ({"skip": ["*"]}, {}),
        ({"skip": ["model"]}, {"linear": 1}),
        ({"only": ["*norm"]}, {"rms_norm": 2 * LAYERS + 1}),
        ({"only": ["*norm", "model.layers.?"]}, {"rms_norm": 1, "add_rms_norm": 2 * LAYERS}),
    ]
    for options, counts in cases:
        with patched(model, **options) as report:
            assert calls(model, ids) == counts, options
            close(logits(model, ids), expected)
            assert torch.equal(greedy(model), greedy(model, use_cache=False))
            assert all("skip=" in row.reason or "only" in row.reason or "was left" in row.reason for row in report.left)
    for name in ("only", "skip"):
        for wrong in ("lm_head", [1]):
            with pytest.raises(TypeError, match=f"patch_model: {name} must be a sequence of patterns, got"):
                patch_model(model, **{name: wrong})
    with pytest.raises(ValueError, match=r"strict=True, but these would be left: lm_head \(skip='lm_head'\)"):
        patch_model(model, skip=["lm_head"], strict=True)
    assert in_order(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [None, "int8"])
def test_verify(dtype: torch.dtype, weights: str | None) -> None:
    model, ids = tiny(dtype), tokens()
    report = patch_model(model, verify=True, weights=weights, strict=True)
    found = report.verification
    assert found is not None and found.tokens == 64
    if weights is None:
        assert found.difference <= (2e-5 if dtype == torch.float32 else 2 * found.original_difference)
        assert found.agreement >= 0.9
    else:
        assert 1e-4 < found.difference < 2
    assert (found.original_difference > 0) == (dtype == torch.bfloat16)
    assert "verified: largest logit difference" in str(report)
    assert patch_model(model).verification == found and logits(model, ids).dtype == dtype


@pytest.mark.parametrize("weights", [None, "int8"])
def test_verify_that_fails(weights: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while the patched model is measured takes the patch back, where there is a way."""
    from torch_infini.patch.verification import Measurement

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Measurement, "compare", interrupted)
    model = tiny()
    before = identity(model)
    with pytest.raises(KeyboardInterrupt):
        patch_model(model, verify=True, weights=weights)
    assert is_patched(model) == (weights is not None)
    if weights is None:
        assert identity(model) == before


@pytest.mark.parametrize("call", [0, 1, 5, 13])
@pytest.mark.parametrize("function", ["Verifier.plan", "Verifier.choose", "swap", "link", "register"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_interrupted(monkeypatch: pytest.MonkeyPatch, function: str, call: int, weights: str | None) -> None:
    """KeyboardInterrupt anywhere before the first weight is freed changes nothing."""
    import torch_infini.patch.apply as apply
    from torch_infini.patch import interface
    from torch_infini.patch.verify import Verifier

    owner: Any = {"swap": apply, "link": apply, "register": interface}.get(function, Verifier)
    name = function.rpartition(".")[2]
    real, count = getattr(owner, name), iter(range(1000))
    happened = []

    def interrupted(*args: Any) -> Any:
        if next(count) == call:
            happened.append(call)
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(owner, name, interrupted)
    model, ids = tiny(intermediate_size=128).train(), tokens()
    before, expected = identity(model), logits(model, ids)
    try:
        patch_model(model, weights=weights)
    except KeyboardInterrupt:
        assert happened
        assert identity(model) == before and not is_patched(model) and in_order(model)
        assert torch.equal(logits(model, ids), expected)
    else:
        assert not happened
    monkeypatch.undo()
    if happened:
        patch_model(model, strict=True)
        close(logits(model, ids), expected)


def test_patched_already() -> None:
    """The model, a part of it, and a wrapper around it."""
    peft = pytest.importorskip("peft")
    model, ids = tiny(), tokens()
    patch_model(model)
    expected = logits(model, ids)
    assert patch_model(model, weights="int8", verify=True).already_patched
    adapted = peft.get_peft_model(model, lora(init_lora_weights=True))
    with pytest.raises(ValueError, match="model must not contain patched modules, got base_model.model"):
        patch_model(adapted)
    with pytest.raises(ValueError, match="model must not contain patched modules, got layers.0"):
        patch_model(model.model)
    with pytest.raises(ValueError, match="unpatch_model: model must be patched"):
        unpatch_model(adapted)
    close(logits(adapted, ids), expected)


def test_misaligned_weights_get_memory_of_their_own() -> None:
    """A checkpoint's file begins its tensors anywhere in a cache line; kernels read whole lines."""
    model, ids = tiny(tie_word_embeddings=True), tokens()
    expected = logits(model, ids)
    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]

    def misaligned(weight: Tensor) -> Tensor:
        """As a mapped file gives it: a memory that is the weight's alone and begins where it will."""
        data = bytearray(weight.nbytes + 64)
        start = next(i for i in range(0, 64, 4) if torch.frombuffer(data, dtype=torch.uint8, offset=i).data_ptr() % 64)
        return torch.frombuffer(memoryview(data)[start : start + weight.nbytes], dtype=weight.dtype).view(weight.shape)

    for _, module in linear:
        module.weight.data = misaligned(module.weight).copy_(module.weight.data)
        assert module.weight.data_ptr() % 64 and module.weight.untyped_storage().nbytes() == module.weight.nbytes
    big = torch.empty(linear[0][1].weight.numel() + 1)
    linear[0][1].weight.data = big[1:].view(linear[0][1].weight.shape).copy_(linear[0][1].weight.data)
    parameters, places = list(model.parameters()), [m.weight.data_ptr() for _, m in linear]
    patch_model(model, skip=["model.layers.1"])
    for i, ((name, module), place) in enumerate(zip(linear, places, strict=True)):
        left = i == 0 or ".1." in name  # a part of a larger memory, and what is skipped
        assert (module.weight.data_ptr() == place) == left, name
        assert left or module.weight.data_ptr() % 64 == 0
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    close(logits(model, ids), expected)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("rows", [3, 700])  # 700 rows take more than a megabyte: large pages are asked for
def test_moved(rows: int) -> None:
    x = torch.randn(1000, rows).t()[:, ::2]
    y = moved(x)
    assert torch.equal(x, y) and y.is_contiguous() and y.data_ptr() % 64 == 0
    assert y.untyped_storage().nbytes() == y.nbytes and torch.equal(y.clone(), y.mul_(1))
