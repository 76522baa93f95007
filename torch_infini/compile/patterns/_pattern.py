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
        names: The names that the report counts and users select.
        apply: Takes (graph, report, wanted), where wanted holds the names to replace; records each site in the report
            and replaces it in the graph.
        order: Patterns are applied in ascending order, patterns of equal order by file name.
    """

    names: tuple[str, ...]
    apply: Callable[[Graph, Report, frozenset[str]], None]
    order: int
