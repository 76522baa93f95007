"""Lets scripts `import infinicore` and `import infinilm` unchanged.

install() adds an import finder: `import infinicore.nn` imports compat.infinicore.nn, the same module object under a
second name, so that no class exists twice. `python -m torch_infini run SCRIPT` installs it for a script.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

# The names that scripts import, and the modules they get. A name in the first column may also appear in the second.
ALIASES = {
    "infinicore": "torch_infini.compat.infinicore",
    "infinilm": "torch_infini.compat.infinilm",
    "_infinilm": "infinilm.lib._infinilm",
}
# Modules in which scripts get other objects than users of torch_infini: {alias: {name: (module, name in it)}}.
# `infinilm` and `infinilm.lib` are included because of their submodules.
_SIZED_IN_BLOCKS = {"PagedKVCacheConfig": ("torch_infini.compat.infinilm.cache.sized_in_blocks", "PagedKVCacheConfig")}
OVERRIDES = {
    "infinilm": _SIZED_IN_BLOCKS,
    "infinilm.cache": _SIZED_IN_BLOCKS,
    "infinilm.cache.cache": _SIZED_IN_BLOCKS,
    "infinilm.infer_engine": _SIZED_IN_BLOCKS,
    "infinilm.lib": {},
    "infinilm.lib._infinilm": _SIZED_IN_BLOCKS,
}


class View(ModuleType):
    """A module under an alias, in which some names refer to other objects; all others are the module's own."""

    def __init__(self, name: str, real: ModuleType, overrides: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(name, real.__doc__)
        self.__real = real
        for attribute, (module, there) in overrides.items():
            setattr(self, attribute, getattr(importlib.import_module(module), there))

    def __getattr__(self, name: str) -> Any:
        if name == "__all__" and not hasattr(self.__real, name):  # otherwise `import *` would use this object's names
            return [public for public in vars(self.__real) if not public.startswith("_")]
        value = getattr(self.__real, name)
        if isinstance(value, ModuleType) and value.__name__ == f"{self.__real.__name__}.{name}":
            return importlib.import_module(f"{self.__name__}.{name}")  # may be another view
        return value

    def __dir__(self) -> list[str]:
        return dir(self.__real)


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under other names: finder and loader in one."""

    def __init__(
        self, aliases: Mapping[str, str], overrides: Mapping[str, Mapping[str, tuple[str, str]]] | None = None
    ) -> None:
        self.aliases = dict(aliases)
        self.overrides = dict(overrides or {})

    def target(self, name: str) -> str | None:
        """Return the module that a name stands for; None if the name is no alias."""
        root, dot, rest = name.partition(".")
        return f"{self.aliases[root]}{dot}{rest}" if root in self.aliases else None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        real = self.target(fullname)
        if real is None:
            return None
        found = importlib.util.find_spec(real)
        if found is None:
            if "." in fullname:
                return None  # and no other finder finds it in the package's folder
            raise ModuleNotFoundError(f"No module named {real!r}, which is to serve as {fullname!r}", name=fullname)
        spec = importlib.machinery.ModuleSpec(fullname, self, is_package=None)
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Make a view. For other modules, let the import system make a module of its own, which exec_module drops: a
        module
        returned here would get the alias's spec."""
        if spec.name not in self.overrides:
            return None
        return View(spec.name, self._real(spec.name), self.overrides[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        real = self._real(name)
        if not isinstance(module, View):
            sys.modules[name] = real
        # All submodules imported so far: importing one by its alias would otherwise set it as an attribute of its
        # package again, where a function of the same name may have replaced it.
        for other in [other for other in sys.modules if other.startswith(f"{real.__name__}.")]:
            alias = name + other.removeprefix(real.__name__)
            if alias not in self.overrides:
                sys.modules.setdefault(alias, sys.modules[other])

    def _real(self, name: str) -> ModuleType:
        target = self.target(name)
        assert target is not None
        return importlib.import_module(target)


_finder: AliasFinder | None = None


def install(*, replace: bool = False) -> None:
    """Make infinicore, infinilm and _infinilm importable: torch_infini.compat.infinicore, torch_infini.compat.infinilm
    and its lib._infinilm, in the form that scripts expect (OVERRIDES).

    Repeated calls do nothing.

    Args:
        replace: Do so even if a package of one of these names is installed; scripts then do not get that package.

    Raises:
        ImportError: If one of them is already imported, or can be imported and `replace` is false.
    """
    global _finder
    if _finder is not None:
        return
    for name in ALIASES:
        if name in sys.modules:
            raise ImportError(
                f"torch_infini.compat.install: {name} must not be imported before, got "
                f"{_place(sys.modules[name].__spec__)}",
                name=name,
            )
        spec = None if replace else importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:  # a folder without __init__.py has no loader
            raise ImportError(
                f"torch_infini.compat.install: {name} is installed, in {_place(spec)}: remove it from sys.path, or "
                "take its place with replace=True (python -m torch_infini run --replace)",
                name=name,
            )
    _finder = AliasFinder(ALIASES, OVERRIDES)
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo install(): scripts keep what they have imported, but the names no longer refer to our modules."""
    global _finder
    if _finder is None:
        return
    sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if _finder.target(name) is not None]:
        del sys.modules[name]
    _finder = None


def _place(spec: importlib.machinery.ModuleSpec | None) -> str:
    return spec.origin if spec is not None and spec.origin is not None else "a place unknown"
