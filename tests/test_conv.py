"""conv under the conventions of torch.nn.functional: what its users write, and where out may lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from support.rounding import assert_same_but_rounding
from torch_infini.ops import conv

X, WEIGHT, BIAS = torch.randn(2, 3, 11, 12), torch.randn(4, 3, 3, 5), torch.randn(4)


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"stride": 2},
        {"stride": (2, 3), "padding": [1, 0]},
        {"padding": 1, "dilation": (1, 2)},
        {"padding": "valid", "stride": 2},
        {"padding": "same"},
        {"padding": "same", "dilation": [2, 1]},
    ],
    ids=str,
)
def test_parameters_are_those_of_torch(parameters: dict[str, Any]) -> None:
    expected = F.conv2d(X, WEIGHT, BIAS, **parameters)
    assert_same_but_rounding(conv(X, WEIGHT, BIAS, **parameters), expected, terms=WEIGHT[0].numel())
    assert_same_but_rounding(conv(X[0], WEIGHT, BIAS, **parameters), expected[0], terms=WEIGHT[0].numel())


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"padding": "full"}, 'padding must be numbers, "valid" or "same", got "full"'),
        ({"padding": "same", "stride": 2}, 'padding must not be "same" where stride is not 1, got stride 2'),
        (
            {"padding": "same", "weight": WEIGHT[:, :, :2]},
            'padding must be as much before as after x, got "same" for [1, 4] zeros in all',
        ),
    ],
    ids=["an unknown name", "a stride", "an even kernel"],
)
def test_named_padding_that_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        conv(X, **{"weight": WEIGHT, **parameters})
    assert str(caught.value) == f"infini::conv: {words}"


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (3, 2, 1, 0)], ids=str)
def test_out_of_any_strides(order: tuple[int, ...]) -> None:
    """Whether the product is written where it belongs, or copied there."""
    expected = conv(X, WEIGHT, BIAS)
    back = [order.index(dim) for dim in range(4)]
    out = torch.full([expected.shape[dim] for dim in order], torch.nan).permute(back)
    assert conv(X, WEIGHT, BIAS, out=out) is out
    assert torch.equal(out, expected)


def test_symbolic_sizes_and_parameters() -> None:
    """torch.compile may hand over numbers as symbols; one graph serves several sizes."""
    graphs = CompileCounter()
    compiled = torch.compile(
        lambda x, stride, padding: conv(x, WEIGHT, BIAS, stride, [padding, 1]),
        fullgraph=True,
        dynamic=True,
        backend=graphs,
    )
    for size in (11, 12, 17):
        x = torch.randn(2, 3, size, size + 1)
        assert torch.equal(compiled(x, 2, 3), conv(x, WEIGHT, BIAS, 2, [3, 1]))
    assert graphs.frame_count == 1
