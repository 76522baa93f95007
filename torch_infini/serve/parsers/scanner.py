"""Scanner: reads a text that arrives in pieces; its methods are generators that yield where they need the next piece.

So a form is written as if the whole text were there, and how the text was cut makes no difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields where more text is needed, and returns a T
Emit = Callable[[str], object]

MAX_NAME = 256  # characters of a name with the white space around it; a text without its end marker is not waited for
MAX_SCALAR = 4096  # characters of a number
SPACE = re.compile(r"[ \t\r\n]*")
SCALAR = re.compile(r"[-+.\w]*")  # a number or a word, valid or not
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
NUMBER_OR_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
UNICODE_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}")


class Scanner:
    """A text that arrives in pieces, and the position up to which it was read.

    Attributes:
        ended: Whether no piece follows.
    """

    def __init__(self) -> None:
        self.ended = False
        self._text, self._at = "", 0
        self._mark: int | None = None

    def add(self, piece: str) -> None:
        """Append a piece."""
        done = self._at if self._mark is None else self._mark
        self._text = self._text[done:] + piece
        self._at -= done
        if self._mark is not None:
            self._mark -= done

    def mark(self) -> None:
        """Remember the position, for rewind."""
        self._mark = self._at

    def rewind(self) -> None:
        """Return to the position of mark, and forget it."""
        assert self._mark is not None
        self._at, self._mark = self._mark, None

    def forget(self) -> None:
        """Forget the position of mark."""
        self._mark = None

    def peek(self, count: int) -> Steps[str]:
        """Return the next characters without reading them, fewer only at the end."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def skip(self, count: int) -> str:
        """Read characters that peek has returned."""
        self._at += count
        return self._text[self._at - count : self._at]

    def unread(self, text: str) -> None:
        """Return to the position before a text that was just read."""
        self._at -= len(text)

    def literal(self, text: str) -> Steps[bool]:
        """Read this text if it is next; return whether it is."""
        while not self.ended and len(self._text) - self._at < len(text):
            if not text.startswith(self._text[self._at :]):
                return False
            yield
        found = self._text.startswith(text, self._at)
        self._at += found * len(text)
        return found

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read and return the longest run of characters of a pattern such as [a-z]*."""
        pieces: list[str] = []
        while True:
            match = pattern.match(self._text, self._at)
            assert match
            pieces.append(self.skip(match.end() - self._at))
            if self._at < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def scalar(self) -> Steps[str | None]:
        """Read a number, true, false or null and return its text; None, and nothing is read, if there is none."""
        while True:
            match = SCALAR.match(self._text, self._at)
            assert match
            if match.end() < len(self._text) or self.ended or len(match[0]) > MAX_SCALAR:
                is_valid = len(match[0]) <= MAX_SCALAR and NUMBER_OR_WORD.fullmatch(match[0])
                return self.skip(len(match[0])) if is_valid else None
            yield

    def spaces(self) -> Steps[str]:
        """Read and return white space."""
        return (yield from self.run(SPACE))

    def until(self, markers: tuple[str, ...], emit: Emit) -> Steps[str | None]:
        """Read up to the first of several markers, and the marker.

        Args:
            markers: None is the beginning of another.
            emit: Called with the text before the marker, in pieces as early as possible.

        Returns:
            The marker; None if the text ends without one.
        """
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            if found:
                at, marker = min(found)
                end = at
            elif self.ended:
                end = len(self._text)
            else:
                end = len(self._text) - overlap(self._text, self._at, markers)
            if end > self._at:
                emit(self._text[self._at : end])
            self._at = end
            if found:
                self._at += len(marker)
                return marker
            if self.ended:
                return None
            yield

    def before(self, *markers: str, most: int = MAX_NAME) -> Steps[tuple[str, str] | None]:
        """Read a name up to the first of several markers.

        Args:
            *markers: None is the beginning of another.
            most: The most characters before the marker.

        Returns:
            The text before the marker, and the marker; None, and nothing is read, if there is none.
        """
        while True:
            end = self._at + most + max(map(len, markers))
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at, end)) >= 0]
            if found:
                at, marker = min(found)
                text = self.skip(at - self._at)
                self.skip(len(marker))
                return text, marker
            if self.ended or len(self._text) >= end:
                return None
            yield

    def json(self, emit: Emit) -> Steps[bool]:
        """Read one value in JSON.

        Control characters in strings, which models write and JSON does not allow, are emitted as escapes.

        Args:
            emit: Called with its text, in pieces as early as possible.

        Returns:
            Whether it is complete and valid; if not, the position is where it is not.
        """
        open_ends: list[str] = []
        expected = "value"  # or: first value, key, first key, colon, comma
        while True:
            if open_ends:
                emit((yield from self.spaces()))
            letter = yield from self.peek(1)
            if letter == "":
                return False
            if open_ends and letter == open_ends[-1] and expected in ("first value", "first key", "comma"):
                emit(self.skip(1))
                open_ends.pop()
                expected = "comma"
            elif expected in ("value", "first value") and letter in "{[":
                emit(self.skip(1))
                open_ends.append("}" if letter == "{" else "]")
                expected = "first key" if letter == "{" else "first value"
            elif expected not in ("colon", "comma") and letter == '"':
                if not (yield from self.string(emit)):
                    return False
                expected = "colon" if "key" in expected else "comma"
            elif expected in ("value", "first value"):
                word = yield from self.scalar()
                if word is None:
                    return False
                emit(word)
                expected = "comma"
            elif letter == {"colon": ":", "comma": ","}.get(expected):
                emit(self.skip(1))
                expected = "key" if expected == "comma" and open_ends[-1] == "}" else "value"
            else:
                return False
            if not open_ends:
                return True

    def string(self, emit: Emit) -> Steps[bool]:
        """Read a string in JSON, as json does any value."""
        if (yield from self.peek(1)) != '"':
            return False
        emit(self.skip(1))
        while True:
            emit((yield from self._available(PLAIN)))
            letter = yield from self.peek(1)
            if letter == '"':
                emit(self.skip(1))
                return True
            if letter == "\\":
                escape = yield from self.peek(2)
                if escape == "\\u":
                    escape = yield from self.peek(6)
                    if not UNICODE_ESCAPE.fullmatch(escape):
                        return False
                elif escape[1:] not in tuple('"\\/bfnrt'):
                    return False
                emit(self.skip(len(escape)))
            elif letter and letter < " ":
                emit(json.dumps(self.skip(1))[1:-1])
            elif letter == "":
                return False

    def _available(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read what is there of a run, which may go on in the next piece."""
        if self._at == len(self._text) and not self.ended:
            yield
        match = pattern.match(self._text, self._at)
        assert match
        return self.skip(match.end() - self._at)

    def string_value(self) -> Steps[str | None]:
        """Read a string in JSON and return its value; None if there is none."""
        pieces: list[str] = []
        is_valid = yield from self.string(pieces.append)
        return str(json.loads("".join(pieces))) if is_valid else None


def overlap(text: str, start: int, markers: tuple[str, ...]) -> int:
    """Return the length of the longest end of text[start:] that begins a marker."""
    most = max(map(len, markers), default=1) - 1
    for at in range(max(start, len(text) - most), len(text)):
        end = text[at:]
        if any(marker.startswith(end) for marker in markers):
            return len(end)
    return 0
