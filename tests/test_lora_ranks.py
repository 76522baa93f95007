"""LoRA adapters on a model that ranks share: tokens of one rank, in each way that ranks are started, and errors."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.adapters import adapt
from support.ranks import Ranks
from torch_infini import LLM, AsyncLLM, LoRARequest, SamplingParams
from torch_infini.testing.checkpoints import random_model

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("one_thread")

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPTS = [[5, 9, 13, 200, 31], [7] * 70, list(range(20, 60)), [3, 4, 5]]
ROWS = [(adapter, prompt) for prompt in PROMPTS for adapter in range(4)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
SETTINGS: dict[str, Any] = {"enable_lora": True, "block_size": 8, "max_num_seqs": 8, "progress": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base with biases, and adapters of column-parallel layers, of row-parallel ones, and of all."""
    root: Path = tmp_path_factory.mktemp("ranks")
    base = random_model("llama-biases-tied", intermediate_size=128)
    base.save_pretrained(root / "base")
    columns = adapt(root / "columns", base, 1, target_modules=["q_proj", "v_proj", "up_proj"])
    rows = adapt(root / "rows", base, 2, r=8, target_modules=["o_proj", "down_proj"])
    return [root / "base", columns, rows, adapt(root / "all", base, 3, r=16, target_modules=EVERY)]


def request_of(folders: list[Path], adapter: int) -> LoRARequest | None:
    return LoRARequest(f"adapter {adapter}", adapter, folders[adapter]) if adapter else None


def tokens_of(llm: LLM, folders: list[Path], rows: list[tuple[int, list[int]]] = ROWS) -> list[list[int]]:
    adapters = [request_of(folders, adapter) for adapter, _ in rows]
    outputs = llm.generate([{"prompt_token_ids": prompt} for _, prompt in rows], GREEDY, False, adapters)
    assert [output.outputs[0].error for output in outputs] == [None] * len(rows)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def want(folders: list[Path]) -> list[list[int]]:
    """Tokens of one rank, which tests/test_lora.py compares with peft's."""
    tokens = tokens_of(LLM(folders[0], **SETTINGS), folders)
    assert len({tuple(row) for row in tokens[:4]}) == 4, "the adapters make a difference"
    return tokens


@pytest.fixture(scope="module")
def shared(folders: list[Path]) -> Iterator[LLM]:
    llm = LLM(folders[0], tensor_parallel_size=2, **SETTINGS)
    yield llm
    workers = llm.engine.model.tp_group.workers  # type: ignore[union-attr]
    assert workers is not None
    workers.close()


def test_tokens_are_those_of_one_rank(shared: LLM, folders: list[Path], want: list[list[int]]) -> None:
    """All adapters in one batch, and afterwards one by one: recorded steps of both kinds, on both ranks."""
    assert tokens_of(shared, folders) == want
    settings = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=1)
    prompts = [{"prompt_token_ids": prompt} for _, prompt in ROWS]
    adapters = [request_of(folders, adapter) for adapter, _ in ROWS]
    both = [llm.generate(prompts, settings, False, adapters) for llm in (shared, LLM(folders[0], **SETTINGS))]
    found, one = (torch.tensor([output.outputs[0].cumulative_logprob for output in outputs]) for outputs in both)
    torch.testing.assert_close(found, one, rtol=0, atol=1e-4)
    for i in (3, 0, 1, 6):
        assert tokens_of(shared, folders, ROWS[i : i + 1]) == want[i : i + 1]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.full), 4])
def test_slots_are_used_again(size: int, folders: list[Path], want: list[list[int]]) -> None:
    """One slot: each adapter takes the place of the last one on every rank. With 4 ranks key heads are replicated."""
    llm = LLM(folders[0], tensor_parallel_size=size, max_loras=1, **SETTINGS)
    for i in (1, 2, 3, 0, 2, 1):
        assert tokens_of(llm, folders, ROWS[i : i + 1]) == want[i : i + 1]


@pytest.mark.parametrize("weights", [pytest.param("int8", marks=pytest.mark.full), "int4"])
def test_quantized_bases(weights: str, folders: list[Path]) -> None:
    """The bits of a request depend on no other, rows without an adapter keep theirs, and adapters have an effect."""
    settings = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    common: dict[str, Any] = {"tensor_parallel_size": 2, "quantization": weights, "progress": False}
    llm = LLM(folders[0], enable_lora=True, **common)
    mixed = llm.generate(prompts, settings, False, [None, *(request_of(folders, adapter) for adapter in (1, 2, 3))])
    plain = LLM(folders[0], **common).generate(prompts, settings, False)
    of_mixed, of_plain = ([output.outputs[0].token_logprobs for output in outputs] for outputs in (mixed, plain))
    assert of_mixed[0] == of_plain[0]
    for i in (1, 2, 3):
        assert of_mixed[i] != of_plain[i]
        (alone,) = llm.generate(prompts[i], settings, False, request_of(folders, i))
        assert alone.outputs[0].token_logprobs == of_mixed[i]


def test_requests_at_any_time(folders: list[Path], want: list[list[int]]) -> None:
    """Adapters are loaded while the ranks compute the steps of others."""

    async def run() -> list[list[int]]:
        async with AsyncLLM(folders[0], tensor_parallel_size=2, max_loras=3, **SETTINGS) as llm:
            calls = []
            for adapter, prompt in ROWS:
                calls.append(
                    asyncio.create_task(
                        llm.generate({"prompt_token_ids": prompt}, GREEDY, request_of(folders, adapter))
                    )
                )
                await asyncio.sleep(0.01)
            return [list((await call).outputs[0].token_ids) for call in calls]

    assert asyncio.run(run()) == want


