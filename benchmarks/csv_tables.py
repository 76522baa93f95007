"""Markdown tables of the CSV files of one kind of CPU: a module of tables registers each by the file that it shows.

table.py prints all of them; `make docs` puts those of the CPU that the pages quote into the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from harness import HERE, read_csv

RESULTS = HERE / "results"
PAGES = RESULTS / "zen-5"  # the folder that the pages quote

Rows = list[dict[str, str]]
Cells = Iterator[list[str]]  # of a table, row by row
TABLES: dict[str, Callable[[Path], str]] = {}  # in the order in which they are printed


def table(
    file: str, heads: str | Callable[[Rows], str], aligned: str = "l", name: str = ""
) -> Callable[[Callable[[Rows], Cells]], Callable[[Rows], Cells]]:
    """Registers a table of a file, "" where there is none, by its name or that of the function that makes its cells.

    Args:
        file: Of a folder of results.
        heads: Of the columns, with | between; or what makes them of the rows.
        aligned: The columns' sides, l(eft) or r(ight); the columns that it is too short for are aligned right.
        name: If not the function's.
    """

    def register(cells: Callable[[Rows], Cells]) -> Callable[[Rows], Cells]:
        def markdown(folder: Path) -> str:
            rows = read_csv(folder / file)
            if not rows:
                return ""
            head = heads if isinstance(heads, str) else heads(rows)
            sides = aligned.ljust(head.count("|") + 1, "r")
            rule = "".join("| ---: " if side == "r" else "| --- " for side in sides)
            return "\n".join([f"| {head} |", f"{rule}|", *(f"| {' | '.join(row)} |" for row in cells(rows))])

        TABLES[name or cells.__name__] = markdown
        return cells

    return register


def number(row: dict[str, str], name: str, form: str = "{:.2f}x", scale: float = 1) -> str:
    """A value of a row in that form; "-" where there is none."""
    return form.format(float(row[name]) * scale) if row[name] else "-"


def size_in_words(size: int) -> str:
    """A number of bytes: 64 KiB."""
    unit, name = next((u, n) for u, n in ((1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")) if size >= u)
    return f"{size // unit} {name}"
