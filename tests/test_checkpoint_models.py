"""Models from quantized checkpoints: LLM and Llama on folders and files of every format, against the dense model."""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import torch_infini
from support.checkpoint_writers import BLOCK_BYTES, BY_LIBRARY, CASES, block_layout, write_folder, write_gguf
from torch_infini import LLM, SamplingParams
from torch_infini.models import Llama
from torch_infini.models.module_state import describe, restore
from torch_infini.nn import Batch
from torch_infini.testing.checkpoints import random_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [7, 3, 300, 12, 9, 9, 41, 5]


KIND = {"int4": "w4a16", "int8": "w8a16"}  # of torch_infini.weights, by a case's layout, unless they are equal


@pytest.fixture
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A case; activations keep their precision also where the checkpoint says that they are int8."""
    if request.param == "w8a8":
        monkeypatch.setattr("torch_infini.weights.quantize.MULTIPLIES_INTEGERS", ())
    return str(request.param)


def logits(model: Llama) -> Tensor:
    count = len(TOKENS)
    cache = model.new_cache(1, 16)
    tables, lengths = torch.tensor([[0]]), torch.tensor([count])
    positions, starts = torch.arange(count), torch.tensor([0, count])
    with torch.inference_mode():
        return model(Batch(torch.tensor(TOKENS), positions, positions, tables, lengths, starts), cache)


def assert_equal_to(dense: Any, path: Path) -> Llama:
    model = Llama.from_pretrained(path, dtype=torch.float32, progress=False)
    with torch.inference_mode():
        expected = dense(torch.tensor([TOKENS])).logits[0]
    difference = (logits(model) - expected).abs().max() / expected.abs().max()
    assert difference <= 1e-5
    return model


@pytest.mark.parametrize("name", CASES, indirect=True)
def test_logits(name: str, tmp_path: Path) -> None:
    if name in BY_LIBRARY:
        pytest.importorskip("compressed_tensors")
    case = CASES[name]
    model = assert_equal_to(write_folder(tmp_path, case), tmp_path)
    for layer in model.layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            assert linear.format == (case.layout if name == "w8a8" else KIND.get(case.layout, case.layout))
    assert model.head.format == "dense"


@pytest.mark.parametrize("name", ["llama-biases-tied", "qwen2", "qwen3", "mistral"])
def test_families(name: str, tmp_path: Path) -> None:
    changes = {} if name != "llama-biases-tied" else {"tie_word_embeddings": True}
    assert_equal_to(
        write_folder(tmp_path, CASES["gptq-act-order" if name == "qwen2" else "awq"], name=name, **changes), tmp_path
    )


@pytest.mark.parametrize("kind", [*BLOCK_BYTES, "F16", "BF16", "F32"])
def test_gguf_logits(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    dense = write_gguf(tmp_path / "model.gguf", lambda name: kind)
    assert_equal_to(dense, tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied", "qwen2", "qwen3"])
def test_gguf_families_and_mixed_kinds(name: str, tmp_path: Path) -> None:
    """v and the second MLP in other blocks than their neighbours, as in Q4_K_M."""
    pytest.importorskip("gguf")
    kinds = {"v_proj": "Q6_K", "down_proj": "Q8_0", "lm_head": "Q6_K", "embed_tokens": "Q4_K", "up_proj": "F16"}
    changes = {"tie_word_embeddings": "tied" in name, **({"head_dim": 64} if name == "qwen3" else {})}
    path = tmp_path / "model.gguf"
    dense = write_gguf(path, lambda module: kinds.get(module.rpartition(".")[2], "Q4_K"), name, **changes)
    model = assert_equal_to(dense, path)
    assert [part.format for part in model.layers[0].attention.qkv.parts] == [
        KIND.get(one := block_layout(kind), one) for kind in ("Q4_K", "Q6_K")
    ]
    assert model.layers[0].mlp.down.format == block_layout("Q8_0")
    assert Llama.from_pretrained(path, progress=False).dtype == torch.float16
    outputs = LLM(path, dtype="float32", progress=False).generate([TOKENS], SamplingParams(max_tokens=4, temperature=0))
    assert len(outputs[0].token_ids) == 4


@pytest.mark.parametrize("name", ["gptq-act-order", "pack-quantized-zeros"])
def test_engine(name: str, tmp_path: Path) -> None:
    """Recorded decode steps give the tokens of the dense model, alone and in a batch."""
    if name in BY_LIBRARY:
        pytest.importorskip("compressed_tensors")
    dense = write_folder(tmp_path, CASES[name])
    llm = LLM(tmp_path, dtype="float32", progress=False)
    prompts = [TOKENS, TOKENS[:3], TOKENS[4:]]
    params = SamplingParams(max_tokens=6, temperature=0)
    for outputs in (llm.generate(prompts, params), [llm.generate([prompt], params)[0] for prompt in prompts]):
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = dense.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
            assert output.token_ids == expected.tolist()


@pytest.mark.parametrize("kind", ["Q5_0", "Q6_K", "Q8_0"])
def test_blocks_in_the_engine(kind: str, tmp_path: Path) -> None:
    """A bfloat16 model whose layers stay in blocks gives a request the same tokens alone and in a batch."""
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", lambda module: kind)
    llm = LLM(tmp_path / "model.gguf", dtype="bfloat16", progress=False)
    prompts = [TOKENS, TOKENS[:3], [*TOKENS, *TOKENS] * 5, TOKENS[4:]]
    params = SamplingParams(max_tokens=12, temperature=0)
    together = [output.token_ids for output in llm.generate(prompts, params)]
    assert together == [llm.generate([prompt], params)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("name", ["llama", "llama-biases-tied"])
def test_embedding_in_blocks(name: str, tmp_path: Path) -> None:
    """The table stays in the file's blocks, which a tied head multiplies by, also in a model that is cached."""
    pytest.importorskip("gguf")
    tied, path = "tied" in name, tmp_path / "model.gguf"
    kinds = {"embed_tokens": "Q6_K", "lm_head": "Q4_K"}
    changes = {"tie_word_embeddings": tied, "vocab_size": 4096, "bos_token_id": 1}
    dense = write_gguf(path, lambda module: kinds.get(module.rpartition(".")[2], "Q8_0"), name, **changes)
    model = assert_equal_to(dense, path)
    in_blocks = block_layout("Q6_K") != "dense"
    assert model.embed.format == block_layout("Q6_K") and model.shares_embedding == tied
    assert (model.head.weight is model.embed.weight) == tied
    if not tied:
        assert model.head.format == block_layout("Q4_K")
    ids = torch.tensor(TOKENS)
    assert torch.equal(model.embed(ids), dense.get_input_embeddings()(ids))
    assert torch.equal(model.embed.dense(), dense.get_input_embeddings().weight)
    if in_blocks:
        total = sum(parameter.nbytes for parameter in model.parameters())
        assert total <= 1.05 * path.stat().st_size
        assert model.bytes_per_step == total - (0 if tied else model.embed.weight.nbytes)
        description, spans = describe(model)
        again = Llama(model.config, dtype=torch.float32)
        with mmap.mmap(-1, max(span.begin + span.size for span in spans)) as memory:
            for span in spans:
                memory[span.begin : span.begin + span.size] = ctypes.string_at(span.address, span.size)
            restore(again, description, memory, 0)
            assert again.embed.format == "q6_k" and again.shares_embedding == tied
            assert torch.equal(logits(again), logits(model))
            del again
            gc.collect()
    params = SamplingParams(max_tokens=6, temperature=0)
    output = LLM(path, dtype="float32", progress=False).generate([TOKENS], params)[0]
    expected = dense.generate(torch.tensor([TOKENS]), max_new_tokens=6, do_sample=False)[0, len(TOKENS) :]
    assert output.token_ids == expected.tolist()
    model.to("meta")
    assert model.embed.format == "dense" and model.embed.weight.shape == (4096, 256)


