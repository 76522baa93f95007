"""Events of OutputParser: what a piece of text adds to an answer: content, reasoning, or a part of a tool call."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote before its answer, to reason."""

    text: str


class CallBegin(NamedTuple):
    """The beginning of a tool call.

    Attributes:
        call: The call's index in the answer, from 0.
        id: A name of the call, which the client returns with the tool's result.
        name: The tool's name, one of the request's.
    """

    call: int
    id: str
    name: str


class CallDelta(NamedTuple):
    """A piece of a call's arguments; together they are an object in JSON, unless the text ends within it."""

    call: int
    arguments: str


class CallEnd(NamedTuple):
    """The end of a tool call."""

    call: int


Event = Content | Reasoning | CallBegin | CallDelta | CallEnd


def append(events: list[Event], event: Event) -> None:
    """Append an event, joined with the last one if both are text of the same kind."""
    last = events[-1] if events else None
    if isinstance(event, Content) and isinstance(last, Content):
        events[-1] = Content(last.text + event.text)
    elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
        events[-1] = Reasoning(last.text + event.text)
    elif isinstance(event, CallDelta) and isinstance(last, CallDelta) and event.call == last.call:
        events[-1] = CallDelta(last.call, last.arguments + event.arguments)
    else:
        events.append(event)
