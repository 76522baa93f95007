"""Shared by `doctor`, benchmarks and tests; ops/ has the reference, samples and expected errors of each op."""

from .compare import as_tuple, call, check_against_reference, moved, on_cpu
from .layouts import LAYOUTS, relayout
from .machine import cpu_capability_set_to, cuda_device, kernel_levels, threads_set_to

__all__ = [
    "LAYOUTS",
    "as_tuple",
    "call",
    "check_against_reference",
    "cpu_capability_set_to",
    "cuda_device",
    "kernel_levels",
    "moved",
    "on_cpu",
    "relayout",
    "threads_set_to",
]
