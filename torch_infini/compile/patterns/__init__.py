"""The patterns that backend="infini" looks for.

Every module of this folder whose name does not begin with an underscore defines one, PATTERN, and is found
automatically: adding a pattern means adding a file.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from ._pattern import Pattern

__all__ = ["PATTERNS", "Pattern", "find_patterns"]


def find_patterns() -> tuple[Pattern, ...]:
    """Import the modules of this folder and return their patterns in the order in which they are applied."""
    names = sorted(module.name for module in iter_modules(__path__) if not module.name.startswith("_"))
    found: list[Pattern] = [import_module(f"{__name__}.{name}").PATTERN for name in names]
    return tuple(sorted(found, key=lambda pattern: pattern.order))


PATTERNS = find_patterns()
