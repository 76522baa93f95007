"""patch_model(weights="packed"): exact values in panels instead of rows, and what can be done with such a model."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import torch_infini
from support.tiny_llama import LAYERS, calls, greedy, in_order, logits, tiny, tokens
from torch_infini.patch import is_patched, load_patched, patch_model, patched, save_patched, unpatch_model
from torch_infini.patch.layers.fused import FUSED
from torch_infini.patch.layers.packed_linear import PackedLinear
from torch_infini.testing.patched_families import FAMILIES, Errors, Family, exact_logits, prompts

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

Model = Any
BF16 = torch.bfloat16


def small(dtype: torch.dtype = BF16, **changes: Any) -> Model:
    """q, k, v, gate and up begin and end inside of panels of 48 rows; an odd width has half a word more."""
    return tiny(dtype, **{"intermediate_size": 129, "attention_bias": True, **changes})


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_state(model: nn.Module, expected: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        assert type(state[name]) is Tensor and state[name].dtype == tensor.dtype
        assert torch.equal(state[name], tensor), name


def packed_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def test_values_memory_and_way_back() -> None:
    """The state is the original's, the rows are freed, and unpatch_model restores all of it."""
    model, ids = small(), tokens()
    before, expected = state_of(model), logits(model, ids)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    old = [weakref.ref(m.weight) for m in linear]
    count = sum(m.weight.numel() for m in linear)
    report = patch_model(model, weights="packed", strict=True, verify=True)
    gc.collect()
    assert not [ref for ref in old if ref() is not None]
    rows = [row for row in report.rows if row.op == "linear_packed"]
    biases = sum(m.bias.numel() for m in linear if m.bias is not None)
    assert len(rows) == 7 * LAYERS + 1 and sum(row.parameters for row in rows) == count + biases
    assert sum(row.bytes for row in rows) == 2 * (count + biases) and "linear_packed" in str(report)
    storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in model.buffers() if b.dim() == 4}
    assert len(storages) == 4 * LAYERS + 1 and sum(storages.values()) < 2 * count * 1.5  # small: much is padding
    assert "packed" in repr(model.lm_head) and model.dtype == BF16
    same_state(model, before)
    assert torch.equal(model.lm_head.weight, before["lm_head.weight"])
    assert calls(model, ids)["linear_packed"] == 4 * LAYERS + 1 and "linear" not in calls(model, ids)
    assert relative(logits(model, ids), expected) < 0.02
    assert patch_model(model, weights="packed").already_patched
    unpatch_model(model)
    same_state(model, before)
    assert in_order(model) and torch.equal(logits(model, ids), expected)
    assert all(p.requires_grad for p in model.parameters()) and not [b for b in model.buffers() if b.dim() == 4]
    with patched(model, weights="packed"):
        assert packed_names(model)
    assert in_order(model) and torch.equal(logits(model, ids), expected)
    with pytest.raises(ValueError, match="or 'packed', got 'int8'"), patched(model, weights="int8"):
        pass


def test_rows_alone() -> None:
    """A token has the same bits alone and in a batch, in each layer and in the model; so has a layer by itself."""
    model = small()
    patch_model(model, weights="packed")
    ids = tokens(5)
    with torch.no_grad():
        for layer in (model.model.layers[0].mlp.down_proj, model.model.layers[1].self_attn.v_proj, model.lm_head):
            x = torch.randn(21, layer.in_features, dtype=BF16)
            together = layer(x)
            assert together.is_contiguous() and all(
                torch.equal(layer(x[i : i + 1]), together[i : i + 1]) for i in range(21)
            )
            assert relative(together, nn.functional.linear(x.double(), layer.weight.double(), None)) < 0.5
        together = logits(model, ids)
        assert all(torch.equal(logits(model, ids[i : i + 1]), together[i : i + 1]) for i in range(5))


