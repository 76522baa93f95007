"""adapted(): a function of torch as a function of infinicore tensors, computed now or noted in a graph.

torch gets views of the tensors' memory: no argument is copied. _rules.py says which calls our kernels serve instead.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from . import utils
from ._arguments import described
from ._bridge import as_torch, from_torch, record_or_run
from ._rules import RULES, Rule
from .device import device as Device
from .dtype import dtype as DataType
from .lib import _infinicore
from .tensor import Tensor, strided_empty

# Results that share the memory of an argument are its views; a call of one of these notes no op then.
VIEWS = {"broadcast_to", "diagonal", "hsplit", "reshape", "select", "split", "transpose"}
_OTHER = "call it before the recording, or"
# Names whose result has a size that depends on values, which a recording does not have; what to do instead.
SIZED_BY_VALUES = {
    "argwhere": f"{_OTHER} use where() with three arguments",
    "bincount": f"{_OTHER} use histc() with given bins, min and max",
    "masked_select": f"{_OTHER} use where() with three arguments",
    "nonzero": f"{_OTHER} use where() with three arguments",
    "unique": f"{_OTHER} use sort()",
}


def adapted(name: str) -> Callable[..., Any]:
    """Return the function `infinicore.<name>`, which does what `torch.<name>` does."""
    function, theirs = f"infinicore.{name}", attrgetter(name)(torch)
    compute, rule = _Compute(theirs, RULES.get(name)), RULES.get(name)
    tensors = _tensor_parameters(theirs)

    def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        try:
            for index, argument in enumerate(tensors):
                value = args[index] if index < len(args) else kwargs.get(argument, _ABSENT)
                if value is not _ABSENT and not isinstance(value, Tensor):
                    raise TypeError(f"{argument} must be an infinicore.Tensor, got {described(value)}")
            _check_out(out)
            if _infinicore.is_graph_recording():
                return _record(name, compute, args, kwargs, out)
            return _run(compute, args, kwargs, out)
        except Exception as error:
            raise _named(error, function) from error

    call.__name__ = name.rpartition(".")[2]
    call.__qualname__ = call.__name__
    call.__module__ = function.rpartition(".")[0].replace("infinicore", __package__ or "", 1)
    call.__doc__ = _doc(name, rule)
    signature = _signature(theirs)
    if signature is not None:
        call.__signature__ = signature  # type: ignore[attr-defined]
    return call


class _Compute:
    """A function of torch tensors: our kernel where a rule says so, else torch's function."""

    def __init__(self, theirs: Callable[..., Any], rule: Rule | None) -> None:
        self.theirs = theirs
        self.rule = rule
        self.parameters = None if rule is None else inspect.signature(rule.function)

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.rule is not None and self.parameters is not None:
            try:
                self.parameters.bind(*args, **kwargs)
            except TypeError:  # torch says what is wrong, or knows another form of the call
                return self.theirs(*args, **kwargs)
            if self.rule.fits(args, kwargs):
                result = self.rule.function(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        return self.theirs(*args, **kwargs)


class _Sources:
    """The tensors of a call, each with what torch gets for it: a view of its memory, or a tensor without values."""

    def __init__(self, make: Callable[[Tensor], torch.Tensor]) -> None:
        self._make = make
        self._found: dict[int, tuple[Tensor, torch.Tensor]] = {}

    def __getitem__(self, tensor: Tensor) -> torch.Tensor:
        if id(tensor) not in self._found:
            self._found[id(tensor)] = tensor, self._make(tensor)
        return self._found[id(tensor)][1]

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor, _ in self._found.values()]

    def view(self, value: torch.Tensor) -> Tensor | None:
        """The tensor that is `value`, or the view of it, if it lies in the memory of an argument; else None."""
        for tensor, source in self._found.values():
            if value is source:
                return tensor
            if (
                value.dtype == source.dtype
                and value.untyped_storage()._cdata == source.untyped_storage()._cdata
                and not (value.is_conj() or value.is_neg())
            ):
                offset = int(value.storage_offset() - source.storage_offset()) if value.numel() else 0
                start = tensor._underlying
                if offset:
                    start = start.as_strided([offset + 1], [1]).narrow(0, offset, 1)
                return Tensor(start.as_strided(list(value.shape), list(value.stride())))
        return None


