"""What `make gpu` found, as Markdown: the stages, the tests that failed, the table of docs/gpu.md, all times.

    python .ci/gpu_report.py build/gpu/results/gpu.csv        # keeps the figures, and puts them into docs/gpu.md

They are kept in benchmarks/results/gpu, a file for each kind of GPU; rows of cases that were not measured anew stay.
Reads the JUnit XML of pytest and the CSV of benchmarks/gpu.py.
"""

from __future__ import annotations

import csv
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gpu.md"
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
NOT_MEASURED = "not measured"
SHOWN_FAILURES = 60

# The lines of the table of docs/gpu.md: the case, its goal, and the cases of benchmarks/gpu.py that it is measured by.
GOALS = (
    ("rms_norm, add_rms_norm, 8192 x 8192 bf16", "0.85 of copy", ("rms_norm 8192x8192", "add_rms_norm 8192x8192")),
    ("silu * mul, 8192 x 14336 bf16", "0.88 of copy", ("swiglu 8192x14336",)),
    ("rms_norm, 1 to 64 rows of 4096, in a graph", "4 us", ("rms_norm 1x4096", "rms_norm 64x4096")),
    (
        "rope and cache write, decode, in a graph",
        "4 us",
        ("qkv_rope_cache 1 tokens 32/8x128", "qkv_rope_cache 64 tokens 32/8x128"),
    ),
    (
        "paged decode, 64 x 4096 tokens, 32/8 heads x 128 bf16",
        "0.70 of copy",
        ("paged_attention 64x4096 32/8x128",),
    ),
    (
        "the same over an int8 cache: 1.3 times as fast",
        "0.47 of copy",
        ("paged_attention 64x4096 32/8x128 int8 cache",),
    ),
    ("paged decode, 1 x 2048 tokens", "15 us", ("paged_attention 1x2048 32/8x128",)),
    ("top-p 0.9 over 128 x 128,256 logits", "0.3 ms", ("random_sample 128x128256 top-p 0.9",)),
    ("int8 linear, one row, 4096 x 14336", "0.75 of copy", ("linear_int8 1x4096x14336",)),
    ("int4 linear, one row, 4096 x 14336", "0.60 of copy", ("linear_int4 1x4096x14336",)),
    (
        "decode of the 1.1B shape, batch 1, a graph",
        "0.45 of the weights' limit, 8 times eager",
        ("decode 1.1B bfloat16, a graph",),
    ),
    (
        "decode of the 8B shape, batch 1, a graph",
        "0.70 of the weights' limit",
        ("decode 8B bfloat16, a graph",),
    ),
)


@dataclass
class Tests:
    """What pytest's JUnit XML says; a test that failed and then ended its worker counts once."""

    passed: int = 0
    skipped: int = 0
    failures: dict[str, str] = field(default_factory=dict)  # of each failed test its first message

    @property
    def ran(self) -> int:
        return self.passed + len(self.failures)


def first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]


def read_tests(path: Path) -> Tests:
    """The outcome of each test; ValueError where the file is not pytest's XML."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
    tests = Tests()
    passed: set[str] = set()
    skipped: set[str] = set()
    for case in root.iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        bad = [*case.findall("failure"), *case.findall("error")]
        if bad:
            tests.failures.setdefault(name, first_line(bad[0].get("message") or bad[0].text or ""))
        elif case.find("skipped") is not None:
            skipped.add(name)
        else:
            passed.add(name)
    tests.passed, tests.skipped = len(passed - tests.failures.keys()), len(skipped - tests.failures.keys())
    return tests


def read_times(path: Path) -> list[dict[str, str]]:
    """The rows of benchmarks/gpu.py's CSV; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def measured(row: Mapping[str, str]) -> str:
    """What the table says of one case: in the unit of its goal, or why there is no figure."""
    if not row["infini_us"]:
        return row["note"].replace("|", "/") or NOT_MEASURED
    if row["share"] and "weights" in row["goal"]:
        figure = f"{float(row['share']):.2f} of the weights' limit"
        if row["eager_us"]:
            figure += f", {float(row['eager_us']) / float(row['infini_us']):.1f} times eager"
    elif row["share"] and "of copy" in row["goal"]:
        figure = f"{float(row['share']):.2f} of copy"
    else:
        us = float(row["infini_us"])
        figure = f"{us / 1e3:.2f} ms" if us >= 100 else f"{us:.1f} us"
    return figure + (" (goal missed)" if row["met"] == "no" else "")


