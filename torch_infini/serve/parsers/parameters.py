"""Arguments that a model writes one by one as plain text, as in XML: converted to JSON by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from .output import OutputParser
from .scanner import Steps

KINDS = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
PYTHON = {"True": "true", "False": "false", "None": "null"}  # as chat templates write values of Python
MAX_DEPTH = 32


class ParameterWriter:
    """Writes the arguments of one call as an object in JSON.

    Args:
        output: Its call has begun.
        schema: The JSON schema of the tool's parameters.
        in_lines: Whether a value has a line break before and after it that is not part of it.
    """

    def __init__(self, output: OutputParser, schema: Mapping[str, Any], in_lines: bool) -> None:
        self._output, self._schema, self._in_lines = output, schema, in_lines
        self._separator = "{"

    def read(self, name: str, end: str) -> Steps[bool]:
        """Read a value up to its end marker, and the marker; return whether it is there.

        A string is written as it arrives, any other value at its end.
        """
        output = self._output
        output.argue(f"{self._separator}{quoted(name)}: ")
        self._separator = ", "
        properties = self._schema.get("properties")
        kinds = types_of(properties.get(name) if isinstance(properties, Mapping) else None, self._schema)
        if self._in_lines:
            yield from output.scanner.literal("\n")
        held = ""
        if kinds == {"string"}:
            output.argue('"')

            def emit(text: str) -> None:
                nonlocal held
                text = held + text
                held = "\n" if self._in_lines and text.endswith("\n") else ""
                output.argue(quoted(text[: len(text) - len(held)])[1:-1])

            is_complete = (yield from output.scanner.until((end,), emit)) is not None
            output.argue('"' if is_complete else "")
            return is_complete
        pieces: list[str] = []
        is_complete = (yield from output.scanner.until((end,), pieces.append)) is not None
        text = "".join(pieces)
        output.argue(converted(text, kinds, self._in_lines) if is_complete else text)
        return is_complete

    def finish(self) -> None:
        """Write the end of the object."""
        self._output.argue("}" if self._separator == ", " else "{}")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def converted(text: str, kinds: set[str], in_lines: bool = False) -> str:
    """Return a value in JSON.

    Args:
        text: What the model wrote.
        kinds: The JSON types that it may have; empty: any.
        in_lines: Whether a line break at the end is not part of it.
    """
    plain = text.strip()
    plain = PYTHON.get(plain, plain) if not kinds or kinds & {"boolean", "null"} else plain
    try:
        value = json.loads(plain, parse_constant=reject)
    except (ValueError, RecursionError):
        return quoted(text.removesuffix("\n") if in_lines else text)
    kind = KINDS.get(type(value), "null")
    is_allowed = kind in kinds or (kind == "integer" and "number" in kinds)
    if (not kinds or is_allowed or "string" not in kinds) and kind != "string":
        return plain
    if kind == "string" and "string" not in kinds:
        return plain
    return quoted(text.removesuffix("\n") if in_lines else text)


def reject(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(resolved(reference, root), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {one for one in kind if isinstance(one, str)}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return {KINDS.get(type(value), "null") for value in values}
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            # Options within options within options are not looked at: their number would be a power.
            found = [types_of(option, root, depth + MAX_DEPTH // 2) for option in options[:MAX_DEPTH]]
            return set().union(*found) if all(found) else set()
    return set()


def resolved(reference: str, root: Mapping[str, Any]) -> object:
    """Return the part of a schema that "#/a/b" names; None if there is none."""
    found: object = root
    for name in reference.removeprefix("#/").split("/"):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
