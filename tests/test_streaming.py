"""Outputs beyond 64 MiB (kStreamBytes in csrc/common/streaming_stores.h; layer_norm's beyond 12 or 16) are written by
other instructions: to the same bits.

The rows of a small call, repeated until the output is that large, must give the small call's rows again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torch_infini.testing import cpu_capability_set_to, kernel_levels, threads_set_to
from torch_infini.testing.c_ops import call
from torch_infini.testing.ops import all_c_ops

STREAM_BYTES = 64 << 20
ops = torch.ops.infini
COLUMNS = 5125  # some rows are aligned for whole vectors, and none ends with one
WEIGHT = torch.linspace(0.5, 2, COLUMNS)


C_LAYER_NORM = next(op for op in all_c_ops() if op.name == "LayerNorm")


def layer_norm(x: Tensor) -> tuple[Tensor, ...]:
    written = (torch.empty_like(x), torch.empty_like(x), x.new_empty(x.shape[:-1]))
    given = {"input": x, "weight": WEIGHT.to(x.dtype), "bias": -WEIGHT.to(x.dtype), "eps": 1e-5}
    call(C_LAYER_NORM, dict(zip(C_LAYER_NORM.outputs, written, strict=True)) | given)
    return written[:2]


CALLS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "silu": lambda x: (ops.silu(x),),
    "silu of strided rows": lambda x: (ops.silu(x[:, 3:]),),
    "swiglu": lambda x: (ops.swiglu(x, -x),),
    "rms_norm": lambda x: (ops.rms_norm(x, WEIGHT.to(x.dtype)),),
    "add_rms_norm": lambda x: ops.add_rms_norm(x, 2 * x, WEIGHT.to(x.dtype)),
    "layer_norm": lambda x: (ops.layer_norm(x, WEIGHT.to(x.dtype), -WEIGHT.to(x.dtype)),),
    "layer_norm with three outputs": layer_norm,
    "embedding": lambda x: (ops.embedding((torch.arange(x.shape[0]) % 59 + 7) % 59, x[:59]),),
}


@pytest.mark.full(beyond=12)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("name", CALLS)
def test_large_outputs(name: str, capability: str, dtype: torch.dtype) -> None:
    few = (3 * torch.randn(59, COLUMNS)).to(dtype)
    repeats = STREAM_BYTES // ((few.numel() - 59 * 3) * few.element_size()) + 1
    with cpu_capability_set_to(capability), threads_set_to(2):
        for small, large in zip(CALLS[name](few), CALLS[name](few.repeat(repeats, 1)), strict=True):
            assert large.numel() * large.element_size() >= STREAM_BYTES
            assert torch.equal(large.view(repeats, *small.shape), small.expand(repeats, *small.shape))
