"""StructuredOutputsParams: the form that a request's text must have: a JSON schema, a regex, a choice or a grammar.

Only the description, in vLLM's words; grammar.py compiles it.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME = "torch_infini.StructuredOutputsParams"
FORMS = ("json", "regex", "choice", "grammar", "json_object")
MAX_BYTES, MAX_DEPTH = 256 << 10, 64  # of a form's text; of nested objects and lists in a schema


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form of a request's text. Exactly one of the first five is given.

    A text that ends by itself (finish_reason "stop") has the form; one that max_tokens or a stop string cuts begins it.

    Args:
        json: A JSON schema, as a dict or as JSON.
        regex: A regular expression for the whole text, without look-around and back references.
        choice: The texts of which it is one.
        grammar: A grammar in Lark's syntax, with llguidance's extensions (`%json {...}`, special tokens as <|name|>),
            or in that of llama.cpp (GBNF), which begins with `NAME ::=`.
        json_object: True: any JSON object.
        whitespace_pattern: A regular expression for the white space between the parts of JSON; None: spaces, tabs and
            line breaks, at most 40 in a row, because models may write them without end.
        disable_any_whitespace: Whether JSON has no white space at all.

    Raises:
        ValueError: For none or several forms, a form of another type, or one that is too large or too deep.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            came = " and ".join(given) or "none of them"
            raise ValueError(f"{NAME}: one of {', '.join(FORMS)} must be given, got {came}")
        for name in ("json_object", "disable_any_whitespace"):
            if getattr(self, name) not in (None, True, False):
                raise invalid(name, "be True or False", getattr(self, name))
        for name in ("regex", "grammar", "whitespace_pattern"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise invalid(name, "be a string that is not empty", text)
        if self.json is not None:
            object.__setattr__(self, "json", schema_of(self.json))
        if self.choice is not None:
            texts = self.choice
            if isinstance(texts, str) or not isinstance(texts, Sequence) or not texts or not all(map(is_text, texts)):
                raise invalid("choice", "be texts, at least one", texts)
            object.__setattr__(self, "choice", tuple(texts))
        has_whitespace = given[0] in ("json", "json_object") and not self.disable_any_whitespace
        if self.whitespace_pattern is not None and not has_whitespace:
            rule = "be None where there is no JSON with white space"
            raise invalid("whitespace_pattern", rule, self.whitespace_pattern)
        try:
            size = sum(len(text.encode()) for text in (*self.texts, self.whitespace_pattern or ""))
        except UnicodeEncodeError:
            raise invalid(given[0], "be text that UTF-8 can encode, without lone surrogates", "others") from None
        if size > MAX_BYTES:
            raise invalid(given[0], f"have at most {MAX_BYTES} bytes", size)

    @property
    def form(self) -> str:
        """The name of the form that is given."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    @property
    def texts(self) -> tuple[str, ...]:
        """The form's text, or texts."""
        value = getattr(self, self.form)
        if self.form == "json":
            return (json_module.dumps(value, ensure_ascii=False),)
        return () if value is True else (value,) if isinstance(value, str) else tuple(value)


def invalid(argument: str, rule: str, came: object) -> ValueError:
    text = repr(came)
    return ValueError(f"{NAME}: {argument} must {rule}, got {text if len(text) <= 200 else text[:200] + '...'}")


def is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def schema_of(value: object) -> dict[str, Any]:
    """Return a JSON schema as a dict of its own; ValueError for what is none, or nested too deep."""
    if isinstance(value, str):
        if len(value) > MAX_BYTES:
            raise invalid("json", f"have at most {MAX_BYTES} bytes", len(value))
        try:
            value = json_module.loads(value)
        except (ValueError, RecursionError):
            raise invalid("json", "be a JSON schema, an object in JSON", value) from None
    if not isinstance(value, Mapping):
        raise invalid("json", "be a JSON schema, an object", value)
    if nesting(value) > MAX_DEPTH:
        raise ValueError(f"{NAME}: json must be nested at most {MAX_DEPTH} deep, got more")
    try:
        copy: dict[str, Any] = json_module.loads(json_module.dumps(value))
    except (TypeError, ValueError):
        raise invalid("json", "have values that JSON can hold", value) from None
    return copy


def nesting(value: object) -> int:
    """Return how deep objects and lists are nested, at most MAX_DEPTH + 1."""
    depth, level = 0, [value]
    while depth <= MAX_DEPTH:
        inner = [one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, Mapping | list)]
        if not inner:
            break
        depth, level = depth + 1, [one for values in inner for one in values]
    return depth
