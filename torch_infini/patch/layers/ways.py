"""Dispatch: which submodules of a patched module are computed without calling them, cached until one of them changes.

A change is a hook, another class, another module in its place, or a forward on the instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from ..checks.conditions import has_kernels, may_need_grad, unhooked

DISPATCH = "_infini_dispatch"  # attribute of a patched module: its Dispatch


class Guard(NamedTuple):
    """A submodule as it was when a dispatch was determined, and where it was found."""

    siblings: dict[str, Any]
    name: str
    module: nn.Module
    kind: type[nn.Module]
    own: dict[str, Any]
    unhooked: bool


@dataclass(frozen=True, eq=False)
class Dispatch:
    """How one module computes its submodules. A copy of the module determines its own.

    Attributes:
        modules: The module's `_modules`; in a shallow copy of the module they differ, and the dispatch is not used.
        guards: The submodules that the dispatch depends on.
        closed: Whether no module is called, so that nothing can change while the dispatch is used.
    """

    modules: dict[str, Any]
    guards: tuple[Guard, ...]
    closed: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def guards_of(siblings: dict[str, Any], names: Iterable[str]) -> Iterator[Guard]:
    for name in names:
        module = siblings[name]
        yield Guard(siblings, name, module, type(module), module.__dict__, unhooked(module))


def cached_dispatch(module: Any, x: Tensor) -> Any:
    """Return the module's Dispatch, cached while nothing changes; None if needs_fallback.

    Written in one frame, because every layer calls it at every token.
    """
    if (
        (torch.is_grad_enabled() and (x.requires_grad or may_need_grad(module)))
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or not has_kernels(x)
    ):
        return None
    if torch.compiler.is_compiling():  # Dynamo guards what `make_dispatch` reads
        return module.make_dispatch()
    own = module.__dict__
    known = own.get(DISPATCH)
    if known is not None and known.modules is own["_modules"]:
        for siblings, name, child, kind, its_own, was_unhooked in known.guards:
            if (
                siblings.get(name) is not child
                or type(child) is not kind
                or was_unhooked
                is bool(
                    its_own["_forward_hooks"]
                    or its_own["_forward_pre_hooks"]
                    or "forward" in its_own
                    or its_own.get("_compiled_call_impl") is not None
                )
            ):
                break
        else:
            return known
    known = own[DISPATCH] = module.make_dispatch()
    return known
