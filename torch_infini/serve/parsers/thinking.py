"""Thinking: how a model marks the reasoning at the beginning of its answer."""

from __future__ import annotations

from typing import NamedTuple


class Thinking(NamedTuple):
    """How a model marks its reasoning, at the beginning of its answer.

    Attributes:
        name: Its name for --reasoning-parser.
        begin, end: The texts before and after the reasoning.
        markers: Texts that a chat template of this kind has, all of them; empty: `end`.
    """

    name: str
    begin: str
    end: str
    markers: tuple[str, ...] = ()

    def recognises(self, template: str) -> bool:
        """Return whether a chat template has reasoning of this kind."""
        return all(marker in template for marker in self.markers or (self.end,))
