"""Architectures of GGUF files. Modules here that define ARCHITECTURES are found: to add an architecture, add a file."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..architecture import Architecture


def _found() -> dict[str, Architecture]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    found: list[Architecture] = [one for module in modules for one in getattr(module, "ARCHITECTURES", ())]
    return {one.name: one for one in sorted(found, key=lambda one: one.name)}


ARCHITECTURES = _found()  # by general.architecture
