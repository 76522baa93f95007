"""OpInfo: the tests' description of an op: reference, samples, error cases, tolerances, cost and benchmarks.

testing/ops has a file for each file of torch_infini/ops. Tests, `python -m torch_infini doctor` and the benchmarks load
them; `import torch_infini` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..ops import FLOATS, OpSpec

# The (relative, absolute) error of one rounding to the dtype, or of float arithmetic over a few thousand terms.
TOLERANCES: dict[torch.dtype, tuple[float, float]] = {
    torch.float32: (2e-6, 2e-6),
    torch.bfloat16: (2**-8, 1e-6),
    torch.float16: (2**-11, 1e-6),
}


@dataclass(frozen=True)
class Sample:
    """The arguments of one call, made for a dtype; `name` says in test ids what is special about them.

    contiguous: the arguments that must be contiguous in this call, besides those of OpSpec.contiguous.
    as_laid_out: the arguments that keep their strides in tests of layouts, because the order of sums depends on them.
    cpu_only: no other device has a kernel for such arguments.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    contiguous: Sequence[str] = ()
    as_laid_out: Sequence[str] = ()
    cpu_only: bool = False


@dataclass(frozen=True)
class ErrorCase:
    """A call that must raise, and the whole text of its message.

    of_values: the rule is about the tensors' contents (an index out of range). Only the CPU checks these before it
    computes; on CUDA, where that would wait for the GPU, the op's docstring states the result instead.
    """

    name: str
    args: tuple[Any, ...]
    message: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    of_values: bool = False


@dataclass(frozen=True)
class Cost:
    """The least work of one call: bytes read and written, floating-point operations."""

    bytes: int
    flops: int = 0


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Return the bytes of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True, kw_only=True)
class OpInfo(OpSpec):
    """An OpSpec with its tests' description: OpInfo(**vars(SPEC), reference=..., ...).

    Attributes:
        reference: Takes the op's arguments and returns the result in float64, computed from the given inputs; for an op
            that writes into its arguments, the expected contents of these, in their order (without changing anything).
        samples: For a dtype, the calls of the generic tests.
        errors: The calls that must be rejected.
        cost: Takes the op's arguments; returns the least work of such a call.
        bench: For a dtype, the calls that the benchmarks time.
        peer: The same in plain torch (takes the op's arguments), which the benchmarks compare with; the docstring's
            "equivalent to".
        dtypes: The dtypes that samples and bench are called with.
        tolerances: (relative, absolute) for each of them.
        compare: Replaces the comparison with the reference for results that are not deterministic (sampling): takes
            (actual, sample), raises AssertionError.
        same_bits_on_cuda: Whether a result also has the same bits in every layout on CUDA, or a function of the op's
            arguments that tells. False if cuBLAS computes products, because it chooses its kernels, and so the order of
            sums, by shape, strides and alignment.
        cuda_slack: Takes (expected, *the op's arguments); returns the absolute error, per element of the result, that
            is allowed on CUDA beyond the tolerances, because sums are added there in another order. See
            ops/_cuda_sums.py. Then `compare` applies to the CPU only. None: no extra error.
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

    def samples_on_cuda(self, dtype: torch.dtype) -> list[Sample]:
        """Return the samples that CUDA has a kernel for."""
        return [sample for sample in self.samples(dtype) if not sample.cpu_only]
