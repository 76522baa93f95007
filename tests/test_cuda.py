"""Every registered op on CUDA, by its own description: against the float64 reference, fresh inputs, poisoned outputs.

On a GPU where there is one. Elsewhere, with INFINI_LIBRARIES=build/native/emulated, the same kernels compiled for the
host (csrc/emulation), where tensors stay on the CPU. Skipped where there is neither.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from torch_infini.testing import (
    LAYOUTS,
    as_tuple,
    call,
    check_against_reference,
    cuda_device,
    moved,
    on_cpu,
    relayout,
)
from torch_infini.testing.ops import OpInfo, Sample, all_op_infos

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")

HERE = "cuda:0" if DEVICE == "cuda" else "cpu"
# The emulation gives each call the same bits; it poisons fresh memory by itself, with other bytes, and is slow.
SEEDS = (0, 1) if DEVICE == "cuda" else (0,)
POISONS = (55, 77) if DEVICE == "cuda" else (55,)
OPS = [spec for spec in all_op_infos() if "cuda" in spec.devices]


def names(value: Any) -> str | None:
    return value.name if isinstance(value, OpInfo) else str(value).removeprefix("torch.")


def op_dtype_pairs(ops: list[OpInfo]) -> list[tuple[OpInfo, torch.dtype]]:
    return [(spec, dtype) for spec in ops for dtype in spec.dtypes]


def on_cuda(sample: Sample) -> Sample:
    return moved(sample, DEVICE)


def laid_out(spec: OpInfo, sample: Sample, layout: str) -> Sample:
    """On CUDA in another layout, but for the arguments that have one of their own."""

    def moved_argument(name: str, value: Any) -> Any:
        there = relayout(layout, value)
        kept = name in spec.contiguous or name in sample.contiguous
        return value if kept and not there.is_contiguous() else there

    there = on_cuda(sample)
    args = tuple(map(moved_argument, spec.arguments, there.args))
    return Sample(sample.name, args, {k: moved_argument(k, v) for k, v in there.kwargs.items()})


def values_of(sample: Sample) -> list[Any]:
    return [*sample.args, *sample.kwargs.values()]


def same_bits(a: Any, b: Any) -> bool:
    flat = lambda t: t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)  # noqa: E731
    return all(torch.equal(flat(x), flat(y)) for x, y in zip(as_tuple(a), as_tuple(b), strict=True))


def check_same(spec: OpInfo, sample: Sample, dtype: torch.dtype, actual: Any, expected: Any) -> None:
    """The same bits; where cuBLAS chooses by layout, the right numbers."""
    same = spec.same_bits_on_cuda
    if same(*sample.args, **sample.kwargs) if callable(same) else same:
        assert same_bits(actual, expected), f"{sample.name}: other bits"
    else:
        check_against_reference(spec, sample, dtype, on_cpu(actual), on_cuda=True)


@dataclass(frozen=True)
class Computed:
    """An op's samples of a dtype, and what the op makes of each: three tests share the calls."""

    spec: OpInfo
    dtype: torch.dtype
    calls: list[tuple[Sample, Any]]


@pytest.fixture(
    scope="module", params=op_dtype_pairs(OPS), ids=lambda pair: "-".join(str(names(value)) for value in pair)
)
def computed(request: pytest.FixtureRequest) -> Computed:
    spec, dtype = request.param
    torch.manual_seed(SEEDS[0])
    samples = spec.samples_on_cuda(dtype)
    return Computed(spec, dtype, [(sample, call(spec, on_cuda(sample))) for sample in samples])


def test_reference(computed: Computed) -> None:
    spec, dtype = computed.spec, computed.dtype
    for sample, result in computed.calls:
        check_against_reference(spec, sample, dtype, on_cpu(result), on_cuda=True)
    for seed in SEEDS[1:]:
        torch.manual_seed(seed)
        for sample in spec.samples_on_cuda(dtype):
            check_against_reference(spec, sample, dtype, on_cpu(call(spec, on_cuda(sample))), on_cuda=True)


def layouts_of(spec: OpInfo, dtype: torch.dtype, number: int) -> list[str]:
    """A sample's layouts: all; emulated, half of them, and the others with the next dtype, if the op has one.

    Few samples have rows to permute: these are permuted with each dtype.
    """
    turn = list(spec.dtypes).index(dtype) + number
    every = DEVICE == "cuda" or len(spec.dtypes) == 1
    return [name for i, name in enumerate(LAYOUTS) if every or name == "permuted rows" or (i + turn) % 2 == 0]


@pytest.mark.full
def test_layouts(computed: Computed) -> None:
    """Every layout gives the bits of the contiguous one; those that need not be served are refused in words."""
    spec, dtype = computed.spec, computed.dtype
    for number, (sample, expected) in enumerate(computed.calls):
        for layout in layouts_of(spec, dtype, number):
            must_serve = LAYOUTS[layout][1]
            there = laid_out(spec, sample, layout)
            if all(map(operator.is_, values_of(there), values_of(sample))):
                continue  # rows of a matrix are not permuted
            try:
                actual = call(spec, there)
            except RuntimeError as error:
                assert not must_serve, f"{sample.name}, {layout}: {error}"
                assert f"infini::{spec.name}: " in str(error) and " must " in str(error), str(error)
                continue
            check_same(spec, Sample(f"{sample.name}, {layout}", sample.args, sample.kwargs), dtype, actual, expected)


def test_out_is_written_whole(computed: Computed) -> None:
    """Outputs hold poison before; a second run, from other poison, gives the same bits."""
    spec, dtype = computed.spec, computed.dtype
    if not spec.outputs:
        pytest.skip("it writes into its arguments")
    for given, result in computed.calls:
        sample, expected = on_cuda(given), as_tuple(result)
        for poison in POISONS:
            outs = [relayout("strided rows", torch.full_like(t, poison)) for t in expected]
            spec.out(*sample.args, **sample.kwargs, **dict(zip(spec.out_names, outs, strict=True)))
            check_same(spec, given, dtype, tuple(outs), expected)


@pytest.mark.parametrize("spec", OPS, ids=names)
def test_errors(spec: OpInfo) -> None:
    """The sentences of the CPU; rules about values are the CPU's alone."""
    for case in spec.errors():
        if case.of_values:
            continue
        there = on_cuda(Sample(case.name, case.args, case.kwargs))
        op = spec.out if any(name in case.kwargs for name in spec.out_names) else spec.op
        with pytest.raises(RuntimeError) as caught:
            op(*there.args, **there.kwargs)
        assert str(caught.value) == case.message.replace(", cpu, got", f", {HERE}, got"), case.name
