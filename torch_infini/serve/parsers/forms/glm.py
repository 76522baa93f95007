"""Calls of GLM 4.5: <tool_call>NAME, then <arg_key>...</arg_key><arg_value>...</arg_value> for each argument."""

from __future__ import annotations

from ..form import Form, Tools
from ..grammar import Lark
from ..output import OutputParser
from ..parameters import ParameterWriter
from ..scanner import Steps

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


class Glm(Form):
    name = "glm45"
    markers = (BEGIN, KEY)
    tokens = (BEGIN, END, KEY, END_KEY, VALUE, END_VALUE)

    def parse(self, output: OutputParser) -> Steps[None]:
        while (yield from output.content_until(BEGIN)):
            if not (yield from self._call(output)):
                output.reject()

    def _call(self, output: OutputParser) -> Steps[bool]:
        """Read a call after its marker; return whether it has begun."""
        scanner = output.scanner
        found = yield from scanner.before(KEY, END)
        name = found[0].strip() if found else ""
        if found is None or name not in output.tools:
            return False
        output.begin(name)
        arguments = ParameterWriter(output, output.tools[name], in_lines=False)
        has_key, is_whole = found[1] == KEY, True
        while has_key:
            key = yield from scanner.before(END_KEY)
            yield from scanner.spaces()
            if key is None or not (yield from scanner.literal(VALUE)):
                output.end()
                output.content(KEY if key is None else f"{KEY}{key[0]}{END_KEY}")
                return True
            is_whole = yield from arguments.read(key[0].strip(), END_VALUE)
            yield from scanner.spaces()
            has_key = yield from scanner.literal(KEY)
            if not has_key:
                is_whole = is_whole and (yield from scanner.literal(END))
        if is_whole:
            arguments.finish()
        output.end()
        return True

    def calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        calls = []
        for name, schema in tools.items():
            members = lark.parameters(schema, (KEY, f"{END_KEY}\n{VALUE}"), END_VALUE, "\n")
            calls.append(" ".join([lark.literal(f"{BEGIN}{name}\n"), *members, lark.literal(END)]))
        return lark.several(lark.choice(calls), "\n", parallel)
