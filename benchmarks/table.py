"""Prints the tables of docs/speed.md and other pages, as Markdown, from the CSV files of one kind of CPU.

python benchmarks/table.py              # of results/zen-5, which the pages quote
python benchmarks/table.py --cpu zen-4
"""

from __future__ import annotations

import argparse

import engine_tables  # noqa: F401
import op_tables  # noqa: F401
import serving_tables  # noqa: F401
from csv_tables import PAGES, RESULTS, TABLES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", default=PAGES.name, help="a folder of results/ (default: %(default)s)")
    folder = RESULTS / parser.parse_args().cpu
    print("\n\n".join(filter(None, (markdown(folder) for markdown in TABLES.values()))))


if __name__ == "__main__":
    main()
