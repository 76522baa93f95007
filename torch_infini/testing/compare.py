"""Comparison with the float64 reference: |actual - expected| <= absolute + relative * |expected|, and what differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import OpSpec, Sample


def as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def assert_close(actual: Tensor, expected: Tensor, relative: float, absolute: float, what: str = "result") -> None:
    """Raise AssertionError that shows the worst element unless all are close; NaN and infinity must agree."""
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


def copied(value: Any) -> Any:
    """A tensor with its own memory and the strides of `value`; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(
        storage, value.storage_offset(), value.shape, value.stride()
    )


def moved(sample: Sample, device: str | None) -> Sample:
    """The sample with its CPU tensors on another device."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and value.device.type == "cpu" else value

    return Sample(sample.name, tuple(map(move, sample.args)), {k: move(v) for k, v in sample.kwargs.items()})


def on_cpu(result: Any) -> Any:
    """An op's result, in host memory."""
    return tuple(t.cpu() for t in result) if isinstance(result, tuple) else result.cpu()


def call(spec: OpSpec, sample: Sample, function: Callable[..., Any] | None = None) -> Any:
    """What the op makes of the sample: its result, or copies of the arguments it writes into.

    `function` is called instead of the op, with the same arguments.
    """
    args = [copied(a) if name in spec.mutates else a for name, a in zip(spec.arguments, sample.args, strict=False)]
    assert not set(spec.mutates) & set(sample.kwargs), f"{spec.name}: what the op writes into must come by position"
    result = (function or spec.op)(*args, **sample.kwargs)
    if not spec.mutates:
        return result
    assert result is None, f"{spec.name} returned {result!r}"
    written = tuple(a for name, a in zip(spec.arguments, args, strict=False) if name in spec.mutates)
    return written if len(written) > 1 else written[0]


def check_against_reference(spec: OpSpec, sample: Sample, dtype: torch.dtype, actual: Any) -> None:
    """Raise AssertionError unless `actual` is what the op's description says for this sample."""
    if spec.compare:
        spec.compare(actual, sample)
        return
    expected = as_tuple(spec.reference(*sample.args, **sample.kwargs))
    relative, absolute = spec.tolerances[dtype]
    assert len(as_tuple(actual)) == len(expected)
    for i, (got, want) in enumerate(zip(as_tuple(actual), expected, strict=True)):
        assert_close(got, want, relative, absolute, f"{spec.name} ({sample.name}), output {i}")


def ulps(actual: Tensor, exact: Tensor) -> Tensor:
    """The error of float32 values in units in the last place of the exact ones, given in float64; NaN for a NaN."""
    rounded = exact.to(torch.float32).abs()
    unit = rounded.nextafter(torch.tensor(torch.inf)).double() - rounded.double()
    error = (actual.double() - exact).abs() / unit
    return torch.where(actual.double() == exact, 0.0, error)  # infinities too
