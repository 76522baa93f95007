"""Requests that nobody wrote, to all routes of the server: of its OpenAPI schema by schemathesis, and by our fuzzer."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx

from support.request_fuzzer import SCORES, VALID, Fuzzer, fault_of
from support.serving import ask, save_model, service_of, serving
from support.tool_answers import TEMPLATES
from torch_infini import AsyncLLM
from torch_infini.serve import Service, create_app

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    torch.set_num_threads(1)
    llm = AsyncLLM(save_model(tmp_path_factory.mktemp("model")), max_num_seqs=8)
    tokenizer: Any = llm.engine.tokenizer
    tokenizer.chat_template = TEMPLATES["hermes"]  # which has tools
    # Answers are short where a request does not say how long they may be.
    yield service_of(llm, sampling={"max_tokens": 8})
    llm.close()


def test_what_the_fuzzer_changes_is_valid(service: Service) -> None:
    for path, body in VALID:
        answer = ask(service, "POST", path, json=body)
        assert answer.status_code == (400 if path in SCORES else 200), (path, body, answer.text)


@pytest.mark.parametrize("count", [400, pytest.param(4000, marks=pytest.mark.full)])
def test_random_requests(count: int, service: Service) -> None:
    """No status 500 and nothing that is left behind; make fuzz sends more of them, over a network."""
    fuzzer = Fuzzer(count, ask(service, "GET", "/openapi.json").json())

    async def send() -> Counter[int]:
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        statuses: Counter[int] = Counter()
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
            for _ in range(count):
                sent = fuzzer.request()
                headers = {} if sent.content_type is None else {"content-type": sent.content_type}
                answer = await client.request(sent.method, sent.path, content=sent.content, headers=headers)
                statuses[answer.status_code] += 1
                kind = answer.headers.get("content-type", "")
                fault = fault_of(sent, answer.status_code, kind, answer.text)
                assert fault is None, (fault, sent, answer.text[:500])
        return statuses

    statuses = asyncio.run(send())
    assert min(statuses[status] for status in (200, 400, 404, 405, 415)) > 0, statuses
    assert statuses[200] > 0.1 * count < statuses[400], statuses
    assert service.in_flight == 0 and service.llm.engine.is_idle


@pytest.mark.parametrize("examples", [2, pytest.param(25, marks=pytest.mark.full)])
def test_schemathesis(examples: int, service: Service, tmp_path: Path) -> None:
    """Valid and invalid requests of the schema, for each operation and in sequences."""
    if find_spec("schemathesis") is None:
        pytest.skip("needs schemathesis: pip install 'torch_infini[fuzz]'")
    with serving(service) as url:
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--mode", "all"]
        command += ["--checks", "not_a_server_error", "--max-examples", str(examples), "--seed", "1", "--no-color"]
        command += ["--phases", "fuzzing,stateful" if examples < 5 else "coverage,fuzzing,stateful"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    operations = re.search(r"Tested: +(\d+)", done.stdout)
    assert operations is not None and int(operations[1]) >= 25, done.stdout[-1500:]
    assert service.in_flight == 0 and service.llm.engine.is_idle
