"""LoRA adapters by request: tokens of peft's model, whatever else is in the batch, the cache and the slots."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_infini
from support.adapters import adapt
from torch_infini import LLM, AsyncLLM, LoRARequest, SamplingParams
from torch_infini.testing.checkpoints import random_model

peft: Any = pytest.importorskip("peft")
transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
PROMPTS = [[5, 9, 13, 200, 31], [7] * 70, list(range(20, 60)), [3, 4, 5]]
# A model that the engine reads itself, and one that runs through transformers.
FAMILIES = ["qwen3", "gemma3"]


def make(folder: Path, kind: str) -> Any:
    """Return a model with pronounced logits, saved in the folder."""
    if kind == "gemma3":
        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            sliding_window=32,
        )
        model = transformers.Gemma3ForCausalLM(config).eval()
    else:
        model = random_model(kind)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base, and three adapters: other ranks, other layers, a pattern and rslora."""
    root: Path = tmp_path_factory.mktemp(request.param)
    base = make(root / "base", request.param)
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    found = [root / "base", adapt(root / "a", base, 1), adapt(root / "b", base, 2, r=16, target_modules=every)]
    pattern: dict[str, Any] = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 12}, "use_rslora": True}
    return [*found, adapt(root / "c", base, 3, target_modules=["q_proj", "o_proj", "up_proj"], **pattern)]


def expected(folders: list[Path], adapter: int, prompt: list[int]) -> list[int]:
    """Return what peft's model gives."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[0], trust_remote_code=False).eval()
    if adapter:
        model = peft.PeftModel.from_pretrained(model, folders[adapter]).eval()
    with torch.no_grad():
        out = model.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def request_of(folders: list[Path], adapter: int) -> LoRARequest | None:
    return LoRARequest(f"adapter {adapter}", adapter, folders[adapter]) if adapter else None


def prompts(*tokens: list[int]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": one} for one in tokens]


def test_tokens_of_peft(folders: list[Path]) -> None:
    """Every adapter with every prompt in one batch; alone, a request gets the same tokens.

    And the same bits, where products are ours: torch's depend on the number of rows.
    """
    llm = LLM(folders[0], enable_lora=True)
    rows = [(adapter, prompt) for prompt in PROMPTS for adapter in range(4)]
    settings = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=1)
    adapters = [request_of(folders, adapter) for adapter, _ in rows]
    outputs = llm.generate(prompts(*(p for _, p in rows)), settings, False, adapters)
    assert [one.lora_request for one in outputs] == adapters
    found = [one.outputs[0].token_ids for one in outputs]
    assert found == [expected(folders, adapter, prompt) for adapter, prompt in rows]
    assert len({tuple(found[i]) for i in range(4)}) == 4, "the adapters make a difference"
    fresh = LLM(folders[0], enable_lora=True, max_loras=1)
    for i in (0, 1, 2, 3, 6, 7):
        (alone,) = fresh.generate(prompts(rows[i][1]), settings, False, adapters[i])
        assert alone.outputs[0].token_ids == outputs[i].outputs[0].token_ids
        if isinstance(llm.engine.model, torch_infini.models.Llama):
            assert alone.outputs[0].token_logprobs == outputs[i].outputs[0].token_logprobs


def test_prefixes_are_not_shared(folders: list[Path]) -> None:
    """Adapters with one prompt reuse their own blocks alone, also after another adapter had the slot."""
    llm = LLM(folders[0], enable_lora=True, max_loras=1, block_size=4, chunk_size=8)
    prompt = PROMPTS[1]
    for adapter, reused in ((1, False), (1, True), (0, False), (2, False), (0, True), (1, False)):
        (output,) = llm.generate(prompts(prompt), GREEDY, False, request_of(folders, adapter))
        assert output.outputs[0].token_ids == expected(folders, adapter, prompt)
        assert (output.num_cached_tokens > 0) == reused


def test_preemption(folders: list[Path]) -> None:
    """A cache that holds few of the sequences; samples of a request share its prompt's blocks and its adapter."""
    llm = LLM(folders[0], enable_lora=True, cache_blocks=24, block_size=4, max_num_seqs=8)
    rows = [(adapter, prompt) for prompt in (PROMPTS[0], PROMPTS[2]) for adapter in range(4)]
    outputs = llm.generate(prompts(*(p for _, p in rows)), GREEDY, False, [request_of(folders, a) for a, _ in rows])
    assert llm.metrics().preemptions > 0
    assert [one.outputs[0].token_ids for one in outputs] == [expected(folders, *row) for row in rows]
    settings = SamplingParams(n=3, temperature=1, seed=1, max_tokens=5, ignore_eos=True, detokenize=False)
    many = llm.generate(prompts(PROMPTS[0]), settings, False, request_of(folders, 1))[0]
    other = llm.generate(prompts(PROMPTS[0]), settings, False)[0]
    assert [one.token_ids for one in many.outputs] != [one.token_ids for one in other.outputs]


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
@pytest.mark.parametrize("eager", [False, True])
def test_weights(folders: list[Path], weights: str | None, eager: bool) -> None:
    """Adapters on quantized weights: recorded steps give the bits of steps op by op, and rows without one their own."""
    llm = LLM(folders[0], enable_lora=True, quantization=weights, dtype=torch.bfloat16, enforce_eager=eager)
    plain = LLM(folders[0], quantization=weights, dtype=torch.bfloat16)
    settings = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=1)
    rows = prompts(*PROMPTS)
    mixed = llm.generate(rows, settings, False, [None, request_of(folders, 1), None, request_of(folders, 2)])
    without = plain.generate(rows, settings, False)
    for i in (0, 2):
        assert mixed[i].outputs[0].token_logprobs == without[i].outputs[0].token_logprobs
    for i in (1, 3):
        assert mixed[i].outputs[0].token_logprobs != without[i].outputs[0].token_logprobs
        (alone,) = llm.generate(rows[i], settings, False, request_of(folders, {1: 1, 3: 2}[i]))
        assert alone.outputs[0].token_logprobs == mixed[i].outputs[0].token_logprobs


