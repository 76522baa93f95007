"""/v1/messages: Anthropic's interface, by its own client where it is installed, over the answers of a forced model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from support.scripted_llm import Say, sayer, scripted_llm
from support.serving import MODEL, ask, service_of, serving
from torch_infini import AsyncLLM
from torch_infini.serve import Service

pytestmark = pytest.mark.usefixtures("one_thread")
PATH = "/v1/messages"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content or '' }}|"
    "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ m.tool_call_id }}]{% endfor %}A:"
    "{# <tool_call> </think> #}{{ '!' if enable_thinking is false }}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": CITY}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich \\"x\\""}}\n</tool_call>'
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    with scripted_llm(tmp_path_factory.mktemp("model"), TEMPLATE) as made:
        yield made


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm)


@pytest.fixture
def say(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Say:
    return sayer(llm, monkeypatch)


def post(service: Service, path: str = PATH, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "max_tokens": 300, "messages": USER, **fields}
    answer = ask(service, "POST", path, json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(service: Service, **fields: Any) -> dict[str, Any]:
    """Join the events of a stream to the message that they tell, checking their order."""
    body = {"model": MODEL, "max_tokens": 300, "messages": USER, "stream": True, **fields}
    text = ask(service, "POST", PATH, json=body).text
    message: dict[str, Any] = {}
    open_block: int | None = None
    pieces: dict[int, str] = {}
    for one in text.strip().split("\n\n"):
        if one.startswith(":"):
            continue
        kind, data = one.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        if event["type"] == "message_start":
            assert not message
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block = event["index"]
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
            block, delta = message["content"][-1], event["delta"]
            if delta["type"] == "input_json_delta":
                pieces[event["index"]] = pieces.get(event["index"], "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            if open_block in pieces:
                message["content"][-1]["input"] = json.loads(pieces[open_block])
            open_block = None
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = event["usage"]
        else:
            assert event["type"] == "message_stop" and open_block is None
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": None, "content": content}


@pytest.mark.parametrize(
    ("text", "content", "reason"),
    [
        ("Hello, Zürich.", [{"type": "text", "text": "Hello, Zürich."}], "end_turn"),
        (
            f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}",
            [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "name": "weather", "input": {"city": 'Zürich "x"'}},
            ],
            "tool_use",
        ),
        (
            f"{CALL}\n{CALL}",
            [{"type": "tool_use", "name": "weather", "input": {"city": 'Zürich "x"'}}] * 2,
            "tool_use",
        ),
        ("<tool_call>\nno call", [{"type": "text", "text": "<tool_call>\nno call"}], "end_turn"),
    ],
)
def test_answers(service: Service, say: Say, text: str, content: list[dict[str, Any]], reason: str) -> None:
    say(text)
    message = post(service, tools=[TOOL])
    assert without_ids(message)["content"] == content and message["stop_reason"] == reason
    assert message["type"] == "message" and message["role"] == "assistant" and message["model"] == MODEL
    usage = message["usage"]
    tokens = service.llm.engine.tokenizer(text + "<eos>", add_special_tokens=False)["input_ids"]
    assert usage["input_tokens"] > 0 and usage["output_tokens"] == len(tokens)
    assert without_ids(streamed(service, tools=[TOOL])) == without_ids(message)
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids)


def test_one_call_alone(service: Service, say: Say) -> None:
    """Where the model decides whether to call, an answer without parallel calls ends with its first."""
    say(f"Look. {CALL}\n{CALL}\nand more")
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    message = post(service, **fields)
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert message["stop_reason"] == "tool_use"
    assert without_ids(streamed(service, **fields)) == without_ids(message)


def test_limits_and_stop_sequences(service: Service, say: Say) -> None:
    say("one two three")
    message = post(service, max_tokens=5)
    assert message["content"][0]["text"] == "one t" and message["stop_reason"] == "max_tokens"
    assert post(service, max_tokens=1_000_000)["stop_reason"] == "end_turn"
    message = post(service, stop_sequences=["two"])
    assert message["content"][0]["text"] == "one "
    assert message["stop_reason"] == "stop_sequence" and message["stop_sequence"] == "two"
    assert without_ids(streamed(service, stop_sequences=["two"])) == without_ids(message)


def test_the_conversation_reaches_the_template(service: Service, say: Say, llm: AsyncLLM) -> None:
    say("ok")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": "x"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "c"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "warm"}]},
                {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    fields = {"system": [{"type": "text", "text": "s"}], "messages": messages, "thinking": {"type": "disabled"}}
    count = post(service, f"{PATH}/count_tokens", **fields, max_tokens=None)
    message = post(service, **fields)
    assert message["usage"]["input_tokens"] == count["input_tokens"]
    call = '[{"function": {"arguments": {"city": "c"}, "name": "weather"}, "id": "t1", "type": "function"}]'
    wanted = f"[system:|s][user:|a][assistant:why|b{call}][tool:|warmt1][tool:|Error: not1][user:|and now?]A:!"
    assert len(llm.engine.tokenizer(wanted, add_special_tokens=False)["input_ids"]) == count["input_tokens"]


def test_an_assistant_text_is_continued(service: Service, say: Say) -> None:
    say("ok")
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    tokens = service.llm.engine.tokenizer("[user:|hello][assistant:|It is", add_special_tokens=False)["input_ids"]
    assert post(service, messages=begun)["usage"]["input_tokens"] == len(tokens)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens must be"),
    ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1, got 0"),
    ({"temperature": 1.5}, "temperature must be less than or equal to 1, got 1.5"),
    ({"model": "other"}, "model must be"),
    ({"messages": []}, "messages must"),
    (
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        "messages[0].content[0].type must be text or",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text must be a text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result"}]}]}, "content[0].type must be text or"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id must be a text, got None"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].function.name must match"),
    ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0]"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name must be given where type is tool"),
    ({"tool_choice": {"type": "any"}}, "tool_choice must be"),
    ({"other": 1}, "other must be a field that this server knows"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config must have"),
]


@pytest.mark.parametrize(("fields", "rule"), WRONG)
def test_bodies_that_are_refused(service: Service, fields: dict[str, Any], rule: str) -> None:
    body = {"model": MODEL, "max_tokens": 30, "messages": USER, **fields}
    answer = ask(service, "POST", PATH, json=body)
    error = answer.json()
    status = 404 if "model" in fields else 400
    kind = "not_found_error" if "model" in fields else "invalid_request_error"
    assert answer.status_code == status and error["type"] == "error", error
    assert error["error"]["type"] == kind and rule in error["error"]["message"], error


def test_a_thread_is_refused_as_clients_expect(service: Service) -> None:
    """Anthropic's client sends all messages again where the details say so."""
    answer = ask(
        service, "POST", PATH, json={"model": MODEL, "max_tokens": 3, "messages": USER, "thread": {"type": "create"}}
    )
    details = answer.json()["error"]["details"]
    assert answer.status_code == 400 and details["error_code"] == "thread_unsupported_request"


