"""Plots of a load as SVG: how many requests have at most a time, and the time to the first token by when they began."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from ..errors import CommandError
from .results import Summary, percentile

WIDTH, HEIGHT, LEFT, TOP, BELOW, GAP = 360, 220, 56, 34, 40, 30  # pixels
BLUE, RED, GREY = "#1f6feb", "#d1242f", "#777"
TITLES = {"ttft": "time to first token", "itl": "time between chunks", "e2e": "time of a request"}
POINTS = 400  # the most points of a curve


def check(path: str) -> None:
    """Raise CommandError if no plot can be written to a path."""
    if not path.endswith((".svg", ".png")):
        raise CommandError(f"--plot must end in .svg or .png, got {path!r}")
    if path.endswith(".png"):
        try:
            import cairosvg  # noqa: F401
        except (ImportError, OSError) as error:  # OSError: without the library cairo
            raise CommandError(
                f"--plot needs cairosvg for .png (pip install cairosvg; .svg needs nothing): {error}"
            ) from None


def write(summary: Summary, path: str) -> None:
    """Write the plots to a path of check."""
    drawn = figure(summary)
    if path.endswith(".png"):
        import cairosvg

        cairosvg.svg2png(bytestring=drawn.encode(), write_to=path, scale=2)
    else:
        Path(path).write_text(drawn, encoding="utf-8")


def figure(summary: Summary) -> str:
    """Return the plots as SVG."""
    panels = [curve(TITLES[name], [1e3 * value for value in summary.times(name)]) for name in TITLES]
    panels.append(timeline(summary))
    width, height = LEFT + WIDTH + GAP, TOP + HEIGHT + BELOW
    placed = [
        f'<g transform="translate({at % 2 * width},{at // 2 * height})">{"".join(parts)}</g>'
        for at, parts in enumerate(panels)
    ]
    size = f'width="{2 * width}" height="{2 * height}" viewBox="0 0 {2 * width} {2 * height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{2 * width}" height="{2 * height}" fill="white"/>', *placed, "</svg>\n"])


def curve(title: str, values: Sequence[float]) -> list[str]:
    """Return a panel of the share of values, in ms, that are at most x."""
    ordered = sorted(values)
    parts = axes(title, "ms", ordered[-1] if ordered else 1.0, 100.0, "%")
    if not ordered:
        return [*parts, text(LEFT + WIDTH / 2, TOP + HEIGHT / 2, "none", GREY, "middle")]
    most = top_of(ordered[-1])
    shares = [100 * at / (POINTS - 1) for at in range(POINTS)]
    line = " ".join(f"{x_of(percentile(ordered, s), most):.1f},{y_of(s, 100.0):.1f}" for s in shares)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="2"/>')
    for percent in (50, 90, 99):
        value = percentile(ordered, percent)
        x, y = x_of(value, most), y_of(percent, 100.0)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{BLUE}"/>')
        anchor, at = ("end", x - 7) if x > LEFT + 0.8 * WIDTH else ("start", x + 7)
        parts.append(text(at, y + 12, f"p{percent} {value:.4g}", BLUE, anchor))
    return parts


def timeline(summary: Summary) -> list[str]:
    """Return a panel of a point for each request, by when it began; red at the bottom: it failed."""
    points = [(result.start, 1e3 * (result.ttft or 0.0), result.failure is not None) for result in summary.results]
    last = max((start for start, _, _ in points), default=0.0)
    most = max((ttft for _, ttft, failed in points if not failed), default=0.0)
    parts = axes("time to first token by start", "s", last, most, "ms")
    for start, ttft, failed in points:
        x, y = x_of(start, top_of(last)), y_of(0.0 if failed else ttft, top_of(most))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{RED if failed else BLUE}" fill-opacity="0.6"/>')
    return parts


def axes(title: str, unit: str, right: float, top: float, unit_y: str) -> list[str]:
    """Return title and grid of a panel whose axes go from 0 to at least `right` and `top`."""
    parts = [text(LEFT, TOP - 14, f"{title}, {unit}", weight="bold")]
    for value in ticks(top):
        y = y_of(value, top_of(top))
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(
            text(LEFT - 6, y + 4, f"{value:g} {unit_y}" if value == top_of(top) else f"{value:g}", anchor="end")
        )
    for value in ticks(right):
        parts.append(text(x_of(value, top_of(right)), TOP + HEIGHT + 16, f"{value:g}", anchor="middle"))
    return parts


def ticks(most: float) -> list[float]:
    """Return round numbers from 0 to at least `most`, three to six."""
    if most <= 0 or not math.isfinite(most):
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most))
    step = next(s for s in (0.2 * power, 0.25 * power, 0.5 * power, power, 2 * power, 2.5 * power) if most / s <= 5)
    return [round(at * step, 12) for at in range(math.ceil(most / step - 1e-9) + 1)]


def top_of(most: float) -> float:
    return ticks(most)[-1]


def x_of(value: float, most: float) -> float:
    return LEFT + WIDTH * value / most


def y_of(value: float, most: float) -> float:
    return TOP + HEIGHT * (1 - value / most)


def text(x: float, y: float, content: str, colour: str = "black", anchor: str = "start", weight: str = "normal") -> str:
    style = f'fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'
