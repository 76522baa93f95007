"""record(): notes a call of a function that torch computes in the graph that is being recorded, without values.

A call on torch's fake tensors gives the shapes and dtypes of the results; each run of the graph writes their memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from . import utils
from ._arguments import described
from ._bridge import as_torch, record_or_run
from ._conversion import (
    Sources,
    by_device,
    check_results,
    converted,
    copies_do,
    leaves,
    outs,
    rebuilt,
    torch_device,
    write,
    write_by_torch,
)
from ._rules import Compute
from ._started import without_modes
from .device import device as Device
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


def record(name: str, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Note a call, and return its result, whose tensors hold nothing before the graph's first run.

    Args:
        name: Of the function, without "infinicore.".
        compute: The function of torch tensors.
        args, kwargs: As the caller gave them.
        out: None, or the tensors to write.
    """
    _check_recordable(name, args, kwargs)
    with without_modes():
        return _noted(name, compute, args, kwargs, out)


def _noted(name: str, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    sources, fake, takes_out, where, layouts = _result_without_values(compute, args, kwargs)
    targets: list[Tensor | None] = []

    def planned(value: torch.Tensor) -> Tensor:
        view = sources.view(value)
        if view is not None:
            targets.append(None)
            return view
        layout = _layout_of(value) if layouts is None else layouts[len(targets)]
        target = _allocated(value, layout, where or value.device)
        targets.append(target)
        return target

    if out is None:
        result = rebuilt(fake, planned)
    else:
        result, targets = out, list(outs(out))
        values, given = list(leaves(fake)), [as_torch(tensor) for tensor in outs(out)]
        takes_out = not copies_do(values, given) and _takes_given(compute, args, kwargs, outs(out))
        if not takes_out:
            check_results(values, list(zip(outs(out), given)), where)
    written = [tensor for tensor in targets if tensor is not None]
    if not written and name in VIEWS:
        return result
    views = Sources(as_torch)
    their_args, their_kwargs = converted(args, kwargs, views, _refused)
    pairs = [None if target is None else (target, as_torch(target)) for target in targets]
    if takes_out and None not in targets:
        their_outs = tuple(view for _, view in filter(None, pairs))
        their_kwargs["out"] = their_outs if len(their_outs) > 1 else their_outs[0]
        pairs = []

    def function() -> None:
        found = compute(their_args, their_kwargs)
        if pairs:
            kept = [(value, pair) for value, pair in zip(leaves(found), pairs, strict=True) if pair is not None]
            write([value for value, _ in kept], [pair for _, pair in kept])

    record_or_run(function, by_device(written or sources.tensors), f"torch.{name}")
    return result


class _Planned(NamedTuple):
    """A call without values.

    Attributes:
        sources: Its arguments.
        result: What torch returned.
        takes_out: Whether torch can write the result into given tensors.
        device: Of the results; None: each has its own.
        layouts: Of the results' memory; None: to be found.
    """

    sources: Sources
    result: Any
    takes_out: bool
    device: torch.device | None = None
    layouts: list[tuple[list[int], list[int]]] | None = None


# What calls are planned to give, by all that it depends on: the layers of a model make the same calls.
PLANS = 1024
_plans: dict[Any, _Planned] = {}


def _result_without_values(compute: Compute, args: Any, kwargs: Any) -> _Planned:
    key, tensors = _key_of(compute, args, kwargs)
    known = None if key is None else _plans.get(key)
    if known is not None:
        return known._replace(sources=known.sources.of(tensors))
    device = _device_of_all(tensors) if kwargs.get("device") is None else None
    if device is not None:
        # A tenth of the time of fake tensors. What fails is tried with those, which know more and say what is wrong.
        with torch.no_grad(), suppress(Exception):
            sources = Sources(_on_meta)
            their_args, their_kwargs = converted(args, kwargs, sources, _refused)
            result = compute(their_args, their_kwargs)
            if all(value.is_meta for value in leaves(result)):
                takes_out = _takes_out(compute, their_args, their_kwargs, result)
                layouts = [_layout_of(value) for value in leaves(result)]
                planned = _Planned(sources, result, takes_out, device, layouts)
                if key is not None:
                    while len(_plans) >= PLANS:
                        _plans.pop(next(iter(_plans)), None)
                    _plans[key] = planned._replace(sources=sources.of(()))
                return planned
    # Imported here: it takes a while, and only some recordings need it.
    from torch._subclasses import fake_tensor

    with torch.no_grad():
        try:
            with fake_tensor.FakeTensorMode():
                sources = Sources(_like)
                their_args, their_kwargs = converted(args, kwargs, sources, _refused)
                result = compute(their_args, their_kwargs)
                return _Planned(sources, result, _takes_out(compute, their_args, their_kwargs, result))
        except (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.UnsupportedOperatorException,
            NotImplementedError,
        ):
            # torch looks at values on the way to a result whose size does not depend on them (the weights of cov(), the
            # variances of gaussian_nll_loss(), the pairs of combinations()): ones are valid for all of these.
            sources = Sources(lambda tensor: _like(tensor).fill_(1))
            their_args, their_kwargs = converted(args, kwargs, sources, _refused)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _Planned(sources, compute(their_args, their_kwargs), False)


def _key_of(compute: Compute, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
    """What the result's shapes, dtypes and views depend on, and the call's tensors; no key for unusual arguments."""
    tensors: dict[int, Tensor] = {}

    def frozen(value: Any) -> Any:
        if isinstance(value, Tensor):
            index = list(tensors).index(id(value)) if id(value) in tensors else len(tensors)
            tensors[id(value)] = value
            return index, value.device, value.dtype, tuple(value.shape), tuple(value.stride())
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(frozen, value))
        return type(value), value

    # In the order of converted(), which is that of the tensors in its Sources.
    named = [(name, frozen(value)) for name, value in kwargs.items()]
    key: Any = compute, tuple(map(frozen, args)), tuple(sorted(named, key=itemgetter(0))), torch.get_default_dtype()
    try:
        hash(key)
    except TypeError:
        key = None
    return key, list(tensors.values())


def _device_of_all(tensors: Sequence[Tensor]) -> torch.device | None:
    """The device of a call's tensors; None if there are several, or none."""
    found = {tensor.device for tensor in tensors}
    return torch_device(found.pop()) if len(found) == 1 else None


def _takes_out(compute: Compute, args: list[Any], kwargs: dict[str, Any], result: Any) -> bool:
    """Whether torch's function, called so, has an `out` for this result: what a replay writes without a copy."""
    values = list(leaves(result))
    if compute.rule is not None or not values:
        return False
    given = [torch.empty_like(value) for value in values]
    written = write_by_torch(compute.theirs, args, kwargs, given)
    return written and all(one.shape == value.shape for one, value in zip(given, values))


def _takes_given(compute: Compute, args: Any, kwargs: Any, given: Sequence[Tensor]) -> bool:
    """Whether torch's function writes tensors like the given ones: tried with ones, since fakes know fewer dtypes."""
    their_args, their_kwargs = converted(args, kwargs, Sources(lambda tensor: _like(tensor).fill_(1)), _refused)
    return write_by_torch(compute.theirs, their_args, their_kwargs, [_like(tensor) for tensor in given])


def _layout_of(value: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of the memory for a result, contiguous where its elements share memory."""
    like = torch.empty_like(value, device="meta")
    return list(like.shape), list(like.stride())


def _allocated(value: torch.Tensor, layout: tuple[list[int], list[int]], device: torch.device) -> Tensor:
    dtype, where = utils.to_infinicore_dtype(value.dtype), Device(device.type, device.index)
    return strided_empty(*layout, dtype=dtype, device=where)


def _on_meta(tensor: Tensor) -> torch.Tensor:
    dtype = utils.to_torch_dtype(tensor.dtype)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _like(tensor: Tensor) -> torch.Tensor:
    dtype, device = utils.to_torch_dtype(tensor.dtype), torch_device(tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)


def _check_recordable(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    advice = SIZED_BY_VALUES.get(name)
    if name == "where" and len(args) + len(kwargs) == 1:
        advice = f"{_OTHER} give where() three arguments"
    if name == "nn.functional.one_hot" and (args[1] if len(args) > 1 else kwargs.get("num_classes", -1)) == -1:
        advice = f"{_OTHER} give num_classes"
    if advice is not None:
        raise RuntimeError(f"the size of its result depends on values, which a recording does not have: {advice}")


def _refused(function: Callable[..., Any]) -> Any:
    raise RuntimeError(f"a graph cannot record a call of the function {described(function)}: call it eagerly")
