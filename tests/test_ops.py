"""Every registered op, by its own description: nothing here names one.

Against the float64 reference on each instruction set the machine has, in other layouts, with other thread counts;
out and in-place forms; opcheck; torch.compile; every error's text; completeness of the description.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import pytest
import torch

from support.layers import at_level
from torch_infini._core.products import aten_from_set_to
from torch_infini.testing import (
    LAYOUTS,
    as_tuple,
    call,
    check_against_reference,
    cpu_capability_set_to,
    kernel_levels,
    relayout,
    threads_set_to,
)
from torch_infini.testing.ops import OpInfo, Sample, all_op_infos

OPS = list(all_op_infos())


def names(value: Any) -> str | None:
    """Test ids: the op's name, the dtype's name."""
    return value.name if isinstance(value, OpInfo) else str(value).removeprefix("torch.")


def op_dtype_pairs(ops: list[OpInfo] = OPS) -> list[tuple[OpInfo, torch.dtype]]:
    return [(spec, dtype) for spec in ops for dtype in spec.dtypes]


def all_samples(spec: OpInfo, dtype: torch.dtype) -> list[Sample]:
    return list(spec.samples(dtype))


def same_bits(a: Any, b: Any) -> bool:
    pairs = list(zip(as_tuple(a), as_tuple(b), strict=True))
    alike = all(x.dtype == y.dtype and x.shape == y.shape for x, y in pairs)
    # Dense and flat, because torch views neither strided columns (of one element even) nor a scalar as bytes.
    flat = lambda t: t.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)  # noqa: E731
    return alike and all(torch.equal(flat(x), flat(y)) for x, y in pairs)


def values_of(sample: Sample) -> list[Any]:
    return [*sample.args, *sample.kwargs.values()]


def clone(sample: Sample) -> Sample:
    copy = lambda v: v.clone() if isinstance(v, torch.Tensor) else v  # noqa: E731
    return Sample(sample.name, tuple(map(copy, sample.args)), {k: copy(v) for k, v in sample.kwargs.items()})


@pytest.mark.parametrize(
    ("spec", "dtype", "capability"),
    [at_level(spec.name, level, spec, dtype) for spec, dtype in op_dtype_pairs() for level in kernel_levels(spec.name)],
    ids=names,
)
def test_reference(spec: OpInfo, dtype: torch.dtype, capability: str) -> None:
    with cpu_capability_set_to(capability):
        for sample in all_samples(spec, dtype):
            actual = call(spec, sample)
            assert spec.mutates or all(t.is_contiguous() for t in as_tuple(actual)), sample.name
            check_against_reference(spec, sample, dtype, actual)


def levels_in_turns() -> list[Any]:
    """Each op and dtype at the highest level, and at one of the others in turns: they share the code that is tested."""
    chosen = []
    for i, spec in enumerate(OPS):
        *others, highest = kernel_levels(spec.name)
        for j, dtype in enumerate(spec.dtypes):
            levels = (*others[(i + j) % (len(others) or 1) :][:1], highest)
            chosen += [at_level(spec.name, level, spec, dtype) for level in levels]
    return chosen


@pytest.mark.parametrize(("spec", "dtype", "capability"), levels_in_turns(), ids=names)
def test_layouts(spec: OpInfo, dtype: torch.dtype, capability: str) -> None:
    """Every layout gives the bits of the contiguous one; those that need not be served are refused in words."""

    def laid_out(layout: str, sample: Sample) -> Sample:
        def moved_argument(name: str, value: Any) -> Any:
            there = value if name in sample.as_laid_out else relayout(layout, value)
            kept = name in spec.contiguous or name in sample.contiguous
            return value if kept and not there.is_contiguous() else there

        args = tuple(map(moved_argument, spec.arguments, sample.args))
        return Sample(f"{sample.name}, {layout}", args, {k: relayout(layout, v) for k, v in sample.kwargs.items()})

    with cpu_capability_set_to(capability), aten_from_set_to(None):
        for sample in all_samples(spec, dtype):
            expected = call(spec, sample)
            for layout, (_, must_serve) in LAYOUTS.items():
                moved = laid_out(layout, sample)
                if all(map(operator.is_, values_of(moved), values_of(sample))):
                    continue  # rows of a matrix are not permuted
                try:
                    actual = call(spec, moved)
                except RuntimeError as error:
                    assert not must_serve, f"{moved.name}: {error}"
                    assert f"infini::{spec.name}: " in str(error) and " must " in str(error), str(error)
                    continue
                assert same_bits(actual, expected), f"{moved.name}: other bits than from contiguous input"


@pytest.mark.parametrize(("spec", "dtype", "capability"), levels_in_turns(), ids=names)
def test_threads(spec: OpInfo, dtype: torch.dtype, capability: str) -> None:
    with cpu_capability_set_to(capability), aten_from_set_to(None):
        for sample in all_samples(spec, dtype):
            with threads_set_to(1):
                one = call(spec, sample)
            for count in (2, 3):
                with threads_set_to(count):
                    assert same_bits(call(spec, sample), one), f"{sample.name}: {count} threads"


@pytest.mark.parametrize(("spec", "dtype"), op_dtype_pairs([s for s in OPS if s.outputs]), ids=names)
def test_out(spec: OpInfo, dtype: torch.dtype) -> None:
    """The out form writes into its arguments (dense or strided), returns them, and gives the functional form's bits."""
    for sample in all_samples(spec, dtype):
        expected = as_tuple(call(spec, sample))
        for make in (torch.clone, lambda t: relayout("strided rows", t)):
            outs = [make(torch.full_like(t, 55)) for t in expected]
            returned = spec.out(*sample.args, **sample.kwargs, **dict(zip(spec.out_names, outs, strict=True)))
            for got, out, want in zip(as_tuple(returned), outs, expected, strict=True):
                assert got.data_ptr() == out.data_ptr(), sample.name
                assert same_bits(out.contiguous(), want), sample.name


