"""record(): notes a call of a function that torch computes in the graph that is being recorded, without values.

On the CPU torch is called, and the thread's recorder notes its ops. If there is no recorder (on CUDA, or in a recording
of the raw module), or if torch reads values in between, the call is noted as a whole: each run of the graph makes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...runtime.recording import Recording
from . import utils
from ._arguments import described
from ._bridge import as_torch, record_or_run
from ._conversion import Sources, TorchCall, by_device, check_results, copies_do, leaves, outs, rebuilt, torch_device
from ._rules import Compute
from ._started import without_modes
from .device import device as Device
from .lib import _infinicore
from .tensor import Tensor, strided_empty

# Results of these that share an argument's memory are views; such a call notes no op.
VIEWS = {"broadcast_to", "diagonal", "hsplit", "reshape", "select", "split", "transpose"}
_OTHER = "call it before the recording, or"
# Functions whose result's size depends on values, which a recording lacks; and what to use instead.
SIZED_BY_VALUES = {
    "argwhere": f"{_OTHER} use where() with three arguments",
    "bincount": f"{_OTHER} use histc() with given bins, min and max",
    "masked_select": f"{_OTHER} use where() with three arguments",
    "nonzero": f"{_OTHER} use where() with three arguments",
    "unique": f"{_OTHER} use sort()",
}


def record(name: str, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """Note a call, and return its result, whose tensors are unfilled until the graph's first run.

    Args:
        name: The function's name, without "infinicore.".
        compute: The function of torch tensors.
        args, kwargs: As passed by the caller.
        out: None, or the tensors to write.
    """
    _check_recordable(name, args, kwargs)
    recorder = Recording.recorder()
    if recorder is not None:
        try:
            with torch._C.DisableTorchFunction():
                noted = partial(_noted, recorder.as_one, compute, args, kwargs, out)
                return recorder.as_one(f"torch.{name}", noted)
        except Exception:
            pass  # the code below handles it, or raises a fitting error
    with without_modes():
        return _noted_whole(name, compute, args, kwargs, out)


def _noted(
    as_one: Callable[..., Any], compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Any:
    call = TorchCall(compute, args, kwargs, _view, _refused)
    if out is None:
        return call.result(_made)
    call.write([(tensor, _view(tensor)) for tensor in outs(out)], partial(as_one, ""))
    return out


def _view(tensor: Tensor) -> torch.Tensor:
    """Return a tensor for torch: a result of this recording is returned as the recorder's object, so it is not kept."""
    if tensor._torch_ref is not None and tensor._underlying.is_recorded_now():
        return tensor._torch_ref
    return as_torch(tensor)


def _made(value: torch.Tensor) -> Tensor:
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    dtype, device = utils.to_infinicore_dtype(value.dtype), _infinicore.Device()
    made = _infinicore.from_owner(
        value, value.data_ptr(), list(value.shape), list(value.stride()), dtype._underlying, device
    )
    made.set_recorded_now()
    return Tensor(made, _torch_ref=value)


def _noted_whole(name: str, compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    fakes, fake = _result_without_values(compute, args, kwargs)
    call = TorchCall(compute, args, kwargs, as_torch, _refused)
    if out is not None:
        values, written = list(leaves(fake)), [(tensor, as_torch(tensor)) for tensor in outs(out)]
        if copies_do(values, [view for _, view in written]) or not _takes_given(compute, args, kwargs, outs(out)):
            check_results(values, written)
        record_or_run(lambda: call.write(written), by_device(outs(out)), f"torch.{name}")
        return out
    targets: list[Tensor | None] = []

    def planned(value: torch.Tensor) -> Tensor:
        view = fakes.view(value)
        target = _allocated(value) if view is None else view
        targets.append(target if view is None else None)
        return target

    result = rebuilt(fake, planned)
    made = [tensor for tensor in targets if tensor is not None]
    if not made and name in VIEWS:
        return result
    views = [None if tensor is None else as_torch(tensor) for tensor in targets]

    def function() -> None:
        for value, view in zip(leaves(call()), views, strict=True):
            if view is not None:
                view.copy_(value)

    record_or_run(function, by_device(made or call.sources.tensors), f"torch.{name}")
    return result


def _result_without_values(compute: Compute, args: Any, kwargs: Any) -> tuple[Sources, Any]:
    # Imported here because it is slow, and few recordings need it.
    from torch._subclasses import fake_tensor

    with torch.no_grad():
        try:
            with fake_tensor.FakeTensorMode():
                call = TorchCall(compute, args, kwargs, _like, _refused)
                return call.sources, call()
        except (
            fake_tensor.DataDependentOutputException,
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.UnsupportedOperatorException,
            NotImplementedError,
        ):
            # torch reads values although the result's size does not depend on them (the weights of cov(), the variances
            # of gaussian_nll_loss(), the pairs of combinations()); ones are valid for all of these.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call = TorchCall(compute, args, kwargs, _ones, _refused)
                return call.sources, call()


def _takes_given(compute: Compute, args: Any, kwargs: Any, given: Sequence[Tensor]) -> bool:
    """Return whether torch's function writes such tensors, tried with ones, since fakes support fewer dtypes."""
    return TorchCall(compute, args, kwargs, _ones, _refused).takes_out([_like(tensor) for tensor in given])


def _allocated(value: torch.Tensor) -> Tensor:
    """Allocate memory for a result; contiguous if its elements share memory."""
    like = torch.empty_like(value, device="meta")
    dtype, where = utils.to_infinicore_dtype(value.dtype), Device(value.device.type, value.device.index)
    return strided_empty(list(like.shape), list(like.stride()), dtype=dtype, device=where)


def _ones(tensor: Tensor) -> torch.Tensor:
    return _like(tensor).fill_(1)


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
