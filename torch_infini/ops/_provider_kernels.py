"""The kernels that make a provider compute an op: one per form, registered over the op's kernels.

They keep the op's guarantees: a provider's results are checked against the op's fake, and autograd, version counters
and inference tensors behave as with our kernels (csrc/torch/autograd.h).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _autograd
from ._registry import REGISTRY, OpSpec, check_same_device

# Called with the overload and its arguments before a provider computes; logs the line of INFINI_LOG.
on_call: Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]], None] | None = None


@dataclass(frozen=True)
class Provider:
    """Another implementation of an op, for a type of device.

    Attributes:
        op: The op's name.
        device: The device type, for example "cuda".
        name: The provider's name.
        fn: Takes all arguments of the op's schema, by position, and returns the op's result.
        out: The same with the tensors of the out form as keyword arguments, which it writes; None: results of fn are
            copied.
        dtypes: The supported dtypes of the first floating-point tensor of a call. None: all.
    """

    op: str
    device: str
    name: str
    fn: Callable[..., Any]
    out: Callable[..., Any] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None

    @property
    def spec(self) -> OpSpec:
        return REGISTRY[self.op]

    def __str__(self) -> str:
        return f"infini::{self.op}: provider {self.name!r} on {self.device}"


def overloads(spec: OpSpec) -> Iterator[torch._ops.OpOverload]:
    """Yield the op's forms: functional, out, in place."""
    yield spec.op
    if spec.outputs:
        yield spec.out
    if spec.inplace:
        yield getattr(torch.ops.infini, f"{spec.name}_").default


def lay(op: torch._ops.OpOverload, kernel: Callable[..., Any], key: str, library: torch.library.Library) -> None:
    """Register a kernel over the one of a dispatch key; it lives as long as the library."""
    with warnings.catch_warnings():
        # "Overriding a previously registered kernel" is intended.
        warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
        # Otherwise Dynamo, in a region that it left to Python, would compile the kernel as user code.
        disabled = torch.compiler.disable(kernel)
        library.impl(op._name, disabled, key, with_keyset=True, allow_override=True)


def check_signature(provider: Provider) -> None:
    """Raise TypeError unless the provider's functions accept the arguments that they will be called with."""
    spec = provider.spec
    outs = dict.fromkeys(spec.out_names) if spec.outputs else {}
    for role, function, keywords in (("fn", provider.fn, {}), ("out", provider.out, outs)):
        if function is None and role == "out":
            continue
        wanted = ", ".join((*spec.arguments, *(f"{name}=" for name in keywords)))
        if not callable(function):
            raise TypeError(f"{provider}: {role} must be a function of ({wanted}), got {function!r}")
        try:
            signature = inspect.signature(function)
        except ValueError:
            raise TypeError(
                f"{provider}: {role} must have a signature that Python can read (put a def around it), got {function!r}"
            ) from None
        try:
            signature.bind(*spec.arguments, **keywords)
        except TypeError as error:
            raise TypeError(
                f"{provider}: {role} must take the op's arguments, all by position"
                f"{', and its outputs by keyword' if keywords else ''}, ({wanted}), got {signature}: {error}"
            ) from None


def kernels(provider: Provider) -> Iterator[tuple[torch._ops.OpOverload, Callable[..., Any]]]:
    """Yield a kernel for each form of the op."""
    spec = provider.spec
    for op, run in zip(overloads(spec), (run_mutating if spec.mutates else run_functional, run_out, run_inplace)):
        yield op, _kernel(provider, op, run)


def _kernel(provider: Provider, op: torch._ops.OpOverload, run: Callable[..., Any]) -> Callable[..., Any]:
    spec, defaults = provider.spec, [argument.default_value for argument in op._schema.arguments]

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # The dispatcher omits arguments left at their defaults, and a provider's own defaults may differ.
        args = (*args, *defaults[len(args) : len(spec.arguments)])
        outs = [kwargs[name] for name in spec.out_names] if kwargs else []
        with torch._C.DisableTorchFunction():  # hides this from modes and subclasses that intercept torch's functions
            if on_call is not None:
                on_call(op, args, kwargs)
            check_call(provider, args, outs)
            return run(provider, args, outs)

    return kernel


def run_functional(provider: Provider, args: tuple[Any, ...], outs: list[Tensor]) -> Any:
    results = compute(provider, args)
    for x in args:
        if _autograd.is_followed(x):
            results = tuple(_autograd.without_backward(y, x, provider.op) for y in results)
    return results if len(results) > 1 else results[0]


def run_out(provider: Provider, args: tuple[Any, ...], outs: list[Tensor]) -> Any:
    spec = provider.spec
    refuse_to_write(spec, [*zip(spec.arguments, args), *zip(spec.out_names, outs)], outs)
    for name, out, wanted in zip(spec.out_names, outs, expected(spec, args)):
        _autograd.check_out(spec.name, name, out, wanted)
    if provider.out is None:
        write(spec, outs, compute(provider, args))
    else:
        with torch.no_grad(), device_of(args), counting_writes(outs):
            provider.out(*args, **dict(zip(spec.out_names, outs)))
    return tuple(outs) if len(outs) > 1 else outs[0]


