"""Answers with tool calls over HTTP for tests: templates of each form, and an answer whole and streamed, compared."""

from __future__ import annotations

from typing import Any

from support.serving import ask, events_of
from torch_infini.serve import Service

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}
TOOLS = [WEATHER, {"type": "function", "function": {"name": "now"}}]

HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}A:"
# What makes a template one of each form; the tests need no more of it.
TEMPLATES = {
    "hermes": HEAD + "{# <tool_call> #}",
    "qwen3_coder": HEAD + "{# <tool_call> <function= <parameter= #}",
    "llama3_json": HEAD + '{# <|start_header_id|> "parameters" #}',
    "mistral": HEAD + "{# [TOOL_CALLS] [ARGS] #}",
    "deepseek": HEAD + "{# <｜tool▁calls▁begin｜> <｜tool▁sep｜> #}",
    "glm45": HEAD + "{# <tool_call> <arg_key> #}",
    "harmony": HEAD + "{# <|channel|> <|message|> #}",
    "think": HEAD + "{# <tool_call> </think> #}",
    "begun": HEAD + "{# <tool_call> </think> #}<think>\n",
}


def whole(service: Service, **fields: Any) -> dict[str, Any]:
    answer = ask(service, "POST", CHAT, json={"messages": MESSAGES, "tools": TOOLS, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def streamed(service: Service, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}, **fields}
    return events_of(ask(service, "POST", CHAT, json=body).text)


def joined(events: list[dict[str, Any]], at: int = 0) -> dict[str, Any]:
    """Join a choice's chunks to the message and finish_reason of an answer; ids are left out."""
    content, reasoning, finish = "", "", None
    calls: list[list[str]] = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != at:
                continue
            delta = choice["delta"]
            assert finish is None
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls", []):
                if "id" in part:
                    assert part["index"] == len(calls) and part["type"] == "function"
                    assert part["function"]["arguments"] == ""
                    calls.append([part["function"]["name"], ""])
                else:
                    assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
                    calls[part["index"]][1] += part["function"]["arguments"]
            finish = choice["finish_reason"]
            assert finish is None or delta == {}
    return {"content": content, "reasoning": reasoning, "calls": calls, "finish": finish}


def summed_up(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
    reasoning = message.get("reasoning_content", "")
    return {
        "content": message["content"] or "",
        "reasoning": reasoning,
        "calls": calls,
        "finish": choice["finish_reason"],
    }


def both(service: Service, **fields: Any) -> dict[str, Any]:
    """Return what an answer amounts to, after checking that the streamed one amounts to the same."""
    answer, events = whole(service, **fields), streamed(service, **fields)
    for choice in answer["choices"]:
        assert joined(events, choice["index"]) == summed_up(choice)
    assert events[-1]["usage"] == answer["usage"]
    return dict(answer["choices"][0])
