"""OpFacts: properties of an op that recordings need, derived once from its schema; CallMode, which sees their calls."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..ops import REGISTRY, Provider, chosen_providers
from ._plan import WritingCall

_aten = torch.ops.aten
_ALLOCATIONS = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
_OF_FACTORIES = {"dtype", "layout", "device", "pin_memory"}  # an out form takes them from its out tensor
STAYS = (_aten.detach_.default,)  # changes no memory or shape; torch.tensor() calls it in inference mode
_OTHER_MEMORY = {"aten::set_", "aten::resize_", "aten::resize_as_"}


class OpFacts:
    """Properties of an op, derived once, because every access to a schema creates new objects.

    Attributes:
        name: As in reports: "aten.add.Tensor".
        aliases: For each result, the alias letter in the schema of the argument that it is; None: it is new.
        written: Index and name of each argument that the op writes, by alias letter.
        is_view: Whether it returns its argument's memory, and writes nothing.
        allocates: Whether the result is new memory, and nothing is computed.
        moves: Whether it gives a tensor other memory or another shape.
        kernel: The name in our registry; None: it is not our op.
    """

    def __init__(self, func: torch._ops.OpOverload) -> None:
        schema, arguments = func._schema, list(func._schema.arguments)
        self.func, self.name = func, str(func)
        self.aliases = [_letter(result) for result in schema.returns]
        self.written = {
            _letter(argument): (i, argument.name)
            for i, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        self.is_mutable = schema.is_mutable
        self.is_view = not schema.is_mutable and any(result.alias_info for result in schema.returns)
        self.allocates = func.overloadpacket in _ALLOCATIONS and not schema.is_mutable
        self.returns_values = any("Tensor" not in str(result.type) for result in schema.returns)
        self.depends_on_values = torch.Tag.data_dependent_output in func.tags
        self.moves = (torch.Tag.inplace_view in func.tags and func not in STAYS) or schema.name in _OTHER_MEMORY
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        self.decomposes = composite in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), composite
        )
        self.has_group = "group" in (argument.name for argument in arguments)
        name = schema.name.removeprefix("infini::")
        op = name if name in REGISTRY else name.removesuffix("_")
        self.kernel = op if func.namespace == "infini" and op in REGISTRY else None

    @property
    def provider(self) -> Provider | None:
        """The provider that is chosen for the op on the CPU, which Python calls; None: our kernel computes it."""
        return next((p for p in chosen_providers("cpu") if p.op == self.kernel), None) if self.kernel else None

    @cached_property
    def form(self) -> OutForm | None:
        """The op's out form; None: there is none, or it writes into its arguments itself."""
        form = None if self.is_mutable else out_form(self.func)
        if form is None:
            return None
        arguments = form._schema.arguments
        return OutForm(form, {a.name for a in arguments}, [a.name for a in arguments if a.is_out])


class OutForm(NamedTuple):
    """An overload that writes its results into out tensors, with the names of all arguments and of these tensors."""

    func: torch._ops.OpOverload
    arguments: set[str]
    outs: list[str]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], results: Iterable[Tensor | None]) -> WritingCall:
        """Return the call that writes into the results of a functional one."""
        kept = {name: value for name, value in kwargs.items() if name in self.arguments}
        return WritingCall(self.func, args, {**kept, **dict(zip(self.outs, results, strict=True))})


class CallMode(TorchDispatchMode):
    """Base of the modes that see a thread's calls of ops."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler to skip it: a second, in the first decode step of a process

    def decompose(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a composite op such as reshape as its parts, which come here: in inference mode it is not one before."""
        with self:
            return facts.func.decompose(*args, **kwargs)


facts_of = cache(OpFacts)


def _letter(value: Any) -> str | None:
    """Return the alias letter of an argument or a result in a schema; a list of views has none."""
    return None if value.alias_info is None else next(iter(value.alias_info.before_set), None)


def out_form(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload that writes an op's results into out tensors; None if there is none."""
    given = {argument.name: str(argument.type) for argument in func._schema.arguments}
    if "reduction" in given:  # out forms of losses resize the out tensor for the values that they reduce
        return None
    order = [argument.name for argument in func._schema.arguments if not argument.kwarg_only]
    for overload in func.overloadpacket.overloads():
        form = getattr(func.overloadpacket, overload)
        outs = [argument for argument in form._schema.arguments if argument.is_out]
        taken = {argument.name: str(argument.type) for argument in form._schema.arguments if not argument.is_out}
        if (
            len(outs) == len(func._schema.returns)
            and all(str(argument.type) == "Tensor" for argument in outs)
            and all(given.get(name) == type_ for name, type_ in taken.items())
            and given.keys() - taken.keys() <= _OF_FACTORIES
            and [argument.name for argument in form._schema.arguments if not argument.kwarg_only] == order
        ):
            return form
    return None
