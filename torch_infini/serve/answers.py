"""Answers: what chat and text completions look like, whole and in chunks, from the engine's outputs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..engine import CompletionOutput, RequestOutput, TokenLogprobs
from .token_texts import TokenTexts

LEAST = -9999.0  # stands for log-probability -infinity, as in OpenAI's API: JSON has no infinity


class ChoiceDelta(NamedTuple):
    """What a choice has gained: all of it, or what a chunk adds.

    Attributes:
        choice: Its index.
        text, tokens, logprobs: What is new.
        at: Characters of the tokens' texts before these.
        is_first: Whether the choice had nothing yet.
        finish: Why it ended; None: it goes on.
    """

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    at: int
    is_first: bool
    finish: str | None


class Answer:
    """One answer; a subclass says what its choices look like.

    Args:
        model: The name in it.
        texts: Of tokens, for log-probabilities.
    """

    PREFIX: str
    WHOLE: str
    CHUNK: str

    def __init__(self, model: str, texts: TokenTexts | None) -> None:
        self._head = {"id": f"{self.PREFIX}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._texts = texts

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        choices = [self._choice(part) for part in parts_of(outputs)]
        return {**self._head, "object": self.WHOLE, "choices": choices, "usage": usage_of(outputs)}

    def chunk(self, part: ChoiceDelta, include_usage: bool) -> dict[str, Any]:
        """Return a chunk of a streamed answer; where its last chunk has the usage, the others have null."""
        usage = {"usage": None} if include_usage else {}
        return {**self._head, "object": self.CHUNK, "choices": [self._delta(part)], **usage}

    def usage_chunk(self, outputs: Iterable[RequestOutput]) -> dict[str, Any]:
        """Return the chunk behind the last, which has no choices."""
        return {**self._head, "object": self.CHUNK, "choices": [], "usage": usage_of(outputs)}

    def text_of(self, token: int) -> str:
        """Return a token's text; token_id:N where there is no tokenizer."""
        return f"token_id:{token}" if self._texts is None else self._texts.text_of(token)

    def _choice(self, part: ChoiceDelta) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, part: ChoiceDelta) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    """The answer of /v1/chat/completions."""

    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, part: ChoiceDelta) -> dict[str, Any]:
        message = {"role": "assistant", "content": part.text, "refusal": None}
        return {"index": part.choice, "message": message, **self._end(part)}

    def _delta(self, part: ChoiceDelta) -> dict[str, Any]:
        # The role comes with the first text: a chunk before the first token would pass for one.
        role = {"role": "assistant"} if part.is_first else {}
        return {"index": part.choice, "delta": {**role, "content": part.text}, **self._end(part)}

    def _end(self, part: ChoiceDelta) -> dict[str, Any]:
        return {"logprobs": self._logprobs(part), "finish_reason": part.finish}

    def _logprobs(self, part: ChoiceDelta) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        content = [
            {**self._entry(one.token, one.logprob), "top_logprobs": [self._entry(*other) for other in one.top]}
            for one in part.logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = None if self._texts is None else list(self._texts.bytes_of(token))
        return {"token": self.text_of(token), "logprob": max(logprob, LEAST), "bytes": data}


class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    PREFIX, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"

    def _choice(self, part: ChoiceDelta) -> dict[str, Any]:
        return {
            "index": part.choice,
            "text": part.text,
            "logprobs": self._logprobs(part),
            "finish_reason": part.finish,
        }

    _delta = _choice

    def _logprobs(self, part: ChoiceDelta) -> dict[str, Any] | None:
        if part.logprobs is None:
            return None
        texts = [self.text_of(token) for token in part.tokens]
        offsets, at = [], part.at
        for text in texts:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [max(one.logprob, LEAST) for one in part.logprobs],
            "top_logprobs": [
                {self.text_of(token): max(logprob, LEAST) for token, logprob in reversed(one.top)}
                for one in part.logprobs
            ],
            "text_offset": offsets,
        }


class Parts:
    """The chunks of a streamed answer: what each output has that those before it had not.

    Args:
        samples: Of each prompt.
        answer: Says how long the tokens' texts are.
    """

    def __init__(self, samples: int, answer: Answer) -> None:
        self._samples, self._answer = samples, answer
        self._had: dict[
            int, tuple[int, int, int]
        ] = {}  # by choice: characters, tokens, characters of the tokens' texts
        self.outputs: dict[int, RequestOutput] = {}

    def new(self, at: int, output: RequestOutput) -> Iterator[ChoiceDelta]:
        """Yield the parts that an output of prompt `at` adds, none without text, log-probabilities or an end."""
        before = self.outputs.get(at)
        self.outputs[at] = output
        ended = set() if before is None else {c.index for c in before.outputs if c.finish_reason is not None}
        for completion in output.outputs:
            index = at * self._samples + completion.index
            characters, tokens, spread = self._had.get(index, (0, 0, 0))
            shown = completion.text_tokens  # those of a stop string, or of what may become one, are not
            text, new = completion.text[characters:], completion.token_ids[tokens:shown]
            logprobs = None if completion.token_logprobs is None else completion.token_logprobs[tokens:shown]
            if completion.index in ended or not (text or logprobs or completion.finish_reason):
                continue
            yield ChoiceDelta(index, text, new, logprobs, spread, index not in self._had, completion.finish_reason)
            if logprobs is not None:
                spread += sum(len(self._answer.text_of(token)) for token in new)
            self._had[index] = len(completion.text), max(tokens, shown), spread


def parts_of(outputs: Sequence[RequestOutput]) -> list[ChoiceDelta]:
    """Return the choices of finished outputs: all samples of the first prompt, then those of the next."""
    completions: list[CompletionOutput] = [completion for output in outputs for completion in output.outputs]
    return [
        ChoiceDelta(
            i,
            c.text,
            c.token_ids[: c.text_tokens],
            c.token_logprobs and c.token_logprobs[: c.text_tokens],
            0,
            True,
            c.finish_reason,
        )
        for i, c in enumerate(completions)
    ]


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Return the numbers of tokens; a prompt counts once, however many samples it has."""
    outputs = list(outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    generated = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }
