"""MessagesAnswer: an answer as Anthropic's blocks of content, whole or as events of a stream."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...engine import CompletionOutput, RequestOutput
from ..answers import Answer, ChoiceDelta, usage_of
from ..encoding import to_json
from ..errors import ANTHROPIC_PATH, ApiError
from ..parsers import CallBegin, CallDelta, CallEnd, Content, Event, OutputParser, Reasoning
from ..reading import Reading
from ..token_texts import TokenTexts


def to_event(value: dict[str, Any]) -> bytes:
    return b"event: " + value["type"].encode() + b"\ndata: " + to_json(value) + b"\n\n"


class MessagesAnswer(Answer):
    """The answer of /v1/messages.

    Args:
        model, texts: As of Answer.
        reading: How the text is read.
        prompt_tokens: The number of the prompt's tokens.
    """

    PREFIX = "msg"

    def __init__(self, model: str, texts: TokenTexts | None, reading: Reading, prompt_tokens: int) -> None:
        super().__init__(model, texts)
        self._parser = reading.parser()
        self._writer = BlockWriter()
        self._prompt_tokens = prompt_tokens
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the message."""
        completion = outputs[0].outputs[0]
        for event in [*self._parser.feed(completion.text), *self._parser.finish()]:
            for _ in self._writer.add(event):
                pass
        self._writer.end()
        content = {"content": self._writer.blocks}
        return {**self._message, **content, **reasons(completion, self._parser), "usage": messages_usage(outputs)}

    def events(self, part: ChoiceDelta, include_usage: bool) -> bytes:
        """Return the events of a part of the text; the message's end is left to `end`."""
        made = []
        if part.is_first:
            usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
            made.append({"type": "message_start", "message": {**self._message, "usage": usage}})
        events = self._parser.feed(part.text)
        events += self._parser.finish() if part.finish is not None else []
        for event in events:
            made += self._writer.add(event)
        return b"".join(map(to_event, made))

    def end(self, outputs: Iterable[RequestOutput], include_usage: bool) -> bytes:
        """Return the last events: the end of the last block, why the text ended, and the numbers of tokens."""
        outputs = list(outputs)
        delta = reasons(outputs[0].outputs[0], self._parser)
        last = {"type": "message_delta", "delta": delta, "usage": messages_usage(outputs)}
        return b"".join(map(to_event, [*self._writer.end(), last, {"type": "message_stop"}]))

    def failure(self, error: ApiError) -> bytes:
        return to_event(error.body(ANTHROPIC_PATH))


class BlockWriter:
    """Writes an answer's events as blocks of content, one after the other.

    Attributes:
        blocks: The blocks so far.
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """Yield the events of Anthropic's stream for an event of the parser."""
        if isinstance(event, CallBegin):
            yield from self.end()
            yield self._begin({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            self.blocks[-1]["arguments"] = ""
        elif isinstance(event, CallEnd):
            yield from self.end()
        elif isinstance(event, CallDelta):
            self.blocks[-1]["arguments"] += event.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": event.arguments})
        elif isinstance(event, Content | Reasoning):
            kind, name = ("text", "text") if isinstance(event, Content) else ("thinking", "thinking")
            if not self._is_open or self.blocks[-1]["type"] != kind:
                yield from self.end()
                yield self._begin({"type": kind, name: "", **({"signature": ""} if kind == "thinking" else {})})
            self.blocks[-1][name] += event.text
            yield self._delta({"type": f"{kind}_delta", name: event.text})

    def end(self) -> list[dict[str, Any]]:
        """End the last block, if it was not; return the event."""
        if not self._is_open:
            return []
        self._is_open = False
        block = self.blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = arguments_of(block.pop("arguments"))
        return [{"type": "content_block_stop", "index": len(self.blocks) - 1}]

    def _begin(self, block: dict[str, Any]) -> dict[str, Any]:
        self.blocks.append(block)
        self._is_open = True
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def arguments_of(text: str) -> object:
    """Return a call's arguments; {} if max_tokens cut them, because a block's input must be an object."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def reasons(completion: CompletionOutput, parser: OutputParser) -> dict[str, Any]:
    """Return why a message ended, and the stop sequence that ended it."""
    stopped = completion.stop_reason if isinstance(completion.stop_reason, str) else None
    reason = "end_turn" if completion.finish_reason == "stop" else "max_tokens"
    if stopped is not None:
        reason = "stop_sequence"
    elif reason == "end_turn" and parser.num_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": stopped}


def messages_usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Return the numbers of tokens; those of the prompt that were in the cache are counted apart."""
    usage = usage_of(outputs)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }
