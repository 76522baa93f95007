"""Recorder: notes torch's calls without running them; results have memory, and the shapes that fakes compute.

A noted call does not keep the tensors that the recording made, so that their memory is free when the caller drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .._core.library import emulates_cuda
from ._facts import STAYS, CallMode, OpFacts, facts_of
from ._graph import op_failed
from ._kernel_calls import check_call
from ._memory import Blocks, StorageView, views_of
from ._plan import WritingCall, memoized, tensors_of

OP = "torch_infini.runtime.record"
T = TypeVar("T")

_aten = torch.ops.aten
_READS = {
    getattr(Tensor, name): name
    for name in ("tolist", "numpy", "__array__", "__repr__", "__format__", "__deepcopy__", "__reduce_ex__")
}
_COPIES = (_aten._to_copy.default, _aten.clone.default)  # their out form is copy_


@dataclass
class NotedCall:
    """A call, with StorageViews for the tensors that the recording made.

    Attributes:
        native: Whether a kernel of csrc/ runs it without Python.
        copies: Where to copy the leaves of its result; None: it writes into its arguments.
    """

    call: WritingCall
    native: bool
    copies: list[StorageView | None] | None

    def views(self) -> list[StorageView]:
        """Return the StorageViews that it reads or writes."""
        return views_of((self.call.args, self.call.kwargs, self.copies))


class Like(NamedTuple):
    """What a fake result says of a tensor; not the fake itself, which other threads' recordings would share, and which
    seems to be on meta while its mode runs an op.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout


@dataclass
class FakeResults:
    """The results of equal calls, a Like for each tensor, and their nesting, and whether the op's checks have accepted
    such a call.
    """

    results: list[Any]
    spec: pytree.TreeSpec
    is_checked: bool = False


class ReadGuard(TorchFunctionMode):
    """Raises for functions that read a tensor's values without calling an op, while active() is true."""

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


