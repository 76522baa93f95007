"""What the tests of the C ops share: copies of their arguments, and comparison with the float64 reference."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_infini.testing.c_ops import COp, CSample, Described, as_tensor, memory_of
from torch_infini.testing.compare import assert_close


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
