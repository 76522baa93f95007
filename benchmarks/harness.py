"""What all benchmark scripts share: the options, the type of a row, its way to the screen and into a CSV file.

A script adds its own options to `new_parser` and gives `run` the cases that it measures. A row says on its own what was
measured where: every file ends in the columns of `provenance`.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torch_infini._core.cpu import cpu_name, folder_name
from torch_infini._core.library import cpu_capability
from torch_infini.testing import threads_set_to

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results" / folder_name()  # of this kind of CPU
MODELS = ROOT / "build" / "peers"  # checkpoints, and the environments of other engines

# A line of a CSV file: values by column; None where there is no such measurement. Floats keep four significant digits.
Row = dict[str, Any]
# What a script measures: the columns that name a case, and the call that measures the others, of one row or several.
Cases = Iterable[tuple[Row, Callable[[], Row | list[Row]]]]


# ---- options ----


def count(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def counts(text: str) -> list[int]:
    """An argparse type: the same, several with commas between."""
    return [count(part) for part in text.split(",")]


def names(what: str, known: Sequence[str]) -> Callable[[str], list[str]]:
    """An argparse type: some of the known names, with commas between."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"there is no {what} {name!r}; there are {', '.join(known)}")
        return chosen

    return parse


def dtypes(text: str) -> list[torch.dtype]:
    """An argparse type: dtypes by torch's names, with commas between."""
    found = [getattr(torch, name, name) for name in text.split(",")]
    for dtype in found:
        if not isinstance(dtype, torch.dtype):
            raise argparse.ArgumentTypeError(f"{dtype!r} is no dtype of torch")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def new_parser(
    doc: str | None,
    out: str,
    *,
    threads: Sequence[int] = (),
    rounds: int = 0,
    quick: str = "",
    ops: Sequence[str] = (),
    with_dtypes: bool = False,
    resume: bool = True,
) -> argparse.ArgumentParser:
    """The options that benchmarks share: those that are not given here are left out.

    Args:
        doc: The docstring of the script.
        out: The file of its results.
        threads: The default numbers of threads; each is measured.
        rounds: The default number of rounds.
        quick: What --quick makes smaller.
        ops: The ops that there are.
        with_dtypes: Whether there is a choice of dtypes.
        resume: Whether the script can go on with a file that it has begun, as `run` does.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = RESULTS / out
    parser.add_argument(
        "--out", "--csv", type=Path, default=default, help=f"CSV file (default: results/{RESULTS.name}/{out})"
    )
    if threads:
        default_threads = ",".join(map(str, threads))
        help_text = f"numbers of threads, with commas between (default: {default_threads})"
        parser.add_argument("--threads", type=counts, default=[*threads], help=help_text)
    if rounds:
        help_text = f"a time is the median over so many (default: {rounds})"
        parser.add_argument("--rounds", type=count, default=rounds, help=help_text)
    if quick:
        parser.add_argument("--quick", action="store_true", help=f"{quick}: to see that it runs")
    if ops:
        help_text = "names, with commas between (default: all)"
        parser.add_argument("--ops", type=names("op", ops), default=[*ops], help=help_text)
    if with_dtypes:
        parser.add_argument("--dtypes", type=dtypes, help="such as bfloat16,float32 (default: all that the op has)")
    if resume:
        parser.add_argument("--resume", action="store_true", help="keep the rows of the file, and measure the others")
    return parser


# ---- rows ----


def taken(times: Mapping[str, float], *contestants: str, unit: str = "us") -> Row:
    """Columns such as eager_us, in that order; None for a contestant that has no time."""
    scale = {"us": 1e6, "ms": 1e3}[unit]
    return {f"{name}_{unit}": times[name] * scale if name in times else None for name in contestants}


def ratios(times: Mapping[str, float], *rivals: str, to: str = "infini") -> Row:
    """Columns such as ratio_to_eager: the time of a rival over that of `to`, above 1 where the latter is faster."""
    return {f"ratio_to_{name}": times[name] / times[to] if name in times else None for name in rivals}


def git(*arguments: str) -> str | None:
    """What a git command on this checkout prints; None where it fails or there is none."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str:
    """The commit of this checkout, with "+changes" where files other than results differ from it; "" if unknown."""
    head = git("rev-parse", "--short=10", "HEAD") or ""
    return head + ("+changes" if git("status", "--porcelain", "-uno", "--", ".", ":!benchmarks/results") else "")


