"""ResponseStore: the latest responses, in memory, for previous_response_id and GET /v1/responses/ID."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from ..encoding import to_json

MAX_BYTES = 64 << 20  # of all responses and their conversations, in JSON


class Kept(NamedTuple):
    """A response, and the conversation that it ends, in messages of chat completions."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class ResponseStore:
    """Keeps responses by id, the latest ones; for one event loop.

    Args:
        most: The most responses.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most, self._size = most, 0
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def add(self, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response; the oldest ones go, as far as needed."""
        size = len(to_json([response, messages]))
        self._kept[response["id"]] = Kept(response, messages, size)
        self._size += size
        while len(self._kept) > self._most or self._size > MAX_BYTES:
            self._size -= self._kept.popitem(last=False)[1].size

    def get(self, id: str) -> Kept | None:
        """Return a response; None if there is none of this id, or no longer."""
        return self._kept.get(id)

    def remove(self, id: str) -> bool:
        """Remove a response; return whether it was there."""
        kept = self._kept.pop(id, None)
        self._size -= 0 if kept is None else kept.size
        return kept is not None
