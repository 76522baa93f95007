"""What program() and record() share: calls that write into given tensors, and what is remembered of them."""

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
    """While this thread's calls are noted, let refuse_inside() raise: what is replayed then would not be noted.

    active: Whether they are noted still; asked by refuse_inside().
    """
    _thread.refusal = refusal, active
    try:
        yield
    finally:
        _thread.refusal = None


def refuse_inside() -> None:
    """Raise RuntimeError where this thread's calls are noted."""
    refusal, active = getattr(_thread, "refusal", None) or ("", None)
    if active is not None and active():
        raise RuntimeError(refusal)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Capture what is queued on a stream meanwhile; other threads may allocate.

    What the body raises comes out of it, whatever the end of a capture that it has made invalid says then. The current
    stream is what it was.
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
        """Return the call with other arguments."""
        return WritingCall(self.func, _mapped(self.args, function), _mapped(self.kwargs, function))

    def key(self) -> Any:
        """Return what shapes, strides and dtypes of the results depend on; None for unusual arguments."""
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


def remembered(known: dict[Any, T], limit: int, key: Any, find: Callable[[], T]) -> T:
    """Return what is known under a key, or find it; None: a key of nothing that is to be remembered."""
    found = None if key is None else known.get(key)
    if found is None:
        found = find()
        if key is not None:
            while len(known) >= limit:
                known.pop(next(iter(known)), None)
            known[key] = found
    return found


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to what is in tuples, lists and dicts, of which alone ops have arguments.

    As pytree's tree_map does, in a fifth of the time.
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
