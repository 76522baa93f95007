"""LLM.embed of encoders (BERT, RoBERTa, XLM-R, DistilBERT, MPNet, ModernBERT): pooled states are transformers'."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from support.encoders import CLS, FAMILIES, SEP, VOCABULARY, reference, save_encoder, save_modules
from torch_infini import LLM, AsyncLLM, patch_model, save_patched
from torch_infini.__main__ import main
from torch_infini.engine import EmbeddingRequestOutput
from torch_infini.engine.pooling import KINDS, pooling_defaults
from torch_infini.engine.prompts import shortened
from torch_infini.nn.linear import fastest
from torch_infini.patch.encoder import batches, is_encoder_config
from torch_infini.patch.layers.packed_linear import PackedLinear

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[CLS, SEP], [CLS, 5, SEP], [CLS, *range(10, 75), SEP], [3, 1, 4, 1, 5, 9, 2, 6] * 15, [CLS, 7, 8, 9, SEP]]
MEAN = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, progress=False)


def vectors(outputs: Sequence[EmbeddingRequestOutput]) -> list[Tensor]:
    return [torch.tensor(output.outputs.embedding, dtype=torch.float64) for output in outputs]


def close(found: Tensor, wanted: Tensor, error: float = 2e-5) -> None:
    assert found.shape == wanted.shape
    assert float((found - wanted).norm()) <= error * float(wanted.norm()), float((found - wanted).norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Texts of 2 to 120 tokens: alone, and beside others of about and of other lengths."""
    folder = save_encoder(tmp_path, family)
    llm = LLM(folder, progress=False, max_num_seqs=4)
    for pooling in KINDS:
        for prompt, vector in zip(PROMPTS, vectors(llm.embed(PROMPTS, pooling=pooling)), strict=True):  # type: ignore[arg-type]
            close(vector, reference(folder, prompt, pooling))
            close(vector, vectors(llm.embed(prompt, pooling=pooling))[0], 2e-6)  # type: ignore[arg-type]
    [plain] = vectors(llm.embed(PROMPTS[2], normalize=False))
    close(plain, reference(folder, PROMPTS[2], "mean", False))
    metrics = llm.metrics()
    assert llm.engine.is_idle and metrics.free_blocks == metrics.blocks and metrics.generated_tokens == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "family, pads", [("albert", True), ("camembert", True), ("deberta-v2", True), ("nomic_bert", True), ("fnet", False)]
)
def test_other_families(family: str, pads: bool, tmp_path: Path) -> None:
    """Among them one that mixes padding into its states, so that only texts of one length share a call."""
    llm = LLM(save_encoder(tmp_path, family), progress=False)
    assert llm.engine.model.pads is pads  # type: ignore[attr-defined]
    for prompt, vector in zip(PROMPTS, vectors(llm.embed(PROMPTS)), strict=True):
        close(vector, reference(tmp_path, prompt, "mean"))


def test_lengths(folder: Path, llm: LLM) -> None:
    """Positions that begin behind padding's leave fewer; the longest text fills them all."""
    assert llm.engine.max_model_len == 130
    [vector] = vectors(llm.embed([7] * 130))
    close(vector, reference(folder, [7] * 130, "mean"))
    with pytest.raises(ValueError, match="prompt must be at most 130 tokens, the lesser of max_model_len and the mo"):
        llm.embed([[7], [7] * 131])
    assert llm.engine.is_idle
    found = llm.embed(["abc", "x" * 200, "", "y" * 126], truncate_prompt_tokens=-1)
    assert [len(one.prompt_token_ids) for one in found] == [5, 130, 2, 128]
    assert all(one.prompt_token_ids[0] == CLS and one.prompt_token_ids[-1] == SEP for one in found)
    assert llm.embed([1, 2, 3, 4], truncate_prompt_tokens=2)[0].prompt_token_ids == [1, 2]
    assert (
        llm.embed("abcdef", truncate_prompt_tokens=4)[0].prompt_token_ids[1:3] == llm.engine.prompts.encode("ab")[1:3]
    )
    for wrong in (0, -2, True, 1.5, "5"):
        with pytest.raises(ValueError, match="truncate_prompt_tokens must be an integer of at least 1, -1 or None"):
            llm.embed("a", truncate_prompt_tokens=wrong)  # type: ignore[arg-type]
    assert shortened([1, 2, 3, 9], 3, {9}) == [0, 1, 3] and shortened([1, 2, 9, 9], 2, {9}) == [0, 1]
    assert shortened([9, 9, 9], 2, {9}) == [0, 1] and shortened([], 2, ()) == []


