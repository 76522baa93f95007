"""Models that ranks share: tokens equal to those of one rank, for every family, as threads and as processes; what each
rank reads; and what is said where ranks do not fit together or one of them ends.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from support.rounding import assert_clear, sums_of
from torch_infini import LLM, AsyncLLM, SamplingParams
from torch_infini.__main__ import main
from torch_infini.compat.infinilm.lib import _infinilm
from torch_infini.distributed import TPGroup, init_tp_group
from torch_infini.distributed.rank_threads import on_ranks
from torch_infini.engine.loading import load_model
from torch_infini.engine.runner import make_worker
from torch_infini.models import Llama, checkpoint
from torch_infini.testing.checkpoints import MODELS, SMALL, random_model

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY = SMALL["vocab_size"]
TOKENS = 64


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def tokens_of(llm: LLM, rows: list[list[int]], params: Any) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.outputs] for output in llm.generate(rows, params)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_rank(name: str, size: int, tmp_path: Path) -> None:
    """Greedy ones in float32, with prompts in pieces, reused prefixes and preemptions. With 4 ranks most families have
    fewer key heads than ranks; the vocabulary does not divide by 3."""
    theirs = random_model(name, vocab_size=VOCABULARY - 3)
    theirs.save_pretrained(tmp_path)
    rows = [[token % (VOCABULARY - 3) for token in row] for row in prompts(3, 40, 1, 90)]
    rows.append(rows[3][:64] + rows[1])
    params = SamplingParams.greedy(max_tokens=TOKENS)
    settings = {"block_size": 8, "cache_blocks": 50, "chunk_size": 32, "max_model_len": 200}
    want = tokens_of(LLM(tmp_path, **settings), rows, params)
    for row, (new,) in zip(rows, want, strict=True):  # ranks add up in another order, which must decide no token
        with torch.no_grad():
            logits = theirs(torch.tensor([row + new[:-1]]), use_cache=False).logits[0, len(row) - 1 :]
        assert_clear([logits], *sums_of(theirs.config))

    def work(tp_group: TPGroup) -> Any:
        llm = LLM(Llama.from_pretrained(tmp_path, tp_group=tp_group), **settings)
        return tokens_of(llm, rows, params), llm.metrics().preemptions

    for result in on_ranks(size, work):
        assert not isinstance(result, Exception), result
        assert result[0] == want
        assert result[1] > 0


@pytest.mark.parametrize("weights", ["dense", "int8", "int4"])
def test_all_ranks_sample_the_same(weights: Any, tmp_path: Path) -> None:
    """In bfloat16 and without seeds too: the logits have the same bits on all ranks, and rank 0 draws the seeds."""
    random_model("llama", intermediate_size=128).save_pretrained(tmp_path)
    params = [
        SamplingParams(temperature=1.5, n=2, max_tokens=30),
        SamplingParams(temperature=1.0, seed=3, max_tokens=30),
    ]

    def work(tp_group: TPGroup) -> Any:
        return tokens_of(
            LLM(Llama.from_pretrained(tmp_path, weights, "bfloat16", tp_group=tp_group)), prompts(9, 30), params
        )

    first, second = on_ranks(2, work)
    assert first == second
    assert first[0][0] != first[0][1]


def test_each_rank_reads_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together little more than the files: norms, and nothing else, are read by all."""
    random_model("llama-biases-tied", intermediate_size=4096).save_pretrained(tmp_path)
    read: dict[int, int] = {}
    lock = threading.Lock()
    original = checkpoint._File.read

    def counting(file: Any, to: int, size: int, offset: int) -> None:
        with lock:
            read[offset] = read.get(offset, 0) + size
        original(file, to, size, offset)

    monkeypatch.setattr(checkpoint._File, "read", counting)
    models = on_ranks(2, lambda tp_group: Llama.from_pretrained(tmp_path, tp_group=tp_group, progress=False))
    whole = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert 0.95 * whole < sum(read.values()) < 1.05 * whole
    assert sum(p.numel() for p in models[0].parameters()) < 0.55 * sum(
        p.numel() for p in Llama.from_pretrained(tmp_path, progress=False).parameters()
    )


