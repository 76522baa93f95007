"""LinearAdd of the C ABI beyond the generic tests: the bits of Linear followed by Add, at every level, on CUDA too."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch
from torch import Tensor

from support.c_runtime import CPU, NVIDIA, ok
from test_tiles import at_tile_level
from torch_infini.ops import FLOATS
from torch_infini.testing import cpu_capability_set_to, cuda_device, kernel_levels, threads_set_to
from torch_infini.testing.c_ops import Descriptor, call, clone
from torch_infini.testing.ops import all_c_ops
from torch_infini.testing.ops.linear import inputs

OPS = {op.name: op for op in all_c_ops()}
ROWS = (1, 2, 7, 16, 17, 64, 130)  # two rows are streamed, 17 are cuBLAS's, 130 of bfloat16 are packed


def operands(dtype: torch.dtype, rows: int) -> dict[str, Tensor | None]:
    """Rows of out and residual that are apart; products and residuals from denormal to large, and both zeros."""
    k, n = 333, 71
    x, weight, bias = inputs(dtype, rows, k=k, n=n, bias=rows % 2 == 1, seed=rows)
    generator = torch.Generator().manual_seed(rows)
    scales = torch.tensor([1.0, 100.0, 0.01, 2.0**-24, 2.0**-130, 0.0, -0.0])
    wide = torch.randn(rows, n + 9, generator=generator) * scales[torch.randint(7, (rows, n + 9), generator=generator)]
    weight[3] = 0
    out = torch.full((rows, n + 9), 77.0).to(dtype)[:, 4 : n + 4]
    return {"out": out, "x": x, "weight": weight, "bias": bias, "residual": wide.to(dtype)[:, 4 : n + 4]}


def two_ops(args: dict[str, Any]) -> Tensor:
    """Linear, and Add of the residual to its result."""
    product = torch.empty_like(args["out"])
    call(OPS["Linear"], {**{key: args[key] for key in ("x", "weight", "bias")}, "out": product})
    call(OPS["Add"], {"c": args["out"], "a": product, "b": args["residual"]})
    return args["out"]


def one_op(args: dict[str, Any]) -> Tensor:
    call(OPS["LinearAdd"], args)
    return args["out"]


def same_bits(dtype: torch.dtype, rows: int, device: str = "cpu") -> None:
    args = operands(dtype, rows)
    want = two_ops(clone(args, device))
    got = one_op(clone(args, device))
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), rows
    in_place = clone(args, device)
    in_place["out"] = in_place["residual"]
    assert torch.equal(one_op(in_place).view(torch.uint8), want.view(torch.uint8)), rows


@pytest.mark.parametrize("level", kernel_levels())
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_of_two_ops(dtype: torch.dtype, level: str) -> None:
    with cpu_capability_set_to(level):
        for rows in ROWS:
            for threads in (1, 3):
                with threads_set_to(threads):
                    same_bits(dtype, rows)


@pytest.mark.full
def test_bits_of_two_ops_in_tile_registers() -> None:
    done: subprocess.CompletedProcess[str] = at_tile_level(
        "import sys; sys.path.insert(0, 'tests'); import torch; from test_linear_add import ROWS, same_bits\n"
        "for rows in ROWS: same_bits(torch.bfloat16, rows)\n"
        "print('same bits')"
    )
    assert done.stdout == "same bits\n", done.stderr


@pytest.mark.skipif(cuda_device() is None, reason="no GPU, and the libraries are not the emulated ones")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_bits_of_two_ops_on_cuda(dtype: torch.dtype) -> None:
    ok("SetDevice", NVIDIA, 0)
    try:
        for rows in ROWS:
            same_bits(dtype, rows, str(cuda_device()))
    finally:
        ok("SetDevice", CPU, 0)


@pytest.mark.skipif(cuda_device() is None, reason="no GPU, and the libraries are not the emulated ones")
def test_workspace_on_cuda() -> None:
    """None for streamed rows; else that of Linear and the product."""
    for rows in (16, 17):
        args = operands(torch.bfloat16, rows)
        ok("SetDevice", NVIDIA, 0)
        try:
            with Descriptor(OPS["LinearAdd"], args) as sum_, Descriptor(OPS["Linear"], args) as product:
                more = 0 if rows == 16 else rows * 71 * 2
                assert sum_.workspace_size() == product.workspace_size() + more
        finally:
            ok("SetDevice", CPU, 0)
