"""Tools that tests, benchmarks and the self-check share: choosing an instruction set, comparing, other layouts."""

from .compare import as_tuple, assert_close, call, check_against_reference, copied, moved, on_cpu
from .layouts import LAYOUTS, relayout
from .machine import cpu_capability_set_to, cuda_device, emulates_cuda, sanitized, threads_set_to

__all__ = [
    "LAYOUTS",
    "as_tuple",
    "assert_close",
    "call",
    "check_against_reference",
    "copied",
    "cpu_capability_set_to",
    "cuda_device",
    "emulates_cuda",
    "moved",
    "on_cpu",
    "relayout",
    "sanitized",
    "threads_set_to",
]
