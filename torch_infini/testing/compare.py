"""Comparison with the float64 reference: |actual - expected| <= absolute + relative * |expected|."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .op_info import OpInfo, Sample


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the results of a call as a tuple: a single one alone in it."""
    return value if isinstance(value, tuple) else (value,)


def assert_close(
    actual: Tensor, expected: Tensor, relative: float, absolute: float | Tensor, what: str = "result"
) -> None:
    """Raise AssertionError that reports the worst element unless all are close; NaN and infinity must agree."""
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    got, want = actual.double(), expected.double()
    allowed = absolute + relative * want.abs()
    same = (got == want) | (got.isnan() & want.isnan())
    excess = torch.where(same, -1.0, ((got - want).abs() / allowed).nan_to_num(nan=torch.inf))
    if excess.numel() and excess.max() > 1:
        worst = int(excess.argmax())
        raise AssertionError(
            f"{what}: {int((excess > 1).sum())} of {excess.numel()} elements are off; element {worst} is "
            f"{got.flatten()[worst].item()!r}, expected {want.flatten()[worst].item()!r} "
            f"({excess.max().item():.3g} times the tolerance)"
        )


def rounding_error(dtype: torch.dtype, terms: int, depth: int = 1) -> float:
    """Return the relative difference, in norm, of two computations that differ only in the order of their sums.

    torch and the BLAS below it choose this order by the CPU. A limit taken from one machine's result fails on the next
    one, so this one is derived from the arithmetic. u is half the spacing of the dtype's numbers around 1.

    * A running sum of n products of either sign is rounded n times, each time by at most u of its current value. These
      errors are nearly independent: together they are below sqrt(n) * u of the typical size of such sums.
      Sums are float32 whatever the dtype is; storing a result adds another u, of the dtype.
    * Norms and products with weights of either sign keep relative errors, so d results, each computed from the one
      before, are off by about sqrt(d) of one's error; here by d, because attention and activations enlarge errors a
      little in each layer.

    Args:
        dtype: The dtype of the results, including intermediate ones.
        terms: The length of the longest sum.
        depth: How many products, including those of attention, are computed one after the other.
    """
    of_sums, of_results = (torch.finfo(d).eps / 2 for d in (torch.float32, dtype))
    return depth * (terms**0.5 * of_sums + of_results)


def copied(value: Any) -> Any:
    """Copy a tensor with its strides to separate memory; return anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(
        storage, value.storage_offset(), value.shape, value.stride()
    )


def moved(sample: Sample, device: str | None) -> Sample:
    """Return the sample with its CPU tensors on another device.

    On CUDA they keep their strides, also those of a broadcast view, and share memory where they shared it.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device.type != "cpu":
            return value
        if device is None or torch.device(device).type != "cuda":
            return value.to(device)
        storage = value.untyped_storage()
        there = storages.setdefault(storage.data_ptr(), storage.to(device=torch.device(device)))
        empty = torch.empty(0, dtype=value.dtype, device=device)
        return empty.set_(there, value.storage_offset(), value.size(), value.stride())

    return Sample(sample.name, tuple(map(move, sample.args)), {k: move(v) for k, v in sample.kwargs.items()})


def on_cpu(result: Any) -> Any:
    """Return an op's result in host memory."""
    return tuple(t.cpu() for t in result) if isinstance(result, tuple) else result.cpu()


def call(spec: OpInfo, sample: Sample, function: Callable[..., Any] | None = None) -> Any:
    """Call the op on the sample; return its result, or copies of the arguments that it writes into.

    Calls `function` instead of the op, with the same arguments, if given.
    """
    args = [copied(a) if name in spec.mutates else a for name, a in zip(spec.arguments, sample.args, strict=False)]
    assert not set(spec.mutates) & set(sample.kwargs), f"{spec.name}: what the op writes into must come by position"
    result = (function or spec.op)(*args, **sample.kwargs)
    if not spec.mutates:
        return result
    assert result is None, f"{spec.name} returned {result!r}"
    written = tuple(a for name, a in zip(spec.arguments, args, strict=False) if name in spec.mutates)
    return written if len(written) > 1 else written[0]


def check_against_reference(
    spec: OpInfo, sample: Sample, dtype: torch.dtype, actual: Any, on_cuda: bool = False
) -> None:
    """Raise AssertionError unless `actual` is the expected result for this sample.

    on_cuda: whether a CUDA kernel computed it, on a GPU or emulated.
    """
    slack = spec.cuda_slack if on_cuda else None
    if spec.compare and slack is None:
        spec.compare(actual, sample)
        return
    expected = as_tuple(spec.reference(*sample.args, **sample.kwargs))
    relative, rounding = spec.tolerances[dtype]
    more = 0.0 if slack is None else slack(*expected, *sample.args, **sample.kwargs)
    assert len(as_tuple(actual)) == len(expected)
    for i, (got, want) in enumerate(zip(as_tuple(actual), expected, strict=True)):
        assert_close(got, want, relative, rounding + more, f"{spec.name} ({sample.name}), output {i}")
