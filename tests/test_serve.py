"""torch_infini.serve answers as LLM does, in the forms that clients of OpenAI's interface read; clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx

from support.serving import MODEL, ask, events_of, save_model, send_raw, service_of, serving, slow_down, wait_until
from torch_infini import AsyncLLM, SamplingParams
from torch_infini._core.cpu import cpu_name
from torch_infini._core.library import cpu_capability
from torch_infini.engine import CompletionOutput, RequestOutput
from torch_infini.serve import Service
from torch_infini.serve.answers import ChatAnswer, CompletionAnswer, DeltaTracker
from torch_infini.serve.streaming import events
from torch_infini.serve.token_texts import TokenTexts

pytestmark = pytest.mark.usefixtures("one_thread")
MESSAGES = [{"role": "user", "content": "hello world"}]
PROMPT = "naïve café ☕"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    torch.set_num_threads(1)
    made = AsyncLLM(save_model(tmp_path_factory.mktemp("model")), enable_prefix_caching=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm)


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture
def slow(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(llm, monkeypatch)


def is_idle(service: Service) -> bool:
    """Whether no request is left, neither in the server nor in the engine, and all blocks are free."""
    metrics = service.llm.metrics()
    return (
        service.in_flight == metrics.running == metrics.waiting == 0
        and service.llm.engine.is_idle
        and metrics.free_blocks == metrics.blocks
    )


def expected(llm: AsyncLLM, prompt: list[int] | str, **params: Any) -> RequestOutput:
    """What LLM.generate gives, by a second engine on the same model."""
    from torch_infini import LLM

    other = LLM(llm.engine.model, tokenizer=llm.engine.tokenizer, enable_prefix_caching=False)
    return other.generate([prompt], SamplingParams(**params))[0]


def test_whole_and_streamed_texts_are_those_of_llm(llm: AsyncLLM, service: Service, url: str) -> None:
    """The official client, which checks every field of every answer against its types."""
    openai = pytest.importorskip("openai")
    settings: dict[str, Any] = {"seed": 3, "temperature": 0.9, "top_p": 0.95, "max_tokens": 24}
    usage = {"include_usage": True}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        want = expected(llm, llm.chat_prompt(MESSAGES), **settings)
        assert want.text
        whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **settings)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (want.text, "length")
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(want.prompt_token_ids), 24)
        chunks = list(
            client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, stream_options=usage, **settings
            )
        )
        deltas = [chunk.choices[0].delta.to_dict() for chunk in chunks[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == want.text
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
        assert deltas[0] == {"role": "assistant", "content": "", "refusal": None} and deltas[-1] == {}
        assert all(set(delta) == {"content"} and delta["content"] for delta in deltas[1:-1])
        ends = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert ends == [None] * (len(ends) - 1) + ["length"]
        assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint} != {None}
        assert all(chunk.usage is None for chunk in chunks[:-1])

        want = expected(llm, PROMPT, **settings)
        whole = client.completions.create(model=MODEL, prompt=PROMPT, logprobs=2, **settings)
        assert whole.choices[0].text == want.text
        # The client's type has no null for finish_reason in a stream, which is what OpenAI's own server sends.
        lenient = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        chunks = list(lenient.completions.create(model=MODEL, prompt=PROMPT, logprobs=2, stream=True, **settings))
        assert "".join(chunk.choices[0].text for chunk in chunks) == want.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for chunk in chunks for value in getattr(chunk.choices[0].logprobs, name)]
            assert joined == getattr(whole.choices[0].logprobs, name), name
        ids = client.completions.create(model=MODEL, prompt=want.prompt_token_ids, **settings)
        assert ids.choices[0].text == want.text
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="other", prompt="x")
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5000)
        assert caught.value.code == "context_length_exceeded"
        assert "512" in str(caught.value) and "5000" in str(caught.value)
    assert is_idle(service)


def test_a_seed_gives_one_text_alone_and_among_others(service: Service, url: str) -> None:
    body = {"messages": MESSAGES, "seed": 7, "max_tokens": 24}
    alone = httpx.post(f"{url}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    texts: dict[int, str] = {}
    before = replace(service.llm.metrics())

    def run(i: int) -> None:
        mine = {**body, "stream": i % 2 == 0, "seed": 7 if i % 4 < 2 else i, "temperature": 1.0}
        answer = httpx.post(f"{url}/v1/chat/completions", json=mine, timeout=60)
        if i % 2:
            texts[i] = answer.json()["choices"][0]["message"]["content"]
        else:
            texts[i] = "".join(event["choices"][0]["delta"].get("content", "") for event in events_of(answer.text))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = service.llm.metrics()
    assert len(texts) == 32 and after.steps - before.steps < after.generated_tokens - before.generated_tokens
    assert {texts[i] for i in range(32) if i % 4 < 2} == {alone}
    assert len(set(texts.values())) > 10
    assert is_idle(service)


def test_several_prompts_and_samples(llm: AsyncLLM, service: Service) -> None:
    prompts = ["first", "second one", [5, 6, 7]]
    body = {"prompt": prompts[:2], "n": 2, "seed": 1, "max_tokens": 6}
    wanted = [c.text for prompt in prompts[:2] for c in expected(llm, prompt, n=2, seed=1, max_tokens=6).outputs]
    answer = ask(service, "POST", "/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == wanted
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    tokens = len(service.llm.engine.prompts.encode("first")) + len(service.llm.engine.prompts.encode("second one"))
    assert answer["usage"]["prompt_tokens"] == tokens
    assert answer["usage"]["completion_tokens"] == 4 * 6
    texts = dict.fromkeys(range(4), "")
    for event in events_of(ask(service, "POST", "/v1/completions", json={**body, "stream": True}).text):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == wanted
    ids = ask(service, "POST", "/v1/completions", json={**body, "prompt": [[5, 6, 7], [8]]}).json()
    assert len(ids["choices"]) == 4


def test_fields_of_sampling(llm: AsyncLLM, service: Service) -> None:
    """Each field gives what SamplingParams gives under its name: one that is dropped gives another text."""
    plain = {"seed": 5, "max_tokens": 16}
    free = expected(llm, PROMPT, **plain)
    letter = next(letter for letter in free.text if letter.isalnum())
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 0.3}, {"temperature": 0.3}),
        ({"top_k": 2}, {"top_k": 2}),
        ({"top_k": -1, "top_p": 0.1}, {"top_p": 0.1}),
        ({"min_p": 0.5}, {"min_p": 0.5}),
        ({"repetition_penalty": 3.0, "temperature": 0}, {"repetition_penalty": 3.0, "temperature": 0.0}),
        ({"presence_penalty": 2, "temperature": 0}, {"presence_penalty": 2.0, "temperature": 0.0}),
        ({"frequency_penalty": 2, "temperature": 0}, {"frequency_penalty": 2.0, "temperature": 0.0}),
        ({"logit_bias": {"70": 100}}, {"logit_bias": {70: 100.0}}),
        ({"stop": letter}, {"stop": letter}),
        ({"stop": [letter], "include_stop_str_in_output": True}, {"stop": letter, "include_stop_str_in_output": True}),
        ({"stop_token_ids": [free.token_ids[2]]}, {"stop_token_ids": [free.token_ids[2]]}),
        (
            {"stop_token_ids": [free.token_ids[2]], "min_tokens": 9},
            {"stop_token_ids": [free.token_ids[2]], "min_tokens": 9},
        ),
        ({"seed": 6}, {"seed": 6}),
        ({"max_tokens": 4}, {"max_tokens": 4}),
    ]
    for body, params in cases:
        want = expected(llm, PROMPT, **{**plain, **params})
        answer = ask(service, "POST", "/v1/completions", json={"prompt": PROMPT, **plain, **body}).json()
        assert answer["choices"][0]["text"] == want.text != free.text, body
        assert answer["choices"][0]["finish_reason"] == want.outputs[0].finish_reason
        assert answer["usage"]["completion_tokens"] == len(want.token_ids)
    # Defaults, and what chat calls max_tokens.
    want = expected(llm, PROMPT, seed=5)
    assert (
        ask(service, "POST", "/v1/completions", json={"prompt": PROMPT, "seed": 5}).json()["choices"][0]["text"]
        == want.text
    )
    chat = {"messages": MESSAGES, "max_completion_tokens": 3, "user": "me", "metadata": {"a": "b"}, "tools": None}
    assert ask(service, "POST", "/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 3
    whole = ask(service, "POST", "/v1/chat/completions", json={"messages": MESSAGES, "logit_bias": {"300": 100}})
    assert whole.json()["usage"]["total_tokens"] == service.max_model_len  # no limit but the context


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_in_every_chunk(service: Service, path: str) -> None:
    """guidellm asks for it: that of the last chunk is the whole one."""
    prompt = {"messages": MESSAGES} if "chat" in path else {"prompt": "hello"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**prompt, "max_tokens": 12, "ignore_eos": True, "seed": 1, "stream": True, "stream_options": options}
    *chunks, last = events_of(ask(service, "POST", path, json=body).text)
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[0] > 0 and usages[-1] == last["usage"]
    assert last["usage"]["completion_tokens"] == 12 and last["choices"] == []
    assert {usage["prompt_tokens"] for usage in usages} == {last["usage"]["prompt_tokens"]}
    for usage in usages:
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_end_of_sequence(tmp_path: Path) -> None:
    """An end token ends the text; ignore_eos goes on."""
    from torch_infini.models import Llama

    folder = save_model(tmp_path)
    (folder / "config.json").write_text(
        json.dumps({**json.loads((folder / "config.json").read_text()), "eos_token_id": list(range(40))})
    )
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert Llama.from_pretrained(folder).config.eos_token_ids
    made = AsyncLLM(folder)
    try:
        body = {
            "prompt": "hello",
            "seed": 1,
            "max_tokens": 100,
            "stream": True,
            "stream_options": {"include_usage": True, "include_obfuscation": False},
        }
        service = service_of(made)
        ends = []
        for ignore in (False, True):
            *_, last, usage = events_of(
                ask(service, "POST", "/v1/completions", json={**body, "ignore_eos": ignore}).text
            )
            ends.append((last["choices"][0]["finish_reason"], usage["usage"]["completion_tokens"]))
        assert ends[0][0] == "stop" and ends[0][1] < 100
        assert ends[1] == ("length", 100)
    finally:
        made.close()


def test_messages(llm: AsyncLLM, service: Service) -> None:
    """Parts, null, names that clients send along, and developers, as the chat template gets them."""
    body = {"seed": 1, "max_tokens": 8}
    conversation = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "annotations": [], "audio": None},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "user", "content": "why?"},
    ]
    plain = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello\nthere"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "why?"},
    ]
    answer = ask(service, "POST", "/v1/chat/completions", json={"messages": conversation, **body}).json()
    want = expected(llm, llm.chat_prompt(plain), **body)
    assert answer["choices"][0]["message"]["content"] == want.text
    tokens = ask(service, "POST", "/tokenize", json={"messages": conversation}).json()
    assert tokens == {"count": len(want.prompt_token_ids), "max_model_len": 512, "tokens": want.prompt_token_ids}


def test_logprobs_of_chat(llm: AsyncLLM, service: Service) -> None:
    body = {"messages": MESSAGES, "seed": 2, "max_tokens": 12, "logprobs": True, "top_logprobs": 3}
    want = expected(llm, llm.chat_prompt(MESSAGES), seed=2, max_tokens=12, logprobs=3).outputs[0]
    whole = ask(service, "POST", "/v1/chat/completions", json=body).json()["choices"][0]
    entries = whole["logprobs"]["content"]
    assert want.token_logprobs is not None
    assert [entry["logprob"] for entry in entries] == [one.logprob for one in want.token_logprobs]
    for entry, one in zip(entries, want.token_logprobs, strict=True):
        assert [other["logprob"] for other in entry["top_logprobs"]] == [logprob for _, logprob in one.top]
        assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
    # The bytes of all tokens are the text, where single tokens are parts of characters.
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data.decode("utf-8", "replace") == whole["message"]["content"]
    streamed = [
        entry
        for event in events_of(ask(service, "POST", "/v1/chat/completions", json={**body, "stream": True}).text)
        for entry in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == entries


def test_texts_of_single_tokens(llm: AsyncLLM) -> None:
    """Every token of the byte-level tokenizer, and names as sentencepiece has them."""
    texts = TokenTexts(llm.engine.tokenizer)
    for character in PROMPT:
        assert b"".join(map(texts.bytes_of, llm.engine.prompts.encode(character))).decode() == character
    assert [texts.text_of(token) for token in (256, 319)] == [" w0", " w63"]
    assert texts.bytes_of(100_000) == b""
    names = {0: "<0xE2>", 1: "\u2581the", 2: "<s>", 3: "é"}
    tokenizer = SimpleNamespace(
        convert_ids_to_tokens=names.get, added_tokens_decoder={2: SimpleNamespace(content="<s>", special=True)}
    )
    texts = TokenTexts(tokenizer)
    assert [texts.bytes_of(token) for token in range(4)] == [b"\xe2", b" the", b"<s>", "é".encode()]


def test_parts_of_outputs_that_were_skipped() -> None:
    """What a slow reader missed comes with the next part; a choice that ended gives nothing more."""
    parts = DeltaTracker(2, CompletionAnswer("m", None))
    had = [parts.new(1, output_with("", [])), parts.new(1, output_with("ab", [1, 2]))]
    assert [[(p.choice, p.text, p.tokens, p.is_first) for p in new] for new in had] == [[], [(2, "ab", [1, 2], True)]]
    last = output_with("abcd", [1, 2, 3, 4], "stop")
    assert [(p.text, p.tokens, p.is_first, p.finish) for p in parts.new(1, last)] == [("cd", [3, 4], False, "stop")]
    assert list(parts.new(1, last)) == []


def output_with(text: str, tokens: list[int], finish: str | None = None) -> RequestOutput:
    return RequestOutput("1", None, [0], [CompletionOutput(0, text, tokens, finish, text_tokens=len(tokens))])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(stream: bool, service: Service, url: str, slow: None) -> None:
    body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True, "stream": stream, "n": 3}
    connection = send_raw(url, "/v1/completions", body)
    if stream:
        assert b"200 OK" in connection.recv(100)
    wait_until(lambda: service.llm.metrics().running == 3)
    steps = service.llm.metrics().steps
    connection.close()
    wait_until(lambda: is_idle(service), seconds=2)
    assert service.llm.metrics().steps - steps < 50  # of 500; a step takes 10 ms, the server's turn less


def test_many_clients_that_give_up(service: Service, url: str, slow: None) -> None:
    """Fifty long requests, each given up after 0.1 s, streamed and not; the next one is answered at once."""
    body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True}
    connections = [send_raw(url, "/v1/completions", {**body, "stream": i % 2 == 0}) for i in range(50)]
    wait_until(lambda: service.in_flight == 50 and service.llm.metrics().waiting > 0)
    for connection in connections:
        connection.close()
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "max_tokens": 2}, timeout=5)
    assert answer.json()["usage"]["completion_tokens"] == 2
    wait_until(lambda: is_idle(service), seconds=2)


def test_outputs_do_not_pile_up(service: Service) -> None:
    """Of a client that reads slowly, which this one does not do at all until the end: one output waits for it."""

    async def read() -> list[Any]:
        params = SamplingParams(max_tokens=100, ignore_eos=True)
        generation = service.start([[1, 2], [3]], params, "prompt", ("max_tokens", 100))
        while service.in_flight:
            await asyncio.sleep(0.01)
        return [new async for new in generation.newest()]

    outputs = asyncio.run(read())
    assert sorted((at, len(output.token_ids)) for at, output in outputs) == [(0, 100), (1, 100)]


def test_status_routes(service: Service) -> None:
    from torch_infini import __version__

    assert ask(service, "GET", "/health").json() == {"status": "ok"}
    assert ask(service, "HEAD", "/health").status_code == 200
    assert ask(service, "GET", "/version").json() == {"version": __version__}
    (model,) = ask(service, "GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == (MODEL, "model", 512)
    assert "/v1/chat/completions" in ask(service, "GET", "/openapi.json").json()["paths"]
    assert ask(service, "GET", "/health", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    assert len(ask(service, "GET", "/health").headers["x-request-id"]) == 32


def test_routes_of_llama_cpp(llm: AsyncLLM) -> None:
    service = service_of(llm, sampling={"top_k": 7, "stop": ("x",), "repetition_penalty": 1.5})
    props = ask(service, "GET", "/props").json()
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 512 and props["model_alias"] == MODEL
    found = {name: settings["params"][name] for name in ("n_predict", "seed", "top_k", "stop", "repeat_penalty")}
    assert found == {"n_predict": -1, "seed": -1, "top_k": 7, "stop": ["x"], "repeat_penalty": 1.5}
    assert props["chat_template"] == llm.engine.tokenizer.chat_template and isinstance(props["bos_token"], str)
    cpu = {"cpu_capability": cpu_capability(), "threads": torch.get_num_threads()}
    assert props["device"] == {"type": "cpu", "name": cpu_name(), **cpu}
    total = props["total_slots"]
    assert total == llm.engine.config.max_num_seqs
    for samples, busy in ((0, 0), (3, 3), (total + 5, total)):
        service.in_flight = samples
        slots = ask(service, "GET", "/slots").json()
        assert [slot["id"] for slot in slots] == list(range(total))
        assert [slot["is_processing"] for slot in slots] == [True] * busy + [False] * (total - busy)
        status = 503 if busy == total else 200
        assert ask(service, "GET", "/slots?fail_on_no_slot=1").status_code == status
    assert ask(service, "POST", "/props", json={}).status_code == 405


def test_names_and_the_chunk_of_the_role(llm: AsyncLLM) -> None:
    """An answer has the name that was asked for; the chunk of the role is sent together with the first text."""
    service = service_of(llm, model_names=(MODEL, "other"), any_model=True)
    body = {"messages": MESSAGES, "max_tokens": 2}
    for asked, named in ((None, MODEL), ("other", "other"), (MODEL, MODEL), ("unknown", MODEL)):
        answer = ask(service, "POST", "/v1/chat/completions", json={**body, "model": asked}).json()
        assert answer["model"] == named and answer["system_fingerprint"] == service.fingerprint

    async def first() -> bytes:
        params = SamplingParams(max_tokens=2)
        generation = service.start([[1, 2]], params, "messages", ("max_tokens", 2))
        stream = events(generation, ChatAnswer(MODEL, service.token_texts), 1, False)
        sent = [data async for data in stream]
        return sent[0]

    assert asyncio.run(first()).count(b"data: ") > 1


def test_the_last_message_is_continued(llm: AsyncLLM, service: Service) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "max_tokens": 2, "continue_final_message": True}
    prompt = llm.chat_prompt(messages, {"continue_final_message": True, "add_generation_prompt": False})
    answer = ask(service, "POST", "/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt) < len(llm.chat_prompt(messages))
    for wrong, param in (
        ({"messages": MESSAGES}, "continue_final_message"),
        ({"add_generation_prompt": True}, "add_generation_prompt"),
    ):
        refused = ask(service, "POST", "/v1/chat/completions", json={**body, **wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    body = {"messages": MESSAGES, "max_tokens": 2, "add_generation_prompt": False}
    answer = ask(service, "POST", "/v1/chat/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == len(llm.chat_prompt(MESSAGES, {"add_generation_prompt": False}))


def test_tokenize_and_detokenize(llm: AsyncLLM, service: Service) -> None:
    tokens = ask(service, "POST", "/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert tokens == llm.engine.prompts.encode(PROMPT)
    assert ask(service, "POST", "/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()[
        "count"
    ] == len(tokens)
    assert ask(service, "POST", "/detokenize", json={"tokens": tokens}).json() == {"prompt": PROMPT}


def stopped(llm: AsyncLLM) -> tuple[str, Any]:
    """A stop string of several tokens within a text, and the text's output without it."""
    free = expected(llm, PROMPT, seed=5, max_tokens=16)
    texts = [llm.engine.tokenizer.decode([token]) for token in free.token_ids]
    return "".join(texts[6:9]), free


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_log_probabilities_of_a_stop_string(include: bool, stream: bool, llm: AsyncLLM, service: Service) -> None:
    """Tokens have log-probabilities as far as they are in the text."""
    stop, free = stopped(llm)
    assert free.text.count(stop) == 1
    body = {"prompt": PROMPT, "seed": 5, "max_tokens": 16, "stop": stop, "logprobs": 0, "stream": stream}
    answer = ask(service, "POST", "/v1/completions", json={**body, "include_stop_str_in_output": include})
    choices = [event["choices"][0] for event in events_of(answer.text)] if stream else [answer.json()["choices"][0]]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    text = "".join(choice["text"] for choice in choices)
    assert text == free.text[: free.text.index(stop) + include * len(stop)]
    assert "".join(tokens) == text and len(tokens) == (9 if include else 6)


