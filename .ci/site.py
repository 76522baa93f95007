"""Builds the site from the pages: build/site, by Sphinx, which reads the Markdown as GitHub does (MyST).

    python .ci/site.py [--out build/site] [--source-only]

The pages are copied to build/site-source as they are, with two changes: README.md becomes the first page, which has the
order of all pages (READERS), and a link to a folder or a source file that is no page of the site becomes its text. The
API reference is written from the public names and their docstrings (api.py); nothing of it is committed.
A warning of Sphinx fails the build.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "build" / "site-source"
ASSETS = {
    ".csv",
    ".png",
    ".svg",
    ".h",
    ".hpp",
    ".c",
    ".yaml",
    ".service",
    ".ipynb",
    "",
}  # kinds of files that pages may link

# Who reads, and their pages in the order in which they need them. Every page stands in one place.
READERS = {
    "Begin": ("docs/README", "docs/install", "docs/troubleshooting", "docs/settings", "docs/speed"),
    "Hugging Face": ("docs/patching", "docs/families", "docs/checkpoints", "docs/torchao"),
    "PyTorch": ("docs/ops", "docs/device", "docs/gpu", "docs/distributed"),
    "Compilers": ("docs/compiling", "docs/providers", "docs/recording"),
    "Serving": ("docs/engine", "docs/server", "docs/evaluating", "docs/scale-out", "docs/vllm"),
    "InfiniCore and InfiniLM": ("docs/infinicore", "docs/infinicore-functions", "docs/infinilm"),
    "C and C++": ("csrc/README", "docs/infinicore-cpp"),
    "Vendors and contributors": (
        "docs/new-device",
        "docs/new-op",
        "docs/architecture",
        "docs/style",
        "CONTRIBUTING",
        "SECURITY",
        "CHANGELOG",
    ),
    "API reference": ("api/index",),
}
CONFIGURATION = """
project = "torch_infini"
version = release = {version!r}
root_doc = "index"
extensions = ["myst_parser"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "torch_infini {version}"
html_copy_source = html_show_copyright = html_show_sphinx = False
highlight_language = "none"
"""
# Code comes first where it begins first: what looks like a link in it is none.
LINK = re.compile(
    r"^```.*?^```[^\S\n]*$|(?P<mark>!?)\[(?P<shown>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<address>[^)\s]+)\)|`[^`\n]+`",
    re.M | re.S,
)


def page_names() -> list[str]:
    """The pages that the site shows as they are, by their place without .md; the README comes on its own."""
    return [page for pages in READERS.values() for page in pages if not page.startswith("api/")]


def relinked(text: str, page: Path, found: set[Path]) -> str:
    """A page's text for the site.

    Args:
        text: The page as it stands in the repository.
        page: Its file.
        found: Files that it links or shows, which are copied beside it, are added here.
    """
    known = {ROOT / f"{name}.md" for name in page_names()} | {ROOT / "README.md"}

    def link(match: re.Match[str]) -> str:
        mark, shown, address = match["mark"], match["shown"], match["address"]
        path, _, heading = (address or "").partition("#")
        if "://" in path or not path:
            return match[0]
        target = Path(os.path.normpath(page.parent / path))
        if target == ROOT / "README.md":
            to_root = os.path.relpath(ROOT / "index.md", page.parent)
            return f"{mark}[{shown}]({to_root}{'#' if heading else ''}{heading})"
        if target in known:
            return match[0]
        if target.is_file() and target.suffix in ASSETS:
            found.add(target)
            return match[0]
        return shown

    return LINK.sub(link, text)


def contents() -> str:
    """The order of the pages, for Sphinx: a list for each kind of reader."""
    lists = []
    for reader, pages in READERS.items():
        lists.append("\n".join(["```{toctree}", ":hidden:", f":caption: {reader}", "", *pages, "```"]))
    return "\n\n" + "\n\n".join(lists) + "\n"


def write_source(folder: Path) -> None:
    """Write what Sphinx reads."""
    sys.path[:0] = [str(ROOT), str(ROOT / ".ci")]
    try:
        version = importlib.import_module("torch_infini").__version__
        reference = importlib.import_module("api").pages()
    finally:
        del sys.path[:2]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files: set[Path] = set()
    for name in ("README", *page_names()):
        page = ROOT / f"{name}.md"
        text = relinked(page.read_text(encoding="utf-8"), page, files)
        target = folder / ("index.md" if name == "README" else f"{name}.md")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text + (contents() if name == "README" else ""), encoding="utf-8")
    for file in files:
        target = folder / file.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    (folder / "api").mkdir()
    for name, text in reference.items():
        (folder / "api" / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / "conf.py").write_text(CONFIGURATION.format(version=version).lstrip(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--source", type=Path, default=SOURCE, help="where the pages for Sphinx are written")
    parser.add_argument("--source-only", action="store_true", help="write the pages for Sphinx, and build nothing")
    options = parser.parse_args(arguments)
    write_source(options.source)
    if options.source_only:
        return 0
    shutil.rmtree(options.out, ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(options.source.with_name(f"{options.source.name}-cache"))]
    status = subprocess.run([*command, str(options.source), str(options.out)]).returncode
    if status == 0:
        print(f"site: {options.out / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