class CaptureGuard(CallMode):
    """Raises for calls that a capture on CUDA would run only once, and not in run()."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

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
                    f"{OP}: every tensor must be on {self._device}, the device of record(), except numbers (tensors "
                    f"without dimensions), which keep their present values, got one of shape {list(tensor.shape)} on "
                    f"{tensor.device}"
                )


class Recorder(CallMode):
    """Notes the calls of the thread that enters it.

    Attributes:
        calls: The noted calls, in order.
        blocks: The memory of their results.
    """

    def __init__(self, noted: Callable[[str], object], active: Callable[[], bool]) -> None:
        """Note calls while active() is true, and run them otherwise; `noted` is called with each noted op's name."""
        super().__init__()
        self._active = active
        self.calls: list[NotedCall] = []
        self.blocks = Blocks()
        self._noted = noted
        self._has_kernels = not emulates_cuda()
        self._draft: list[NotedCall] | None = None  # calls within as_one()

    @cached_property
    def _fakes(self) -> FakeTensorMode:
        """The mode of fakes; made on demand, because the first of a process imports torch._dynamo, in about 1 s."""
        return FakeTensorMode(allow_fallback_kernels=False)

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

    def _keep(self, name: str, noted: NotedCall) -> None:
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
                return self.decompose(facts, args, kwargs)
            if facts.is_view or func in STAYS:
                return func(*args, **kwargs)
            if facts.returns_values:
                _refuse_reading(str(func))
        return self._note(facts, args, kwargs)

    def _note(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._fake_results(facts.func, args, kwargs)
        results, spec = found.results, found.spec
        # A list of results has no aliases: all are new.
        aliases = facts.aliases if len(facts.aliases) == len(results) else [None] * len(results)
        made: list[Any] = []
        fresh: list[Tensor | None] = []
        for fake, letter in zip(results, aliases, strict=True):
            if letter is None:
                made.append(self._make(fake) if isinstance(fake, Like) else None)
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
        """Note a call. `made` has the tensors for its results, None for results that are arguments."""
        call = WritingCall(facts.func, args, kwargs)
        count = sum(tensor is not None for tensor in made)
        copies = count > 0
        if copies and facts.func in _COPIES:
            call, copies = WritingCall(_aten.copy_.default, (made[0], args[0]), {}), False
        elif copies and count == len(made) and (form := facts.form) is not None:
            call, copies = form.call(args, kwargs, made), False
        native = not copies and self._has_kernels and facts.kernel is not None and facts.provider is None
        if native and not facts.has_group and not found.is_checked:  # other ranks would wait
            check_call(call)
            found.is_checked = call.func is not facts.func  # not for in-place ops, whose arguments may overlap
        targets = [self.blocks.describe(t) for t in made] if copies else None
        self._keep(facts.name, NotedCall(call.mapped(self.blocks.describe), native, targets))

    def _fake_results(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeResults:
        """Call the op with fakes, once for all equal calls; RuntimeError for results that depend on values."""
        call = WritingCall(func, args, kwargs)
        return memoized(_memo, MEMO_SIZE, call.key(), lambda: self._found_results(func, args, kwargs))

    def _found_results(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeResults:
        try:
            with torch.inference_mode(False), torch.no_grad(), self._fakes:
                fakes = pytree.tree_map(_fake, (args, kwargs))
                fake_results = func(*fakes[0], **fakes[1])
        except (DataDependentOutputException, DynamicOutputShapeException):
            _refuse_reading(str(func))
        except UnsupportedOperatorException as error:
            raise RuntimeError(f"{OP}: every op must have a fake, for its results' shapes, got {func}") from error
        except Exception as error:
            if func.namespace == "infini" and not func._schema.is_mutable:
                func(*args, **kwargs)  # the op's own checks raise a clearer error, before anything is computed
            if func.namespace == "infini" or not isinstance(error, RuntimeError):
                raise
            raise RuntimeError(f"{OP}: {func}: {error}") from error
        for given, fake in zip(tensors_of((args, kwargs)), tensors_of(fakes), strict=True):
            if given.shape != fake.shape:
                raise RuntimeError(
                    f"{OP}: an out tensor must have the shape of the result, {list(fake.shape)}, of {func}, got "
                    f"{list(given.shape)}"
                )
        results, spec = pytree.tree_flatten(fake_results)
        return FakeResults([_like(x) if isinstance(x, Tensor) else x for x in results], spec)

    def _make(self, fake: Like) -> Tensor:
        """Return a tensor like the fake, with uninitialized memory."""
        _check_place(fake)
        tensor = _empty_like(fake)
        self.blocks.add(tensor)
        return tensor


def _like(fake: Tensor) -> Like:
    strided = fake.layout == torch.strided
    return Like(fake.shape, fake.stride() if strided else (), fake.dtype, fake.device, fake.layout)


def _empty_like(fake: Like) -> Tensor:
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return torch.empty_strided(fake.shape, fake.stride, dtype=fake.dtype)
    return torch.empty_strided(fake.shape, fake.stride, dtype=fake.dtype)


MEMO_SIZE = 1024  # calls whose fake results are kept: layers of a model make equal calls
_memo: dict[Any, FakeResults] = {}  # by WritingCall.key()


def _fake(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return None if isinstance(value, torch.Generator) else value


def _check_place(tensor: Tensor | Like) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise RuntimeError(
            f"{OP}: every tensor must be strided and on the CPU, the device of record(), got {tensor.layout} on "
            f"{tensor.device}"
        )


def _check(facts: OpFacts, tensors: Sequence[Tensor]) -> None:
    """Raise RuntimeError for a call that cannot be replayed."""
    for tensor in tensors:
        if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
            raise RuntimeError(f"{OP}: every tensor must be torch's own, got a {type(tensor).__name__}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{OP}: a graph has no backward: tensors must not require a gradient (record under torch.no_grad()), "
                f"got one that does in {facts.name}"
            )
    if facts.moves:
        raise RuntimeError(f"{OP}: a tensor must keep its memory and shape while recording, got {facts.name}")
    if facts.depends_on_values:
        _refuse_reading(facts.name)


def _refuse_reading(what: str) -> NoReturn:
    raise RuntimeError(
        f"{OP}: ops are noted and not run, so tensors hold no values yet: nothing may depend on them, got {what}"
    )