def test_ranks_that_do_not_fit(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    for result in on_ranks(3, lambda tp_group: Llama.from_pretrained(tmp_path, tp_group=tp_group)):
        assert (
            str(result)
            == "torch_infini.distributed.TPGroup: num_attention_heads must be a multiple of the ranks, 3, got 4"
        )
    random_model("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=96).save_pretrained(tmp_path / "6")
    for result in on_ranks(2, lambda tp_group: Llama.from_pretrained(tmp_path / "6", tp_group=tp_group)):
        assert (
            str(result)
            == "torch_infini.distributed.TPGroup: num_key_value_heads must be a multiple of the ranks, 2, got 3"
        )
    for result in on_ranks(6, lambda tp_group: Llama.from_pretrained(tmp_path / "6", tp_group=tp_group)):
        assert isinstance(result, Llama)
    random_model("llama", seed=1).save_pretrained(tmp_path / "other")
    folders = [tmp_path, tmp_path / "other", tmp_path, tmp_path]
    for result in on_ranks(4, lambda tp_group: Llama.from_pretrained(folders[tp_group.rank], tp_group=tp_group)):
        assert str(result) == (
            "torch_infini.distributed.TPGroup: the checkpoint must be the same on all ranks, got another one on rank 1 "
            "than on rank 0"
        )


def test_requests_come_to_ranks_of_another_kind(tmp_path: Path) -> None:
    """Neither torchrun's (test_followers.py) nor processes that this one has started: threads."""
    random_model("llama").save_pretrained(tmp_path)
    results = on_ranks(2, lambda tp_group: AsyncLLM(Llama.from_pretrained(tmp_path, tp_group=tp_group)))
    rules = ("the ranks must be those of torch.distributed or processes that this one starts", "the rank must be 0")
    for result, rule in zip(results, rules, strict=True):
        assert isinstance(result, ValueError) and rule in str(result)


def test_workers_are_on_the_cpu() -> None:
    with pytest.raises(
        ValueError, match="init_tp_group: device must be cpu where torchrun did not start the ranks, got cuda"
    ):
        init_tp_group(2, "cuda")


@pytest.mark.parametrize("size", [1, 0, "2"])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"size must be an integer of at least 2, got {size!r}")):
        init_tp_group(size)


# ---- processes ----


def test_workers(tmp_path: Path) -> None:
    """A program that is not under torchrun starts the other ranks; they end with the LLM, and leave nothing."""
    random_model("qwen3").save_pretrained(tmp_path)
    rows = prompts(5, 70, 33)
    settings = {"block_size": 8, "cache_blocks": 30, "max_model_len": 200}
    params = [SamplingParams.greedy(max_tokens=50), SamplingParams(n=2, seed=7, max_tokens=40), SamplingParams(seed=2)]
    want = tokens_of(LLM(tmp_path, **settings), rows, params)
    before = set(os.listdir("/dev/shm"))
    llm = LLM(tmp_path, tensor_parallel_size=2, **settings)
    workers = llm.engine.model.tp_group.workers
    assert tokens_of(llm, rows, params) == want
    assert {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("infiniccl")} == set()
    (process,) = workers._processes
    assert process.poll() is None
    del llm, workers
    gc.collect()
    assert process.wait(10) == 0


