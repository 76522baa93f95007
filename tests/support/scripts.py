"""Modules of the folders of scripts, benchmarks and .ci, for tests of what they do or make."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent.parent


def script(path: str) -> ModuleType:
    """The module at a path from the root, "benchmarks/train_demo"; it imports those beside it by their names."""
    folder, _, name = path.rpartition("/")
    sys.path.insert(0, str(ROOT / folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / folder))