@pytest.mark.full(beyond=3)
@pytest.mark.parametrize(
    "family",
    [FAMILIES[i] for i in (2, 3, 19, *range(2), *range(4, 19), *range(20, 22))],
    ids=lambda family: family.name,
)
def test_families(family: Family) -> None:
    """The error against float64 is at most 1.05 times the original's own, as with weights in rows."""
    model, ids = family.build(BF16), prompts()
    state, exact = state_of(model), exact_logits(family, BF16, ids)
    before = Errors.of(logits(model, ids), exact)
    report = patch_model(model, weights="packed", strict=True)
    after = Errors.of(logits(model, ids), exact)
    assert after.mean <= 1.05 * before.mean and after.percentile <= 1.05 * before.percentile
    tied = bool(model.config.tie_word_embeddings)
    assert ("lm_head" in packed_names(model)) != tied and len(packed_names(model)) >= 4
    rows = {row.name: (row.op, row.reason) for row in report.rows}
    kept = ("linear", "its weight stays in rows, because another module has it too")
    assert rows["lm_head"] == (kept if tied else ("linear_packed", ""))
    same_state(model, state)
    unpatch_model(model)
    same_state(model, state)


def test_generate() -> None:
    model, ids = small(), tokens()
    patch_model(model, weights="packed")
    for kind in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
        made = model.generate(ids, max_new_tokens=8, do_sample=False, **kind)
        for i in range(9, 17):
            last = logits(model, made[:, :i])[:, -1].float()
            assert (last.gather(1, made[:, i : i + 1])[:, 0] >= last.amax(-1) - 0.1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Weights in other dtypes stay in rows, and the report says so; also with strict."""
    model, ids = small(dtype), tokens()
    with patched(model):
        expected = logits(model, ids)
    before = dict(model.named_parameters())
    report = patch_model(model, weights="packed", strict=True)
    assert not packed_names(model) and torch.equal(logits(model, ids), expected)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    name = str(dtype).removeprefix("torch.")
    reason = f"its weight stays in rows, because panels hold bfloat16, not {name}"
    assert reason in str(report) and [row.reason for row in report.rows].count(reason) == 7 * LAYERS + 1


def test_skip_and_left() -> None:
    """Layers that `skip` names and layers of another class stay; the others are packed, together where all are."""

    class Own(nn.Linear):
        pass

    model, ids = small(), tokens()
    model.model.layers[1].mlp.up_proj.__class__ = Own
    expected = logits(model, ids)
    report = patch_model(model, weights="packed", skip=("*.o_proj", "model.layers.0.self_attn.k_proj"))
    names = packed_names(model)
    assert "model.layers.0.self_attn.q_proj" in names and "model.layers.1.mlp.gate_proj" in names
    assert not [name for name in names if name.endswith(("o_proj", "0.self_attn.k_proj", "1.mlp.up_proj"))]
    reasons = {row.name: row.reason for row in report.left}
    assert reasons["model.layers.1.mlp.up_proj"] == "it is a Own, not a torch.nn.Linear"
    assert reasons["model.layers.0.self_attn.k_proj"] == "skip='model.layers.0.self_attn.k_proj'"
    assert FUSED not in vars(model.model.layers[0].self_attn.q_proj)
    assert FUSED in vars(model.model.layers[1].self_attn.q_proj)
    assert relative(logits(model, ids), expected) < 0.02


@pytest.mark.parametrize("name", ["T5", "Mamba"])
def test_weights_that_a_forward_reads(name: str) -> None:
    """Layers stay in rows if the model's own forward reads their weights, for which each call would make a copy."""
    model: Model
    if name == "T5":
        sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, tie_word_embeddings=False))
        inputs, last = {"input_ids": tokens() % 64, "decoder_input_ids": tokens() % 64}, "wo"
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "state_size": 8}
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, tie_word_embeddings=False))
        inputs, last = {"input_ids": tokens() % 64}, "lm_head"
    model = model.eval().to(BF16)
    before, expected = state_of(model), logits(model, **inputs)
    report = patch_model(model, weights="packed")
    rows = {row.name: row for row in report.rows if row.name.endswith(last)}
    assert rows and {row.reason for row in rows.values()} == {
        "its weight stays in rows, because the model's forward reads it"
    }
    names = packed_names(model)
    assert names and not names & rows.keys()
    assert relative(logits(model, **inputs), expected) < 0.02
    same_state(model, before)


