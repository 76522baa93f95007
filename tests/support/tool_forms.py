"""Forms of tool calls for tests: chat templates with the real markers, samples, what a parser makes of a text."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import jinja2.sandbox

from torch_infini.serve.parsers import (
    CallBegin,
    CallDelta,
    CallEnd,
    Content,
    Event,
    OutputParser,
    Reasoning,
    all_forms,
    all_thinkings,
)

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "more": {"$ref": "#/$defs/more"},
        "exact": {"type": "boolean"},
        "tags": {"type": ["array", "null"]},
    },
    "required": ["city"],
    "$defs": {"more": {"type": "object"}},
}
TOOLS: dict[str, Any] = {"get_weather": WEATHER, "now": {}, "function": {"type": "object"}}

# Arguments with what is special in one form or another.
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Zürich ☕ 東京 𝄞"},
    {"city": 'say "hi" \\ and {braces} [more] }}', "days": 3},
    {"city": "two\nlines\n\n  indented", "more": {"deep": [{"er": [1, 2.5, -1e3, None, True]}, {}], "x": "}"}},
    {"city": "; <b> & </tool> <|x|> ```", "exact": False, "tags": ["a", "b; c"], "days": -7},
    {"city": "", "tags": None},
]


class Answer(NamedTuple):
    """What an answer's events amount to; calls are (name, arguments)."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def answer_of(events: list[Event]) -> Answer:
    """Join events, whose order within a call is checked."""
    content, reasoning, is_open = "", "", False
    calls: list[tuple[str, str]] = []
    ids = set()
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallBegin):
            assert not is_open and event.call == len(calls)
            calls.append((event.name, ""))
            ids.add(event.id)
            is_open = True
        elif isinstance(event, CallDelta):
            assert is_open and event.call == len(calls) - 1 and event.arguments
            calls[-1] = calls[-1][0], calls[-1][1] + event.arguments
        else:
            assert isinstance(event, CallEnd) and is_open
            is_open = False
    assert not is_open and len(ids) == len(calls)
    return Answer(content, reasoning, calls)


def parser_of(name: str, thinking: str | None = None, template: str = "", **more: Any) -> OutputParser:
    form = all_forms()[name](template)
    return OutputParser(form, more.pop("tools", TOOLS), all_thinkings()[thinking] if thinking else None, **more)


def read(pieces: list[str], name: str, **more: Any) -> Answer:
    parser = parser_of(name, **more)
    return answer_of([*(event for piece in pieces for event in parser.feed(piece)), *parser.finish()])


# Small chat templates with the real markers of each form; `calls` are an assistant's, and `think` its reasoning.
TEMPLATES = {
    "hermes": '{{ content }}{% for c in calls %}\n<tool_call>\n{"name": "{{ c.name }}", "arguments": '
    "{{ c.arguments | tojson }}}\n</tool_call>{% endfor %}",
    "qwen3_coder": "{{ content }}{% for c in calls %}\n<tool_call>\n<function={{ c.name }}>\n"
    "{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}",
    "llama3_json": "<|python_tag|>{% for c in calls %}{{ '; ' if not loop.first }}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endfor %}<|start_header_id|>',
    "mistral": '{{ content }}[TOOL_CALLS][{% for c in calls %}{{ \', \' if not loop.first }}{"name": "{{ c.name }}", '
    '"arguments": {{ c.arguments | tojson }}, "id": "abcdefghi"}{% endfor %}]',
    "mistral [ARGS]": "{{ content }}{% for c in calls %}[TOOL_CALLS]{{ c.name }}[CALL_ID]abcdefghi[ARGS]"
    "{{ c.arguments | tojson }}{% endfor %}",
    "deepseek": "{{ content }}<｜tool▁calls▁begin｜>{% for c in calls %}{{ '\n' if not loop.first }}"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n{{ c.arguments | tojson }}\n```"
    "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek 3.1": "{{ content }}<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c.name }}"
    "<｜tool▁sep｜>{{ c.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "glm45": "\n<think>{{ think }}</think>\n{{ content }}{% for c in calls %}\n<tool_call>{{ c.name }}\n"
    "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}"
    "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "harmony": "<|channel|>analysis<|message|>{{ think }}<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "{{ content }}<|end|>{% for c in calls %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary "
    "json<|message|>{{ c.arguments | tojson }}<|call|>{% endfor %}",
}
HARMONY = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


def rendered(template: str, calls: list[tuple[str, dict[str, Any]]], content: str = "", think: str = "") -> str:
    environment = jinja2.sandbox.SandboxedEnvironment()
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    shown = [SimpleNamespace(name=name, arguments=arguments) for name, arguments in calls]
    return environment.from_string(TEMPLATES[template]).render(calls=shown, content=content, think=think)
