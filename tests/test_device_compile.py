"""torch.compile and torch.export on the device infini: one graph, the eager results, a recompile on another shape."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_infini
from torch_infini.testing.patched_families import FAMILIES, logits, prompts

pytestmark = [
    pytest.mark.usefixtures("infini", "one_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
BACKENDS = ("eager", "aot_eager", "inductor", "infini")


@pytest.fixture(autouse=True)
def anew() -> None:
    torch._dynamo.reset()


class Block(nn.Module):
    """RMSNorm and a gated MLP in plain torch, which backend="infini" finds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48))
        self.gate, self.up, self.down = nn.Linear(48, 80), nn.Linear(48, 80), nn.Linear(80, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


# float32: sums of 80 products in another order.
def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.full(beyond=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(backend: str) -> None:
    model, x = Block(), torch.randn(5, 48)
    there = copy.deepcopy(model).to("infini")
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(there, backend=counter, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for rows, graphs in ((5, 1), (5, 1), (7, 2)):
            x = torch.randn(rows, 48)
            made = compiled(x.to("infini"))
            assert made.device.type == "infini" and counter.frame_count == graphs
            close(made, model(x))
    if backend == "infini":
        report = torch_infini.compile.last_report()
        assert report is not None and not report.skipped and report.lines()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_training(backend: str) -> None:
    model, x = Block(), torch.randn(5, 48)
    there = copy.deepcopy(model).to("infini")
    compiled = torch.compile(there, backend=backend, fullgraph=True)
    model(x).square().sum().backward()
    compiled(x.to("infini")).square().sum().backward()
    for p, q in zip(model.parameters(), there.parameters(), strict=True):
        assert q.grad is not None and q.grad.device.type == "infini" and p.grad is not None
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-4)


def sums(x: torch.Tensor) -> Any:
    return x.sum(0), x.softmax(-1), x.sort(-1)[0], torch.where(x > 0, x, x.exp()), x.view(-1)[::3].clone()


def written(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros_like(x)
    y[1:].copy_(x[:-1])
    y.add_(1)
    return y


def moved(x: torch.Tensor) -> torch.Tensor:
    return (x.cpu() * 2).to(x.device) + x


def made_inside(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[1], device=x.device) + torch.full((1,), 3.0, device=x.device)


def of_ours(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.infini.rms_norm(x.relu(), x[0], 1e-6) + torch.ops.infini.silu(x)


@pytest.mark.parametrize("function", [sums, written, moved, made_inside, of_ours], ids=lambda f: f.__name__)
def test_inductor(function: Any) -> None:
    x = torch.randn(6, 33)
    compiled = torch.compile(function, backend="inductor", fullgraph=True)
    with torch.no_grad():
        made, want = compiled(x.to("infini")), function(x)
    for got, expected in zip(*(v if isinstance(v, tuple) else (v,) for v in (made, want)), strict=True):
        assert got.device.type == "infini"
        close(got, expected)


def test_dynamic_shapes() -> None:
    compiled = torch.compile(sums, backend="inductor", fullgraph=True, dynamic=True)
    for rows in (3, 4, 9):
        x = torch.randn(rows, 33)
        for got, expected in zip(compiled(x.to("infini")), sums(x), strict=True):
            close(got, expected)


def test_a_gradient_is_not_lost() -> None:
    """Ops of ours have no backward on infini either: eager and compiled."""
    x = torch.randn(3, 8, device="infini", requires_grad=True)
    for run in (of_ours, torch.compile(of_ours, backend="aot_eager", fullgraph=True)):
        with pytest.raises(RuntimeError, match="infini::.* has no backward"):
            run(x).sum().backward()
    with pytest.raises(RuntimeError, match="must be detached"):
        torch.ops.infini.silu.out(x, out=torch.empty(3, 8, device="infini"))


def test_cpp_wrapper_is_refused() -> None:
    with pytest.raises(Exception, match="Inductor must write its wrapper in Python"):
        torch.compile(sums, backend="inductor", options={"cpp_wrapper": True})(torch.randn(3, 33, device="infini"))


def test_export() -> None:
    model, x = Block().eval(), torch.randn(5, 48)
    there = copy.deepcopy(model).to("infini")
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(there, (x.to("infini"),), dynamic_shapes={"x": {0: rows}})
    for count in (5, 9):
        x = torch.randn(count, 48)
        made = program.module()(x.to("infini"))
        assert made.device.type == "infini"
        close(made, model(x))


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("backend", ["inductor", "infini"])
def test_a_language_model(backend: str) -> None:
    pytest.importorskip("transformers")
    model, ids = FAMILIES[0].build(), prompts()
    want = logits(model, ids)
    model.to("infini")
    made = logits(torch.compile(model, backend=backend), ids.to("infini")).cpu()
    torch.testing.assert_close(made, want, rtol=1e-4, atol=1e-4)
    if backend == "infini":
        report = torch_infini.compile.last_report()
        assert report is not None and not report.skipped
