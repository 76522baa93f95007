"""rope beyond the generic tests: outputs so large that they are stored past the cache.

The in-place form never is: its bits are the reference.
"""

from __future__ import annotations

import pytest
import torch

from torch_infini.testing import cpu_capability_set_to, kernel_levels


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_output(dtype: torch.dtype, interleaved: bool) -> None:
    heads, columns, half = 9, 160, 64  # 32 columns pass through
    tokens = 65 * 2**20 // (heads * columns * dtype.itemsize)
    x = torch.randn(tokens, heads, columns).to(dtype)
    angle = torch.arange(tokens).unsqueeze(-1) * 10000.0 ** -(torch.arange(half) / half)
    cos, sin = angle.cos(), angle.sin()
    memory = torch.empty(x.numel() + 64, dtype=dtype)
    for capability in kernel_levels():
        with cpu_capability_set_to(capability):
            expected = x.clone()
            torch.ops.infini.rope_(expected, cos, sin, None, interleaved)
            for shift in (0, 1):  # the second is aligned for no vector store
                out = memory[shift : shift + x.numel()].view(x.shape).fill_(55)
                torch.ops.infini.rope.out(x, cos, sin, None, interleaved, out=out)
                assert torch.equal(out, expected), f"{capability}, {shift} elements behind the start"
