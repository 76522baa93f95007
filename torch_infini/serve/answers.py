"""Answer: formats the engine's outputs as chat or text completions, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ..engine import RequestOutput, TokenLogprobs
from .encoding import DONE, PING, to_event, to_json
from .errors import ApiError
from .parsers import CallBegin, CallDelta, Content, Event, OutputParser, Reasoning
from .prompt_logprobs import MIN_LOGPROB, offsets_in, shown_logprobs
from .reading import Reading
from .token_texts import TokenTexts


class ChoiceDelta(NamedTuple):
    """The part of a choice that a chunk adds; for an answer that is not streamed, all of it.

    Attributes:
        choice: The choice's index.
        text, tokens, logprobs: The new text and tokens, and the tokens' log-probabilities.
        at: The number of characters in the texts of all earlier tokens.
        is_first: Whether it is the choice's first part.
        finish: Why the choice ended; None: it has not.
        output: The output of the choice's prompt.
    """

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    at: int
    is_first: bool
    finish: str | None
    output: RequestOutput


class Answer:
    """One answer; subclasses format its choices.

    Args:
        model: The model's name in the answer.
        texts: Texts of tokens, for log-probabilities.
        fingerprint: Identifies what computes the answers, as system_fingerprint; None: null.

    Attributes:
        continuous_usage: Whether the chunks of a stream that has its usage have it so far: that of the choice's prompt.
        PREFIX, WHOLE, CHUNK: The beginning of ids, and the names of the objects, whole and in a stream.
        MEDIA_TYPE: That of a stream.
        PING: What a stream sends while nothing is computed; may be empty.
    """

    PREFIX: str
    WHOLE: str
    CHUNK: str
    MEDIA_TYPE = "text/event-stream"
    PING = PING
    continuous_usage = False

    def __init__(self, model: str, texts: TokenTexts | None, fingerprint: str | None = None) -> None:
        self._head: dict[str, Any] = {
            "id": f"{self.PREFIX}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._texts = texts

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        choices = [self._choice(part) for part in full_choices(outputs)]
        return {**self._head, "object": self.WHOLE, "choices": choices, "usage": self.usage(outputs)}

    def events(self, part: ChoiceDelta, include_usage: bool) -> bytes:
        """Return the events of a part of a streamed answer, as chunks.

        Args:
            part: The part.
            include_usage: Whether the last chunk has the usage; then that of the others is null, or so far.
        """
        usage = to_json(usage_of([part.output])) if include_usage and self.continuous_usage else b"null"
        after = b'],"usage":' + usage + b"}\n\n" if include_usage else b"]}\n\n"
        return b"".join(self._before + to_json(choice) + after for choice in self._deltas(part))

    @cached_property
    def _before(self) -> bytes:
        """An event up to its choice: the same for each token, so that it is made once."""
        return to_event({**self._head, "object": self.CHUNK, "choices": []}).removesuffix(b"]}\n\n")

    def usage_chunk(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """Return the last chunk, which has the usage and no choices."""
        return {**self._head, "object": self.CHUNK, "choices": [], "usage": self.usage(outputs)}

    def usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """Return the numbers of tokens."""
        return usage_of(outputs)

    def end(self, outputs: Iterable[RequestOutput], include_usage: bool) -> bytes:
        """Return the events at the stream's end."""
        return (to_event(self.usage_chunk(outputs)) if include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the events of a stream that an error ends, whose status has been sent."""
        return to_event(error.body()) + DONE

    def text_of(self, token: int) -> str:
        """Return a token's text; token_id:N if there is no tokenizer."""
        return f"token_id:{token}" if self._texts is None else self._texts.text_of(token)

    def _choice(self, part: ChoiceDelta) -> dict[str, Any]:
        raise NotImplementedError

    def _deltas(self, part: ChoiceDelta) -> Iterator[dict[str, Any]]:
        raise NotImplementedError


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions.

    Args:
        model, texts, fingerprint: As of Answer.
        reading: How texts are read.
    """

    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, model: str, texts: TokenTexts | None, fingerprint: str | None = None, reading: Reading | None = None
    ) -> None:
        super().__init__(model, texts, fingerprint)
        self._reading = Reading() if reading is None else reading
        # By choice: what reads it, and log-probabilities whose tokens have no text in a chunk yet.
        self._parsers: dict[int, OutputParser] = {}
        self._pending: dict[int, list[dict[str, Any]]] = {}

    def usage(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """Return the numbers of tokens, with those of the reasoning where it is told apart."""
        outputs = list(outputs)
        usage = usage_of(outputs)
        if self._reading.thinking is not None and self._texts is not None:
            tokens = [completion.token_ids for output in outputs for completion in output.outputs]
            number = sum(self._reading.reasoning_tokens(one, self._texts) for one in tokens)
            usage["completion_tokens_details"] = {"reasoning_tokens": number}
        return usage

    def _choice(self, part: ChoiceDelta) -> dict[str, Any]:
        parser = self._reading.parser()
        message = message_of([*parser.feed(part.text), *parser.finish()])
        logprobs = self._logprobs(part)
        return {
            "index": part.choice,
            "message": message,
            "logprobs": None if logprobs is None else {"content": logprobs, "refusal": None},
            "finish_reason": finish_of(part, parser),
        }

    def _deltas(self, part: ChoiceDelta) -> Iterator[dict[str, Any]]:
        """Yield the role before a choice's first text, and why it ended after the last one, as OpenAI's server does.

        All of them are sent together: a role that was sent earlier would be measured as the first token.
        """
        parser = self._parsers.setdefault(part.choice, self._reading.parser())
        events = parser.feed(part.text)
        events += parser.finish() if part.finish is not None else []
        logprobs = self._logprobs(part)
        if logprobs is not None:
            logprobs = self._pending.pop(part.choice, []) + logprobs

        def choice(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            nonlocal logprobs
            sent, logprobs = logprobs or None, None if logprobs is None else []
            shown = None if sent is None else {"content": sent, "refusal": None}
            return {"index": part.choice, "delta": delta, "logprobs": shown, "finish_reason": finish}

        if part.is_first:
            role = {"role": "assistant", "content": "", "refusal": None}
            yield {"index": part.choice, "delta": role, "logprobs": None, "finish_reason": None}
        for delta in filter(None, map(delta_of, events)):
            yield choice(delta)
        if part.finish is not None:
            yield choice({}, finish_of(part, parser))
        elif logprobs:
            self._pending[part.choice] = logprobs

    def _logprobs(self, part: ChoiceDelta) -> list[dict[str, Any]] | None:
        if part.logprobs is None:
            return None
        return [
            {**self._entry(one.token, one.logprob), "top_logprobs": [self._entry(*other) for other in one.top]}
            for one in part.logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = None if self._texts is None else list(self._texts.bytes_of(token))
        return {"token": self.text_of(token), "logprob": max(logprob, MIN_LOGPROB), "bytes": data}


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return an answer's message; content is null where there is none beside reasoning or calls."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls = [call_of(event) for event in events if isinstance(event, CallBegin)]
    for event in events:
        if isinstance(event, CallDelta):
            calls[event.call]["function"]["arguments"] += event.arguments
    more = {"reasoning_content": reasoning, "tool_calls": calls}
    shown = {name: value for name, value in more.items() if value}
    return {"role": "assistant", "content": content or (None if shown else ""), "refusal": None, **shown}


def call_of(begin: CallBegin) -> dict[str, Any]:
    return {"id": begin.id, "type": "function", "function": {"name": begin.name, "arguments": ""}}


def delta_of(event: Event) -> dict[str, Any] | None:
    """Return the delta of a chunk; None for the end of a call, which has none."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, CallBegin):
        return {"tool_calls": [{"index": event.call, **call_of(event)}]}
    if isinstance(event, CallDelta):
        return {"tool_calls": [{"index": event.call, "function": {"arguments": event.arguments}}]}
    return None


def finish_of(part: ChoiceDelta, parser: OutputParser) -> str | None:
    """Return why a choice ended: an answer with calls that was not cut off waits for the tools."""
    return "tool_calls" if part.finish == "stop" and parser.num_calls else part.finish


class CompletionAnswer(Answer):
    """The answer of /v1/completions.

    Args:
        model, texts, fingerprint: As of Answer.
        echo: For each choice the text of its prompt, which its own text follows; empty: prompts are not repeated.
        prompt_logprobs: Whether choices have the log-probabilities of their prompts as prompt_logprobs.
    """

    PREFIX, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        texts: TokenTexts | None,
        fingerprint: str | None = None,
        echo: Sequence[str] = (),
        prompt_logprobs: bool = False,
    ) -> None:
        super().__init__(model, texts, fingerprint)
        self._echo, self._prompt_logprobs = echo, prompt_logprobs

    def _choice(self, part: ChoiceDelta) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self._prompt_logprobs and part.is_first:
            more["prompt_logprobs"] = shown_logprobs(part.output, self.text_of)
        return {
            "index": part.choice,
            "text": self._echo[part.choice] + part.text if self._echo and part.is_first else part.text,
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish,
            **more,
        }

    def _deltas(self, part: ChoiceDelta) -> Iterator[dict[str, Any]]:
        yield self._choice(part)

    def _logprobs(self, part: ChoiceDelta) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        tokens, at = part.tokens, part.at
        entries: list[TokenLogprobs | None] = [*part.logprobs]
        offsets: list[int] = []
        if self._echo:
            prompt, output = self._echo[part.choice], part.output
            at += len(prompt)
            if part.is_first:
                tokens = [*output.prompt_token_ids, *tokens]
                entries = [None, *(output.prompt_token_logprobs or ()), *entries]
                offsets = offsets_in(prompt, output.prompt_token_ids, self._texts)
        texts = [self.text_of(token) for token in tokens]
        for text in texts[len(offsets) :]:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else max(one.logprob, MIN_LOGPROB) for one in entries],
            "top_logprobs": [None if one is None else self._top(one) for one in entries],
            "text_offset": offsets,
        }

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """Return the likeliest tokens by their texts; of several with one text, the likeliest."""
        return {self.text_of(token): max(logprob, MIN_LOGPROB) for token, logprob in reversed(one.top)}


