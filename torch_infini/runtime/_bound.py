"""Calls of torch's ops as Python callables without arguments, by the cheapest function that calls the same op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ._plan import WritingCall, memoized

# Torch's own functions besides the ops: a call costs less than half (mul into a tensor: 0.8 us instead of 2.2).
_FUNCTIONS = (torch._C._VariableFunctions, torch._C._nn, torch.Tensor)


MEMO_SIZE = 1024  # calls whose function is kept
_memo: dict[Any, Callable[..., Any]] = {}


def bind_call(call: WritingCall) -> Callable[[], Any]:
    """Return a function that makes the call; its arguments must be real tensors."""
    return partial(memoized(_memo, MEMO_SIZE, call.key(), partial(_function_of, call)), *call.args, **call.kwargs)


def _function_of(call: WritingCall) -> Callable[..., Any]:
    name = call.func._schema.name.removeprefix("aten::")
    for functions in _FUNCTIONS if call.func.namespace == "aten" else ():
        function = getattr(functions, name, None)
        if function is not None and not isinstance(function, FunctionType) and _FirstOp.calls(function, call):
            return function
    return call.func._op


def copy_results(function: Callable[[], Any], outs: Sequence[Tensor | None]) -> None:
    """Call a function, and copy its results to tensors; None skips a result."""
    for out, result in zip(outs, pytree.tree_leaves(function()), strict=True):
        if out is not None:
            out.copy_(result)


def run_all(functions: Sequence[Callable[[], object]]) -> None:
    """Call functions in order."""
    for function in functions:
        function()


class _FirstOpSeen(Exception):
    pass


class _FirstOp(TorchDispatchMode):
    """Stores the first op that is called, and raises instead of running it."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.seen: WritingCall | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as programs._ProgramRecorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen = WritingCall(func, args, kwargs or {})
        raise _FirstOpSeen

    @classmethod
    def calls(cls, function: Callable[..., Any], call: WritingCall) -> bool:
        """Return whether the function, given the call's arguments, first makes that call; nothing is run."""
        probe = cls()
        try:
            with probe:
                function(*call.args, **call.kwargs)
        except (_FirstOpSeen, TypeError, RuntimeError, ValueError):
            pass
        seen = probe.seen
        return seen is not None and seen.func is call.func and _same(_arguments(seen), _arguments(call))


def _arguments(call: WritingCall) -> list[Any]:
    """Return the leaves of all arguments in the schema's order, including defaults."""
    given = dict(zip((argument.name for argument in call.func._schema.arguments), call.args, strict=False))
    given.update(call.kwargs)
    return [
        leaf
        for argument in call.func._schema.arguments
        for leaf in pytree.tree_leaves(given.get(argument.name, argument.default_value))
    ]


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(
        a is b or (type(a) is type(b) and not isinstance(a, Tensor) and a == b)
        for a, b in zip(some, others, strict=True)
    )
