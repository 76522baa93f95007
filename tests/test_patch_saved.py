"""Folders of save_patched: which readers open them, and the errors of load_patched for modified folders.

Logits are those of the model that was saved, to the bit; torch_infini.LLM makes the same greedy tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_infini
from support.fresh_python import run_python
from support.tiny_llama import calls, close, greedy, logits, tiny, tokens
from torch_infini import LLM, SamplingParams
from torch_infini.patch import is_patched, load_patched, patch_model, save_patched, unpatch_model
from torch_infini.patch.layers.quantized_linear import QuantizedLinear
from torch_infini.weights import FORMATS, best, quantize

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

Model = Any
WEIGHTS = pytest.mark.parametrize("weights", [None, "int8", "int4", "group8", "table4"], indirect=True)
INTEGERS = pytest.mark.parametrize("weights", ["int8", "int4", "group8", "table4"], indirect=True)
DEMO = Path(torch_infini.__file__).parent / "demo" / "model"


def small(dtype: torch.dtype = torch.float32, **changes: Any) -> Model:
    """Rows of a multiple of 32, which int4 needs."""
    return tiny(dtype, **{"intermediate_size": 128, **changes})


def auto(folder: Path, **options: Any) -> Model:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.fixture(autouse=True)
def x_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLM would quantize x in other calls than a patched model does, where the CPU multiplies integers."""
    monkeypatch.setattr(quantize, "MULTIPLIES_INTEGERS", ())


# transformers


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@WEIGHTS
def test_auto_model(tmp_path: Path, weights: str | None, dtype: torch.dtype, tied: bool) -> None:
    """from_pretrained gives the model itself without integers, and the patched one with them, to the bit."""
    small(dtype, tie_word_embeddings=tied, attention_bias=True).save_pretrained(tmp_path / "original")
    model, ids = auto(tmp_path / "original"), tokens()
    plain = logits(model, ids)
    patch_model(model, weights=weights, skip=["model.layers.1.mlp"])
    expected, folder = logits(model, ids), tmp_path / "saved"
    save_patched(model, folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == str(dtype).removeprefix("torch.")
    assert ("quantization_config" in config) == (weights is not None) and "infini_" not in config
    loaded = auto(folder)
    assert loaded.dtype == dtype and not loaded.training and type(loaded).__name__ == "LlamaForCausalLM"
    if weights is None:
        assert not is_patched(loaded) and torch.equal(logits(loaded, ids), plain)
        patch_model(loaded, skip=["model.layers.1.mlp"])
    assert is_patched(loaded) and torch.equal(logits(loaded, ids), expected)
    assert calls(loaded, ids) == calls(model, ids)
    assert torch.equal(logits(load_patched(folder), ids), expected)
    # It is as one that patch_model quantized in this process: saved again, converted.
    save_patched(loaded, tmp_path / "again")
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[name], tensor), name
    assert logits(loaded.float(), ids).dtype == torch.float32
    if weights is not None:
        with pytest.raises(ValueError, match="with quantized weights"):
            unpatch_model(loaded)


@INTEGERS
def test_auto_model_in_another_dtype(tmp_path: Path, weights: str) -> None:
    model, ids = small(), tokens()
    patch_model(model, weights=weights)
    save_patched(model, tmp_path)
    loaded = auto(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == logits(loaded, ids).dtype == torch.bfloat16
    assert torch.equal(logits(loaded, ids), logits(model.bfloat16(), ids))


@pytest.mark.full
@INTEGERS
def test_without_torch_infini(tmp_path: Path, weights: str) -> None:
    """transformers alone opens no model with random weights where there are integers."""
    model = small()
    patch_model(model, weights=weights)
    save_patched(model, tmp_path)
    code = (
        "import sys, transformers\n"
        f"try: transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "except Exception as error: print('RAISED', type(error).__name__)\n"
        "else: print('OPENED')\n"
        "assert 'torch_infini' not in sys.modules\n"
    )
    run = run_python(code, check=True)
    assert run.stdout.startswith("RAISED") and "torch_infini" in run.stdout + run.stderr


@pytest.mark.full
@pytest.mark.parametrize("first", ["torch_infini", "transformers"])
def test_imports_in_any_order(tmp_path: Path, first: str) -> None:
    """The quantizer is known whichever of the two is imported first; torch_infini alone does not import the other."""
    model = small()
    patch_model(model, weights="int8")
    save_patched(model, tmp_path)
    second = "transformers" if first == "torch_infini" else "torch_infini"
    code = (
        f"import sys, {first}\n"
        f"assert {first == 'transformers'} == ('transformers' in sys.modules)\n"
        f"import {second}, transformers, torch_infini\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "print(torch_infini.is_patched(model))\n"
    )
    run = run_python(code, check=True)
    assert run.stdout == "True\n"


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Gemma3", "Glm4"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_families(tmp_path: Path, weights: str | None, name: str) -> None:
    """Also tensors that transformers stores under other names than the model has: experts."""
    from torch_infini.testing.patched_families import FAMILIES, prompts

    model = next(family for family in FAMILIES if family.name == name).build(torch.float32)
    ids = prompts()[:2]
    plain = logits(model, ids)
    patch_model(model, weights=weights)
    expected = logits(model, ids)
    save_patched(model, tmp_path)
    assert torch.equal(logits(load_patched(tmp_path), ids), expected)
    loaded = auto(tmp_path)
    assert torch.equal(logits(loaded, ids), plain if weights is None else expected)
    if weights is None and name in ("Mixtral", "Qwen3Moe"):
        assert any(".experts.0." in key for key in load_file(tmp_path / "model.safetensors"))


def test_layers_that_share_weights(tmp_path: Path) -> None:
    """Memory under two names that transformers does not tie is written for both."""
    model, ids = small(), tokens()
    model.model.layers[1].mlp = model.model.layers[0].mlp
    patch_model(model)
    save_patched(model, tmp_path)
    assert torch.equal(logits(load_patched(tmp_path), ids), logits(model, ids))
    close(logits(auto(tmp_path), ids), logits(model, ids))


# torch_infini.LLM


def made_by_llm(folder: Path, ids: torch.Tensor, **options: Any) -> list[int]:
    output = LLM(folder, progress=False, **options).generate(ids[0].tolist(), SamplingParams.greedy(max_tokens=12))
    return list(output[0].outputs[0].token_ids)


@pytest.mark.parametrize("skip", [(), ("lm_head",), ("model.layers.1.mlp",), ("*.o_proj", "*.down_proj")], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@WEIGHTS
def test_llm(tmp_path: Path, weights: str | None, tied: bool, skip: tuple[str, ...], monkeypatch: Any) -> None:
    """LLM takes the integers as they are, in the layers that have some."""
    model, ids = small(tie_word_embeddings=tied), tokens(1)
    patch_model(model, weights=weights, skip=skip)
    save_patched(model, tmp_path)
    for name in ("quantize_int8", "quantize_int4"):
        monkeypatch.setattr(quantize, name, lambda *args, **kwargs: pytest.fail("nothing may be quantized anew"))
    for format in FORMATS.values():
        monkeypatch.setattr(format, "quantize", lambda *args: pytest.fail("nothing may be quantized anew"))
    assert made_by_llm(tmp_path, ids) == greedy(model, ids)[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@WEIGHTS
def test_llm_families(tmp_path: Path, weights: str | None, name: str) -> None:
    cls = getattr(transformers, name)
    values = small().config.to_dict()
    values = {key: values[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "initializer_range")}
    values |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    torch.manual_seed(3)
    model, ids = cls(cls.config_class(**values, pad_token_id=0, bos_token_id=1)).eval(), tokens(1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.rand_like(parameter) / 4)
    patch_model(model, weights=weights)
    save_patched(model, tmp_path)
    assert made_by_llm(tmp_path, ids) == greedy(model, ids)[0, ids.shape[1] :].tolist()


@INTEGERS
def test_llm_takes_the_same_numbers(tmp_path: Path, weights: str) -> None:
    """Every row of every layer, from the file to the Linear that holds several projections."""
    model = small()
    patch_model(model, weights=weights)
    save_patched(model, tmp_path)
    ours = torch_infini.models.Llama.from_pretrained(tmp_path, progress=False)
    for i, layer in enumerate(ours.layers):
        theirs = model.model.layers[i]
        groups = {
            "self_attn": {layer.attention.qkv: ("q_proj", "k_proj", "v_proj"), layer.attention.out: ("o_proj",)},
            "mlp": {layer.mlp.gate_up: ("gate_proj", "up_proj"), layer.mlp.down: ("down_proj",)},
        }
        for part, linears in groups.items():
            for linear, names in linears.items():
                modules = [theirs.get_submodule(f"{part}.{name}") for name in names]
                assert linear.format == best(weights, "cpu").name
                for mine, buffer in (("weight", "integers"), ("scales", "scales"), ("zeros", "zeros")):
                    if getattr(linear, mine) is not None:
                        stored = torch.cat([module._buffers[f"weight_{buffer}"] for module in modules])
                        assert torch.equal(getattr(linear, mine), stored)
    assert torch.equal(ours.head.weight, model.lm_head.weight_integers)
    assert ours.head.format == best("int8", "cpu").name


def test_llm_errors(tmp_path: Path) -> None:
    model = small()
    patch_model(model, weights="int8", skip=["*.k_proj"])
    save_patched(model, tmp_path)
    with pytest.raises(
        ValueError, match="projections of one input must be stored alike.*q_proj (int8|group8).*k_proj dense"
    ):
        LLM(tmp_path, progress=False)
    model = small()
    patch_model(model, weights="int8")
    save_patched(model, tmp_path)
    assert made_by_llm(tmp_path, tokens(1), quantization="int8") == made_by_llm(tmp_path, tokens(1))
    with pytest.raises(ValueError, match=r"weights must be left out .* or be its format \(.*int8.*\), got 'int4'"):
        LLM(tmp_path, quantization="int4", progress=False)
    config = json.loads((tmp_path / "config.json").read_text())
    for name, layer, message in (
        ("model.layers.9.mlp.up_proj", {"format": "int8", "group": 0}, "must name linear layers of the model, got"),
        (
            "lm_head",
            {"format": "int8"},
            r"quantized\['lm_head'\] in .*config.json must have group 0 for int8, got None",
        ),
        ("lm_head", 5, r"quantized\['lm_head'\] in .*config.json must be an object with format .*'w8a16' or .*, got 5"),
    ):
        changed = json.loads(json.dumps(config))
        changed["quantization_config"]["quantized"][name] = layer
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=message):
            LLM(tmp_path, progress=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.0.mlp.up_proj.weight_integers"
    save_file({**tensors, name: tensors[name].float()}, file)
    with pytest.raises(ValueError, match=f"{name} must be u?int8, got float32"):
        LLM(tmp_path, progress=False)


@INTEGERS
def test_llm_of_ranks(tmp_path: Path, weights: str) -> None:
    """Each rank's part of the integers is a rectangle of those in the file."""
    from torch_infini.distributed import TPGroup
    from torch_infini.models import Llama, LlamaConfig
    from torch_infini.models.checkpoint import load_checkpoint, stored_layers

    model = small(hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256)
    patch_model(model, weights=weights)
    save_patched(model, tmp_path)
    whole = Llama.from_pretrained(tmp_path, progress=False)
    stored, config = stored_layers(tmp_path), LlamaConfig.from_pretrained(tmp_path)
    down, gate_up = [], []
    for rank in range(2):
        part = Llama(config, best(weights, "cpu").name, torch.float32, tp_group=TPGroup(rank, 2, 0))
        load_checkpoint(tmp_path, part.slots(stored), lambda name: True, False)
        down.append(part.layers[1].mlp.down)
        gate_up.append(part.layers[1].mlp.gate_up)
    mlp = whole.layers[1].mlp
    assert torch.equal(torch.cat([linear.weight for linear in down], 1), mlp.down.weight)
    halves = [linear.weight.chunk(2) for linear in gate_up]
    assert torch.equal(torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)]), mlp.gate_up.weight)
    if mlp.down.zeros is not None:
        assert torch.equal(torch.cat([linear.scales for linear in down], 1), mlp.down.scales)
        assert torch.equal(torch.cat([linear.zeros for linear in down], 1), mlp.down.zeros)
    else:
        assert all(torch.equal(linear.scales, mlp.down.scales) for linear in down)


