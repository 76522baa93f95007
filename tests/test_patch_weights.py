"""patch_model(weights="int8" | "int4"): memory, numbers, what can be done with such a model, files.

The numbers are compared with a model that has the dequantized weights in its linear layers.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import torch_infini
from support.tiny_llama import LAYERS, calls, close, identity, logits, tiny, tokens
from torch_infini.patch import is_patched, load_patched, patch_model, patched, save_patched, unpatch_model
from torch_infini.patch.layers.quantized_linear import QuantizedLinear
from torch_infini.weights import FORMATS, best, quantize

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

Model = Any
ALWAYS = ("group8", "table4")  # formats that quantize x
EACH = pytest.mark.parametrize("weights", ["int8", "int4", "group8", "table4"], indirect=True)
PROJECTIONS = 7 * LAYERS


def small(dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    """Rows of a multiple of 32, which int4 needs."""
    return tiny(dtype, **{"intermediate_size": 128, **changes})


def dequantized(model: Model) -> Model:
    """Return an unpatched model in float32 with the dequantized weights of a quantized one."""
    original = type(model).infini_original(copy.deepcopy(vars(model)["_infini_patch"].config.original)).eval()
    state = {name: value for name, value in model.state_dict().items() if "weight_" not in name}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            state[f"{name}.weight"] = module.weight
    original.load_state_dict(state, assign=False)
    return original


def near(actual: Tensor, expected: Tensor, weights: str, passes: int = 1) -> None:
    """Compare with results of dequantized weights. Quantized x makes some per cent in gradients."""
    if best(weights, "cpu").name in ALWAYS or best("int8", "cpu").name in ALWAYS:  # the head's
        assert float((actual - expected).norm() / expected.norm()) < 0.05 * passes
    else:
        close(actual, expected, passes=passes)


def size(model: nn.Module) -> int:
    """Bytes of memory behind parameters and buffers, each once."""
    storages = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture(autouse=True)
def x_as_it_is(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Do not quantize x, except in tests of that and of formats that always do, to compare results closely."""
    if "quantizes_x" not in request.fixturenames:
        monkeypatch.setattr(quantize, "MULTIPLIES_INTEGERS", ())
    if "weights" not in request.fixturenames:
        for name in ALWAYS:
            monkeypatch.setattr(FORMATS[name], "serves_on", lambda device: False)


@pytest.fixture
def quantizes_x() -> bool:
    """Whether x is quantized here."""
    return torch_infini.cpu_capability() in quantize.MULTIPLIES_INTEGERS


@EACH
def test_x_is_quantized(weights: str, quantizes_x: bool) -> None:
    """Where that is faster, x is quantized too: results differ, but not by much."""
    model = small()
    patch_model(model, weights=weights)
    exact = dequantized(model)
    for rows in (1, quantize.QUANTIZE_X_ROWS - 1, quantize.QUANTIZE_X_ROWS, 40):
        ids = tokens(1, rows)
        actual, expected = logits(model, ids), logits(exact, ids)
        always = best(weights, "cpu").name in ALWAYS
        if always or quantizes_x and (weights == "int4" or rows >= quantize.QUANTIZE_X_ROWS):
            assert 1e-3 < float((actual - expected).norm() / expected.norm()) < 0.1
        else:
            close(actual, expected)


@EACH
def test_rows_alone(weights: str) -> None:
    """A layer gives a token the same bits alone and among others, if x is quantized or is not."""
    model = small()
    patch_model(model, weights=weights)
    layer = model.model.layers[0].mlp.down_proj
    x = torch.randn(21, layer.in_features)
    with torch.no_grad():
        together = layer(x)
        assert all(torch.equal(layer(x[i : i + 1]), together[i : i + 1]) for i in range(len(x)))


@pytest.mark.usefixtures("quantizes_x")
@pytest.mark.parametrize("weights", ["int4"], indirect=True)
def test_int4_rows_alone(weights: str) -> None:
    """The same with quantized x, for weights of 4 bits and any number of rows."""
    test_rows_alone(weights)