def test_wrong_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the packed model computes something else for two tokens, all weights are rows again; the report says so."""
    import torch_infini.patch.layers.packed_linear as module

    real = module.linear_packed
    monkeypatch.setattr(module, "linear_packed", lambda *arguments: real(*arguments) * 1.5)
    model, ids = small(), tokens()
    before = state_of(model)
    with patched(model):
        expected = logits(model, ids)
    report = patch_model(model, weights="packed")
    assert not packed_names(model) and torch.equal(logits(model, ids), expected)
    reasons = [row.reason for row in report.replaced if "it gives different results for 2 tokens" in row.reason]
    assert len(reasons) == 7 * LAYERS + 1
    same_state(model, before)


def test_weights_with_nan() -> None:
    """Values are copied as they are."""
    model = small()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3, 4] = torch.nan
        model.lm_head.weight[0, 0] = torch.inf
    before = model.model.layers[0].self_attn.q_proj.weight.view(torch.int16).clone()
    patch_model(model, weights="packed", strict=True)
    assert torch.equal(model.state_dict()["model.layers.0.self_attn.q_proj.weight"].view(torch.int16), before)
    assert model.lm_head.weight[0, 0] == torch.inf


@pytest.mark.parametrize("call", [0, 4, 8])
def test_interrupted(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """An interrupt between layers leaves a working model, with a report of which layers are packed."""
    import torch_infini.patch.layers.packed_linear as module

    real, count = module.swap, iter(range(100))

    def interrupted(*args: Any) -> None:
        if next(count) == call:
            raise KeyboardInterrupt
        real(*args)

    model, ids = small(), tokens()
    before, expected = state_of(model), logits(model, ids)
    with monkeypatch.context() as patching, pytest.raises(KeyboardInterrupt):
        patching.setattr(module, "swap", interrupted)
        patch_model(model, weights="packed")
    assert is_patched(model) and len(packed_names(model)) == call
    report = patch_model(model)
    rows = [row for row in report.rows if row.reason == "interrupted"]
    assert report.already_patched and len(rows) == 7 * LAYERS + 1 - call and {row.op for row in rows} == {"linear"}
    assert relative(logits(model, ids), expected) < 0.02
    unpatch_model(model)
    same_state(model, before)
    assert torch.equal(logits(model, ids), expected)


# What else is done with models


def test_copies() -> None:
    model, ids = small(), tokens()
    patch_model(model, weights="packed")
    before, expected, counts = state_of(model), logits(model, ids), calls(model, ids)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(clone, ids), expected) and calls(clone, ids) == counts
        assert {p.data_ptr() for p in clone.buffers()}.isdisjoint(p.data_ptr() for p in model.buffers())
        same_state(clone, before)
        assert len(pickle.dumps(clone)) < len(pickle.dumps(model)) + 10_000
        unpatch_model(clone)
        same_state(clone, before)
        assert in_order(clone)
    same_state(model, before)


def test_state_dict() -> None:
    """The state is that of dense weights, and goes to any model of the class and back."""
    model, other, dense, ids = small(), small(seed=7), small(seed=7), tokens()
    for each in (model, other):
        patch_model(each, weights="packed")
    expected = logits(model, ids)
    clone = pickle.loads(pickle.dumps(model))
    with torch.inference_mode():
        clone(ids)
    assert not any(b.is_inference() for b in clone.buffers())
    for each in (other, clone):
        assert each.load_state_dict(model.state_dict()).missing_keys == []
        assert torch.equal(logits(each, ids), expected)
    dense.load_state_dict(model.state_dict())
    same_state(dense, model.state_dict())
    state = model.state_dict()
    del state["lm_head.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*lm_head.weight"):
        other.load_state_dict(state)
    assert other.load_state_dict(state, strict=False).missing_keys == ["lm_head.weight"]
    with pytest.raises(RuntimeError, match=r"lm_head.weight: it must have shape \[128, 64\], got \[3, 64\]"):
        other.load_state_dict({**state, "lm_head.weight": torch.zeros(3, 64)})
    with pytest.raises(RuntimeError, match="Unexpected key.*lm_head.weights"):
        other.load_state_dict({**model.state_dict(), "lm_head.weights": torch.zeros(3)})
    other.load_state_dict({name: x.float() for name, x in model.state_dict().items()}, assign=False)
    assert torch.equal(logits(other, ids), expected)


def test_other_dtypes_later() -> None:
    """to(dtype) makes layers dense, with exact values, and patched; so does another device."""
    model, ids = small(), tokens()
    patch_model(model, weights="packed")
    before, packed = state_of(model), packed_names(model)
    model.to(BF16).to("cpu").to(memory_format=torch.channels_last).requires_grad_(False)
    assert packed_names(model) == packed and torch.equal(model.lm_head.weight, before["lm_head.weight"])
    logits(model, ids)
    for dtype in (torch.float32, torch.float16, torch.float64, BF16):
        clone = copy.deepcopy(model).to(dtype)
        assert bool(packed_names(clone)) == (dtype == BF16)
        same_state(clone, {name: x.to(dtype) for name, x in before.items()})
        with patched(copy.deepcopy(small(dtype)), skip=()) as report:
            assert report.replaced
        assert logits(clone, ids).dtype == dtype
        unpatch_model(clone)
        assert in_order(clone)
    wide = copy.deepcopy(model).float()
    reference = small().float()
    patch_model(reference)
    assert torch.equal(logits(wide, ids), logits(reference, ids)) and calls(wide, ids) == calls(reference, ids)
    old = [weakref.ref(b.untyped_storage()) for b in model.buffers() if b.dim() == 4]
    model.to("meta")
    gc.collect()
    assert not [ref for ref in old if ref() is not None] and model.lm_head.weight.is_meta


def test_written_weight() -> None:
    """`weight` is a copy: writing to it raises; another parameter in its place makes the layer dense."""
    model, ids = small(), tokens()
    patch_model(model, weights="packed")
    layer = model.model.layers[0].self_attn.k_proj
    assert isinstance(layer.weight, Tensor) and type(layer.weight + 0) is type(layer.weight.data.clone()) is Tensor
    for write in (
        lambda: layer.weight.add_(1),
        lambda: layer.weight.data.add_(1),
        lambda: layer.weight.data.__setitem__(0, 1),
        lambda: layer.weight.copy_(torch.zeros(32, 64)),
        lambda: setattr(layer.weight, "data", torch.zeros(32, 64)),
        lambda: setattr(layer, "weight", torch.zeros(32, 64)),
    ):
        with pytest.raises((ValueError, AttributeError), match=r"packed layer is a copy|no setter"):
            write()
    unpatched = small()
    with torch.no_grad():
        unpatched.model.layers[0].self_attn.k_proj.weight.mul_(2)
        layer.weight = nn.Parameter(2 * layer.weight)
    assert not isinstance(layer, PackedLinear) and type(layer.weight) is nn.Parameter
    assert relative(logits(model, ids), logits(unpatched, ids)) < 0.02
    same_state(model, state_of(unpatched))
    with pytest.raises(RuntimeError, match=r"must have 64 columns, got \[1, 65\]"):
        model.lm_head(torch.zeros(1, 65, dtype=BF16))


def test_hooks_and_changes() -> None:
    """Hooks of single layers are called, and removed again; biases may change between calls."""
    model, ids, seen = small(), tokens(), []
    patch_model(model, weights="packed")
    expected = logits(model, ids)
    attention = model.model.layers[0].self_attn
    for layer in (attention.k_proj, model.model.layers[1].mlp.up_proj, model.lm_head):
        handle = layer.register_forward_hook(lambda module, args, y: seen.append(y))
        assert torch.equal(logits(model, ids), expected)
        handle.remove()
    assert len(seen) == 3 and torch.equal(logits(model, ids), expected)
    assert calls(model, ids)["linear_packed"] == 4 * LAYERS + 1
    changed = small()
    with torch.no_grad():
        changed.model.layers[0].self_attn.k_proj.bias.add_(1)
        attention.k_proj.bias.add_(1)
    assert not torch.equal(logits(model, ids), expected)
    assert relative(logits(model, ids), logits(changed, ids)) < 0.02
    attention.k_proj.bias = None
    changed.model.layers[0].self_attn.k_proj.bias = None
    assert relative(logits(model, ids), logits(changed, ids)) < 0.02


def test_gradients() -> None:
    """Of the input, of adapters and of what stays a parameter; packed weights themselves get none."""
    model, original, ids = small(), small(), tokens()
    patch_model(model, weights="packed")
    results = []
    for each in (model, original):
        loss = each(ids, labels=ids).loss
        loss.backward()
        results.append((loss.detach(), each.model.embed_tokens.weight.grad, each.model.norm.weight.grad))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)  # the original's products on the same values
    with torch.autocast("cpu", BF16):
        assert torch.equal(logits(model, ids), logits(original, ids))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["aot_eager", "infini"])
def test_compile(backend: str) -> None:
    model, ids = small(num_hidden_layers=1), tokens()
    patch_model(model, weights="packed")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert relative(logits(compiled, ids, use_cache=False), logits(model, ids, use_cache=False)) < 0.02


def test_tie_and_resize() -> None:
    for tied in (False, True):
        model, ids = small(tie_word_embeddings=tied), tokens()
        patch_model(model, weights="packed")
        expected = logits(model, ids)
        model.tie_weights()
        assert torch.equal(logits(model, ids), expected)
        model.resize_token_embeddings(140, mean_resizing=False)
        result = logits(model, ids)
        assert result.shape[-1] == 140 and relative(result[..., :128], expected) < 0.02


# Adapters


def lora() -> Any:
    peft = pytest.importorskip("peft")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def test_lora_on_top() -> None:
    """Adapters on packed layers give what they give on dense ones; a merge raises, and works once unpatched."""
    peft = pytest.importorskip("peft")
    model, original, ids = small(), small(), tokens()
    patch_model(model, weights="packed")
    plain, results = logits(model, ids), []
    for each in (model, original):
        torch.manual_seed(5)
        adapted = peft.get_peft_model(each, lora())
        loss = adapted(ids, labels=ids).loss
        loss.backward()
        results.append((adapted, [loss.detach(), *(p.grad for p in adapted.parameters() if p.grad is not None)]))
    (adapted, actual), (reference, expected) = results
    assert len(actual) == len(expected) == 1 + 3 * 2 * LAYERS
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    assert relative(logits(adapted, ids), logits(reference, ids)) < 0.02
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted, ids), plain)
    for safe in (False, True):
        with pytest.raises(ValueError, match="weight of a packed layer is a copy.*call unpatch_model, write to it"):
            adapted.merge_adapter(safe_merge=safe)
    unpatch_model(adapted)
    merged, wanted = adapted.merge_and_unload(), reference.merge_and_unload()
    same_state(merged, state_of(wanted))


def test_lora_before() -> None:
    """The layers below adapters are packed, the adapters are not."""
    peft = pytest.importorskip("peft")
    model, ids = small(), tokens()
    adapted = peft.get_peft_model(model, lora())
    expected = logits(adapted, ids)
    patch_model(adapted, weights="packed")
    names = packed_names(adapted)
    assert len(names) == 7 * LAYERS + 1 and not any("lora_" in name for name in names)
    assert relative(logits(adapted, ids), expected) < 0.02


# Files


def test_files(tmp_path: Path) -> None:
    """Folders hold dense weights, by save_patched and by the model's own method, and transformers alone reads them."""
    model, ids = small(), tokens()
    before = state_of(model)
    patch_model(model, weights="packed")
    save_patched(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        stored = load_file(tmp_path / folder / "model.safetensors")
        assert stored.keys() == before.keys() and all(torch.equal(stored[name], before[name]) for name in before)
        original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert not is_patched(original)
        same_state(original, before)
    loaded = load_patched(tmp_path / "ours")
    assert is_patched(loaded) and not packed_names(loaded)
    same_state(loaded, before)
    assert relative(logits(loaded, ids), logits(model, ids)) < 0.02

    asked = torch_infini.InfiniConfig("packed")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", quantization_config=asked)
    patch_model(original, weights="packed")
    assert len(packed_names(read)) == 7 * LAYERS + 1 and torch.equal(logits(read, ids), logits(original, ids))
    read.save_pretrained(tmp_path / "again")
    same_state(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again"), before)
    with pytest.raises(
        ValueError, match="cannot be packed: its weight stays in rows, because panels hold bfloat16, not float32"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "theirs", quantization_config=asked, dtype=torch.float32
        )


def test_greedy_tokens() -> None:
    """Of a float32 model nothing changes, of a bfloat16 one the tokens are those of weights in rows, up to rounding."""
    model = tiny(BF16)
    patch_model(model, weights="packed")
    assert greedy(model, return_dict_in_generate=False).shape == (2, 21)
