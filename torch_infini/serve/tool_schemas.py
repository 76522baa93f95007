"""Tools in the bodies of requests: their descriptions, the choice among them, and an assistant's earlier calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from .errors import ApiError, shown
from .fields import Body, check_utf8, validator

# A request's tools: their number, the bytes of all of them in JSON, and how deep objects and lists are nested.
MAX_TOOLS, MAX_BYTES, MAX_DEPTH = 128, 1 << 20, 64
CHOICES = ("none", "auto", "required")

Choice = str | tuple[str]  # one of CHOICES, or the name of the function that must be called


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: Annotated[str, AfterValidator(check_utf8)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function

    @property
    def schema_of_parameters(self) -> dict[str, Any]:
        """The JSON schema of the arguments; without one, that of an object without members."""
        return {"type": "object", "properties": {}} if self.function.parameters is None else self.function.parameters

    def plain(self) -> dict[str, Any]:
        """Return the tool for the chat template."""
        function = {"name": self.function.name, "description": self.function.description}
        shown = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": {**shown, "parameters": self.schema_of_parameters}}


def count_tools(value: Any) -> Any:
    """Return a list of tools that is not too long, before each of them is checked."""
    if isinstance(value, list) and len(value) > MAX_TOOLS:
        raise ValueError(f"must have at most {MAX_TOOLS} tools, got {len(value)}")
    return value


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise ApiError for unknown fields, schemas that are none or too large, and names that occur twice."""
    size = 0
    names: set[str] = set()
    for at, tool in enumerate(tools):
        within = f"tools[{at}]."
        tool.reject_unsupported(within)
        tool.function.reject_unsupported(f"{within}function.")
        if tool.function.name in names:
            rule = f"{within}function.name must differ from those of the other tools, got {tool.function.name!r} again"
            raise ApiError(400, rule, f"{within}function.name")
        names.add(tool.function.name)
        size += check_schema(tool.schema_of_parameters, f"{within}function.parameters")
        size += len((tool.function.description or "").encode())
        if size > MAX_BYTES:
            raise ApiError(400, f"tools must have at most {MAX_BYTES} bytes in all, got more", "tools")


def check_schema(schema: dict[str, Any], param: str) -> int:
    """Return the size of a schema of parameters in bytes of JSON; ApiError if it is not that of an object."""

    def fail(rule: str, came: object) -> ApiError:
        return ApiError(400, f"{param} must {rule}, got {shown(came)}", param)

    if nesting(schema) > MAX_DEPTH:
        raise fail(f"be nested at most {MAX_DEPTH} deep", "more")
    if schema.get("type", "object") != "object":
        raise fail("be a JSON schema of type object", schema["type"])
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(one, (dict, bool)) for one in properties.values()):
        raise fail("have properties that are JSON schemas, by name", properties)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise fail("have a list of names as required", required)
    text = json.dumps(schema, ensure_ascii=False)
    try:
        return len(check_utf8(text).encode())
    except ValueError as error:
        raise ApiError(400, f"{param} {error}", param) from None


def nesting(value: object) -> int:
    """Return how deep objects and lists are nested, at most MAX_DEPTH + 1."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        depth += bool(inner)
        level = [value for values in inner for value in values]
    return depth


def choice_of(value: Any) -> Choice:
    """Return "none", "auto" or "required", or the name of the function that must be called as a tuple."""
    if value is None:
        return "auto"
    if isinstance(value, str) and value in CHOICES:
        return value
    if value["type"] != "function" or set(value) != {"type", "function"} or set(value["function"]) != {"name"}:
        raise TypeError
    if not isinstance(value["function"]["name"], str):
        raise TypeError
    return (value["function"]["name"],)


def check_choice(choice: Choice, tools: Sequence[Tool]) -> None:
    """Raise ApiError if the choice asks for a call of a tool that is not there."""
    if choice in ("none", "auto"):
        return
    names = [tool.function.name for tool in tools]
    if not names:
        raise ApiError(
            400, "tool_choice must be null, none or auto where there are no tools, got another", "tool_choice"
        )
    if isinstance(choice, tuple) and choice[0] not in names:
        rule = f"tool_choice must name one of the tools, {shown(', '.join(names))}, got {shown(choice[0])}"
        raise ApiError(400, rule, "tool_choice")


def calls_of(value: Any) -> list[dict[str, Any]]:
    """Return an assistant's tool calls as chat templates take them, with arguments as objects; empty for null."""
    calls = []
    for call in value or []:
        function = call["function"]
        if call.get("type", "function") != "function" or not isinstance(function["name"], str):
            raise TypeError
        arguments = json.loads(function.get("arguments") or "{}")
        if not isinstance(arguments, dict) or not isinstance(call.get("id", ""), str):
            raise TypeError
        calls.append({**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    check_utf8(json.dumps(calls, ensure_ascii=False))
    return calls


ToolList = Annotated[list[Tool] | None, BeforeValidator(count_tools)]
ToolChoice = Annotated[
    Choice,
    validator(
        str | dict[str, Any] | None,
        'must be none, auto, required or {"type": "function", "function": {"name": "..."}}',
        choice_of,
    ),
]
Calls = Annotated[
    list[dict[str, Any]],
    validator(
        list[dict[str, Any]] | None,
        'must be a list of {"id", "type": "function", "function": {"name", "arguments"}}, arguments an object in JSON',
        calls_of,
    ),
]
