"""OpInfo: what proves an op: reference, samples, refused calls, tolerances, cost and benchmarks.

testing/ops has a file for each file of torch_infini/ops. Tests, `python -m torch_infini doctor` and the benchmarks load
them; `import torch_infini` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ops import FLOATS, OpSpec

# (relative, absolute) error that one rounding to the dtype, or float arithmetic over a few thousand terms, may cause.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-6, 2e-6),
    torch.bfloat16: (2**-8, 1e-6),
    torch.float16: (2**-11, 1e-6),
}


@dataclass(frozen=True)
class Sample:
    """Arguments of one call, made for a dtype; `name` tells in test ids what is special about them."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorCase:
    """A call that must raise, and the whole text of its message.

    of_values: the rule is about the tensors' contents (an index out of range). Only the CPU looks at these before it
    computes; on CUDA, where that would wait for the GPU, the op's docstring says what the result is instead.
    """

    name: str
    args: tuple[Any, ...]
    message: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    of_values: bool = False


@dataclass(frozen=True)
class Cost:
    """What one call must do at least: bytes read and written, floating-point operations."""

    bytes: int
    flops: int = 0


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes that the tensors' elements take."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True, kw_only=True)
class OpInfo(OpSpec):
    """An OpSpec and what proves it: OpInfo(**vars(SPEC), reference=..., ...).

    Attributes:
        reference: Takes the op's arguments and returns the result in float64, computed from the inputs as they are; of
            an op that writes into its arguments, what these hold afterwards, in their order (and changes nothing).
        samples: For a dtype, the calls that the generic tests make.
        errors: The calls that must be refused.
        cost: Takes the op's arguments; the least work a call can do.
        bench: For a dtype, the calls that the benchmarks time.
        peer: What a user would write in plain torch (takes the op's arguments); the benchmarks' rival and the
            docstring's "equivalent to".
        dtypes: The dtypes that samples and bench are called with.
        tolerances: (relative, absolute) for each of them.
        compare: Replaces the comparison with the reference, for results that are not determined by it (sampling):
            takes (actual, sample), raises AssertionError.
        same_bits_on_cuda: Whether on CUDA too a result has the same bits in every layout, or a function of the op's
            arguments that tells. Not where products are cuBLAS's: that chooses its kernels, and so the order of sums,
            by shape, strides and alignment.
        cuda_slack: Takes (expected, *the op's arguments); the absolute error, for each element of the result, that is
            allowed on CUDA beyond the tolerances, because sums are added there in another order. See
            ops/_cuda_sums.py. Then `compare` is the CPU's alone. None: nothing.
    """

    reference: Callable[..., Any]
    samples: Callable[[torch.dtype], Iterable[Sample]]
    errors: Callable[[], Iterable[ErrorCase]]
    cost: Callable[..., Cost]
    bench: Callable[[torch.dtype], Iterable[Sample]]
    peer: Callable[..., Any]
    dtypes: Sequence[torch.dtype] = FLOATS
    tolerances: dict[torch.dtype, tuple[float, float]] = field(default_factory=lambda: dict(TOLERANCES))
    compare: Callable[[Any, Sample], None] | None = None
    same_bits_on_cuda: bool | Callable[..., bool] = True
    cuda_slack: Callable[..., torch.Tensor] | None = None
