"""/v1/responses: OpenAI's Responses, by its own client where it is installed, over the answers of a forced model."""

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
from torch_infini.serve.responses.store import ResponseStore

pytestmark = pytest.mark.usefixtures("one_thread")
PATH = "/v1/responses"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}:{{ m.reasoning_content or '' }}|"
    "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ m.tool_call_id }}]{% endfor %}A:"
    "{# <tool_call> </think> #}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": CITY}
ARGUMENTS = '{"city": "Zürich \\"x\\""}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
FULL = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"


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


def post(service: Service, **fields: Any) -> dict[str, Any]:
    answer = ask(service, "POST", PATH, json={"model": MODEL, "input": "hello", **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(service: Service, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "input": "hello", "stream": True, **fields}
    events = []
    for one in ask(service, "POST", PATH, json=body).text.strip().split("\n\n"):
        kind, data = one.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}" and event["sequence_number"] == len(events)
        events.append(event)
    return events


def shape(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one to the next."""
    items = [
        {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in response["output"]
    ]
    return {**response, "id": None, "created_at": None, "output": items}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("Hello, Zürich.", ["message"]),
        (FULL, ["reasoning", "message", "function_call"]),
        (f"{CALL}\n{CALL}", ["function_call", "function_call"]),
        ("", []),
    ],
)
def test_answers(service: Service, say: Say, text: str, kinds: list[str]) -> None:
    say(text)
    response = post(service, tools=[TOOL])
    assert [item["type"] for item in response["output"]] == kinds and response["status"] == "completed"
    assert all(item["status"] == "completed" for item in response["output"])
    for item in response["output"]:
        if item["type"] == "function_call":
            assert (item["name"], item["arguments"]) == ("weather", ARGUMENTS)
    tokens = service.llm.engine.tokenizer(text + "<eos>", add_special_tokens=False)["input_ids"]
    assert response["usage"]["output_tokens"] == len(tokens)
    events = streamed(service, tools=[TOOL])
    assert shape(events[-1]["response"]) == shape(response) and events[-1]["type"] == "response.completed"
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    # The items that the events tell are those of the response.
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(dict(event["part"]))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            items[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            assert {**items[event["output_index"]], "status": "completed"} == event["item"]
            items[event["output_index"]] = event["item"]
    assert items == events[-1]["response"]["output"]


def test_one_call_alone(service: Service, say: Say) -> None:
    """Where the model decides whether to call, an answer without parallel calls ends with its first."""
    say(f"Look. {CALL}\n{CALL}\nand more")
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": False}
    response = post(service, **fields)
    assert [item["type"] for item in response["output"]] == ["message", "function_call"]
    assert response["parallel_tool_calls"] is False
    assert shape(streamed(service, **fields)[-1]["response"]) == shape(response)


def test_limits_and_forms(service: Service, say: Say) -> None:
    say("one two three")
    response = post(service, max_output_tokens=5)
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["content"][0]["text"] == "one t" and response["output"][0]["status"] == "incomplete"
    assert streamed(service, max_output_tokens=5)[-1]["type"] == "response.incomplete"
    say('{"city": "x"}')
    form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    pytest.importorskip("llguidance")
    response = post(service, text={"format": form})
    assert (
        json.loads(response["output"][0]["content"][0]["text"]) == {"city": "x"} and response["text"]["format"] == form
    )


def test_settings_of_other_interfaces_reach_the_engine(
    service: Service, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    """guidellm sends ignore_eos; the others are vLLM's too."""
    say("x")
    sent: list[Any] = []
    make = service.llm.engine.new_request

    def new_request(prompt: Any, params: Any, *more: Any) -> Any:
        sent.append(params)
        return make(prompt, params, *more)

    monkeypatch.setattr(service.llm.engine, "new_request", new_request)
    given = {"top_k": 5, "seed": 3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    assert post(service, max_output_tokens=4, ignore_eos=True, **given)["usage"]["output_tokens"] == 4
    assert {name: getattr(sent[0], name) for name in given} == given and sent[0].ignore_eos


def test_conversations(service: Service, say: Say) -> None:
    """A conversation continued by id, and the same one sent whole, are one prompt."""
    say(FULL)
    first = post(service, tools=[TOOL], instructions="s")
    call = first["output"][2]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "warm"}
    say("It is warm.")
    continued = post(service, tools=[TOOL], instructions="s", previous_response_id=first["id"], input=[result])
    whole = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}, *first["output"], result]
    again = post(service, tools=[TOOL], instructions="s", input=whole)
    assert again["usage"]["input_tokens"] == continued["usage"]["input_tokens"]
    calls = json.dumps(
        [
            {
                "function": {"arguments": json.loads(ARGUMENTS), "name": "weather"},
                "id": call["call_id"],
                "type": "function",
            }
        ],
        ensure_ascii=False,
    )
    tools = json.dumps(
        [{"function": {key: TOOL[key] for key in ("description", "name", "parameters")}, "type": "function"}]
    )
    prompt = f"{tools}[system:|s][user:|hello][assistant:Hm.|Let me see.{calls}][tool:|warm{call['call_id']}]A:"
    tokens = service.llm.engine.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert abs(len(tokens) - continued["usage"]["input_tokens"]) <= 12  # spaces of the template's JSON
    answer = ask(service, "GET", f"{PATH}/{first['id']}")
    assert answer.json() == first
    assert ask(service, "DELETE", f"{PATH}/{first['id']}").json()["deleted"]
    assert ask(service, "GET", f"{PATH}/{first['id']}").status_code == 404
    say("no")
    assert ask(service, "GET", f"{PATH}/{post(service, store=False)['id']}").status_code == 404


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore(most=3)
    for i in range(5):
        store.add({"id": str(i)}, [])
    assert [store.get(str(i)) is not None for i in range(5)] == [False, False, True, True, True]
    monkeypatch.setattr("torch_infini.serve.responses.store.MAX_BYTES", 100)
    store.add({"id": "large"}, [{"content": "x" * 90}])
    assert store.get("large") is None and store.get("4") is None and store._size == 0
    assert not store.remove("large")


