"""How a server admits a request: it counts samples, measures texts, then tokenizes; long texts delay no short ones."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx

from support.serving import ask, send_raw, service_of, serving, wait_until
from torch_infini import AsyncLLM
from torch_infini.serve import Service
from torch_infini.serve import service as service_module

pytest_plugins = ["support.serving_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def service(llm: AsyncLLM) -> Service:
    return service_of(llm, max_queue=4)


def nothing_is_made(monkeypatch: pytest.MonkeyPatch, llm: AsyncLLM) -> None:
    def fail(*args: Any) -> Any:
        raise AssertionError("something was made of a request that is not admitted")

    monkeypatch.setattr(llm.engine, "new_request", fail)
    monkeypatch.setattr(llm.engine.prompts, "encode", fail)
    monkeypatch.setattr(llm, "chat_prompt", fail)


@pytest.mark.parametrize("prompt", [[[1]] * 200_000, ["a"] * 200_000])
def test_prompts_are_counted_first(
    service: Service, llm: AsyncLLM, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_is_made(monkeypatch, llm)
    answer = ask(service, "POST", TEXT, json={"max_tokens": 1, "prompt": prompt})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
    assert answer.json()["error"]["message"] == "prompt must ask for at most 8 samples in all, got 200000"


def test_a_full_queue_tokenizes_nothing(service: Service, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing_is_made(monkeypatch, llm)
    service.in_flight = 7
    for path, prompt in (
        (TEXT, {"prompt": ["a", "b"]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "n": 2}),
    ):
        answer = ask(service, "POST", path, json={"max_tokens": 1, **prompt})
        assert answer.status_code == 429 and "7 samples of at most 8" in answer.json()["error"]["message"]


def test_texts_are_measured_before_they_are_tokenized(
    service: Service, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the longest token: what may fit is tokenized, what cannot is not."""
    assert service.token_texts is not None
    longest, most = service.token_texts.longest, service.max_model_len
    tokenizer: Any = llm.engine.tokenizer
    assert 1 <= longest <= max(len(token.encode()) for token in tokenizer.get_vocab())
    nothing_is_made(monkeypatch, llm)
    size = most * longest
    for path, prompt, param in (
        (TEXT, {"prompt": "a" * size}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * size}]}, "messages"),
    ):
        error = ask(service, "POST", path, json={"max_tokens": 1, **prompt}).json()["error"]
        assert error["code"] == "context_length_exceeded" and error["param"] == param
        assert f"at least {most} for a text of {size} bytes" in error["message"]
    monkeypatch.undo()
    fits = ask(service, "POST", TEXT, json={"max_tokens": 1, "prompt": "a" * (most - 2)})
    assert fits.status_code == 200 and fits.json()["usage"]["prompt_tokens"] == most - 2


def test_tokens_of_any_text_are_counted(service: Service) -> None:
    """Nothing is computed with them, so that the context is no bound."""
    assert service.token_texts is not None
    text = "a" * (service.max_model_len * service.token_texts.longest)
    for body in ({"prompt": text}, {"prompt": text, "add_special_tokens": False}):
        answer = ask(service, "POST", "/tokenize", json=body)
        assert answer.status_code == 200 and answer.json()["count"] >= service.max_model_len
    messages = [{"role": "user", "content": text}]
    assert ask(service, "POST", "/tokenize", json={"messages": messages}).json()["count"] >= service.max_model_len


class Blocked:
    """Engine.encode, which for long texts waits until it is let go."""

    def __init__(self, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.texts: list[str] = []
        encode = llm.engine.prompts.encode

        def wait(text: str) -> list[int]:
            self.texts.append(text)
            if len(text) >= 100:
                self.begun.set()
                assert self.go.wait(30)
            return encode(text)

        monkeypatch.setattr(llm.engine.prompts, "encode", wait)
        monkeypatch.setattr(service_module, "LONG", 100)


def test_a_long_text_delays_no_short_one(service: Service, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = Blocked(llm, monkeypatch)
    with serving(service) as url, ThreadPoolExecutor(1) as other:
        long = other.submit(httpx.post, f"{url}{TEXT}", json={"prompt": "a" * 120, "max_tokens": 1}, timeout=60)
        assert blocked.begun.wait(30)
        assert httpx.post(f"{url}{TEXT}", json={"prompt": "ab", "max_tokens": 1}, timeout=30).status_code == 200
        assert not long.done()
        blocked.go.set()
        assert long.result(30).status_code == 200


def test_texts_of_clients_that_left_are_not_tokenized(
    service: Service, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = Blocked(llm, monkeypatch)
    submit, waiting = service._tokenizing_long.submit, []
    monkeypatch.setattr(service._tokenizing_long, "submit", lambda *call: waiting.append(submit(*call)) or waiting[-1])
    with serving(service) as url:
        first = send_raw(url, TEXT, {"prompt": "a" * 120, "max_tokens": 1})
        assert blocked.begun.wait(30)
        second = send_raw(url, TEXT, {"prompt": "b" * 120, "max_tokens": 1})
        wait_until(lambda: len(waiting) == 2)
        second.close()
        wait_until(waiting[1].cancelled)
        blocked.go.set()
        assert first.recv(12) == b"HTTP/1.1 200"
        first.close()
    assert blocked.texts == ["a" * 120]


def test_what_a_template_gets_is_measured_too(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long tool calls and variables are tokenized where long texts are."""
    sizes = []
    run = service.in_tokenizer

    async def watched(call: Any, *args: Any, size: int = 0) -> Any:
        sizes.append(size)
        return await run(call, *args, size=size)

    monkeypatch.setattr(service, "in_tokenizer", watched)
    long = "x" * 100_000
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "' + long + '"}'}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    for body in (
        {"messages": messages, "chat_template_kwargs": {"x": long}},
        {"messages": [*messages, {"role": "assistant", "tool_calls": [call]}]},
    ):
        assert ask(service, "POST", CHAT, json={"max_tokens": 1, **body}).status_code in (200, 400)
    assert len(sizes) == 2 and min(sizes) > 100_000
