"""Tools and reasoning over HTTP: what a model writes, forced token by token, as clients of OpenAI's server get it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

import httpx2 as httpx

from support.scripted_llm import Say, sayer, scripted_llm
from support.serving import MODEL, ask, service_of, serving
from support.tool_answers import (
    CHAT,
    HEAD,
    MESSAGES,
    TEMPLATES,
    TOOLS,
    WEATHER,
    both,
    joined,
    streamed,
    summed_up,
    whole,
)
from torch_infini import AsyncLLM
from torch_infini.__main__ import main
from torch_infini.serve import ServeSettings, Service

pytestmark = pytest.mark.usefixtures("one_thread")
ARGUMENTS = '{"city": "Zürich \\"☕\\" {}", "days": 3}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
# (template, text, content, calls): two calls where the form has several.
ANSWERS = [
    ("hermes", f"Let me see.\n{CALL}\n{NOW}", "Let me see.", 2),
    (
        "qwen3_coder",
        '<tool_call>\n<function=weather>\n<parameter=city>\nZürich "☕" {}\n</parameter>\n<parameter=days>\n3\n'
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        None,
        2,
    ),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}', None, 1),
    ("mistral", f"Yes[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}", "Yes", 2),
    (
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
        2,
    ),
    (
        "glm45",
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich "☕" {}</arg_value>\n<arg_key>days</arg_key>\n'
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        None,
        2,
    ),
    ("harmony", f"<|channel|>commentary to=functions.weather json<|message|>{ARGUMENTS}", None, 1),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    with scripted_llm(tmp_path_factory.mktemp("model"), TEMPLATES["hermes"]) as made:
        yield made


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm)


@pytest.fixture
def say(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Make the model write a text, and set its chat template."""
    force = sayer(llm, monkeypatch)
    return lambda text, template="hermes": force(text, TEMPLATES.get(template, template))