@pytest.mark.full(beyond=1)
@EACH
def test_compile_any_rows(weights: str, quantizes_x: bool) -> None:
    """One graph of the model: for a row, and where sizes are symbols, for few rows and for many."""
    model = small(num_hidden_layers=1)
    patch_model(model, weights=weights)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (1, 3, 40):
        ids = tokens(1, rows)
        with torch.no_grad():
            close(compiled(ids, use_cache=False).logits, logits(model, ids, use_cache=False))


# Memory and numbers


@pytest.mark.full(beyond=2)
@EACH
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_memory(weights: str, tied: bool) -> None:
    """The weights are freed, and the memory left is that of the format."""
    model = small(tie_word_embeddings=tied)
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    old = [weakref.ref(m.weight) for m in linear if not (tied and m is model.lm_head)]
    full, before = sum(m.weight.nbytes for m in linear), size(model)
    head = model.lm_head.weight.numel()
    report = patch_model(model, weights=weights, strict=True)
    gc.collect()
    assert not [ref for ref in old if ref() is not None]
    body = full // 4 - head
    rows = sum(m.out_features for m in linear) - 128
    of_format = {
        "int8": lambda numbers, rows: numbers + 4 * rows,
        "int4": lambda numbers, rows: numbers // 2 + numbers // 64 * 2 * 4,
        "group8": lambda numbers, rows: numbers + numbers // 16 + 4 * rows,
        "table4": lambda numbers, rows: numbers // 2 + numbers // 16 + 4 * rows,
    }
    format, of_head = best(weights, "cpu").name, best("int8", "cpu").name
    wanted = of_format[of_head](head, 128) + of_format[format](body, rows)
    kept = head * 4 if tied else 0  # the embedding
    assert size(model) == before - full + wanted + kept
    counted = [row for row in report.rows if row.op in (f"linear_{of_head}", f"linear_{format}")]
    assert len(counted) == PROJECTIONS + 1 and sum(row.bytes for row in counted) == wanted
    assert sum(row.parameters for row in counted) == full // 4
    assert f"linear_{format}" in str(report)


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits(weights: str, dtype: torch.dtype) -> None:
    """The logits are those of a model with the dequantized weights, and close to the original's."""
    model, ids = small(dtype, attention_bias=True, mlp_bias=True), tokens()
    before = logits(model, ids).float()
    patch_model(model, weights=weights, strict=True)
    actual, expected = logits(model, ids).float(), logits(dequantized(model), ids)
    if dtype == torch.float32:
        near(actual, expected, weights)
    relative = float((actual - before).norm() / before.norm())
    assert relative < {"int8": 0.05, "int4": 0.35}[weights]
    counts = calls(model, ids)
    op, head = (f"linear_{best(one, 'cpu').name}" for one in (weights, "int8"))
    wanted = {op: PROJECTIONS + 1} if op == head else {op: PROJECTIONS, head: 1}
    assert {name: counts[name] for name in wanted} == wanted and "linear" not in counts
    assert counts["attention"] == counts["rope_"] / 2 == LAYERS  # q and k do not lie side by side


@EACH
def test_generate(weights: str) -> None:
    model, ids = small(), tokens()
    patch_model(model, weights=weights)
    kinds: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}, {"num_beams": 2}, {"use_cache": False}]
    for kind in kinds:
        made = model.generate(ids, max_new_tokens=8, do_sample=False, **kind)
        assert made.shape == (2, 17)
        if "num_beams" not in kind:
            for i in range(9, 17):  # each is what one call for the whole prompt says
                last = logits(model, made[:, :i])[:, -1]
                assert (last.gather(1, made[:, i : i + 1])[:, 0] >= last.amax(-1) - 1e-3).all()


# What is kept out


