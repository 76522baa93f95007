"""Draws generate.csv, collectives.csv or error-bits.csv as an SVG file beside it.

    python benchmarks/plot.py [CSV]        # by default generate.csv of this kind of CPU

Of generate.py: a panel a cell, a bar an engine, tokens a second. Of collectives.py: the time of an all-reduce against
its size, both logarithmic. Of error_bits.py: a panel a shape, a point a format, the logarithm of the error.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from csv_tables import size_in_words
from harness import RESULTS, read_csv

OURS, THEIRS = "#1f6feb", "#9aa4b2"
BAR, GAP, LABEL, PANEL, MARGIN = 16, 5, 150, 430, 14  # pixels
TITLES = {
    "decode-16": "decode, 16 tokens in the cache",
    "decode-2048": "decode, 2048 tokens in the cache",
    "decode-16x8": "decode, batch 8, 16 in each cache",
    "decode-16x32": "decode, batch 32, 16 in each cache",
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
WIDTH, HEIGHT, LEFT, BELOW, KEY = 560, 320, 60, 36, 190  # pixels
LINES = {  # column: what it is, colour, dashes
    "gloo_us": ("dist.all_reduce, Gloo", THEIRS, ""),
    "torch_us": ("dist.all_reduce, infiniccl", OURS, ""),
    "op_us": ("torch.ops.infini.all_reduce_", OURS, "5 3"),
    "copy_us": ("memcpy of as many bytes", "#777", "2 3"),
}
POINTS = {  # engine: what it is, colour
    "engine": (ENGINES["engine"], OURS),
    "llama.cpp": ("llama.cpp", THEIRS),
    "ik_llama.cpp": ("ik_llama.cpp", "#d97706"),
}
Rows = Sequence[dict[str, str]]
Box = tuple[float, float, float, float]  # left, top, right, bottom


def text(x: float, y: float, content: str, **attributes: object) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.0f}" y="{y:.0f}"{extra}>{escape(content)}</text>'


def document(width: float, height: float, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
            f'viewBox="0 0 {width} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height:.0f}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


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


def bars(rows: Rows) -> str:
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
    return document(width, height, parts)


def curves(rows: Rows) -> str:
    """One panel, of the first number of ranks."""
    rows = [row for row in rows if row["ranks"] == rows[0]["ranks"]]
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
    width, height = LEFT + WIDTH + MARGIN + 30 + KEY, 2 * MARGIN + HEIGHT + BELOW
    return document(width, height, parts)


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def free_box(x: float, y: float, width: float, taken: Sequence[Box]) -> Box:
    """Where a name of one line goes: right or left of its point, at the next height where nothing else is."""
    boxes = (
        (left, top, left + width, top + 12)
        for distance in itertools.count(step=7)
        for top in (y - 6 - distance, y - 6 + distance)
        for left in (x + 9, x - 9 - width)
    )
    return next(box for box in boxes if not any(overlap(box, other) for other in taken))


def points(rows: Rows) -> str:
    """The panels side by side, with the same axes."""
    rows = [row for row in rows if row["logit_error"]]
    if not rows:
        return document(0, 0, [])
    bits, errors = ([float(row[name]) for row in rows] for name in ("bits_per_weight", "logit_error"))
    first, last = math.floor(min(bits)), math.floor(max(bits)) + 1
    steps = [digit * 10.0**power for power in range(-5, 2) for digit in (1, 2, 5)]
    low, high = max(s for s in steps if s <= min(errors)), min(s for s in steps if s >= max(errors))
    parts = []
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    below = 2 * MARGIN + HEIGHT
    for i, shape in enumerate(shapes):
        left = LEFT + i * (WIDTH + LEFT)

        def place(row: dict[str, str], left: float = left) -> tuple[float, float]:
            share = math.log(high / float(row["logit_error"])) / math.log(high / low)
            return left + WIDTH * (float(row["bits_per_weight"]) - first) / (last - first), 2 * MARGIN + HEIGHT * share

        parts.append(text(left, MARGIN + 4, f"{shape}: error of the logits by bits a weight", font_weight="bold"))
        for step in (step for step in steps if low <= step <= high):
            at = 2 * MARGIN + HEIGHT * math.log(high / step) / math.log(high / low)
            parts.append(f'<line x1="{left}" y1="{at:.1f}" x2="{left + WIDTH}" y2="{at:.1f}" stroke="#ddd"/>')
            parts.append(text(left - 6, at + 4, f"{step:.3g}" if step < 0.01 else f"{step:.0%}", text_anchor="end"))
        for number in range(first, last + 1):
            at = left + WIDTH * (number - first) / (last - first)
            parts.append(text(at, below + 18, str(number), text_anchor="middle"))
        of_shape = sorted((row for row in rows if row["shape"] == shape), key=place)
        taken: list[Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in map(place, of_shape)]
        for row in sorted(of_shape, key=lambda row: row["engine"] != "engine"):  # the engine's names are nearest
            (x, y), name, colour = place(row), row["format"], POINTS[row["engine"]][1]
            box = free_box(x, y, 8.0 * len(name), taken)
            taken.append(box)
            weight = "bold" if row["engine"] == "engine" else "normal"
            anchor, at = ("start", box[0]) if box[0] > x else ("end", box[2])
            parts.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{at:.1f}" y2="{box[1] + 6:.1f}" stroke="{colour}"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            parts.append(text(at, box[1] + 10, name, text_anchor=anchor, font_weight=weight))
    for i, (words, colour) in enumerate(POINTS.values()):
        x = LEFT + 160 * i
        parts.append(f'<circle cx="{x + 4}" cy="{below + 36}" r="4" fill="{colour}"/>')
        parts.append(text(x + 14, below + 40, words))
    return document(len(shapes) * (WIDTH + LEFT) + MARGIN, below + 40 + MARGIN, parts)


def drawn(table: Path) -> str:
    """A CSV file of generate.py, collectives.py or error_bits.py as SVG."""
    rows = read_csv(table)
    if "cell" in rows[0]:
        return bars([row for row in rows if row["cell"] in TITLES])
    return points(rows) if "bits_per_weight" in rows[0] else curves(rows)


def write(table: Path) -> Path:
    """Draw a CSV file; the path of the SVG file beside it."""
    path = table.with_suffix(".svg")
    path.write_text(drawn(table))
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "generate.csv"))
