"""Draws collectives.csv as an SVG file beside it: the time of an all-reduce against its size, both logarithmic.

python benchmarks/plot_collectives.py
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

from plot import MARGIN, OURS, THEIRS, text

from torch_infini.testing.benchmark import results_of

WIDTH, HEIGHT, LEFT, BELOW, LABEL = 560, 320, 60, 36, 190  # pixels
LINES = {  # column: what it is, colour, dashes
    "gloo_us": ("dist.all_reduce, Gloo", THEIRS, ""),
    "torch_us": ("dist.all_reduce, infiniccl", OURS, ""),
    "op_us": ("torch.ops.infini.all_reduce_", OURS, "5 3"),
    "copy_us": ("memcpy of as many bytes", "#777", "2 3"),
}


def size_in_words(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def svg(rows: list[dict[str, str]]) -> str:
    """One panel; rows of one number of ranks."""
    sizes = [int(row["bytes"]) for row in rows]
    times = [float(row[column]) for row in rows for column in LINES]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    first, last = math.log2(min(sizes)), math.log2(max(sizes))

    def x(size: int) -> float:
        return LEFT + WIDTH * (math.log2(size) - first) / max(1.0, last - first)

    def y(us: float) -> float:
        return 2 * MARGIN + HEIGHT * (high - math.log10(us)) / (high - low)

    parts = [text(LEFT, MARGIN + 4, f"all-reduce of {rows[0]['ranks']} ranks, us a call", font_weight="bold")]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<line x1="{LEFT}" y1="{at:.1f}" x2="{LEFT + WIDTH}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 6, at + 4, f"{10.0**power:g}", text_anchor="end"))
    for i, size in enumerate(sizes):
        if i % 3 == 0 or i == len(sizes) - 1:
            parts.append(text(x(size), 2 * MARGIN + HEIGHT + 18, size_in_words(size), text_anchor="middle"))
    for i, (column, (words, colour, dashes)) in enumerate(LINES.items()):
        points = " ".join(f"{x(int(row['bytes'])):.1f},{y(float(row[column])):.1f}" for row in rows)
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline points="{points}" {style}/>')
        key = 2 * MARGIN + 18 * i + 14
        from_ = LEFT + WIDTH + MARGIN
        parts.append(f'<line x1="{from_}" y1="{key - 4}" x2="{from_ + 24}" y2="{key - 4}" {style}/>')
        parts.append(text(from_ + 30, key, words))
    width, height = LEFT + WIDTH + MARGIN + 30 + LABEL, 2 * MARGIN + HEIGHT + BELOW
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def write(table: Path) -> Path:
    """Draw a CSV file of collectives.py, its first number of ranks; the path of the SVG file."""
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    path = table.with_suffix(".svg")
    path.write_text(svg([row for row in rows if row["ranks"] == rows[0]["ranks"]]))
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1]) if len(sys.argv) > 1 else results_of(__file__) / "collectives.csv"))
