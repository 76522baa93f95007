"""Swaps the class of one module instance for a subclass with another forward, and back.

Classes are never changed, so other models are not affected; isinstance, hooks, deepcopy, pickle and state_dict work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import TYPE_CHECKING, Any, ClassVar, SupportsIndex

import torch
from torch import Tensor, nn

from .parallel_forward import FORWARD, parallel_forward

STATE = "_infini_patch"  # attribute of a patched decoder and of the generating models around it: a State (state.py)
PLAN = "_infini_plan"  # attribute of a patched module: its plan, determined while patching

Rotary = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Parameters = dict[str, dict[str, Tensor]]  # by the names of submodules, and their own


class Unsupported(Exception):  # noqa: N818 (an answer, not an error)
    """The reason why a module cannot be patched; the report shows the text."""


class Patched(nn.Module):
    """Base of all patched classes; mixed in before the class of the module.

    A subclass defines `plans` and `forward`; `super().forward` is the original forward.
    """

    infini_ops: ClassVar[str]  # the ops that it calls
    infini_original: ClassVar[type[nn.Module]]  # the class that the module had
    # What they hold is known from the plan: no None, and the classes that `plans` has checked.
    _modules: dict[str, Any]
    _parameters: dict[str, Any]
    _buffers: dict[str, Any]

    if TYPE_CHECKING:  # torch's has no types

        def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module: ...

    def __init_subclass__(cls) -> None:
        # A foreign subclass of a patched class (torch.nn.utils.parametrize) keeps its weights elsewhere.
        if is_foreign(cls) and "forward" not in vars(cls):
            cls.forward = cls.infini_original.forward

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct the original class if called with arguments.

        Without arguments the module is being copied, by torch.nn.DataParallel or a __deepcopy__.
        """
        return cls.infini_original(*args, **kwargs) if args or kwargs else super().__new__(cls)

    @classmethod
    def ops(cls, plan: Any) -> str:
        """Return the ops that a module calls under a plan, for the report."""
        return cls.infini_ops

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        """Return the plans that fit the module's attributes (verify.py finds the right one), or raise Unsupported."""
        raise NotImplementedError

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe | None:
        """Return the calls by which verify.py distinguishes the plans; None if none is needed.

        `rotary` computes the model's cos and sin from hidden states and position ids.
        """
        return None

    def _get_name(self) -> str:
        return f"{type(self).__name__}[infini]"  # in print(model)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        reduced = super().__reduce_ex__(2)
        assert isinstance(reduced, tuple)
        _, _, *state = reduced  # (copyreg.__newobj__, (class,), state, ...)
        cls = type(self)
        return (_rebuild, (cls.__mro__[1], cls.infini_original), *state)


def is_foreign(cls: type[nn.Module]) -> bool:
    """Return whether a subclass of a patched class was created outside of this package."""
    return hasattr(cls, "infini_original") and "infini_original" not in vars(cls)


@dataclass(frozen=True, eq=False)
class ProbeCall:
    """One call of a probe module, which must give equal results by its own forward and by the patched one.

    Attributes:
        when: What the call checks, for reports: "for 40 tokens"; "" for the call by which a plan is chosen.
        run: Makes the call with the given forward.
        tolerance: Relative error (of the Euclidean norm) up to which two results are considered equal.
        parameters: Other parameters for this call, by submodule name; "" is the probe module itself.
        attributes: Other attributes of the probe module for this call.
        dtype: The dtype of the probe module's parameters.
    """

    when: str
    run: Callable[[Callable[..., Any]], Any]
    tolerance: float
    parameters: Parameters = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, eq=False)
class Probe:
    """A probe module, and the calls of it that show what a module computes.

    Attributes:
        module: A module of the original's class and attributes with other weights, as small as possible.
        calls: Yields the calls, beginning with the one by which a plan is chosen; they depend on the module only.
    """

    module: nn.Module
    calls: Callable[[], Iterable[ProbeCall]]


_classes: dict[tuple[type[Patched], type[nn.Module]], type[Patched]] = {}


def patched_class(patch: type[Patched], original: type[nn.Module]) -> type[Patched]:
    """Return the subclass of both, with the original's name, because transformers looks classes up by name."""
    if (patch, original) not in _classes:
        names = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        cls = type(original.__name__, (patch, original), {**names, "infini_original": original})
        _classes[patch, original] = cls
    return _classes[patch, original]


def _rebuild(patch: type[Patched], original: type[nn.Module]) -> nn.Module:
    """Construct a patched module without state, for unpickling and deepcopy."""
    from .layers.interface import register

    register()
    cls = patched_class(patch, original)
    return cls.__new__(cls)


def swap(module: nn.Module, patch: type[Patched], plan: Any) -> None:
    """Set the module's plan, then its patched class, so that it works if this is interrupted."""
    vars(module)[PLAN] = plan
    forward = parallel_forward(module)
    if forward is not None:
        vars(module)[FORWARD] = forward
    module.__class__ = patched_class(patch, type(module))
    if forward is not None:
        del vars(module)["forward"]


def restore(patched: Patched) -> None:
    module: nn.Module = patched
    cls, original = type(patched), patched.infini_original
    if is_foreign(cls):
        own = {name: value for name, value in vars(cls).items() if name not in ("forward", "__dict__", "__weakref__")}
        derived: Any = type(cls.__name__, (original,), own)
        original = derived
    if FORWARD in vars(module):
        vars(module)["forward"] = vars(module)[FORWARD]
    for name, value in list(vars(module).items()):
        if name.startswith("_infini_"):
            del vars(module)[name]
        elif isinstance(value, MethodType) and value.__self__ is module:
            # accelerate's hooks hold the forward that they replaced.
            vars(module)[name] = MethodType(getattr(original, value.__name__, value.__func__), module)
    module.__class__ = original