def test_a_worker_that_ends(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    llm = LLM(tmp_path, tensor_parallel_size=2)
    assert llm.generate([1, 2, 3], SamplingParams.greedy(max_tokens=3))[0].outputs[0].error is None
    workers = llm.engine.model.tp_group.workers
    workers._processes[0].kill()
    workers._processes[0].wait()
    for _ in range(2):
        error = llm.generate([1, 2, 3], SamplingParams.greedy(max_tokens=3))[0].outputs[0].error
        assert re.search("rank 1 .*has ended|all ranks must be there, got one that has ended", error), error


def test_a_worker_that_fails(tmp_path: Path) -> None:
    """Its sentence is what the program gets."""
    random_model("llama").save_pretrained(tmp_path)
    tp_group = init_tp_group(2)
    tp_group.workers.make(make_worker, load_model, tmp_path / "nowhere", "dense", None, "cpu", None)
    with pytest.raises(RuntimeError, match="rank 1: .*must exist, got .*nowhere"):
        tp_group.workers.call("anything")


def test_async(tmp_path: Path) -> None:
    import asyncio

    random_model("llama").save_pretrained(tmp_path)
    rows = prompts(5, 20, 11)
    want = tokens_of(LLM(tmp_path), rows, SamplingParams.greedy(max_tokens=20))

    async def run() -> list[Any]:
        async with AsyncLLM(tmp_path, tensor_parallel_size=2) as llm:
            return await asyncio.gather(*(llm.generate(row, SamplingParams.greedy(max_tokens=20)) for row in rows))

    assert [[c.token_ids for c in output.outputs] for output in asyncio.run(run())] == want


def test_infer_engine(tmp_path: Path) -> None:
    """forward, load_param, reset_cache, state_dict and generate on two ranks, as on one."""
    from torch_infini.compat.infinilm import AutoConfig, InferEngine, StaticKVCacheConfig

    theirs = random_model("llama-biases-tied")
    theirs.save_pretrained(tmp_path)
    engines = [
        InferEngine(
            AutoConfig.from_pretrained(tmp_path), _infinilm.DistConfig(tp_size=size), None, StaticKVCacheConfig(2, 64)
        )
        for size in (1, 2)
    ]
    results = []
    for engine in engines:
        with pytest.raises(ValueError, match="must have shape"):
            engine.load_param("model.norm.weight", torch.ones(3))
        for name, tensor in theirs.state_dict().items():
            engine.load_param(name, tensor)
        tokens = []
        for length in (64, 128):
            engine.reset_cache(StaticKVCacheConfig(2, length))
            row, past = torch.tensor([[5, 6, 7], [9, 9, 9]]), 0
            for _ in range(8):
                given = InferEngine.Input(row, cache_lengths=torch.tensor([past, past]), top_k=1)
                past += row.shape[1]
                row = engine.forward(given).output_ids
                tokens.append(row.tolist())
        results.append(tokens)
    assert results[0] == results[1]
    (whole,), parts = (
        [{name: torch.from_dlpack(x) for name, x in state.items()} for state in engine.state_dict()]
        for engine in engines
    )
    assert len(parts) == 2
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(torch.cat([part[name] for part in parts], 1), whole[name])
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_a_cache_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For this rank, or for another alone: MemoryError, after which the engine goes on."""
    from torch_infini.compat.infinilm import AutoConfig, InferEngine, PagedKVCacheConfig, StaticKVCacheConfig

    random_model("llama").save_pretrained(tmp_path)
    cache = StaticKVCacheConfig(1, 64)
    engine = InferEngine(AutoConfig.from_pretrained(tmp_path), _infinilm.DistConfig(2), None, cache)
    engine._rank.load_folder(tmp_path)

    def token() -> int:
        given = InferEngine.Input(torch.tensor([[5, 6, 7]]), cache_lengths=torch.tensor([0]), top_k=1)
        return engine.forward(given).output_ids.item()

    want = token()
    large = PagedKVCacheConfig(num_blocks=2**60, block_size=2**20)
    new_cache = engine._rank.model.new_cache
    for here in (new_cache, lambda *_: new_cache(1, 64)):
        monkeypatch.setattr(engine._rank.model, "new_cache", here)
        with pytest.raises(MemoryError, match="InferEngine: cache_config must be one that fits into memory, got "):
            engine.reset_cache(large)
        monkeypatch.undo()
        assert engine.get_cache_config() == cache and token() == want
    engine.reset_cache(StaticKVCacheConfig(1, 128))
    assert token() == want


def test_infer_engine_on_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, before a process or memory is asked for."""
    from torch_infini.compat.infinilm import AutoConfig, InferEngine, inference

    random_model("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(inference, "init_tp_group", None)
    with pytest.raises(NotImplementedError, match="InferEngine: distributed_config must name one device, for ranks "):
        InferEngine(AutoConfig.from_pretrained(tmp_path), _infinilm.DistConfig(2), "cuda")


def test_hooks_on_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, where each rank has an engine: one that is looked into changes nothing for the others."""
    from torch_infini.compat.infinilm import AutoConfig, HookRegistry, InferEngine, StaticKVCacheConfig, inference

    random_model("llama").save_pretrained(tmp_path)
    mine = threading.local()
    monkeypatch.setattr(inference, "init_tp_group", lambda size: mine.tp_group)
    shapes: list[tuple[int, ...]] = []

    def work(tp_group: TPGroup) -> list[Any]:
        mine.tp_group = tp_group
        torch.set_num_threads(1)
        engine = InferEngine(
            AutoConfig.from_pretrained(tmp_path), _infinilm.DistConfig(2), None, StaticKVCacheConfig(1, 64)
        )
        engine._rank.load_folder(tmp_path)
        registry = HookRegistry()
        registry.register_hook("layer", lambda name, tensor, layer: shapes.append(tuple(tensor.shape)))
        tokens = []
        for watched in (False, True):
            engine.register_hooks(registry if watched and tp_group.rank == 0 else None)
            row, past = torch.arange(10)[None], 0
            for _ in range(3):
                given = InferEngine.Input(row, cache_lengths=torch.tensor([past]), top_k=1)
                past += row.shape[1]
                row = engine.forward(given).output_ids
                tokens.append(row.tolist())
        return tokens

    first, second = on_ranks(2, work)
    assert first == second and first[:3] == first[3:]
    layers, size = SMALL["num_hidden_layers"], SMALL["hidden_size"]
    assert shapes == [(10, size)] * layers + [(1, size)] * 2 * layers


def test_infer_engine_generates_from_a_folder(tmp_path: Path) -> None:
    from torch_infini.compat.infinilm.infer_engine import GenerationConfig, InferEngine

    random_model("llama").save_pretrained(tmp_path)
    one, two = (
        InferEngine.from_pretrained(tmp_path, distributed_config=_infinilm.DistConfig(tp_size=size)) for size in (1, 2)
    )
    ids = torch.tensor([[5, 6, 7], [9, 9, 9]])
    for seed in range(2):
        settings = GenerationConfig(max_new_tokens=40, seed=seed)
        assert torch.stack(two.generate(ids, settings)).equal(torch.stack(one.generate(ids, settings)))


@pytest.mark.full
@pytest.mark.parametrize("under_torchrun", [False, True])
def test_command_line(under_torchrun: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """generate -tp 2 says what generate, here in this process, says, once."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if under_torchrun else []
    options = ["generate", "--dtype", "float32", "--max-new-tokens", "24", "--prompt", "def main("]
    assert main(options) == 0
    alone = capsys.readouterr().out.splitlines()
    command = [sys.executable, *launcher, "-m", "torch_infini", *options, "-tp", "2"]
    both = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(alone) > 1 and alone[:-1] == both[:-1]
    assert both[-1].startswith("24 tokens")
