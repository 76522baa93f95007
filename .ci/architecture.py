"""What the pages show of the tree: a line for each folder, the libraries that are built, and the picture of both.

docs.py writes them, so that `make check-docs` fails where a folder or a library is not shown as it is.
"""

from __future__ import annotations

import ast
import re
import runpy
import textwrap
from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LONGEST = 130  # characters of a folder's sentence: three lines of a box in the picture
NOT_OURS = ("build", "dist", "torch_infini/lib", "torch_infini/include")  # what builds write, with names of folders


class MissingLine(ValueError):
    """A folder that does not say what it is for."""


# Folders.


def source_of(path: Path) -> Path:
    """The file in which a folder or a module says what it is for."""
    if path.suffix == ".py":
        return path
    return path / ("__init__.py" if "torch_infini" in (path.name, path.parent.name) else "README.md")


def sentence_of(path: Path, root: Path) -> str:
    """The first sentence that a folder or a module says of itself.

    In Python that is the docstring. A C++ header's first comment is about that header, and no header is a folder's main
    one everywhere, so other folders have a README.md, whose first paragraph is about them.
    """
    source = source_of(path)
    text = source.read_text() if source.is_file() else ""
    text = (ast.get_docstring(ast.parse(text)) or "") if source.suffix == ".py" else re.sub(r"^(#.*\n+)*", "", text)
    found = re.match(r"(.+?\.)(?:\s|$)", " ".join(text.split("\n\n")[0].split()))
    if not found or len(found[1]) > LONGEST:
        rule = f"must begin with a sentence of at most {LONGEST} characters that says what {path.name} is for"
        raise MissingLine(f"{source.relative_to(root)} {rule}, got {found[1] if found else 'none'}")
    return found[1]


def folders(root: Path, parent: str) -> list[Path]:
    """What the table of a folder shows: the folders in it, and of torch_infini also the public modules, by name."""
    found = [path for path in (root / parent).iterdir() if path.is_dir() and not path.name.startswith((".", "__"))]
    found = [path for path in found if str(path.relative_to(root)) not in NOT_OURS and path.suffix != ".egg-info"]
    if parent == ".":  # a working copy may hold folders of other kinds
        found = [path for path in (*found, root / ".ci") if source_of(path).is_file()]
    if parent == "torch_infini":
        found += [path for path in (root / parent).glob("*.py") if not path.name.startswith("_")]
    return sorted(found)


def folder_rows(root: Path, parent: str) -> Iterator[tuple[str, str]]:
    """(path from the repository, sentence) of each."""
    for path in folders(root, parent):
        yield f"{path.relative_to(root)}{'/' if path.is_dir() else ''}", sentence_of(path, root)


# Libraries: from build_rules.py, by which they are built.


def library_rows(root: Path) -> Iterator[tuple[str, str, str, str]]:
    """(name, what it holds, the folders with its sources, what it stands on) of each library, lowest first."""
    rules = runpy.run_path(str(root / "build_rules.py"), run_name="docs")
    for library in rules["BUILT"]:
        sources = [f"csrc/{path.name}" for path in folders(root, "csrc") if library.name in linked(path, rules)]
        yield library.name, library.holds, ", ".join(sources), ", ".join((*library.needs, *library.beside)) or "-"


def linked(folder: Path, rules: dict[str, Any]) -> set[str]:
    """The libraries with code of a folder of csrc."""
    sources = [path.relative_to(folder.parent) for ending in ("*.cpp", "*.cu") for path in folder.rglob(ending)]
    built = [path for path in sources if rules["kind_of"](path.as_posix()).name != "unbuilt"]
    return {library for path in built for library in rules["libraries_of"](path)}


# The picture.

