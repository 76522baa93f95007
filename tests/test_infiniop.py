"""Every op of the C ABI, by its description in torch_infini/testing/ops: nothing here names one.

Against the float64 reference on each instruction set; on a stream; errors; NULL for each argument; descriptors that are
destroyed or of another op; a workspace too small; several threads; and that no op of the headers goes undescribed.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from support.c_checks import bits, check, first_sample
from support.layers import at_level
from torch_infini.testing import cpu_capability_set_to, kernel_levels, threads_set_to
from torch_infini.testing.c_ops import (
    INTERFACE,
    CError,
    COp,
    Described,
    Descriptor,
    Handle,
    TensorDescriptor,
    c_function,
    call,
    clone,
)
from torch_infini.testing.ops import all_c_ops

OPS = list(all_c_ops())


def name(value: COp | str) -> str:
    return value.name if isinstance(value, COp) else value


LEVELS = [at_level(op.name, level, op) for op in OPS for level in kernel_levels(op.name)]


@pytest.mark.parametrize(("op", "capability"), LEVELS, ids=name)
def test_reference(op: COp, capability: str) -> None:
    with cpu_capability_set_to(capability):
        for sample in op.samples():
            before, args = clone(sample.args), sample.args
            call(op, args)
            check(op, sample, before, args)


@pytest.mark.parametrize("op", OPS, ids=name)
def test_inputs_survive(op: COp) -> None:
    for sample in op.samples():
        before, args = clone(sample.args), sample.args
        call(op, args)
        written = {id(args[key]) for key in op.outputs}
        for key, value in args.items():
            if isinstance(value, Tensor) and id(value) not in written:
                assert torch.equal(bits(value), bits(before[key])), f"{sample.name}: {key}"


@pytest.mark.parametrize("flags", [0, 1], ids=["immediate", "queued"])
@pytest.mark.parametrize("op", OPS, ids=name)
def test_stream_gives_the_same_bits(op: COp, flags: int) -> None:
    """Run by a stream at once, or queued there, the descriptor destroyed before the work is done."""
    stream = ctypes.c_void_p()
    c_function("infinirtStreamCreateWithFlags")(ctypes.byref(stream), flags)
    try:
        for sample in list(op.samples())[:8]:
            at_once, queued = clone(sample.args), clone(sample.args)
            call(op, at_once)
            held = call(op, queued, stream)
            if flags:
                c_function("infinirtStreamSynchronize")(stream)
            del held
            for key in op.outputs:
                if at_once[key] is not None:
                    assert torch.equal(bits(at_once[key]), bits(queued[key]))
    finally:
        c_function("infinirtStreamDestroy")(stream)


@pytest.mark.parametrize("op", OPS, ids=name)
def test_several_threads_run_one_descriptor(op: COp) -> None:
    samples = [s for s in op.samples() if any(isinstance(v, Tensor) and v.numel() for v in s.args.values())]
    sample = samples[len(samples) // 2]
    alone = clone(sample.args)
    call(op, alone)
    copies = [clone(sample.args) for _ in range(32)]
    with Descriptor(op, sample.args) as descriptor, ThreadPoolExecutor(4) as pool:
        list(pool.map(descriptor.run, copies))
    for args in copies:
        for key in op.outputs:
            if alone[key] is not None:
                assert torch.equal(bits(alone[key]), bits(args[key]))


@pytest.mark.parametrize("op", OPS, ids=name)
def test_thread_count_does_not_change_bits(op: COp) -> None:
    for sample in op.samples():
        one, three = clone(sample.args), clone(sample.args)
        with threads_set_to(1):
            call(op, one)
        with threads_set_to(3):
            call(op, three)
        for key in op.outputs:
            if one[key] is not None:
                assert torch.equal(bits(one[key]), bits(three[key])), sample.name


@pytest.mark.parametrize("op", OPS, ids=name)
def test_errors(op: COp) -> None:
    cases = list(op.errors())
    assert cases, f"{op.name} describes no call that it refuses"
    for case in cases:
        with pytest.raises(CError) as caught:
            if case.at == "create":
                Descriptor(op, case.args)
            else:
                call(op, case.args)
        assert (str(caught.value), caught.value.status) == (case.message, case.status), case.name


@pytest.mark.parametrize("op", OPS, ids=name)
def test_null_arguments(op: COp) -> None:
    """NULL for each pointer in turn: NULL_POINTER (or BAD_PARAM), unless the op says the argument is optional."""
    sample = first_sample(op)
    create = c_function(op.create.name)
    with Handle() as handle:
        with pytest.raises(CError, match=f"infiniopCreate{op.name}Descriptor: desc_ptr must not be NULL"):
            create(handle, None, *[ctypes.c_void_p(None)] * (len(op.create.arguments) - 2))
        desc = ctypes.c_void_p()
        with pytest.raises(CError, match=f"infiniopCreate{op.name}Descriptor: handle must not be NULL"):
            create(None, ctypes.byref(desc), *[ctypes.c_void_p(None)] * (len(op.create.arguments) - 2))
        assert not desc
    tensors = [key for key, value in sample.args.items() if isinstance(value, Tensor | Described)]
    refused = 0
    for key in tensors:
        for at in ("create", "run"):
            try:
                with Descriptor(op, {**sample.args, key: None} if at == "create" else sample.args) as descriptor:
                    if at == "run":
                        descriptor.run({**clone(sample.args), key: None})
            except CError as error:
                assert error.status in ("NULL_POINTER", "BAD_PARAM") and "must not be NULL" in str(error), str(error)
                refused += 1
    assert refused >= len(op.outputs)
    for function in (f"infiniopDestroy{op.name}Descriptor", op.run.name):
        with pytest.raises(CError, match=f"{function}: desc must not be NULL"):
            c_function(function)(*[ctypes.c_void_p(None)] * 12)


@pytest.mark.parametrize("op", OPS, ids=name)
def test_dead_and_foreign_descriptors(op: COp) -> None:
    sample = first_sample(op)
    with Descriptor(op, sample.args) as descriptor:
        pass
    destroy = c_function(f"infiniopDestroy{op.name}Descriptor")
    for use in (lambda: descriptor.run(sample.args), lambda: destroy(descriptor.handle)):
        with pytest.raises(
            CError, match="desc must be an operator descriptor made by an infiniopCreate function"
        ) as caught:
            use()
        assert caught.value.status == "BAD_PARAM"
    other = OPS[(OPS.index(op) + 1) % len(OPS)]
    with Descriptor(other, first_sample(other).args) as theirs, pytest.raises(CError) as caught:
        destroy(theirs.handle)
    assert str(caught.value) == (
        f"infiniopDestroy{op.name}Descriptor: desc must be a descriptor of {op.name}, got one of {other.name}"
    )


@pytest.mark.parametrize("op", OPS, ids=name)
def test_workspace_too_small(op: COp) -> None:
    for sample in op.samples():
        with Descriptor(op, sample.args) as descriptor:
            size = descriptor.workspace_size()
            if size == 0:
                continue
            values = [ctypes.c_void_p(None) for _ in op.run.arguments]
            values[0], values[2] = descriptor.handle, ctypes.c_size_t(size - 1)  # type: ignore[call-overload]
            with pytest.raises(CError, match=f"workspace_size must be at least {size}, got {size - 1}") as caught:
                c_function(op.run.name)(*values)
            assert caught.value.status == "INSUFFICIENT_WORKSPACE"
            values[2] = ctypes.c_size_t(size)  # type: ignore[call-overload]
            with pytest.raises(CError, match="workspace must not be NULL"):
                c_function(op.run.name)(*values)
            return


def test_destroyed_tensor_descriptor() -> None:
    descriptor = TensorDescriptor(torch.ones(3))
    with descriptor:
        pass
    with pytest.raises(
        CError, match="desc must be a tensor descriptor made by infiniopCreateTensorDescriptor"
    ) as caught:
        descriptor.__exit__()
    assert caught.value.status == "BAD_PARAM"
    with Handle() as handle:
        desc, gone = ctypes.c_void_p(), descriptor.handle
        with pytest.raises(CError, match="y_desc must be a tensor descriptor .* and not destroyed"):
            c_function("infiniopCreateRMSNormDescriptor")(
                handle, ctypes.byref(desc), gone, gone, gone, ctypes.c_float(1)
            )


def test_every_op_is_described() -> None:
    described = {op.name for op in OPS}
    declared = {
        function.removeprefix("infiniopCreate").removesuffix("Descriptor")
        for function in INTERFACE.functions
        if function.startswith("infiniopCreate") and function.endswith("Descriptor")
    } - {"Tensor", "RandomSampleBatch"}
    assert described == declared
