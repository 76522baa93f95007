"""Autograd, forward and backward, for ops without a derivative: an error instead of a missing gradient.

C++ (csrc/torch/autograd.h) handles eager calls and calls `_without_backward` only if an input requires a gradient.
While a compiler traces, the Python dispatcher uses the kernels of `trace`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.autograd import forward_ad

from .._core.library import SEES_AUTOGRAD

if TYPE_CHECKING:
    from ._registry import OpSpec

# torch's own kernel for ops without a derivative stays registered, because torch.func and compilers rely on it. It
# warns in backward before ours raises. A torch without the functions that csrc/torch/autograd_torch.cpp needs only
# warns.
warnings.filterwarnings(
    "ignore" if SEES_AUTOGRAD else "error",
    message=r"infini::\w+: an autograd kernel was not registered",
    category=UserWarning,
)


class _WithoutBackward(torch.autograd.Function):
    """The identity of y, as a node of the graph between y and x whose backward raises."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, op: str) -> Tensor:
        ctx.shape, ctx.dtype, ctx.op = x.shape, x.dtype, op
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # An op, so that compiled code raises when its backward runs, not when it is compiled.
        return grad, torch.ops.infini._no_backward(grad, ctx.shape, ctx.dtype, ctx.op), None


def without_backward(y: Tensor, x: Tensor, op: str) -> Tensor:
    """Return y with a backward to x that raises; y itself if it cannot have a gradient."""
    with torch._C.DisableTorchFunction():  # hides this from modes that intercept torch's functions
        if not y.is_floating_point():
            return y
        # Skip the check of Function.apply for torch.func's transforms, which have already unwrapped y and x.
        apply: Callable[..., Tensor] = super(torch.autograd.Function, _WithoutBackward).apply
        return apply(y, x, op)


def no_backward(grad: Tensor, shape: Any, dtype: torch.dtype, op: str) -> Tensor:
    raise RuntimeError(
        f"infini::{op} has no backward: call it under torch.no_grad() or on detached tensors, or use plain torch where "
        "gradients are needed"
    )


def define(library: torch.library.Library) -> None:
    """Define the two ops that this module needs."""
    library.define("_without_backward(Tensor y, Tensor x, str op) -> Tensor")
    library.impl("_without_backward", without_backward, "CompositeImplicitAutograd")
    library.define("_no_backward(Tensor grad, SymInt[] shape, ScalarType dtype, str op) -> Tensor")
    library.impl("_no_backward", no_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "infini::_no_backward", lambda grad, shape, dtype, op: grad.new_empty(shape, dtype=dtype), lib=library
    )


def is_followed(value: Any) -> bool:
    """Return whether autograd tracks an argument."""
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def refuse_gradient(op: str, named: Iterable[tuple[str, Any]]) -> None:
    """Raise if autograd tracks an argument, for forms that write."""
    for name, value in named:
        if is_followed(value):
            raise RuntimeError(
                f"infini::{op}: every tensor must be detached, for the op writes into its arguments and has "
                f"no backward (call it under torch.no_grad()), got {name} that requires a gradient"
            )


def trace(spec: OpSpec) -> None:
    """Make compilers see that no gradient flows back from the results of the op's functional form.

    The Python dispatcher, which is active only during tracing, uses this kernel.
    """
    op = spec.op

    def traced(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            result = op(*args, **kwargs)
        followed = [value for value in (*args, *kwargs.values()) if is_followed(value)]
        results = result if isinstance(result, tuple) else (result,)
        for x in followed:
            results = tuple(without_backward(y, x, spec.name) for y in results)
        return results if isinstance(result, tuple) else results[0]

    for key in (DispatchKey.AutogradCPU, DispatchKey.AutogradCUDA, DispatchKey.AutogradPrivateUse1):
        op.py_impl(key)(traced)


def trace_out(spec: OpSpec) -> None:
    """Make compilers see the out form as the functional form and a copy, which they elide if they can.

    torch cannot functionalize one of our ops whose result is one of its arguments.
    """

    def decomposed(*args: Any, **kwargs: Any) -> Any:
        outs = [kwargs.pop(name) for name in spec.out_names]
        result = spec.op(*args, **kwargs)
        for name, out, value in zip(spec.out_names, outs, result if isinstance(result, tuple) else (result,)):
            check_out(spec.name, name, out, value)
            out.copy_(value)
        return tuple(outs) if isinstance(result, tuple) else outs[0]

    spec.out.py_impl(DispatchKey.CompositeImplicitAutograd)(decomposed)


def check_out(op: str, name: str, out: Tensor, value: Tensor) -> None:
    """Raise unless `out` can hold `value` without conversion."""
    if out.shape != value.shape:
        raise RuntimeError(f"infini::{op}: {name} must have shape {list(value.shape)}, got {list(out.shape)}")
    if out.dtype != value.dtype:
        wanted, came = (str(t.dtype).removeprefix("torch.") for t in (value, out))
        raise RuntimeError(f"infini::{op}: {name} must be {wanted}, got {came}")


def refuse_transforms(spec: OpSpec, op: Any) -> Callable[..., Any]:
    """Make a kernel for tensors that torch.func.grad, jvp and similar transforms track: raise if they track one.

    Only their wrappers know of gradients and tangents; C++ sees the tensors inside, which do not.
    """
    onward = torch.library.get_kernel(op, "FuncTorchDynamicLayerFrontMode")

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        for name, value in [*zip(spec.arguments, args, strict=False), *kwargs.items()]:
            if is_followed(value) or has_tangent(value):
                raise RuntimeError(
                    f"infini::{spec.name} has no derivative: torch.func's transforms must not follow its arguments "
                    f"(detach them), got {name} that one follows"
                )
        return onward.call_boxed(keys, *args, **kwargs)

    return kernel


def has_tangent(value: Any) -> bool:
    """Return whether an argument has a tangent that a transform tracks."""
    tracked = isinstance(value, Tensor) and torch._C._functorch.is_gradtrackingtensor(value)
    return tracked and forward_ad.unpack_dual(value, level=0).tangent is not None


def refuse_negated(spec: OpSpec, op: Any, written: list[str]) -> Callable[..., Any]:
    """Make a kernel for lazily negated tensors: torch's own resolves them only in ops that return what they write."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        named = [*zip(spec.arguments, args, strict=False), *kwargs.items()]
        for name, value in named:
            if name in written and isinstance(value, Tensor) and value.is_neg():
                raise RuntimeError(
                    f"infini::{spec.name}: {name} must hold its own values, for the op writes into it, got a lazily "
                    "negated view (call .resolve_neg() on it)"
                )
        resolved = [value.resolve_neg() if isinstance(value, Tensor) else value for value in args]
        return op(*resolved, **{k: v.resolve_neg() if isinstance(v, Tensor) else v for k, v in kwargs.items()})

    return kernel
