"""Answers of gpt-oss in channels: analysis is reasoning, final is content, commentary to=functions.NAME is a call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..form import Form, Tools
from ..grammar import Lark
from ..output import OutputParser
from ..scanner import Steps
from ..thinking import Thinking

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ENDS = (END, CALL, RETURN, START)
MAX_HEADER = 512  # characters
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
IN_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

THINK = Thinking("harmony", CHANNEL + "analysis", END, (CHANNEL, MESSAGE))


class Harmony(Form):
    name = "harmony"
    markers = (CHANNEL, MESSAGE)
    tokens = (START, CHANNEL, MESSAGE, END, CALL, RETURN)
    has_reasoning = True

    def parse(self, output: OutputParser) -> Steps[None]:
        # The prompt ends in <|start|>assistant: the first message has no start of its own.
        output.mark_beginning()
        yield from output.scanner.spaces()
        found: str | None = ""
        if (yield from output.scanner.peek(3)) != "to=":
            output.reject()
            found = yield from output.content_until(START, CHANNEL)
        while found is not None:
            header = yield from output.scanner.before(MESSAGE, most=MAX_HEADER)
            if header is None or not (yield from self._message(output, found + header[0])):
                output.reject()
            found = yield from output.content_until(START, CHANNEL)

    def _message(self, output: OutputParser, header: str) -> Steps[bool]:
        """Read a message after its header; return whether it is one."""
        recipient, channel = RECIPIENT.search(header), IN_CHANNEL.search(header)
        if recipient and channel and channel[1] == "commentary":
            if not (yield from output.arguments(recipient[1])):
                return False
            yield from output.close(CALL)
            return True
        output.scanner.forget()
        is_reasoning = channel is not None and channel[1] == "analysis"
        output.is_reasoning = is_reasoning
        emit = output.reasoning if is_reasoning else output.content
        end = yield from output.scanner.until(ENDS, emit)
        if is_reasoning:
            output.end_reasoning()
        if end == START:
            output.scanner.unread(START)
        return True

    def history(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Name the reasoning of messages with calls as the template does, which takes it or content."""
        return [
            {**message, "thinking": message["reasoning_content"]}
            if message.get("tool_calls") and message.get("reasoning_content") and not message.get("content")
            else message
            for message in messages
        ]

    def calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        # The end of a call ends the answer: there is one call, whatever `parallel`.
        begin, end = lark.literal(f"{CHANNEL}analysis{MESSAGE}"), lark.literal(f"{START}assistant")
        calls = []
        for name, schema in tools.items():
            head = lark.literal(f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}")
            calls.append(f"{head} {lark.json_object(schema)}")
        return f"({begin} {lark.until(END)} {end})? {lark.choice(calls)}"
