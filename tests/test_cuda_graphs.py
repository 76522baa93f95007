"""Every registered op captured once and replayed on other data; on a side stream; on the device of its tensors.

On a GPU in torch's CUDA graphs; elsewhere in those of the emulated runtime (csrc/emulation), on which the ops' kernels
are queued as they would be on a GPU's stream.
"""

from __future__ import annotations

import pytest
import torch

from support.cuda_calls import captured
from torch_infini.runtime import program
from torch_infini.testing import as_tuple, cuda_device
from torch_infini.testing.ops import OpInfo, Sample, all_op_infos

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
on_a_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
OPS = [spec for spec in all_op_infos() if "cuda" in spec.devices]


def tensors(sample: Sample) -> list[torch.Tensor]:
    values = (*sample.args, *sample.kwargs.values())
    return [v for v in values if isinstance(v, torch.Tensor)]


def on_cuda(sample: Sample) -> Sample:
    move = lambda v: v.clone().to(DEVICE) if isinstance(v, torch.Tensor) else v
    return Sample(sample.name, tuple(map(move, sample.args)), {k: move(v) for k, v in sample.kwargs.items()})


def other_samples(spec: OpInfo, dtype: torch.dtype, seed: int) -> list[Sample]:
    torch.manual_seed(seed)
    return [on_cuda(sample) for sample in spec.samples_on_cuda(dtype)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.full(beyond=20)
@pytest.mark.parametrize("spec", OPS, ids=lambda spec: spec.name)
def test_replay(spec: OpInfo) -> None:
    """What is replayed is what a call makes of the data that is there then."""
    dtype = torch.bfloat16 if torch.bfloat16 in spec.dtypes else spec.dtypes[0]
    for sample, other in zip(other_samples(spec, dtype, 1), other_samples(spec, dtype, 2), strict=True):
        result, replay = captured(lambda s=sample: spec.op(*s.args, **s.kwargs))
        for there, new in zip(tensors(sample), tensors(other), strict=True):
            there.copy_(new)
        for out in as_tuple(result) if spec.outputs else ():
            out.fill_(77)
        replay()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        expected = spec.op(*other.args, **other.kwargs)
        pairs = zip(as_tuple(result), as_tuple(expected)) if spec.outputs else zip(tensors(sample), tensors(other))
        for got, want in pairs:
            assert same_bits(got, want), sample.name


@on_a_gpu
@pytest.mark.parametrize("spec", OPS, ids=lambda spec: spec.name)
def test_side_stream(spec: OpInfo) -> None:
    """An op runs on torch's current stream: behind a slow kernel that makes its input."""
    sample = other_samples(spec, spec.dtypes[0], 3)[-1]
    want = spec.op(*sample.args, **sample.kwargs) if spec.outputs else None
    if want is None:
        pytest.skip("it writes into its arguments: test_replay has it")
    late = [torch.zeros_like(t) for t in tensors(sample)]
    by_id = {id(t): new for t, new in zip(tensors(sample), late, strict=True)}
    swapped = lambda v: by_id.get(id(v), v)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        for new, old in zip(late, tensors(sample), strict=True):
            new.copy_(old)
        got = spec.op(*map(swapped, sample.args), **{k: swapped(v) for k, v in sample.kwargs.items()})
        torch.cuda.current_stream().synchronize()
    for a, b in zip(as_tuple(got), as_tuple(want), strict=True):
        assert same_bits(a, b)


@on_a_gpu
def test_other_device() -> None:
    """Tensors of another device than the current one are computed there; tensors of two devices are refused."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, w = torch.randn(3, 64, device="cuda:1"), torch.randn(64, device="cuda:1")
    y = torch.ops.infini.rms_norm(x, w, 1e-6)
    assert y.device == x.device and torch.cuda.current_device() == 0
    torch.testing.assert_close(y.cpu(), torch.ops.infini.rms_norm(x.cpu(), w.cpu(), 1e-6))
    with pytest.raises(RuntimeError, match="weight must be on the device of the other arguments, cuda:1, got cuda:0"):
        torch.ops.infini.rms_norm(x, w.to("cuda:0"), 1e-6)


@on_a_gpu
def test_more_than_two_to_the_31_elements() -> None:
    """Offsets have 64 bits: the last rows of a tensor that is too large for 32."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB")
    rows, n = 2**19 + 2, 4096
    x = torch.ones(rows, n, dtype=torch.bfloat16, device=DEVICE)
    x[-2:] = torch.randn(2, n, device=DEVICE)
    w = torch.randn(n, device=DEVICE).bfloat16()
    y = torch.ops.infini.rms_norm(x, w, 1e-6)
    assert same_bits(y[-2:], torch.ops.infini.rms_norm(x[-2:].clone(), w, 1e-6))
    assert same_bits(y[:1], y[rows - 3 : rows - 2])
    out = torch.ops.infini.swiglu(x, x)
    assert same_bits(out[-2:], torch.ops.infini.swiglu(x[-2:].clone(), x[-2:].clone()))


def test_programs_are_refused() -> None:
    """They are the CPU's; the sentence says what there is instead."""
    x = torch.ones(2, 8, device=DEVICE)
    with pytest.raises(RuntimeError) as caught, torch.no_grad():
        program(lambda: torch.ops.infini.silu(x))
    rule = "every tensor must be on the CPU" if DEVICE == "cuda" else "the kernels must be the CPU's"
    got = "one on cuda:0" if DEVICE == "cuda" else "emulated CUDA"
    assert str(caught.value) == (
        f"torch_infini.runtime.program: {rule} (on CUDA use torch_infini.runtime.graph), got {got}"
    )
