"""ModuleList: modules in a list, registered as "0", "1", ..."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, overload

from .module import Module


class ModuleList(Module):
    """A list of modules, which are registered by their indices.

    Args:
        modules: The initial modules.
    """

    def __init__(self, modules: Iterable[Module] | None = None) -> None:
        super().__init__()
        self._set(modules or ())

    def _set(self, modules: Iterable[Module]) -> None:
        kept = list(modules)
        self._modules.clear()
        for place, module in enumerate(kept):
            self.add_module(str(place), module)

    def _list(self) -> list[Module]:
        return [module for module in self._modules.values() if module is not None]

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._list())

    def __contains__(self, module: object) -> bool:
        return any(module is member for member in self._list())

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> ModuleList: ...
    def __getitem__(self, index: int | slice) -> Module | ModuleList:
        return ModuleList(self._list()[index]) if isinstance(index, slice) else self._list()[self._place(index)]

    def __setitem__(self, index: int, module: Module) -> None:
        self._check_type(str(index), module, Module, "__setitem__")
        self._modules[str(self._place(index))] = module

    def __delitem__(self, index: int | slice) -> None:
        kept = self._list()
        del kept[index if isinstance(index, slice) else self._place(index)]
        self._set(kept)

    def _place(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"infinicore.nn.ModuleList: index must be below {len(self)}, got {index}")
        return index % len(self)

    def append(self, module: Module) -> ModuleList:
        """Append a module; return the list."""
        self.add_module(str(len(self)), module)
        return self

    def extend(self, modules: Iterable[Module]) -> ModuleList:
        """Append modules; return the list."""
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index: int, module: Module) -> None:
        """Insert a module before the one at `index`."""
        kept = self._list()
        kept.insert(index, module)
        self._set(kept)

    def pop(self, index: int = -1) -> Module:
        """Remove and return a module."""
        module = self[index]
        del self[index]
        return module

    def __iadd__(self, modules: Iterable[Module]) -> ModuleList:
        return self.extend(modules)

    def __add__(self, other: Iterable[Module]) -> ModuleList:
        return ModuleList([*self, *other])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: a list has nothing to compute."""
        raise NotImplementedError("infinicore.nn.ModuleList: call its modules; the list has no forward()")
