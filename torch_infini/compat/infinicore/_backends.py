"""backend_of(): which kernel library computes a function of this package."""

from __future__ import annotations

import sys
from difflib import get_close_matches

import torch

from . import utils
from ._rules import COPIED, FLOATS, RULES, WITH_DOUBLE
from .device import device as Device
from .dtype import dtype as DataType

_F = "nn.functional."
# The ops of the C++ front end and their dtypes.
_OURS = {
    "add": (*WITH_DOUBLE, torch.int32, torch.int64),
    "add_rms_norm": WITH_DOUBLE,
    "add_rms_norm_": WITH_DOUBLE,
    "attention": FLOATS,
    "matmul": FLOATS,
    "mul": WITH_DOUBLE,
    "paged_attention": FLOATS,
    "paged_attention_prefill": FLOATS,
    "paged_caching": FLOATS,
    "rearrange": COPIED,
    f"{_F}causal_softmax": FLOATS,
    f"{_F}embedding": FLOATS,
    f"{_F}linear": FLOATS,
    f"{_F}random_sample": WITH_DOUBLE,
    f"{_F}rms_norm": WITH_DOUBLE,
    f"{_F}rope": WITH_DOUBLE,
    f"{_F}silu": WITH_DOUBLE,
    f"{_F}swiglu": WITH_DOUBLE,
}
_PACKAGE = __package__ or ""


def backend_of(name: str, dtype: DataType | str = "float32", device: Device | str = "cpu") -> str:
    """Return the backend of a function for a dtype: "infini", our kernels, or "torch", torch's own.

    Args:
        name: As it is called, without "infinicore.": "abs", "nn.functional.conv2d". Names that compute nothing, such as
            "empty", "device" or "nn.Linear", are "infini" too.
        dtype: The tensors' dtype. A function's docstring says which of its calls our kernels serve; torch computes
            others.
        device: The tensors' device.

    Raises:
        ValueError: For an unknown name (the message names the nearest), and for an unsupported dtype or device.
    """
    function = "infinicore.backend_of"
    name = name.removeprefix("infinicore.")
    theirs = utils.to_torch_dtype(dtype) if isinstance(dtype, DataType) else getattr(torch, dtype, None)
    if not isinstance(theirs, torch.dtype):
        raise ValueError(f"{function}: dtype must be an infinicore.dtype or the name of one, got {dtype!r}")
    kind = Device(device).type
    from_torch = [*sys.modules[f"{_PACKAGE}._aten"].__all__[1:]]
    from_torch += [_F + one for one in sys.modules[f"{_PACKAGE}._aten_functional"].__all__]
    if name in from_torch:
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"{function}: {name} needs a CPU or a CUDA device, got {device}")
        return "infini" if name in RULES and theirs in RULES[name].dtypes else "torch"
    if name in _OURS:
        if theirs not in _OURS[name]:
            dtypes = ", ".join(str(one).removeprefix("torch.") for one in _OURS[name])
            raise ValueError(f"{function}: {name} takes {dtypes}, got {dtype}")
        return "infini"
    value: object = sys.modules[_PACKAGE]
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is None or name.startswith("_"):
        near = get_close_matches(name, sorted({*from_torch, *_OURS, *sys.modules[_PACKAGE].__all__}), 3, 0.5)
        hint = f": did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"{function}: there is no infinicore.{name}{hint}")
    return "infini"
