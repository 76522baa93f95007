"""What torch_infini.serve refuses, and how: a bad request gets 4xx and names its field; faults, limits, draining."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx

from support.serving import (
    Command,
    ask,
    events_of,
    send_raw,
    server_of,
    service_of,
    serving,
    slow_down,
    wait_until,
)
from torch_infini import AsyncLLM
from torch_infini.__main__ import main
from torch_infini.serve import ServeSettings, Service, bind
from torch_infini.serve.errors import LONGEST

pytest_plugins = ["support.serving_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm)


@pytest.fixture
def slow(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(llm, monkeypatch)


def assert_error(answer: httpx.Response, status: int, param: str | None = None, text: str = "") -> dict[str, Any]:
    """Check that an answer is OpenAI's error object, without a path or a traceback; return it."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and isinstance(error["type"], str)
    assert error["param"] == param, error
    assert text in error["message"], error
    assert not re.search(r"Traceback|File \"|\.py\b|torch_infini|(^|\s)/\w+/", error["message"]), error
    return error


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": MESSAGES, "max_tokens": 1, **fields}


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return TEXT, {"prompt": "hello", "max_tokens": 1, **fields}


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [*MESSAGES, {"role": "user", "content": "x", **fields}], "max_tokens": 1}


NAN, INF = float("nan"), float("inf")
# (path and body, field of the error).
BAD: list[tuple[tuple[str, Any], str | None]] = [
    ((CHAT, {}), "messages"),
    ((CHAT, []), None),
    ((CHAT, None), None),
    ((CHAT, 5), None),
    ((CHAT, "text"), None),
    (chat(messages=None), "messages"),
    (chat(messages=[]), "messages"),
    (chat(messages="hello"), "messages"),
    (chat(messages={"role": "user", "content": "x"}), "messages"),
    (chat(messages=[None]), "messages[0]"),
    (chat(messages=[123]), "messages[0]"),
    (chat(messages=["hello"]), "messages[0]"),
    (chat(messages=[{}]), "messages[0].role"),
    (chat(messages=[[]]), "messages[0]"),
    (message(role="tool"), "messages[1].tool_call_id"),
    (message(role="function"), "messages[1].role"),
    (message(content="\ud800"), "messages[1].content"),
    (message(content=[{"type": "text", "text": "\ud800"}]), "messages[1].content"),
    (message(role="assistant", tool_calls=[{"id": "x"}]), "messages[1].tool_calls"),
    (message(role="assistant", tool_calls=5), "messages[1].tool_calls"),
    (message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "messages[1].tool_calls"),
    (message(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "[]"}}]), "messages[1].tool_calls"),
    (chat(chat_template_kwargs={"tokenize": False}), "chat_template_kwargs.tokenize"),
    (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"x": ["\ud800"]}), "chat_template_kwargs"),
    (
        message(role="assistant", tool_calls=[{"id": "\ud800", "function": {"name": "f", "arguments": "{}"}}]),
        "messages[1].tool_calls",
    ),
    (chat(reasoning_effort="much"), "reasoning_effort"),
    (chat(temperature=2.1), "temperature"),
    (chat(presence_penalty=2.1), "presence_penalty"),
    (chat(frequency_penalty=-3), "frequency_penalty"),
    (chat(seed=2**63), "seed"),
    (("/tokenize", {"prompt": "\ud800"}), "prompt"),
    (message(role=None), "messages[1].role"),
    (message(role=["user"]), "messages[1].role"),
    (message(content=5), "messages[1].content"),
    (message(content=["x"]), "messages[1].content"),
    (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[1].content"),
    (message(content=[{"type": "text"}]), "messages[1].content"),
    (message(content=[{"text": "x"}]), "messages[1].content"),
    (message(content={"type": "text", "text": "x"}), "messages[1].content"),
    (message(content=None), "messages[1].content"),
    (message(content=[]), "messages[1].content"),
    ((CHAT, {"messages": [{"role": "user"}], "max_tokens": 1}), "messages[0].content"),
    (message(refusal="no"), "messages[1].refusal"),
    (message(name=5), "messages[1].name"),
    (message(tool_calls=[{"id": "x"}]), "messages[1].tool_calls"),
    (message(tool_call_id="x"), "messages[1].tool_call_id"),
    (chat(model=5), "model"),
    (chat(model=["small"]), "model"),
    (chat(max_tokens=0), "max_tokens"),
    (chat(max_tokens=-1), "max_tokens"),
    (chat(max_tokens=1.5), "max_tokens"),
    (chat(max_tokens="5"), "max_tokens"),
    (chat(max_tokens=True), "max_tokens"),
    (chat(max_tokens=10**30), "max_tokens"),
    (chat(max_tokens=None, max_completion_tokens=0), "max_completion_tokens"),
    (chat(max_tokens=2, max_completion_tokens=3), "max_tokens"),
    (chat(max_tokens=512), "messages"),
    (chat(temperature=-0.1), "temperature"),
    (chat(temperature="0"), "temperature"),
    (chat(temperature=NAN), "temperature"),
    (chat(temperature=INF), "temperature"),
    (chat(temperature=[1]), "temperature"),
    (chat(top_p=1.1), "top_p"),
    (chat(top_p=-1), "top_p"),
    (chat(top_k=-2), "top_k"),
    (chat(top_k=1.0), "top_k"),
    (chat(min_p=2), "min_p"),
    (chat(n=0), "n"),
    (chat(n=129), "n"),
    (chat(n=10**20), "n"),
    (chat(seed=1.5), "seed"),
    (chat(seed="1"), "seed"),
    (chat(stop=5), "stop"),
    (chat(stop=[""]), "stop"),
    (chat(stop=""), "stop"),
    (chat(stop=["a"] * 65), "stop"),
    (chat(stop=[["a"]]), "stop"),
    (chat(stop_token_ids=[-1]), "stop_token_ids"),
    (chat(stop_token_ids=[320]), "stop_token_ids"),
    (chat(stop_token_ids=["a"]), "stop_token_ids[0]"),
    (chat(stop_token_ids=[1] * 1025), "stop_token_ids"),
    (chat(logit_bias=[1]), "logit_bias"),
    (chat(logit_bias={"x": 1}), "logit_bias"),
    (chat(logit_bias={"1": "1"}), "logit_bias"),
    (chat(logit_bias={"1": 101}), "logit_bias"),
    (chat(logit_bias={"1": NAN}), "logit_bias"),
    (chat(logit_bias={"320": 1}), "logit_bias"),
    (chat(logit_bias={"9" * 30: 1}), "logit_bias"),
    (chat(presence_penalty=INF), "presence_penalty"),
    (chat(frequency_penalty="x"), "frequency_penalty"),
    (chat(repetition_penalty=0), "repetition_penalty"),
    (chat(min_tokens=2), "min_tokens"),
    (chat(ignore_eos=1), "ignore_eos"),
    (chat(stream="yes"), "stream"),
    (chat(stream_options={"include_usage": True}), "stream_options"),
    (chat(stream=True, stream_options=5), "stream_options"),
    (chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (chat(stream=True, stream_options={"continuous_usage_stats": True}), "stream_options.continuous_usage_stats"),
    (chat(logprobs=3), "logprobs"),
    (chat(top_logprobs=3), "logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(tools=[{"type": "function"}]), "tools[0].function"),
    (chat(tool_choice="required"), "tool_choice"),
    (chat(functions=[{}]), "functions"),
    (chat(response_format={"type": "json"}), "response_format.type"),
    (chat(modalities=["audio"]), "modalities"),
    (chat(prompt="x"), "prompt"),
    (chat(temprature=1), "temprature"),
    ((TEXT, {}), "prompt"),
    (text(prompt=5), "prompt"),
    (text(prompt=[]), "prompt"),
    (text(prompt=[[]]), "prompt"),
    (text(prompt=""), "prompt"),
    (text(prompt=["a", 5]), "prompt"),
    (text(prompt=[1, True]), "prompt"),
    (text(prompt=[1.5]), "prompt"),
    (text(prompt=[-1]), "prompt"),
    (text(prompt=[320]), "prompt"),
    (text(prompt=[10**30]), "prompt"),
    (text(prompt=[1] * 512), "prompt"),
    (text(prompt="a" * 600), "prompt"),
    (text(prompt=["a"] * 261), "prompt"),
    (text(prompt="\ud800"), "prompt"),
    (text(prompt={"prompt": "x"}), "prompt"),
    (text(logprobs=True), "logprobs"),
    (text(logprobs=21), "logprobs"),
    (text(echo=1), "echo"),
    (text(echo=True, prompt=[320]), "prompt"),
    (text(echo=True, prompt=[10**30]), "prompt"),
    (text(prompt_logprobs=21), "prompt_logprobs"),
    (text(prompt_logprobs=True), "prompt_logprobs"),
    (chat(echo=True), "echo"),
    (text(best_of=2), "best_of"),
    (text(suffix="x"), "suffix"),
    (text(**{"\ud800": 1}), None),
    (("/tokenize", {}), "prompt"),
    (("/tokenize", {"prompt": "a", "messages": MESSAGES}), "prompt"),
    (("/tokenize", {"prompt": 5}), "prompt"),
    (("/tokenize", {"prompt": "a", "other": 5}), "other"),
    (("/detokenize", {}), "tokens"),
    (("/detokenize", {"tokens": [-1]}), "tokens"),
    (("/detokenize", {"tokens": [320]}), "tokens"),
    (("/detokenize", {"tokens": ["1"]}), "tokens[0]"),
]


def test_bad_bodies(service: Service) -> None:
    assert len(BAD) >= 60
    for (path, body), param in BAD:
        answer = ask(service, "POST", path, content=json.dumps(body), headers={"content-type": "application/json"})
        if param is None:
            assert 400 <= answer.status_code < 500, (body, answer.text)
            continue
        error = assert_error(answer, 400, param)
        assert error["message"].startswith(param) or error["code"] == "context_length_exceeded", (body, error)
    assert service.in_flight == 0 and service.llm.engine.is_idle


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_bodies_that_are_no_json(path: str, service: Service) -> None:
    head = {"content-type": "application/json"}
    for content in (b"", b"{", b"\xff\xfe\x00", b'{"a": 1,}', b"[" * 100_000, b"\x00", b'{"a": ' + b"1" * 5000 + b"}"):
        answer = ask(service, "POST", path, content=content, headers=head)
        assert_error(answer, 400, answer.json()["error"]["param"])
    assert_error(ask(service, "POST", path, content=b"{}"), 415, text="none")
    assert_error(
        ask(service, "POST", path, content=b"{}", headers={"content-type": "text/plain"}), 415, text="text/plain"
    )
    assert_error(ask(service, "GET", path), 405)


def test_both_figures_of_a_context_that_is_exceeded(service: Service) -> None:
    answer = ask(service, "POST", TEXT, json={"prompt": [1] * 500, "max_tokens": 13})
    error = assert_error(answer, 400, "prompt")
    assert error["code"] == "context_length_exceeded"
    assert all(figure in error["message"] for figure in ("500", "13", "512"))
    assert ask(service, "POST", TEXT, json={"prompt": [1] * 500, "max_tokens": 12}).status_code == 200
    assert ask(service, "POST", TEXT, json={"prompt": [1] * 511}).json()["usage"]["completion_tokens"] == 1


def test_messages_are_short(service: Service) -> None:
    """Also where the engine shows a whole value."""
    body = {"input": "a", "prompt_name": "a" * 5000}
    error = ask(service, "POST", "/v1/embeddings", json=body).json()["error"]
    assert error["param"] == "prompt_name" and len(error["message"]) == LONGEST + 3


def test_other_routes(service: Service) -> None:
    assert_error(ask(service, "GET", "/v1/nothing"), 404)
    assert_error(ask(service, "POST", "/health"), 405)
    assert_error(ask(service, "GET", "/v1/models/other"), 404, "model", "small")
    assert_error(ask(service, "POST", CHAT, json={**chat()[1], "model": "other"}), 404, "model", "small")
    assert_error(ask(service, "POST", TEXT, json={**text()[1], "model": "\\ud800"}), 404, "model")


def test_key(llm: AsyncLLM) -> None:
    service = service_of(llm, api_key="sécret", allow_origins=("http://page",))
    for given in ("", "Bearer other", "Bearer ", "sécret", "Basic sécret", "Bearer sécret2"):
        headers = {"authorization": given.encode()}
        answer = ask(service, "GET", "/v1/models", headers=headers)
        assert_error(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert_error(ask(service, "POST", CHAT, json=chat()[1], headers=headers), 401)
    right = {"authorization": "Bearer sécret".encode()}  # clients send UTF-8, and ASGI gives it as Latin-1
    assert ask(service, "GET", "/v1/models", headers=right).status_code == 200
    assert ask(service, "GET", "/health").status_code == 200
    preflight = {"origin": "http://page", "access-control-request-method": "POST"}
    assert ask(service, "OPTIONS", CHAT, headers=preflight).headers["access-control-allow-origin"] == "http://page"
    for origin in ("http://other", "http://localhost.other", "http://localhost:80.other", "null"):
        answer = ask(service, "GET", "/v1/models", headers={"origin": origin, **right})
        assert "access-control-allow-origin" not in answer.headers


def test_pages_of_this_machine(service: Service) -> None:
    for origin in ("http://localhost", "https://localhost:3000", "http://127.0.0.1:8", "http://[::1]:5173"):
        answer = ask(service, "GET", "/v1/models", headers={"origin": origin})
        assert answer.headers["access-control-allow-origin"] == origin


def test_body_limit(llm: AsyncLLM) -> None:
    service = service_of(llm, max_body=200)
    head = {"content-type": "application/json"}
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "u" * 200}).encode()
    assert_error(ask(service, "POST", TEXT, content=body, headers=head), 413, text="200")

    async def pieces() -> Any:
        for at in range(0, len(body), 50):
            yield body[at : at + 50]

    assert_error(ask(service, "POST", TEXT, content=pieces(), headers=head), 413, text="200")
    fitting = body.replace(b"u" * 200, b"u" * (200 - len(body) + 200))
    assert len(fitting) == 200
    assert ask(service, "POST", TEXT, content=fitting, headers=head).status_code == 200
    lying = {**head, "content-length": "9" * 30}
    assert_error(ask(service, "POST", TEXT, content=b"", headers=lying), 413)


def test_queue_and_draining(llm: AsyncLLM, slow: None) -> None:
    """Beyond max_num_seqs and max_queue: 429. While draining: 503 for new requests, the others go on to their end."""
    service = service_of(llm, max_queue=1)
    long = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True}
    with serving(service) as url:
        connections = [send_raw(url, TEXT, {**long, "n": 2, "stream": stream}) for stream in (False, True)]
        wait_until(lambda: service.in_flight == 4)  # and one more may wait
        answer = httpx.post(f"{url}{TEXT}", json={**long, "n": 2})
        assert assert_error(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        assert_error(httpx.post(f"{url}{TEXT}", json={**long, "prompt": ["a"] * 6}), 400, "prompt")
        service.drain()
        for answer in (httpx.post(f"{url}{TEXT}", json=long), httpx.get(f"{url}/health")):
            assert assert_error(answer, 503)["code"] == "draining"
            assert int(answer.headers["retry-after"]) >= 1
        for connection in connections:
            data = b""
            while data.count(b'"finish_reason":"length"') < 2:
                more = connection.recv(1 << 16)
                assert more, data
                data += more
            connection.close()
    assert service.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails(stream: bool, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request gets a sentence without the cause, which may name files; the next one is served."""

    def fail(*args: Any) -> Any:
        raise RuntimeError('Traceback: File "/secret/place.py"')

    with monkeypatch.context() as patched:
        patched.setattr(service.llm.engine._runner, "run", fail)
        answer = ask(service, "POST", CHAT, json={**chat()[1], "stream": stream})
        if stream:
            (event,) = events_of(answer.text)
            error = event["error"]
        else:
            error = assert_error(answer, 500)
        assert "secret" not in answer.text
        assert (error["type"], error["code"]) == ("server_error", "engine_error")
    assert ask(service, "POST", CHAT, json=chat()[1]).status_code == 200
    assert service.in_flight == 0


def test_a_fault_of_the_server_itself(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("/secret/place.py")

    monkeypatch.setattr(service, "encode_chat", fail)
    assert_error(ask(service, "POST", CHAT, json=chat()[1]), 500)


def test_an_engine_that_has_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running requests get 500; then /health and new ones get 503."""
    made = AsyncLLM(folder)
    service = service_of(made)
    step = made.engine.step

    def end() -> Any:
        if step():
            raise SystemError("/secret")
        return []

    monkeypatch.setattr(made.engine, "step", end)
    monkeypatch.setattr("torch_infini.engine.async_llm.log.exception", lambda *args: None)
    with serving(service) as url:
        answer = httpx.post(f"{url}{TEXT}", json={"prompt": "hello", "max_tokens": 100})
        assert assert_error(answer, 500)["code"] == "engine_dead"
        for answer in (httpx.get(f"{url}/health"), httpx.post(f"{url}{TEXT}", json={"prompt": "hello"})):
            assert assert_error(answer, 503)["code"] == "engine_dead"
    assert service.in_flight == 0
    made.close()


def test_a_rank_that_has_ended(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    service = service_of(llm)
    workers = SimpleNamespace(all_alive=True)
    monkeypatch.setattr(llm.engine.model, "tp_group", SimpleNamespace(workers=workers))
    assert ask(service, "GET", "/health").status_code == 200
    workers.all_alive = False
    assert assert_error(ask(service, "GET", "/health"), 503)["code"] == "engine_dead"


def test_a_model_without_a_chat_template_or_a_tokenizer(folder: Path) -> None:
    from torch_infini.models import Llama

    made = AsyncLLM(Llama.from_pretrained(folder))
    service = service_of(made)
    try:
        assert_error(ask(service, "POST", CHAT, json=chat()[1]), 400, "messages", "tokenizer")
        assert_error(ask(service, "POST", TEXT, json=text()[1]), 400, "prompt", "tokenizer")
        assert_error(ask(service, "POST", "/detokenize", json={"tokens": [1]}), 400, None, "tokenizer")
        body = {"prompt": [1, 2], "max_tokens": 2, "logprobs": 1}
        choice = ask(service, "POST", TEXT, json=body).json()["choices"][0]
        assert choice["text"] == "" and choice["logprobs"]["tokens"][0].startswith("token_id:")
    finally:
        made.close()


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"model_names": ()}, "model_names must"),
        ({"model_names": "small"}, "model_names must"),
        ({"api_key": " "}, "api_key must"),
        ({"max_queue": -1}, "max_queue must"),
        ({"max_body": 0}, "max_body must"),
        ({"drain": float("nan")}, "drain must"),
        ({"sampling": {"x": 1}}, "sampling must"),
        ({"sampling": {"top_p": 2}}, "top_p must"),
    ],
)
def test_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ServeSettings(**{"model_names": ("small",), **settings})


