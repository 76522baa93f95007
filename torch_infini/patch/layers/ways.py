"""Which modules inside a patched module are computed without calling them: asked once, and again after a change.

A hook, another class, another module in its place, a forward of the instance: each of these is a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from ..checks.conditions import has_kernels, may_need_grad, unwatched

WAYS = "_infini_ways"  # attribute of a patched module: its Ways


class Watched(NamedTuple):
    """A module as it was when the question was asked, and where it was found."""

    siblings: dict[str, Any]
    name: str
    module: nn.Module
    kind: type[nn.Module]
    own: dict[str, Any]
    unwatched: bool


@dataclass(frozen=True, eq=False)
class Ways:
    """The answer for one module. A copy of the module has none, and asks for itself.

    Attributes:
        modules: The module's own, by which it knows that the answer is not one of the module that it was copied from.
        watched: What the answer depends on.
        closed: Whether no module is called, so that nothing can change while the answer is used.
    """

    modules: dict[str, Any]
    watched: tuple[Watched, ...]
    closed: bool

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def watch(siblings: dict[str, Any], names: Iterable[str]) -> Iterator[Watched]:
    for name in names:
        module = siblings[name]
        yield Watched(siblings, name, module, type(module), module.__dict__, unwatched(module))


def known_ways(module: Any, x: Tensor) -> Any:
    """Return the module's Ways, kept from an earlier call if nothing has changed since; None as in needs_fallback.

    In one frame, because every layer asks at every token.
    """
    if (
        (torch.is_grad_enabled() and (x.requires_grad or may_need_grad(module)))
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or not has_kernels(x)
    ):
        return None
    if torch.compiler.is_compiling():  # which watches what `ask` reads by guards of its own
        return module.ask()
    own = module.__dict__
    known = own.get(WAYS)
    if known is not None and known.modules is own["_modules"]:
        for siblings, name, child, kind, its_own, was_unwatched in known.watched:
            if (
                siblings.get(name) is not child
                or type(child) is not kind
                or was_unwatched
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
    known = own[WAYS] = module.ask()
    return known