def test_positions_behind_padding(tmp_path: Path) -> None:
    save_encoder(tmp_path, "roberta")
    assert LLM(tmp_path, progress=False).engine.max_model_len == 128


def test_batches_have_little_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    for high in (3, 20, 500):
        lengths = torch.randint(1, high, (100,), generator=generator).tolist()
        found = list(batches(lengths))
        assert sorted(i for batch in found for i in batch) == list(range(100))
        for batch in found:
            tokens = sum(lengths[i] for i in batch)
            assert max(lengths[i] for i in batch) * len(batch) - tokens <= max(16, tokens / 8)
    assert list(batches([])) == [] and list(batches([5])) == [[0]] and len(list(batches([7] * 50))) == 1
    assert list(batches([5, 7, 5, 6], False)) == [[1], [3], [0, 2]]


def test_what_cannot_be_done(folder: Path, llm: LLM) -> None:
    for call in (
        lambda: llm.generate("a"),
        lambda: llm.chat([{"role": "user", "content": "a"}]),
        lambda: next(llm.stream("a")),
        lambda: llm.engine.add("a"),
    ):
        with pytest.raises(ValueError, match=r"model must be a causal .* got an encoder \(bert\), .*call embed"):
            call()
    for settings, rule in (
        ({"cache_bytes": 1 << 20}, r"cache_bytes must be left out for an encoder \(bert\), which keeps no keys"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype must be left out"),
        ({"enable_lora": True}, "enable_lora must be False for an encoder"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1 for an encoder, got 2"),
        ({"activations": "int8"}, "activations must be left out for an encoder"),
        ({"quantization": "awq"}, "quantization must be one of"),
        ({"max_model_len": 131}, "max_model_len must be at most the model's positions, 130, got 131"),
        ({"runner": "embed"}, "runner must be 'auto', 'generate' or 'pooling', got 'embed'"),
    ):
        with pytest.raises(ValueError, match=rule):
            LLM(folder, progress=False, **settings)
    for prompt in ([], [-1], [VOCABULARY], [1, "a"]):
        with pytest.raises(ValueError, match="at least one token|token ids"):
            llm.embed([prompt] if prompt == [] else prompt)  # type: ignore[arg-type, list-item]
    assert llm.embed([]) == [] and llm.engine.is_idle


@pytest.mark.parametrize("command", ["bench", "chat", "generate --prompt a"])
def test_commands_that_generate(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--model", str(folder)]) != 0
    error = capsys.readouterr().err
    assert "model must be a causal language model to generate text, got an encoder (bert)" in error


def test_folders_that_lack_tensors(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_encoder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    left = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
    save_file(left, tmp_path / "model.safetensors", {"format": "pt"})
    close(vectors(LLM(tmp_path, progress=False).embed([5, 6]))[0], reference(folder, [5, 6], "mean"))
    del left["encoder.layer.1.output.dense.weight"]
    save_file(left, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"got missing: encoder\.layer\.1\.output\.dense\.weight"):
        LLM(tmp_path, progress=False)


def test_which_folders_are_encoders() -> None:
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    assert is_encoder_config(bert) and is_encoder_config({"model_type": "modernbert"})
    for other in (
        {**bert, "is_decoder": True},
        {**bert, "architectures": ["BertLMHeadModel"]},
        {"model_type": "roberta", "architectures": ["RobertaForCausalLM"]},
        {"model_type": "bart", "architectures": ["BartModel"]},
        {"model_type": "qwen3", "architectures": ["Qwen3Model"]},
        {"model_type": 5},
        {},
    ):
        assert not is_encoder_config(other)


def test_models_that_are_loaded(folder: Path, tmp_path: Path) -> None:
    """With another head, patched already, quantized, and read from a folder of save_patched."""
    model: Any = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    want = reference(folder, PROMPTS[2], "mean")
    close(vectors(LLM(model, progress=False).embed(PROMPTS[2]))[0], want)
    close(vectors(LLM(model, progress=False).embed(PROMPTS[2]))[0], want)
    with pytest.raises(ValueError, match="quantization must be left out for a model that is patched, got 'int8'"):
        LLM(model, progress=False, quantization="int8")
    model = transformers.AutoModel.from_pretrained(folder)
    patch_model(model, weights="int8")
    save_patched(model, tmp_path)
    [stored] = vectors(LLM(tmp_path, progress=False).embed(PROMPTS[2]))
    [same] = vectors(LLM(folder, progress=False, quantization="int8").embed(PROMPTS[2]))
    close(stored, same, 1e-6)
    assert float(stored @ want) > 0.99
    with pytest.raises(ValueError, match="quantization must be left out for a folder of save_patched, got 'int8'"):
        LLM(tmp_path, progress=False, quantization="int8")
    half = LLM(folder, progress=False, dtype="bfloat16")
    packed = [isinstance(module, PackedLinear) for module in half.engine.model.model.modules()]  # type: ignore[attr-defined]
    assert packed.count(True) == (12 if fastest("dense", torch.bfloat16, "cpu") == "packed" else 0)
    assert float(vectors(half.embed(PROMPTS[2]))[0] @ want) > 0.999


def test_states_that_are_not_finite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, progress=False)
    encode = llm.engine.model.encode  # type: ignore[attr-defined]
    monkeypatch.setattr(llm.engine.model, "encode", lambda *given: [one / 0 for one in encode(*given)])
    with pytest.raises(RuntimeError, match="the prompt's embedding must be finite"):
        llm.embed("abc")

    def fail(*given: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(llm.engine.model, "encode", fail)
    with pytest.raises(RuntimeError, match="the step failed: no memory"):
        llm.embed(["abc", "d"])
    assert llm.engine.is_idle


def test_an_interrupted_step(folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step computes its texts again."""
    other = LLM(folder, progress=False)
    encode = other.engine.model.encode  # type: ignore[attr-defined]
    calls: list[int] = []

    def interrupted(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return encode(*given)

    monkeypatch.setattr(other.engine.model, "encode", interrupted)
    params = other.engine.prompts.pooling.merge()
    ids = [other.engine.add(other.engine.new_request(prompt, None, None, params)) for prompt in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        other.step()
    assert other.engine.abort(ids[0])
    found = {output.request_id: output for _ in range(2) for output in other.step()}
    assert found[ids[0]].pooled is None and other.engine.is_idle
    for id, vector in list(zip(ids, vectors(llm.embed(PROMPTS)), strict=True))[1:]:
        pooled = found[id].pooled
        assert pooled is not None
        close(pooled.double(), vector, 2e-6)
    metrics = other.metrics()
    assert metrics.free_blocks == metrics.blocks


def test_steps(folder: Path) -> None:
    """A step ends with the text that reaches its tokens; what waits comes with the next."""
    llm = LLM(folder, progress=False, max_num_batched_tokens=16, max_num_seqs=4)
    seen: list[list[int]] = []
    encode = llm.engine.model.encode  # type: ignore[attr-defined]

    def count(texts: Any, types: Any) -> Any:
        seen.append([len(text) for text in texts])
        return encode(texts, types)

    llm.engine.model.encode = count  # type: ignore[attr-defined]
    llm.embed([[5] * n for n in (100, 3, 3, 3, 3, 3, 10, 9)])
    assert seen == [[3, 3, 3, 3], [3, 9, 10], [100]]


def test_embeddings_of_async_llm(folder: Path, llm: LLM) -> None:
    wanted = vectors(llm.embed(PROMPTS))

    async def run() -> list[EmbeddingRequestOutput]:
        async with AsyncLLM(folder, progress=False, max_num_seqs=3) as other:
            found = await asyncio.gather(*(other.embed(prompt) for prompt in PROMPTS))
            left = asyncio.create_task(other.embed(PROMPTS[3]))
            await asyncio.sleep(0)
            left.cancel()
            with pytest.raises(ValueError, match="model must be a causal"):
                await other.generate("a")
            while not other.engine.is_idle:
                await asyncio.sleep(0.01)
        return found

    for one, other in zip(vectors(asyncio.run(run())), wanted, strict=True):
        close(one, other, 2e-6)


def test_what_the_folder_says(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path)
    tensors = {"linear.weight": torch.randn(32, 48) / 7, "linear.bias": torch.randn(32)}
    dense = {
        "in_features": 48,
        "out_features": 32,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    prompts = {"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "document"}
    save_modules(
        folder,
        MEAN,
        "Dense",
        "Normalize",
        sentence_bert_config={"max_seq_length": 40, "do_lower_case": True},
        config_sentence_transformers=prompts,
    )
    (folder / "2_Dense" / "config.json").write_text(json.dumps(dense))
    torch.save(tensors, folder / "2_Dense" / "pytorch_model.bin")
    llm = LLM(folder, progress=False)
    assert llm.engine.max_model_len == 40
    [vector] = vectors(llm.embed("Some Text"))
    tokens = llm.engine.prompts.encode("some text")
    pooled = reference(folder, tokens, "mean", False)
    want = torch.tanh(tensors["linear.weight"].double() @ pooled + tensors["linear.bias"].double())
    close(vector, want / want.norm())
    assert llm.embed("A", prompt_name="query")[0].prompt_token_ids == llm.engine.prompts.encode("q: a")
    with pytest.raises(ValueError, match="prompt_name must be 'query', 'document', got 'other'"):
        llm.embed("A", prompt_name="other")
    with pytest.raises(ValueError, match="prompt_name must be None for token ids, got 'query'"):
        llm.embed([5], prompt_name="query")
    with pytest.raises(ValueError, match="prompt_name must be a text or None, got 5"):
        llm.embed("a", prompt_name=5)  # type: ignore[arg-type]
    assert len(llm.embed("a" * 99, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 40
    assert LLM(folder, progress=False, max_model_len=130).engine.max_model_len == 130
    for broken, rule in (
        (
            {**dense, "activation_function": "my.module.Wave"},
            "its activation must be one of Identity, .*got 'my.module.Wave'",
        ),
        ({**dense, "in_features": 47}, r"2_Dense must hold .* got weights of \(32, 48\)"),
        ([], "a module 'Dense' that cannot be read"),
    ):
        (folder / "2_Dense" / "config.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match=rule):
            pooling_defaults(folder, True).merge()
    save_modules(folder, MEAN, "WeightedLayerPooling")
    with pytest.raises(ValueError, match="a module 'WeightedLayerPooling', where Transformer, Pooling, Dense and Norm"):
        LLM(folder, progress=False).embed("a")
    for name, kind in (
        ("pooling_mode_max_tokens", "max"),
        ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len"),
        ("pooling_mode_cls_token", "cls"),
    ):
        save_modules(folder, {name: True})
        assert pooling_defaults(folder, True).params.pooling == kind
    save_modules(folder, {**MEAN, "include_prompt": False})
    with pytest.raises(ValueError, match="pooling without the prompt's tokens"):
        pooling_defaults(folder, True).merge()


@pytest.mark.full
def test_sentence_transformers(tmp_path: Path) -> None:
    """Folders that the library writes, and its vectors."""
    library: Any = pytest.importorskip("sentence_transformers")
    modules: Any = pytest.importorskip("sentence_transformers.models")
    folder = save_encoder(tmp_path / "bert")
    texts = ["hello", "a longer text, of more tokens", "", "hi"]
    for mode in ("mean", "cls", "max", "mean_sqrt_len_tokens", "lasttoken"):
        inner = modules.Transformer(str(folder))
        parts = [inner, modules.Pooling(48, pooling_mode=mode), modules.Dense(48, 24), modules.Normalize()]
        model = library.SentenceTransformer(modules=parts, device="cpu")
        model.save(str(tmp_path / mode))
        want = torch.from_numpy(model.encode(texts)).double()
        found = torch.stack(vectors(LLM(tmp_path / mode, progress=False).embed(texts)))
        close(found, want)
