"""infinicore and infinilm under their own names: scripts written for them run as they are.

install() adds an import finder by which `import infinicore.nn` gives torch_infini.infinicore.nn, the same module object
under a second name, so that no class exists twice. `python -m torch_infini run SCRIPT` installs it for a script.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

# What scripts import: what they get.
ALIASES = {"infinicore": "torch_infini.infinicore", "infinilm": "torch_infini.infinilm"}


class AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under other names: finder and loader in one."""

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.aliases = dict(aliases)

    def target(self, name: str) -> str | None:
        """The module that a name stands for; None: the name is none of ours."""
        root, dot, rest = name.partition(".")
        return f"{self.aliases[root]}{dot}{rest}" if root in self.aliases else None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        real = self.target(fullname)
        if real is None:
            return None
        if importlib.util.find_spec(real) is None:
            if "." in fullname:
                return None  # and no other finder finds it in the package's folder either
            raise ModuleNotFoundError(f"No module named {real!r}, which is to serve as {fullname!r}", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=None)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Let the import system make a module of its own, which exec_module leaves behind.

        It would write the alias's spec into one that is returned here.
        """

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        real = self.target(name)
        assert real is not None
        sys.modules[name] = importlib.import_module(real)
        # All that it has imported so far: an import of one by its alias would else write it into its package again,
        # where a function of the same name may have taken its place.
        for other in [other for other in sys.modules if other.startswith(f"{real}.")]:
            sys.modules.setdefault(name + other.removeprefix(real), sys.modules[other])


_finder: AliasFinder | None = None


def install(*, replace: bool = False) -> None:
    """Let infinicore and infinilm be imported as torch_infini.infinicore and torch_infini.infinilm from now on.

    Called again it does nothing.

    Args:
        replace: Do so even if a package of one of these names is installed, which scripts then do not get.

    Raises:
        ImportError: If one of them is imported already, or can be imported and `replace` is false.
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
        if spec is not None and spec.loader is not None:  # a folder without __init__.py has none
            raise ImportError(
                f"torch_infini.compat.install: {name} is installed, in {_place(spec)}: remove it from sys.path, or "
                "take its place with replace=True (python -m torch_infini run --replace)",
                name=name,
            )
    _finder = AliasFinder(ALIASES)
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Undo install(): what a script imported stays with it, but the names lead to nothing of ours any more."""
    global _finder
    if _finder is None:
        return
    sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if _finder.target(name) is not None]:
        del sys.modules[name]
    _finder = None


def _place(spec: importlib.machinery.ModuleSpec | None) -> str:
    return spec.origin if spec is not None and spec.origin is not None else "a place unknown"