@pytest.mark.parametrize("template, text, content, number", ANSWERS, ids=[answer[0] for answer in ANSWERS])
def test_calls_of_each_form(
    template: str, text: str, content: str | None, number: int, service: Service, say: Say
) -> None:
    """Chosen by the chat template; the markers that are special tokens are in no content."""
    say(text, template)
    choice = both(service)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == content
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "now"][:number]
    assert json.loads(calls[0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    assert [call["function"]["arguments"] for call in calls[1:]] == ["{}"] * (number - 1)
    assert len({call["id"] for call in calls}) == number
    alone = both(service, parallel_tool_calls=False)["message"]["tool_calls"]
    assert [call["function"] for call in alone] == [calls[0]["function"]]
    # Without tools the same text has no calls.
    plain = whole(service, tools=None)["choices"][0]
    assert "tool_calls" not in plain["message"] and plain["finish_reason"] == "stop"


def test_the_official_client(service: Service, say: Say) -> None:
    """Its types, strictly, and its own way of joining a stream."""
    openai = pytest.importorskip("openai")
    say(f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{NOW}", "think")
    ask_for: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto"}
    with serving(service) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", _strict_response_validation=True)
        answer = client.chat.completions.create(**ask_for)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.reasoning_content == "hm"
        assert [(call.type, call.function.name) for call in choice.message.tool_calls] == [
            ("function", "weather"),
            ("function", "now"),
        ]
        assert all(call.id.startswith("call_") for call in choice.message.tool_calls)
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("[\nhm\n]")  # a marker is a token
        lenient = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        with lenient.chat.completions.stream(**ask_for) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.message.content == choice.message.content == "Let me see."
        assert final.finish_reason == "tool_calls"
        want = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert [(call.function.name, call.function.arguments) for call in final.message.tool_calls] == want
        client.close(), lenient.close()


def test_pieces_of_arguments(service: Service, say: Say) -> None:
    """Deltas come as the tokens do, where the client reads as fast."""
    say(CALL)
    deltas = [event["choices"][0]["delta"] for event in streamed(service) if event["choices"]]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None} and deltas[-1] == {}
    assert set(deltas[1]) == {"tool_calls"} and deltas[1]["tool_calls"][0]["id"].startswith("call_")
    assert all(set(delta) == {"tool_calls"} for delta in deltas[1:-1])


def test_reasoning(service: Service, say: Say) -> None:
    say("<think>\nso be it\n</think>\n\nYes. ", "think")
    choice = both(service, tools=None)
    assert choice["message"] == {
        "role": "assistant",
        "content": "Yes. ",
        "refusal": None,
        "reasoning_content": "so be it",
    }
    say(f"so be it\n</think>\n\n{CALL}", "begun")
    choice = both(service)
    assert choice["message"]["reasoning_content"] == "so be it" and choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    choice = both(service, max_tokens=5)
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "so be"
    assert whole(service, max_tokens=5)["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    say("<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Yes.", "harmony")
    choice = both(service, tools=None)
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("so", "Yes.")
    off = service_of(service.llm, reasoning_parser="none")
    say("<think>so</think>Yes.", "think")
    assert both(off, tools=None)["message"]["content"] == "<think>so</think>Yes."


def test_several_samples_log_probabilities_and_ends(service: Service, say: Say) -> None:
    say(f"é {CALL} ")
    fields: dict[str, Any] = {"n": 3, "logprobs": True, "top_logprobs": 1}
    answer, events = whole(service, **fields), streamed(service, **fields)
    ids = {call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 3
    for choice in answer["choices"]:
        assert joined(events, choice["index"]) == summed_up(choice)
        parts = [one["logprobs"] for event in events for one in event["choices"] if one["index"] == choice["index"]]
        assert [entry for part in parts if part for entry in part["content"]] == choice["logprobs"]["content"]
    # Cut off within a call: what there is of its arguments, and the reason why.
    cut = both(service, max_tokens=50)
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city')
    # Cut off before it is one: all of the text, in which é is two tokens and the marker is one.
    cut = both(service, max_tokens=13)
    assert cut["finish_reason"] == "length" and cut["message"]["content"] == 'é <tool_call>\n{"name":'
    say('<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>')
    choice = both(service)
    assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
    assert choice["message"]["content"].startswith('<tool_call>\n{"name": "unknown"')


def test_what_a_template_gets(service: Service, llm: AsyncLLM, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools with their parameters, earlier calls with arguments as objects, results, reasoning."""
    template = (
        "{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}"
        "{{ tools[1].function.parameters }}"
        "{% for m in messages %}|{{ m.role }}:{{ m.content }}({{ m.reasoning_content }})"
        "{% for c in m.tool_calls or [] %}"
        "<{{ c.id }} {{ c.function.name }} {{ c.function.arguments.city }}>{% endfor %}"
        "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{% endfor %}"
    )
    seen = []
    encode = llm.chat_prompt
    monkeypatch.setattr(llm, "chat_prompt", lambda *args: seen.append(encode(*args)) or seen[-1])
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "warm", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "It is warm.", "reasoning": "ah", "reasoning_content": None},
        {"role": "user", "content": "thanks"},
    ]
    say("x", template + "{# <tool_call> #}")
    whole(service, messages=messages)
    assert llm.engine.tokenizer.decode(seen[-1]) == (
        "weather,now{'type': 'object', 'properties': {}}|user:hello()|assistant:(hm)<call_1 weather Rom>"
        "|tool:warm()[call_1]|assistant:It is warm.(ah)|user:thanks()"
    )
    # Mistral's templates take ids of nine letters and digits alone.
    say("x", template + "{# [TOOL_CALLS] #}")
    whole(service, messages=messages)
    text = llm.engine.tokenizer.decode(seen[-1])
    short = text.split("[")[1].split("]")[0]
    assert len(short) == 9 and short.isalnum() and f"<{short} weather" in text
    # DeepSeek's own join arguments to other texts, also where a request has no tools.
    for arguments in ("c.function['arguments']", "c.function['arguments'] | tojson"):
        joining = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'x' + A }}{% endfor %}{% endfor %}"
        say("x", joining.replace("A", arguments) + "{# <｜tool▁calls▁begin｜> <｜tool▁sep｜> #}")
        answer = ask(service, "POST", CHAT, json={"messages": messages})
        assert answer.status_code == 200, answer.text
        assert llm.engine.tokenizer.decode(seen[-1]) == 'x{"city": "Rom"}'


def test_tokens_of_tools(service: Service, say: Say) -> None:
    say("x")
    tokens = ask(service, "POST", "/tokenize", json={"messages": MESSAGES, "tools": TOOLS}).json()["count"]
    assert whole(service)["usage"]["prompt_tokens"] == tokens
    assert ask(service, "POST", "/tokenize", json={"messages": MESSAGES}).json()["count"] < tokens
    check_error(ask(service, "POST", "/tokenize", json={"messages": MESSAGES, "tools": [{}]}), "tools[0].type")


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [WEATHER, {"type": "function", "function": {"name": "f", **fields}}]}


def deep(levels: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": deep(levels - 1)} if levels else {}}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": 5}, "tools"),
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{**WEATHER, "other": 1}]}, "tools[0].other"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": [WEATHER] * 129}, "tools"),
    ({"tools": [None] * 500_000}, "tools"),
    (function(name=""), "tools[1].function.name"),
    (function(name="a b"), "tools[1].function.name"),
    (function(name="a\n"), "tools[1].function.name"),
    (function(name="a" * 65), "tools[1].function.name"),
    (function(name=5), "tools[1].function.name"),
    (function(description=5), "tools[1].function.description"),
    (function(description="\ud800"), "tools[1].function.description"),
    (function(description="a" * (1 << 20)), "tools"),
    (function(strict="yes"), "tools[1].function.strict"),
    (function(other=1), "tools[1].function.other"),
    (function(parameters=[]), "tools[1].function.parameters"),
    (function(parameters="{}"), "tools[1].function.parameters"),
    (function(parameters={"type": "string"}), "tools[1].function.parameters"),
    (function(parameters={"properties": []}), "tools[1].function.parameters"),
    (function(parameters={"properties": {"a": 5}}), "tools[1].function.parameters"),
    (function(parameters={"required": "a"}), "tools[1].function.parameters"),
    (function(parameters={"required": [5]}), "tools[1].function.parameters"),
    (function(parameters={"title": "\ud800"}), "tools[1].function.parameters"),
    (function(parameters={"title": "a" * (1 << 20)}), "tools"),
    (function(parameters=deep(40)), "tools[1].function.parameters"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": "now"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"json_object": True}}, "tool_choice"),
    ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages[0].reasoning_content"),
    ({"messages": [{"role": "assistant", "reasoning_content": 5}]}, "messages[0].reasoning_content"),
    ({"messages": [{"role": "assistant", "reasoning": "\ud800"}]}, "messages[0].reasoning"),
]


@pytest.mark.parametrize("fields, param", BAD, ids=[f"{i}-{param}" for i, (_, param) in enumerate(BAD)])
def test_bad_fields(fields: dict[str, Any], param: str, service: Service) -> None:
    content = json.dumps({"messages": MESSAGES, "max_tokens": 1, **fields}).encode()
    headers = {"content-type": "application/json"}
    answer = ask(service, "POST", CHAT, content=content, headers=headers)
    check_error(answer, param)


def check_error(answer: httpx.Response, param: str, *texts: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500 and all(text in error["message"] for text in texts), error["message"]


def test_models_without_tools(service: Service, say: Say) -> None:
    """One sentence that says what to do; tools that must not be called are no matter."""
    body = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 1}
    say("x", "{% for m in messages %}{{ m.content }}{% endfor %}")
    check_error(ask(service, "POST", CHAT, json=body), "tools", "chat template has none", "--chat-template")
    assert ask(service, "POST", CHAT, json={**body, "tool_choice": "none"}).status_code == 200
    say("x", HEAD)
    check_error(ask(service, "POST", CHAT, json=body), "tools", "--tool-parser", "hermes", "qwen3_coder")
    say("x", "hermes")
    off = service_of(service.llm, tool_parser="none")
    check_error(ask(off, "POST", CHAT, json=body), "tools", "--tool-parser none")
    say(CALL, HEAD)
    named = service_of(service.llm, tool_parser="hermes")
    assert both(named)["finish_reason"] == "tool_calls"


def test_templates_by_name(service: Service, say: Say) -> None:
    """Of several templates, that for tools decides."""
    say(CALL)
    service.llm.engine.tokenizer.chat_template = {"default": HEAD, "tool_use": TEMPLATES["hermes"]}
    assert both(service)["finish_reason"] == "tool_calls"


STRICT = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}
PICKS = [
    {"type": "function", "function": {"name": name, "parameters": STRICT, "strict": True}}
    for name in ("pick", "choose")
]


@pytest.mark.parametrize("template", [*(answer[0] for answer in ANSWERS), "think", "begun"])
def test_a_call_that_must_be(template: str, service: Service, say: Say) -> None:
    """Whatever the model would write: the grammar leaves it calls alone, and reasoning before them."""
    pytest.importorskip("llguidance")
    # Of these the grammar takes the reasoning and the channel.
    begun = {"think": "<think>no</think>No.", "begun": "no</think>No.", "harmony": "<|channel|>commentary|final"}
    say(begun.get(template, "No, thank you."), template)
    fields: dict[str, Any] = {"tools": PICKS, "temperature": 0}
    for choice, names in (("required", {"pick", "choose"}), (named("choose"), {"choose"})):
        answer = both(service, **fields, tool_choice=choice, parallel_tool_calls=False)
        (call,) = answer["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert answer["finish_reason"] == "tool_calls" and not answer["message"]["content"]
        assert call["function"]["name"] in names
        assert set(arguments) == {"kind", "sure"} and arguments["kind"] in "ab" and type(arguments["sure"]) is bool
    assert answer["message"].get("reasoning_content") == ("no" if template in ("think", "begun") else None)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_what_a_model_writes_of_calls_that_must_be(service: Service, say: Say) -> None:
    """Where the grammar permits it, it is what the model would have written anyway."""
    pytest.importorskip("llguidance")
    first, second = (CALL.replace(ARGUMENTS, text).replace("weather", "pick") for text in PICKED)
    say(f"<think>\nso\n</think>\n\n{first}\n{second}", "think")
    message = both(service, tools=PICKS, tool_choice="required")["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == PICKED
    assert message["reasoning_content"] == "so" and message["content"] is None
    cut = both(service, tools=PICKS, tool_choice="required", max_tokens=60)
    assert cut["finish_reason"] == "length"


PICKED = ['{"kind": "a", "sure": true}', '{"kind": "b", "sure": false}']


@pytest.mark.parametrize("template", ["think", "begun", "harmony", "hermes"])
def test_texts_of_a_form_come_after_reasoning(template: str, service: Service, say: Say) -> None:
    """JSON and choices; regular expressions have the answer for themselves."""
    pytest.importorskip("llguidance")
    begin = {"think": "<think>\nso\n</think>\n\n", "begun": "so\n</think>\n\n"}.get(template, "")
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": STRICT}}
    say(begin + PICKED[0], template)
    for fields in ({"response_format": schema}, {"response_format": {"type": "json_object"}}):
        message = both(service, tools=None, **fields)["message"]
        assert message["content"] == PICKED[0] and message.get("reasoning_content") == ("so" if begin else None)
    say(begin + "yes", template)
    message = both(service, tools=TOOLS, structured_outputs={"choice": ["yes", "no"]})["message"]
    assert message["content"] == "yes" and message.get("reasoning_content") == ("so" if begin else None)
    say("yes", template)
    message = both(service, tools=None, structured_outputs={"regex": "yes|no"})["message"]
    assert message == {"role": "assistant", "content": "yes", "refusal": None}


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


@pytest.mark.parametrize("template", [*(answer[0] for answer in ANSWERS[:-1]), "think", "begun"])
def test_an_answer_is_a_text_of_a_form_or_calls(template: str, service: Service, say: Say) -> None:
    """Agents ask for both: the model calls tools, and its last answer is JSON."""
    pytest.importorskip("llguidance")
    begin = {"think": "<think>\nso\n</think>\n\n", "begun": "so\n</think>\n\n"}.get(template, "")
    texts = {name: (text, number) for name, text, _, number in ANSWERS}
    text, number = texts.get(template, (f"{CALL}\n{NOW}", 2))
    calls = text[text.index(next(one for one in ("<", "[T") if one in text)) :].removeprefix("<|python_tag|>")
    tools = [{"type": "function", "function": {"name": "now"}}, {**WEATHER}]
    say(begin + calls, template)
    answer = both(service, tools=tools, **of_schema(STRICT))
    made = [call["function"] for call in answer["message"]["tool_calls"]]
    assert [call["name"] for call in made] == ["weather", "now"][:number] and answer["finish_reason"] == "tool_calls"
    assert json.loads(made[0]["arguments"]) == json.loads(ARGUMENTS)
    assert not answer["message"]["content"] and answer["message"].get("reasoning_content") == ("so" if begin else None)
    for written in (PICKED[0], '{"kind": "b", "sure": true}'):
        say(begin + written, template)
        answer = both(service, tools=tools, **of_schema(STRICT))
        assert answer["message"]["content"] == written and answer["finish_reason"] == "stop"
        assert "tool_calls" not in answer["message"]
    # Whatever else the model would write.
    say(begin + "No.", template)
    answer = both(service, tools=PICKS, seed=1, parallel_tool_calls=False, **of_schema(STRICT))
    call = answer["message"].get("tool_calls", [{"function": {"arguments": answer["message"]["content"]}}])
    assert set(json.loads(call[0]["function"]["arguments"])) == {"kind", "sure"}


def test_a_form_that_is_wrong_beside_tools(service: Service, say: Say) -> None:
    """The error is that of the form, or of the tools."""
    pytest.importorskip("llguidance")
    say("x")
    nothing = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    body = {"messages": MESSAGES, "max_tokens": 4}
    check_error(
        ask(service, "POST", CHAT, json={**body, "tools": PICKS, **of_schema(nothing)}),
        "response_format.json_schema.schema",
    )
    wrong = function(name="f", parameters=nothing)
    check_error(ask(service, "POST", CHAT, json={**body, **wrong, **of_schema(STRICT)}), "tools")


def test_a_call_that_must_be_has_no_text_of_a_form(service: Service, say: Say) -> None:
    """Clients send the schema of the answer as a tool's and as the text's."""
    pytest.importorskip("llguidance")
    say(CALL.replace(ARGUMENTS, PICKED[0]).replace("weather", "pick"))
    answer = both(service, tools=PICKS, tool_choice=named("pick"), **of_schema(STRICT))
    assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == [PICKED[0]]


def test_calls_that_cannot_be(service: Service, say: Say) -> None:
    pytest.importorskip("llguidance")
    say("x")
    body = {"messages": MESSAGES, "tools": PICKS, "tool_choice": "required", "max_tokens": 4}
    for fields, param in (
        ({"grammar": 'root ::= "a"'}, "tool_choice"),
        ({"structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"ignore_eos": True}, "ignore_eos"),
        (function(name="f", parameters={"type": "object", "properties": {"a": {"type": "nothing"}}}), "tools"),
        (function(name="f", parameters={"type": "object", "title": "a" * (1 << 19)}), "tools"),
    ):
        check_error(ask(service, "POST", CHAT, json={**body, **fields}), param)


def test_calls_that_must_be_without_llguidance(service: Service, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    say("x")

    def compile_grammar(params: Any) -> None:
        raise ImportError("structured outputs need llguidance")

    monkeypatch.setattr(service.llm.engine, "compile_grammar", compile_grammar)
    body = {"messages": MESSAGES, "tools": PICKS, "tool_choice": "required"}
    check_error(ask(service, "POST", CHAT, json=body), "tool_choice", "need llguidance")


def test_unknown_parsers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="tool_parser must be auto, none, deepseek, glm45, .*, got 'x'"):
        ServeSettings(("a",), tool_parser="x")
    assert main(["serve", "--reasoning-parser", "x"]) != 0
    assert "reasoning_parser must be auto, none, harmony, mistral, think, got 'x'" in capsys.readouterr().err
