"""What notes torch's calls between start and stop: none is run; results have memory, and the shapes that fakes tell.

A note does not keep the memory of tensors that the recording made, so that what the caller drops is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NoReturn, TypeVar

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
from ._plan import ALLOCATIONS, WritingCall, is_view, remembered, storage_key, tensors_of

OP = "torch_infini.runtime.record"
T = TypeVar("T")

_aten = torch.ops.aten
_READS = {
    getattr(Tensor, name): name
    for name in ("tolist", "numpy", "__array__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__")
}
_COPIES = (_aten._to_copy.default, _aten.clone.default)  # whose out form is copy_
_OF_FACTORIES = {"dtype", "layout", "device", "pin_memory"}  # which an out form takes from its tensor
_STAYS = (_aten.detach_.default,)  # of torch.tensor() in inference mode
_OTHER_MEMORY = {"aten::set_", "aten::resize_", "aten::resize_as_"}


@dataclass(slots=True, unsafe_hash=True)
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


@dataclass
class FakeResults:
    """What calls that are alike return: fakes and their nesting, and whether the op's rules have passed such a call."""

    results: list[Any]
    spec: pytree.TreeSpec
    is_checked: bool = False


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
            _check(facts_of(func), tensors_of((args, kwargs)))
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
        self._draft: list[Noted] | None = None  # of as_one()

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
            if self._draft is None:
                op_failed()
            raise

    def as_one(self, name: str, function: Callable[[], T]) -> T:
        """Call a function, and note its calls under one name; note nothing if it raises.

        Ops of infinicore must not be noted meanwhile.
        """
        outer, self._draft = self._draft, []
        try:
            result = function()
            draft = self._draft
        finally:
            self._draft = outer
        for noted in draft:
            self._keep(name, noted)
        return result

    def _keep(self, name: str, noted: Noted) -> None:
        if self._draft is not None:
            self._draft.append(noted)
        else:
            self._noted(name)
            self.calls.append(noted)

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            raise RuntimeError(f"{OP}: only ops can be recorded, got {func}")
        facts, tensors = facts_of(func), tensors_of((args, kwargs))
        for tensor in tensors:
            _check_place(tensor)
        _check(facts, tensors)
        if func.namespace != "infini":
            if facts.decomposes:
                with self:  # in inference mode reshape and its like come as they are
                    return func.decompose(*args, **kwargs)
            if facts.is_view or func in _STAYS:
                return func(*args, **kwargs)
            if facts.returns_values:
                _refuse_reading(str(func))
        return self._note(facts, args, kwargs)

    def part(self, tensor: Tensor) -> Tensor | StorageView:
        """Describe a tensor that the recording made; return an alias of any other, to which nothing can happen."""
        block = self._keys.get(storage_key(tensor))
        if block is None:
            return tensor.detach()
        offset = int(tensor.storage_offset())
        return StorageView(
            block, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset, tensor.is_conj(), tensor.is_neg()
        )

    def _note(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._fake_results(facts.func, args, kwargs)
        results, spec = found.results, found.spec
        # The results of a list are new.
        aliases = facts.aliases if len(facts.aliases) == len(results) else [None] * len(results)
        made: list[Any] = []
        fresh: list[Tensor | None] = []
        for fake, letter in zip(results, aliases, strict=True):
            if letter is None:
                made.append(self._make(fake) if isinstance(fake, Tensor) else None)
                fresh.append(made[-1])
            else:
                index, name = facts.written[letter]
                made.append(args[index] if index < len(args) else kwargs.get(name))
                fresh.append(None)
        if not facts.allocates:
            self._add(facts, args, kwargs, fresh, found)
        return made[0] if spec.is_leaf() else pytree.tree_unflatten(made, spec)

    def _add(
        self,
        facts: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: list[Tensor | None],
        found: FakeResults,
    ) -> None:
        """Note a call; `made`: the tensors for its results, None for those that are arguments."""
        func = facts.func
        count = sum(tensor is not None for tensor in made)
        copies = count > 0
        if copies and func in _COPIES:
            func, args, kwargs, copies = _aten.copy_.default, (made[0], args[0]), {}, False
        elif copies and facts.form is not None and count == len(made):
            kwargs = {name: value for name, value in kwargs.items() if name in facts.form_takes}
            kwargs.update(zip(facts.form_outs, made, strict=True))
            func, copies = facts.form, False
        call, native = WritingCall(func, args, kwargs), not copies and self._native(facts)
        if native and not facts.has_group and not found.is_checked:  # other ranks would wait
            check_call(call)
            found.is_checked = func is facts.form  # what it writes is new, and overlaps nothing
        described = call.mapped(self._part_of)
        self._keep(facts.name, Noted(described, native, [self._part_of(t) for t in made] if copies else None))

    def _native(self, facts: OpFacts) -> bool:
        """Whether the op has a kernel that runs without Python; not where a provider is chosen."""
        op = facts.kernel
        return op is not None and self._has_kernels and not any(p.op == op for p in chosen_providers("cpu"))

    def _part_of(self, value: Any) -> Any:
        return self.part(value) if isinstance(value, Tensor) else value

    def _fake_results(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeResults:
        """Call the op with fakes, once for all calls that are alike; RuntimeError for what depends on values."""
        call = WritingCall(func, args, kwargs)
        return remembered(_known, KNOWN, call.key(), lambda: self._found_results(func, args, kwargs))

    def _found_results(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeResults:
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
        return FakeResults(*pytree.tree_flatten(fake_results))

    def _make(self, fake: Tensor) -> Tensor:
        """Return a tensor as the fake, with memory that holds nothing."""
        _check_place(fake)
        tensor = _empty_like(fake)
        storage = tensor.untyped_storage()
        self._keys[storage._cdata] = len(self.blocks)
        self.blocks.append(RecordedStorage(storage.nbytes(), StorageWeakRef(storage)))
        return tensor


def _empty_like(fake: Tensor) -> Tensor:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)


KNOWN = 1024  # calls whose results are remembered: layers of a model make the same ones
_known: dict[Any, FakeResults] = {}  # by all that they depend on


class OpFacts:
    """What torch knows of an op, found once: each question to a schema makes new objects.

    Attributes:
        name: As in reports: "aten.add.Tensor".
        aliases: Of each result, the letter in the schema of the argument that it is; None: it is new.
        written: The places and names of the arguments that the op writes, by their letters.
        allocates: Whether the result is fresh memory, and nothing is computed.
        moves: Whether it gives a tensor another place or shape.
        form: The op's out form, which out_form() finds, with the names of all that it takes and of what it writes.
        kernel: The name in our registry; None: it is not ours.
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
        self.is_view = is_view(func)
        self.allocates = func.overloadpacket in ALLOCATIONS and not schema.is_mutable
        self.returns_values = any("Tensor" not in str(result.type) for result in schema.returns)
        self.depends_on_values = torch.Tag.data_dependent_output in func.tags
        self.moves = (torch.Tag.inplace_view in func.tags and func not in _STAYS) or schema.name in _OTHER_MEMORY
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        self.decomposes = composite in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), composite
        )
        self.has_group = "group" in (argument.name for argument in arguments)
        self.form = None if schema.is_mutable else out_form(func)
        taken = [] if self.form is None else self.form._schema.arguments
        self.form_takes = {argument.name for argument in taken}
        self.form_outs = [argument.name for argument in taken if argument.is_out]
        name = schema.name.removeprefix("infini::")
        op = name if name in REGISTRY else name.removesuffix("_")
        self.kernel = op if func.namespace == "infini" and op in REGISTRY else None


facts_of = cache(OpFacts)


def _letter(value: Any) -> str | None:
    """Return the letter of what an argument or a result shares in a schema; a list of views has none."""
    return None if value.alias_info is None else next(iter(value.alias_info.before_set), None)


def out_form(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return the overload that writes an op's results into tensors that it is given; None: there is none."""
    given = {argument.name: str(argument.type) for argument in func._schema.arguments}
    if "reduction" in given:  # out forms of losses write what they reduce to the same tensor first, and resize it
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


def _fake(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return None if isinstance(value, torch.Generator) else value


def _check_place(tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise RuntimeError(
            f"{OP}: every tensor must be strided and on the CPU, as record() was told, got {tensor.layout} on "
            f"{tensor.device}"
        )


def _check(facts: OpFacts, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for what cannot be replayed."""
    for tensor in tensors:
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
            raise RuntimeError(f"{OP}: every tensor must be torch's own, got a {type(tensor).__name__}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{OP}: a graph has no backward: tensors must not require a gradient (record under torch.no_grad()), "
                f"got one that does in {facts.name}"
            )
    if facts.moves:
        raise RuntimeError(f"{OP}: a tensor must stay where and as it is while a graph is recorded, got {facts.name}")
    if facts.depends_on_values:
        _refuse_reading(facts.name)


def _refuse_reading(what: str) -> NoReturn:
    raise RuntimeError(
        f"{OP}: ops are noted and not run, so tensors hold no values yet: nothing may depend on them, got {what}"
    )
