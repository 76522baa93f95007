"""OutputParser: separates generated text into content, reasoning and tool calls, whole or in pieces alike.

Text that is no valid call is content. A call begins once its tool is known and its arguments begin as an object; from
there on it is not taken back: where its arguments become invalid, the call ends, and the rest is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from .events import CallBegin, CallDelta, CallEnd, Content, Event, Reasoning, append
from .scanner import Scanner, Steps
from .thinking import Thinking

SPACES = " \t\r\n"
OBJECT_BEGINS = re.compile(r'\{\s*["}]')


class CallForm(Protocol):
    """What OutputParser needs of a Form."""

    has_reasoning: bool

    def parse(self, output: OutputParser) -> Steps[None]: ...

    def new_id(self) -> str: ...


class OutputParser:
    """The parser of one answer's text.

    Args:
        form: How the model writes tool calls; None: it does not.
        tools: The parameters of each tool, a JSON schema, by the tool's name. Calls of others are content.
        thinking: How the model writes its reasoning; None: reasoning is content.
        is_thinking: Whether the prompt's end has begun the reasoning.
        parallel: Whether an answer may have several calls. If not, it ends with the first.
        has_form: Whether the content has a form: markers of calls that do not begin the answer are content.

    Attributes:
        num_calls: The number of calls that have begun.
        is_reasoning: Whether the text ends in reasoning, as far as it was read.
        may_reason: Whether reasoning may follow.
    """

    def __init__(
        self,
        form: CallForm | None = None,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        thinking: Thinking | None = None,
        is_thinking: bool = False,
        parallel: bool = True,
        has_form: bool = False,
    ) -> None:
        self.scanner = Scanner()
        self.tools = tools or {}
        self.num_calls = 0
        self.separates_reasoning = thinking is not None
        self.is_reasoning = False
        self.may_reason = thinking is not None
        self._form, self._thinking, self._is_thinking = form, thinking, is_thinking
        self._parallel, self._has_form = parallel, has_form
        self._events: list[Event] = []
        # White space is held back for a call that may follow.
        self._content = Trimmed(strips=False, holds=form is not None)
        self._reasoning = Trimmed(strips=True)
        self._marker = ""
        self._is_open = False  # whether a call has begun and not ended
        self._is_valid = True  # whether the arguments that were read last are complete and valid
        self._steps = self._parse()
        self._is_done = False

    def feed(self, piece: str) -> list[Event]:
        """Return the events of the next piece of text; text that may begin a marker or end in white space is held."""
        if not self._is_done:
            self.scanner.add(piece)
        return self._step()

    def finish(self) -> list[Event]:
        """Return the events of what was held; call once, after the last piece."""
        self.scanner.ended = True
        events = self._step()
        if rest := self._content.rest():
            append(events, Content(rest))
        return events

    def _step(self) -> list[Event]:
        if not self._is_done:
            self._is_done = next(self._steps, self) is self
        events, self._events = self._events, []
        return events

    def _parse(self) -> Steps[None]:
        if self._thinking is not None and not (self._form is not None and self._form.has_reasoning):
            yield from self._think(self._thinking)
            self.may_reason = False
        if self._form is not None:
            yield from self._form.parse(self)
        if not self.is_over:
            yield from self.scanner.until((), self.content)

    def _think(self, thinking: Thinking) -> Steps[None]:
        """Read the reasoning, if the text or the prompt begins with its marker."""
        self.scanner.mark()
        if not self._is_thinking:
            yield from self.scanner.spaces()
        # A model may repeat the marker with which the prompt ended.
        has_marker = yield from self.scanner.literal(thinking.begin)
        if not has_marker and not self._is_thinking:
            self.scanner.rewind()
            return
        self.scanner.forget()
        self.is_reasoning = True
        yield from self.scanner.until((thinking.end,), self.reasoning)
        self.end_reasoning()

    @property
    def is_over(self) -> bool:
        """Whether the answer has its only call: the text that follows is not part of it."""
        return self.num_calls > 0 and not self._parallel and not self._is_open

    def content(self, text: str) -> None:
        """Add content; white space beside calls and reasoning is left out."""
        if shown := self._content.add(text):
            append(self._events, Content(shown))

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if not self.separates_reasoning:
            self.content(text)
        elif shown := self._reasoning.add(text):
            append(self._events, Reasoning(shown))

    def end_reasoning(self) -> None:
        """End a passage of reasoning."""
        self.is_reasoning = False
        self._reasoning = Trimmed(strips=True)
        self._content.pause()

    def mark_beginning(self) -> None:
        """Let reject return to this position, where no marker was read."""
        self.scanner.mark()
        self._marker = ""

    def content_until(self, *markers: str) -> Steps[str | None]:
        """Read content up to a marker, and the marker; reject returns to it.

        Returns:
            The marker; None at the end of the text, or of the answer.
        """
        if self.is_over:
            return None
        if self._has_form and not (yield from self._is_next(markers)):
            markers = ()
        found: str | None = yield from self.scanner.until(markers, self.content)
        if found is not None:
            self.scanner.mark()
            self._marker = found
        return found

    def _is_next(self, markers: tuple[str, ...]) -> Steps[bool]:
        """Return whether a marker follows, with white space before it."""
        self.scanner.mark()
        yield from self.scanner.spaces()
        is_next = False
        for marker in markers:
            is_next = is_next or (yield from self.scanner.literal(marker))
        self.scanner.rewind()
        return is_next

    def reject(self) -> None:
        """Make the marker that content_until found, and what follows it, content: it begins no call."""
        self.scanner.rewind()
        self.content(self._marker)

    def close(self, *literals: str) -> Steps[None]:
        """Read each of these texts that is next, with white space before it."""
        for literal in literals:
            self.scanner.mark()
            yield from self.scanner.spaces()
            if (yield from self.scanner.literal(literal)):
                self.scanner.forget()
            else:
                self.scanner.rewind()

    def begin(self, name: str) -> None:
        """Begin a call of a known tool."""
        assert self._form is not None and name in self.tools
        self.scanner.forget()
        self._content.pause()
        append(self._events, CallBegin(self.num_calls, self._form.new_id(), name))
        self.num_calls += 1
        self._is_open = True

    def argue(self, text: str) -> None:
        """Add text to the arguments of the call that has begun."""
        if text:
            append(self._events, CallDelta(self.num_calls - 1, text))

    def end(self) -> None:
        """End the call."""
        append(self._events, CallEnd(self.num_calls - 1))
        self._is_open = False

    def call(self, name: str, arguments: str) -> None:
        """Add a whole call of a known tool."""
        self.begin(name)
        self.argue(arguments)
        self.end()

    def arguments(self, name: str) -> Steps[bool]:
        """Read a call's arguments, and begin and end the call: an object in JSON, such an object in a string, or null.

        Returns:
            Whether the call has begun; then its arguments may still be incomplete.
        """
        if name not in self.tools:
            return False
        yield from self.scanner.spaces()
        letter = yield from self.scanner.peek(1)
        if letter != "{":
            text = yield from self._quoted_arguments(letter)
            if text is not None:
                self.call(name, text)
            return text is not None
        held = ""

        def emit(text: str) -> None:
            nonlocal held
            if self._is_open:
                return self.argue(text)
            held += text
            if OBJECT_BEGINS.match(held):
                self.begin(name)
                self.argue(held)

        self._is_valid = yield from self.scanner.json(emit)
        if self._is_open:
            self.end()
            return True
        return False

    def _quoted_arguments(self, letter: str) -> Steps[str | None]:
        if letter == "n":
            return "{}" if (yield from self.scanner.literal("null")) else None
        text = yield from self.scanner.string_value()
        return text if text is not None and is_object(text) else None

    def json_call(self) -> Steps[bool]:
        """Read a call {"name": ..., "arguments": {...}}, or with "parameters"; other members are skipped.

        Returns:
            Whether the call has begun, as arguments.
        """
        scanner = self.scanner
        if not (yield from scanner.literal("{")):
            return False
        name: str | None = None
        early: str | None = None  # arguments that came before the name
        has_begun = False
        while True:
            yield from scanner.spaces()
            key = yield from scanner.string_value()
            if key is None:
                break
            yield from scanner.spaces()
            if not (yield from scanner.literal(":")):
                break
            yield from scanner.spaces()
            is_arguments = key in ("arguments", "parameters") and not has_begun
            if key == "name" and name is None:
                name = yield from scanner.string_value()
                if name not in self.tools:
                    return False
            elif is_arguments and name is not None:
                has_begun = yield from self.arguments(name)
                if not has_begun or not self._is_valid:
                    return has_begun
            else:
                pieces: list[str] = []
                if not (yield from scanner.json(pieces.append)):
                    break
                early = "".join(pieces) if is_arguments else early
            yield from scanner.spaces()
            if not (yield from scanner.literal(",")):
                break
        is_whole = yield from scanner.literal("}")
        if is_whole and not has_begun and name is not None:
            if early is not None and early.startswith('"'):
                early = str(json.loads(early))
            if early is None or is_object(early):
                self.call(name, early or "{}")
                has_begun = True
        return has_begun


class Trimmed:
    """Text without the white space at its beginning or end, that arrives in pieces.

    Args:
        strips: Whether white space at the beginning is left out.
        holds: Whether white space at the end is held back.

    Attributes:
        strips: Whether white space that comes next is left out.
    """

    def __init__(self, strips: bool, holds: bool = True) -> None:
        self.strips, self._holds = strips, holds
        self._has_begun = False
        self._spaces: list[str] = []
        self._gap = ""

    def add(self, text: str) -> str:
        """Return the text that a piece makes final."""
        text = text.lstrip(SPACES) if self.strips else text
        shown = text.rstrip(SPACES) if self._holds else text
        if not shown:
            self._spaces += [] if self.strips else [text]
            return ""
        before = self._gap if self.strips else "".join(self._spaces)
        self._spaces = [text[len(shown) :]]
        self._gap, self.strips, self._has_begun = "", False, True
        return before + shown

    def pause(self) -> None:
        """Leave out the white space here and before what follows; if there is text on both sides, keep that here."""
        if self._has_begun and not self.strips:
            self._gap = "".join(self._spaces) or "\n"
        self.strips, self._spaces = True, []

    def rest(self) -> str:
        """Return the white space at the end of a text that has begun, or was not to be stripped."""
        return "" if self.strips else "".join(self._spaces)


def is_object(text: str) -> bool:
    """Return whether a text is an object in JSON, and text that UTF-8 can encode."""
    try:
        text.encode()
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