def test_bad_arguments_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for arguments, sentence in (
            (["--port", port], "in use"),
            (["--port", "70000"], "port"),
            (["--model", str(tmp_path), "--port", "0"], "config"),
            (["--max-queue", "-1"], "max_queue must"),
            (["--api-key", ""], "api_key must"),
            (["--chat-template", str(tmp_path / "none")], "No such file"),
            (["--port", "0", "--max-num-seqs", "0"], "max_num_seqs must"),
        ):
            assert main(["serve", *arguments]) == 2
            assert sentence in capsys.readouterr().err


def test_unix_socket(tmp_path: Path, service: Service) -> None:
    path = str(tmp_path / "socket")
    bind("", 0, path).close()  # as a server that was killed leaves it
    with bind("", 0, path) as listener:
        assert listener.getsockname() == path


def test_what_runs_is_ended_after_the_drain(llm: AsyncLLM, slow: None) -> None:
    service = service_of(llm, drain=0.2)
    body = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True}
    answers: dict[bool, httpx.Response] = {}
    with serving(service) as url:

        def read(stream: bool) -> None:
            answers[stream] = httpx.post(f"{url}{TEXT}", json={**body, "stream": stream}, timeout=20)

        readers = [threading.Thread(target=read, args=(stream,)) for stream in (False, True)]
        for reader in readers:
            reader.start()
        wait_until(lambda: service.in_flight == 2)
        start = time.monotonic()
        server_of(service).drain()
        for reader in readers:
            reader.join()
        assert time.monotonic() - start < 2
    assert assert_error(answers[False], 503)["code"] == "draining"
    *_, last = events_of(answers[True].text)
    assert last["error"]["code"] == "draining"


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("signals", [1, 2])
def test_sigterm(signals: int, folder: Path, tmp_path: Path) -> None:
    """The running request ends in full, and the exit status is 0; a second signal ends at once."""
    body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 4 if signals == 1 else 16}
    if signals == 2:
        body["logprobs"] = 20  # seconds of work, and more than a minute in which they might be done
    command = Command(["serve", "--model", str(folder), "--port", "0", "--log-level", "warning"], tmp_path / "output")
    connection = send_raw(command.url(), TEXT, body)
    data = connection.recv(1 << 16)
    assert b"200 OK" in data and command.process.pid
    os.kill(command.process.pid, signal.SIGTERM)
    if signals == 2:
        wait_until(lambda: "draining" in command.output.read_text())
        os.kill(command.process.pid, signal.SIGTERM)
        start = time.monotonic()
    while more := connection.recv(1 << 16):
        data += more
    command.process.join(30)
    assert command.process.exitcode == 0, command.output.read_text()
    if signals == 1:
        assert data.count(b'"finish_reason":"length"') == 4 and b"data: [DONE]" in data
    else:
        assert time.monotonic() - start < 5 and b'"code":"draining"' in data
    assert "Traceback" not in command.output.read_text(), command.output.read_text()


def test_small_packets_leave_at_once() -> None:
    """A token's packet does not wait until the client has acknowledged the one before (Nagle's algorithm)."""

    async def no_delay(listener: socket.socket) -> int:
        told: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            told.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            option = await told
            writer.close()
        return option

    with bind("127.0.0.1", 0) as listener:
        assert asyncio.run(no_delay(listener))
