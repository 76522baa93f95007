"""INFINI_LOG=1, 2 or 3: log a line per call of an infini op, before its kernel runs, so that a crash shows it.

Imported only if the variable is set. A Python kernel is then registered over each kernel of the library in the
dispatcher, so it sees eager calls, patched models and compiled graphs alike. Fake tensors do not reach these kernels.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _provider_kernels
from ._registry import all_ops

LOGGER = logging.getLogger("torch_infini.ops")
OFF, NAMES, ARGUMENTS, STATISTICS = range(4)

_label: ContextVar[str] = ContextVar("label", default="")  # the prefix of this thread's lines
_library = torch.library.Library("infini", "IMPL")  # destroying it would remove the logging kernels


def read_level(value: str) -> int:
    """Parse the value of INFINI_LOG; raise ImportError if it is invalid."""
    if value not in ("0", "1", "2", "3"):
        raise ImportError(
            "torch_infini: INFINI_LOG must be 0 (off), 1 (names of the ops), 2 (and their arguments) or 3 (and "
            f"statistics of the arguments' values), got {value!r}"
        )
    return int(value)


def has_memory(t: Tensor) -> bool:
    """Return whether all elements lie inside the storage; the ops reject a tensor whose storage was shrunk."""
    last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def statistics(t: Tensor) -> str:
    """Return minimum, maximum and mean of the finite elements, if any, and the numbers of NaNs and infinities."""
    if t.numel() and not has_memory(t):
        return "{no memory}"
    try:
        values = t.detach()  # hidden from autograd
        if values.element_size() == 1:  # torch has almost no arithmetic for the 8-bit types
            values = values.float()
        nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
        finite = values[values.isfinite()] if nan + inf else values
        if not finite.numel():
            return f"{{nan {nan}, inf {inf}}}"
        low, high = (value.item() for value in finite.aminmax())
        mean = finite.mean(dtype=torch.float64).item()
        return f"{{min {low:.6g}, max {high:.6g}, mean {mean:.6g}, nan {nan}, inf {inf}}}"
    except RuntimeError as error:  # the call must go on, to the op's own checks
        return f"{{no statistics: {str(error).splitlines()[0]}}}"


def describe(value: Any, with_statistics: bool) -> str:
    """Describe an argument: a tensor's dtype, shape and unusual properties; anything else by its repr."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(describe(v, with_statistics) for v in value)}]"
    if not isinstance(value, Tensor):
        return str(value)
    parts = [f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"]
    if not value.is_contiguous():
        parts.append(f"strides {list(value.stride())}")
    if value.device.type != "cpu":
        parts.append(str(value.device))
    if with_statistics and value.is_floating_point():
        parts.append(statistics(value))
    return " ".join(parts)


def describe_call(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], level: int) -> str:
    """Return a call's line; `args` and `kwargs` as the dispatcher passes them, without arguments left at defaults."""
    if level == NAMES:
        return op._name

    def descriptions() -> Iterator[str]:
        for position, argument in enumerate(op._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            # The content of out tensors before the call is meaningless.
            yield f"{argument.name}={describe(value, level >= STATISTICS and not argument.is_out)}"

    return f"{op._name}({', '.join(descriptions())})"


def log_call(op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], level: int) -> None:
    """Write the line for a call."""
    if LOGGER.isEnabledFor(logging.INFO):
        with torch._C.DisableTorchFunction():  # hides this from modes and subclasses that intercept torch's functions
            line = describe_call(op, args, kwargs, level)
        LOGGER.info("%s%s", _label.get(), line)


def logged(op: torch._ops.OpOverload, key: str, level: int) -> Callable[..., Any]:
    """Make a kernel that logs the line, then calls the kernel that was registered for this dispatch key."""
    kernel = torch.library.get_kernel(op, key)

    def log_and_call(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        log_call(op, args, kwargs, level)
        return kernel.call_boxed(keys, *args, **kwargs)

    return log_and_call


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """Prefix the lines of calls in the body with a label, because they are not the program's own."""
    token = _label.set(label)
    try:
        yield
    finally:
        _label.reset(token)


def start(value: str) -> None:
    """Write a line for every call from now on, at the level that `value` names."""
    level = read_level(value)
    if level == OFF:
        return
    LOGGER.setLevel(logging.INFO)
    if not LOGGER.hasHandlers():
        LOGGER.addHandler(logging.StreamHandler(sys.stderr))
        LOGGER.propagate = False  # otherwise a handler that the program installs later would repeat every line
    _provider_kernels.on_call = partial(log_call, level=level)
    for spec in all_ops():
        for key in (backend.upper() for backend in spec.backends):
            for op in _provider_kernels.overloads(spec):
                _provider_kernels.lay(op, logged(op, key, level), key, _library)
