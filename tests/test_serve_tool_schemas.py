"""Tools with random schemas, called by a model with random weights, in every form of calls: the way there and back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

pytest.importorskip("llguidance")
pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from support.json_schemas import Schema, random_schemas
from support.scripted_llm import scripted_llm
from support.serving import service_of
from support.tool_answers import TEMPLATES, both
from support.tool_forms import read, rendered
from torch_infini import AsyncLLM
from torch_infini.serve import Service

pytestmark = pytest.mark.usefixtures("one_thread")
FORMS = [name for name in TEMPLATES if name not in ("think", "begun")]
# These write strings as they are, so that no pattern, length or format holds, and a value that may be a string and
# something else is what it looks like (docs/server.md).
WITHOUT_JSON = ("qwen3_coder", "glm45")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    with scripted_llm(tmp_path_factory.mktemp("model"), TEMPLATES["hermes"]) as made:
        yield made


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm)


def tool_schemas(seed: int) -> Iterator[Schema]:
    """Yield random schemas of parameters: objects that nothing else may be."""
    for schema in random_schemas(100_000, seed):
        if schema.get("type") == "object" and schema["properties"]:
            yield schema


def is_plain(schema: Any) -> bool:
    """Return whether every string may be any, and only where nothing else may be."""
    if isinstance(schema, list):
        return all(map(is_plain, schema))
    if not isinstance(schema, dict):
        return True
    if any(name in schema for name in ("anyOf", "oneOf", "enum", "const", "pattern", "format", "maxLength")):
        return False
    return not isinstance(schema.get("type"), list) and all(map(is_plain, schema.values()))


@pytest.mark.parametrize("count", [4, pytest.param(40, marks=pytest.mark.full)])
@pytest.mark.parametrize("form", FORMS)
def test_calls_of_random_tools(
    form: str, count: int, service: Service, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed deltas join to the whole arguments, which validate; a template that writes the call is read back."""
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", TEMPLATES[form])
    rng, finished = random.Random(form), 0
    schemas = (schema for schema in tool_schemas(count) if form not in WITHOUT_JSON or is_plain(schema))
    for seed in range(count):
        parameters = {f"tool_{at}": next(schemas) for at in range(2)}
        tools = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in parameters.items()
        ]
        choice: Any = rng.choice(["required", {"type": "function", "function": {"name": "tool_1"}}])
        answer = both(service, tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=seed, max_tokens=400)
        if answer["finish_reason"] == "length":
            continue
        finished += 1
        assert answer["finish_reason"] == "tool_calls" and not answer["message"]["content"]
        (call,) = answer["message"]["tool_calls"]
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        assert choice == "required" or name == "tool_1"
        jsonschema.Draft202012Validator(parameters[name]).validate(arguments)
        if "Infinity" in json.dumps(arguments):  # a number like 1e999, where a schema leaves a value open
            continue
        text = rendered(form, [(name, arguments)]).removesuffix("<|start_header_id|>")
        back = read(list(text), form, tools=parameters, thinking="harmony" if form == "harmony" else "think")
        assert [(called, json.loads(given)) for called, given in back.calls] == [(name, arguments)], text
    assert finished >= 0.5 * count
