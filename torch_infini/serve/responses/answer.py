"""ResponsesAnswer: an answer as items of a response, whole or as events of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ...engine import CompletionOutput, RequestOutput
from ..answers import Answer, ChatAnswer, ChoiceDelta, message_of, usage_of
from ..encoding import to_json
from ..errors import ApiError
from ..parsers import CallBegin, CallDelta, CallEnd, Content, Event
from ..reading import Reading
from ..token_texts import TokenTexts

Keep = Callable[[dict[str, Any], dict[str, Any]], None]  # takes the response, and the assistant's message


class ResponsesAnswer(Answer):
    """The answer of /v1/responses.

    Args:
        model, texts: As of Answer.
        reading: How the text is read.
        fields: The request's fields that the response repeats.
        keep: Called with the response when it is complete.
    """

    PREFIX = "resp"

    def __init__(
        self, model: str, texts: TokenTexts | None, reading: Reading, fields: dict[str, Any], keep: Keep
    ) -> None:
        super().__init__(model, texts)
        self._parser, self._keep = reading.parser(), keep
        self._chat = ChatAnswer(model, texts, None, reading)  # counts tokens, and formats log-probabilities
        self._writer = ItemWriter()
        self._events: list[Event] = []
        self._sent = 0
        self._response = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            **fields,
            "usage": None,
        }

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response."""
        for _ in self._read(outputs[0].outputs[0].text, True):
            pass
        for _ in self._writer.end(self._status(outputs[0].outputs[0])):
            pass
        return self._finished(outputs)

    def events(self, part: ChoiceDelta, include_usage: bool) -> bytes:
        """Return the events of a part of the text; the response's end is left to `end`."""
        begins = ("response.created", "response.in_progress") if part.is_first else ()
        first = [self._event({"type": name, "response": self._response}) for name in begins]
        return b"".join([*first, *map(self._event, self._read(part.text, part.finish is not None))])

    def _event(self, chunk: dict[str, Any]) -> bytes:
        numbered = {"type": chunk["type"], "sequence_number": self._sent, **chunk}
        self._sent += 1
        return b"event: " + chunk["type"].encode() + b"\ndata: " + to_json(numbered) + b"\n\n"

    def end(self, outputs: Iterable[RequestOutput], include_usage: bool) -> bytes:
        """Return the last events: the end of the last item, and the whole response."""
        outputs = list(outputs)
        last = list(self._writer.end(self._status(outputs[0].outputs[0])))
        response = self._finished(outputs)
        last.append({"type": f"response.{response['status']}", "response": response})
        return b"".join(map(self._event, last))

    def failure(self, error: ApiError) -> bytes:
        body = error.body()["error"]
        failed = {"code": "server_error", "message": body["message"]}
        response = {**self._response, "status": "failed", "error": failed}
        return self._event({"type": "response.failed", "response": response})

    def _read(self, text: str, is_last: bool) -> Iterator[dict[str, Any]]:
        events = self._parser.feed(text)
        events += self._parser.finish() if is_last else []
        for event in events:
            self._events.append(event)
            yield from self._writer.add(event)

    def _status(self, completion: CompletionOutput) -> str:
        return "completed" if completion.finish_reason == "stop" else "incomplete"

    def _finished(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the response at its end, and hand it on to be kept."""
        usage = self._chat.usage(outputs) if self._texts is not None else usage_of(outputs)
        details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
        status = self._status(outputs[0].outputs[0])
        response = {
            **self._response,
            "status": status,
            "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
            "output": self._writer.items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": details,
                "total_tokens": usage["total_tokens"],
            },
        }
        self._keep(response, message_of(self._events))
        return response


class ItemWriter:
    """Writes an answer's events as items: reasoning, a message, or a call, one after the other.

    Attributes:
        items: The items so far.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False

    def add(self, event: Event) -> Iterator[dict[str, Any]]:
        """Yield the events of the stream for an event of the parser."""
        if isinstance(event, CallBegin):
            yield from self.end()
            call = {"call_id": event.id, "name": event.name, "arguments": ""}
            yield self._begin({"type": "function_call", "id": new_id("fc"), **call, "status": "in_progress"})
        elif isinstance(event, CallDelta):
            self.items[-1]["arguments"] += event.arguments
            yield self._event("response.function_call_arguments.delta", delta=event.arguments)
        elif isinstance(event, CallEnd):
            yield from self.end()
        else:
            kind = "message" if isinstance(event, Content) else "reasoning"
            if not self._is_open or self.items[-1]["type"] != kind:
                yield from self.end()
                yield from self._begin_text(kind)
            self.items[-1]["content"][0]["text"] += event.text
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._text_event("delta", delta=event.text, **more)

    def end(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the last item, if it was not; yield the events."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._text_event("done", text=part["text"], **more)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _begin(self, item: dict[str, Any]) -> dict[str, Any]:
        self.items.append(item)
        self._is_open = True
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _begin_text(self, kind: str) -> Iterator[dict[str, Any]]:
        if kind == "message":
            item: dict[str, Any] = {"type": kind, "id": new_id("msg"), "role": "assistant", "status": "in_progress"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": kind, "id": new_id("rs"), "summary": [], "status": "in_progress"}
            part = {"type": "reasoning_text", "text": ""}
        yield self._begin({**item, "content": []})
        self.items[-1]["content"] = [part]
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _text_event(self, last: str, **fields: Any) -> dict[str, Any]:
        kind = "output_text" if self.items[-1]["type"] == "message" else "reasoning_text"
        return self._event(f"response.{kind}.{last}", content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