def test_blocks_leave_the_cpu_as_dense_weights(tmp_path: Path) -> None:
    """Other devices have no kernel for them."""
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", lambda module: "Q6_K")
    patched = torch_infini.load(tmp_path / "model.gguf", torch.float32)
    layer = patched.get_submodule("model.layers.0.mlp.down_proj")
    assert hasattr(layer, "weight_integers") == (block_layout("Q6_K") != "dense")
    values = layer.weight.clone()
    ours = Llama.from_pretrained(tmp_path / "model.gguf", dtype=torch.float32, progress=False)
    down = ours.layers[0].mlp.down
    for module in (layer, down):
        module.to("meta")
        assert isinstance(module.weight, torch.nn.Parameter) and module.weight.is_meta
        assert module.weight.shape == values.shape
    assert not hasattr(layer, "weight_integers") and down.format == "dense"


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("name", ["awq", "gptq-8", "gptq-act-order", "pack-quantized-zeros", "fp8-blocks", "gguf"])
def test_shards(name: str, ranks: int, tmp_path: Path) -> None:
    """Each rank has its rows and columns of every layer."""
    from torch_infini.distributed import TPGroup

    if name in BY_LIBRARY:
        pytest.importorskip("compressed_tensors")
    path = tmp_path
    if name == "gguf":
        pytest.importorskip("gguf")
        path = tmp_path / "model.gguf"
        kinds = {"k_proj": "Q4_K", "gate_proj": "Q6_K", "up_proj": "Q6_K", "down_proj": "Q8_0"}
        write_gguf(path, lambda module: kinds.get(module.rpartition(".")[2], "Q4_1"))
    else:
        write_folder(tmp_path, CASES[name])
    whole = Llama.from_pretrained(path, dtype=torch.float32, progress=False)
    shards = []
    for rank in range(ranks):
        group = TPGroup(rank, ranks, 0)
        object.__setattr__(group, "must_agree", lambda *args: None)
        shards.append(Llama.from_pretrained(path, dtype=torch.float32, progress=False, tp_group=group))
    for i, layer in enumerate(whole.layers):
        own = [shard.layers[i] for shard in shards]
        assert torch.equal(torch.cat([one.attention.out.dense() for one in own], 1), layer.attention.out.dense())
        assert torch.equal(torch.cat([one.mlp.down.dense() for one in own], 1), layer.mlp.down.dense())
        for j, part in enumerate(layer.mlp.gate_up.dense().chunk(2)):
            assert torch.equal(torch.cat([one.mlp.gate_up.dense().chunk(2)[j] for one in own]), part)
        q, k, v = layer.attention.qkv.dense().split([256, 128, 128])
        for j, part in enumerate((q, k, v)):
            sizes = [128, 64, 64]
            assert torch.equal(torch.cat([one.attention.qkv.dense().split(sizes)[j] for one in own]), part)


