"""Converts InfiniLM callers' arguments to torch's tensors, dtypes and devices, and results to their tensors.

InfiniCore's objects wrap one another in an attribute `_underlying`. Converted tensors share memory in both directions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from ..._core.dtypes import INFINI_DTYPES

_HOST = (1, 0)  # the CPU in the form of __dlpack_device__()
# Names by infiniDevice_t, and torch's names of the devices that torch_infini has kernels for.
DEVICES = ("cpu", "nvidia", "cambricon", "ascend", "metax", "moore", "iluvatar", "kunlun", "hygon", "qy")
TORCH_DEVICES = {"cpu": "cpu", "nvidia": "cuda", "cuda": "cuda"}
# The number and the name in infiniDtype_t, and torch's names.
DTYPES = {
    dtype: (str(int(INFINI_DTYPES[dtype])), INFINI_DTYPES[dtype].name.lower(), *names)
    for dtype, names in (
        (torch.float16, ("float16", "half")),
        (torch.float32, ("float32", "float")),
        (torch.bfloat16, ("bfloat16",)),
    )
}


def underlying(value: Any) -> Any:
    """Return the innermost object of a chain of `_underlying`."""
    while not isinstance(value, Tensor):
        inner = getattr(value, "_underlying", None)
        if inner is None or inner is value:
            break
        value = inner
    return value


def as_torch(value: Any) -> Any:
    """Return the torch tensor of an argument, over the memory of an infinicore tensor; other objects unchanged.

    Args:
        value: A torch.Tensor, an infinicore.Tensor, an _infinicore.Tensor, or an object with one as `_underlying`.

    Raises:
        RuntimeError: For an infinicore tensor that a recorded graph has not filled yet.
        BufferError: For a dtype that torch lacks.
    """
    found = underlying(value)
    if isinstance(found, Tensor):
        return found.detach()
    if not hasattr(found, "to_dlpack"):  # then infinicore is already imported
        return found
    if found.dlpack_device() == _HOST and not found.is_recorded_only():
        # No streams and no extra objects, because a step converts seven tensors.
        return from_dlpack(found.to_dlpack(True, False))
    from ..infinicore import Tensor as InfiniTensor

    return from_dlpack(InfiniTensor(found))


def as_tensor(where: str, name: str, value: Any) -> Tensor:
    """Return the torch tensor of an argument; else raise TypeError, whose message begins with `where`."""
    try:
        found = as_torch(value)
    except BufferError as error:
        raise ValueError(f"{where}: {name} must be of a dtype that torch has: {error}") from None
    if not isinstance(found, Tensor):
        raise TypeError(
            f"{where}: {name} must be an infinicore or a torch tensor, or carry one as _underlying, got "
            f"{type(found).__name__}"
        )
    return found


def as_infinicore(tensor: Tensor) -> Any:
    """Return an infinicore.Tensor over a torch tensor's memory."""
    from ..infinicore import from_torch

    return from_torch(tensor.detach())


def like(value: Any) -> Callable[[Tensor], Any]:
    """Return a function that converts torch tensors to the kind of an argument: torch's, or else infinicore's."""
    return _same if isinstance(underlying(value), Tensor) else as_infinicore


def _same(tensor: Tensor) -> Tensor:
    return tensor


def as_dtype(where: str, value: Any) -> torch.dtype:
    """Convert a dtype: torch's, a number of infinicore.h, a name, or a wrapper of InfiniCore; None: float32."""
    if value is None:
        return torch.float32
    for candidate in (value, underlying(value)):
        name = str(_number(candidate)).lower().rpartition(".")[2]
        for dtype, names in DTYPES.items():
            if name in names:
                return dtype
    raise ValueError(f"{where}: dtype must be float32, bfloat16 or float16, got {value!r}")


def as_device(where: str, value: Any, argument: str = "device_type") -> torch.device:
    """Convert a device: an object or name of torch or Infini, or a number of infinicore.h.

    None: this thread's current device of infinicore, if the program uses it; otherwise the CPU.

    Raises:
        ValueError: For a device that does not exist, or that torch_infini has no kernels for.
    """
    device = _device(_current() if value is None else value)
    if device is None or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        known = "cpu or nvidia" if torch.cuda.is_available() else "cpu, for torch finds no NVIDIA GPU"
        raise ValueError(f"{where}: {argument} must be {known}, got {value!r}")
    return device


def _current() -> Any:
    infinicore = sys.modules.get("torch_infini.compat.infinicore")
    return "cpu" if infinicore is None else infinicore.get_device()


def _device(value: Any) -> torch.device | None:
    if isinstance(value, torch.device):
        return value if value.type in ("cpu", "cuda") else None
    number = _number(value)
    if isinstance(number, int):
        name, index = DEVICES[number] if 0 <= number < len(DEVICES) else "", ""
    elif isinstance(value, str):
        name, _, index = value.lower().partition(":")
    elif hasattr(value, "type"):  # a device, which contains a device type
        found, at = _device(value.type), getattr(value, "index", None)
        return torch.device(found.type, at) if found is not None and at is not None and found.type != "cpu" else found
    elif underlying(value) is not value:
        return _device(underlying(value))
    else:  # an enum prints as Type.NVIDIA
        name, index = str(value).lower().rpartition(".")[2], ""
    kind = TORCH_DEVICES.get(name)
    if kind is None or not (index == "" or index.isdecimal()):
        return None
    return torch.device(kind, int(index)) if index and kind != "cpu" else torch.device(kind)


def _number(value: Any) -> Any:
    """Return the number of an int or an enum; any other value as it is."""
    if isinstance(value, (bool, str, torch.dtype)):
        return value
    if isinstance(value, int):
        return int(value)
    inner = getattr(value, "value", None)
    return int(inner) if isinstance(inner, int) else value
