"""Pattern: a formula that backend="infini" looks for in a graph and replaces by infini ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph

from ..report import Report


@dataclass(frozen=True)
class Pattern:
    """One formula, or several that one search finds.

    Attributes:
        names: What the report counts, and what users select.
        apply: Takes (graph, report, wanted), where wanted has the names to replace; records each site in the report and
            replaces it in the graph.
        order: Patterns are applied in this order, and those of equal order by the names of their files.
    """

    names: tuple[str, ...]
    apply: Callable[[Graph, Report, frozenset[str]], None]
    order: int
