"""Ops whose kernels copy strided rows to scratch and back (csrc/common/dense_rows.h): strides change no bit, what lies
between the elements of an output stays as it was, and scratch that cannot be had is an error, with threads too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.fresh_python import run_python
from support.sanitizers import sanitized
from torch_infini.testing import cpu_capability_set_to, kernel_levels
from torch_infini.testing.c_ops import call
from torch_infini.testing.ops import all_c_ops

OPS = {op.name: op for op in all_c_ops()}


def softmax(y: Tensor, x: Tensor) -> None:
    call(OPS["Softmax"], {"y": y, "x": x, "axis": -1})


def log_softmax(y: Tensor, x: Tensor) -> None:
    call(OPS["LogSoftmax"], {"y": y, "x": x})


def causal_softmax(y: Tensor, x: Tensor) -> None:
    call(OPS["CausalSoftmax"], {"y": y[..., :37, :], "x": x[..., :37, :]})


def lp_norm(y: Tensor, x: Tensor) -> None:
    call(OPS["LPNorm"], {"output": y, "input": x, "axis": -1, "p": 2, "eps": 0.0})


def layer_norm(y: Tensor, x: Tensor) -> None:
    other, deviation = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=x.dtype)
    weight = torch.linspace(0.5, 2, x.shape[-1]).to(x.dtype)
    outputs = {"output": y, "input_standardization": other, "input_std_deviation": deviation}
    call(OPS["LayerNorm"], {**outputs, "input": x, "weight": weight, "bias": -weight, "eps": 1e-5})


CALLS = {f.__name__: f for f in (softmax, log_softmax, causal_softmax, lp_norm, layer_norm)}
# Views of the shape [3, rows, columns] in a buffer that is four times as large.
LAYOUTS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "contiguous": lambda b, m, n: b[: 3 * m * n].view(3, m, n),
    "transposed": lambda b, m, n: b[: 3 * m * n].view(3, n, m).transpose(1, 2),
    "last dimension first": lambda b, m, n: b[: 3 * m * n].view(n, 3, m).permute(1, 2, 0),
    "every other": lambda b, m, n: b[: 6 * m * n].view(3, m, 2 * n)[..., 1::2],
    "transposed, every other": lambda b, m, n: b[: 12 * m * n].view(3, 2 * n, 2 * m)[:, 1::2, ::2].transpose(1, 2),
}


@pytest.mark.parametrize("capability", kernel_levels())
@pytest.mark.parametrize("name", CALLS)
def test_strides_do_not_change_bits(name: str, capability: str) -> None:
    with cpu_capability_set_to(capability):
        for dtype in (torch.float32, torch.bfloat16):
            for m, n in ((150, 150), (37, 300), (300, 37)) if name != "causal_softmax" else ((150, 150), (37, 300)):
                x = torch.randn(3, m, n).to(dtype)
                wanted = torch.zeros_like(x)
                CALLS[name](wanted, x)
                for of_x in LAYOUTS:
                    for of_y in LAYOUTS:
                        strided_x = LAYOUTS[of_x](torch.empty(12 * m * n, dtype=dtype), m, n).copy_(x)
                        buffer = torch.full((12 * m * n,), 77, dtype=dtype)
                        y = LAYOUTS[of_y](buffer, m, n).zero_()
                        CALLS[name](y, strided_x)
                        assert torch.equal(y, wanted), (of_x, of_y, dtype, m, n)
                        y.fill_(77)
                        assert (buffer == 77).all(), (of_x, of_y, dtype, m, n)


def test_in_place() -> None:
    for layout in LAYOUTS.values():
        for name, function in CALLS.items():
            x = torch.randn(3, 150, 150)
            wanted = torch.zeros_like(x)
            function(wanted, x)
            y = layout(torch.empty(12 * 150 * 150), 150, 150).copy_(x)
            function(y, y)
            rows = 37 if name == "causal_softmax" else 150
            assert torch.equal(y[:, :rows], wanted[:, :rows]), name


@pytest.mark.skipif(sanitized(), reason="a sanitizer needs more memory")
@pytest.mark.parametrize("threads", [1, 2])
def test_no_memory_for_scratch(threads: int) -> None:
    code = f"""
import resource, torch
from torch_infini.testing.c_ops import CError, call
from torch_infini.testing.ops import all_c_ops
softmax = next(op for op in all_c_ops() if op.name == "Softmax")
torch.set_num_threads({threads})
x = torch.zeros(4, 1 << 25, dtype=torch.bfloat16)
y = torch.zeros_like(x)
call(softmax, {{"y": y[:, :64], "x": x[:, :64], "axis": 1}})
torch.add(y, 1, out=y)  # the threads exist
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))
try:
    call(softmax, {{"y": y, "x": x, "axis": 1}})
except CError as error:
    print(error.status, error)
"""
    done = run_python(code)
    assert done.stdout == (f"INTERNAL_ERROR infini::softmax: no memory for {threads * (4 << 25)} bytes of scratch\n"), (
        done.stderr
    )
