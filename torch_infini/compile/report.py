"""What backend="infini" found in a graph, what it replaced, and why it left the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Report:
    """One compiled graph.

    Attributes:
        found: How many sites of each pattern were seen: "rms_norm", "add_rms_norm", "swiglu", "geglu", "rope",
            "attention", "linear".
        replaced: How many of them infini ops compute now.
        left: (pattern, reason) of each site that was left as it is.
        skipped: Why the whole graph was left as it is; None: it was not.
    """

    found: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    left: list[tuple[str, str]] = field(default_factory=list)
    skipped: str | None = None

    def settle(self, name: str, reason: str | None, wanted: frozenset[str]) -> bool:
        """Count a site of a pattern; whether it is to be replaced: no reason is against it, and it is wanted."""
        self.found[name] += 1
        reason = reason or (None if name in wanted else "it was not asked for")
        if reason:
            self.left.append((name, reason))
        else:
            self.replaced[name] += 1
        return reason is None

    def lines(self) -> Iterator[str]:
        """The report, line by line; the same reasons of a pattern are counted."""
        if self.skipped:
            yield f"the graph was left as it is: {self.skipped}"
        for name in sorted(self.found):
            yield f"{name}: {self.replaced[name]} of {self.found[name]} replaced"
        for (name, reason), count in sorted(Counter(self.left).items()):
            yield f"{name}: {count} left: {reason}"

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "nothing was found"