def provenance() -> Row:
    """The columns that end every row: on what, of what and by which command it was measured."""
    command = shlex.join(["python", *(word.replace(f"{ROOT}/", "") for word in sys.argv)])
    return {
        "cpu": cpu_name(),
        "capability": cpu_capability(),
        "torch": torch.__version__,
        "commit": commit(),
        "command": command,
    }


def first_line(error: BaseException) -> str:
    """An error as a note in a row."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200] if text else ''}"


def rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else "" if value is None else value


def shown(value: Any) -> str:
    return "-" if value is None else f"{rounded(value):.10g}" if isinstance(value, float) else str(value)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a file, as text; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


class Results:
    """The rows of one run: printed and written to the CSV file as they come, so that an error loses none.

    Args:
        path: The file.
        columns: Of the file, in order, with blanks between; by default those of the first row.
        facts: More of what is the same in all rows, beside `provenance`.
        resume: Keep the rows that the file has.
    """

    def __init__(self, path: Path, columns: str = "", facts: Row | None = None, resume: bool = False) -> None:
        self.path, self.columns = path, columns.split()
        self.facts = {**(facts or {}), **provenance()}
        self.earlier: list[Row] = [dict(row) for row in read_csv(path)] if resume else []
        self.rows = [*self.earlier]
        self.widths: dict[str, int] = {}
        told = [shown(value) for name, value in self.facts.items() if name != "command"]
        print(", ".join(filter(None, told)), flush=True)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.rows:
            print(f"{len(self.rows)} rows in {self.path}", flush=True)

    def has(self, **key: Any) -> bool:
        """Whether the file that is resumed has a row with these values."""
        return any(all(str(row.get(name)) == str(value) for name, value in key.items()) for row in self.earlier)

    def add(self, row: Row) -> None:
        """Print a row and write the file. A row that does not say so is of torch's number of threads."""
        row = {**row, **({} if "threads" in row else {"threads": torch.get_num_threads()})}
        self.columns = self.columns or list(row)
        self.columns += [] if "threads" in self.columns else ["threads"]
        if unknown := row.keys() - set(self.columns):
            raise ValueError(f"a row of {self.path.name} must have the columns {self.columns}, got {sorted(unknown)}")
        self.rows.append({**dict.fromkeys(self.columns), **row, **self.facts})
        self.show(row)
        self.write()

    def show(self, row: Row) -> None:
        """A line of a table whose columns grow with what is in them."""
        texts = {name: shown(row.get(name)) for name in self.columns}
        lines = [texts] if self.widths else [{name: name for name in texts}, texts]
        self.widths = {name: max(self.widths.get(name, len(name)), len(text)) for name, text in texts.items()}
        for line in lines:
            widths = self.widths.items()
            cells = (line[n].ljust(w) if isinstance(row.get(n), str) else line[n].rjust(w) for n, w in widths)
            print("  ".join(cells).rstrip(), flush=True)

    def write(self) -> None:
        """Write all rows; a row of an earlier run keeps its own provenance."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*self.columns, *self.facts], lineterminator="\n")
            writer.writeheader()
            for row in self.rows:
                writer.writerow({name: rounded(value) for name, value in row.items()})


def run(options: argparse.Namespace, cases: Cases, out: Path | None = None) -> list[Row]:
    """Measure the cases, each with the number of threads that its column "threads" says; all rows of the file.

    Args:
        options: Of `new_parser`.
        cases: With --resume, those that the file has are left out.
        out: The file, if it is another than that of the options.
    """
    with Results(out or options.out, resume=options.resume) as results, torch.no_grad():
        for key, measure in cases:
            if not results.has(**key):
                with threads_set_to(key.get("threads", torch.get_num_threads())):
                    found = measure()
                for row in found if isinstance(found, list) else [found]:
                    results.add({**key, **row})
    return results.rows
