"""The C++ programs of tests/cpp and the example llama.cpp on NVIDIA devices, where recordings are captured as graphs.

On a GPU, or, with INFINI_LIBRARIES=build/native/emulated, on the emulated CUDA runtime. Skipped where there is neither.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.c_runtime import device_count
from support.cpp_programs import EXAMPLES, PROGRAMS, SOURCES, compiled, run, started
from support.rounding import greedy_tokens
from support.tiny_llama import tiny
from torch_infini._core.library import emulates_cuda
from torch_infini.distributed.libinfiniccl import NVIDIA

pytestmark = pytest.mark.skipif(device_count(NVIDIA) == 0, reason="no GPU, and the libraries are not the emulated ones")


@pytest.mark.full(beyond=3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str, tmp_path: Path) -> None:
    run(compiled(SOURCES / f"{name}.cpp", tmp_path), "NVIDIA", tmp_path)


@pytest.mark.skipif(not emulates_cuda(), reason="asks the emulation")
@pytest.mark.parametrize(
    "name", ["test_graph", "test_nn_layers", "test_tensor"]
)  # test_stream_order asks for it itself
def test_program_on_late_streams(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work runs when it is waited for, and no earlier: what is not waited for would read what is not there yet."""
    monkeypatch.setenv("INFINI_EMULATED_STREAMS", "late")
    run(compiled(SOURCES / f"{name}.cpp", tmp_path), "NVIDIA", tmp_path)


def test_tokens(tmp_path: Path) -> None:
    model = tiny(seed=3, attention_bias=True)
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 15, 27, 100, 3]])
    expected = greedy_tokens(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)[0, 5:].tolist()
    llama = compiled(EXAMPLES / "llama.cpp", tmp_path)
    for mode in ("graph", "eager"):
        done = started(llama, tmp_path, "1", "nvidia", mode, "12", *map(str, ids[0].tolist()))
        assert [int(token) for token in done.stdout.split()] == expected, done.stderr
        assert not done.stderr  # a step that could not be captured would be reported there


def test_torchs_ops_are_refused_while_a_graph_of_the_device_is_recorded() -> None:
    """In a sentence; the recording of start ends, that of a block goes on. Views and empty memory are no ops."""
    ic = pytest.importorskip("torch_infini.compat.infinicore")
    device, t = ic.device("cuda:0"), torch.ones(3)
    x = ic.ones([3], dtype=ic.float32, device=device)
    ic.start_graph_recording(device)
    assert t[1:].shape == torch.empty(2).shape
    with pytest.raises(RuntimeError, match="records no ops of torch"):
        t.add_(1)
    assert not ic.is_graph_recording() and ic.stop_graph_recording() is None
    assert t.add_(1).tolist() == [2.0, 2.0, 2.0]
    with ic.graph(device) as g:
        y = ic.add(x, x)
        with pytest.raises(RuntimeError, match="records no ops of torch"):
            t.exp()
    g.run()
    assert torch.from_dlpack(y.to("cpu")).tolist() == [2.0, 2.0, 2.0]
    ic.set_device("cpu")