def change(folder: Path, tensors: dict[str, Tensor | None] | None = None, **entries: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps(config))
    whole = load_file(folder / "model.safetensors") | (tensors or {})
    save_file({name: tensor for name, tensor in whole.items() if tensor is not None}, folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "tensors, entries, rule",
    [
        ({}, {"intermediate_size": 1024}, "mlp.gate_proj.weight must have shape [1024, 256], got [512, 256]"),
        ({}, {"hidden_size": 512}, "model.embed_tokens.weight must have shape [320, 512], got [320, 256]"),
        ({}, {"num_hidden_layers": 3}, "missing: model.layers.2.input_layernorm.weight"),
        ({}, {"num_hidden_layers": 1}, "surplus: model.layers.1.input_layernorm.weight"),
        ({}, {"num_hidden_layers": 5000}, "num_hidden_layers must be at most the number of tensors in"),
        ({f"{Q}.scales": None}, {}, f"{Q} must have scales, as awq has, got qweight, qzeros"),
        ({f"{Q}.qweight": None, f"{Q}.qzeros": None, f"{Q}.scales": None}, {}, f"missing: {Q}.weight"),
        (
            {f"{Q}.scales": torch.full((4, 64), torch.nan).half()},
            {},
            f"{Q}.scales must be finite (awq), got nan at [0, 0]",
        ),
        ({f"{Q}.bias": torch.ones(64)}, {}, f"{Q}.bias must be zeros, because the model has no such bias"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_folders_that_contradict_themselves(
    tensors: dict[str, Tensor | None], entries: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    write_folder(tmp_path, CASES["awq"], head_dim=16)
    change(tmp_path, {f"{Q}.bias": torch.zeros(64)})  # GPTQ's writers do that
    Llama.from_pretrained(tmp_path, progress=False)
    torch_infini.load(tmp_path)
    change(tmp_path, tensors, **entries)
    for read in (lambda: LLM(tmp_path, progress=False), lambda: torch_infini.load(tmp_path)):
        with pytest.raises(ValueError) as raised:
            read()
        assert rule in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", ["awq", "w8a16", "gguf"])
def test_int8_activations_are_asked_for(name: str, tmp_path: Path) -> None:
    """LLM, load and Llama quantize activations on request, and where the checkpoint says so."""
    path = tmp_path
    if name == "gguf":
        pytest.importorskip("gguf")
        path = tmp_path / "model.gguf"
        dense = write_gguf(path, lambda module: "Q4_0")
    else:
        if name in BY_LIBRARY:
            pytest.importorskip("compressed_tensors")
        dense = write_folder(tmp_path, CASES[name])
    with torch.inference_mode():
        expected = dense(torch.tensor([TOKENS])).logits[0]
        patched = torch_infini.load(path, torch.float32, activations="int8")(torch.tensor([TOKENS])).logits[0]
    own = LLM(path, dtype="float32", activations="int8", progress=False).engine.model
    assert own.layers[0].mlp.down.format == ("int8" if name == "w8a16" else "int4")
    for found in (logits(own), patched):
        difference = float((found - expected).norm() / expected.norm())
        integers = torch_infini.cpu_capability() in torch_infini.weights.quantize.MULTIPLIES_INTEGERS
        assert (1e-3 if integers else 0) <= difference <= 0.05


def test_int8_activations_of_dense_weights_are_refused(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    for make in (LLM, torch_infini.load):
        with pytest.raises(ValueError, match=r"activations must be left out for a checkpoint that .*, got 'int8' for "):
            make(tmp_path, activations="int8")
    write_folder(tmp_path / "awq", CASES["awq"])
    for make in (LLM, torch_infini.load):
        with pytest.raises(ValueError, match=r"activations must be 'int8' or None, got 'fp8'"):
            make(tmp_path / "awq", activations="fp8")
    with pytest.raises(ValueError, match=r"torch_infini.LLM: activations must be left out for a model that is loaded"):
        LLM(random_model("llama"), activations="int8")


def test_other_weights_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, CASES["awq"])
    with pytest.raises(ValueError, match=r"weights must be left out for a checkpoint that is quantized .*, got 'int8'"):
        LLM(tmp_path, quantization="int8", progress=False)


# ---- torch_infini.load ----


@pytest.mark.parametrize("name", [*CASES, "Q4_K", "Q6_K", "F16"], indirect=True)
def test_load(name: str, tmp_path: Path) -> None:
    """A patched model of transformers."""
    if name in BY_LIBRARY:
        pytest.importorskip("compressed_tensors")
    path = tmp_path
    if name not in CASES:
        pytest.importorskip("gguf")
        path = tmp_path / "model.gguf"
        dense = write_gguf(path, lambda module: name)
        layout = "dense" if name == "F16" else block_layout(name)
    else:
        dense, layout = write_folder(tmp_path, CASES[name]), CASES[name].layout
    model = torch_infini.load(path, torch.float32)
    assert torch_infini.is_patched(model) and not model.training
    with torch.no_grad():
        expected, found = (one(torch.tensor([TOKENS])).logits for one in (dense, model))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    integers = {b.dtype for key, b in model.named_buffers() if key.endswith(".weight_integers")}
    assert integers == {"int8": {torch.int8}, "dense": set()}.get(layout, {torch.uint8})
    for layer, module in dense.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert torch.equal(model.get_submodule(layer).weight, module.weight), layer
    if layout != "dense":
        with pytest.raises(ValueError, match="the model must have its original weights"):
            torch_infini.unpatch_model(model)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "mistral", "llama-biases-tied"])
def test_load_families(name: str, tmp_path: Path) -> None:
    """Buffers that no checkpoint has, biases and tied heads; a dense folder as well."""
    changes = {"tie_word_embeddings": "tied" in name}
    quantized = write_folder(tmp_path / "awq", CASES["awq"], name=name, **changes)
    dense = random_model(name)
    dense.save_pretrained(tmp_path / "dense")
    for folder, expected in (("awq", quantized), ("dense", dense)):
        model = torch_infini.load(tmp_path / folder, torch.float32)
        with torch.no_grad():
            a, b = (one(torch.tensor([TOKENS])).logits for one in (expected, model))
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()


def test_saving_what_was_loaded(tmp_path: Path) -> None:
    """Blocks are written as they are; of int4 the form of patch_model, which has zeros, as AWQ."""
    pytest.importorskip("gguf")
    has_blocks = block_layout("Q6_K") != "dense"
    write_folder(tmp_path / "awq", CASES["awq"])
    write_folder(tmp_path / "gptq", CASES["gptq"])
    write_gguf(tmp_path / "model.gguf", lambda module: "Q6_K")
    ids = torch.tensor([TOKENS])
    for path in (tmp_path / "awq", *([tmp_path / "gptq", tmp_path / "model.gguf"] if has_blocks else [])):
        model, saved = torch_infini.load(path, torch.float32), tmp_path / f"saved {path.name}"
        torch_infini.save_patched(model, saved)
        with torch.no_grad():
            expected = model(ids).logits
            for again in (torch_infini.load_patched(saved), torch_infini.load(saved)):
                assert torch.equal(again(ids).logits, expected)
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)[0, len(TOKENS) :].tolist()
        output = LLM(saved, progress=False).generate([TOKENS], SamplingParams(max_tokens=6, temperature=0))[0]
        assert output.token_ids == tokens
    model = torch_infini.load(tmp_path / "gptq", activations="int8")  # int4 without zeros
    with pytest.raises(ValueError, match=r"quantized layers must be of patch_model\(weights=...\), got model.layers.0"):
        torch_infini.save_patched(model, tmp_path / "other")


def test_load_says_what_does_not_fit(tmp_path: Path) -> None:
    write_folder(tmp_path, CASES["awq"])
    change(tmp_path, intermediate_size=1024)
    with pytest.raises(ValueError, match=r"mlp.gate_proj.weight must have shape \[1024, 256\], got \[512, 256\]"):
        torch_infini.load(tmp_path)
    change(tmp_path, {f"{Q}.scales": None}, intermediate_size=512)
    with pytest.raises(ValueError, match=f"{Q} must have scales, as awq has"):
        torch_infini.load(tmp_path)
    change(tmp_path, model_type="nothing")
    with pytest.raises(ValueError):
        torch_infini.load(tmp_path)


# ---- patch_model ----


def test_patch_model_takes_compressed_layers_over(tmp_path: Path) -> None:
    """Before transformers decompresses them: the integers stay what they are."""
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    for name in ("pack-quantized", "float-quantized"):
        dense = write_folder(tmp_path / name, CASES[name])
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        packed = model.model.layers[1].mlp.down_proj._parameters.get("weight_packed")
        report = torch_infini.patch_model(model)
        assert not report.reason and "ct_decompress_hook" not in vars(model)
        with torch.no_grad():
            expected, found = (one(torch.tensor([TOKENS])).logits for one in (dense, model))
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        for layer, module in dense.named_modules():
            if isinstance(module, torch.nn.Linear):
                assert torch.equal(model.get_submodule(layer).weight, module.weight), layer
        integers = model.model.layers[1].mlp.down_proj._buffers.get("weight_integers")
        assert (integers is None) == (CASES[name].layout == "dense")
        if packed is not None and integers is not None:
            assert integers.dtype == torch.uint8 and len(integers) == 256
            with pytest.raises(ValueError, match="the model must have its original weights"):
                torch_infini.unpatch_model(model)


def test_dtypes_by_name(tmp_path: Path) -> None:
    """As in transformers and vLLM: auto is the checkpoint's."""
    random_model("llama", torch.bfloat16).save_pretrained(tmp_path)
    for dtype, expected in (("auto", torch.bfloat16), (None, torch.bfloat16), ("float32", torch.float32)):
        assert torch_infini.load(tmp_path, dtype).dtype == expected
        assert LLM(tmp_path, dtype=dtype).engine.model.dtype == expected
    for make in (lambda: torch_infini.load(tmp_path, "float8"), lambda: LLM(tmp_path, dtype="float8")):
        with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16, got float8"):
            make()
