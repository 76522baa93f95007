"""The provider "ntops": ops of the package ntops, registered if it is installed and requested by name.

ntops is imported only then, because it imports Triton. Its functions are in ntops.torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from importlib import import_module
from importlib.util import find_spec
from typing import Any

NAME = "ntops"
# Our op -> the function of ntops.torch with the same arguments and results.
FUNCTIONS = {"silu": "silu"}
DEVICE = "cuda"


def register_if_asked(
    op: str, name: str, register: Callable[..., Any], registered: Container[tuple[str, str, str]]
) -> None:
    """Register ntops' function for an op if `name` is "ntops", the package is installed, and it has such a function."""
    if name == NAME and op in FUNCTIONS and (op, DEVICE, NAME) not in registered and find_spec(NAME):
        register(op, getattr(import_module(f"{NAME}.torch"), FUNCTIONS[op]), device=DEVICE, name=NAME)


def missing(name: str) -> str:
    """Return a remark that ntops is not installed, for a message."""
    return "; the package ntops is not installed" if name == NAME and not find_spec(NAME) else ""