# Tokenizers


def demo(weights: str | None) -> Model:
    model = auto(DEMO, local_files_only=True)
    patch_model(model, weights=weights)
    return model


@pytest.mark.parametrize("given", [True, False], ids=["given", "found"])
def test_tokenizer(tmp_path: Path, given: bool) -> None:
    """Given, or copied from where the model was read: the folder is one that serves texts."""
    original = transformers.AutoTokenizer.from_pretrained(DEMO, local_files_only=True)
    model = demo("int8")
    if given:
        model.config.name_or_path = ""
        model.name_or_path = ""
    save_patched(model, tmp_path, original if given else None)
    text = "A class definition"
    ids = original(text)["input_ids"]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)(text)["input_ids"] == ids
    output = LLM(tmp_path, progress=False).generate(text, SamplingParams.greedy(max_tokens=4))[0]
    made = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=4)[0, len(ids) :].tolist()
    assert list(output.outputs[0].token_ids) == made
    again = tmp_path / "again"
    save_patched(load_patched(tmp_path), again)  # of the folder that this one was read from
    assert transformers.AutoTokenizer.from_pretrained(again, local_files_only=True)(text)["input_ids"] == ids


def test_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model made in this process was read from nowhere: not from the current folder."""
    shutil.copytree(DEMO, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    model = small()
    patch_model(model)
    save_patched(model, tmp_path / "there")
    assert not [file.name for file in (tmp_path / "there").iterdir() if "token" in file.name]


# Older folders, and folders that were tampered with


def write_format_1(model: Model, folder: Path) -> None:
    """As save_patched wrote folders before torch_infini.json had format 2."""
    from torch_infini.patch.files.folder import all_tensors

    tensors, aliases, names = {}, {}, {}
    for name, tensor in all_tensors(model).items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key in names:
            aliases[name] = names[key]
        else:
            names[key], tensors[name] = name, tensor.contiguous().clone()
    quantized = {
        name: {"format": module._infini_plan.format, "group": module._infini_plan.group}
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    description = {"format": 1, "class": type(model).__name__, "dtype": str(model.dtype).removeprefix("torch.")}
    description |= {"quantised": quantized, "aliases": aliases, "only": None, "skip": []}
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "torch_infini.json").write_text(json.dumps(description))


@WEIGHTS
def test_format_1(tmp_path: Path, weights: str | None) -> None:
    model, ids = small(torch.bfloat16, tie_word_embeddings=True), tokens()
    patch_model(model, weights=weights)
    write_format_1(model, tmp_path)
    loaded = load_patched(tmp_path)
    assert torch.equal(logits(loaded, ids), logits(model, ids)) and calls(loaded, ids) == calls(model, ids)


@INTEGERS
def test_the_field_of_layers_as_it_was_spelled(tmp_path: Path, weights: str) -> None:
    """It is written as "quantized"; folders with "quantised" are the same model to every reader."""
    model, ids = small(), tokens(1)
    patch_model(model, weights=weights)
    save_patched(model, tmp_path)
    made = made_by_llm(tmp_path, ids)
    for file in (tmp_path / "torch_infini.json", tmp_path / "config.json"):
        text = file.read_text()
        assert '"quantized": {' in text and "quantised" not in text
        file.write_text(text.replace('"quantized": {', '"quantised": {'))
    for loaded in (load_patched(tmp_path), auto(tmp_path)):
        assert torch.equal(logits(loaded, ids), logits(model, ids)) and calls(loaded, ids) == calls(model, ids)
    assert made_by_llm(tmp_path, ids) == made


Change = Callable[[Path], None]
UP = "model.layers.0.mlp.up_proj"


def set_field(file: str, *path: str, to: Any = None, remove: bool = False) -> Change:
    """Change one entry of a JSON file."""

    def change(folder: Path) -> None:
        whole = value = json.loads((folder / file).read_text())
        for name in path[:-1]:
            value = value[name]
        if remove:
            del value[path[-1]]
        else:
            value[path[-1]] = to
        (folder / file).write_text(json.dumps(whole))

    return change


def both(*path: str, to: Any) -> Change:
    """Change an entry about integers in both places."""

    def change(folder: Path) -> None:
        set_field("torch_infini.json", *path, to=to)(folder)
        set_field("config.json", "quantization_config", *path, to=to)(folder)

    return change


def write(file: str, content: bytes) -> Change:
    return lambda folder: (folder / file).write_bytes(content) and None


def cut(file: str, part: float) -> Change:
    def change(folder: Path) -> None:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[: int(len(content) * part)])

    return change


def tensor(name: str, to: torch.Tensor | None, file: str = "model.safetensors") -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / file)
        if to is None:
            del tensors[name]
        else:
            tensors[name] = to
        save_file(tensors, folder / file)

    return change


def older(change: Change, **fields: Any) -> Change:
    """A folder of format 1, changed."""

    def make(folder: Path) -> None:
        model = small(tie_word_embeddings=True)
        patch_model(model)
        shutil.rmtree(folder)
        write_format_1(model, folder)
        change(folder)

    return make


def gone(file: str) -> Change:
    return lambda folder: (folder / file).unlink()


def nowhere(folder: Path) -> None:
    shutil.rmtree(folder)


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("{}")


DESCRIPTION, CONFIG, TENSORS, BUFFERS = (
    "torch_infini.json",
    "config.json",
    "model.safetensors",
    "torch_infini.safetensors",
)
MISSING, WRONG = FileNotFoundError, ValueError
TAMPERED: dict[str, tuple[Change, type[Exception], str]] = {
    "no folder": (nowhere, MISSING, "folder must be one that save_patched wrote"),
    "a file": (a_file, MISSING, "folder must be one that save_patched wrote"),
    # config.json
    "no config": (gone(CONFIG), MISSING, "folder must hold config.json"),
    "empty config": (write(CONFIG, b""), WRONG, "config.json must be JSON"),
    "half a config": (cut(CONFIG, 0.5), WRONG, "config.json must be JSON"),
    "garbage config": (write(CONFIG, b"\xff\xfe\x00garbage"), WRONG, "config.json must be JSON"),
    "list config": (write(CONFIG, b"[]"), WRONG, "config.json must hold a JSON object, got list"),
    "other model": (set_field(CONFIG, "model_type", to="qwen2"), WRONG, "model_type in config.json must be 'llama'"),
    "no model_type": (set_field(CONFIG, "model_type", remove=True), WRONG, "model_type in config.json must be 'llama'"),
    "model_type list": (set_field(CONFIG, "model_type", to=[]), WRONG, "model_type in config.json must be 'llama'"),
    "size text": (set_field(CONFIG, "hidden_size", to="wide"), WRONG, "config.json must describe a LlamaForCausalLM"),
    "negative size": (set_field(CONFIG, "hidden_size", to=-64), WRONG, "config.json must describe a LlamaForCausalLM"),
    "zero heads": (set_field(CONFIG, "num_attention_heads", to=0), WRONG, "config.json must describe"),
    "layers text": (set_field(CONFIG, "num_hidden_layers", to="2"), WRONG, "config.json must describe"),
    "10^12 layers": (set_field(CONFIG, "num_hidden_layers", to=10**12), WRONG, "num_hidden_layers in config.json"),
    "three layers": (set_field(CONFIG, "num_hidden_layers", to=3), WRONG, "must be those of its config.json, got "),
    "10^9 wide": (set_field(CONFIG, "hidden_size", to=2**30), WRONG, "must be those of its config.json, got "),
    "10^12 words": (set_field(CONFIG, "vocab_size", to=10**12), WRONG, "must be those of its config.json, got "),
    "overflow": (set_field(CONFIG, "vocab_size", to=10**18), WRONG, "config.json must describe"),
    "10^11 head": (set_field(CONFIG, "head_dim", to=10**11), WRONG, "must be those of its config.json, got "),
    "infinity": (write(CONFIG, b'{"model_type": "llama", "num_hidden_layers": Infinity}'), WRONG, "num_hidden_layers"),
    "elsewhere": (
        set_field(CONFIG, "transformers_weights", to="../other"),
        WRONG,
        "transformers_weights in config.json",
    ),
    "no quantization": (set_field(CONFIG, "quantization_config", remove=True), WRONG, "quantization_config in config"),
    "other quantization": (
        set_field(CONFIG, "quantization_config", "skip", to=["lm_head"]),
        WRONG,
        "quantization_config in config.json must equal torch_infini.json",
    ),
    # torch_infini.json
    "no description": (gone(DESCRIPTION), MISSING, "folder must be one that save_patched wrote"),
    "empty description": (write(DESCRIPTION, b""), WRONG, "torch_infini.json must be JSON"),
    "half a description": (cut(DESCRIPTION, 0.5), WRONG, "torch_infini.json must be JSON"),
    "deep description": (write(DESCRIPTION, b"[" * 100_000), WRONG, "torch_infini.json must be JSON"),
    "text description": (write(DESCRIPTION, b'"format"'), WRONG, "torch_infini.json must hold a JSON object"),
    "no format": (set_field(DESCRIPTION, "format", remove=True), WRONG, "format in torch_infini.json must be 1 or 2"),
    "format 3": (set_field(DESCRIPTION, "format", to=3), WRONG, "format in torch_infini.json must be 1 or 2, got 3"),
    "format true": (set_field(DESCRIPTION, "format", to=True), WRONG, "format in torch_infini.json must be 1 or 2"),
    "format list": (set_field(DESCRIPTION, "format", to=[2]), WRONG, "format in torch_infini.json must be 1 or 2"),
    **{
        f"no {field}": (
            set_field(DESCRIPTION, field, remove=True),
            WRONG,
            f"torch_infini.json must have the field {field}",
        )
        for field in ("class", "dtype", "quantized", "only", "skip", "converted")
    },
    **{
        f"class {name}": (set_field(DESCRIPTION, "class", to=name), WRONG, "class must be one of transformers' models")
        for name in ("__class__", "AutoModelForCausalLM", "LlamaConfig", "PreTrainedModel", "../../x", "", 5, None)
    },
    "class Qwen2": (set_field(DESCRIPTION, "class", to="Qwen2ForCausalLM"), WRONG, "model_type in config.json must be"),
    **{
        f"dtype {name}": (set_field(DESCRIPTION, "dtype", to=name), WRONG, "dtype in torch_infini.json must be float32")
        for name in ("nonsense", "int8", "Tensor", "float8_e4m3fn", 5, None, ["float32"])
    },
    "quantized list": (both("quantized", to=[UP]), WRONG, "quantized in torch_infini.json must be an object"),
    "quantized unknown": (
        both("quantized", "../../lm_head", to={"format": "int8", "group": 0}),
        WRONG,
        "quantized['../../lm_head'] in torch_infini.json must name a torch.nn.Linear of the model, or its experts, got "
        "no such module",
    ),
    "quantized norm": (
        both("quantized", "model.norm", to={"format": "int8", "group": 0}),
        WRONG,
        "quantized['model.norm'] in torch_infini.json must name a torch.nn.Linear of the model, or its experts, got a "
        "LlamaRMSNorm",
    ),
    "quantized text": (both("quantized", UP, to="int4"), WRONG, f"quantized['{UP}'] in torch_infini.json must be an"),
    "int2": (
        both("quantized", UP, to={"format": "int2", "group": 64}),
        WRONG,
        "with format 'table4' or 'int4' or 'w4a16' or 'group8' or 'int8' or 'w8a16'",
    ),
    **{
        f"group {group}": (
            both("quantized", UP, "group", to=group),
            WRONG,
            f"quantized['{UP}'] in torch_infini.json must have group 64 or 32 for int4, got {group!r}",
        )
        for group in (0, -64, 48, 128, True, None, 64.0)
    },
    "group 32": (
        both("quantized", UP, "group", to=32),
        WRONG,
        f"{UP}.weight_scales must have shape [128, 2], got [128, 1]",
    ),
    "as int8": (
        both("quantized", UP, to={"format": "int8", "group": 0}),
        WRONG,
        "must be those of its config.json, got ",
    ),
    "only text": (both("only", to="lm_head"), WRONG, "only in torch_infini.json must be a list of patterns"),
    "skip null": (both("skip", to=None), WRONG, "skip in torch_infini.json must be a list of patterns"),
    "skip numbers": (both("skip", to=[1]), WRONG, "skip in torch_infini.json must be a list of patterns"),
    "converted 1": (set_field(DESCRIPTION, "converted", to=1), WRONG, "converted in torch_infini.json must be true or"),
    "converted": (set_field(DESCRIPTION, "converted", to=True), WRONG, "converted in torch_infini.json must be false"),
    # Tensors
    "no tensors": (gone(TENSORS), MISSING, "folder must hold model.safetensors"),
    "empty tensors": (write(TENSORS, b""), WRONG, "model.safetensors must be a whole safetensors file"),
    "half the tensors": (cut(TENSORS, 0.5), WRONG, "model.safetensors must be a whole safetensors file"),
    "few bytes": (write(TENSORS, b"\x07\x00"), WRONG, "model.safetensors must be a whole safetensors file"),
    "huge header": (write(TENSORS, b"\xff" * 64), WRONG, "model.safetensors must be a whole safetensors file"),
    "pickle": (write(TENSORS, b"\x80\x02cos\nsystem\n."), WRONG, "model.safetensors must be a whole safetensors file"),
    "missing tensor": (tensor(f"{UP}.weight_zeros", None), WRONG, f"missing: {UP}.weight_zeros"),
    "extra tensor": (tensor("../../x", torch.ones(2)), WRONG, "surplus: ../../x"),
    "wrong shape": (
        tensor("model.norm.weight", torch.ones(3)),
        WRONG,
        "model.norm.weight must have shape [64], got [3]",
    ),
    "scalar": (tensor("model.norm.weight", torch.tensor(1.0)), WRONG, "model.norm.weight must have shape [64], got []"),
    "wrong dtype": (
        tensor("model.norm.weight", torch.ones(64).int()),
        WRONG,
        "norm.weight must be of a floating dtype of 16 bits or more, got int32",
    ),
    "float integers": (
        tensor(f"{UP}.weight_integers", torch.zeros(128, 32)),
        WRONG,
        f"{UP}.weight_integers must be uint8, got float32",
    ),
    "float8": (
        tensor("model.norm.weight", torch.ones(64).to(torch.float8_e4m3fn)),
        WRONG,
        "model.norm.weight in model.safetensors must be of one of the dtypes",
    ),
    "no buffers": (gone(BUFFERS), MISSING, "folder must hold torch_infini.safetensors"),
    "half the buffers": (cut(BUFFERS, 0.5), WRONG, "torch_infini.safetensors must be a whole safetensors file"),
    "other buffers": (
        tensor("model.rotary_emb.inv_freq", torch.ones(3), BUFFERS),
        WRONG,
        "must be those of its config.json, got model.rotary_emb.inv_freq must have shape [8], got [3]",
    ),
    "missing buffer": (
        tensor("model.rotary_emb.inv_freq", None, BUFFERS),
        WRONG,
        "must be those of its config.json, got missing: model.rotary_emb.inv_freq",
    ),
    "garbage generation": (write("generation_config.json", b"{"), WRONG, "generation_config.json must be"),
    # Format 1
    "alias to nothing": (
        older(set_field(DESCRIPTION, "aliases", "lm_head.weight", to="nothing")),
        WRONG,
        "missing: nothing",
    ),
    "alias in a circle": (
        older(
            set_field(
                DESCRIPTION,
                "aliases",
                to={"lm_head.weight": "model.embed_tokens.weight", "model.embed_tokens.weight": "lm_head.weight"},
            )
        ),
        WRONG,
        "aliases['lm_head.weight'] in torch_infini.json must name a tensor that is not an alias itself",
    ),
    "alias of itself": (
        older(set_field(DESCRIPTION, "aliases", "lm_head.weight", to="lm_head.weight")),
        WRONG,
        "aliases['lm_head.weight'] in torch_infini.json must name a tensor that is not an alias itself",
    ),
    "aliases list": (older(set_field(DESCRIPTION, "aliases", to=[])), WRONG, "aliases in torch_infini.json must be an"),
    "alias number": (
        older(set_field(DESCRIPTION, "aliases", "lm_head.weight", to=5)),
        WRONG,
        "aliases in torch_infini",
    ),
    "older without aliases": (
        older(set_field(DESCRIPTION, "aliases", remove=True)),
        WRONG,
        "torch_infini.json must have the field aliases",
    ),
}


class OnlySmall(TorchDispatchMode):
    """Fails where an op makes a tensor of more than a megabyte, other than on the meta device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            assert not isinstance(x, torch.Tensor) or x.is_meta or x.nbytes <= 1 << 20, (func, x.shape)
        return result


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With groups of int4, the format that has most to be checked."""
    folder = tmp_path_factory.mktemp("saved")
    model = small()
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(FORMATS["table4"], "serves_on", lambda device: False)
        patch_model(model, weights="int4")
    save_patched(model, folder)
    return folder


@pytest.mark.parametrize("name", TAMPERED)
def test_tampered(good: Path, tmp_path: Path, name: str) -> None:
    """Each gives one sentence, that names the function, the file, the rule and what came; nothing large is made."""
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    change, error, message = TAMPERED[name]
    change(folder)
    with pytest.raises(error) as caught, OnlySmall():
        load_patched(folder)
    assert type(caught.value) is error
    said = str(caught.value)
    assert said.startswith("torch_infini.load_patched: ") and message in said and "\n" not in said


TAMPERED_TABLE4: dict[str, tuple[Change, str]] = {
    "group": (both("quantized", UP, "group", to=64), "must have group 0 for table4, got 64"),
    "as int4": (both("quantized", UP, to={"format": "int4", "group": 64}), f"missing: {UP}.weight_zeros"),
    "panels": (
        tensor(f"{UP}.weight_integers", torch.zeros(7, 1, 576, dtype=torch.uint8)),
        f"{UP}.weight_integers must have shape [8, 1, 576], got [7, 1, 576]",
    ),
    "rows": (tensor(f"{UP}.weight_scales", torch.ones(127)), f"{UP}.weight_scales must have shape [128], got [127]"),
    "no scales": (tensor(f"{UP}.weight_scales", None), f"missing: {UP}.weight_scales"),
}


@pytest.mark.parametrize("weights", ["table4"], indirect=True)
@pytest.mark.parametrize("name", TAMPERED_TABLE4)
def test_tampered_table4(weights: str, name: str, tmp_path: Path) -> None:
    model = small()
    patch_model(model, weights=weights)
    save_patched(model, tmp_path)
    change, message = TAMPERED_TABLE4[name]
    change(tmp_path)
    with pytest.raises(ValueError, match=r"^torch_infini.load_patched: ") as caught, OnlySmall():
        load_patched(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_not_tampered(good: Path) -> None:
    with OnlySmall():
        assert is_patched(load_patched(good))


@pytest.mark.parametrize(
    "name", ["quantized norm", "quantized unknown", "int2", "group -64", "quantized list", "only text", "skip numbers"]
)
def test_tampered_for_auto_model(good: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    TAMPERED[name][0](folder)
    with pytest.raises(ValueError, match=r"^torch_infini: from_pretrained: .* in config.json must"):
        auto(folder)


@pytest.mark.parametrize("field", ["quantized", "dtype"])
def test_missing_for_auto_model(good: Path, tmp_path: Path, field: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    set_field(CONFIG, "quantization_config", field, remove=True)(folder)
    with pytest.raises(ValueError, match=rf"^torch_infini: from_pretrained: .*{field} in config.json must"):
        auto(folder)


def test_tampered_experts(tmp_path: Path) -> None:
    """Files with tensors of other names than the model's, which only transformers knows to read."""
    from torch_infini.testing.patched_families import FAMILIES

    model = next(family for family in FAMILIES if family.name == "Mixtral").build(torch.float32)
    patch_model(model)
    save_patched(model, tmp_path)
    file = tmp_path / TENSORS
    tensors, config = load_file(file), (tmp_path / CONFIG).read_text()
    first = next(name for name in tensors if ".experts.0." in name)
    for changed, message in (
        ({name: x for name, x in tensors.items() if name != first}, "model.safetensors must hold"),
        ({**tensors, "extra": torch.ones(2)}, "model.safetensors must hold"),
        ({name if name != first else "other": x for name, x in tensors.items()}, "model.safetensors"),
        ({**tensors, first: tensors[first].flatten()}, "model.safetensors"),
    ):
        save_file(changed, file)
        with pytest.raises(ValueError) as caught:
            load_patched(tmp_path)
        assert str(caught.value).startswith("torch_infini.load_patched: ") and message in str(caught.value)
    save_file(tensors, file)
    for field in ("num_local_experts", "intermediate_size"):
        (tmp_path / CONFIG).write_text(json.dumps({**json.loads(config), field: 10**11}))
        with pytest.raises(ValueError, match=r"^torch_infini.load_patched: "), OnlySmall():
            load_patched(tmp_path)