def kinds(model: Model) -> dict[str, str]:
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found[name] = module._infini_plan.format if isinstance(module, QuantizedLinear) else "full"
    return found


def test_skip_and_only() -> None:
    model = small()
    report = patch_model(model, weights="int4", skip=("lm_head", "model.layers.0.mlp", "*.o_proj"))
    wanted = {}
    for name in kinds(model):
        left = name == "lm_head" or name.startswith("model.layers.0.mlp.") or name.endswith("o_proj")
        wanted[name] = "full" if left else best("int4", "cpu").name
    assert kinds(model) == wanted
    reasons = {row.name: row.reason for row in report.left}
    assert reasons["lm_head"] == "skip='lm_head'"
    assert reasons["model.layers.0.mlp"] == reasons["model.layers.0.mlp.up_proj"] == "skip='model.layers.0.mlp'"
    assert reasons["model.layers.1.self_attn.o_proj"] == "skip='*.o_proj'"
    close(logits(copy.deepcopy(model), tokens()), logits(model, tokens()))

    model = small()
    report = patch_model(model, weights="int8", only=("model.layers.1.*",))
    assert {name for name, kind in kinds(model).items() if kind == "int8"} == {
        name for name in kinds(model) if name.startswith("model.layers.1.")
    }
    assert {row.reason for row in report.left} == {"it is not among `only`"}


@pytest.mark.parametrize("weights", ["int4"], indirect=True)
def test_left(weights: str) -> None:
    """Weights with infinity or NaN, rows that no group divides, layers of another class are left."""

    class Own(nn.Linear):
        pass

    model = small(intermediate_size=40)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3, 4] = torch.nan
        model.lm_head.weight[0, 0] = torch.inf
    model.model.layers[1].self_attn.v_proj.__class__ = Own
    before, expected = identity(model), logits(model, tokens())
    with pytest.raises(ValueError, match="strict=True, but these would be left"):
        patch_model(model, weights=weights, strict=True)
    assert identity(model) == before
    report = patch_model(model, weights=weights)
    nan = "its weight contains infinity or NaN, which cannot be quantized"
    assert {row.name: row.reason for row in report.left} == {
        "model.layers.0.self_attn.q_proj": nan,
        "lm_head": nan,
        "model.layers.1.self_attn.v_proj": "it is a Own, not a torch.nn.Linear",
        **{
            f"model.layers.{i}.mlp.down_proj": "its rows must be a multiple of 32, int4's smallest group, got 40"
            for i in range(LAYERS)
        },
    }
    assert logits(model, tokens()).shape == expected.shape


# There is no way back


@EACH
def test_no_way_back(weights: str) -> None:
    model = small()
    patch_model(model, weights=weights)
    before = identity(model)
    with pytest.raises(ValueError) as caught:
        unpatch_model(model)
    assert str(caught.value) == (
        "torch_infini.unpatch_model: the model must have its original weights, got 15 layers with quantized weights: "
        "load the original model again."
    )
    assert identity(model) == before and is_patched(model)
    again = patch_model(model, weights=weights)
    assert again.already_patched and identity(model) == before
    with (
        pytest.raises(ValueError, match="weights must be None, because quantized weights cannot be restored"),
        patched(small(), weights=weights),
    ):
        pass
    with pytest.raises(ValueError, match="weights must be one of None, 'int4', 'int8', .*, 'auto:BITS', got 'int2'"):
        patch_model(small(), weights="int2")


