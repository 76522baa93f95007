"""Calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one after the other."""

from __future__ import annotations

from ..form import Form, Tools
from ..grammar import Lark
from ..output import OutputParser
from ..scanner import Steps

BEGIN, END = "<tool_call>", "</tool_call>"
NEW_LINE = "\n"


class Hermes(Form):
    name = "hermes"
    tokens = (BEGIN, END)

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template has calls of this form; others have the same marker around XML."""
        return BEGIN in template and not any(other in template for other in ("<function=", "<arg_key>"))

    def parse(self, output: OutputParser) -> Steps[None]:
        while (yield from output.content_until(BEGIN)):
            yield from output.scanner.spaces()
            if (yield from output.json_call()):
                yield from output.close(END)
            else:
                output.reject()

    def calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        call = f"{lark.literal(BEGIN + NEW_LINE)} {lark.json_call(tools)} {lark.literal(NEW_LINE + END)}"
        return lark.several(call, NEW_LINE, parallel)
