"""Module: parameters, buffers and submodules by dotted names, like torch.nn.Module, without gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from ..._arguments import described
from ...device import device as Device
from ...tensor import Tensor
from ..parameter import Parameter

_Member = TypeVar("_Member")
_TABLES = ("_parameters", "_buffers", "_modules")


class Module:
    """The base of all modules: assign parameters, buffers' tensors and modules as attributes, and write forward().

    A Parameter or Module that is assigned to an attribute is registered under its name; a registered name also accepts
    a plain Tensor. Buffers are registered with register_buffer(). All are available as attributes.
    """

    training: bool
    _parameters: dict[str, Tensor | None]
    _buffers: dict[str, Tensor | None]
    _modules: dict[str, Module | None]
    _non_persistent_buffers_set: set[str]

    def __init__(self) -> None:
        self.__dict__.update(
            training=True,
            _parameters=OrderedDict(),
            _buffers=OrderedDict(),
            _modules=OrderedDict(),
            _non_persistent_buffers_set=set(),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the module; subclasses define it."""
        raise NotImplementedError(f"infinicore.nn.Module: {type(self).__name__} defines no forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    # ---- registration ----

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register a tensor that is no parameter; state_dict() includes it if it is persistent."""
        self._check_name(name, "register_buffer", self._buffers)
        self._check_type(name, tensor, Tensor, "register_buffer")
        self._buffers[name] = tensor
        (self._non_persistent_buffers_set.discard if persistent else self._non_persistent_buffers_set.add)(name)

    def register_parameter(self, name: str, param: Tensor | None) -> None:
        """Register a parameter; None registers the name without one."""
        self._check_name(name, "register_parameter", self._parameters)
        self._check_type(name, param, Tensor, "register_parameter")
        self._parameters[name] = param

    def add_module(self, name: str, module: Module | None) -> None:
        """Register a submodule; None registers the name without one."""
        self._check_name(name, "add_module", self._modules)
        self._check_type(name, module, Module, "add_module")
        self._modules[name] = module

    register_module = add_module

    def _check_name(self, name: str, function: str, table: Mapping[str, object]) -> None:
        where = f"infinicore.nn.Module.{function}"
        if not hasattr(self, "_parameters"):
            raise AttributeError(f"{where}: Module.__init__() must be called first")
        if not isinstance(name, str):
            raise TypeError(f"{where}: name must be a str, got {name!r}")
        if not name or "." in name:
            raise KeyError(f'{where}: name must not be empty or have a ".", got "{name}"')
        if name not in table and hasattr(self, name):
            raise KeyError(f'{where}: the attribute "{name}" exists already')

    @staticmethod
    def _check_type(name: str, value: object, wanted: type, function: str) -> None:
        if value is not None and not isinstance(value, wanted):
            kind = f"infinicore {wanted.__name__}"
            raise TypeError(
                f'infinicore.nn.Module.{function}: "{name}" must be an {kind} or None, got {described(value)}'
            )

    def __getattr__(self, name: str) -> Any:
        for table in _TABLES:
            found = self.__dict__.get(table, {})
            if name in found:
                return found[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if "_parameters" not in self.__dict__:
            if isinstance(value, (Parameter, Module)):
                raise AttributeError(
                    f'infinicore.nn.Module: Module.__init__() must be called before "{name}" is assigned'
                )
            object.__setattr__(self, name, value)
        elif isinstance(value, Parameter):
            self._forget(name, self._parameters)
            self.register_parameter(name, value)
        elif isinstance(value, Module):
            self._forget(name, self._modules)
            self.add_module(name, value)
        elif name in self._parameters:
            self._check_type(name, value, Tensor, "__setattr__")
            self._parameters[name] = value
        elif name in self._modules:
            self._check_type(name, value, Module, "__setattr__")
            self._modules[name] = value
        elif name in self._buffers:
            self._check_type(name, value, Tensor, "__setattr__")
            self._buffers[name] = value
        else:
            object.__setattr__(self, name, value)

    def _forget(self, name: str, but: Mapping[str, object]) -> None:
        """Free a name that is registered for another kind."""
        self.__dict__.pop(name, None)
        for table in (self._parameters, self._buffers, self._modules):
            if table is not but:
                table.pop(name, None)
        self._non_persistent_buffers_set.discard(name)

    def __delattr__(self, name: str) -> None:
        for table in (self._parameters, self._buffers, self._modules):
            if name in table:
                del table[name]
                self._non_persistent_buffers_set.discard(name)
                return
        object.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._parameters, *self._buffers, *self._modules})

    # ---- traversal: each tensor and module once, even if it has several names ----

    def named_modules(
        self, memo: set[Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Module]]:
        """Yield (dotted name, module) of this module, named by the prefix, and of all modules below."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for name, module in self._modules.items():
            if module is not None:
                yield from module.named_modules(memo, _join(prefix, name), remove_duplicate)

    def modules(self) -> Iterator[Module]:
        """Yield this module and all modules below."""
        for _, module in self.named_modules():
            yield module

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield (name, module) of the direct submodules."""
        yield from _unique((name, child) for name, child in self._modules.items() if child is not None)

    def children(self) -> Iterator[Module]:
        """Yield the direct submodules."""
        for _, module in self.named_children():
            yield module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (dotted name, parameter), including the modules below unless recurse is false."""
        yield from self._named_members("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the parameters."""
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (dotted name, buffer), including the modules below unless recurse is false."""
        yield from self._named_members("_buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Yield the buffers."""
        for _, buffer in self.named_buffers(recurse=recurse):
            yield buffer

    def _named_members(
        self, table: str, prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Tensor]]:
        modules = self.named_modules(None, prefix, remove_duplicate) if recurse else iter([(prefix, self)])
        members = (
            (_join(place, name), tensor)
            for place, module in modules
            for name, tensor in module.__dict__[table].items()
            if tensor is not None
        )
        yield from _unique(members) if remove_duplicate else members

    def get_submodule(self, target: str) -> Module:
        """Return the module with a dotted name; AttributeError if there is none."""
        found = self
        for name in target.split(".") if target else ():
            child = found._modules.get(name)
            if child is None:
                raise AttributeError(f'infinicore.nn.Module.get_submodule: there is no module "{target}"')
            found = child
        return found

    def get_parameter(self, target: str) -> Tensor:
        """Return the parameter with a dotted name; AttributeError if there is none."""
        place, _, name = target.rpartition(".")
        found = self.get_submodule(place)._parameters.get(name)
        if found is None:
            raise AttributeError(f'infinicore.nn.Module.get_parameter: there is no parameter "{target}"')
        return found

    def get_buffer(self, target: str) -> Tensor:
        """Return the buffer with a dotted name; AttributeError if there is none."""
        place, _, name = target.rpartition(".")
        found = self.get_submodule(place)._buffers.get(name)
        if found is None:
            raise AttributeError(f'infinicore.nn.Module.get_buffer: there is no buffer "{target}"')
        return found

    # ---- state ----

    def state_dict(
        self, destination: dict[str, Tensor] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by dotted name; the tensors are the module's own, not copies.

        Args:
            destination: Filled and returned instead of a new dict.
            prefix: Of all names.
            keep_vars: Has no effect: there are no gradients to detach from.
        """
        found: dict[str, Tensor] = OrderedDict() if destination is None else destination
        for name, tensor in self._state().items():
            if tensor is not None:
                found[prefix + name] = tensor
        for name, module in self._modules.items():
            if module is not None:
                module.state_dict(found, f"{prefix}{name}.", keep_vars)
        return found

    def _state(self) -> dict[str, Tensor | None]:
        """Yield this module's own parameters and persistent buffers."""
        kept = {name: t for name, t in self._buffers.items() if name not in self._non_persistent_buffers_set}
        return {**self._parameters, **kept}

    def load_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> tuple[list[str], list[str]]:
        """Load parameters and persistent buffers by dotted name; return (missing names, unexpected names).

        Values are copied if shape, dtype and device equal those of the module's tensor. Otherwise a warning line is
        printed, and the module's tensor is *replaced* by the given one.

        Args:
            state_dict: What state_dict() returns.
            strict: Whether missing and unexpected names raise RuntimeError, after the others have been loaded.
        """
        where = "infinicore.nn.Module.load_state_dict"
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"{where}: state_dict must be a mapping, got {described(state_dict)}")
        for name, value in state_dict.items():
            if not isinstance(value, Tensor):
                raise TypeError(f'{where}: "{name}" must be an infinicore.Tensor, got {described(value)}')
        expected: dict[str, None] = {}
        for place, module in self.named_modules(remove_duplicate=False):
            for name, current in module._state().items():
                whole = _join(place, name)
                if current is not None:
                    expected[whole] = None
                    if whole in state_dict:
                        module._load_own(name, whole, current, state_dict[whole])
        missing = [name for name in expected if name not in state_dict]
        unexpected = [name for name in state_dict if name not in expected]
        if strict and (missing or unexpected):
            said = [f"missing: {', '.join(missing)}"] if missing else []
            said += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
            raise RuntimeError(f"{where}: the names must be those of {type(self).__name__}; {'; '.join(said)}")
        return missing, unexpected

    def _load_own(self, name: str, whole: str, current: Tensor, value: Tensor) -> None:
        same = current.shape == value.shape and current.dtype == value.dtype and current.device == value.device
        if same:
            current.copy_(value)
            return
        print(f'infinicore.nn.Module.load_state_dict: "{whole}" was {current!r}; replaced by {value!r}')
        if name in self._parameters:
            self._parameters[name] = value if isinstance(value, Parameter) else Parameter(value)
        else:
            self._buffers[name] = value

    def to(self, device: Device | str) -> Module:
        """Move parameters and buffers to a device, in place; return the module. dtypes cannot be converted."""
        moved: dict[int, Tensor] = {}  # a tensor with two names stays one tensor
        for module in self.modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is not None:
                        if id(tensor) not in moved:
                            there = tensor.to(device)
                            moved[id(tensor)] = Parameter(there) if isinstance(tensor, Parameter) else there
                        table[name] = moved[id(tensor)]
        return self

    def train(self, mode: bool = True) -> Module:
        """Set `training` of this module and all below; return the module."""
        for module in self.modules():
            object.__setattr__(module, "training", mode)
        return self

    def eval(self) -> None:
        """Clear `training` of this module and all below; return None."""
        self.train(False)

    def extra_repr(self) -> str:
        """Return what repr() shows in the brackets; subclasses define it."""
        return ""

    def __repr__(self) -> str:
        lines = [self.extra_repr()] if self.extra_repr() else []
        children = [f"({name}): " + repr(module).replace("\n", "\n  ") for name, module in self._modules.items()]
        if not children:
            return f"{type(self).__name__}({''.join(lines)})"
        return f"{type(self).__name__}(\n" + "".join(f"  {line}\n" for line in [*lines, *children]) + ")"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _unique(members: Iterator[tuple[str, _Member]]) -> Iterator[tuple[str, _Member]]:
    """Yield the members except those that came before under another name."""
    seen: set[int] = set()
    for name, member in members:
        if id(member) not in seen:
            seen.add(id(member))
            yield name, member
