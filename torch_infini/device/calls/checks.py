"""Checks of the everyday calls: the same code on device infini and on the CPU must give the same tensors.

If the CPU backs infini, equal means equal bits and strides; with CUDA, torch.testing's tolerances apply.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from .. import backing

DEVICE = "infini"


class CallError(AssertionError):
    """Raised if a result is not the CPU's; not an assert statement, because `python -O` removes those."""


class ExampleCall(NamedTuple):
    """An everyday call; the first line of its docstring describes it.

    The function raises if the device fails, and returns a sentence if another library does not support the device.
    """

    area: str
    name: str
    function: Callable[[], str | None]

    @property
    def summary(self) -> str:
        return (self.function.__doc__ or "").partition("\n")[0]


CALLS: dict[str, ExampleCall] = {}


def everyday(area: str) -> Callable[[Callable[[], str | None]], Callable[[], str | None]]:
    """Return a decorator that adds a function to CALLS; it runs with a fixed seed."""

    def add(function: Callable[[], str | None]) -> Callable[[], str | None]:
        @functools.wraps(function)
        def seeded() -> str | None:
            torch.manual_seed(0)
            return function()

        if function.__name__ in CALLS:
            raise ValueError(f"there are two everyday calls named {function.__name__}")
        CALLS[function.__name__] = ExampleCall(area, function.__name__, seeded)
        return seeded

    return add


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise CallError(sentence)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor of the elements' bytes, so that NaNs and the signs of zeros are compared too."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def same_tensor(got: torch.Tensor, want: torch.Tensor, exact: bool = True) -> None:
    """Require a tensor on infini with the dtype, shape and elements of one on the CPU."""
    require(got.device.type == DEVICE, f"the result must be on infini, got {got.device}")
    require(got.dtype == want.dtype, f"the dtype must be {want.dtype}, got {got.dtype}")
    require(got.shape == want.shape, f"the shape must be {list(want.shape)}, got {list(got.shape)}")
    if backing() != "cpu" or not exact:
        torch.testing.assert_close(got.cpu(), want, equal_nan=True)
        return
    require(got.stride() == want.stride(), f"the strides must be {want.stride()}, got {got.stride()}")
    if not torch.equal(bits(got), bits(want)):
        raise CallError(f"the elements must be the CPU's, {want.flatten()[:8]}, got {got.cpu().flatten()[:8]}")


def same(got: Any, want: Any, exact: bool = True) -> None:
    """Require equal trees: tensors by `same_tensor`, everything else by ==."""
    got_leaves, got_form = pytree.tree_flatten(got)
    want_leaves, want_form = pytree.tree_flatten(want)
    require(got_form == want_form, f"the result must be a {want_form}, got a {got_form}")
    for one, other in zip(got_leaves, want_leaves, strict=True):
        if isinstance(other, torch.Tensor):
            require(isinstance(one, torch.Tensor), f"a tensor must come, got {one!r}")
            same_tensor(one, other, exact)
        else:
            require(one == other, f"{other!r} must come, got {one!r}")


def on_both(function: Callable[[str], Any], exact: bool = True) -> None:
    """Require the same tree of tensors from the function on infini and on the CPU, each after the same seed."""
    results = []
    for device in (DEVICE, "cpu"):
        torch.manual_seed(0)
        results.append(function(device))
    same(results[0], results[1], exact)


def refused(kind: type[Exception], text: str, function: Callable[[], Any]) -> None:
    """Require an exception of this type whose message contains this text."""
    try:
        function()
    except kind as error:
        require(text in str(error), f"the message must have {text!r}, got {error}")
    else:
        raise CallError(f"{kind.__name__} must come, with {text!r}: nothing came")


def data(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Return a CPU tensor with the same elements at every call: normal, or small integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(*shape, generator=generator, dtype=wide).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