@pytest.mark.parametrize("call", [0, 5, 14])
@pytest.mark.parametrize("where", ["quantize_int8", "swap"])
def test_interrupted(monkeypatch: pytest.MonkeyPatch, where: str, call: int) -> None:
    """An interrupt between layers leaves a working model, with a report of which layers are quantized."""
    import torch_infini.patch.layers.quantized_linear as module

    owner = quantize if where == "quantize_int8" else module
    real, count = getattr(owner, where), iter(range(100))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(count) == call:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    model, ids = small(), tokens()
    expected = logits(model, ids)
    with monkeypatch.context() as patching, pytest.raises(KeyboardInterrupt):
        patching.setattr(owner, where, interrupted)
        patch_model(model, weights="int8")
    assert is_patched(model) and list(kinds(model).values()).count("int8") == call
    report = patch_model(model)
    assert report.already_patched and [row.reason for row in report.left] == ["interrupted"] * (PROJECTIONS + 1 - call)
    assert (logits(model, ids) - expected).norm() < 0.05 * expected.norm()
    if call:
        with pytest.raises(ValueError, match=f"got {call} layers with quantized weights"):
            unpatch_model(model)
    else:
        unpatch_model(model)
        if where == "quantize_int8":
            assert torch.equal(logits(model, ids), expected)
        else:
            close(logits(model, ids), expected)


# What else is done with models


@EACH
def test_copies(weights: str) -> None:
    model, ids = small(), tokens()
    patch_model(model, weights=weights)
    expected, counts = logits(model, ids), calls(model, ids)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(clone, ids), expected) and calls(clone, ids) == counts
        assert {p.data_ptr() for p in clone.buffers()}.isdisjoint(p.data_ptr() for p in model.buffers())
        with pytest.raises(ValueError, match="got 15 layers"):
            unpatch_model(clone)


@EACH
def test_pickles_hold_each_number_once(weights: str) -> None:
    model, full = small(num_hidden_layers=1, hidden_size=256), small(num_hidden_layers=1, hidden_size=256)
    around = len(pickle.dumps(full)) - size(full)
    patch_model(model, weights=weights)
    for clone in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        logits(clone, tokens())
        assert size(clone) == size(model)
        assert len(pickle.dumps(clone)) - size(model) < around + 10_000


@EACH
def test_inference_mode(weights: str) -> None:
    """Weights concatenated in inference mode can be loaded into, and give gradients, outside of it."""
    model, ids = small(), tokens()
    patch_model(model, weights=weights)
    clone = pickle.loads(pickle.dumps(model))
    with torch.inference_mode():
        expected = clone(ids).logits.clone()
    assert not any(b.is_inference() for b in clone.buffers())
    clone.load_state_dict(model.state_dict())
    assert torch.equal(logits(clone, ids), expected)
    clone(ids, labels=ids).loss.backward()
    assert clone.model.embed_tokens.weight.grad.abs().max() > 0


@pytest.mark.full(beyond=1)
@EACH
def test_memory_moves_away(weights: str, tmp_path: Path) -> None:
    """Integers that are moved to another device or to a file leave no copy behind."""
    accelerate = pytest.importorskip("accelerate")
    model, ids = small(), tokens()
    patch_model(model, weights=weights)
    expected = logits(model, ids)
    old = [weakref.ref(b.untyped_storage()) for name, b in model.named_buffers() if "weight_" in name]
    accelerate.disk_offload(model, str(tmp_path), torch.device("cpu"), offload_buffers=True)
    close(logits(model, ids), expected)
    gc.collect()
    assert not [ref for ref in old if ref() is not None]

    model = small()
    patch_model(model, weights=weights)
    old = [weakref.ref(b.untyped_storage()) for name, b in model.named_buffers() if "weight_" in name]
    model.to("meta")
    gc.collect()
    assert not [ref for ref in old if ref() is not None]


@EACH
def test_state_dict(weights: str) -> None:
    """Integers are part of the state, and can be loaded into another model that was quantized in the same way."""
    model, other, ids = small(), small(seed=7), tokens()
    for each in (model, other):
        patch_model(each, weights=weights)
    assert not torch.allclose(logits(other, ids), logits(model, ids))
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other, ids), logits(model, ids))
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(small().state_dict())


