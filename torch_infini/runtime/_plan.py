"""Shared by program() and record(): calls that write into given tensors, memoization, and capture on CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

_thread = threading.local()


@contextmanager
def noting(refusal: str, active: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Make refuse_inside() raise `refusal` in this context on this thread, while active() is true.

    The thread's calls are noted here, and calls of a replay would not be.
    """
    _thread.refusal = refusal, active
    try:
        yield
    finally:
        _thread.refusal = None


def refuse_inside() -> None:
    """Raise RuntimeError if this thread's calls are being noted."""
    refusal, active = getattr(_thread, "refusal", None) or ("", None)
    if active is not None and active():
        raise RuntimeError(refusal)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture the work that the body queues on a stream; other threads may allocate meanwhile.

    An exception of the body is raised unchanged, even if ending the capture, which it made invalid, fails too. The
    current stream is restored.
    """
    with torch.cuda.stream(stream):
        capture = torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local")
        capture.__enter__()
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                capture.__exit__(None, None, None)
            raise
        capture.__exit__(None, None, None)


@dataclass
class WritingCall:
    """A call of an op that writes into its arguments: an out form or an in-place form."""

    func: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def mapped(self, function: Callable[[Any], Any]) -> WritingCall:
        """Return the call with the function applied to all arguments."""
        return WritingCall(self.func, _mapped(self.args, function), _mapped(self.kwargs, function))

    def key(self) -> Any:
        """Return a key of all that the results' shapes, strides and dtypes depend on; None if it is not hashable."""
        given = tuple((name, _frozen(self.kwargs[name])) for name in sorted(self.kwargs))
        key = self.func, _frozen(self.args), given, torch.get_default_dtype()
        try:
            hash(key)
        except TypeError:
            return None
        return key


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_frozen, value))
    return type(value), value


T = TypeVar("T")


def memoized(memo: dict[Any, T], limit: int, key: Any, compute: Callable[[], T]) -> T:
    """Return memo[key], computed if missing; keep at most `limit` values. With key None, only compute."""
    found = None if key is None else memo.get(key)
    if found is None:
        found = compute()
        if key is not None:
            while len(memo) >= limit:
                memo.pop(next(iter(memo)), None)
            memo[key] = found
    return found


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to the leaves of tuples, lists and dicts, the only containers in ops' arguments.

    Takes a fifth of the time of pytree's tree_map.
    """
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(item, function) for item in value])
    if isinstance(value, dict):
        return {name: _mapped(item, function) for name, item in value.items()}
    return function(value)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]
