"""Random JSON schemas through the server: every answer that ends by itself validates; what cannot be served is 400."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")
pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx
import jsonschema

from support.json_schemas import NOT_BUILT, Schema, random_schemas
from support.serving import events_of, save_model, service_of
from torch_infini import AsyncLLM
from torch_infini.serve import Service, create_app

pytestmark = pytest.mark.usefixtures("one_thread")
AT_ONCE, MAX_TOKENS = 32, 300


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    torch.set_num_threads(1)
    llm = AsyncLLM(save_model(tmp_path_factory.mktemp("model")), max_num_seqs=16)
    yield service_of(llm)
    llm.close()


def request_of(schema: Schema, seed: int) -> tuple[str, dict[str, Any]]:
    """Return a route and a body that ask for the schema: both routes and fields, streamed or not, take turns."""
    if seed % 2:
        form: dict[str, Any] = {"structured_outputs": {"json": schema if seed % 4 == 1 else json.dumps(schema)}}
    else:
        named = {"name": "it", "schema": schema, "strict": True}
        form = {"response_format": {"type": "json_schema", "json_schema": named}}
    body = {"max_tokens": MAX_TOKENS, "seed": seed, "stream": seed % 3 == 0, **form}
    if seed % 5 < 3:
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **body}
    return "/v1/completions", {"prompt": "x", **body}


def text_and_end(answer: httpx.Response) -> tuple[str, str | None]:
    """Return the text of an answer, streamed or whole, and why it ended."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        choices = answer.json()["choices"]
    else:
        choices = [event["choices"][0] for event in events_of(answer.text) if event["choices"]]
    parts = [choice.get("message", choice.get("delta", choice)) for choice in choices]
    text = "".join(part.get("content") or part.get("text") or "" for part in parts)
    return text, choices[-1]["finish_reason"]


def ask_all(service: Service, requests: list[tuple[str, dict[str, Any]]]) -> list[httpx.Response]:
    """Send requests, AT_ONCE of them together, so that sequences with different forms share their steps."""

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server", timeout=120) as client:
            free = asyncio.Semaphore(AT_ONCE)

            async def one(path: str, body: dict[str, Any]) -> httpx.Response:
                async with free:
                    return await client.post(path, json=body)

            return await asyncio.gather(*(one(*request) for request in requests))

    return asyncio.run(send())


def validate(text: str, schema: Schema) -> None:
    """Raise ValidationError unless the text is JSON of the schema, formats included."""
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize("count", [30, pytest.param(300, marks=pytest.mark.full)])
def test_every_finished_answer_validates(count: int, service: Service) -> None:
    schemas = list(random_schemas(count, seed=count))
    answers = ask_all(service, [request_of(schema, seed) for seed, schema in enumerate(schemas)])
    finished = 0
    for schema, answer in zip(schemas, answers, strict=True):
        assert answer.status_code == 200, (schema, answer.text)
        text, end = text_and_end(answer)
        assert end in ("stop", "length"), (schema, text, end)
        if end == "stop":
            validate(text, schema)
            finished += 1
    assert finished > 0.8 * count
    assert service.in_flight == 0 and service.llm.engine.is_idle


def test_schemas_that_cannot_be_served(service: Service) -> None:
    """No keyword is ignored: one sentence says which it is, in a field of the request."""
    requests = [request_of(schema, seed) for schema in NOT_BUILT for seed in (0, 1, 4)]
    for (_, body), answer in zip(requests, ask_all(service, requests), strict=True):
        error = answer.json()["error"]
        param = "structured_outputs.json" if "structured_outputs" in body else "response_format.json_schema.schema"
        assert (answer.status_code, error["param"]) == (400, param), (body, answer.text)
        assert error["message"].startswith(f"{param} must be a form that texts can have, got an error: ")
        assert len(error["message"]) < 400 and "\n" not in error["message"]