class DeltaTracker:
    """Splits the outputs of a streamed answer: yields what each output adds to those before it.

    Args:
        samples: The number of samples of each prompt.
        answer: Its text_of gives the tokens' texts.
    """

    def __init__(self, samples: int, answer: Answer) -> None:
        self._samples, self._answer = samples, answer
        # By choice, what was yielded: characters, tokens, characters of the tokens' texts.
        self._sent: dict[int, tuple[int, int, int]] = {}
        self.outputs: dict[int, RequestOutput] = {}

    def new(self, at: int, output: RequestOutput) -> Iterator[ChoiceDelta]:
        """Yield the parts that an output of prompt `at` adds, without those that have no text, logprobs or end."""
        before = self.outputs.get(at)
        self.outputs[at] = output
        ended = set() if before is None else {c.index for c in before.outputs if c.finish_reason is not None}
        for completion in output.outputs:
            index = at * self._samples + completion.index
            characters, tokens, spread = self._sent.get(index, (0, 0, 0))
            shown = completion.text_tokens  # tokens of a (possible) stop string are not shown
            text, new = completion.text[characters:], completion.token_ids[tokens:shown]
            logprobs = None if completion.token_logprobs is None else completion.token_logprobs[tokens:shown]
            if completion.index in ended or not (text or logprobs or completion.finish_reason):
                continue
            is_first, finish = index not in self._sent, completion.finish_reason
            yield ChoiceDelta(index, text, new, logprobs, spread, is_first, finish, output)
            if logprobs is not None:
                spread += sum(len(self._answer.text_of(token)) for token in new)
            self._sent[index] = len(completion.text), max(tokens, shown), spread


def full_choices(outputs: Sequence[RequestOutput]) -> list[ChoiceDelta]:
    """Return the choices of finished outputs: all samples of the first prompt, then those of the next."""
    completions = [(completion, output) for output in outputs for completion in output.outputs]
    return [
        ChoiceDelta(
            i,
            c.text,
            c.token_ids[: c.text_tokens],
            c.token_logprobs and c.token_logprobs[: c.text_tokens],
            0,
            True,
            c.finish_reason,
            output,
        )
        for i, (c, output) in enumerate(completions)
    ]


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Return the numbers of tokens; a prompt counts once, whatever its number of samples."""
    outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