def test_async(folders: list[Path]) -> None:
    async def run() -> None:
        (prompt,) = prompts(PROMPTS[0])
        async with AsyncLLM(folders[0], enable_lora=True) as llm:
            for adapter in (0, 1):
                output = await llm.generate(prompt, GREEDY, request_of(folders, adapter))
                assert output.outputs[0].token_ids == expected(folders, adapter, PROMPTS[0])
                streamed = [one async for one in llm.stream(prompt, GREEDY, request_of(folders, adapter))]
                assert streamed[-1].outputs[0].token_ids == output.outputs[0].token_ids

    asyncio.run(run())


def test_slots(folders: list[Path]) -> None:
    """An unused adapter makes room; unfinished requests keep theirs, and one more is refused with its reason."""
    llm = LLM(folders[0], enable_lora=True, max_loras=1)
    stream = llm.stream(prompts(PROMPTS[0])[0], GREEDY, request_of(folders, 1))
    next(stream)
    message = "unfinished requests must have at most max_loras adapters, 1, got 'adapter 2' besides 'adapter 1'"
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts(PROMPTS[0]), GREEDY, False, request_of(folders, 2))
    assert [*stream][-1].outputs[0].token_ids == expected(folders, 1, PROMPTS[0])
    (output,) = llm.generate(prompts(PROMPTS[0]), GREEDY, False, request_of(folders, 2))
    assert output.outputs[0].token_ids == expected(folders, 2, PROMPTS[0])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp("qwen3")
    base = make(folder, "qwen3")
    yield LLM(folder, enable_lora=True, max_lora_rank=8), base


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"r": 9}, "the rank of .* must be from 1 to max_lora_rank, 8, got 9"),
    ({"use_dora": True}, "must hold matrices lora_A and lora_B of linear layers, got .*magnitude|use_dora in"),
    ({"bias": "all"}, "bias in .* must be 'none', got 'all': merge such an adapter"),
    ({"target_modules": ["lm_head"]}, "must hold matrices lora_A and lora_B of linear layers, got .*lm_head"),
    ({"target_modules": ["embed_tokens"]}, "must hold matrices lora_A and lora_B of linear layers, got .*embed"),
    ({"modules_to_save": ["norm"]}, "modules_to_save in .* must be \\[\\], got \\['norm'\\]"),
]


@pytest.mark.parametrize("options, message", CONFIGS, ids=[str(options) for options, _ in CONFIGS])
def test_refused_kinds(qwen3: tuple[LLM, Any], options: dict[str, Any], message: str, tmp_path: Path) -> None:
    llm, base = qwen3
    folder = adapt(tmp_path, base, 1, **options)
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts([1]), GREEDY, False, LoRARequest("a", 1, folder))


