"""after_import(): a function that runs once another package's module has been imported, without importing it here.

transformers takes seconds to import, and most programs that import torch_infini never need it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def after_import(module: str, call: Callable[[ModuleType], object]) -> Callable[[], None]:
    """Call a function with a module: now if it is imported already, otherwise right after its code has run.

    Args:
        module: The dotted name.
        call: Called once; what it raises comes out of the import.

    Returns:
        A function that cancels the call, if it has not been made.
    """
    found = sys.modules.get(module)
    if found is not None:
        call(found)
        return lambda: None
    hook = _Hook(module, call)
    sys.meta_path.insert(0, hook)
    return hook.remove


class _Hook(MetaPathFinder):
    """Finds one module as the other finders do, with a loader that makes the call."""

    def __init__(self, module: str, call: Callable[[ModuleType], object]) -> None:
        self._module, self._call, self._searching = module, call, False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._module or self._searching:
            return None
        self._searching = True  # the search below comes here again
        try:
            spec = find_spec(name)
        finally:
            self._searching = False
        loader = None if spec is None else spec.loader
        if spec is None or loader is None:
            return None
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:  # not cancelled, and the first to import it
                self.remove()
                self._call(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