def _run(compute: _Compute, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    sources = _Sources(_readable)
    their_args, their_kwargs = _converted(args, kwargs, sources, _called_with_ours)
    results: list[Any] = []

    def function() -> None:
        result = compute(their_args, their_kwargs)
        if out is None:
            results.append(_rebuilt(result, lambda value: sources.view(value) or from_torch(_plain(value))))
        else:
            _write(list(_leaves(result)), [(tensor, as_torch(tensor)) for tensor in _outs(out)])

    record_or_run(function, _by_device([*sources.tensors, *_outs(out)]))
    return results[0] if out is None else out


def _record(name: str, compute: _Compute, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    _check_recordable(name, args, kwargs)
    sources, fake = _result_without_values(compute, args, kwargs)
    targets: list[Tensor | None] = []

    def planned(value: torch.Tensor) -> Tensor:
        view = sources.view(value)
        if view is not None:
            targets.append(None)
            return view
        # The strides of a result that no two elements share.
        like = torch.empty_like(value, device="meta")
        dtype, device = utils.to_infinicore_dtype(value.dtype), Device(value.device.type, value.device.index)
        made = strided_empty(list(like.shape), list(like.stride()), dtype=dtype, device=device)
        targets.append(made)
        return made

    if out is None:
        result = _rebuilt(fake, planned)
    else:
        result, targets = out, list(_outs(out))
        _check_results(list(_leaves(fake)), [(tensor, as_torch(tensor)) for tensor in _outs(out)])
    written = [tensor for tensor in targets if tensor is not None]
    if not written and name in VIEWS:
        return result
    views = _Sources(as_torch)
    their_args, their_kwargs = _converted(args, kwargs, views, _refused)
    on_cuda = any(tensor.device.type == "cuda" for tensor in (*written, *sources.tensors))
    pairs = [None if target is None else (target, as_torch(target)) for target in targets]

    def function() -> None:
        if on_cuda and torch.cuda.is_current_stream_capturing():
            # torch would use the memory of its intermediate results again for others, while the graph writes to it.
            raise RuntimeError(f"infinicore.{name} is computed by torch, which is not captured")
        found = list(_leaves(compute(their_args, their_kwargs)))
        kept = [(value, pair) for value, pair in zip(found, pairs, strict=True) if pair is not None]
        _write([value for value, _ in kept], [pair for _, pair in kept])

    record_or_run(function, _by_device(written or sources.tensors))
    return result


def _result_without_values(compute: _Compute, args: Any, kwargs: Any) -> tuple[_Sources, Any]:
    """The call's result on tensors without values: shapes, strides, dtypes, and which arguments' memory it lies in."""
    # Imported here: it takes a while, and only recordings need it.
    from torch._subclasses import fake_tensor

    with torch.no_grad():
        try:
            with fake_tensor.FakeTensorMode():
                sources = _Sources(lambda tensor: _like(tensor))
                their_args, their_kwargs = _converted(args, kwargs, sources, _refused)
                return sources, compute(their_args, their_kwargs)
        except (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.UnsupportedOperatorException,
            NotImplementedError,
        ):
            # torch looks at values on the way to a result whose size does not depend on them (the weights of cov(), the
            # variances of gaussian_nll_loss(), the pairs of combinations()): ones are valid for all of these.
            sources = _Sources(lambda tensor: _like(tensor).fill_(1))
            their_args, their_kwargs = _converted(args, kwargs, sources, _refused)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return sources, compute(their_args, their_kwargs)


def _like(tensor: Tensor) -> torch.Tensor:
    dtype, device = utils.to_torch_dtype(tensor.dtype), _torch_device(tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)


def _check_recordable(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    advice = SIZED_BY_VALUES.get(name)
    if name == "where" and len(args) + len(kwargs) == 1:
        advice = f"{_OTHER} give where() three arguments"
    if name == "nn.functional.one_hot" and (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
        advice = f"{_OTHER} give num_classes"
    if advice is not None:
        raise RuntimeError(f"the size of its result depends on values, which a recording does not have: {advice}")


def _readable(tensor: Tensor) -> torch.Tensor:
    if tensor._underlying.is_recorded_only():
        raise RuntimeError(
            "a tensor that was made while a graph was recorded holds nothing before the graph's first run()"
        )
    return as_torch(tensor)


def _converted(
    args: tuple[Any, ...], kwargs: dict[str, Any], sources: _Sources, wrap: Callable[[Callable[..., Any]], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as torch takes them; `wrap` does so for functions."""

    def convert(value: Any) -> Any:
        if isinstance(value, Tensor):
            return sources[value]
        if isinstance(value, torch.Tensor):
            raise TypeError("tensors must be infinicore.Tensor, got a torch.Tensor: use from_torch()")
        if isinstance(value, DataType):
            return utils.to_torch_dtype(value)
        if isinstance(value, Device):
            return _torch_device(value)
        if type(value) in (list, tuple):
            return type(value)(map(convert, value))
        return wrap(value) if callable(value) and not isinstance(value, type) else value

    theirs = {name: convert(value) for name, value in kwargs.items()}
    if isinstance(theirs.get("device"), str):
        theirs["device"] = _torch_device(Device(theirs["device"]))
    return [convert(value) for value in args], theirs


def _torch_device(device: Device) -> torch.device:
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a CPU or a CUDA device, since torch computes, got {device}")
    return torch.device("cpu") if device.type == "cpu" else torch.device("cuda", device.index)


def _called_with_ours(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A caller's function of infinicore tensors, as torch calls it."""
    return lambda *tensors: as_torch(function(*map(from_torch, tensors)))


def _refused(function: Callable[..., Any]) -> Any:
    raise RuntimeError(f"a graph cannot record a call of the function {described(function)}: call it eagerly")


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _rebuilt(value: Any, convert: Callable[[torch.Tensor], Tensor]) -> Any:
    """A result with its tensors converted; torch's named tuples stay what they are."""
    if isinstance(value, torch.Tensor):
        return convert(value)
    if isinstance(value, (list, tuple)):
        items = [_rebuilt(item, convert) for item in value]
        return items if isinstance(value, list) else type(value)(items)
    return value


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.detach().resolve_conj().resolve_neg()


def _outs(out: Any) -> Sequence[Tensor]:
    return [] if out is None else [out] if isinstance(out, Tensor) else list(out)


def _by_device(tensors: Sequence[Tensor]) -> list[Tensor]:
    """With those first whose device has streams: the first one's is the stream on which torch computes."""
    return sorted(tensors, key=lambda tensor: tensor.device.type == "cpu")


def _check_out(out: Any) -> None:
    if out is not None and not isinstance(out, Tensor):
        is_sequence = isinstance(out, (list, tuple))
        wrong = [value for value in out if not isinstance(value, Tensor)] if is_sequence else [out]
        if wrong or not out:
            raise TypeError(
                f"out must be an infinicore.Tensor, or a tuple of them, got {described(wrong[0] if wrong else out)}"
            )


def _check_results(values: Sequence[torch.Tensor], outs: Sequence[tuple[Tensor, torch.Tensor]]) -> None:
    if len(values) != len(outs):
        raise TypeError(f"out must be as many tensors as there are results, {len(values)}, got {len(outs)}")
    for value, (tensor, view) in zip(values, outs):
        if list(value.shape) != tensor.shape:
            raise ValueError(f"out must have the shape of the result, {list(value.shape)}, got {tensor.shape}")
        if not torch.can_cast(value.dtype, view.dtype):
            raise TypeError(f"out must have a dtype that takes the result's, {value.dtype}, got {tensor.dtype}")
        if value.device != view.device:
            raise ValueError(f"out must be on the device of the result, {value.device}, got {tensor.device}")


def _write(values: Sequence[torch.Tensor], outs: Sequence[tuple[Tensor, torch.Tensor]]) -> None:
    _check_results(values, outs)
    for value, (_, view) in zip(values, outs):
        view.copy_(value)


def _named(error: Exception, function: str) -> Exception:
    """The same exception with the function's name in front."""
    text = str(error)
    if text.startswith(f"{function}:"):
        return error
    try:
        named = type(error)(f"{function}: {text}")
    except TypeError:  # an exception that is not made of a sentence
        named = RuntimeError(f"{function}: {type(error).__name__}: {text}")
    return named


class _Absent:
    pass


_ABSENT = _Absent()


def _signature(theirs: Callable[..., Any]) -> inspect.Signature | None:
    """Torch's signature, where it has one, with `out`."""
    try:
        signature = inspect.signature(theirs)
    except ValueError:
        return None
    parameters = [p for p in signature.parameters.values() if p.name != "out"]
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
    behind = parameters[-1:] if parameters and parameters[-1].kind == inspect.Parameter.VAR_KEYWORD else []
    return signature.replace(parameters=[*parameters[: len(parameters) - len(behind)], out, *behind])


def _tensor_parameters(theirs: Callable[..., Any]) -> list[str]:
    """The first parameters of a Python function that must be tensors; its builtins check theirs themselves."""
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
