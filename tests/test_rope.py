"""rope beyond the generic tests: outputs so large that they are stored past the cache; unsigned positions.

The in-place form is never stored so: its bits are the reference.
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


@pytest.mark.parametrize("unsigned", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_positions(unsigned: torch.dtype) -> None:
    x, (cos, sin), positions = torch.randn(3, 2, 8), torch.rand(2, 10, 4), torch.tensor([9, 0, 3])
    rope = torch.ops.infini.rope
    assert torch.equal(rope(x, cos, sin, positions.to(unsigned)), rope(x, cos, sin, positions))


def test_wider_tables_come_as_views() -> None:
    """Those of transformers repeat the angles, that of vLLM has the cosines before the sines."""
    x, (cos, sin), positions = torch.randn(3, 2, 8), torch.rand(2, 10, 4), torch.tensor([9, 0, 3])
    rope = torch.ops.infini.rope
    want = rope(x, cos, sin, positions)
    of_transformers = [torch.cat((table, table), -1)[..., :4] for table in (cos, sin)]
    of_vllm = torch.cat((cos, sin), -1).chunk(2, -1)
    for views in (of_transformers, of_vllm):
        assert torch.equal(rope(x, *views, positions), want)
