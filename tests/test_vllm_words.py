"""LLM, SamplingParams and outputs in vLLM's words: what its documentation shows runs with another import."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from torch_infini import LLM, SamplingParams
from torch_infini.engine import RequestOutputKind, Row, Sampler
from torch_infini.engine.memory import cache_bytes_of, memory_of_machine
from torch_infini.engine.text import TextStream
from torch_infini.testing.checkpoints import random_model, save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["hello world", "naïve café ☕", "x"]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = random_model("llama")
    model.save_pretrained(path)
    save_tokenizer(path, model.config.vocab_size)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder))


def test_offline_inference(llm: LLM) -> None:
    """The quick start: prompts in, texts out, and what an output holds."""
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=3)
    outputs = llm.generate(PROMPTS, sampling_params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert (output.prompt, output.finished) == (prompt, True)
        assert output.prompt_token_ids == llm.get_tokenizer()(prompt)["input_ids"]  # type: ignore[misc]
        (sample,) = output.outputs
        assert (sample.index, sample.finish_reason, sample.stop_reason) == (0, "length", None)
        assert sample.finished() and len(sample.token_ids) == 16 and sample.text
        assert (sample.logprobs, sample.cumulative_logprob, output.prompt_logprobs) == (None, None, None)
        assert output.metrics.time is not None and output.metrics.time_to_first_token is not None
    assert len({output.request_id for output in outputs}) == len(PROMPTS)


def test_names_of_arguments(folder: Path) -> None:
    """As scripts give them, all at once."""
    llm = LLM(
        model=str(folder),
        tokenizer=str(folder),
        tokenizer_mode="auto",
        trust_remote_code=False,
        tensor_parallel_size=1,
        dtype="auto",
        quantization=None,
        seed=0,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_dtype="auto",
        swap_space=4,
        enable_lora=False,
        speculative_config=None,
        disable_log_stats=True,
    )
    config = llm.engine.config
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (128, 8, 256)
    assert (config.enforce_eager, config.enable_prefix_caching, config.kv_cache_dtype) == (True, False, None)
    outputs = llm.generate(prompts=PROMPTS, sampling_params=SamplingParams(max_tokens=4), use_tqdm=False)
    again = LLM(str(folder), seed=0, max_model_len=128).generate(PROMPTS, SamplingParams(max_tokens=4))
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in again]


def test_token_prompts_and_several_samples(llm: LLM) -> None:
    ids = [5, 6, 7, 8]
    (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(n=3, seed=1, max_tokens=5))
    assert output.prompt is None and output.prompt_token_ids == ids
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 3


def test_logprobs(llm: LLM) -> None:
    """A dict for each token: the likeliest ones and the one that was drawn, with rank and text."""
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(logprobs=2, seed=4, temperature=2.0, max_tokens=8))
    sample = output.outputs[0]
    assert sample.logprobs is not None and sample.cumulative_logprob is not None
    for token, entries in zip(sample.token_ids, sample.logprobs, strict=True):
        assert len(entries) in (2, 3) and token in entries
        ranks = sorted(entry.rank for entry in entries.values())
        assert ranks[:2] == [1, 2] and (len(entries) == 2 or ranks[2] > 2)
        values = [entry.logprob for entry in sorted(entries.values(), key=lambda entry: entry.rank)]
        assert values == sorted(values, reverse=True)
        assert entries[token].decoded_token == llm.get_tokenizer().decode([token])  # type: ignore[union-attr]
    total = sum(entries[token].logprob for token, entries in zip(sample.token_ids, sample.logprobs, strict=True))
    assert math.isclose(sample.cumulative_logprob, total)


def test_stop_reasons(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=30))
    token = output.outputs[0].token_ids[9]
    (stopped,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[token]))
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", token)


def test_words_and_tokens_that_may_not_come(llm: LLM) -> None:
    """bad_words, allowed_token_ids and logits_processors: each draws what is left."""
    tokenizer: Any = llm.get_tokenizer()
    (plain,) = llm.generate([[5, 6, 7]], SamplingParams(seed=2, temperature=3.0, max_tokens=60))
    prompt, tokens = [5, 6, 7], plain.outputs[0].token_ids
    token, word = next(
        (token, text) for token in tokens if tokenizer(text := tokenizer.decode([token]))["input_ids"] == [token]
    )
    (other,) = llm.generate([prompt], SamplingParams(seed=2, temperature=3.0, max_tokens=60, bad_words=[word]))
    assert token not in other.outputs[0].token_ids
    allowed = [40, 41, 42]
    (few,) = llm.generate([prompt], SamplingParams(seed=1, temperature=3.0, max_tokens=12, allowed_token_ids=allowed))
    assert set(few.outputs[0].token_ids) <= set(allowed)
    seen: list[list[int]] = []

    def only(past: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(past)
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor([7]), 0.0)

    def noted(given: list[int], past: list[int], logits: torch.Tensor) -> torch.Tensor:
        assert given == prompt
        return logits

    (forced,) = llm.generate([prompt], SamplingParams(max_tokens=3, logits_processors=[noted, only]))
    assert forced.outputs[0].token_ids == [7, 7, 7] and seen == [[], [7], [7, 7]]
    bad: Any = lambda past, logits: logits[:3]
    (failed,) = llm.generate([prompt], SamplingParams(max_tokens=3, logits_processors=[bad]))
    assert failed.outputs[0].finish_reason == "error" and "must return logits [320], got [3]" in str(
        failed.outputs[0].error
    )


def test_words_of_several_tokens() -> None:
    """Their last token is forbidden where the others came just before, and nowhere else."""
    params = SamplingParams(temperature=0, bad_words=["unused"])
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    for output, token in (([], 3), ([1], 3), ([1, 2], 2), ([2, 1], 3), ([0, 1, 2], 2)):
        row = Row(params, 0, [], list(output), bad_words=[[1, 2, 3]])
        assert Sampler()(logits.clone(), [row])[0].token == token, output


class Letters:
    """A tokenizer of letters, of which 0 is special."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {0: SimpleNamespace(special=True)}

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join("<s>" if i == 0 else chr(96 + i) for i in ids if i or not skip_special_tokens)


