"""infinilm.server.inference_server: the flags, defaults and routes that InfiniLM's callers know."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx

from support.serving import Command, ask_app, events_of, save_model
from torch_infini import LLM, AsyncLLM, SamplingParams
from torch_infini.compat.infinilm.server.inference_server import InferenceServer, main, parser

pytestmark = pytest.mark.usefixtures("one_thread")
MESSAGES = [{"role": "user", "content": "hello world"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(folder: Path) -> InferenceServer:
    return InferenceServer(str(folder), "cpu", "float32", max_tokens=12, num_blocks=64)


@pytest.fixture(scope="module")
def llm(server: InferenceServer) -> Iterator[AsyncLLM]:
    torch.set_num_threads(1)
    made = AsyncLLM(**server.config.arguments())
    yield made
    made.close()


def test_answers_are_those_of_llm(folder: Path, server: InferenceServer, llm: AsyncLLM) -> None:
    """By default greedy, as top_k=1 says; a request's own settings count; any model's name is taken."""
    app = server.create_app(llm)
    other = LLM(folder, dtype="float32")
    prompt = other.chat_prompt(MESSAGES)
    cases: list[tuple[dict[str, Any], SamplingParams]] = [
        ({}, SamplingParams(top_k=1, max_tokens=12)),
        ({"model": "any", "max_tokens": 5}, SamplingParams(top_k=1, max_tokens=5)),
        ({"top_k": 0, "top_p": 1, "seed": 3}, SamplingParams(seed=3, max_tokens=12)),
        (
            {"top_k": 0, "seed": 3, "temperature": 2.0},
            SamplingParams(temperature=2.0, top_p=0.8, seed=3, max_tokens=12),
        ),
    ]
    texts = set()
    for fields, params in cases:
        want = other.generate([prompt], params)[0].text
        texts.add(want)
        for path in ("/chat/completions", "/v1/chat/completions"):
            body = {"messages": MESSAGES, **fields}
            answer = ask_app(app, "POST", path, json=body).json()
            assert answer["choices"][0]["message"]["content"] == want, (path, fields)
            assert answer["model"] == folder.name
            events = events_of(ask_app(app, "POST", path, json={**body, "stream": True}).text)
            assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == want
    assert len(texts) == len(cases)
    assert ask_app(app, "GET", "/health").json() == {"status": "ok"}
    assert ask_app(app, "GET", "/v1/models").json()["data"][0]["id"] == folder.name
    assert ask_app(app, "POST", "/chat/completions", json={"messages": []}).status_code == 400


def test_flags() -> None:
    """Both spellings, and that each arrives where it belongs."""
    line = "--model_path M --device cpu --tp 2 --max_tokens 9 --max_batch_size 8 --cache_type static --num_blocks 7 "
    line += (
        "--block_size 32 --max_cache_len 99 --temperature 0.5 --top_p 0.7 --top_k 3 --host h --port 81 --dtype float32 "
    )
    line += "--log_level INFO --enable_graph --api_key k --max_queue 4 --drain 2"
    for spelled in (line, re.sub(r"--\w+", lambda m: m[0].replace("_", "-"), line)):
        given = vars(parser().parse_args(spelled.split()))
        server = InferenceServer(**given)
        config = server.config
        assert (config.model_path, config.device, config.tensor_parallel_size) == ("M", "cpu", 2)
        assert (config.max_tokens, config.max_batch_size, config.cache_type) == (9, 8, "static")
        assert (config.num_blocks, config.block_size, config.max_cache_len) == (7, 32, 99)
        assert dict(server.settings.sampling) == {"temperature": 0.5, "top_p": 0.7, "top_k": 3, "max_tokens": 9}
        assert (server.settings.api_key, server.settings.max_queue, server.settings.drain) == ("k", 4, 2)
        assert (given["host"], given["port"], given["log_level"], config.dtype) == ("h", 81, "info", "float32")
    assert vars(parser().parse_args(["--model_path", "M", "--nvidia"]))["device"] == "nvidia"


def test_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, sentence in (
        (["--model_path", str(tmp_path), "--port", "0"], "config"),
        (["--model_path", "M", "--top_p", "2"], "top_p must"),
        (["--model_path", "M", "--port", "70000"], "port must"),
        (["--model_path", "M", "--max_batch_size", "0"], "max_batch_size must"),
        ([], "model_path"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert sentence in capsys.readouterr().err
    with pytest.raises(ValueError, match="further arguments must be of .*, got max_quue"):
        InferenceServer("M", max_quue=3)


@pytest.mark.full
def test_program(folder: Path, tmp_path: Path) -> None:
    """As a script's author starts it, with a client that streams; SIGTERM ends it with status 0."""
    arguments = ["run", "-m", "infinilm.server.inference_server", "--model_path", str(folder), "--port", "0"]
    command = Command([*arguments, "--cpu", "--dtype", "float32", "--num_blocks", "64"], tmp_path / "output")
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 6}
    with httpx.stream("POST", f"{command.url()}/chat/completions", json=body, timeout=30) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    want = LLM(folder).generate([LLM(folder).chat_prompt(MESSAGES)], SamplingParams.greedy(max_tokens=6))[0].text
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == want
    assert command.process.pid
    os.kill(command.process.pid, signal.SIGTERM)
    command.process.join(20)
    assert command.process.exitcode == 0, command.output.read_text()
