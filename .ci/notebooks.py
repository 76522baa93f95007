"""Runs the notebooks of docs/notebooks, each in a new Python, and keeps their outputs.

    python .ci/notebooks.py [NAME ...] [--check]

With --check nothing is written: a cell that raises is the fault. Needs nbclient, nbformat and ipykernel (the extra
[test]). What a cell writes to stderr, and when it ran, is not kept.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
SECONDS = 300  # that a cell may take


def run(path: Path) -> Any:
    """Run a notebook, and return it with its outputs; nbclient.exceptions.CellExecutionError for a cell that raises."""
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    before = dict(os.environ)
    os.environ |= {"PYTHONPATH": python_path, "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    try:
        # By sockets that are files, which other users of the machine cannot open.
        files = Config({"KernelManager": {"transport": "ipc"}})
        client = NotebookClient(notebook, config=files, kernel_name="python3", timeout=SECONDS, record_timing=False)
        client.execute()
    finally:
        os.environ.clear()
        os.environ.update(before)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python"},
    }
    return notebook


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="without .ipynb; all, if none is given")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args(arguments)
    paths = sorted(FOLDER.glob("*.ipynb"))
    if unknown := set(given.names) - {path.stem for path in paths}:
        parser.error(f"NAME must be one of {', '.join(path.stem for path in paths)}, got {', '.join(sorted(unknown))}")
    for path in paths:
        if given.names and path.stem not in given.names:
            continue
        notebook = run(path)
        if not given.check:
            import nbformat

            path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        print(f"notebooks: {path.name} ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
