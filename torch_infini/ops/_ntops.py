"""The provider "ntops": ops of the package of that name, registered when it is installed and asked for by name.

ntops is imported then and not before: it brings Triton. Its functions are found under ntops.torch.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from importlib import import_module
from importlib.util import find_spec
from typing import Any

NAME = "ntops"
# Our op: the function of ntops.torch that takes the same arguments and computes the same.
FUNCTIONS = {"silu": "silu"}
DEVICE = "cuda"


def register_if_asked(
    op: str, name: str, register: Callable[..., Any], registered: Container[tuple[str, str, str]]
) -> None:
    """Register ntops' function for an op if `name` asks for ntops, which is installed and has one."""
    if name == NAME and op in FUNCTIONS and (op, DEVICE, NAME) not in registered and find_spec(NAME):
        register(op, getattr(import_module(f"{NAME}.torch"), FUNCTIONS[op]), device=DEVICE, name=NAME)


def missing(name: str) -> str:
    """A remark for a message that ntops is not there."""
    return "; the package ntops is not installed" if name == NAME and not find_spec(NAME) else ""
