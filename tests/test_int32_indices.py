"""Tables, lengths, slots, seeds and the like in int32 give the bits of int64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_infini.testing import as_tuple, call, cpu_capability_set_to, kernel_levels
from torch_infini.testing.compare import copied
from torch_infini.testing.ops import OP_INFOS, Sample
from torch_infini.testing.ops._int32 import with_int32

OPS = ("paged_attention", "paged_attention_prefill", "paged_caching", "qkv_rope_cache", "random_sample")


def narrowest(sample: Sample) -> Sample:
    """The sample with values that int32 holds, still in int64."""
    args = (a.int().long() if isinstance(a, Tensor) and a.dtype == torch.int64 else copied(a) for a in sample.args)
    return Sample(sample.name, tuple(args), sample.kwargs)


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("op", OPS)
def test_bits(op: str, capability: str) -> None:
    info = OP_INFOS[op]
    with cpu_capability_set_to(capability):
        for dtype in info.dtypes:
            for sample in map(narrowest, info.samples(dtype)):
                got, want = as_tuple(call(info, with_int32(sample))), as_tuple(call(info, sample))
                for a, b in zip(got, want, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=sample.name)


@pytest.mark.parametrize("narrow", range(3))
def test_each_argument_has_its_own_dtype(narrow: int) -> None:
    info = OP_INFOS["paged_attention_prefill"]
    sample = next(iter(info.samples(torch.float32)))
    q, k, v, *integers = sample.args
    integers[narrow] = integers[narrow].int()
    assert torch.equal(info.op(q, k, v, *integers), info.op(*sample.args))