def kept_results(folder: Path = RESULTS) -> dict[str, list[dict[str, str]]]:
    """The rows by the name of the GPU, of the files that are kept."""
    rows = (read_times(path) for path in sorted(folder.glob("*.csv")))
    return {found[0]["gpu"]: found for found in rows if found}


def keep(rows: Sequence[Mapping[str, str]], folder: Path = RESULTS) -> Path:
    """Write the rows that have a figure to the file of their GPU, in place of those of the same cases."""
    name = rows[0]["gpu"].removeprefix("NVIDIA ").split()[0].lower()
    path = folder / f"{name}.csv"
    new = {row["case"]: row for row in rows if row["infini_us"]}
    old = {row["case"]: row for row in read_times(path)}
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows({**old, **new}.values())
    return path


def goals_table(results: Mapping[str, Iterable[Mapping[str, str]]]) -> list[str]:
    """The table of docs/gpu.md, with a column for each GPU: its name, and its rows."""
    by_gpu = {gpu: {row["case"]: row for row in rows} for gpu, rows in results.items()}
    lines = [f"| case | goal | {' | '.join(by_gpu) or 'measured'} |", f"| --- | --- |{' --- |' * max(len(by_gpu), 1)}"]
    for label, goal, cases in GOALS:
        cells = []
        for by_case in by_gpu.values() or [{}]:
            found = [measured(by_case[case]) if case in by_case else NOT_MEASURED for case in cases]
            cells.append("; ".join(dict.fromkeys(found)))
        lines.append(f"| {label} | {goal} | {' | '.join(cells)} |")
    return lines


def with_measurements(page: str, results: Mapping[str, Iterable[Mapping[str, str]]]) -> str:
    """The text of docs/gpu.md with its table replaced by that of these measurements."""
    table = re.compile(r"^\| case \| goal \|.*\n(?:\|.*\n)+", re.MULTILINE)
    text, count = table.subn(lambda _: "\n".join(goals_table(results)) + "\n", page)
    if count != 1:
        raise ValueError(f"docs/gpu.md must have one table '| case | goal | ...', got {count}")
    return text


def times_table(rows: Iterable[Mapping[str, str]]) -> Iterator[str]:
    yield "| case | infini, us | eager | compile | torch | share | goal | met | note |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | --- | --- | --- |"
    names = ("case", "infini_us", "eager_us", "compile_us", "torch_us", "share", "goal", "met", "note")
    for row in rows:
        yield "| " + " | ".join(row[name].replace("|", "/") for name in names) + " |"


def report(
    facts: Mapping[str, str],
    stages: Sequence[tuple[str, str, float, str]],
    tests: Tests | None,
    rows: Sequence[Mapping[str, str]],
) -> str:
    """The whole report. facts: of the machine; stages: (name, outcome, seconds, detail)."""
    lines = ["# make gpu", ""]
    lines += [f"* {name}: {value}" for name, value in facts.items()]
    lines += ["", "| stage | outcome | seconds | |", "| --- | --- | ---: | --- |"]
    lines += [f"| {name} | {outcome} | {seconds:.0f} | {detail} |" for name, outcome, seconds, detail in stages]
    if tests is not None:
        counts = f"{tests.passed} passed, {len(tests.failures)} failed, {tests.skipped} skipped"
        counts += "" if tests.ran else ": no test ran"
        if any(name == "tests" and "TIMED OUT" in outcome for name, outcome, _, _ in stages):
            counts += "; ended at the time limit: the tests that were running are counted as passed"
        lines += ["", "## Tests", "", counts]
        shown = list(tests.failures.items())[:SHOWN_FAILURES]
        lines += [""] if shown else []
        lines += [f"* `{name}`: {message}" for name, message in shown]
        if len(tests.failures) > len(shown):
            lines.append(f"* and {len(tests.failures) - len(shown)} more in tests.xml")
    lines += ["", "## Goals", "", *goals_table({rows[0]["gpu"]: rows} if rows else {})]
    if rows:
        lines += ["", "## Times", "", *times_table(rows)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 1:
        sys.exit(f"usage: python .ci/gpu_report.py <the CSV of benchmarks/gpu.py>, got {len(arguments)} arguments")
    rows = read_times(Path(arguments[0]))
    if not rows:
        sys.exit(f"gpu_report: {arguments[0]} must be the CSV of benchmarks/gpu.py, with a row or more; it has none")
    keep(rows)
    PAGE.write_text(with_measurements(PAGE.read_text(), kept_results()))


if __name__ == "__main__":
    main(sys.argv[1:])