WIDTH, EDGE, GAP, LINE, IN_A_ROW = 880, 12, 8, 14, 4  # pixels, and boxes
LETTER = 5.9  # pixels: the mean width of a letter of the small text, with a margin
STYLE = """<style>
text { text-anchor: middle; fill: #1f2328 } .page { fill: #ffffff } .name { font-weight: bold; font-size: 13px }
.python { fill: #e7f0fd; stroke: #7d9cc9 } .library { fill: #e9f3e6; stroke: #6f9f68 } .head { text-anchor: start }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .page { fill: #0d1117 } .python { fill: #14263f; stroke: #4f78b3 }
.library { fill: #152a18; stroke: #4f8a50 } }
</style>"""


def imported(path: Path, rooms: set[str]) -> set[str]:
    """The rooms of torch_infini that one of them imports, in functions too."""
    package = next(parent for parent in path.parents if parent.name == "torch_infini")
    found = set()
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        place = ("torch_infini", *file.relative_to(package).parts[:-1])
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = [*place[: len(place) - node.level + 1]] if node.level else []
                base += [node.module] if node.module else []
                found |= {".".join([*base, alias.name]) for alias in node.names}
    whole = [name.split(".") for name in found]
    return {name[1] for name in whole if name[0] == "torch_infini" and len(name) > 1} & rooms - {path.stem}


def layers(stands_on: dict[str, set[str]]) -> list[list[str]]:
    """The names in rows, highest first, each above all that it stands on."""
    rank: dict[str, int] = {}
    for name in TopologicalSorter(stands_on).static_order():
        rank[name] = max((rank[below] + 1 for below in stands_on[name]), default=0)
    return [sorted(name for name in rank if rank[name] == level) for level in range(max(rank.values()), -1, -1)]


def boxes(kind: str, names: Sequence[str], words: dict[str, str], y: float) -> tuple[list[str], float]:
    """A row of boxes, and where the next one begins."""
    width = (WIDTH - 2 * EDGE - GAP * (len(names) - 1)) / len(names)
    texts = [textwrap.wrap(words[name].replace("`", ""), int((width - 12) / LETTER)) for name in names]
    height = LINE * max(map(len, texts)) + 26
    parts = []
    for i, (name, lines) in enumerate(zip(names, texts, strict=True)):
        x = EDGE + i * (width + GAP)
        parts.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"/>')
        parts.append(f'<text class="name" x="{x + width / 2:.1f}" y="{y + 17:.1f}">{escape(name)}</text>')
        for line, text in enumerate(lines):
            parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 32 + LINE * line:.1f}">{escape(text)}</text>')
    return parts, y + height + GAP


def picture(root: Path) -> str:
    """The text of docs/architecture.svg: packages by what they import, then libraries by what they are linked with."""
    paths = {path.stem: path for path in folders(root, "torch_infini")}
    libraries = {name: (holds, below) for name, holds, _, below in library_rows(root)}
    groups = (
        (
            "python",
            "Python, torch_infini/: a package imports only packages of rows below it.",
            {name: imported(path, set(paths)) for name, path in paths.items()},
            {name: sentence_of(path, root) for name, path in paths.items()},
        ),
        (
            "library",
            "Libraries, from csrc/: a library is linked only with libraries of rows below it.",
            {name: set(below.split(", ")) & set(libraries) for name, (_, below) in libraries.items()},
            {name: f"{holds}." for name, (holds, _) in libraries.items()},
        ),
    )
    y, parts = 8.0, []
    for kind, heading, stands_on, words in groups:
        parts.append(f'<text class="name head" x="{EDGE}" y="{y + 14:.1f}">{escape(heading)}</text>')
        y += 24
        for layer in layers(stands_on):
            count = -(-len(layer) // IN_A_ROW)
            size = -(-len(layer) // count)
            for first in range(0, len(layer), size):
                row, y = boxes(kind, layer[first : first + size], words, y)
                parts += row
        y += 6
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y:.0f}" viewBox="0 0 {WIDTH} {y:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11">'
    )
    page = f'<rect class="page" width="{WIDTH}" height="{y:.0f}"/>'
    return "\n".join([opening, STYLE, page, *parts, "</svg>", ""])
