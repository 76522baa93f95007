"""Calls of Llama 3: the answer is {"name": ..., "parameters": {...}}, or several of them with semicolons between."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..form import Form, Tools
from ..grammar import Lark
from ..output import OutputParser
from ..scanner import Steps

TAG = "<|python_tag|>"


class Llama3(Form):
    name = "llama3_json"
    markers = ("<|start_header_id|>", '"parameters"')
    tokens = (TAG,)

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template has calls of this form; others of Llama's turns have a marker of their own."""
        return super().recognises(template) and "<tool_call>" not in template

    def parse(self, output: OutputParser) -> Steps[None]:
        # Without the tag only an answer that begins with a call has calls: text may quote JSON.
        output.mark_beginning()
        yield from output.scanner.spaces()
        yield from output.scanner.literal(TAG)
        found: str | None = TAG
        while found is not None:
            yield from self._calls(output)
            found = yield from output.content_until(TAG)

    def _calls(self, output: OutputParser) -> Steps[None]:
        if not (yield from self._call(output)):
            output.reject()
            return
        while not output.is_over:
            output.scanner.mark()
            yield from output.scanner.spaces()
            yield from output.scanner.literal(";")
            if not (yield from self._call(output)):
                output.scanner.rewind()
                return

    def _call(self, output: OutputParser) -> Steps[bool]:
        yield from output.scanner.spaces()
        return (yield from output.json_call())

    def calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        return lark.several(lark.json_call(tools, "parameters"), "; ", parallel)

    def calls_beside_json(self, lark: Lark, tools: Tools, parallel: bool, options: Mapping[str, Any]) -> str:
        return lark.several(lark.json_call_as_json(tools, "parameters", options), "; ", parallel)
