"""LLM.embed: pooled hidden states are those of transformers, alone and beside others, in chunks and with prefixes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from torch_infini import LLM, AsyncLLM, SamplingParams
from torch_infini.distributed.rank_threads import on_ranks
from torch_infini.engine import EmbeddingRequestOutput, PoolingParams
from torch_infini.engine.loading import load_model
from torch_infini.engine.pooling import PoolingDefaults, pooling_defaults
from torch_infini.testing.checkpoints import SMALL, random_model, save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
# The last three run through transformers' own forward.
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16},
    "gpt_neox": {"num_key_value_heads": 4},
    "olmo2": {},
}
FAMILIES = ["llama", "llama3", "qwen2", "qwen3", "mistral", *OTHERS]
PROMPTS = [[5], [7, 8, 9], list(range(10, 75)), [3, 1, 4, 1, 5, 9, 2, 6] * 20]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llama", tmp_path_factory.mktemp("model"))


def saved(family: str, folder: Path) -> Path:
    if family in OTHERS:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**SMALL, **OTHERS[family]})
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
    else:
        model = random_model(family)
    model.float().save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)
    return folder


def expected(folder: Path, prompt: list[int], pooling: str, normalize: bool = True, size: int | None = None) -> Tensor:
    """transformers' last_hidden_state, pooled."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(input_ids=torch.tensor([prompt])).last_hidden_state[0].double()
    vector = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling][:size]
    return vector / vector.norm() if normalize else vector


def vectors(outputs: list[EmbeddingRequestOutput]) -> list[Tensor]:
    return [torch.tensor(output.outputs.embedding, dtype=torch.float64) for output in outputs]