NAN = float("nan")
WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"input": None}, "input", "must"),
    ({"input": []}, "input", "must be a text, or from 1 to 4096 items, got 0"),
    (
        {"input": [{"type": "image"}]},
        "input[0].type",
        "must be message, function_call, function_call_output or reasoning",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
        "input[0].content[0].type",
        "must be input_text",
    ),
    ({"input": [{"role": "boss", "content": "x"}]}, "messages[0].role", "must be"),
    ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id", "must be a text, got None"),
    (
        {"previous_response_id": "resp_none"},
        "previous_response_id",
        "must be the id of a response that this server has",
    ),
    (
        {"tools": [{"type": "web_search"}]},
        "tools[0].type",
        "must be function: there are no tools that this server runs",
    ),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].function.name", "must match"),
    ({"tool_choice": "required"}, "tool_choice", "must be null, none or auto where there are no tools"),
    ({"text": {"format": {"type": "xml"}}}, "response_format.type", "must be"),
    ({"text": {"other": 1}}, "text", "must have format"),
    ({"reasoning": {"other": 1}}, "reasoning.other", "must be a field of this request"),
    ({"background": True}, "background", "must be False"),
    ({"top_logprobs": 3}, "top_logprobs", "must be 0 (more is not supported), got 3"),
    ({"truncation": "auto"}, "truncation", "must be 'disabled'"),
    ({"other": 1}, "other", "must be a field of this request"),
    ({"max_output_tokens": 0}, "max_output_tokens", "must be greater than or equal to 1"),
    # What an answer repeats.
    ({"metadata": NAN}, "metadata", "must be a valid dictionary"),
    ({"metadata": {"a": 1}}, "metadata.a", "must be a valid string"),
    ({"metadata": {"a": "\ud800"}}, "metadata.a", "must be text that UTF-8 can encode"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"x": NAN}}]}, "tools", "must have finite numbers"),
    ({"text": {"verbosity": NAN}}, "text", "must have finite numbers"),
    ({"reasoning": {"summary": "\ud800"}}, "reasoning", "text that UTF-8 can encode"),
]


@pytest.mark.parametrize(("fields", "param", "rule"), WRONG)
def test_bodies_that_are_refused(service: Service, fields: dict[str, Any], param: str | None, rule: str) -> None:
    content = json.dumps({"model": MODEL, "input": "x", **fields})
    answer = ask(service, "POST", PATH, content=content, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and rule in error["message"], error
    assert error["param"] == param or (param == "input" and error["param"].startswith("input")), error


def test_the_official_client(service: Service, say: Say) -> None:
    openai = pytest.importorskip("openai")
    say(FULL)
    with serving(service) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        response = client.responses.create(model=MODEL, input="hello", tools=[TOOL])
        assert response.output_text == "Let me see." and response.output[2].arguments == ARGUMENTS
        with client.responses.stream(model=MODEL, input="hello", tools=[TOOL]) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert final.output_text == "Let me see." and kinds[-1] == "response.completed"
        assert client.responses.retrieve(response.id).output_text == "Let me see."
        client.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
