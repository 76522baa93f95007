"""LLM, recorded programs, graphs and streams on the device infini: the CPU's tokens, from the memory behind infini."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_infini
from torch_infini import LLM, SamplingParams, runtime
from torch_infini.device import unwrap
from torch_infini.engine.decode import DecodeSteps
from torch_infini.models import Llama
from torch_infini.testing.checkpoints import random_model, save_tokenizer

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("infini", "one_thread")
ops = torch.ops.infini

PROMPTS = ["hello world", "naïve café ☕", "x"]
GREEDY = SamplingParams.greedy(max_tokens=24)
DRAWN = SamplingParams(max_tokens=12, temperature=0.9, top_k=20, top_p=0.9, seed=7, repetition_penalty=1.1, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = random_model("llama")
    model.save_pretrained(path)
    save_tokenizer(path, model.config.vocab_size)
    return path


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_llm(folder: Path, params: SamplingParams, weights: Any) -> None:
    expected = [output.token_ids for output in LLM(folder, quantization=weights).generate(PROMPTS, params)]
    llm = LLM(folder, quantization=weights, device="infini")
    outputs = llm.generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == expected and len(expected[0]) > 1
    assert llm.metrics().free_blocks == llm.metrics().blocks


def test_steps_are_recorded(folder: Path) -> None:
    """A decode step on infini is one program; its replay sees what is written to the tensors on either device."""
    models = [Llama.from_pretrained(folder, device=device, progress=False) for device in ("cpu", "infini")]
    logits = []
    with torch.no_grad():
        for model in models:
            steps = DecodeSteps(model, model.new_cache(8, 4))
            step = steps.step(2, 1)
            step.inputs.copy_(torch.tensor([[3, 5], [0, 0], [0, 4], [1, 1]]))
            step.tables.copy_(torch.tensor([[0], [1]]))
            first = step.run().cpu().clone()
            assert step._replay is not None and isinstance(step._replay.__self__, runtime.programs.Program)  # type: ignore[attr-defined]
            unwrapped = unwrap(step.inputs) if model is models[1] else step.inputs
            unwrapped.copy_(torch.tensor([[9, 7], [1, 1], [1, 5], [2, 2]]))  # on the host
            second = step.run().cpu().clone()
            assert not torch.equal(first, second)
            logits.append((first, second))
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def test_program() -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.randn(32)
    there = [t.to("infini") for t in (x, weight, residual)]
    with torch.no_grad():
        program = runtime.program(lambda: ops.silu(ops.rms_norm(there[0], there[1], 1e-6)[:, 3:20]))
    assert program.calls == 2 and program.arena_bytes > 0
    assert program.outputs.device.type == "infini"
    for _ in range(2):
        x.normal_()
        there[0].copy_(x)
        expected = ops.silu(ops.rms_norm(x, weight, 1e-6)[:, 3:20])
        made = program.replay()
        assert made is program.outputs and torch.equal(made.cpu(), expected)
        assert torch.equal(unwrap(made), expected)
    address = program.outputs.data_ptr()
    del there[1], weight  # the program keeps what it reads
    torch.randn(1000, device="infini")
    program.replay()
    assert program.outputs.data_ptr() == address


def test_program_of_two_devices() -> None:
    x = torch.randn(4)
    y = x.to("infini")
    with pytest.raises(RuntimeError, match="all tensors must be on one device, got one on infini.* after one on cpu"):
        runtime.program(lambda: (ops.silu(x), ops.silu(y)))
    with pytest.raises(RuntimeError, match="fn must call nothing but ops of torch.ops.infini.* got aten.exp"):
        runtime.program(y.exp)


def test_graph() -> None:
    x = torch.randn(4, 8)
    with torch.no_grad():
        graph = runtime.graph(lambda t: ops.silu(t) + 1, x.to("infini"))
    y = torch.randn(4, 8)
    made = graph(y.to("infini"))
    assert made.device.type == "infini" and torch.equal(made.cpu(), ops.silu(y) + 1)


def test_streams() -> None:
    """runtime's streams of infini are those of its backing, and keep its tensors."""
    stream = runtime.Stream("infini", queued=True)
    assert stream.device.type == "cpu"
    x = torch.zeros(8, device="infini")
    stream.launch(lambda t: t.add_(1), x)
    stream.uses(x)
    stream.synchronize()
    assert x.cpu().eq(1).all()


def test_unknown_devices(folder: Path) -> None:
    with pytest.raises(ValueError, match="device must be cpu, cuda, cuda:N, or infini once it is enabled, got 'tpu0'"):
        LLM(folder, device="tpu0")


def test_communicator_of_infini() -> None:
    """The number by which collective ops name a single rank."""
    group = torch_infini.distributed.communicator(device="infini")
    x = torch.randn(3, device="infini")
    assert group == 0 and torch.equal(ops.all_reduce(x, group).cpu(), x.cpu())
