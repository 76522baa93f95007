"""serve --log-requests: a line of JSON for each request, with what the engine computed for it and no text or key."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx

from support.serving import MODEL, Command, ask, send_raw, service_of, serving, slow_down, wait_until
from torch_infini import AsyncLLM
from torch_infini.serve import ServeSettings, Service

pytest_plugins = ["support.serving_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FIELDS = ["time", "id", "method", "route", "model", "status", "prompt_tokens", "output_tokens", "time_to_first_token"]
FIELDS += ["duration", "finish_reasons"]
SECRET = "a prompt that no log may have"


@pytest.fixture
def service(llm: AsyncLLM) -> Service:
    return service_of(llm, log_requests=True, api_key="the key")


class Lines:
    """The lines of the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def take(self) -> list[dict[str, Any]]:
        texts = [r.getMessage() for r in self._caplog.records if r.name == "torch_infini.requests"]
        self._caplog.clear()
        assert all("\n" not in text and text.isascii() for text in texts)
        assert all(SECRET not in text and "the key" not in text for text in texts)
        found = [json.loads(text) for text in texts]
        assert all(list(line) == FIELDS for line in found)
        return found

    def one(self) -> dict[str, Any]:
        (line,) = self.take()
        return line


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Lines]:
    with caplog.at_level(logging.INFO, "torch_infini.requests"):
        yield Lines(caplog)


KEY = {"authorization": "Bearer the key"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion(stream: bool, service: Service, lines: Lines) -> None:
    body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, "n": 2, "stream": stream, "user": SECRET}
    answer = ask(service, "POST", TEXT, json=body, headers={**KEY, "x-request-id": "my-id"})
    assert answer.status_code == 200
    line = lines.one()
    assert (line["id"], line["method"], line["route"], line["model"]) == ("my-id", "POST", TEXT, MODEL)
    assert (line["status"], line["output_tokens"]) == (200, 10)
    if not stream:
        assert line["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert line["finish_reasons"] == ["length", "length"]
    assert 0 < line["time_to_first_token"] < line["duration"] < 60


def test_several_prompts(service: Service, lines: Lines) -> None:
    body = {"prompt": [[5, 6], [7]], "max_tokens": 3, "ignore_eos": True}
    ask(service, "POST", TEXT, json=body, headers=KEY)
    line = lines.one()
    assert (line["prompt_tokens"], line["output_tokens"], line["finish_reasons"]) == (3, 6, ["length", "length"])


def test_requests_without_the_engine(service: Service, lines: Lines) -> None:
    """Refused ones and other routes; ids and queries are not paths of routes."""
    nothing = {"prompt_tokens": 0, "output_tokens": 0, "time_to_first_token": None, "finish_reasons": []}
    for method, path, more, status, route, model in (
        ("GET", "/health", {}, 200, "/health", None),
        ("POST", CHAT, {"json": {"messages": SECRET}, "headers": KEY}, 400, CHAT, None),
        ("POST", CHAT, {"json": {"messages": []}}, 401, CHAT, None),
        ("GET", f"/v1/models/{MODEL}?secret={SECRET}", {"headers": KEY}, 200, "/v1/models/{name:path}", MODEL),
        ("POST", TEXT, {"json": {"prompt": "a", "model": SECRET}, "headers": KEY}, 404, TEXT, None),
        ("GET", "/no%0Aroute%E2%80%A8é", {"headers": KEY}, 404, "/no\nroute\u2028é", None),
        ("GET", "/" + "x" * 5000, {"headers": KEY}, 404, "/" + "x" * 199, None),
        ("POST", TEXT, {"json": {"prompt": "a", "max_tokens": 0}, "headers": KEY}, 200, TEXT, MODEL),
    ):
        answer = ask(service, method, path, **more)
        line = lines.one()
        assert (answer.status_code, line["status"], line["method"]) == (status, status, method), line
        assert (line["route"], line["model"]) == (route, model) and line.items() >= nothing.items()
        assert line["id"] == answer.headers["x-request-id"]


def test_a_fault(service: Service, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError(SECRET)

    monkeypatch.setattr(service, "encode_chat", fail)
    assert (
        ask(service, "POST", CHAT, json={"messages": [{"role": "user", "content": "a"}]}, headers=KEY).status_code
        == 500
    )
    assert lines.one()["status"] == 500


def test_clients_that_leave(llm: AsyncLLM, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(llm, monkeypatch)
    service = service_of(llm, log_requests=True)
    with serving(service) as url:
        for stream, status in ((True, 200), (False, 499)):
            body = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True, "stream": stream, "n": 2}
            connection = send_raw(url, TEXT, body)
            wait_until(lambda: service.in_flight == 2)
            if stream:
                connection.recv(1)
            connection.close()
            wait_until(lambda: service.in_flight == 0)
            found: list[dict[str, Any]] = []
            wait_until(lambda found=found: found.extend(lines.take()) or found)
            assert (found[0]["status"], found[0]["finish_reasons"]) == (status, ["abort", "abort"])
            assert found[0]["output_tokens"] < 800


def test_requests_at_once(llm: AsyncLLM, lines: Lines) -> None:
    """Each line has the figures of its own request."""
    service = service_of(llm, log_requests=True)

    def send(i: int) -> None:
        body = {"prompt": [5] * (i + 1), "max_tokens": i + 1, "ignore_eos": True}
        httpx.post(f"{url}{TEXT}", json=body, headers={"x-request-id": str(i)}, timeout=60)

    with serving(service) as url:
        threads = [threading.Thread(target=send, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = {line["id"]: line for line in lines.take() if line["route"] == TEXT}
    assert len(found) == 12
    assert all((found[str(i)]["prompt_tokens"], found[str(i)]["output_tokens"]) == (i + 1, i + 1) for i in range(12))


def test_off_by_default(llm: AsyncLLM, lines: Lines) -> None:
    ask(service_of(llm), "GET", "/health")
    assert lines.take() == []
    with pytest.raises(ValueError, match="log_requests must be True or False, got 1"):
        ServeSettings(("a",), log_requests=1)  # type: ignore[arg-type]


@pytest.mark.full
def test_the_command(folder: Path, tmp_path: Path) -> None:
    """The lines are on the error output, at any level, in place of uvicorn's."""
    output = tmp_path / "output"
    command = Command(["serve", "--model", str(folder), "--port", "0", "--log-requests"], output)
    url = command.url()
    httpx.post(f"{url}{TEXT}", json={"prompt": [5], "max_tokens": 2, "ignore_eos": True})
    os.kill(command.process.pid or 0, signal.SIGTERM)
    command.process.join(60)
    assert command.process.exitcode == 0
    text = output.read_text()
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [line["output_tokens"] for line in found if line["route"] == TEXT] == [2]
    assert '"GET /health' not in text and "Application startup complete" in text
