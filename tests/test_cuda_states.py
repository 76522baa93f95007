"""causal_conv1d, gated_delta_rule, ssd and selective_scan on CUDA (or its emulation) where tests/test_cuda.py does not
reach: several tokens a thread, long states, states beyond registers, and offsets and slots that are wrong.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_infini.testing import call, check_against_reference, cuda_device, moved, on_cpu
from torch_infini.testing.ops import OP_INFOS, Sample, causal_conv1d, gated_delta_rule, selective_scan, ssd

DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")
TWO = {"offsets": torch.tensor([0, 4, 9])}


def packed(op: str, tokens: int, rows: int, columns: int = 16) -> dict[str, Any]:
    """The arguments of a call with sequences in one row of tokens and a state, by name."""
    f = torch.float32
    if op == "causal_conv1d":
        args = (*causal_conv1d.inputs(f, tokens, 24), causal_conv1d.states(f, rows, 24, 3))
    elif op == "gated_delta_rule":
        args = (*gated_delta_rule.inputs(f, tokens, dims=(columns, 9)), gated_delta_rule.states(rows, 2, columns, 9))
    elif op == "ssd":
        args = (*ssd.inputs(f, tokens, dims=(9, columns)), None, ssd.states(rows, 2, 9, columns))
    else:
        made = selective_scan.inputs(f, tokens, channels=9, columns=columns)
        args = (*made, None, None, selective_scan.states(rows, 9, columns))
    return dict(zip(OP_INFOS[op].arguments, args, strict=False))


def run(op: str, arguments: dict[str, Any], **more: Any) -> tuple[Tensor, Tensor]:
    """(out, state) on the CPU, of copies of the arguments."""
    arguments = {k: v.clone() if isinstance(v, Tensor) else v for k, v in {**arguments, **more}.items()}
    there = moved(Sample("", (), arguments), DEVICE).kwargs
    getattr(torch.ops.infini, op)(**there)
    return there["out"].cpu(), there["state"].cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_tokens_a_thread(dtype: torch.dtype) -> None:
    """Sequences that begin and end within a thread's tokens, and at their ends, some shorter than the width."""
    spec, dims = OP_INFOS["causal_conv1d"], (24, 70)
    offsets = torch.tensor([0, 2, 2, 16, 17, 19, 64, 65, 79, 500, 516])
    slots = torch.tensor([9, 0, -1, 3, 2, 5, 1, 4, 7, 8])
    for width in (2, 4, 7):
        for channels in dims:
            args = causal_conv1d.inputs(dtype, 516, channels, width=width)
            state = causal_conv1d.states(dtype, 10, channels, width)
            sample = Sample(f"width {width}", (*args, state), {"offsets": offsets, "slots": slots, "silu": True})
            there = call(spec, moved(sample, DEVICE))
            check_against_reference(spec, sample, dtype, on_cpu(there), on_cuda=True)
    args = causal_conv1d.inputs(dtype, 3, 181, 24)
    sample = Sample("a batch", (*args, causal_conv1d.states(dtype, 3, 24, 5)))
    check_against_reference(spec, sample, dtype, on_cpu(call(spec, moved(sample, DEVICE))), on_cuda=True)


@pytest.mark.parametrize("columns", [100, 256, 512])
@pytest.mark.parametrize("op", ["gated_delta_rule", "ssd", "selective_scan"])
def test_long_states(op: str, columns: int) -> None:
    spec = OP_INFOS[op]
    if op == "selective_scan" and columns == 512:
        columns = 192
    sample = Sample("", tuple(packed(op, 9, 2, columns).values()), TWO)
    check_against_reference(spec, sample, torch.float32, on_cpu(call(spec, moved(sample, DEVICE))), on_cuda=True)


@pytest.mark.parametrize(
    ("op", "name", "most"), [("gated_delta_rule", "q", 512), ("ssd", "b", 512), ("selective_scan", "a", 256)]
)
def test_states_beyond_registers(op: str, name: str, most: int) -> None:
    says = f"infini::{op}: {name} must have at most {most} columns on CUDA, got {most + 1}"
    with pytest.raises(RuntimeError, match=says):
        run(op, packed(op, 9, 2, most + 1), **TWO)


@pytest.mark.parametrize("op", ["causal_conv1d", "gated_delta_rule", "ssd", "selective_scan"])
def test_wrong_slots_and_offsets(op: str) -> None:
    """The device reads them: a sequence without a row of the state is left out, and no token beyond x is touched."""
    arguments = packed(op, 9, 3)
    arguments["out"].fill_(7)
    right = partial(run, op, arguments)
    out, state = right(offsets=torch.tensor([0, 4, 9]), slots=torch.tensor([2, 0]))
    for slot in (3, 2**40):
        got, left = right(offsets=torch.tensor([0, 4, 9]), slots=torch.tensor([2, slot]))
        assert torch.equal(got[:4], out[:4]) and bool((got[4:] == 7).all())
        assert torch.equal(left[2], state[2]) and torch.equal(left[:2], arguments["state"][:2])
    got, left = right(offsets=torch.tensor([0, 4, 2**40]), slots=torch.tensor([2, 0]))
    assert torch.equal(got, out) and torch.equal(left, state)
    got, left = right(offsets=torch.tensor([-5, 4, 2]), slots=torch.tensor([2, 0]))
    assert torch.equal(got[:4], out[:4]) and torch.equal(left[2], state[2])
