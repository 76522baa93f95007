"""Old names, accepted for one release with a DeprecationWarning that gives the new name."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def warn(old: str, new: str) -> None:
    """Warn that `old` is deprecated, at the first caller outside of torch_infini."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch_infini":
        level, frame = level + 1, frame.f_back
    message = f"{old} is deprecated and will be removed in the next release, use {new}"
    warnings.warn(message, DeprecationWarning, stacklevel=level)


def renamed_arguments(name: str, **new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, `name` in messages, so that it takes keyword arguments under their old names too.

    Args:
        name: Of the function or class, in messages.
        **new_names: The new name of each old one.

    Returns:
        The decorator. The function then raises TypeError if an argument comes under both names.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for old in new_names.keys() & kwargs.keys():
                if new_names[old] in kwargs:
                    raise TypeError(f"{name}: {old} must be left out where {new_names[old]} is given, got both")
                warn(f"{name}: {old}", new_names[old])
                kwargs[new_names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def renamed_fields(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class so that its constructor takes, and its instances have, fields under their old names too."""

    def decorate(cls: type[T]) -> type[T]:
        name = f"{'.'.join(cls.__module__.split('.')[:2])}.{cls.__name__}"  # of the package, not of the file

        def reader(old: str) -> Any:
            def read(self: T) -> Any:
                warn(f"{name}: {old}", new_names[old])
                return getattr(self, new_names[old])

            return property(read)

        setattr(cls, "__init__", renamed_arguments(name, **new_names)(cls.__init__))  # noqa: B010  # for mypy
        for old in new_names:
            setattr(cls, old, reader(old))
        return cls

    return decorate


def moved_names(module: str, **new_names: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names are elsewhere now.

    Args:
        module: The module's name.
        **new_names: For each old name the new one, with its module, which is imported when the old name is asked for.
    """

    def get(name: str) -> Any:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name}", new_names[name])
        target, _, attribute = new_names[name].rpartition(".")
        return getattr(importlib.import_module(target), attribute)

    return get
