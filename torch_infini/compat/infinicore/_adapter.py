"""adapted(): makes a torch function a function of infinicore tensors, computed now or noted in a graph.

_rules.py says which calls our kernels serve, _conversion.py converts arguments and results, _recording.py notes calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

from ._arguments import described
from ._bridge import as_torch, from_torch, record_or_run
from ._conversion import TorchCall, by_device, check_out, outs
from ._recording import SIZED_BY_VALUES, VIEWS, record
from ._rules import RULES, Compute, Rule
from .lib import _infinicore
from .tensor import Tensor


def adapted(name: str) -> Callable[..., Any]:
    """Return the function `infinicore.<name>`, which computes what `torch.<name>` does."""
    function, theirs = f"infinicore.{name}", attrgetter(name)(torch)
    compute, rule = Compute(theirs, RULES.get(name)), RULES.get(name)
    tensors = _tensor_parameters(theirs)

    def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        try:
            for index, argument in enumerate(tensors):
                value = args[index] if index < len(args) else kwargs.get(argument, _ABSENT)
                if value is not _ABSENT and not isinstance(value, Tensor):
                    raise TypeError(f"{argument} must be an infinicore.Tensor, got {described(value)}")
            check_out(out)
            if _infinicore.is_graph_recording():
                return record(name, compute, args, kwargs, out)
            return _run(compute, args, kwargs, out)
        except Exception as error:
            _infinicore.GraphRecording.op_failed()
            raise _named(error, function) from error

    call.__name__ = name.rpartition(".")[2]
    call.__qualname__ = call.__name__
    call.__module__ = function.rpartition(".")[0].replace("infinicore", __package__ or "", 1)
    call.__doc__ = _doc(name, rule)
    signature = _signature(theirs)
    if signature is not None:
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _run(compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    call = TorchCall(compute, args, kwargs, _readable, _called_with_ours)
    results = [out]

    def function() -> None:
        if out is None:
            results[0] = call.result(lambda value: from_torch(_plain(value)))
        else:
            call.write([(tensor, as_torch(tensor)) for tensor in outs(out)])

    record_or_run(function, by_device([*call.sources.tensors, *outs(out)]))
    return results[0]


def _readable(tensor: Tensor) -> torch.Tensor:
    if tensor._underlying.is_recorded_only():
        raise RuntimeError(
            "a tensor that was made while a graph was recorded holds nothing before the graph's first run()"
        )
    return as_torch(tensor)


def _called_with_ours(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Wrap a caller's function of infinicore tensors so that torch can call it."""
    return lambda *tensors: as_torch(function(*map(from_torch, tensors)))


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.detach().resolve_conj().resolve_neg()


def _named(error: Exception, function: str) -> Exception:
    """Return the same exception with the function's name prepended."""
    text = str(error)
    if text.startswith(f"{function}:"):
        return error
    try:
        named = type(error)(f"{function}: {text}")
    except TypeError:  # the exception does not take a message
        named = RuntimeError(f"{function}: {type(error).__name__}: {text}")
    return named


class _Absent:
    pass


_ABSENT = _Absent()


def _signature(theirs: Callable[..., Any]) -> inspect.Signature | None:
    """Return torch's signature, if it has one, with `out`."""
    try:
        signature = inspect.signature(theirs)
    except ValueError:
        return None
    parameters = [p for p in signature.parameters.values() if p.name != "out"]
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
    behind = parameters[-1:] if parameters and parameters[-1].kind == inspect.Parameter.VAR_KEYWORD else []
    return signature.replace(parameters=[*parameters[: len(parameters) - len(behind)], out, *behind])


def _tensor_parameters(theirs: Callable[..., Any]) -> list[str]:
    """Return the leading parameters of a Python function that must be tensors; torch's builtins check theirs."""
    names: list[str] = []
    signature = _signature(theirs)
    for parameter in signature.parameters.values() if signature is not None else ():
        if parameter.annotation is not torch.Tensor and parameter.annotation != "Tensor":
            break
        names.append(parameter.name)
    return names


def _doc(name: str, rule: Rule | None) -> str:
    page = f"https://docs.pytorch.org/docs/stable/generated/torch.{name}.html"
    served = "torch's kernels."
    if rule is not None:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in rule.dtypes)
        served = f"our kernel {rule.op}, where {rule.where}, of {dtypes}; other calls by torch's."
    notes = []
    if name in VIEWS:
        notes = ["A result that shares memory with an argument is a view, as in torch."]
    if name in SIZED_BY_VALUES:
        notes = ["It cannot be recorded: the size of its result depends on values."]
    lines = (
        f"`torch.{name}` of infinicore tensors: arguments, results and errors are torch's.",
        "",
        f"`out`, a tensor or a tuple of them, is written and returned. Served by {served}",
        *notes,
        f"See {page}",
    )
    return "\n".join(lines)