def test_special_tokens() -> None:
    for skip, text in ((True, "ab"), (False, "a<s>b")):
        stream = TextStream(Letters(), SamplingParams(skip_special_tokens=skip))
        assert "".join(stream.add(token) for token in (1, 0, 2)) + stream.finish() == text


def test_prompt_logprobs(llm: LLM) -> None:
    """Of every prompt token but the first, from the whole prompt's logits, behind a reused prefix too."""
    prompt = list(range(20, 90))
    model: Any = random_model("llama")
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    llm.generate([prompt], SamplingParams(max_tokens=1))  # which leaves a prefix
    others = [list(range(100, 130)), [3]]
    outputs = llm.generate([prompt, *others], SamplingParams(max_tokens=2, prompt_logprobs=2, temperature=0))
    output = outputs[0]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(prompt) and output.num_cached_tokens == 0
    for place, entries in enumerate(output.prompt_logprobs[1:], 1):
        assert entries is not None
        assert abs(entries[prompt[place]].logprob - float(want[place - 1, prompt[place]])) < 1e-3
        assert entries[prompt[place]].rank == 1 + int((want[place - 1] > want[place - 1, prompt[place]]).sum())
    assert outputs[2].prompt_logprobs == [None]
    again = llm.generate([prompt], SamplingParams(max_tokens=2, temperature=0))[0]
    assert again.outputs[0].token_ids == output.outputs[0].token_ids and again.prompt_logprobs is None


def test_texts(llm: LLM) -> None:
    """Without a text, with special tokens in it, of a prompt's end."""
    params: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
    (plain,) = llm.generate(["hello world"], SamplingParams(**params))
    (bare,) = llm.generate(["hello world"], SamplingParams(**params, detokenize=False))
    assert (bare.outputs[0].text, bare.outputs[0].token_ids) == ("", plain.outputs[0].token_ids)
    (short,) = llm.generate([[5, 6, 7, 8]], SamplingParams(**params, truncate_prompt_tokens=2))
    assert short.prompt_token_ids == [7, 8]