@pytest.mark.parametrize(("spec", "dtype"), op_dtype_pairs([s for s in OPS if s.inplace]), ids=names)
def test_inplace(spec: OpInfo, dtype: torch.dtype) -> None:
    position = spec.arguments.index(spec.inplace)
    inplace = getattr(torch.ops.infini, f"{spec.name}_").default
    for sample in all_samples(spec, dtype):
        expected = call(spec, sample)
        for make in (torch.clone, lambda t: relayout("strided rows", t)):
            args = list(sample.args)
            args[position] = make(args[position])
            if args[position].dtype != expected.dtype:
                with pytest.raises(
                    RuntimeError, match=f"^infini::{spec.name}: .* which takes the result in place, got"
                ):
                    inplace(*args, **sample.kwargs)
                continue
            assert inplace(*args, **sample.kwargs) is None
            assert same_bits(args[position].contiguous(), expected), sample.name


@pytest.mark.parametrize(("spec", "dtype"), op_dtype_pairs(), ids=names)
def test_inputs_survive(spec: OpInfo, dtype: torch.dtype) -> None:
    for sample in all_samples(spec, dtype):
        before = clone(sample)
        call(spec, sample)
        for left, right in zip((*before.args, *before.kwargs.values()), (*sample.args, *sample.kwargs.values())):
            if isinstance(left, torch.Tensor):
                assert same_bits(left.contiguous(), right.contiguous()), sample.name


@pytest.mark.parametrize("spec", OPS, ids=names)
def test_opcheck(spec: OpInfo) -> None:
    """torch's own checks: schema and fake against real; for one dtype registration and AOT autograd with them.

    The latter two trace the op, which knows dtypes by its fake alone, and take nearly all of the time.
    """
    values = ("test_schema", "test_faketensor")
    traced = ("test_autograd_registration", "test_aot_dispatch_dynamic")
    for dtype in spec.dtypes:
        checks = (*values, *traced) if dtype == spec.dtypes[0] else values
        for sample in all_samples(spec, dtype)[:4]:
            torch.library.opcheck(spec.op, sample.args, sample.kwargs, test_utils=checks)
            if spec.mutates:
                continue
            outs = dict(zip(spec.out_names, map(torch.empty_like, as_tuple(call(spec, sample))), strict=True))
            torch.library.opcheck(spec.out, sample.args, {**sample.kwargs, **outs}, test_utils=values)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("spec", OPS, ids=names)
