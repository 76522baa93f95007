"""Old names of a class's settings, accepted for one release with a DeprecationWarning that gives the new name."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def renamed_fields(**new_names: str) -> Callable[[type[T]], type[T]]:
    """Decorate a class so that its constructor takes, and its instances have, fields under their old names too.

    Args:
        **new_names: The new name of each old one.

    Returns:
        The decorator. The class's constructor then raises TypeError if a field comes under both names.
    """

    def decorate(cls: type[T]) -> type[T]:
        name = f"torch_infini.{cls.__name__}"
        original: Callable[..., None] = cls.__init__

        def warn(old: str) -> None:
            message = f"{name}: {old} is deprecated and will be removed in the next release, use {new_names[old]}"
            warnings.warn(message, DeprecationWarning, stacklevel=_caller())

        @functools.wraps(original)
        def init(self: T, *args: Any, **kwargs: Any) -> None:
            for old in [old for old in new_names if old in kwargs]:
                if new_names[old] in kwargs:
                    raise TypeError(f"{name}: {old} must be left out where {new_names[old]} is given, got both")
                warn(old)
                kwargs[new_names[old]] = kwargs.pop(old)
            original(self, *args, **kwargs)

        def reader(old: str) -> Any:
            def read(self: T) -> Any:
                warn(old)
                return getattr(self, new_names[old])

            return property(read)

        setattr(cls, "__init__", init)  # noqa: B010  # mypy refuses an assignment
        for old in new_names:
            setattr(cls, old, reader(old))
        return cls

    return decorate


def _caller() -> int:
    """Return the stacklevel, for a warning in the calling function, of the first frame outside of torch_infini."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch_infini":
        level, frame = level + 1, frame.f_back
    return level
