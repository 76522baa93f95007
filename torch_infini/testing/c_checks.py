"""What the tests of the C ops share: copies of their arguments, and comparison with the float64 reference."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .c_ops import COp, CSample, Described
from .compare import assert_close


def memory_of(tensor: Tensor) -> Tensor:
    """All bytes of the tensor's storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def clone(args: Mapping[str, Any], device: str | torch.device | None = None) -> dict[str, Any]:
    """Copies of all tensors, strides kept, on `device` if given; what shares a tensor or memory shares its copy."""
    copies: dict[int, Any] = {}
    memory: dict[int, torch.UntypedStorage] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Described):
            return Described(copy(value.base), value.shape, value.strides, value.offset, value.dtype)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            storage, place = value.untyped_storage(), torch.device(device or value.device)
            if storage.data_ptr() not in memory:
                memory[storage.data_ptr()] = memory_of(value).to(place, copy=True).untyped_storage()
            copies[id(value)] = torch.empty(0, dtype=value.dtype, device=place).set_(
                memory[storage.data_ptr()], value.storage_offset(), value.shape, value.stride()
            )
        return copies[id(value)]

    return {key: copy(value) for key, value in args.items()}


def overwrite(args: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Give the tensors of `args` the bytes of those of `values`, which are laid out alike; done on return."""
    for key, value in args.items():
        to, source = (v.base if isinstance(v, Described) else v for v in (value, values[key]))
        if isinstance(to, Tensor):
            layouts = [(t.shape, t.stride(), t.dtype, t.storage_offset()) for t in (to, source)]
            assert layouts[0] == layouts[1], key
            memory_of(to).copy_(memory_of(source))
            if to.is_cuda:
                torch.cuda.synchronize(to.device)


def as_tensor(value: Tensor | Described) -> Tensor:
    """What a descriptor with strides that torch does not know (negative ones) shows, copied element by element."""
    if isinstance(value, Tensor):
        return value
    index = torch.full(value.shape, value.offset, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(value.shape, value.strides, strict=True)):
        index += (torch.arange(size) * stride).view([-1 if d == dim else 1 for d in range(len(value.shape))])
    return value.base.reshape(-1)[index]


def bits(value: Tensor | Described) -> Tensor:
    return as_tensor(value).contiguous().reshape(-1).view(torch.uint8)


def check(op: COp, sample: CSample, before: dict[str, Any], after: dict[str, Any], on_cuda: bool = False) -> None:
    visible: dict[str, Any] = {key: as_tensor(v) if isinstance(v, Described) else v for key, v in before.items()}
    outputs = {key: as_tensor(after[key]) for key in op.outputs if after[key] is not None}
    slack = op.cuda_slack if on_cuda else None
    if op.compare is not None and slack is None:
        op.compare(CSample(sample.name, visible, sample.tolerance), outputs)
        return
    floats = {a.name for function in (op.create, op.run) for a in function.arguments if a.type == "float"}
    # The reference sees the parameters as the C ABI rounds them.
    rounded = {key: ctypes.c_float(visible[key]).value for key in floats & visible.keys()}
    expected = op.reference(**visible | rounded)
    assert expected.keys() == outputs.keys()
    for key, actual in outputs.items():
        want = expected[key]
        where = f"{sample.name}: {key}"
        assert actual.shape == want.shape, where
        if not actual.dtype.is_floating_point:
            assert torch.equal(actual, want.to(actual.dtype)), where
            continue
        rtol, atol = sample.tolerance or op.tolerances.get(actual.dtype, (0, 0))
        allowed = 0.0 if slack is None else slack(expected, visible)
        more = allowed.get(key, 0.0) if isinstance(allowed, Mapping) else allowed
        assert_close(actual, want, rtol, atol + more, where)


def first_sample(op: COp) -> CSample:
    """One with memory behind every tensor."""
    return next(s for s in op.samples() if all(v.numel() for v in s.args.values() if isinstance(v, Tensor)))