@EACH
@pytest.mark.parametrize("start", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(weights: str, start: torch.dtype) -> None:
    """to(dtype) moves what is floating point; the integers and the precision of their scales stay."""
    model, ids = small(start), tokens()
    patch_model(model, weights=weights)
    layer = model.model.layers[0].mlp.up_proj
    integers, weight = layer.weight_integers.clone(), layer.weight.clone()
    reference = logits(copy.deepcopy(model).float(), ids)
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float64, torch.float32, torch.bfloat16):
        model.to(dtype)
        assert layer.weight.dtype == dtype and torch.equal(layer.weight_integers, integers)
        torch.testing.assert_close(layer.weight.float(), weight.float(), rtol=2**-8, atol=0)
        result = logits(model, ids)
        assert result.dtype == dtype
        assert (result.float() - reference).norm() < 0.1 * reference.norm()
        assert bool(calls(model, ids)) == (dtype != torch.float64)
        x = torch.randn(3, 64, dtype=dtype, requires_grad=True)
        assert layer(x).dtype == dtype and layer(x).requires_grad
    assert torch.equal(layer.weight.float(), weight.bfloat16().float())


@EACH
def test_gradients_of_the_input(weights: str) -> None:
    model, ids = small().requires_grad_(False), tokens()
    patch_model(model, weights=weights)
    assert not any(p.requires_grad for p in model.parameters())
    results = []
    for each in (model, dequantized(model)):
        embedded = each.get_input_embeddings()(ids).detach().requires_grad_()
        loss = each(inputs_embeds=embedded).logits.square().mean()
        results.append((loss.detach(), *torch.autograd.grad(loss, embedded)))
    for actual, expected in zip(*results, strict=True):
        close(actual, expected, passes=2)


def test_autocast() -> None:
    model, ids = small(), tokens()
    patch_model(model, weights="int8")
    original = dequantized(model)
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = logits(model, ids), logits(original, ids)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)  # autocast runs the original's products on the weights that the integers mean


@EACH
def test_compile(weights: str) -> None:
    model, ids = small(num_hidden_layers=1), tokens()
    patch_model(model, weights=weights)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(logits(compiled, ids, use_cache=False), logits(model, ids, use_cache=False))


def test_written_weight() -> None:
    """`weight` is a new tensor at each access: writing to it raises."""
    model = small()
    patch_model(model, weights="int8")
    layer = model.model.layers[0].self_attn.q_proj
    assert isinstance(layer.weight, Tensor) and type(layer.weight + 0) is type(layer.weight.data.clone()) is Tensor
    assert torch.equal(torch.zeros(64, 64).copy_(layer.weight), layer.weight)
    for write in (
        lambda: layer.weight.add_(1),
        lambda: layer.weight.data.add_(1),
        lambda: layer.weight.data.__setitem__(0, 1),
        lambda: layer.weight.copy_(torch.zeros(64, 64)),
        lambda: setattr(layer.weight, "data", torch.zeros(64, 64)),
        lambda: setattr(layer, "weight", nn.Parameter(torch.zeros(64, 64))),
        lambda: setattr(layer, "weight", torch.zeros(64, 64)),
    ):
        with pytest.raises((ValueError, AttributeError, KeyError)):
            write()


def test_tie_and_resize() -> None:
    """Embeddings are resized in a quantized model; a tied quantized head is replaced and tied again."""
    for tied in (False, True):
        model, ids = small(tie_word_embeddings=tied), tokens()
        patch_model(model, weights="int8")
        expected = logits(model, ids)
        model.tie_weights()
        assert torch.equal(logits(model, ids), expected)
        model.resize_token_embeddings(140, mean_resizing=False)
        result = logits(model, ids)
        assert result.shape[-1] == 140
        assert (result[..., :128] - expected).norm() < 0.02 * expected.norm()


# Adapters


def lora(**changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    values = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**{**values, **changes})


