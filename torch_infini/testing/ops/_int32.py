"""with_int32: a call whose tables, lengths, slots and the like are int32, as serving engines keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op_info import Sample


def with_int32(sample: Sample) -> Sample:
    """The sample with its int64 tensors in int32."""
    args = (a.int() if isinstance(a, Tensor) and a.dtype == torch.int64 else a for a in sample.args)
    return Sample(f"int32, {sample.name}", tuple(args), sample.kwargs)
