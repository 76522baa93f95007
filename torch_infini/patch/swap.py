"""Swapping the class of one module instance for a subclass with another forward, and back.

Classes are never changed, so no other model notices; isinstance, hooks, deepcopy, pickle and state_dict keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType, MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

STATE = "_infini_patch"  # attribute of a patched decoder and of the models around it that generate: an apply.State
PLAN = "_infini_plan"  # attribute of a patched module: what was found out about it while patching
FORWARD = "_infini_forward"  # of one that ranks share: the forward that transformers gave the instance
TENSOR_PARALLELISM = "transformers.distributed.tensor_parallel"  # the module that has these forwards

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Parameters = dict[str, dict[str, Tensor]]  # by the names of submodules, and their own


class Refusal(Exception):  # noqa: N818 (nothing failed: it is an answer)
    """Why a module cannot be served; the report shows the text."""


class Patched(nn.Module):
    """What every patched class has in common; mixed in before the class of the module.

    A subclass says what it serves (`plans`) and gives `forward`; `super().forward` is the original forward.
    """

    infini_ops: ClassVar[str]  # what it calls
    infini_original: ClassVar[type[nn.Module]]  # the class that the module had

    def __init_subclass__(cls) -> None:
        # A class that others make of a patched one (torch.nn.utils.parametrize) has its weights elsewhere.
        if is_foreign(cls) and "forward" not in vars(cls):
            cls.forward = cls.infini_original.forward

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Who calls the class of a patched module with arguments gets one of its original class.

        Without arguments, it is copied: by torch.nn.DataParallel, or by a __deepcopy__.
        """
        return cls.infini_original(*args, **kwargs) if args or kwargs else super().__new__(cls)

    @classmethod
    def ops(cls, plan: Any) -> str:
        """What the report says that a module calls under a plan."""
        return cls.infini_ops

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        """What the module may compute, as its attributes tell; verify.py finds the one that it does compute.

        Raises:
            Refusal: If it cannot be served.
        """
        raise NotImplementedError

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe | None:
        """The calls by which verify.py tells the plans apart; None where there is nothing to tell.

        `rotary` makes the cos and sin of a model from hidden states and position ids.
        """
        return None

    def _get_name(self) -> str:
        return f"{type(self).__name__}[infini]"  # in print(model)

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        _, _, *state = super().__reduce_ex__(2)  # (copyreg.__newobj__, (class,), state, ...)
        cls = type(self)
        return (_rebuild, (cls.__mro__[1], cls.infini_original), *state)


def is_foreign(cls: type[Patched]) -> bool:
    """Whether it is a subclass of a patched class that was made by somebody else."""
    return hasattr(cls, "infini_original") and "infini_original" not in vars(cls)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a twin, which must give the same by its own forward and by the patched one.

    Attributes:
        when: What is special about it, for reports: "for 40 tokens"; "" for the call by which a plan is chosen.
        run: Makes the call with the forward that it is given.
        tolerance: Relative error (of the Euclidean norm) up to which two results are the same.
        parameters: For this call: other parameters of the twin's submodules, by their names; "" is the twin itself.
        attributes: For this call: other attributes of the twin.
        dtype: Of the twin's parameters.
    """

    when: str
    run: Callable[[Callable[..., Any]], Any]
    tolerance: float
    parameters: Parameters = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False)
class Probe:
    """A small twin of a module, and the calls of it that tell what it computes.

    Attributes:
        twin: A module of the original's class and attributes with other weights, as small as they may be.
        calls: Makes the calls, the one by which a plan is chosen first; they follow from the twin.
    """

    twin: nn.Module
    calls: Callable[[], Iterable[Call]]


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


def shared_forward(module: nn.Module) -> Callable[..., Any] | None:
    """The forward that transformers' tensor parallelism gave this instance; None where it has none, or another."""
    forward = vars(module).get("forward")
    # By its globals: a wrapper around it (accelerate's) takes over its names, but does more.
    if isinstance(forward, FunctionType) and forward.__globals__.get("__name__") == TENSOR_PARALLELISM:
        return forward
    return None


def swap(module: nn.Module, patch: type[Patched], plan: Any) -> None:
    """Give the module its patched class, and its plan before, so that it works if this is interrupted."""
    vars(module)[PLAN] = plan
    forward = shared_forward(module)
    if forward is not None:
        vars(module)[FORWARD] = forward
    module.__class__ = patched_class(patch, type(module))
    if forward is not None:
        del vars(module)["forward"]


def restore(module: nn.Module) -> None:
    """Give a patched module its own class back."""
    cls, original = type(module), module.infini_original
    if is_foreign(cls):
        own = {name: value for name, value in vars(cls).items() if name not in ("forward", "__dict__", "__weakref__")}
        original = type(cls.__name__, (original,), own)
    if FORWARD in vars(module):
        vars(module)["forward"] = vars(module)[FORWARD]
    for name, value in list(vars(module).items()):
        if name.startswith("_infini_"):
            del vars(module)[name]
        elif isinstance(value, MethodType) and value.__self__ is module:
            # accelerate's hooks keep the forward that they found.
            vars(module)[name] = MethodType(getattr(original, value.__name__, value.__func__), module)
    module.__class__ = original
