"""Prompts in the answers of /v1/completions: log-probabilities of their tokens, and where they begin in the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..engine import RequestOutput, TokenLogprobs
from .token_texts import TokenTexts

MIN_LOGPROB = -9999.0  # replaces log-probability -infinity, as in OpenAI's API: JSON has no infinity


def shown_logprobs(output: RequestOutput, text_of: Callable[[int], str]) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt in the form of vLLM's server.

    Args:
        output: Of the prompt.
        text_of: Gives the text of a token.

    Returns:
        For each token of the prompt an object of itself and the likeliest tokens, by token id; None for the first
        token. None if they were not requested.
    """
    if output.prompt_token_logprobs is None:
        return None

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text_of(token)}

    def entries(one: TokenLogprobs) -> dict[str, Any]:
        found = {str(token): entry(token, logprob, rank) for rank, (token, logprob) in enumerate(one.top, 1)}
        found.setdefault(str(one.token), entry(one.token, one.logprob, one.rank))
        return found

    return [None, *map(entries, output.prompt_token_logprobs)]


def offsets_in(text: str, tokens: Sequence[int], texts: TokenTexts | None) -> list[int]:
    """Return where in a text each of its tokens begins, in characters.

    Args:
        text: The text.
        tokens: Its tokens. Tokens in front that are no part of the text, which a tokenizer adds, begin at 0.
        texts: Texts of the tokens; None: there is no tokenizer, and all begin at 0.
    """
    if texts is None:
        return [0] * len(tokens)
    parts = [texts.bytes_of(token) for token in tokens]
    whole, data = b"".join(parts), text.encode("utf-8", "replace")
    ahead = len(whole) - len(data) if whole.endswith(data) else 0
    offsets, at, characters = [], 0, 0
    for part in parts:
        offsets.append(min(characters, len(text)))
        own = part[max(ahead - at, 0) :]
        characters += sum(byte & 0xC0 != 0x80 for byte in own)  # bytes that do not continue a character
        at += len(part)
    return offsets
