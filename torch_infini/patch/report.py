"""PatchReport: what patch_model replaced, what it left, and why."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

LEFT = "left"


def pattern(name: str) -> str:
    """A module's name with * for the numbers of layers: model.layers.*.mlp."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


@dataclass(frozen=True)
class Row:
    """One module: its name, its class, the ops that serve it ("left" if none does), and why it was left."""

    name: str
    module_class: str
    op: str
    reason: str = ""


@dataclass(frozen=True)
class PatchReport:
    """What patch_model did to one model; print it for a table.

    Attributes:
        family: The structure that was recognised.
        model_class: The model's class.
        rows: One for each module that could have been replaced.
        already_patched: The model was patched before this call, which changed nothing.
    """

    family: str
    model_class: str
    rows: tuple[Row, ...]
    already_patched: bool = False

    @property
    def replaced(self) -> tuple[Row, ...]:
        """The rows of modules that infini ops serve now."""
        return tuple(row for row in self.rows if row.op != LEFT)

    @property
    def left(self) -> tuple[Row, ...]:
        """The rows of modules that stay as they were, each with its reason."""
        return tuple(row for row in self.rows if row.op == LEFT)

    @property
    def counts(self) -> dict[str, int]:
        """How many modules each op (or group of ops) serves, and how many were left."""
        return dict(Counter(row.op for row in self.rows))

    def __str__(self) -> str:
        verb = "was patched already" if self.already_patched else "patched"
        head = (
            f"{self.model_class} ({self.family}) {verb}: {len(self.replaced)} modules replaced, {len(self.left)} left"
        )
        kinds = Counter((pattern(row.name), row.module_class, row.op, row.reason) for row in self.rows)
        cells = [(f"{count} x", name, kind, op) for (name, kind, op, _), count in kinds.items()]
        widths = [max(map(len, column)) for column in zip(*cells)]
        lines = [head]
        for row, (_, _, _, reason) in zip(cells, kinds):
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
            lines.append(f"  {line}: {reason}" if reason else f"  {line}")
        return "\n".join(lines)
