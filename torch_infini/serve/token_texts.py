"""TokenTexts: text and bytes of single tokens, for log-probabilities and /tokenize."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"  # what sentencepiece writes for a space


class TokenTexts:
    """Text and bytes of tokens, from their names in the forms of byte-level BPE and sentencepiece.

    Args:
        tokenizer: A transformers tokenizer.

    Attributes:
        added: The added tokens by their texts.
        special: The texts of those that are special.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._names = tokenizer.convert_ids_to_tokens
        self._tokenizer = tokenizer
        entries = tokenizer.added_tokens_decoder
        self._added = {int(token): str(entry.content) for token, entry in entries.items()}
        self.added = {text: token for token, text in self._added.items()}
        self.special = frozenset(str(entry.content) for entry in entries.values() if entry.special)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = "" if backend is None or backend.decoder is None else str(backend.decoder.__getstate__())
        self._byte_of = byte_alphabet() if "ByteLevel" in decoder else None
        self._known: dict[int, bytes] = {}

    @cached_property
    def longest(self) -> int:
        """The size of the longest token in bytes: a text of B bytes has at least B / longest tokens."""
        return max(map(len, map(self._find, range(len(self._tokenizer)))), default=1) or 1

    def bytes_of(self, token: int) -> bytes:
        """Return a token's bytes; empty for a token that the tokenizer does not know."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find(token)
        return found

    def text_of(self, token: int) -> str:
        """Return a token's text; incomplete characters become U+FFFD."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def _find(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode("utf-8", "replace")
        name = self._names(token)
        if not isinstance(name, str):
            return b""
        if self._byte_of is not None and all(letter in self._byte_of for letter in name):
            return bytes(self._byte_of[letter] for letter in name)
        if byte := BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        return name.replace(SPACE, " ").encode("utf-8", "replace")


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each letter of byte-level BPE represents.

    Printable bytes of Latin-1 are represented by themselves, the others, in order, by the letters from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + at): byte for at, byte in enumerate(others)}
