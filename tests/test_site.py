"""The site: every page has a place in it, every public name is in its reference, and it builds without a warning."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torch_infini
from support.browser import chromium

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[Any, Any]]:
    """.ci/site.py and .ci/api.py. The first has the name of a module of Python's own."""
    sys.path.insert(0, str(ROOT / ".ci"))
    try:
        spec = importlib.util.spec_from_file_location("ci_site", ROOT / ".ci" / "site.py")
        assert spec and spec.loader
        site = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(site)
        yield site, importlib.import_module("api")
    finally:
        sys.path.remove(str(ROOT / ".ci"))


def test_every_page_has_a_place(scripts: tuple[Any, Any]) -> None:
    site, _ = scripts
    pages = {f"docs/{page.stem}" for page in (ROOT / "docs").glob("*.md")}
    pages |= {page.stem for page in ROOT.glob("*.md")} - {"README"} | {"csrc/README"}
    assert sorted(site.page_names()) == sorted(pages)


def test_every_public_name_is_in_the_reference(scripts: tuple[Any, Any]) -> None:
    """With what it does: all names of __all__ of the packages, the names of torch_infini among them, and every op."""
    _, api = scripts
    pages = api.pages()
    parts = {f"torch_infini.{name}" for name in torch_infini.__all__ if inspect.ismodule(getattr(torch_infini, name))}
    assert set(api.PACKAGES) >= parts - {"torch_infini.compat"}  # docs/infinicore-functions.md has its names
    for package in api.PACKAGES:
        text = pages[api.file_of(package)]
        names = api.public_names(package)
        assert re.findall(r"^## (.*)$", text, re.M) == names and len(names) == len(set(names))
        for name in names:
            what = getattr(importlib.import_module(package), name)
            kind = getattr(what, "__module__", "")
            if callable(what) and kind.startswith("torch_infini"):
                assert api.own_docstring(what), f"{package}.{name} must have a docstring"
        assert " at 0x" not in text, f"{package}: an address is in a signature"
    for spec in torch_infini.ops.all_ops():
        assert f"torch.ops.infini.{spec.name}(" in pages["ops"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a](install.md#cuda) `[b](c)`", "[a](install.md#cuda) `[b](c)`"),
        ("[a](../README.md) and [`b`](../csrc/)", "[a](../index.md) and `b`"),
        ("```\n[a](../csrc/)\n```\n[a](https://example.org)", "```\n[a](../csrc/)\n```\n[a](https://example.org)"),
        ("![a](architecture.svg) [b](../setup.py)", "![a](architecture.svg) b"),
    ],
)
def test_links_of_the_site(text: str, shown: str, scripts: tuple[Any, Any]) -> None:
    """Links to pages and pictures stay; those to folders and sources become text; code stays as it is."""
    site, _ = scripts
    found: set[Path] = set()
    assert site.relinked(text, ROOT / "docs" / "page.md", found) == shown
    assert found == ({ROOT / "docs" / "architecture.svg"} if "svg" in text else set())


def test_docstrings_as_markdown(scripts: tuple[Any, Any]) -> None:
    _, api = scripts
    doc = "Do a *b*.\n\nArgs:\n    x: [n] of `a_b`,\n        long.\n    y, z: More.\n\nEquivalent to:\n    >>> x + y\n"
    assert "\n".join(api.markdown(doc)).split("\n\n") == [
        r"Do a \*b\*.",
        "**Args**",
        "* `x`: \\[n\\] of `a_b`, long.\n* `y, z`: More.",
        "**Equivalent to**",
        "```pycon\n>>> x + y\n```\n",
    ]


@pytest.mark.full
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Where its builder is; where Chromium is, three pages are looked at, also on a narrow screen."""
    for name in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(name, reason=f"{name} is not installed (`make site` installs it)")
    command = [sys.executable, str(ROOT / ".ci" / "site.py"), "--out", str(tmp_path / "site")]
    done = subprocess.run([*command, "--source", str(tmp_path / "source")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("index", "docs/install", "csrc/README", "api/ops", "search"):
        assert (tmp_path / "site" / f"{name}.html").is_file(), name
    with chromium() as browser:
        for width in (1280, 390):
            page = browser.new_page(viewport={"width": width, "height": 900})
            for name in ("index", "docs/speed", "api/patch"):
                page.goto((tmp_path / "site" / f"{name}.html").as_uri())
                assert page.locator("h1").first.is_visible()
                overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
                assert overflow <= 0, f"{name} is {overflow} pixels wider than a screen of {width}"
                picture = page.screenshot(path=tmp_path / f"{name.replace('/', '-')}-{width}.png")
                assert len(picture) > 10_000
            page.close()
