"""program: calls of ops on the CPU, recorded once and replayed by one C call.

A function's calls are noted, get their memory in one arena, and are recorded by csrc/torch/program.h.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .._library import PATH, RUNTIME, emulates_cuda
from ..ops import REGISTRY, chosen_providers

_OP = "torch_infini.runtime.program"
_ON_CUDA = "on CUDA use torch_infini.runtime.graph"
_ALIGNMENT = 64  # bytes: a cache line, and what torch's own memory has

_LIBRARY = ctypes.CDLL(str(PATH))  # whose functions release the GIL
_begin, _end = _LIBRARY.infiniTorchProgramBegin, _LIBRARY.infiniTorchProgramEnd
_replay, _destroy = _LIBRARY.infiniTorchProgramReplay, _LIBRARY.infiniTorchProgramDestroy
_begin.argtypes, _begin.restype = [], ctypes.c_void_p
_end.argtypes, _end.restype = [], ctypes.c_size_t
_replay.argtypes = _destroy.argtypes = [ctypes.c_void_p]
_destroy.restype = None

_aten = torch.ops.aten
_ALLOCATIONS = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)

_thread = threading.local()


def program(fn: Callable[[], Any]) -> Program:
    """Record fn's calls of CPU ops, to replay them without Python, torch's dispatcher and malloc.

    fn may call ops of torch.ops.infini, views (view, a reshape that need not copy, slices, split, transpose, ...)
    and torch.empty; its Python runs once. Tensors that it reads (weights, caches, inputs), index tensors included, are
    read in place at every replay: to replay with other inputs, write them into the same tensors. All tensors that fn
    makes share one arena, which reuses memory; tensors that fn stored elsewhere do not get the values of replays.

    Recording runs the calls once, in separate memory, and leaves their results in the program's outputs. For CUDA there
    is graph().

    Args:
        fn: Takes nothing; returns tensors, or tuples, lists and dicts of them.

    Returns:
        A Program.

    Raises:
        RuntimeError: If fn calls or returns anything else, if a tensor is not on the CPU, or if a result requires a
            gradient (call program() under torch.no_grad()).
        BaseException: What fn raises.

    Example:
        >>> with torch.no_grad():
        >>>     step = torch_infini.runtime.program(lambda: model.decode(tokens, positions, caches))
        >>> tokens.copy_(next_tokens), positions.add_(1)
        >>> logits = step.replay()
    """
    return Program(fn)


class Program:
    """The result of program().

    Replays of one program by several threads are serialised and share the outputs; different programs run concurrently.
    There is no backward. Dropping the program and its outputs frees its memory; until then it keeps the tensors that it
    uses alive.

    Attributes:
        outputs: What fn returned, always the same tensors; at first with the results of recording. A replay overwrites
            them.
        calls: The number of kernel calls in a replay.
        arena_bytes: The size of the memory for the tensors that fn makes.
    """

    outputs: Any
    calls: int
    arena_bytes: int

    def __init__(self, fn: Callable[[], Any]) -> None:
        _refuse_inside()
        if emulates_cuda():
            raise RuntimeError(f"{_OP}: the kernels must be the CPU's ({_ON_CUDA}), got emulated CUDA")
        notes = _Notes()
        with _noting(), notes:
            results, spec = pytree.tree_flatten(fn())
        for leaf in results:
            if leaf is not None and not isinstance(leaf, Tensor):
                raise RuntimeError(f"{_OP}: fn must return tensors, or tuples, lists and dicts of them, got {leaf!r}")
        _check_devices(results)
        if any(leaf.requires_grad for leaf in _tensors(results)):
            raise RuntimeError(
                f"{_OP}: results must not require a gradient, for a program has no backward (call program() under "
                "torch.no_grad()), got one that does"
            )
        self._lock = threading.Lock()
        self.calls = len(notes.calls)
        with torch.inference_mode(False), torch.no_grad():
            arena = _Arena(notes, results)
            self.arena_bytes = arena.bytes
            self._record([call.mapped(arena.moved) for call in notes.calls])
            arena.copy(results)
            self.outputs = pytree.tree_unflatten(map(arena.moved, results), spec)

    def __call__(self) -> Any:
        """Call replay()."""
        return self.replay()

    def replay(self) -> Any:
        """Run the calls with what the tensors hold now.

        Returns:
            `outputs`.

        Raises:
            RuntimeError: What an op raises, of an index out of range say. The calls after it are left out; the program
                can be replayed again.
        """
        _refuse_inside()
        with self._lock:
            if _replay(self._handle):
                raise RuntimeError(RUNTIME.infiniGetLastErrorMessage().decode(errors="replace"))
        return self.outputs

    def _record(self, calls: Sequence[_Call]) -> None:
        self._handle = _begin()
        assert self._handle, "this thread records already"
        weakref.finalize(self, _destroy, self._handle).atexit = False
        recorded = 0
        try:
            for call in calls:
                call.func(*call.args, **call.kwargs)
        finally:
            recorded = _end()
        if recorded != len(calls):
            raise RuntimeError(f"{_OP}: every op must have a kernel in C++, got {len(calls) - recorded} without one")


@contextmanager
def _noting() -> Iterator[None]:
    _thread.notes = True
    try:
        yield
    finally:
        _thread.notes = False


def _refuse_inside() -> None:
    # Replayed kernels would run without being noted.
    if getattr(_thread, "notes", False):
        raise RuntimeError(f"{_OP}: fn must not make or replay another program, got one that does")


@dataclass
class _Call:
    """A call of an op that writes into its arguments: an out form or an in-place form."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return _tensors((self.args, self.kwargs))

    def mapped(self, function: Callable[[Any], Any]) -> _Call:
        return _Call(self.func, *pytree.tree_map(function, (self.args, self.kwargs)))


