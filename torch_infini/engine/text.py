"""TextStream: decodes a sequence while it is generated; returns text that no later token changes, up to a stop string.

Each token costs a decode of a few tokens, however long the sequence is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .sampling_params import SamplingParams

CONTEXT = 6  # tokens that are decoded with each new one; up to twice as many between two cuts
UNDECIDED = 4  # bytes of the longest UTF-8 character, and so the most tokens whose text may still change
REPLACEMENT = "\ufffd"  # what tokenizers return for invalid or incomplete UTF-8


class TextStream:
    """Incremental detokenizer of one sequence.

    The increments add up to tokenizer.decode(output, skip_special_tokens=True) up to the first stop string; with
    prompt_tokens, to the part of decode(prompt + output) after decode(prompt): a sentencepiece tokenizer drops the
    space at the beginning of a text, but not the one between prompt and output. Spaces before punctuation are kept
    (clean_up_tokenization_spaces=False).

    One exception: tokenizers with byte fallback (Llama 2's) turn a whole run of byte tokens into U+FFFD if one of its
    bytes is not UTF-8. Characters of the run that were complete before that byte were already returned, and stay.

    The stop string that is complete first ends the text; of several that end at the same place, the longest. Text from
    before the sequence has params.min_tokens tokens does not count.

    Args:
        tokenizer: One of transformers', or anything with decode(ids, skip_special_tokens=,
            clean_up_tokenization_spaces=).
        params: The request's settings: stop, include_stop_str_in_output, min_tokens and skip_special_tokens.
        prompt_tokens: The tokens that the output continues; may be empty.

    Attributes:
        stopped: The stop string that was found; None before that. The sequence should end there.
        added: How many tokens were added.
    """

    def __init__(self, tokenizer: Any, params: SamplingParams | None = None, prompt_tokens: Sequence[int] = ()) -> None:
        self.stopped: str | None = None
        self._decode = tokenizer.decode
        self._params = params or SamplingParams()
        self._special = special_tokens(tokenizer) if self._params.skip_special_tokens else frozenset()
        self.added = 0
        self._held = ""  # text that may be the beginning of a stop string
        # The last tokens; the part of their text that was returned; how many of them have changed that part.
        self._window: list[int] = self._end_of(prompt_tokens)
        self._given = settled(self._text(self._window))
        self._unsettled = 0

    def add(self, token: int) -> str:
        """Add the next token.

        Args:
            token: Its id.

        Returns:
            The new text that is final, often empty; always empty after a stop string was found.
        """
        self.added += 1
        if self.stopped is not None or token in self._special:
            return ""
        self._window.append(token)
        return self._search(self._final_text())

    @property
    def held(self) -> int:
        """The number of characters that are held back because they may begin a stop string."""
        return len(self._held)

    def finish(self) -> str:
        """Return the text that was held back, after the last token.

        That is a character's first bytes, as U+FFFD, and the beginning of a stop string. A second call returns "".
        """
        if self.stopped is not None:
            return ""
        text = self._search(self._final_text(last=True))
        held, self._held = self._held, ""
        return text + held

    def _text(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        skip = self._params.skip_special_tokens
        text = self._decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        if not isinstance(text, str):
            raise TypeError(f"decode must return a str, got {text!r}")
        return text

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """Return enough of a prompt's last tokens to have text; all of them if they have none."""
        end = [token for token in prompt[-2 * CONTEXT :] if token not in self._special]
        # The first token may be in the middle of a character.
        ends = [end[begin:] for begin in range(UNDECIDED) if settled(self._text(end[begin:]))]
        if len(prompt) > 2 * CONTEXT and ends:
            return min(ends, key=lambda tokens: self._text(tokens).count(REPLACEMENT))
        return [token for token in prompt if token not in self._special]

    def _final_text(self, last: bool = False) -> str:
        """Return the text that became final with the window's last token."""
        text = self._text(self._window)
        if not text.startswith(self._given):
            # A byte token after others turns them all into U+FFFD until its character is complete.
            self._unsettled += not last
            if self._unsettled <= UNDECIDED and not last:
                return ""
            self._window = self._window[-self._unsettled :]
            self._given, text = "", self._text(self._window)
        self._unsettled = 0
        new = (text if last else settled(text))[len(self._given) :]
        self._given += new
        if len(self._window) >= 2 * CONTEXT:
            self._cut(text)
        return new

    def _cut(self, text: str) -> None:
        """Drop first tokens of the window if the text of the rest is unchanged and some of it was returned.

        It may change because a tokenizer may drop the space of a text's first token.
        """
        rest = len(text) - len(self._given)
        for begin in range(len(self._window) - CONTEXT, len(self._window)):
            kept = self._text(self._window[begin:])
            if len(kept) > rest and text.endswith(kept):
                self._window, self._given = self._window[begin:], kept[: len(kept) - rest]
                return

    def _search(self, new: str) -> str:
        """Return the part of the held and the new text that is before a stop string and does not begin one."""
        if not self._params.stop or self.added < self._params.min_tokens:
            return new
        text = self._held + new
        found = [(at + len(stop), at, stop) for stop in self._params.stop if (at := text.find(stop)) >= 0]
        if found:
            end, at, self.stopped = min(found)
            self._held = ""
            return text[: end if self._params.include_stop_str_in_output else at]
        keep = max(
            (length for stop in self._params.stop for length in range(1, len(stop)) if text.endswith(stop[:length])),
            default=0,
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def settled(text: str) -> str:
    """Return the text without a tail that may be a character's first bytes."""
    end = len(text)
    while end > max(len(text) - UNDECIDED, 0) and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids that skip_special_tokens skips."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(token for token, entry in added.items() if entry.special)