def run_inplace(provider: Provider, args: tuple[Any, ...], outs: list[Tensor]) -> None:
    spec = provider.spec
    assert spec.inplace is not None
    target = args[spec.arguments.index(spec.inplace)]
    refuse_to_write(spec, [*zip(spec.arguments, args)], [target])
    results = compute(provider, args)
    _autograd.check_out(spec.name, spec.inplace, target, results[0])
    write(spec, [target], results)


def run_mutating(provider: Provider, args: tuple[Any, ...], outs: list[Tensor]) -> None:
    spec = provider.spec
    written = [args[spec.arguments.index(name)] for name in spec.mutates]
    written = [tensor for tensor in written if tensor is not None]
    refuse_to_write(spec, [*zip(spec.arguments, args)], written)
    spec.fake(*map(on_meta, args))
    with torch.no_grad(), device_of(args), counting_writes(written):
        result = provider.fn(*args)
    if result is not None:
        raise RuntimeError(f"{provider} must write into its arguments and return None, got {result!r:.200}")


def check_call(provider: Provider, args: tuple[Any, ...], outs: list[Tensor]) -> None:
    """Raise for arguments that no kernel of ours accepts, and for dtypes that the provider does not support."""
    check_same_device(provider.op, [*zip(provider.spec.arguments, args), *zip(provider.spec.out_names, outs)])
    tensors = [value for value in (*args, *outs) if isinstance(value, Tensor)]
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(
            f"infini::{provider.op}: every tensor must be without a tangent, for the op has no forward-mode derivative "
            "(unpack the primal with torch.autograd.forward_ad.unpack_dual), got one with a tangent"
        )
    if provider.dtypes is not None:
        for name, value in zip(provider.spec.arguments, args):
            if isinstance(value, Tensor) and value.is_floating_point():
                if value.dtype not in provider.dtypes:
                    raise RuntimeError(
                        f"{provider} serves {', '.join(map(dtype_name, provider.dtypes))}, got {name} of "
                        f"{dtype_name(value.dtype)} (use_provider({provider.op!r}, 'infini') goes back to our kernels)"
                    )
                break


def refuse_to_write(spec: OpSpec, named: list[tuple[str, Any]], written: list[Tensor]) -> None:
    _autograd.refuse_gradient(spec.name, named)
    if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in written):
        raise RuntimeError(  # torch's own message
            f"infini::{spec.name}: Inplace update to inference tensor outside InferenceMode is not allowed"
        )


@contextmanager
def counting_writes(written: list[Tensor]) -> Iterator[None]:
    """Increment the version counters of tensors that the body writes, unless it has done so."""
    before = [(tensor, tensor._version) for tensor in written if not tensor.is_inference()]
    yield
    torch.autograd.graph.increment_version([tensor for tensor, version in before if tensor._version == version])


def write(spec: OpSpec, outs: list[Tensor], results: tuple[Tensor, ...]) -> None:
    with torch.no_grad():
        for out, result in zip(outs, results):
            out.copy_(result)


def compute(provider: Provider, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Call the provider's function and check its result against the op's fake."""
    wanted = expected(provider.spec, args)
    with torch.no_grad(), device_of(args):
        result = provider.fn(*args)
    results = (result,) if len(wanted) == 1 else result
    if not isinstance(results, (tuple, list)) or len(results) != len(wanted):
        raise RuntimeError(f"{provider} must return a tuple of {len(wanted)} tensors, got {result!r:.200}")
    device = next(value.device for value in args if isinstance(value, Tensor))
    taken = {value.untyped_storage()._cdata for value in args if isinstance(value, Tensor)}
    for index, (value, like) in enumerate(zip(results, wanted)):
        which = f"output {index}" if len(wanted) > 1 else "its result"
        if not isinstance(value, Tensor):
            raise RuntimeError(f"{provider}: {which} must be a tensor, got {value!r:.200}")
        for rule, want, got in (
            ("be on", device, value.device),
            ("be", dtype_name(like.dtype), dtype_name(value.dtype)),
            ("have shape", list(like.shape), list(value.shape)),
        ):
            if want != got:
                raise RuntimeError(f"{provider}: {which} must {rule} {want}, as the op's is, got {got}")
        if not value.is_contiguous():
            raise RuntimeError(
                f"{provider}: {which} must be contiguous, as the op's is, got strides {list(value.stride())}"
            )
        if value.requires_grad:
            raise RuntimeError(f"{provider}: {which} must be detached, as the op has no backward, got a gradient")
        storage = value.untyped_storage()._cdata
        if storage in taken:
            raise RuntimeError(
                f"{provider}: {which} must be in memory of its own, got that of an argument or of another output"
            )
        taken.add(storage)
    return tuple(results)


def expected(spec: OpSpec, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return meta tensors with the results' shapes and dtypes, from the op's fake."""
    result = spec.fake(*map(on_meta, args))
    return result if isinstance(result, tuple) else (result,)


def on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def device_of(args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Make the device of the first CUDA tensor current, as our kernels do."""
    for value in args:
        if isinstance(value, Tensor) and value.is_cuda:
            return torch.cuda.device(value.device)
    return nullcontext()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
