"""Calls of Qwen3-Coder: <tool_call><function=NAME><parameter=NAME>...</parameter></function></tool_call>."""

from __future__ import annotations

from ..form import Form, Tools
from ..grammar import Lark
from ..output import OutputParser
from ..parameters import ParameterWriter
from ..scanner import Steps

BEGIN, END = "<tool_call>", "</tool_call>"
NEW_LINE = "\n"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class Qwen3Coder(Form):
    name = "qwen3_coder"
    markers = (BEGIN, FUNCTION, PARAMETER)
    tokens = (BEGIN, END)

    def parse(self, output: OutputParser) -> Steps[None]:
        # The model leaves out the outer marker at times.
        while marker := (yield from output.content_until(BEGIN, FUNCTION)):
            yield from output.scanner.spaces()
            has_function = marker == FUNCTION or (yield from output.scanner.literal(FUNCTION))
            if has_function and (yield from self._function(output)):
                yield from output.close(END)
            else:
                output.reject()

    def _function(self, output: OutputParser) -> Steps[bool]:
        """Read a call after <function=; return whether it has begun."""
        scanner = output.scanner
        found = yield from scanner.before(">")
        name = found[0].strip() if found else ""
        if name not in output.tools:
            return False
        yield from scanner.spaces()
        has_parameter = yield from scanner.literal(PARAMETER)
        if not has_parameter and not (yield from scanner.literal(END_FUNCTION)):
            return False
        output.begin(name)
        arguments = ParameterWriter(output, output.tools[name], in_lines=True)
        is_whole = True
        while has_parameter:
            key = yield from scanner.before(">")
            if key is None:
                output.end()
                output.content(PARAMETER)
                return True
            is_whole = yield from arguments.read(key[0].strip(), END_PARAMETER)
            if not is_whole:
                break
            yield from scanner.spaces()
            has_parameter = yield from scanner.literal(PARAMETER)
            if not has_parameter:
                is_whole = yield from scanner.literal(END_FUNCTION)
        if is_whole:
            arguments.finish()
        output.end()
        return True

    def calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        functions = []
        for name, schema in tools.items():
            members = lark.parameters(schema, (PARAMETER, ">\n"), f"\n{END_PARAMETER}", "\n")
            functions.append(" ".join([lark.literal(f"{FUNCTION}{name}>\n"), *members]))
        begin, end = lark.literal(BEGIN + NEW_LINE), lark.literal(END_FUNCTION + NEW_LINE + END)
        return lark.several(f"{begin} {lark.choice(functions)} {end}", NEW_LINE, parallel)
