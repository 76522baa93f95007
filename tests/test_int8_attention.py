"""Attention over caches of int8 against float64: within the documented error, outliers in q and in the scores included.

A result of bfloat16 must be what some number within that error rounds to: its own rounding hides nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_infini.testing import cpu_capability_set_to, kernel_levels
from torch_infini.testing.ops._int8_cache import dequantized

paged_attention = torch.ops.infini.paged_attention
KEYS, BLOCK = 1500, 32
HEADS = [(1, 1, 128), (4, 1, 128), (8, 2, 64), (6, 2, 64), (8, 1, 192), (4, 1, 96), (14, 1, 64)]  # of q, of K, columns


def case(kind: str, heads: int, kv_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
    """q, K, V, their scales, and the factor of the scores."""
    g = torch.Generator().manual_seed(heads * size)
    shape = -(-KEYS // BLOCK), kv_heads, BLOCK, size
    k, v = (torch.randint(-127, 128, shape, generator=g, dtype=torch.int8) for _ in "kv")
    k_scales, v_scales = (torch.rand(shape[:-1], generator=g) / 8 for _ in "kv")  # few keys have most of the weight
    q, factor = torch.randn(1, heads, size, generator=g), size**-0.5
    if kind == "an outlier in q":  # that no key meets, so that the others make the scores
        q[..., 5] = 1000
        k[..., 5] = 0
    elif kind == "the largest q":
        q = q.clamp(-1.9, 1.9).where(torch.arange(size) != 3, 255 / 128)
    elif kind == "one key above all":  # the others have a fifth of the weight together, 2^-13 each and less
        q.fill_(1)
        k.zero_()
        k[0, :, 0] = 100
        k_scales.fill_(1)
        factor = 9.0 / (100 * size)
    return q.bfloat16(), k, v, k_scales, v_scales, factor


@pytest.mark.parametrize("kind", ["random", "an outlier in q", "the largest q", "one key above all"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
@pytest.mark.parametrize("capability", kernel_levels())
def test_within_the_documented_error(capability: str, heads: int, kv_heads: int, size: int, kind: str) -> None:
    q, k, v, k_scales, v_scales, factor = case(kind, heads, kv_heads, size)
    keys, values = (
        dequantized(cache, scales).transpose(1, 2).flatten(0, 1)[:KEYS].repeat_interleave(heads // kv_heads, 1)
        for cache, scales in ((k, k_scales), (v, v_scales))
    )
    scores = torch.einsum("hd,thd->ht", q[0].double(), keys) * factor
    exact = torch.einsum("ht,thd->hd", scores.softmax(-1), values)

    # The elements of q are off independently: four times the deviation of their sum with a key.
    of_q = 2**-23 * q[0].double().abs().amax(-1) * 4 / 3**0.5 * keys.square().sum(-1).amax(0).sqrt() * factor
    of_floats = 3e-7 * (20 + scores.abs().amax(-1))
    error = (2 * of_q + 2**-16 + of_floats)[:, None] * values.abs().amax((0, 2))[:, None]

    tables = torch.randperm(len(k), generator=torch.Generator().manual_seed(0))[None]
    scattered = [torch.empty_like(t).index_copy(0, tables[0], t) for t in (k, v, k_scales, v_scales)]
    with cpu_capability_set_to(capability):
        y = paged_attention(
            q, scattered[0], scattered[1], tables, torch.tensor([KEYS]), None, factor, 0, scattered[2], scattered[3]
        )[0]
    low, high = (exact - error).bfloat16(), (exact + error).bfloat16()
    off = (y < low) | (y > high)
    assert not off.any(), f"{(y.double() - exact).abs()[off].max():.2e}, not {error.max():.2e}"
