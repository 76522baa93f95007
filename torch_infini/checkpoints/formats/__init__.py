"""Formats of quantized layers in folders. Modules here that define METHODS are found: to add a format, add a file."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ..method import Method


def _found() -> dict[str, Method]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    methods: list[Method] = [method for module in modules for method in getattr(module, "METHODS", ())]
    return {method.name: method for method in sorted(methods, key=lambda one: one.name)}


METHODS = _found()  # by quant_method
