"""Report: what backend="infini" found in a graph, what it replaced, and why it left the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Report:
    """One compiled graph.

    Attributes:
        found: The number of sites of each pattern: "rms_norm", "add_rms_norm", "swiglu", "geglu", "rope", "attention",
            "linear".
        replaced: The number of those sites that infini ops now compute.
        left: (pattern, reason) of each site that was not replaced.
        skipped: Why the whole graph was left unchanged; None if it was not.
    """

    found: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    left: list[tuple[str, str]] = field(default_factory=list)
    skipped: str | None = None

    def record(self, name: str, reason: str | None, wanted: frozenset[str]) -> bool:
        """Count a site of a pattern; return whether to replace it: it is wanted, and `reason` is None."""
        self.found[name] += 1
        reason = reason or (None if name in wanted else "it was not requested")
        if reason:
            self.left.append((name, reason))
        else:
            self.replaced[name] += 1
        return reason is None

    def lines(self) -> Iterator[str]:
        """Yield the report line by line; equal reasons of a pattern are merged and counted."""
        if self.skipped:
            yield f"the graph was left as it is: {self.skipped}"
        for name in sorted(self.found):
            yield f"{name}: {self.replaced[name]} of {self.found[name]} replaced"
        for (name, reason), count in sorted(Counter(self.left).items()):
            yield f"{name}: {count} left: {reason}"

    def __str__(self) -> str:
        return "\n".join(self.lines()) or "nothing was found"
