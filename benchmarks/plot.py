"""Draws generate.csv as an SVG file beside it: a panel a cell, a bar an engine, tokens a second.

python benchmarks/plot.py
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from torch_infini.testing.benchmark import results_of

OURS, THEIRS = "#1f6feb", "#9aa4b2"
BAR, GAP, LABEL, PANEL, MARGIN = 16, 5, 150, 430, 14  # pixels
TITLES = {
    "decode-16": "decode, 16 tokens in the cache",
    "decode-2048": "decode, 2048 tokens in the cache",
    "decode-16x8": "decode, batch 8, 16 in each cache",
    "prefill-512": "prompt of 512 tokens",
    "prefill-2048": "prompt of 2048 tokens",
    "generate": "generate() behind 16 tokens",
    "serve-32": "32 requests at once, output tokens",
}
ENGINES = {
    "eager": "torch, eager",
    "compile": "torch.compile",
    "packed": "torch.compile, packed",
    "infini": "torch_infini, patched",
    "engine": "torch_infini, engine",
    "ranks": "torch_infini, engine, a rank a thread",
}
Rows = Sequence[dict[str, str]]


def text(x: float, y: float, content: str, **attributes: object) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.0f}" y="{y:.0f}"{extra}>{escape(content)}</text>'


def panel(rows: Rows, x: float, y: float) -> list[str]:
    """The bars of one cell, with weights of one dtype, as they stand in the CSV."""
    most = max((float(row["tokens_per_s"]) for row in rows if row["tokens_per_s"]), default=1.0)
    parts = []
    for i, row in enumerate(rows):
        top = y + i * (BAR + GAP)
        ours = row["engine"] in ("infini", "engine", "ranks")
        weight = "bold" if ours else "normal"
        parts.append(
            text(
                x + LABEL - 6,
                top + BAR - 4,
                ENGINES.get(row["engine"], row["engine"]),
                text_anchor="end",
                font_weight=weight,
            )
        )
        if not row["tokens_per_s"]:
            parts.append(text(x + LABEL, top + BAR - 4, "no number, see the CSV", fill="#777"))
            continue
        rate = float(row["tokens_per_s"])
        width = max(1.0, rate / most * (PANEL - LABEL - 130))
        colour = OURS if ours else THEIRS
        parts.append(f'<rect x="{x + LABEL}" y="{top:.0f}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
        number = f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}"
        if row["dtype"] != "bfloat16" and row["logit_error"]:
            number += f" (error {float(row['logit_error']):.1%})"
        parts.append(text(x + LABEL + width + 5, top + BAR - 4, number, font_weight=weight))
    return parts


def svg(rows: Rows) -> str:
    """A column a number of threads; shapes, cells and dtypes from top to bottom."""
    threads = sorted({int(row["threads"]) for row in rows})
    y = MARGIN + 14.0
    parts = [
        text(MARGIN + i * (PANEL + MARGIN), y, f"{n} thread{'s'[: n > 1]}, tokens/s", font_weight="bold", font_size=14)
        for i, n in enumerate(threads)
    ]
    for shape, cell, dtype in dict.fromkeys((row["shape"], row["cell"], row["dtype"]) for row in rows):
        of_cell = [row for row in rows if (row["shape"], row["cell"], row["dtype"]) == (shape, cell, dtype)]
        engines = list(dict.fromkeys(row["engine"] for row in of_cell))
        y += 34
        for i, n in enumerate(threads):
            x = MARGIN + i * (PANEL + MARGIN)
            parts.append(text(x, y - 6, f"{shape}, {TITLES[cell]}, {dtype} weights", font_weight="bold"))
            parts += panel([row for row in of_cell if row["threads"] == str(n)], x, y + 2)
        y += len(engines) * (BAR + GAP)
    width, height = MARGIN + max(1, len(threads)) * (PANEL + MARGIN), y + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
            f'viewBox="0 0 {width} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height:.0f}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def write(table: Path) -> Path:
    """Draw a CSV file of generate.py; the path of the SVG file."""
    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["cell"] in TITLES]  # the others are no rates
    path = table.with_suffix(".svg")
    path.write_text(svg(rows))
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1]) if len(sys.argv) > 1 else results_of(__file__) / "generate.csv"))