def test_keys(llm: AsyncLLM, say: Say) -> None:
    say("ok")
    service = service_of(llm, api_key="secret")
    body = {"model": MODEL, "max_tokens": 3, "messages": USER}
    for headers, status in (({"x-api-key": "secret"}, 200), ({"x-api-key": "other"}, 401), ({}, 401)):
        answer = ask(service, "POST", PATH, json=body, headers=headers)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["type"] == "authentication_error"


def test_the_official_client(service: Service, say: Say) -> None:
    anthropic = pytest.importorskip("anthropic")
    say(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}")
    with serving(service) as url:
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        fields: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "messages": USER, "tools": [TOOL]}
        message = client.messages.create(**fields)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"city": 'Zürich "x"'} and message.stop_reason == "tool_use"
        with client.messages.stream(**fields) as stream:
            text = "".join(stream.text_stream)
            final = stream.get_final_message()
        assert text == "Let me see." and final.content[2].input == message.content[2].input
        assert final.usage.output_tokens == message.usage.output_tokens
        assert client.messages.count_tokens(model=MODEL, messages=USER, tools=[TOOL]).input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="type must be text or tool_result or image here"):
            client.messages.create(**{**fields, "messages": [{"role": "user", "content": [{"type": "document"}]}]})
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**fields, "model": "other"})
