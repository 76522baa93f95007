"""Calls of Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or, newer, [TOOL_CALLS]NAME[ARGS]{...}."""

from __future__ import annotations

import hashlib
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from ..form import Form, Tools
from ..grammar import Lark
from ..output import OutputParser
from ..scanner import Steps
from ..thinking import Thinking

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[a-zA-Z0-9_-]*")
ID = re.compile(r"[a-zA-Z0-9]{9}")  # chat templates reject other ids
LETTERS = string.ascii_letters + string.digits

THINK = Thinking("mistral", "[THINK]", "[/THINK]")


class Mistral(Form):
    name = "mistral"
    markers = (CALLS,)
    tokens = (CALLS, CALL_ID, ARGUMENTS)

    def parse(self, output: OutputParser) -> Steps[None]:
        while (yield from output.content_until(CALLS)):
            yield from output.scanner.spaces()
            letter = yield from output.scanner.peek(1)
            if letter == "[":
                yield from self._list(output)
            elif not (yield from output.json_call() if letter == "{" else self._named(output)):
                output.reject()

    def _list(self, output: OutputParser) -> Steps[None]:
        """Read a list of calls, as far as it has calls."""
        scanner = output.scanner
        scanner.skip(1)
        yield from scanner.spaces()
        if not (yield from output.json_call()):
            output.reject()
            return
        while not output.is_over:
            scanner.mark()
            yield from scanner.spaces()
            if (yield from scanner.literal("]")):
                scanner.forget()
                return
            if not (yield from scanner.literal(",")):
                break
            yield from scanner.spaces()
            if not (yield from output.json_call()):
                break
        if not output.is_over:
            scanner.rewind()

    def _named(self, output: OutputParser) -> Steps[bool]:
        """Read a name, perhaps an id, and arguments; return whether a call has begun."""
        scanner = output.scanner
        name = yield from scanner.run(NAME)
        # Some tokenizers write spaces beside special tokens.
        yield from scanner.spaces()
        if (yield from scanner.literal(CALL_ID)):
            yield from scanner.spaces()
            yield from scanner.run(NAME)
            yield from scanner.spaces()
        yield from scanner.literal(ARGUMENTS)
        return (yield from output.arguments(name))

    def new_id(self) -> str:
        return "".join(secrets.choice(LETTERS) for _ in range(9))

    def history(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Replace ids of calls that are not nine letters or digits, such as those of other servers."""
        changed = []
        for message in messages:
            message = dict(message)
            if "tool_call_id" in message:
                message["tool_call_id"] = nine_letters(message["tool_call_id"])
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [{**call, "id": nine_letters(call.get("id", ""))} for call in calls]
            changed.append(message)
        return changed

    def calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        if ARGUMENTS not in self.template:
            calls = lark.several(lark.json_call(tools), ", ", parallel)
            return f"{lark.literal(CALLS + '[')} {calls} {lark.literal(']')}"
        heads = {name: lark.literal(f"{CALLS}{name}{ARGUMENTS}") for name in tools}
        call = lark.choice([f"{heads[name]} {lark.json_object(schema)}" for name, schema in tools.items()])
        return lark.several(call, "", parallel)


def nine_letters(text: str) -> str:
    return text if ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]
