"""Comparison with another computation of the same formula, whose sums may be added in another order: what rounding may
make of results, and whether it may decide which token is the likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_infini.testing.compare import assert_close, rounding_error


def rounding_limit(expected: Tensor, terms: int, depth: int = 1) -> float:
    """How far any element may be off, where the results as a whole are off by `rounding_error`.

    Relative to the root mean square of the tensor: the error of an element that cancels to nearly 0 is no smaller than
    the others'. Zeros do not count, which are exact: the gradient of a row that was not used. Both sides are off, and
    the element that is off most decides: of a million normal errors the largest is 5 standard deviations, of their
    differences 5 * sqrt(2), which is 7.
    """
    values = expected.detach().double()
    values = values[values.isfinite() & (values != 0)]
    size = float(values.square().mean().sqrt()) if values.numel() else 0.0
    return 7 * rounding_error(expected.dtype, terms, depth) * size


def sums_of(config: Any) -> tuple[int, int]:
    """terms and depth of a model of transformers: k, scores, values, o, gate, down in each layer, and the head."""
    return max(config.hidden_size, config.intermediate_size), 6 * config.num_hidden_layers + 1


def assert_same_but_rounding(
    actual: Tensor, expected: Tensor, terms: int, depth: int = 1, what: str = "result"
) -> None:
    """Raise AssertionError unless the tensors are within `rounding_limit`; NaN and infinity must agree."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert_close(actual.detach(), expected.detach(), 0, rounding_limit(expected, terms, depth), what)


def assert_likeliest(tokens: Tensor, logits: Tensor, terms: int, depth: int) -> None:
    """Raise AssertionError unless each token [...] is the likeliest by its logits [..., vocabulary].

    Or one of several that rounding does not tell apart: there another order of sums may choose another, and goes on
    from it, so that tokens of two computations cannot be compared one by one.
    """
    behind = logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]
    limit = 2 * rounding_limit(logits, terms, depth)  # both logits may be off
    assert (behind <= limit).all(), f"{int((behind > limit).sum())} of {behind.numel()} tokens are not the likeliest"


def assert_clear(scores: Sequence[Tensor], terms: int, depth: int) -> None:
    """Raise AssertionError if the likeliest token of any row of any step's scores [rows, vocabulary] is not certain.

    Where rounding alone might decide, tokens may differ between CPUs, and a test that compares them needs other
    weights: another seed.
    """
    for step, logits in enumerate(scores):
        first, second = logits.topk(2, -1).values.unbind(-1)
        gap, limit = float((first - second).min()), 2 * rounding_limit(logits, terms, depth)
        assert gap > limit, f"step {step}: the likeliest token leads by {gap:.2g}, rounding may be {limit:.2g}"


def greedy_tokens(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    """transformers' generate without sampling, whose tokens must be the same on every CPU: see `assert_clear`."""
    values = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, **kwargs}
    made = model.generate(ids, **values)
    assert_clear(made.scores, *sums_of(model.config))
    return made.sequences


def ulps(actual: Tensor, exact: Tensor) -> Tensor:
    """The error of float32 values in units in the last place of the exact ones, given in float64; NaN for a NaN."""
    rounded = exact.to(torch.float32).abs()
    unit = rounded.nextafter(torch.tensor(torch.inf)).double() - rounded.double()
    error = (actual.double() - exact).abs() / unit
    return torch.where(actual.double() == exact, 0.0, error)  # infinities too
