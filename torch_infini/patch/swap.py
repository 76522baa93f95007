"""Swapping the class of one module instance for a subclass with another forward, and back.

Classes are never changed, so no other model notices; isinstance, hooks, deepcopy, pickle and state_dict keep working.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from torch import nn


class Patched(nn.Module):
    """What every patched class has in common; mixed in before the class of the module.

    A subclass says what it serves (`refusal`) and gives `forward`; `super().forward` is the original forward.
    """

    infini_ops: ClassVar[str]  # what the report says that it calls
    infini_reads: ClassVar[tuple[str, ...]] = ()  # attributes of the original that forward reads
    infini_probe: ClassVar[tuple[str, ...]] = ()  # arguments of a call that verify.py compares with the original's
    infini_precision: ClassVar[float] = 1.0  # factor of verify.py's tolerances
    infini_original: ClassVar[type[nn.Module]]  # the class that the module had

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        """Why this module cannot be served; None if it can."""
        raise NotImplementedError

    def _get_name(self) -> str:
        return f"{type(self).__name__}[infini]"  # in print(model)

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        _, _, *state = super().__reduce_ex__(2)  # (copyreg.__newobj__, (class,), state, ...)
        cls = type(self)
        return (_rebuild, (cls.__mro__[1], cls.infini_original), *state)


@cache
def patched_class(patch: type[Patched], original: type[nn.Module]) -> type[Patched]:
    """The subclass of both, under the original's name: transformers finds classes by name in several places."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (patch, original), {**names, "infini_original": original})


def _rebuild(patch: type[Patched], original: type[nn.Module]) -> nn.Module:
    """What unpickling and deepcopy make a patched module with, before they give it its state."""
    from .interface import register

    register()
    cls = patched_class(patch, original)
    return cls.__new__(cls)


def swap(module: nn.Module, patch: type[Patched]) -> None:
    """Give the module its patched class."""
    module.__class__ = patched_class(patch, type(module))


def restore(module: nn.Module) -> None:
    """Give a patched module its own class back."""
    module.__class__ = module.infini_original
