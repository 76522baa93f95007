"""qkv_rope_cache gives the bits of the ops it fuses: rope on the heads of q and of k, then paged_caching."""

from __future__ import annotations

import pytest
import torch

from torch_infini.testing import call, cpu_capability_set_to, kernel_levels, relayout, threads_set_to
from torch_infini.testing.ops import OP_INFOS, Sample

SPEC = OP_INFOS["qkv_rope_cache"]
infini = torch.ops.infini


def separately(q, k_cache, v_cache, qkv, cos, sin, positions, slot_mapping, interleaved=False, *scales) -> None:
    heads, kv_heads = q.shape[1], k_cache.shape[1]
    new_q, k, v = qkv.unflatten(1, (heads + 2 * kv_heads, q.shape[2])).split([heads, kv_heads, kv_heads], 1)
    infini.rope.out(new_q, cos, sin, positions, interleaved, out=q)
    infini.paged_caching(k_cache, v_cache, infini.rope(k, cos, sin, positions, interleaved), v, slot_mapping, *scales)


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("dtype", SPEC.dtypes, ids=str)
def test_bits_of_the_separate_ops(dtype: torch.dtype, capability: str) -> None:
    with cpu_capability_set_to(capability):
        for sample in SPEC.samples(dtype):
            for layout in ("strided rows", "misaligned"):
                moved = Sample(sample.name, tuple(relayout(layout, a) for a in sample.args))
                for threads in (1, 3):
                    with threads_set_to(threads):
                        fused = call(SPEC, moved)
                    for got, want in zip(fused, call(SPEC, sample, separately), strict=True):
                        assert torch.equal(got, want), f"{sample.name}, {layout}, {threads} threads"
