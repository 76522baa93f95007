"""torch.export: modules that use the ops are saved, and give the same bits where only torch_infini is imported."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import torch_infini
from support.fresh_python import run_python
from torch_infini import ops

ROOT = Path(__file__).resolve().parent.parent

HEADS, KV_HEADS, SIZE, LONGEST = 4, 2, 8, 64
HIDDEN = HEADS * SIZE


class Layer(nn.Module):
    """A LLaMA layer, made of ops."""

    def __init__(self) -> None:
        super().__init__()
        parameter = lambda *shape: nn.Parameter(torch.randn(shape) / 8)  # noqa: E731
        self.norm = parameter(HIDDEN)
        self.q = parameter(HEADS * SIZE, HIDDEN)
        self.k, self.v = parameter(KV_HEADS * SIZE, HIDDEN), parameter(KV_HEADS * SIZE, HIDDEN)
        self.o = parameter(HIDDEN, HIDDEN)
        self.gate_up, self.down = parameter(6 * HIDDEN, HIDDEN), parameter(HIDDEN, 3 * HIDDEN)
        angle = torch.arange(LONGEST)[:, None] * 10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        rows = x.shape[:-1]
        h = ops.rms_norm(x, self.norm, rounding="llama")
        q = ops.rope(ops.linear(h, self.q).view(*rows, HEADS, SIZE), self.cos, self.sin, positions)
        k = ops.rope(ops.linear(h, self.k).view(*rows, KV_HEADS, SIZE), self.cos, self.sin, positions)
        v = ops.linear(h, self.v).view(*rows, KV_HEADS, SIZE)
        x = x + ops.linear(ops.attention(q, k, v).flatten(-2), self.o)
        return x + ops.linear(ops.swiglu(ops.linear(x, self.gate_up)), self.down)


class InPlace(nn.Module):
    """Writes into a new tensor, and with the out form into a given one."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + 1
        torch.ops.infini.silu_(y)
        return torch.ops.infini.causal_softmax.out(y, out=torch.empty_like(y))


class PatchedModel(nn.Module):
    """The logits of a patched LLaMA (a plain tensor: loading an output class would need its definition)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
        self.model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).eval()
        torch_infini.patch_model(self.model)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


def inputs(batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, HIDDEN), torch.arange(length).expand(batch, length)


BATCH, LENGTH = torch.export.Dim("batch"), torch.export.Dim("length", max=LONGEST)
LAYER_SHAPES = {"x": {0: BATCH, 1: LENGTH}, "positions": {0: BATCH, 1: LENGTH}}

LAYER_OPS = {"rms_norm.default", "linear.default", "rope.default", "attention.default", "swiglu.default"}

# name: (module, its ops, example inputs, dynamic shapes, other inputs that must be served)
CASES = {
    "static": (Layer, LAYER_OPS, inputs(2, 5), None, []),
    "dynamic": (
        Layer,
        LAYER_OPS,
        inputs(2, 5),
        LAYER_SHAPES,
        [inputs(1, 1), inputs(3, 9), inputs(1, LONGEST), inputs(0, 4)],
    ),
    "patched model": (
        PatchedModel,
        {"rms_norm.default", "rope_.default", "attention.default", "swiglu.default"},
        (torch.randint(0, 64, (2, 5)),),
        {"ids": {0: BATCH, 1: LENGTH}},
        [(torch.randint(0, 64, (3, 11)),)],
    ),
    "in place": (
        InPlace,
        {"silu_.default", "causal_softmax.out"},
        (torch.randn(3, 4),),
        {"x": {0: BATCH, 1: LENGTH}},
        [(torch.randn(5, 6),)],
    ),
}

# Compares with what the module gave eagerly. Its arguments: the file with the program, the file with calls and results.
COMPARE = """
for arguments, expected in torch.load(sys.argv[2]):
    with torch.no_grad():
        assert torch.equal(program(*arguments), expected), [list(a.shape) for a in arguments]
    print(list(expected.shape))
"""
LOAD = "program = torch.export.load(sys.argv[1]).module()\n"
LOAD_PACKAGE = "program = torch._inductor.aoti_load_package(sys.argv[1])\n"


def python(code: str, *arguments: Path) -> subprocess.CompletedProcess[str]:
    return run_python("import sys, torch\n" + code, *arguments)


def export(name: str, folder: Path) -> tuple[torch.export.ExportedProgram, Path, list[str]]:
    """The exported program of a case, a file with calls and what they gave eagerly, and the shapes of the results."""
    make, _, example, shapes, others = CASES[name]
    module = make().eval()
    with torch.no_grad():
        results = [(arguments, module(*arguments)) for arguments in (example, *others)]
        program = torch.export.export(module, example, dynamic_shapes=shapes)
    torch.save(results, folder / "results.pt")
    return program, folder / "results.pt", [str(list(result.shape)) for _, result in results]


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("name", CASES)
def test_export(name: str, tmp_path: Path) -> None:
    program, results, shapes = export(name, tmp_path)
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert {f"infini.{op}" for op in CASES[name][1]} <= targets  # the ops are what they were
    torch.export.save(program, tmp_path / "program.pt2")
    done = python("import torch_infini\n" + LOAD + COMPARE, tmp_path / "program.pt2", results)
    assert done.stdout.splitlines() == shapes, done.stderr


def test_without_torch_infini(tmp_path: Path) -> None:
    """Loading fails and says what is missing, and importing it is what helps."""
    program, _, _ = export("static", tmp_path)
    torch.export.save(program, tmp_path / "program.pt2")
    done = python(LOAD, tmp_path / "program.pt2")
    assert done.returncode != 0
    assert "failed to resolve torch.ops.infini.rms_norm.default to an operator" in done.stderr
    assert "Please import the custom op" in done.stderr


@pytest.mark.full
def test_ahead_of_time_package(tmp_path: Path) -> None:
    """AOTInductor's package: compiled code that calls the ops; without torch_infini it names the one it misses."""
    program, results, shapes = export("dynamic", tmp_path)
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "package.pt2"))
    done = python("import torch_infini\n" + LOAD_PACKAGE + COMPARE, Path(package), results)
    assert done.stdout.splitlines() == shapes, done.stderr
    done = python(LOAD_PACKAGE, Path(package))
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith("Could not find schema for infini::rms_norm.")
