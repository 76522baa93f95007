"""Servers for the tests of torch_infini.serve: a small model, an app without a network, a server on a free port."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import torch

from torch_infini import AsyncLLM
from torch_infini.__main__ import main
from torch_infini.serve import Server, ServeSettings, Service, bind, create_app
from torch_infini.serve.lifecycle import uvicorn_config
from torch_infini.testing.checkpoints import random_model, save_tokenizer
from torch_infini.testing.processes import forking

MODEL = "small"


def save_model(folder: Path) -> Path:
    """Save a model of 320 tokens and 512 positions with a byte-level tokenizer and a chat template."""
    model = random_model("llama")
    model.save_pretrained(folder)
    save_tokenizer(folder, model.config.vocab_size)
    return folder


def service_of(llm: AsyncLLM, **settings: Any) -> Service:
    return Service(llm, ServeSettings(**{"model_names": (MODEL,), **settings}))


def ask(service: Service, method: str, path: str, **more: Any) -> httpx.Response:
    """Send one request to a service's app, without a network."""
    return ask_app(create_app(service), method, path, **more)


def ask_app(app: Any, method: str, path: str, **more: Any) -> httpx.Response:
    """Send one request to an app, without a network."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            return await client.request(method, path, **more)

    return asyncio.run(send())


def slow_down(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps take 10 ms."""
    run = llm.engine._runner.run

    def run_slowly(*args: Any) -> Any:
        time.sleep(0.01)
        return run(*args)

    monkeypatch.setattr(llm.engine._runner, "run", run_slowly)


SERVERS: dict[Service, Server] = {}


def server_of(service: Service) -> Server:
    """Return the server that serves a service."""
    return SERVERS[service]


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Serve on a free port, from a thread; gives the URL."""
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        server = SERVERS[service] = Server(service, uvicorn_config(create_app(service), service.settings, "error"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join()


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def send_raw(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and return its connection, from which nothing has been read."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: server\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((url.split("/")[2].split(":")[0], int(url.rpartition(":")[2])), timeout=20)
    connection.sendall(head.encode() + data)
    return connection


def events_of(text: str) -> list[Any]:
    """Return the events of a stream, which must end with [DONE]."""
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks[-1] == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]


def run_command(arguments: list[str], output: str) -> None:
    """Run a command in this process, whose output goes to a file."""
    with open(output, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    os._exit(main(arguments))


class Command:
    """A command in a process of its own."""

    def __init__(self, arguments: list[str], output: Path) -> None:
        self.output = output
        self.process = forking().Process(target=run_command, args=(arguments, str(output)))
        self.process.start()

    def url(self) -> str:
        wait_until(lambda: self.output.exists() and "serving " in self.output.read_text(), 60)
        url = re.search(r"serving \S+ at (http\S+)", self.output.read_text())
        assert url
        wait_until(lambda: responds(url[1]), 60)
        return url[1]


def responds(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