def test_compile(spec: OpInfo, dynamic: bool) -> None:
    """One graph, no break; with dynamic shapes one graph serves several sizes, through Inductor."""
    dtype = spec.dtypes[0]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda args, kwargs: spec.op(*args, **kwargs),
        fullgraph=True,
        dynamic=dynamic,
        backend="inductor" if dynamic else "aot_eager",
    )
    for sample in all_samples(spec, dtype)[: 3 if dynamic else 1]:
        with torch.no_grad():
            compiled_result = call(spec, sample, lambda *args, **kwargs: compiled(args, kwargs))
            assert same_bits(compiled_result, call(spec, sample)), sample.name


@pytest.mark.parametrize(("spec", "dtype"), op_dtype_pairs([s for s in OPS if s.decomposition]), ids=names)
def test_decomposition(spec: OpInfo, dtype: torch.dtype) -> None:
    """The aten form of the op keeps its shape, dtype and tolerances."""
    assert spec.decomposition
    for sample in all_samples(spec, dtype):
        actual, expected = spec.decomposition(*sample.args, **sample.kwargs), call(spec, sample)
        for got, want in zip(as_tuple(actual), as_tuple(expected), strict=True):
            assert (got.shape, got.dtype) == (want.shape, want.dtype), sample.name
        check_against_reference(spec, sample, dtype, actual)


@pytest.mark.parametrize("spec", OPS, ids=names)
def test_errors(spec: OpInfo) -> None:
    cases = list(spec.errors())
    assert cases, f"{spec.name} describes no call that it refuses"
    for case in cases:
        op = spec.out if any(name in case.kwargs for name in spec.out_names) else spec.op
        with pytest.raises(RuntimeError) as caught:
            op(*case.args, **case.kwargs)
        assert str(caught.value) == case.message, case.name


@pytest.mark.parametrize("spec", OPS, ids=names)
def test_complete(spec: OpInfo) -> None:
    doc = inspect.getdoc(spec.function) or ""
    for part in ("Args:", "Returns:", "Raises:", "Equivalent to:", "Source:"):
        assert part in doc, f"{spec.name}: the docstring has no '{part}'"
    for parameter in inspect.signature(spec.function).parameters:
        assert f"{parameter}:" in doc, f"{spec.name}: the docstring does not explain {parameter}"
    assert spec.arguments == list(inspect.signature(spec.reference).parameters)
    assert "cpu" in spec.backends
    for dtype in spec.dtypes:
        assert dtype in spec.tolerances
        samples, bench = all_samples(spec, dtype), next(iter(spec.bench(dtype)), None)
        assert len({s.name for s in samples}) == len(samples) >= 4
        assert bench is not None
        for sample in samples:
            assert spec.cost(*sample.args, **sample.kwargs).bytes >= 0
            spec.peer(*sample.args, **sample.kwargs)


# They take every dtype that holds one number.
ANY_NUMBER = ("zeros", "ones", "rearrange", "all_reduce", "broadcast", "all_gather", "reduce_scatter")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64], ids=names)
@pytest.mark.parametrize("spec", OPS, ids=names)
def test_a_dtype_that_no_op_takes(spec: OpInfo, dtype: torch.dtype) -> None:
    """Each op names the dtypes that it takes itself."""
    sample = next(s for s in all_samples(spec, spec.dtypes[0]) if s.args[0].numel() > 0)
    tensors = [i for i, arg in enumerate(sample.args) if isinstance(arg, torch.Tensor)]
    for places in (*([i] for i in tensors), tensors):
        args = [arg.to(dtype) if i in places else arg for i, arg in enumerate(sample.args)]
        with pytest.raises(RuntimeError) as caught:
            spec.op(*args, **sample.kwargs)
        message = str(caught.value)
        assert message.startswith(f"infini::{spec.name}: ") and " must " in message, message
        assert message.endswith(str(dtype).removeprefix("torch.")), message
        assert ("an integer of 8 to 64 bits" in message) == (spec.name in ANY_NUMBER), message
