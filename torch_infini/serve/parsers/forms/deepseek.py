"""Calls of DeepSeek V3 and R1, function<｜tool▁sep｜>NAME and arguments in a fence, and of V3.1, without these two."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ..form import Form, Tools
from ..grammar import Lark
from ..output import OutputParser
from ..scanner import Steps

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"
AS_OBJECT = re.compile(r"arguments\W{0,4}\s*\|\s*tojson")


class DeepSeek(Form):
    name = "deepseek"
    markers = (CALLS, SEPARATOR)
    tokens = (CALLS, END_CALLS, CALL, SEPARATOR, END_CALL)

    def parse(self, output: OutputParser) -> Steps[None]:
        while marker := (yield from output.content_until(CALLS, CALL)):
            if marker == CALLS:
                yield from output.scanner.spaces()
            has_call = marker == CALL or (yield from output.scanner.literal(CALL))
            if has_call and (yield from self._call(output)):
                yield from output.close(END_CALL, END_CALLS)
            else:
                output.reject()

    def _call(self, output: OutputParser) -> Steps[bool]:
        """Read a call after its marker; return whether it has begun."""
        scanner = output.scanner
        found = yield from scanner.before(SEPARATOR)
        name = found[0].strip() if found else ""
        yield from scanner.spaces()
        has_type = name == "function" and (yield from scanner.peek(1)) != "{"
        if has_type:
            line = yield from scanner.before("\n")
            name = line[0].strip() if line else ""
            yield from scanner.spaces()
            yield from scanner.literal(f"{FENCE}json")
        if not (yield from output.arguments(name)):
            return False
        if has_type:
            yield from output.close(FENCE)
        return True

    def history(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Write arguments of earlier calls as texts for a template that joins them to others, as DeepSeek's own do."""
        if AS_OBJECT.search(self.template):
            return list(messages)
        changed = []
        for message in messages:
            calls = [{**call, "function": as_text(call["function"])} for call in message.get("tool_calls", ())]
            changed.append({**message, "tool_calls": calls} if calls else message)
        return changed

    def calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        has_type = f"{FENCE}json" in self.template
        calls = []
        for name, schema in tools.items():
            head = f"function{SEPARATOR}{name}\n{FENCE}json\n" if has_type else f"{name}{SEPARATOR}"
            end = f"\n{FENCE}{END_CALL}" if has_type else END_CALL
            calls.append(f"{lark.literal(CALL + head)} {lark.json_object(schema)} {lark.literal(end)}")
        several = lark.several(lark.choice(calls), "\n" if has_type else "", parallel)
        return f"{lark.literal(CALLS)} {several} {lark.literal(END_CALLS)}"


def as_text(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