def test_refused_files(qwen3: tuple[LLM, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    llm, base = qwen3
    folder = adapt(tmp_path / "whole", base, 1)
    tensors = load_file(folder / "adapter_model.safetensors")
    name = next(iter(tensors))

    def refused(message: str, **changes: Any) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        changed = tmp_path / "changed"
        changed.mkdir(exist_ok=True)
        (changed / "adapter_config.json").write_text(json.dumps(config | changes.get("config", {})))
        save_file(changes.get("tensors", tensors), changed / "adapter_model.safetensors")
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            llm.generate(prompts([1]), GREEDY, False, LoRARequest("a", 1, changed))

    refused("must have lora_A .* and lora_B", tensors={k: t for k, t in tensors.items() if k != name})
    refused("must be finite, got NaN or infinity", tensors={**tensors, name: tensors[name] * torch.nan})
    refused("must hold matrices lora_A and lora_B, got none", tensors={})
    refused("must hold matrices lora_A and lora_B of linear layers", tensors={**tensors, "x": torch.ones(2)})
    refused("peft_type in .* must be 'LORA', got 'IA3'", config={"peft_type": "IA3"})
    refused("lora_alpha in .* must be a number, got None", config={"lora_alpha": None})
    with pytest.raises(FileNotFoundError, match="the folder of an adapter must exist"):
        llm.generate(prompts([1]), GREEDY, False, LoRARequest("a", 1, tmp_path / "nowhere"))
    other = adapt(tmp_path / "other", random_model("llama", hidden_size=32), 1)
    with pytest.raises(ValueError, match=r"must be of this model, whose .* is \[64, 96\], got one for \[32, 96\]"):
        llm.generate(prompts([1]), GREEDY, False, LoRARequest("a", 1, other))
    (output,) = llm.generate(prompts([1, 2]), GREEDY, False, LoRARequest("a", 1, folder))
    assert len(output.outputs[0].token_ids) == 12


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("", 1, "x"), "lora_name must be a name, got ''"),
        (("a", 0, "x"), "lora_int_id must be an integer of at least 1, got 0"),
        (("a", 1), "lora_path must be the folder of an adapter, got ''"),
    ],
)
def test_refused_requests(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"torch_infini.LoRARequest: {message}"):
        LoRARequest(*arguments)


def test_refused_calls(qwen3: tuple[LLM, Any]) -> None:
    llm, base = qwen3
    with pytest.raises(ValueError, match="lora_request must be a LoRARequest or None, got 'name'"):
        llm.generate(prompts([1]), GREEDY, False, "name")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lora_request must be one for all or one for each of 1 prompts, got 2"):
        llm.generate(prompts([1]), GREEDY, False, [None, None])
    plain = torch_infini.LLM(base)
    with pytest.raises(ValueError, match="enable_lora must be True for a request with an adapter, got lora_request="):
        plain.generate(prompts([1]), GREEDY, False, LoRARequest("a", 1, "x"))
    with pytest.raises(ValueError, match="max_lora_rank must be an integer of at least 1, got 0"):
        torch_infini.EngineConfig(enable_lora=True, max_lora_rank=0)


def test_server(tmp_path: Path) -> None:
    """An adapter is a model of the server: in the list, in requests, and in answers, streamed and whole."""
    pytest.importorskip("fastapi")
    from support.serving import ask, events_of, save_model, service_of

    base = save_model(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, trust_remote_code=False)
    adapter = LoRARequest("poet", 1, adapt(tmp_path / "poet", model, 1))
    llm = AsyncLLM(base, enable_lora=True)
    try:
        service = service_of(llm, adapters=(adapter,))
        listed = ask(service, "GET", "/v1/models").json()["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [("small", None), ("poet", "small")]
        assert ask(service, "GET", "/v1/models/poet").json()["parent"] == "small"
        texts = {}
        for name in ("small", "poet"):
            body = {"model": name, "prompt": "hello", "max_tokens": 8, "temperature": 0}
            whole = ask(service, "POST", "/v1/completions", json=body).json()
            events = events_of(ask(service, "POST", "/v1/completions", json={**body, "stream": True}).text)
            texts[name] = whole["choices"][0]["text"]
            assert whole["model"] == name and all(event["model"] == name for event in events)
            assert "".join(event["choices"][0]["text"] for event in events) == texts[name]
            chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert ask(service, "POST", "/v1/chat/completions", json=chat).json()["model"] == name
        assert texts["small"] != texts["poet"]
        refused = ask(service, "POST", "/v1/completions", json={"model": "other", "prompt": "a"})
        assert refused.status_code == 404 and "small, poet" in refused.json()["error"]["message"]
        with pytest.raises(ValueError, match="names of the model and its adapters must differ, got poet twice"):
            service_of(llm, adapters=(adapter, adapter))
    finally:
        llm.close()


@pytest.mark.parametrize(
    "given, message",
    [("poet", "--lora must be NAME=FOLDER, got 'poet'"), ("poet=nowhere", "the folder of an adapter must exist")],
)
def test_command_line(given: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from torch_infini.__main__ import main

    assert main(["serve", "--port", "0", "--lora", given]) != 0
    assert message in capsys.readouterr().err