@EACH
def test_lora_on_top(weights: str) -> None:
    """Adapters on quantized layers: results of the dequantized model, gradients, on and off, no silent merge."""
    peft = pytest.importorskip("peft")
    model, ids = small(), tokens()
    patch_model(model, weights=weights)
    original = dequantized(model)
    plain = logits(model, ids)
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, lora())
    torch.manual_seed(5)
    reference = peft.get_peft_model(original, lora())
    results = []
    for each in (adapted, reference):
        loss = each(ids, labels=ids).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    assert len(results[0]) == 1 + 3 * 2 * LAYERS
    for actual, expected in zip(*results, strict=True):
        near(actual, expected, weights, passes=2)
    assert not torch.allclose(logits(adapted, ids), plain, atol=0.1)
    near(logits(adapted, ids), logits(reference, ids), weights)
    with adapted.disable_adapter():
        assert torch.equal(logits(adapted, ids), plain)
    for safe in (False, True):
        with pytest.raises(ValueError, match="merge adapters before patch_model"):
            adapted.merge_adapter(safe_merge=safe)
    assert torch.equal(logits(adapted.unload(), ids), plain)


def test_lora_before() -> None:
    """The layers below adapters are quantized, the adapters are not."""
    peft = pytest.importorskip("peft")
    model, ids = small(), tokens()
    adapted = peft.get_peft_model(model, lora())
    expected = logits(adapted, ids)
    trained = {name: p.clone() for name, p in adapted.named_parameters() if "lora_" in name}
    report = patch_model(adapted, weights="int8")
    names = {name for name, kind in kinds(adapted).items() if kind == "int8"}
    assert len(names) == PROJECTIONS + 1 and not any("lora_" in name for name in names)
    assert sum("base_layer" in name for name in names) == 3 * LAYERS
    assert not [row for row in report.rows if "lora_" in row.name]
    now = dict(adapted.named_parameters())
    assert all(torch.equal(now[name], p) and now[name].requires_grad for name, p in trained.items())
    assert (logits(adapted, ids) - expected).norm() < 0.05 * expected.norm()


# Files


