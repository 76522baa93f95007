"""Chromium without a window, through Playwright, for the tests of the server's page; checks of accessibility."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
AUDIT = Path(__file__).resolve().parent.parent / "page" / "audit.js"


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start the system's Chromium, or Playwright's own; skips the test where there is none or it does not start."""
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (pip install playwright)")
    if os.environ.get("LD_PRELOAD"):
        pytest.skip("Chromium does not start with the libraries of LD_PRELOAD, those of a sanitizer")
    with api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip(f"there is no Chromium: neither {', '.join(PROGRAMS)} nor one of `playwright install chromium`")
        # Its sandbox does not start for root.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        try:
            browser = playwright.chromium.launch(executable_path=found, args=arguments)
        except api.Error as error:
            pytest.skip(f"Chromium does not start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


def faults_of(page: Page) -> list[str]:
    """Return what tests/page/audit.js finds wrong with a page as it is shown: names, headings, contrast, sizes."""
    found: Any = page.evaluate(AUDIT.read_text())
    return [str(fault) for fault in found]
