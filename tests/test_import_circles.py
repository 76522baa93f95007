"""Import circles: no module of patch or compile imports itself through others, also not inside of functions."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def modules_in(package: Path) -> dict[str, Path]:
    """Return the files of a package's modules by their dotted names from ROOT's."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, modules: dict[str, Path]) -> set[str]:
    """Return the modules that a module imports relatively, at any place of its file."""
    parts = name.split(".") if modules[name].name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(modules[name].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = ".".join([*parts[: len(parts) - node.level + 1], *(node.module or "").split(".")]).rstrip(".")
            inner = {f"{source}.{alias.name}" for alias in node.names} & modules.keys()
            found |= inner or {source} & modules.keys()
    return found - {name}


def circle(package: Path) -> list[str]:
    """Return modules of a package that import each other in this order; empty if there are none."""
    modules = modules_in(package)
    try:
        TopologicalSorter({name: imported(name, modules) for name in modules}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("package", ["patch", "compile"])
def test_no_circle(package: str) -> None:
    assert len(modules_in(ROOT / "torch_infini" / package)) > 5
    assert circle(ROOT / "torch_infini" / package) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    files = {
        "__init__": "from .a import x",
        "a": "def f():\n    from . import b\n",
        "b": "from .inner.c import z",
        "inner/__init__": "",
        "inner/c": "from ..a import f",
    }
    for name, text in files.items():
        path = tmp_path / "package" / f"{name}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    assert sorted(set(circle(tmp_path / "package"))) == ["package.a", "package.b", "package.inner.c"]
    (tmp_path / "package/inner/c.py").write_text("from ...other import f")
    assert circle(tmp_path / "package") == []