def test_more_samples_than_run_at_a_time(llm: AsyncLLM, service: Service) -> None:
    """They wait for each other, and each is what its seed gives."""
    most = llm.engine.config.max_num_seqs
    body = {"prompt": PROMPT, "seed": 5, "max_tokens": 8, "n": 3 * most + 1}
    answer = ask(service, "POST", "/v1/completions", json=body).json()
    want = expected(llm, PROMPT, seed=5, max_tokens=8, n=3 * most + 1)
    assert [choice["text"] for choice in answer["choices"]] == [c.text for c in want.outputs]
    assert len({choice["text"] for choice in answer["choices"]}) > most
    assert answer["usage"]["completion_tokens"] == 8 * (3 * most + 1)
    assert want.outputs[0].text == expected(llm, PROMPT, seed=5, max_tokens=8).text


@pytest.mark.parametrize("stream", [False, True])
def test_no_prompt_and_no_tokens(stream: bool, service: Service) -> None:
    """As OpenAI's schema has them: null is a text's beginning, and 0 tokens are an answer."""
    body: dict[str, Any] = {"prompt": None, "max_tokens": 2, "temperature": 0, "stream": stream}
    begun = ask(service, "POST", "/v1/completions", json=body)
    assert begun.status_code == 200
    if not stream:
        assert begun.json()["usage"] == {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        same = ask(service, "POST", "/v1/completions", json={**body, "prompt": [1]}).json()
        assert same["choices"] == begun.json()["choices"]
    body |= {"prompt": [[3], [4, 5]], "max_tokens": 0, "n": 2, "logprobs": 1}
    answer = ask(service, "POST", "/v1/completions", json=body)
    events = events_of(answer.text) if stream else [answer.json()]
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert all(choice["text"] == "" and choice["finish_reason"] == "length" for choice in choices)
    assert all(choice["logprobs"]["tokens"] == [] for choice in choices)
    if not stream:
        assert answer.json()["usage"]["prompt_tokens"] == 3 and answer.json()["usage"]["completion_tokens"] == 0


def test_what_a_template_gets(service: Service, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that may not be called, messages of tools, and variables of the template."""
    template = (
        "{{ reasoning_effort }}|{{ thinking }}{% for m in messages %}|{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }} {{ c.function.arguments.x }}>{% endfor %}"
        "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", template)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    body = {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "b", "tool_call_id": "c1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "none",
        "reasoning_effort": "low",
        "chat_template_kwargs": {"thinking": True},
        "max_tokens": 1,
    }
    seen = []
    encode = llm.chat_prompt
    monkeypatch.setattr(llm, "chat_prompt", lambda *args: seen.append(encode(*args)) or seen[-1])
    assert ask(service, "POST", "/v1/chat/completions", json=body).status_code == 200
    assert llm.engine.tokenizer.decode(seen[0]) == "low|True|user:a|assistant:<f 5>|tool:b[c1]"
