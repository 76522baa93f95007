"""What notes torch's calls between start and stop: none is run; results have memory, and the shapes that fakes tell.

A note does not keep the memory of tensors that the recording made, so that what the caller drops is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._core.library import emulates_cuda
from ..ops import REGISTRY, chosen_providers
from ._graph import op_failed
from ._kernel_calls import check_call
from ._plan import ALLOCATIONS, WritingCall, is_view, storage_key, tensors_of

OP = "torch_infini.runtime.record"

_aten = torch.ops.aten
_READS = {
    getattr(Tensor, name): name
    for name in ("tolist", "numpy", "__array__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__")
}
_COPIES = (_aten._to_copy.default, _aten.clone.default)  # whose out form is copy_
_OF_FACTORIES = {"dtype", "layout", "device", "pin_memory"}  # which an out form takes from its tensor
_STAYS = (_aten.detach_.default,)  # of torch.tensor() in inference mode
_OTHER_MEMORY = {"aten::set_", "aten::resize_", "aten::resize_as_"}


@dataclass(frozen=True)
class StorageView:
    """A tensor in memory that the recording made: where it is in a block, which this does not keep."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements
    conj: bool
    neg: bool

    def of(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """Return the tensor in a block that begins `start` bytes into a storage."""
        tensor = torch.empty(0, dtype=self.dtype)
        tensor.set_(storage, start // self.dtype.itemsize + self.offset, self.shape, self.stride)
        if self.conj:
            torch._C._set_conj(tensor, True)
        if self.neg:
            torch._C._set_neg(tensor, True)
        return tensor


@dataclass
class RecordedStorage:
    """A storage that the recording made, alive as long as the caller holds a tensor in it."""

    nbytes: int
    ref: StorageWeakRef

    def held(self) -> torch.UntypedStorage | None:
        """Return the storage if the caller holds it still."""
        return torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)


@dataclass
class Noted:
    """A call, with Parts for the tensors that the recording made.

    Attributes:
        native: Whether a kernel of csrc/ runs it without Python.
        copies: Where the leaves of its result are copied to; None: it writes into its arguments.
    """

    call: WritingCall
    native: bool
    copies: list[StorageView | None] | None

    def parts(self) -> list[StorageView]:
        """Return the parts of blocks that it reads or writes."""
        values = pytree.tree_leaves((self.call.args, self.call.kwargs, self.copies))
        return [value for value in values if isinstance(value, StorageView)]


class Readers(TorchFunctionMode):
    """Refuses what reads a tensor's values without calling an op, while `active` says so."""

    def __init__(self, active: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self._active = active

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (name := _READS.get(func)) and self._active():
            op_failed()
            _refuse_reading(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


class Checker(TorchDispatchMode):
    """Refuses what a recording on CUDA, which capturing notes, must not hold: what would run once, and not in run()."""

    def __init__(self, device: torch.device) -> None:
        TorchDispatchMode.__init__(self)
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as programs._Notes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload):
            _check(func, args, kwargs)
            if torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
                _refuse_reading(str(func))
            if func is _aten._to_copy.default and torch.device(kwargs.get("device") or self._device) != self._device:
                raise RuntimeError(f"{OP}: a copy must stay on {self._device}, got one to {kwargs['device']}")
            self._check_places((args, kwargs))
        result = func(*args, **kwargs)
        self._check_places(result)
        return result

    def _check_places(self, values: Any) -> None:
        for tensor in tensors_of(values):
            if tensor.device != self._device and (tensor.dim() or tensor.device.type != "cpu"):
                raise RuntimeError(
                    f"{OP}: every tensor must be on {self._device}, as record() was told, but for numbers (tensors "
                    f"without dimensions), which stay as they are now, got one of shape {list(tensor.shape)} on "
                    f"{tensor.device}"
                )


class Recorder(TorchDispatchMode):
    """Notes the calls of the thread that it is entered on.

    Attributes:
        calls: In order.
        blocks: What was made for results.
    """

    def __init__(self, noted: Callable[[str], object], active: Callable[[], bool]) -> None:
        """Note calls, while `active` says so, and run them otherwise; `noted` is told the name of each."""
        TorchDispatchMode.__init__(self)
        self._active = active
        self.calls: list[Noted] = []
        self.blocks: list[RecordedStorage] = []
        self._noted = noted
        self._keys: dict[int, int] = {}  # storage_key() to the number of a block; the weak reference keeps the address
        self._has_kernels = not emulates_cuda()

    @cached_property
    def _fakes(self) -> FakeTensorMode:
        """Made when an op of torch comes: the first one of a process imports torch._dynamo, which takes a second."""
        return FakeTensorMode(allow_fallback_kernels=False)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as programs._Notes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._active():
            return func(*args, **(kwargs or {}))
        try:
            return self._dispatch(func, args, kwargs or {})
        except Exception:
            op_failed()
            raise

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            raise RuntimeError(f"{OP}: only ops can be recorded, got {func}")
        for tensor in tensors_of((args, kwargs)):
            _check_place(tensor)
        _check(func, args, kwargs)
        if func.namespace != "infini":
            with self:  # in inference mode reshape and its like come as they are
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            if is_view(func) or func in _STAYS:
                return func(*args, **kwargs)
            if any("Tensor" not in str(result.type) for result in func._schema.returns):
                _refuse_reading(str(func))
        return self._note(func, args, kwargs)

    def part(self, tensor: Tensor) -> Tensor | StorageView:
        """Describe a tensor that the recording made; return an alias of any other, to which nothing can happen."""
        block = self._keys.get(storage_key(tensor))
        if block is None:
            return tensor.detach()
        offset = int(tensor.storage_offset())
        return StorageView(
            block, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg()
        )

    def _note(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fake_results = self._fake_results(func, args, kwargs)
        results, spec = pytree.tree_flatten(fake_results)
        written = _written(func, args, kwargs)
        made: list[Any] = []
        for value, result in zip(results, _returns(func, len(results)), strict=True):
            if result is not None and result.alias_info is not None:
                made.append(written[next(iter(result.alias_info.before_set))])
            else:
                made.append(self._make(value) if isinstance(value, Tensor) else None)
        if func.overloadpacket not in ALLOCATIONS or func._schema.is_mutable:
            fresh = [m if w is None else None for m, w in zip(made, _aliases(func, len(made)), strict=True)]
            self._add(func, args, kwargs, fresh)
        return pytree.tree_unflatten(made, spec)

    def _add(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], made: list[Tensor | None]
    ) -> None:
        """Note a call; `made`: the tensors for its results, None for those that are arguments."""
        name = str(func)
        native, form = self._native(func), None
        copies = any(tensor is not None for tensor in made)
        if copies and func in _COPIES:
            func, args, kwargs, copies = _aten.copy_.default, (made[0], args[0]), {}, False
        elif copies and not func._schema.is_mutable and None not in made and (form := out_form(func)):
            taken = {argument.name for argument in form._schema.arguments}
            names = [argument.name for argument in form._schema.arguments if argument.is_out]
            kwargs = {name: value for name, value in kwargs.items() if name in taken}
            func, kwargs, copies = form, {**kwargs, **dict(zip(names, made, strict=True))}, False
        call, native = WritingCall(func, args, kwargs), native and not copies
        if native and "group" not in (argument.name for argument in func._schema.arguments):  # other ranks would wait
            check_call(call)
        described = call.mapped(self._part_of)
        self._noted(name)
        self.calls.append(Noted(described, native, [self._part_of(t) for t in made] if copies else None))

    def _native(self, func: torch._ops.OpOverload) -> bool:
        """Whether the op has a kernel that runs without Python; not where a provider is chosen."""
        name = func._schema.name.removeprefix("infini::")
        if func.namespace != "infini" or not self._has_kernels:
            return False
        op = name if name in REGISTRY else name.removesuffix("_")
        return op in REGISTRY and not any(provider.op == op for provider in chosen_providers("cpu"))

    def _part_of(self, value: Any) -> Any:
        return self.part(value) if isinstance(value, Tensor) else value

    def _fake_results(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the op with fakes, once for all calls that are alike; RuntimeError for what depends on values."""
        key = _key_of(func, args, kwargs)
        if key is not None and key in _known:
            return _known[key]
        try:
            with torch.inference_mode(False), torch.no_grad(), self._fakes:
                fakes = pytree.tree_map(_fake, (args, kwargs))
                fake_results = func(*fakes[0], **fakes[1])
        except (DataDependentOutputException, DynamicOutputShapeException):
            _refuse_reading(str(func))
        except UnsupportedOperatorException as error:
            raise RuntimeError(f"{OP}: every op must have a fake, which tells its results, got {func}") from error
        except Exception as error:
            if func.namespace == "infini" and not func._schema.is_mutable:
                func(*args, **kwargs)  # whose own rule, the fake knowing none, refuses before anything is computed
            if func.namespace == "infini" or not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(f"{OP}: {func}: {error}") from error
        for given, fake in zip(tensors_of((args, kwargs)), tensors_of(fakes), strict=True):
            if given.shape != fake.shape:
                raise RuntimeError(
                    f"{OP}: an out tensor must have the shape of the result, {list(fake.shape)}, of {func}, got "
                    f"{list(given.shape)}"
                )
        if key is not None:
            while len(_known) >= KNOWN:
                _known.pop(next(iter(_known)), None)
            _known[key] = fake_results
        return fake_results

    def _make(self, fake: Tensor) -> Tensor:
        """Return a tensor as the fake, with memory that holds nothing."""
        _check_place(fake)
        with torch.inference_mode(False):
            tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
        storage = tensor.untyped_storage()
        self._keys[storage._cdata] = len(self.blocks)
        self.blocks.append(RecordedStorage(storage.nbytes(), StorageWeakRef(storage)))
        return tensor


KNOWN = 1024  # calls whose results are remembered: layers of a model make the same ones
_known: dict[Any, Any] = {}  # fakes of results, by all that they depend on


def _key_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the shapes, strides and dtypes of a call's results depend on; None for unusual arguments."""

    def frozen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.shape, value.stride(), value.dtype, value.device
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(frozen, value))
        return type(value), value

    key = func, frozen(args), tuple((name, frozen(kwargs[name])) for name in sorted(kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return *key, torch.get_default_dtype()


@cache
def out_form(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload that writes an op's results into tensors that it is given; None: there is none."""
    given = {argument.name: str(argument.type) for argument in func._schema.arguments}
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


def _fake(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return None if isinstance(value, torch.Generator) else value


def _returns(func: torch._ops.OpOverload, count: int) -> list[Any]:
    """Return the schema of each of `count` leaves of a result; None: of a list, whose tensors are new."""
    returns = list(func._schema.returns)
    return returns if len(returns) == count else [None] * count


def _aliases(func: torch._ops.OpOverload, count: int) -> list[str | None]:
    return [
        None if result is None or result.alias_info is None else next(iter(result.alias_info.before_set))
        for result in _returns(func, count)
    ]


def _written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that an op writes, by their letters in the schema."""
    written = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written[next(iter(argument.alias_info.before_set))] = value
    return written


def _check_place(tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise RuntimeError(
            f"{OP}: every tensor must be strided and on the CPU, as record() was told, got {tensor.layout} on "
            f"{tensor.device}"
        )


def _check(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise RuntimeError for what cannot be replayed."""
    for tensor in tensors_of((args, kwargs)):
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
            raise RuntimeError(f"{OP}: every tensor must be torch's own, got a {type(tensor).__name__}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{OP}: a graph has no backward: tensors must not require a gradient (record under torch.no_grad()), "
                f"got one that does in {func}"
            )
    if (torch.Tag.inplace_view in func.tags and func not in _STAYS) or func._schema.name in _OTHER_MEMORY:
        raise RuntimeError(f"{OP}: a tensor must stay where and as it is while a graph is recorded, got {func}")
    if torch.Tag.data_dependent_output in func.tags:
        _refuse_reading(str(func))


def _refuse_reading(what: str) -> NoReturn:
    raise RuntimeError(
        f"{OP}: ops are noted and not run, so tensors hold no values yet: nothing may depend on them, got {what}"
    )
