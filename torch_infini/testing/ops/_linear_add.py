"""LinearAdd, an operator of the C ABI only: the samples and error cases of Linear, with a residual.

tests/test_linear.py compares its bits with those of Linear followed by Add.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample, Described, as_tensor
from .linear import C_OPS as _LINEAR
from .linear import cuda_slack, inputs
from .linear import reference as product

(LINEAR,) = _LINEAR
_Laid = Tensor | Described


def beside(out: _Laid, seed: int = 1) -> _Laid:
    """Make other numbers, of a spread of 1, with the layout of `out`, in separate memory."""
    base = out.base if isinstance(out, Described) else out
    size = base.untyped_storage().nbytes() // base.element_size()
    memory = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(base.dtype)
    values = memory.as_strided(base.shape, base.stride(), base.storage_offset())
    return Described(values, out.shape, out.strides, out.offset) if isinstance(out, Described) else values


def reference(out: Tensor, residual: Tensor, **args: Any) -> dict[str, Tensor]:
    return {"out": product(**args).to(out.dtype).double() + residual.double()}


def with_residual(sample: CSample, name: str, out: _Laid, residual: _Laid) -> CSample:
    """Make a sample of Linear with a residual; the error of the first rounding is added to its tolerance."""
    args = {key: as_tensor(value) for key, value in sample.args.items() if key != "out" and value is not None}
    sums = product(**args)
    relative, absolute = sample.tolerance or LINEAR.tolerances[as_tensor(out).dtype]
    largest = float(sums.abs().max()) if sums.numel() else 0.0
    return CSample(name, {**sample.args, "out": out, "residual": residual}, (relative, absolute + relative * largest))


def samples() -> Iterator[CSample]:
    for sample in LINEAR.samples():
        out = sample.args["out"]
        yield with_residual(sample, sample.name, out, beside(out))
        in_place = beside(out, 2)
        yield with_residual(sample, f"{sample.name}, in place", in_place, in_place)


def errors() -> Iterator[CErrorCase]:
    for case in LINEAR.errors():
        args = {**case.args, "residual": beside(case.args["out"])}
        message = case.message.replace("infini::linear:", "infini::linear_add:")
        yield CErrorCase(case.name, args, case.status, message, case.at, case.of_values)
    x, weight, bias = inputs(torch.float32, 2, k=16, n=8, bias=True)
    valid = {"out": torch.zeros(2, 8), "x": x, "weight": weight, "bias": bias}
    wide = torch.zeros(2, 9)
    for name, residual, status, rule in (
        ("dtype", torch.zeros(2, 8).half(), "BAD_TENSOR_DTYPE", "have the dtype of out, float32, got float16"),
        ("shape", torch.zeros(8), "BAD_TENSOR_SHAPE", "have the shape of out, [2, 8], got [8]"),
        ("strides", wide[:, :8], "BAD_TENSOR_STRIDES", "have the strides of out, [8, 1], got strides [9, 1]"),
        (
            "broadcast",
            wide[:1, :8].expand(2, 8),
            "BAD_TENSOR_STRIDES",
            "have the strides of out, [8, 1], got strides [0, 1]",
        ),
    ):
        message = f"infini::linear_add: residual must {rule}"
        yield CErrorCase(f"residual's {name}", {**valid, "residual": residual}, status, message)
    memory = torch.zeros(24)
    yield CErrorCase(
        "residual overlaps out",
        {**valid, "out": memory[:16].view(2, 8), "residual": memory[8:].view(2, 8)},
        "BAD_PARAM",
        "infini::linear_add: out must be residual itself or share no memory with it, got one whose span of memory "
        "overlaps it",
        at="run",
    )


def slack(expected: dict[str, Tensor], args: dict[str, Any]) -> Tensor:
    sums = product(args["x"], args["weight"], args["bias"])
    return cuda_slack(sums, args["x"], args["weight"], args["bias"])


C_OPS = [COp("LinearAdd", ["out"], reference, samples, errors, tolerances=LINEAR.tolerances, cuda_slack=slack)]
