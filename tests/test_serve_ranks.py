"""Servers whose model is shared by two ranks, as programs: their texts, a rank that is killed, what SIGTERM leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx

from support.serving import Command, wait_until
from torch_infini import LLM, SamplingParams

pytest_plugins = ["support.serving_fixtures"]
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="the ranks meet in /dev/shm"),
]
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello world"}]
BODY = {"messages": MESSAGES, "temperature": 0, "stream": True, "ignore_eos": True}
NEW = 480
QUICKLY = 5.0  # seconds, on a busy machine: nothing may wait for INFINI_CCL_TIMEOUT, 300 s


@pytest.fixture(scope="module")
def want(folder: Path) -> str:
    """The text of one rank."""
    one = LLM(folder)
    params = SamplingParams.greedy(max_tokens=NEW, ignore_eos=True)
    return one.generate([one.chat_prompt(MESSAGES)], params)[0].text


def arguments(program: str, folder: Path) -> list[str]:
    if program == "serve":
        return ["serve", "--model", str(folder), "--port", "0", "-tp", "2", "--dtype", "float32"]
    flags = ["--model_path", str(folder), "--port", "0", "--cpu", "--tp", "2", "--dtype", "float32"]
    return ["run", "-m", "infinilm.server.inference_server", *flags, "--num_blocks", "64"]


@pytest.fixture
def command(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Iterator[Command]:
    made = Command(arguments(request.param, folder), tmp_path / "output")
    yield made
    made.process.kill()


def below(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found += [child, *below(child)]
    return found


def is_there(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def text(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


# Both programs run the same server behind their arguments: each is started once.
@pytest.mark.full
@pytest.mark.parametrize("command", ["infinilm.server.inference_server"], indirect=True)
def test_sigterm_in_a_stream(command: Command, want: str) -> None:
    """The text is that of one rank, in full; the exit status is 0, and no process stays."""
    url = command.url()
    pids = below(command.process.pid or 0)
    assert len(pids) == 2, "there must be a fork server and a worker"
    with httpx.stream("POST", url + CHAT, json={**BODY, "max_tokens": NEW}, timeout=60) as answer:
        stream = events(answer)
        got = text(next(stream))
        os.kill(command.process.pid or 0, signal.SIGTERM)
        got += "".join(map(text, stream))
    command.process.join(30)
    assert command.process.exitcode == 0, command.output.read_text()
    wait_until(lambda: not any(map(is_there, pids)), QUICKLY)
    assert got == want
    assert "Traceback" not in command.output.read_text(), command.output.read_text()


@pytest.mark.full
@pytest.mark.parametrize("command", ["serve"], indirect=True)
def test_a_rank_that_is_killed_in_a_stream(command: Command, want: str) -> None:
    """The stream ends with an error, later requests get 503, at once; SIGTERM still ends all in order."""
    url = command.url()
    server, worker = below(command.process.pid or 0)
    with httpx.stream("POST", url + CHAT, json={**BODY, "max_tokens": NEW}, timeout=60) as answer:
        stream = events(answer)
        got = text(next(stream))
        os.kill(worker, signal.SIGKILL)
        start = time.monotonic()
        *more, last = stream
        assert want.startswith(got + "".join(map(text, more)))
        assert last["error"]["type"] == "server_error", last
    for response in (httpx.get(url + "/health"), httpx.post(url + CHAT, json=BODY), httpx.post(url + CHAT, json=BODY)):
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_dead"
    assert time.monotonic() - start < QUICKLY
    os.kill(command.process.pid or 0, signal.SIGTERM)
    command.process.join(30)
    assert command.process.exitcode == 0 and time.monotonic() - start < 2 * QUICKLY, command.output.read_text()
    wait_until(lambda: not is_there(server), QUICKLY)
    assert "rank 1" in command.output.read_text()