def test_refused(shared: LLM, folders: list[Path], want: list[list[int]], tmp_path: Path) -> None:
    """Errors name the sizes of the whole model, and leave the ranks in step."""
    other = adapt(tmp_path / "other", random_model("llama", hidden_size=32), 1)
    prompt = {"prompt_token_ids": [1]}
    with pytest.raises(
        ValueError, match=r"must be of this model, whose .*down_proj is \[64, 128\], got one for \[32, 96\]"
    ):
        shared.generate(prompt, GREEDY, False, LoRARequest("other", 8, other))
    with pytest.raises(FileNotFoundError, match="the folder of an adapter must exist, got .*nowhere"):
        shared.generate(prompt, GREEDY, False, LoRARequest("nowhere", 9, tmp_path / "nowhere"))
    large = adapt(tmp_path / "large", random_model("llama-biases-tied", intermediate_size=128), 1, r=17)
    with pytest.raises(ValueError, match="the rank of .* must be from 1 to max_lora_rank, 16, got 17"):
        shared.generate(prompt, GREEDY, False, LoRARequest("large", 10, large))
    assert tokens_of(shared, folders, ROWS[1:3]) == want[1:3]


@pytest.mark.full
def test_server(tmp_path: Path) -> None:
    """serve --lora NAME=FOLDER -tp 2, as a program: the adapter's text and the base's."""
    pytest.importorskip("fastapi")
    httpx = pytest.importorskip("httpx2")
    from transformers import AutoModelForCausalLM

    from support.serving import Command, save_model

    base = save_model(tmp_path / "base")
    poet = adapt(tmp_path / "poet", AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False), 1)
    one = LLM(base, enable_lora=True, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=8)
    adapters = [None, LoRARequest("poet", 1, poet)]
    want = [output.outputs[0].text for output in one.generate(["hello"] * 2, params, False, adapters)]
    assert want[0] != want[1]
    arguments = ["serve", "--model", str(base), "--port", "0", "-tp", "2", "--dtype", "float32"]
    command = Command([*arguments, "--lora", f"poet={poet}", "--served-model-name", "base"], tmp_path / "output")
    try:
        url = command.url()
        body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
        answers = [
            httpx.post(f"{url}/v1/completions", json={**body, "model": name}, timeout=60).json()
            for name in ("base", "poet")
        ]
        assert [answer["choices"][0]["text"] for answer in answers] == want
    finally:
        command.process.kill()


# ---- ranks of torchrun ----


def same_calls(folders: list[str], other: str) -> tuple[list[list[int]], str, str]:
    """Both ranks make the same calls; then their folders differ, and then one of them has none."""
    llm = LLM(folders[0], tensor_parallel_size=2, **SETTINGS)
    assert llm.engine.model.tp_group is not None
    is_first = llm.engine.model.tp_group.rank == 0
    tokens = tokens_of(llm, [Path(folder) for folder in folders])
    errors = []
    for number, folder in ((8, other), (9, other + "/nowhere")):
        with pytest.raises((ValueError, OSError)) as caught:
            path = folders[1] if is_first else folder
            llm.generate({"prompt_token_ids": [1]}, GREEDY, False, LoRARequest("x", number, path))
        errors.append(str(caught.value))
    return tokens, errors[0], errors[1]


def leads_or_follows(folders: list[str]) -> list[list[int]] | None:
    """Requests come to rank 0 alone, which alone reads adapters."""
    llm = LLM(folders[0], tensor_parallel_size=2, **SETTINGS)
    if llm.engine.model.tp_group is not None and llm.engine.model.tp_group.rank > 0:
        llm.follow()
        return None

    async def run() -> list[list[int]]:
        async with AsyncLLM(llm) as served:
            requests = [(request_of([Path(f) for f in folders], adapter), prompt) for adapter, prompt in ROWS]
            calls = [served.generate({"prompt_token_ids": prompt}, GREEDY, lora) for lora, prompt in requests]
            return [list(output.outputs[0].token_ids) for output in await asyncio.gather(*calls)]

    return asyncio.run(run())


@pytest.mark.full
def test_ranks_of_torchrun(folders: list[Path], want: list[list[int]], tmp_path: Path) -> None:
    names = list(map(str, folders))
    changed = adapt(tmp_path / "changed", random_model("llama-biases-tied", intermediate_size=128), 5)
    shutil.copytree(folders[1], tmp_path / "same")
    with Ranks(2) as ranks:
        for tokens, different, missing in ranks.run(same_calls, names, str(changed)):
            assert tokens == want
            for message in (different, missing):
                assert "the adapter 'x' must be the same on all ranks, got another one on rank 1" in message
        assert ranks.run(leads_or_follows, names) == [want, None]


def test_digests(folders: list[Path]) -> None:
    """Names, shapes and numbers count, each alone."""
    from torch_infini.checkpoints import LoRALayer
    from torch_infini.engine.lora import digest_of

    a, b = torch.arange(6.0).view(2, 3), torch.ones(4, 2)
    one = digest_of({"x": LoRALayer(a, b)})
    assert one == digest_of({"x": LoRALayer(a.t().contiguous().t(), b.clone())})
    others = [{"y": LoRALayer(a, b)}, {"x": LoRALayer(a, b + 1)}, {"x": LoRALayer(a.view(3, 2), b.view(2, 4))}, {}]
    assert len({one, *map(digest_of, others)}) == 5
