"""Layers and models whose weights lie in panels: quantized on the CPU, and moved to CUDA or its emulation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engines import finish
from support.tiny_llama import calls, greedy, tiny, tokens
from torch_infini import patch_model, save_patched
from torch_infini.engine import Engine, EngineConfig, SamplingParams
from torch_infini.models import Llama
from torch_infini.nn import Linear
from torch_infini.testing import cuda_device
from torch_infini.testing.ops import OP_INFOS
from torch_infini.weights import FORMATS

DEVICE = cuda_device()
pytestmark = [
    pytest.mark.skipif(DEVICE is None, reason="no GPU, and the libraries are not the emulated ones"),
    pytest.mark.parametrize("name", ["group8", "table4"]),
]


def seeded(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


def layer(name: str, n: int, k: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Linear:
    made = Linear(k, n, True, name, dtype, "cpu")
    made.load(seeded(n, k, dtype=dtype))
    assert made.bias is not None
    made.bias.copy_(seeded(n, dtype=dtype))
    return made.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layer(name: str, dtype: torch.dtype) -> None:
    """A layer gives the CPU's bits for rows at any distance, few or many, and comes back as it was."""
    before = layer(name, 37, 200, dtype)
    moved = copy.deepcopy(before).to(DEVICE)
    assert torch.equal(moved.dense().cpu(), before.dense())
    for rows in (1, 5, 8, 9, 32, 41):
        wide = seeded(rows, 213, dtype=dtype)
        x = wide.to(DEVICE)[:, 6:206]
        out = torch.full((rows, 50), 77, dtype=dtype, device=DEVICE)
        expected = OP_INFOS[f"linear_{name}"].reference(wide[:, 6:206], *before.integers[:2], before.bias)
        assert torch.equal(moved(x).cpu().double(), expected), rows
        moved(x, out[:, 9:46])
        assert torch.equal(out[:, 9:46].cpu().double(), expected) and (out[:, :9] == 77).all(), rows
    back = moved.to("cpu")
    for mine, theirs in zip(back.parameters(), before.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_rows_are_copied_between_devices(name: str) -> None:
    """As folders are read to CUDA, and written from there: whole panels, and rows that begin within one."""
    here, there = layer(name, 70, 100), layer(name, 70, 100, device=str(DEVICE))
    for first, row, rows in ((0, 0, 70), (16, 32, 20), (3, 17, 40)):
        for some, to in ((here, there), (there, here)):
            wanted = to.dense().cpu()
            wanted[row : row + rows] = some.dense().cpu()[first : first + rows]
            for mine, theirs in zip(some.integers[:2], to.integers[:2], strict=True):
                FORMATS[name].put(mine.data, first, theirs.data, row, rows)
            assert torch.equal(to.dense().cpu(), wanted), (first, row, rows)


def test_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched model that is moved, its folder, and the engine's decoder of that folder."""
    model: Any = tiny(intermediate_size=128)
    with monkeypatch.context() as patching:  # as on a CPU that is no emulation of CUDA
        for one in FORMATS.values():
            patching.setattr(one, "quantizes_on", lambda device, one=one: one.name in ("group8", name))
        patch_model(model, weights=FORMATS[name].serves, strict=True)
    save_patched(model, tmp_path / "cpu")
    model = model.to(DEVICE)
    ids = tokens().to(DEVICE)
    assert calls(model, ids)[f"linear_{name}"] > 0
    save_patched(model, tmp_path / "cuda")
    written = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("cpu", "cuda")]
    assert written[0] == written[1]

    read = Llama.from_pretrained(tmp_path / "cpu", device=str(DEVICE), progress=False)
    assert read.layers[0].mlp.down.format == name and read.head.format == "group8"
    prompt = ids[0].tolist()
    engine = Engine(read, config=EngineConfig(max_model_len=64))
    id = engine.add(prompt, SamplingParams.greedy(max_tokens=8))
    assert finish(engine)[id].token_ids == greedy(model, ids[:1], max_new_tokens=8)[0, len(prompt) :].tolist()