def test_kinds_of_outputs(llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 6, "logprobs": 1}
    (whole,) = llm.generate(["hello"], SamplingParams(**params))
    deltas = list(llm.stream("hello", SamplingParams(**params, output_kind=RequestOutputKind.DELTA)))
    assert len(deltas) > 1
    assert sum((one.outputs[0].token_ids for one in deltas), []) == whole.outputs[0].token_ids
    assert "".join(one.outputs[0].text for one in deltas) == whole.outputs[0].text
    assert sum((one.outputs[0].token_logprobs or [] for one in deltas), []) == whole.outputs[0].token_logprobs
    (final,) = llm.stream("hello", SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY))
    assert final.outputs[0].token_ids == whole.outputs[0].token_ids


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"bad_words": [""]}, "bad_words must be strings, none of them empty"),
        ({"allowed_token_ids": []}, "allowed_token_ids must be None or have a token"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be token ids of at least 0, or None"),
        ({"logits_processors": [3]}, "logits_processors must be functions"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be an integer of at least 0 or None"),
        ({"detokenize": False, "stop": "x"}, "stop must be empty where detokenize is False"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens must be True, got False"),
        ({"output_kind": 1}, "output_kind must be a RequestOutputKind, got 1"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be an integer of at least 1, -1 or None, got 0"),
        ({"top_k": -2}, "top_k must be an integer of at least 0, got -2"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        SamplingParams(**settings)


def test_top_k_of_minus_one() -> None:
    assert SamplingParams(top_k=-1).top_k == 0


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    params = SamplingParams(temperature=0, max_tokens=4)
    (output,) = llm.chat(conversation, sampling_params=params, use_tqdm=False, chat_template=TEMPLATE)
    text = "<system>be brief<user>hello<a>"
    assert output.outputs[0].text == llm.generate([text], params)[0].outputs[0].text
    several = llm.chat([conversation, conversation], params, chat_template=TEMPLATE, add_generation_prompt=False)
    assert len(several) == 2 and several[0].prompt_token_ids != output.prompt_token_ids


def test_what_is_not_served_is_said(folder: Path, llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """In one sentence that names what to use instead; what changes nothing is logged."""
    for settings, rule in (
        ({"lora_modules": ["x"]}, "lora_modules must be left out, got .*: give a LoRARequest to generate"),
        ({"speculative_config": {"model": "x"}}, "num_speculative_tokens must be given, got"),
        ({"trust_remote_code": True}, "trust_remote_code must be left out.*is never run"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be left out, got 2: use tensor_parallel_size"),
        ({"max_num_seq": 2}, r"got max_num_seq=2 \(the nearest is max_num_seqs\)"),
        ({"quantization": "awq"}, r"quantization must be one of .*'int8'.*\(not quantized\), got 'awq'"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be a number above 0, at most 1, got 0"),
        ({"seed": "x"}, "seed must be an integer or None, got 'x'"),
    ):
        with pytest.raises(ValueError, match=rule):
            LLM(folder, **settings)
    with caplog.at_level(logging.INFO, "torch_infini"):
        LLM(folder, swap_space=4)
    assert "swap_space=4 changes nothing here: a preempted sequence is computed again" in caplog.text
    with pytest.raises(NotImplementedError, match="states of single tokens are not returned"):
        llm.encode(PROMPTS)
    for call in (lambda: llm.score("a", "b"), lambda: llm.classify("a")):
        with pytest.raises(ValueError, match="model must be a .*classifier.*, got a model without a classifier"):
            call()
    adapter: Any = object()
    with pytest.raises(ValueError, match="enable_lora must be True for a request with an adapter"):
        llm.generate(PROMPTS, lora_request=adapter)


def test_share_of_memory(folder: Path) -> None:
    """Keys and values get what weights leave of a share of the memory."""
    free, total = memory_of_machine()
    assert 0 < free <= total
    assert abs(cache_bytes_of(1.0, "cpu") - free) < total / 4  # others allocate meanwhile
    used = (total - free) / total
    small = LLM(folder, gpu_memory_utilization=min(used + 0.02, 1.0), max_num_seqs=4, block_size=16)
    assert 0 < small.metrics().blocks * 16 * small.engine.bytes_per_token <= 0.03 * total
    if used > 0.02:
        with pytest.raises(ValueError, match="cache_bytes must be at least .*, the size of a block"):
            LLM(folder, gpu_memory_utilization=used / 2)
