"""The top-level ops. All take `out`, written and returned; while a graph is recorded, calls are noted."""

from .attention import attention, paged_attention, paged_attention_prefill, paged_caching
from .elementwise import add, mul
from .layout import narrow, rearrange, squeeze, unsqueeze
from .matmul import matmul
from .norm import add_rms_norm, add_rms_norm_

__all__ = [
    "add",
    "add_rms_norm",
    "add_rms_norm_",
    "attention",
    "matmul",
    "mul",
    "narrow",
    "paged_attention",
    "paged_attention_prefill",
    "paged_caching",
    "rearrange",
    "squeeze",
    "unsqueeze",
]
