"""The notebooks of docs/notebooks: what is kept of a run is whole and of no machine; and each runs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def script() -> Any:
    spec = importlib.util.spec_from_file_location("ci_notebooks", ROOT / ".ci" / "notebooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@EACH
def test_what_is_kept(path: Path) -> None:
    """Cells in the order in which they ran, no error, no path of a machine, and links to what is there."""
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|usr|opt|var)/|site-packages", text)
    cells = json.loads(text)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds <= {"stream", "execute_result"} and any(cell["outputs"] for cell in code)
    prose = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert prose[0].startswith("# ") and "Next: [" in prose[-1]
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(prose))
    assert [link for link in links if not (path.parent / link).is_file()] == []
    assert f"notebooks/{path.name}" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


@EACH
@pytest.mark.full
def test_runs(path: Path) -> None:
    """As far as its last cell, in a new Python."""
    for name in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(name)
    notebook = script().run(path)
    assert len([cell for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count]) >= 4


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script().main(["none"])
    assert "NAME must be one of" in capsys.readouterr().err
