"""Lark: writes grammars of tool calls in llguidance's variant of Lark's syntax, from JSON schemas of the tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .parameters import types_of

Schema = Mapping[str, Any]
ANY = r"(?s:.*)"
SPACES = r"/[ \n]{0,4}/"  # beside reasoning
# White space in JSON as chat templates write it; models may write other white space without end.
SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

DEFINITIONS = ("$defs", "definitions")  # members of a schema to which references point from its root


class Lark:
    """A grammar; its methods return expressions, and add the rules that these need.

    Args:
        tokens: The tokenizer's added tokens by their texts, which no text in a grammar matches: they are named by id.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._rules: list[str] = []
        texts = sorted(filter(None, tokens), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, texts)) + ")") if texts else None

    def source(self, start: str) -> str:
        """Return the grammar's text.

        Args:
            start: The expression of the whole text.
        """
        return "\n".join([f"start: {start}", *self._rules]) + "\n"

    def literal(self, text: str) -> str:
        """Return the expression of a fixed text."""
        parts = [text] if self._split is None else self._split.split(text)
        shown = [f"<[{self._tokens[part]}]>" if part in self._tokens else quoted(part) for part in parts if part]
        return " ".join(shown)

    def choice(self, expressions: Sequence[str]) -> str:
        """Return the expression of one of several."""
        return f"({' | '.join(expressions)})"

    def several(self, expression: str, separator: str, parallel: bool) -> str:
        """Return the expression of one or, if parallel, several with a text between them."""
        call = self.rule(expression)
        return f"{call} ({self.literal(separator)} {call})*" if parallel and separator else call + "+" * parallel

    def rule(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def json_object(self, schema: Schema) -> str:
        """Return the expression of an object in JSON that a tool's schema allows."""
        return self.json({"type": "object", **schema})

    def json(self, schema: Schema, options: Mapping[str, Any] = SEPARATORS) -> str:
        """Return the expression of a value in JSON that a schema allows.

        Args:
            schema: The schema.
            options: Those of llguidance for white space.
        """
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': options})}")

    def thought(self, begin: str, end: str, has_begun: bool) -> str:
        """Return the expression of reasoning before a text, which may be left out unless the prompt has begun it."""
        rest = f"{self.until(end)} {SPACES}"
        return rest if has_begun else f"({SPACES} {self.literal(begin)} {rest})?"

    def json_call(self, tools: Mapping[str, Schema], arguments: str = "arguments") -> str:
        """Return the expression of {"name": ..., "arguments": ...}.

        Args:
            tools: The schemas of tools that may be called, by name.
            arguments: The member with the arguments.
        """
        calls = []
        for name, schema in tools.items():
            head = self.literal(f'{{"name": {json.dumps(name)}, "{arguments}": ')
            calls.append(f"{head} {self.json_object(schema)} {self.literal('}')}")
        return self.choice(calls)

    def json_call_as_json(self, tools: Mapping[str, Schema], arguments: str, options: Mapping[str, Any]) -> str:
        """Return the expression of json_call where other JSON with these options may stand instead.

        A fixed text such as {"name": is one lexeme, which the lexer would not leave for the brace and name of the other
        JSON; nor would it leave white space of other options.
        """
        calls = []
        for name, schema in tools.items():
            definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
            members = {"name": {"const": name}, arguments: {"type": "object", **schema}}
            call = {"type": "object", "properties": members, "required": [*members], "additionalProperties": False}
            calls.append(self.json({**definitions, **call}, options))
        return self.choice(calls)

    def until(self, end: str, pattern: str = ANY) -> str:
        """Return the expression of any text up to an end marker, and the marker."""
        head, token = "", None
        for text, number in self._tokens.items():
            if text and end.endswith(text):
                head, token = end.removesuffix(text), number
        if token is not None:
            return f"/{pattern}{regex(head)}/ <[{token}]>"
        return self.rule(f"/{pattern}{regex(end)}/", "[lazy]")

    def parameters(self, schema: Schema, before: tuple[str, str], end: str, after: str) -> list[str]:
        """Return the expressions of arguments that are written one by one, as plain text.

        Args:
            schema: The schema of all arguments.
            before: The texts before a name, and between it and the value.
            end: The text after the value.
            after: The text between two arguments, and after the last.
        """
        properties = schema.get("properties")
        required = schema.get("required")
        if not isinstance(properties, Mapping) or not properties:
            return []
        found = []
        for name, value in properties.items():
            head = self.literal(f"{before[0]}{name}{before[1]}")
            member = f"{head} {self._value(value, schema, end)} {self.literal(after)}".rstrip()
            found.append(member if isinstance(required, list) and name in required else f"({member})?")
        return found

    def _value(self, value: object, schema: Schema, end: str) -> str:
        kinds = types_of(value, schema)
        if isinstance(value, Mapping) and kinds == {"string"} and isinstance(choices := value.get("enum"), list):
            return self.choice([self.literal(str(one) + end) for one in choices])
        if not isinstance(value, Mapping) or not kinds or "string" in kinds:
            return self.until(end)
        definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
        return f"{self.json({**definitions, **value})} {self.literal(end)}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def regex(text: str) -> str:
    """Return the regular expression of a fixed text, as it is written between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")
