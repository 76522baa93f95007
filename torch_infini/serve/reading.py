"""Reading: how the answers of a request are read, which its chat template and its tools decide."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ..engine import StructuredOutputsParams
from ..engine.grammar import WHITE_SPACE
from .errors import ApiError
from .parsers import Form, Lark, OutputParser, Thinking, Tools, all_forms, all_thinkings, form_of, thinking_of
from .token_texts import TokenTexts
from .tool_schemas import Choice, Tool

TAIL = 16  # the most tokens at a prompt's end that begin the reasoning


class Reading(NamedTuple):
    """How the answers of a request are read.

    Attributes:
        form: How the model writes tool calls; None: there are none.
        tools: The tools that it may call.
        thinking: How it writes its reasoning; None: reasoning is content.
        is_thinking: Whether the prompt's end has begun the reasoning.
        parallel: Whether an answer may have several calls.
        template_form: The form of calls in the chat template, which needs earlier messages in its own way.
        has_form: Whether the text has a form: an answer is that text or calls, not both.
    """

    form: Form | None = None
    tools: Tools = {}
    thinking: Thinking | None = None
    is_thinking: bool = False
    parallel: bool = True
    template_form: Form | None = None
    has_form: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """The texts that mark calls and reasoning, and may be special tokens."""
        thinking = () if self.thinking is None else (self.thinking.begin, self.thinking.end)
        return frozenset(thinking if self.form is None else (*thinking, *self.form.tokens))

    def parser(self) -> OutputParser:
        """Make the parser of one answer."""
        return OutputParser(self.form, self.tools, self.thinking, self.is_thinking, self.parallel, self.has_form)

    def history(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a conversation's messages as the chat template needs them."""
        return messages if self.template_form is None else self.template_form.history(messages)

    def after(self, prompt: Sequence[int], tokenizer: Any) -> Reading:
        """Return the reading of answers to a prompt, whose end may have begun the reasoning."""
        if self.thinking is None:
            return self
        end = str(tokenizer.decode(prompt[-TAIL:])).rstrip()
        return self._replace(is_thinking=end.endswith(self.thinking.begin))

    def form_of_call(self, choice: Choice, tokens: Mapping[str, int]) -> StructuredOutputsParams:
        """Return the form of an answer that must have a call.

        Args:
            choice: The request's tool_choice: "required", or the name of the function of the only call.
            tokens: The tokenizer's added tokens by their texts.

        Raises:
            ValueError: If the tools' schemas are too large.
        """
        assert self.form is not None
        named = {choice[0]: self.tools[choice[0]]} if isinstance(choice, tuple) else self.tools
        parallel = self.parallel and not isinstance(choice, tuple)
        grammar = self.form.grammar(named, parallel, tokens, self.thinking, self.is_thinking)
        return StructuredOutputsParams(grammar=grammar)

    def with_form(
        self, form: StructuredOutputsParams, tokens: Mapping[str, int]
    ) -> tuple[Reading, StructuredOutputsParams]:
        """Return the reading and the form of answers whose text has a form, if they are not calls of the tools.

        Reasoning may come before. A regular expression and a grammar leave no place for reasoning or calls: an answer
        begins with them. So does one in a form of calls that has the reasoning in it.

        Args:
            form: The text's.
            tokens: The tokenizer's added tokens by their texts.

        Raises:
            ValueError: If the tools' schemas are too large.
        """
        if self.form_reasons or form.form in ("regex", "grammar"):
            return self._replace(form=None, thinking=None), form
        calls = self.form if self.tools else None
        if calls is None and self.thinking is None:
            return self._replace(form=None), form
        lark = Lark(tokens)
        if form.choice is not None:
            text = lark.choice([lark.literal(one) for one in form.choice])
        else:
            schema = form.json if isinstance(form.json, Mapping) else {"type": "object"}
            text = lark.json(schema, white_space_of(form))
        if calls is not None:
            space = white_space_of(form)
            text = lark.choice([calls.calls_beside_json(lark, self.tools, self.parallel, space), text])
        if self.thinking is not None:
            text = f"{lark.thought(self.thinking.begin, self.thinking.end, self.is_thinking)} {text}"
        return self._replace(form=calls, has_form=True), StructuredOutputsParams(grammar=lark.source(text))

    @property
    def form_reasons(self) -> bool:
        """Whether the form of calls has the reasoning in it."""
        return self.form is not None and self.form.has_reasoning

    def reasoning_tokens(self, tokens: Iterable[int], texts: TokenTexts) -> int:
        """Return how many of an answer's tokens are reasoning or its markers."""
        parser = self.parser()
        number = 0
        for token in tokens:
            was_reasoning = parser.is_reasoning
            parser.feed(texts.text_of(token))
            number += was_reasoning or parser.is_reasoning
            if not parser.may_reason:
                break
        return number


def reading_of(
    tokenizer: Any, tools: Sequence[Tool], parallel: bool = True, tool_parser: str = "auto", reasoning: str = "auto"
) -> Reading:
    """Return how the answers of a request are read.

    Args:
        tokenizer: Has the chat template; None if there is no tokenizer.
        tools: The tools that the model may call.
        parallel: Whether an answer may have several calls.
        tool_parser: The name of a form, "none", or "auto": by the chat template.
        reasoning: The name of a kind of reasoning, "none", or "auto": by the chat template.

    Raises:
        ApiError: If there are tools, and no calls can be read.
    """
    template = template_of(tokenizer, bool(tools))
    thinking = thinking_of(template) if reasoning == "auto" else all_thinkings().get(reasoning)
    known = form_of(template)
    if tool_parser in all_forms():
        known = all_forms()[tool_parser](template)
    form = known if tools and template and tool_parser != "none" else None
    if tools and template and (form is None or not has_tools(template)):
        raise no_tools(template, tool_parser)
    schemas = {tool.function.name: tool.schema_of_parameters for tool in tools} if form is not None else {}
    if form is None and thinking is not None and thinking.name in all_forms():
        reasons = all_forms()[thinking.name]
        form = reasons(template) if reasons.has_reasoning else None
    return Reading(form, schemas, thinking, False, parallel, known)


def white_space_of(form: StructuredOutputsParams) -> dict[str, Any]:
    """Return llguidance's options for white space in JSON, as the engine takes them for a form that is not changed."""
    if form.disable_any_whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_pattern": form.whitespace_pattern or WHITE_SPACE}


def has_tools(template: str) -> bool:
    """Return whether a chat template has the variable of a request's tools."""
    return re.search(r"\btools\b", template) is not None


def template_of(tokenizer: Any, with_tools: bool) -> str:
    """Return a tokenizer's chat template, of several that for requests with or without tools; "" without one."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        default = template.get("default", "")
        template = template.get("tool_use", default) if with_tools else default
    return template or ""


def no_tools(template: str, tool_parser: str) -> ApiError:
    """Return the error of a request with tools where no calls can be read."""
    if tool_parser == "none":
        came = "got tools, and the server was started with --tool-parser none"
    elif not has_tools(template):
        came = "got tools, and the model's chat template has none (the server's --chat-template FILE gives it another)"
    else:
        known = ", ".join(all_forms())
        came = f"got tools, and the form of the template's calls is not known (name it by --tool-parser: {known})"
    return ApiError(400, f"tools must be null or empty for this model, {came}", "tools")