class _Notes(TorchDispatchMode):
    """Runs and records the ops that fn calls; refuses those that cannot be replayed.

    Attributes:
        calls: In order; a functional form is noted as the out form.
        made: The memory that fn made, by _storage(). Kept, so that none has the address of one before it.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.calls: list[_Call] = []
        self.made: dict[int, torch.UntypedStorage] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler to skip it: a second, in the first decode step of a process

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        _check_devices((args, kwargs))
        if isinstance(func, torch._ops.OpOverload):
            if func.namespace == "infini":
                return self._note(func, args, kwargs)
            if func.overloadpacket in _ALLOCATIONS and not func._schema.is_mutable:
                return self._keep(func(*args, **kwargs))
            with self:  # in inference mode reshape and its like come as they are
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            if func.namespace == "aten" and _is_view(func):
                return func(*args, **kwargs)
        raise RuntimeError(
            f"{_OP}: fn must call nothing but ops of torch.ops.infini, views that need no copy and torch.empty, "
            f"got {func}"
        )

    def _note(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("infini::")
        functional = not func._schema.is_mutable
        if functional and name not in REGISTRY:
            raise RuntimeError(f"{_OP}: every op must have an out form or write into its arguments, got {func}")
        op = name if name in REGISTRY else name.removesuffix("_")
        if provider := next((p for p in chosen_providers("cpu") if p.op == op), None):
            raise RuntimeError(
                f"{_OP}: every op must have our kernel, which needs no Python, got {op} from provider {provider.name!r}"
            )
        result = func(*args, **kwargs)
        if functional:
            spec, results = REGISTRY[name], result if isinstance(result, tuple) else (result,)
            self._keep(results)
            func, kwargs = spec.out, {**kwargs, **dict(zip(spec.out_names, results, strict=True))}
        self.calls.append(_Call(func, args, kwargs))
        return result

    def _keep(self, made: Any) -> Any:
        _check_devices(made)
        self.made.update({_storage(tensor): tensor.untyped_storage() for tensor in _tensors(made)})
        return made


class _Arena:
    """The memory of all tensors that fn made; tensors whose lifetimes do not overlap may share addresses."""

    def __init__(self, notes: _Notes, results: Sequence[Any]) -> None:
        lives: dict[int, tuple[int, int]] = {}  # from the first call to the last that uses it

        def use(tensors: Sequence[Tensor], when: int) -> None:
            for key in map(_storage, tensors):
                if key in notes.made:
                    lives[key] = (lives.get(key, (when, when))[0], when)

        for when, call in enumerate(notes.calls):
            use(call.tensors(), when)
        use(_tensors(results), len(notes.calls))  # to the end
        self._offsets, self.bytes = place({key: notes.made[key].nbytes() for key in lives}, lives)
        self._storage = torch.empty(self.bytes, dtype=torch.uint8).untyped_storage()
        self._moved: dict[int, Tensor] = {}

    def copy(self, made: Sequence[Any]) -> None:
        """Copy the contents of those tensors that fn made to the arena."""
        for storage in {_storage(tensor): tensor.untyped_storage() for tensor in _tensors(made)}.values():
            if (offset := self._offsets.get(storage._cdata)) is not None:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                whole.new_empty(0).set_(self._storage, offset, whole.shape, (1,)).copy_(whole)

    def moved(self, value: Any) -> Any:
        """Return a tensor that fn made at its place in the arena; return any other value as it is."""
        offset = self._offsets.get(_storage(value)) if isinstance(value, Tensor) else None
        if offset is None:
            return value
        if id(value) not in self._moved:
            start = offset // value.element_size() + value.storage_offset()
            place_ = torch.empty(0, dtype=value.dtype)
            self._moved[id(value)] = place_.set_(self._storage, start, value.shape, value.stride())
        return self._moved[id(value)]


def place(sizes: dict[int, int], lives: dict[int, tuple[int, int]]) -> tuple[dict[int, int], int]:
    """Place blocks of memory so that none overlaps another during its lifetime; return offsets and the total size.

    The largest first, each at the lowest offset that is free.
    """
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, int, int]] = []  # (offset, end, first call, last call)
    for key in sorted(lives, key=lambda key: -sizes[key]):
        size = -(-sizes[key] // _ALIGNMENT) * _ALIGNMENT
        first, last = lives[key]
        offset = 0
        for other, end, other_first, other_last in placed:
            if other_first <= last and first <= other_last:
                if offset + size <= other:
                    break
                offset = max(offset, end)
        offsets[key] = offset
        insort(placed, (offset, offset + size, first, last))
    return offsets, max((end for _, end, _, _ in placed), default=0)


def _storage(tensor: Tensor) -> int:
    """Return a key that all views of one storage share."""
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _check_devices(values: Any) -> None:
    for tensor in _tensors(values):
        if tensor.device.type != "cpu":
            raise RuntimeError(f"{_OP}: every tensor must be on the CPU ({_ON_CUDA}), got one on {tensor.device}")


def _is_view(func: torch._ops.OpOverload) -> bool:
    return not func._schema.is_mutable and any(result.alias_info for result in func._schema.returns)
