"""fused_linear beyond the generic tests: each part has the bits of linear with its weight."""

from __future__ import annotations

import pytest
import torch

from torch_infini._core.products import aten_from_set_to
from torch_infini.testing import cpu_capability_set_to, kernel_levels, relayout, threads_set_to
from torch_infini.testing.ops import OP_INFOS
from torch_infini.testing.ops.fused_linear import inputs

FUSED, LINEAR = OP_INFOS["fused_linear"].op, OP_INFOS["linear"].op
ROWS = (*range(1, 10), 40, 200)


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("dtype", OP_INFOS["linear"].dtypes, ids=str)
@pytest.mark.parametrize(
    ("k", "n", "biases"),
    [(700, (101, 24, 13), "abc"), (3001, (53, 7), "b"), (256, (5, 90, 48), ""), (64, (0, 40, 9), "ac")],
)
def test_parts_have_the_bits_of_linear(
    k: int, n: tuple[int, ...], biases: str, dtype: torch.dtype, capability: str
) -> None:
    x, a, b, c, *bias = inputs(dtype, max(ROWS), k=k, n=n, biases=biases)
    with cpu_capability_set_to(capability), aten_from_set_to(None):
        for rows in ROWS:
            parts = [LINEAR(x[:rows], w, v) for w, v in zip((a, b, c), bias, strict=True) if w is not None]
            for threads in (1, 2, 3):
                with threads_set_to(threads):
                    y = FUSED(x[:rows], a, b, c, *bias)
                assert torch.equal(y, torch.cat(parts, -1)), (rows, threads)


def test_the_result_is_all_that_is_allocated() -> None:
    """Where the kernel computes; ATen may allocate memory."""
    args = inputs(torch.bfloat16, 9, k=300, n=(20, 30, 40), biases="abc")
    FUSED(*args)
    with torch.profiler.profile(profile_memory=True) as profile:
        y = FUSED(*args)
    sizes = [e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0]
    assert sizes == [y.nbytes]


@pytest.mark.parametrize("rows", [3, 130])
def test_any_layout(rows: int) -> None:
    """Weights and x with other strides, a result that is not contiguous: the bits stay."""
    x, a, b, c, *bias = inputs(torch.bfloat16, 2, rows, k=100, n=(50, 8, 9), biases="ac")
    want = FUSED(x, a, b, c, *bias)
    for layout in ("strided rows", "misaligned", "permuted rows"):
        moved = [relayout(layout, t) for t in (x, a, b, c, *bias)]
        assert torch.equal(FUSED(*moved), want), layout
    for out in (relayout("strided rows", want * 0), torch.zeros(rows, 2, 67, dtype=x.dtype).transpose(0, 1)):
        assert OP_INFOS["fused_linear"].out(x, a, b, c, *bias, out=out) is out
        assert torch.equal(out, want)
