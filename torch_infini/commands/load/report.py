"""Reports of a load: a text for a terminal, and CSV with a row for each request."""

from __future__ import annotations

import csv
from pathlib import Path

from .results import PERCENTS, TIMES, Result, Summary, spread_of

COLUMNS = (
    "request",
    "start_s",
    "late_ms",
    "ttft_ms",
    "itl_mean_ms",
    "tpot_ms",
    "e2e_ms",
    "input_tokens",
    "output_tokens",
    "finish_reason",
    "meets_objective",
    "error_kind",
    "error",
)
LATE = 0.01  # seconds that a request may be late without a remark


def text_of(summary: Summary) -> str:
    """Return the figures as lines."""
    done, total = len(summary.succeeded), len(summary.results)
    given, made = summary.tokens
    lines = [
        f"requests   {done} of {total} succeeded in {summary.seconds:.2f} s: {summary.rate(done):.4g}/s",
        f"tokens     {given} input, {made} output: {summary.rate(given):.4g}/s and {summary.rate(made):.4g}/s",
    ]
    if done:
        lines.append("".join(["           ", *(f"{name:>10}" for name in ("mean", *(f"p{p}" for p in PERCENTS)))]))
        for name in TIMES:
            if times := summary.times(name):
                spread = spread_of(times)
                values = (spread.mean, *spread.percentiles)
                lines.append("".join([f"{name + ' ms':<11}", *(f"{1e3 * value:>10.2f}" for value in values)]))
    if summary.objective is not None:
        met = summary.met
        share = f"{met} of {total} requests ({met / total:.1%}) meet {summary.objective}"
        lines.append(f"goodput    {share}: {summary.rate(met):.4g}/s")
    lines += [f"failed     {count} x {kind}: {message}" for kind, (count, message) in summary.failures().items()]
    if uncounted := sum(result.input_tokens is None for result in summary.succeeded):
        lines.append(f"note       {uncounted} answers had no usage: their output tokens are chunks with text")
    if (late := max(result.late for result in summary.results)) > LATE:
        lines.append(f"note       requests were sent up to {1e3 * late:.0f} ms late: this program was busy")
    return "\n".join(lines) + "\n"


def write_csv(summary: Summary, path: str | Path) -> None:
    """Write a row for each request."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(row_of(result, summary) for result in summary.results)


def row_of(result: Result, summary: Summary) -> list[object]:
    def ms(seconds: float | None) -> str:
        return "" if seconds is None else f"{1e3 * seconds:.3f}"

    met = "" if summary.objective is None else int(summary.objective.is_met(result))
    kind, message = result.failure or ("", "")
    times = [ms(value) for value in (result.late, result.ttft, result.itl, result.tpot, result.e2e)]
    counts = ["" if result.input_tokens is None else result.input_tokens, result.output_tokens]
    return [result.number, f"{result.start:.4f}", *times, *counts, result.finish_reason or "", met, kind, message]