def close(found: Tensor, wanted: Tensor) -> None:
    """float32 over a few layers: some hundred roundings of 2^-24 of the vector's size."""
    assert found.shape == wanted.shape
    assert float((found - wanted).norm()) <= 2e-5 * float(wanted.norm()), float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Prompts of 1, 3, 65 and 160 tokens: one chunk of 64 tokens and several."""
    folder = saved(family, tmp_path)
    llm = LLM(folder, progress=False, chunk_size=64, max_num_batched_tokens=64, max_num_seqs=3)
    for pooling in ("last", "mean", "cls"):
        for normalize in (True, False):
            outputs = llm.embed(PROMPTS, pooling=pooling, normalize=normalize)  # type: ignore[arg-type]
            for prompt, output, vector in zip(PROMPTS, outputs, vectors(outputs), strict=True):
                assert output.prompt_token_ids == prompt and output.finished
                close(vector, expected(folder, prompt, pooling, normalize))
    metrics = llm.metrics()
    assert llm.engine.is_idle and metrics.free_blocks == metrics.blocks and metrics.generated_tokens == 0


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("shards", [1, 2])
def test_folders_of_models_without_a_head(family: str, shards: int, tmp_path: Path) -> None:
    """Saved by AutoModel, as embedding models are: names lack the prefix of the causal model's."""
    model = random_model(family, tie_word_embeddings=True)
    inner = model.base_model
    size = sum(p.nbytes for p in inner.parameters())
    inner.save_pretrained(tmp_path, max_shard_size=-(-size // shards) + 4096)
    assert len(list(tmp_path.glob("*.safetensors"))) >= shards
    llm = LLM(tmp_path, progress=False)
    for prompt, vector in zip(PROMPTS, vectors(llm.embed(PROMPTS)), strict=True):
        close(vector, expected(tmp_path, prompt, "last"))
    random_model(family).base_model.save_pretrained(tmp_path / "untied")
    with pytest.raises(ValueError, match=r"got missing: lm_head\.weight"):
        LLM(tmp_path / "untied", progress=False)


def test_a_model_of_transformers_that_is_loaded(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    llm = LLM(model, progress=False)
    close(vectors(llm.embed(PROMPTS[3]))[0], expected(folder, PROMPTS[3], "last"))


def test_prefixes_and_others_change_no_bit(folder: Path) -> None:
    """A cached prefix is used for "last" alone; neither it nor requests that generate change a bit."""
    llm = LLM(folder, progress=False, chunk_size=16, block_size=16, max_num_batched_tokens=32)
    alone = {kind: llm.embed(PROMPTS[3], pooling=kind)[0] for kind in ("last", "mean", "cls")}  # type: ignore[arg-type]
    assert alone["mean"].num_cached_tokens == alone["cls"].num_cached_tokens == 0
    again = {kind: llm.embed(PROMPTS[3], pooling=kind)[0] for kind in ("last", "mean", "cls")}  # type: ignore[arg-type]
    assert again["last"].num_cached_tokens == 144
    assert again["mean"].num_cached_tokens == again["cls"].num_cached_tokens == 0
    assert all(again[kind].outputs == alone[kind].outputs for kind in alone)
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0)
    want = llm.generate([[9, 8, 7]], params)[0].token_ids
    stream = llm.stream([9, 8, 7], params)
    next(stream)
    assert llm.embed(PROMPTS[3], pooling="mean")[0].outputs == alone["mean"].outputs
    assert [*stream][-1].token_ids == want


def test_preemption(folder: Path) -> None:
    """A cache that is too small for all: the sums begin anew."""
    llm = LLM(folder, progress=False, chunk_size=16, block_size=16, cache_blocks=13, max_num_seqs=4)
    prompts = [[i] * 100 for i in range(1, 7)]
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    stream = llm.stream([9] * 100, params)
    next(stream)
    found = vectors(llm.embed(prompts, pooling="mean"))
    assert len([*stream]) > 1
    for prompt, vector in zip(prompts, found, strict=True):
        close(vector, expected(folder, prompt, "mean"))


def test_what_the_folder_says(folder: Path, tmp_path: Path) -> None:
    model = saved("llama", tmp_path)
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    modules += [{"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]
    (model / "1_Pooling").mkdir()

    def write(modules: Any, pooling: Any, **config: Any) -> PoolingDefaults:
        (model / "modules.json").write_text(json.dumps(modules))
        (model / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        stored = json.loads((folder / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**stored, **config}))
        return pooling_defaults(model)

    mean = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    assert write(modules, mean).params == PoolingParams(pooling="mean", normalize=False)
    close(vectors(LLM(model, progress=False).embed([5, 6, 7]))[0], expected(model, [5, 6, 7], "mean", False))
    normalize = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
    last = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}
    assert write([*modules, normalize], last).params == PoolingParams(pooling="last", normalize=True)
    assert write(modules, {"pooling_mode": "cls"}).params.pooling == "cls"
    for pooling in ({"pooling_mode_weightedmean_tokens": True}, {**mean, "pooling_mode_cls_token": True}, {}, []):
        found = write(modules, pooling)
        with pytest.raises(ValueError, match="pooling must be given for this model, whose folder asks for pooling by"):
            found.merge()
        assert found.merge("mean").pooling == "mean"
    dense = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    with pytest.raises(ValueError, match="asks for a module 'Dense' that cannot be read: its activation"):
        write([*modules, dense], mean).merge()
    for broken in ({}, "x", None):
        assert write(broken, mean).params == PoolingParams()
    assert write([7], mean).unsupported is not None

    found = write([*modules, normalize], last, is_matryoshka=True, hidden_size=64)
    assert found.merge(dimensions=8).dimensions == 8
    with pytest.raises(ValueError, match="dimensions must be at most 64, got 65"):
        found.merge(dimensions=65)
    close(
        vectors(LLM(model, progress=False).embed([5, 6, 7], dimensions=8))[0],
        expected(model, [5, 6, 7], "last", True, 8),
    )
    found = write(modules, last, matryoshka_dimensions=[8, 16], is_matryoshka=True)
    assert found.merge(dimensions=16).dimensions == 16
    with pytest.raises(ValueError, match="dimensions must be one of 8, 16, or None"):
        found.merge(dimensions=9)


def test_bad_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, progress=False, max_model_len=64)
    for settings, rule in (
        ({"pooling": "sum"}, "pooling must be last, mean, cls, max, mean_sqrt_len, got 'sum'"),
        ({"normalize": 1}, "normalize must be True or False, got 1"),
        ({"dimensions": 8}, r"dimensions must be None, for the model's config names no sizes \(is_matryoshka\), got 8"),
        ({"dimensions": 0}, "dimensions must be an integer of at least 1 or None, got 0"),
        ({"dimensions": True}, "dimensions must be an integer of at least 1 or None, got True"),
    ):
        with pytest.raises(ValueError, match=rule):
            llm.embed("a", **settings)  # type: ignore[arg-type]
    for prompt in ([], [-1], [320], [5] * 64, [[5], []]):
        with pytest.raises(ValueError, match=r"\(prompt \d\)|at least one token|token ids"):
            llm.embed([prompt] if prompt == [] else prompt)  # type: ignore[arg-type, list-item]
    assert len(llm.embed(["a", "b"])) == 2 and llm.engine.is_idle


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_ranks(family: str, tmp_path: Path) -> None:
    """Vectors of a model that ranks share are those of one, up to the order of sums: ranks of torchrun, and workers."""
    saved(family, tmp_path)
    want = torch.tensor([one.outputs.embedding for one in LLM(tmp_path, progress=False).embed(PROMPTS)])

    def work(tp_group: Any) -> Tensor:
        llm = LLM(load_model(tmp_path, None, None, "cpu", None, False, tp_group))
        return torch.tensor([one.outputs.embedding for one in llm.embed(PROMPTS, pooling="last", normalize=True)])

    first, second = on_ranks(2, work)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, want, rtol=0, atol=1e-5)
    if family == "qwen3":
        llm = LLM(tmp_path, tensor_parallel_size=2, progress=False)
        found = torch.tensor([one.outputs.embedding for one in llm.embed(PROMPTS)])
        torch.testing.assert_close(found, want, rtol=0, atol=1e-5)


def test_states_that_are_not_finite(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, progress=False)
    states = type(llm.engine.model).hidden_states
    monkeypatch.setattr(llm.engine.model, "hidden_states", lambda *given: states(llm.engine.model, *given) / 0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the prompt's embedding must be finite"):
        llm.embed("abc")
    assert llm.engine.is_idle


def test_embeddings_of_async_llm(folder: Path) -> None:
    """Beside a request that generates, all at once: the bits of LLM.embed; a cancelled one leaves nothing behind."""
    wanted = LLM(folder, progress=False).embed(PROMPTS, pooling="mean")
    params = SamplingParams.greedy(max_tokens=30, ignore_eos=True)

    async def run() -> tuple[list[EmbeddingRequestOutput], AsyncLLM]:
        async with AsyncLLM(folder, progress=False, chunk_size=16, max_num_seqs=3) as llm:
            other = asyncio.create_task(llm.generate([9, 8, 7], params))
            found = await asyncio.gather(*(llm.embed(prompt, pooling="mean") for prompt in PROMPTS))
            assert len((await other).outputs[0].token_ids) == 30
            left = asyncio.create_task(llm.embed(PROMPTS[3]))
            await asyncio.sleep(0)
            left.cancel()
            for wrong in ({"pooling": "sum"}, {"dimensions": 3}, {"normalize": 1}):
                with pytest.raises(ValueError, match=f"torch_infini.LLM.embed: {next(iter(wrong))} must be"):
                    await llm.embed([1], **wrong)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="must"):
                await llm.embed([])
            while not llm.engine.is_idle:
                await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="must be open, got a closed one"):
            await llm.embed([1])
        return found, llm

    found, llm = asyncio.run(run())
    for one, other in zip(vectors(found), vectors(wanted), strict=True):
        close(one, other)
    assert llm.metrics().free_blocks == llm.metrics().blocks
