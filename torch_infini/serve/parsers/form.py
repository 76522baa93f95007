"""Form: how a family of models writes tool calls; the files in forms/ have one each. Adding a file adds a form."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from .grammar import Lark
from .output import OutputParser
from .scanner import Steps
from .thinking import Thinking

Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of the parameters, by the tool's name


class Form:
    """How a family of models writes tool calls.

    Args:
        template: The chat template, by which forms of one name may differ.

    Attributes:
        name: The form's name for --tool-parser.
        markers: Texts that a chat template of this form has, all of them.
        tokens: The texts that mark calls and may be special tokens, which the engine leaves out of the text by default.
        has_reasoning: Whether parse reads the reasoning too.
    """

    name: str
    markers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    has_reasoning = False

    def __init__(self, template: str = "") -> None:
        self.template = template

    @classmethod
    def recognises(cls, template: str) -> bool:
        """Return whether a chat template has calls of this form."""
        return all(marker in template for marker in cls.markers)

    def parse(self, output: OutputParser) -> Steps[None]:
        """Read a text and call output's methods; the text that is left when this returns is content."""
        raise NotImplementedError

    def calls(self, lark: Lark, tools: Tools, parallel: bool) -> str:
        """Return a grammar's expression of one call or, if parallel, several.

        Args:
            lark: The grammar.
            tools: The tools that may be called.
            parallel: Whether there may be several calls.
        """
        raise NotImplementedError

    def calls_beside_json(self, lark: Lark, tools: Tools, parallel: bool, options: Mapping[str, Any]) -> str:
        """Return the expression of `calls` for a grammar where JSON with these options may stand instead of them."""
        return self.calls(lark, tools, parallel)

    def grammar(
        self,
        tools: Tools,
        parallel: bool,
        tokens: Mapping[str, int],
        thinking: Thinking | None = None,
        is_thinking: bool = False,
    ) -> str:
        """Return the grammar of an answer that is one call or, if parallel, several: Lark's syntax for llguidance.

        Args:
            tools: The tools that may be called.
            parallel: Whether there may be several calls.
            tokens: The tokenizer's added tokens by their texts.
            thinking: The reasoning that may come before the calls.
            is_thinking: Whether the prompt's end has begun the reasoning.
        """
        lark = Lark(tokens)
        calls = self.calls(lark, tools, parallel)
        if thinking is None or self.has_reasoning:
            return lark.source(calls)
        return lark.source(f"{lark.thought(thinking.begin, thinking.end, is_thinking)} {calls}")

    def new_id(self) -> str:
        """Make the id of a call."""
        return f"call_{uuid.uuid4().hex[:24]}"

    def history(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation's earlier messages as this form's chat templates need them."""
        return list(messages)


@cache
def all_forms() -> dict[str, type[Form]]:
    """Return all forms by name: the subclasses of Form that the modules in forms/ define."""
    found = {}
    for module in modules():
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Form) and value.__module__ == module.__name__:
                found[value.name] = value
    return found


@cache
def all_thinkings() -> dict[str, Thinking]:
    """Return the kinds of reasoning by name: the values of class Thinking in the modules in forms/."""
    values = [value for module in modules() for value in vars(module).values()]
    return {value.name: value for value in values if isinstance(value, Thinking)}


def modules() -> list[Any]:
    package = import_module(f"{__package__}.forms")
    return [import_module(f"{package.__name__}.{entry.name}") for entry in iter_modules(package.__path__)]


def form_of(template: str) -> Form | None:
    """Return the form of a chat template's calls; None if it has none that is known."""
    return next((form(template) for form in all_forms().values() if form.recognises(template)), None)


def thinking_of(template: str) -> Thinking | None:
    """Return the kind of a chat template's reasoning; None if it has none that is known."""
    return next((thinking for thinking in all_thinkings().values() if thinking.recognises(template)), None)
