"""The package ntops, if it is installed, with infinicore in place of the module `torch` that its functions use."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import FunctionType
from typing import Any


def find_ntops(package: str) -> Any:
    """Return the module ntops; None, with a warning, if it is not installed or cannot be imported.

    Args:
        package: The name of infinicore's module, which the functions of ntops.torch then use as `torch`.
    """
    if "ntops" not in sys.modules and importlib.util.find_spec("ntops") is None:
        return None
    try:
        ntops = importlib.import_module("ntops")
        functions = list(vars(importlib.import_module("ntops.torch")).values())
    except ImportError as error:
        warnings.warn(f"infinicore: ntops is installed and not used, since its import failed: {error}", stacklevel=3)
        return None
    for function in functions:
        if isinstance(function, FunctionType):
            function.__globals__["torch"] = sys.modules[package]
    return ntops
