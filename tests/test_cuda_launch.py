"""How kernels on CUDA are launched: the setting INFINI_CUDA_PDL, and a chain of small kernels that share few buffers.

On a GPU from sm_90 on, a kernel there may be resident before the one ahead of it is done; a missing wait would show in
the numbers. In the emulation kernels run one after another, and every thread must call the wait (test_emulation.py).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from support.fresh_python import run_python
from torch_infini.testing import cuda_device

ROOT = Path(__file__).resolve().parent.parent
DEVICE = cuda_device()
pytestmark = pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones")

# 40 rounds of a decode step's small kernels: each buffer is read by one kernel and written again by the next but one or
# two. Prints what comes out, eagerly and from a graph.
CHAIN = """
import hashlib, sys, torch, torch_infini
from torch_infini import ops
device, rounds, n = sys.argv[1], int(sys.argv[2]), 256
g = torch.Generator().manual_seed(0)
def made(*shape):
    return (torch.randn(*shape, generator=g) * 0.1).to(torch.bfloat16).to(device)
start, weight, bias = made(4, n), made(2 * n, n), made(2 * n)
norm = torch.ones(n, dtype=torch.bfloat16, device=device)
h, y, wide, narrow = (torch.empty(4, k, dtype=torch.bfloat16, device=device) for k in (n, n, 2 * n, n))
def chain():
    h.copy_(start)
    for _ in range(rounds):
        ops.rms_norm(h, norm, out=y)
        ops.linear(y, weight, bias, out=wide)
        ops.swiglu(wide, out=narrow)
        ops.linear(narrow, weight[:n], out=y)
        ops.add_rms_norm(y, h, norm, out=(narrow, h))
        ops.rms_norm(h, norm, out=h)
chain()
results = [h.clone()]
if device == "cuda":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(3):
        h.zero_()
        graph.replay()
        results.append(h.clone())
assert h.isfinite().all() and h.any()
print(*[hashlib.sha256(r.cpu().view(torch.uint8).numpy().tobytes()).hexdigest() for r in results])
"""


def run(value: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "INFINI_CUDA_PDL": value}
    return run_python(code, *arguments, env=env)


def test_a_chain_of_kernels() -> None:
    """The same bits with kernels launched one after another, with early launches, and in graphs."""
    said = [run(value, CHAIN, str(DEVICE), "40" if DEVICE == "cuda" else "2") for value in ("0", "1", "")]
    assert not any(done.returncode for done in said), [done.stderr for done in said]
    assert len({bits for done in said for bits in done.stdout.split()}) == 1


@pytest.mark.parametrize("value", ["maybe", "2", "01"])
def test_a_setting_that_is_none(value: str) -> None:
    """Refused at every launch."""
    code = (
        "import sys, torch, torch_infini\n"
        "for _ in range(2):\n"
        "    try: torch_infini.ops.swiglu(torch.ones(2, 8, device=sys.argv[1]))\n"
        "    except RuntimeError as error: print(error)\n"
    )
    done = run(value, code, str(DEVICE))
    sentence = f"infini: INFINI_CUDA_PDL must be 0 or 1, or not be set, got '{value}'"
    assert done.stdout.splitlines() == [sentence] * 2, done
