"""with_int32: a call whose tables, lengths, slots and so on are int32, as in serving engines."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op_info import Sample


def with_int32(sample: Sample) -> Sample:
    """Return the sample with its int64 tensors as int32."""
    args = (a.int() if isinstance(a, Tensor) and a.dtype == torch.int64 else a for a in sample.args)
    return Sample(f"int32, {sample.name}", tuple(args), sample.kwargs)
