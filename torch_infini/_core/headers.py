"""The C interface as its own headers declare it: every function with its arguments, every enum with its values.

The one table from which the ctypes signatures come, so that nothing is written twice.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADERS = ("infinicore.h", "infinirt.h", "infiniop.h", "infiniop/*.h", "infiniop/ops/*.h", "infiniccl.h")

_NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
    "size_t": ctypes.c_size_t,
}


@dataclass(frozen=True)
class Argument:
    """One argument: its C type without blanks around the stars ("const void*"), and its name."""

    type: str
    name: str


@dataclass(frozen=True)
class Function:
    """One function: name, type of the result, arguments in order, and the library that has it."""

    name: str
    result: str
    arguments: tuple[Argument, ...]
    library: str


@dataclass(frozen=True)
class Interface:
    """All functions and enums by name, and the types that are handles (pointers to something opaque)."""

    functions: dict[str, Function]
    enums: dict[str, dict[str, int]]
    handles: frozenset[str]


def _argument(text: str) -> Argument:
    if re.search(r"\(\s*\*", text):  # a pointer to a function: void (*release)(void *data)
        return Argument("function", re.search(r"\*\s*(\w+)\)", text).group(1))  # type: ignore[union-attr]
    type_, name = re.fullmatch(r"(.*?)(\w+)", text.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
    return Argument(re.sub(r"\s*\*\s*", "*", type_).strip(), name)


def _split(arguments: str) -> list[str]:
    """At the commas that are not within parentheses."""
    return re.split(r",(?![^()]*\))", arguments)


def parse(include: Path) -> Interface:
    functions: dict[str, Function] = {}
    enums: dict[str, dict[str, int]] = {}
    handles: set[str] = set()
    for path in (path for pattern in HEADERS for path in sorted(include.glob(pattern))):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
        of = path.relative_to(include).parts[0].removesuffix(".h")
        library = f"lib{of}" if of != "infinicore" else "libinfinirt"
        for result, name, arguments in re.findall(r"INFINI_API\s+([\w\s*]+?)(\w+)\(((?:[^()]|\([^()]*\))*)\);", text):
            parsed = () if arguments.strip() == "void" else tuple(_argument(a) for a in _split(arguments))
            functions[name] = Function(name, re.sub(r"\s*\*\s*", "*", result).strip(), parsed, library)
        for body, name in re.findall(r"typedef enum\b[^{]*\{(.*?)\}\s*(\w+);", text, re.DOTALL):
            enums[name] = {member: int(value) for member, value in re.findall(r"(\w+)\s*=\s*(\d+)", body)}
        handles.update(re.findall(r"typedef (?:struct \w+|void) \*(\w+);", text))
        handles.update(re.findall(r"typedef \w+ \(\*(\w+)\)", text))
    return Interface(functions, enums, frozenset(handles))


def declare(library: ctypes.CDLL, name: str, interface: Interface) -> Any:
    """A function of the library with argument types: enums are int, whatever else is no number is a pointer."""
    native = getattr(library, name)
    plain = {**_NUMBERS, **dict.fromkeys(interface.enums, ctypes.c_int)}
    native.argtypes = [plain.get(argument.type, ctypes.c_void_p) for argument in interface.functions[name].arguments]
    return native