def tensors_on_meta(model: nn.Module) -> list[str]:
    found = [name for name, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta]
    for name, module in model.named_modules():
        found += [f"{name}.{key}" for key, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
    return found


ROPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("variant", ROPES)
@pytest.mark.parametrize("weights", [None, "int8", "int4", "group8", "table4"], indirect=True)
def test_save_and_load(tmp_path: Path, weights: str | None, variant: str) -> None:
    model, ids = small(torch.bfloat16, **ROPES[variant]), tokens()
    patch_model(model, weights=weights)
    model.config.pad_token_id = 7  # set after patching
    model.generation_config.max_new_tokens = 5
    expected = logits(model, ids)
    save_patched(model, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "torch_infini.json",
        "torch_infini.safetensors",
    }
    written = sum(t.nbytes for t in load_file(tmp_path / "model.safetensors").values())
    assert written == sum({t.data_ptr(): t.nbytes for t in model.state_dict().values()}.values())
    beside = load_file(tmp_path / "torch_infini.safetensors")
    assert sum(t.nbytes for t in beside.values()) == sum(b.nbytes for b in model.model.rotary_emb.buffers())
    loaded = load_patched(tmp_path)
    assert is_patched(loaded) and not loaded.training and type(loaded).__name__ == "LlamaForCausalLM"
    assert not tensors_on_meta(loaded)
    assert torch.equal(logits(loaded, ids), expected) and calls(loaded, ids) == calls(model, ids)
    assert kinds(loaded) == kinds(model) and loaded.config.pad_token_id == 7
    assert loaded.dtype == torch.bfloat16 and {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert torch.equal(loaded.generate(ids, do_sample=False), model.generate(ids, do_sample=False))
    if variant == "tied" and weights is None:
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    if weights is None:
        unpatch_model(loaded)
        assert loaded.config._attn_implementation == "sdpa"
        assert not is_patched(loaded) and calls(loaded, ids) == {}
    else:
        with pytest.raises(ValueError, match="15 layers"):
            unpatch_model(loaded)
    twice = tmp_path / "again"
    save_patched(load_patched(tmp_path), twice)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(load_file(twice / "model.safetensors")[name], tensor), name


@pytest.mark.parametrize("name", ["Gemma3", "Phi3", "Qwen3", "SmolLM3", "Granite"])
def test_save_and_load_families(tmp_path: Path, name: str) -> None:
    from torch_infini.testing.patched_families import FAMILIES, prompts

    family = next(family for family in FAMILIES if family.name == name)
    model = family.build(torch.bfloat16)
    patch_model(model, weights="int8")
    ids = prompts()[:2]
    save_patched(model, tmp_path)
    loaded = load_patched(tmp_path)
    assert not tensors_on_meta(loaded)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert calls(loaded, ids) == calls(model, ids)


def test_save_keeps_skip(tmp_path: Path) -> None:
    model, ids = small(), tokens()
    patch_model(model, weights="int8", skip=["lm_head", "model.layers.1.*"])
    save_patched(model, tmp_path)
    loaded = load_patched(tmp_path)
    assert kinds(loaded) == kinds(model) and calls(loaded, ids) == calls(model, ids)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


@EACH
def test_save_after_to(weights: str, tmp_path: Path) -> None:
    """A model that was made half after quantizing comes back as it was."""
    model, ids = small(), tokens()
    patch_model(model, weights=weights)
    model.bfloat16()
    save_patched(model, tmp_path)
    loaded = load_patched(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert [b.dtype for b in loaded.buffers()] == [b.dtype for b in model.buffers()]
    loaded.float()
    assert logits(loaded, ids).dtype == torch.float32


def test_save_errors(tmp_path: Path) -> None:
    model = small()
    with pytest.raises(ValueError, match="save_patched: model must be patched, got a LlamaForCausalLM that is not"):
        save_patched(model, tmp_path)

    class Mine(transformers.LlamaForCausalLM):
        pass

    mine = Mine(model.config)
    patch_model(mine)
    with pytest.raises(ValueError, match="model must be of a class of transformers, got Mine"):
        save_patched(mine, tmp_path)
    assert not list(tmp_path.iterdir())


def test_load_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="folder must be one that save_patched wrote"):
        load_patched(tmp_path)
    model = small()
    patch_model(model, weights="int8")
    save_patched(model, tmp_path)
    file, description = tmp_path / "model.safetensors", tmp_path / "torch_infini.json"
    good, tensors = description.read_text(), load_file(file)
    name = "model.layers.0.mlp.up_proj.weight_integers"
    changes = {
        f"missing: {name}": {key: value for key, value in tensors.items() if key != name},
        "surplus: extra": {**tensors, "extra": torch.zeros(2)},
        f"{name} must have shape [128, 64], got [3]": {**tensors, name: torch.zeros(3, dtype=torch.int8)},
        f"{name} must be int8, got float32": {**tensors, name: tensors[name].float()},
    }
    for message, changed in changes.items():
        save_file(changed, file)
        with pytest.raises(ValueError) as caught:
            load_patched(tmp_path)
        assert str(caught.value) == (
            f"torch_infini.load_patched: the tensors in {tmp_path} must be those of its config.json, got {message}"
        )
    save_file(tensors, file)
    description.write_text(json.dumps({**json.loads(good), "format": 3}))
    with pytest.raises(ValueError, match="format in torch_infini.json must be 1 or 2, got 3"):
        load_patched(tmp_path)
    description.write_text(json.dumps({**json.loads(good), "class": "NoSuchModel"}))
    with pytest.raises(ValueError, match="class must be one of transformers' models, got 'NoSuchModel'"):
        load_patched(tmp_path)
    description.write_text(good)
    assert torch.equal(logits(load_patched(tmp_path), tokens()), logits(model, tokens()))


def test_exports() -> None:
    assert torch_infini.save_patched is save_patched and torch_infini.load_patched is load_patched
