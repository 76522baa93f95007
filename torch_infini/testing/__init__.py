"""Tools that tests, benchmarks and `doctor` share; ops/ has the reference, samples and expected errors of each op."""

from .compare import (
    as_tuple,
    assert_clear,
    assert_close,
    assert_likeliest,
    assert_same_but_rounding,
    call,
    check_against_reference,
    copied,
    greedy_tokens,
    moved,
    on_cpu,
    rounding_error,
    rounding_limit,
    sums_of,
)
from .layouts import LAYOUTS, relayout
from .machine import cpu_capability_set_to, cuda_device, emulates_cuda, kernel_levels, sanitized, threads_set_to

__all__ = [
    "LAYOUTS",
    "as_tuple",
    "assert_clear",
    "assert_close",
    "assert_likeliest",
    "assert_same_but_rounding",
    "call",
    "check_against_reference",
    "copied",
    "cpu_capability_set_to",
    "cuda_device",
    "emulates_cuda",
    "greedy_tokens",
    "kernel_levels",
    "moved",
    "on_cpu",
    "relayout",
    "rounding_error",
    "rounding_limit",
    "sanitized",
    "sums_of",
    "threads_set_to",
]
