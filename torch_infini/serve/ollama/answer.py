"""OllamaAnswer: an answer as Ollama's messages, whole or as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

from ...engine import RequestOutput
from ..answers import Answer, ChoiceDelta
from ..encoding import to_json
from ..errors import OLLAMA_PATH, ApiError
from ..parsers import CallBegin, CallDelta, CallEnd, Content, Event, Reasoning
from ..reading import Reading
from ..token_texts import TokenTexts


def now() -> str:
    """Return the time in the form of RFC 3339."""
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def to_line(value: dict[str, Any]) -> bytes:
    return to_json(value) + b"\n"


class OllamaAnswer(Answer):
    """An answer of Ollama's interface; subclasses say how its text is shown.

    Args:
        model, texts: As of Answer.
        reading: How the text is read.
    """

    PREFIX = "ollama"
    MEDIA_TYPE = "application/x-ndjson"
    PING = b""  # lines have no comments

    def __init__(self, model: str, texts: TokenTexts | None, reading: Reading) -> None:
        super().__init__(model, texts)
        self._model = model
        self._parser = reading.parser()
        self._call: CallBegin | None = None
        self._arguments = ""

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        message: dict[str, Any] = {"content": ""}
        for delta in self._deltas_of(outputs[0].outputs[0].text, True):
            for name, value in delta.items():
                message[name] = message[name] + value if name in message else value
        return self._last(message, outputs)

    def events(self, part: ChoiceDelta, include_usage: bool) -> bytes:
        """Return the lines of a part of the text; the last one is left to `end`."""
        deltas = self._deltas_of(part.text, part.finish is not None)
        return b"".join(to_line({**self._first(delta), "done": False}) for delta in deltas)

    def end(self, outputs: Iterable[RequestOutput], include_usage: bool) -> bytes:
        """Return the last line: why the text ended, numbers of tokens, and times."""
        return to_line(self._last({"content": ""}, list(outputs)))

    def failure(self, error: ApiError) -> bytes:
        return to_line(error.body(OLLAMA_PATH))

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without a prompt, by which clients have the model loaded: it is."""
        return {**self._first({"content": ""}), "done": True, "done_reason": "load"}

    def shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of an answer that have its text."""
        raise NotImplementedError

    def _deltas_of(self, text: str, is_last: bool) -> Iterator[dict[str, Any]]:
        events = self._parser.feed(text)
        events += self._parser.finish() if is_last else []
        for event in events:
            delta = self._delta(event)
            if delta is not None:
                yield {"content": "", **delta}

    def _delta(self, event: Event) -> dict[str, Any] | None:
        """Return what an event adds to the message; a call is added at its end, because its arguments are an object."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"thinking": event.text}
        if isinstance(event, CallBegin):
            self._call, self._arguments = event, ""
        elif isinstance(event, CallDelta):
            self._arguments += event.arguments
        elif isinstance(event, CallEnd) and self._call is not None:
            try:
                arguments = json.loads(self._arguments)
            except ValueError:  # num_predict cut them: a call with other arguments would be another call
                return None
            function = {"index": self._call.call, "name": self._call.name, "arguments": arguments}
            return {"tool_calls": [{"id": self._call.id, "function": function}]}
        return None

    def _first(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model, "created_at": now(), **self.shown(message)}

    def _last(self, message: dict[str, Any], outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        # Until the first token, and in all; in nanoseconds. The model is loaded when the server starts.
        first, total = (int(1e9 * (seconds or 0)) for seconds in output.metrics)
        return {
            **self._first(message),
            "done": True,
            "done_reason": output.outputs[0].finish_reason,
            "total_duration": total,
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": first,
            "eval_count": len(output.outputs[0].token_ids),
            "eval_duration": max(0, total - first),
        }


class OllamaChatAnswer(OllamaAnswer):
    """The answer of /api/chat."""

    def shown(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"message": {"role": "assistant", **message}}


class GenerateAnswer(OllamaAnswer):
    """The answer of /api/generate."""

    def shown(self, message: dict[str, Any]) -> dict[str, Any]:
        thinking = {"thinking": message["thinking"]} if "thinking" in message else {}
        return {"response": message["content"], **thinking}
