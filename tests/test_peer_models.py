"""The GGUF files that benchmarks write for llama.cpp hold the checkpoint: read back, the model has its logits."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import torch_infini
from torch_infini.testing.shapes import saved_shape

pytest.importorskip("gguf")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.full, pytest.mark.usefixtures("one_thread")]

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("shape", ["tiny", "tiny-A3B", "tiny-gpt-oss", "tiny-gemma3", "tiny-phi3", "tiny-glm4"])
def test_logits_of_the_file(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    folder, path = saved_shape(shape, tmp_path), tmp_path / "BF16.gguf"
    importlib.import_module("gguf_models").write_bf16(folder, path, tokens=["a", "b"])
    ids = torch.randint(512, (1, 140), generator=torch.Generator().manual_seed(0))  # beyond gpt-oss' window
    with torch.no_grad():
        own, found = (torch_infini.load(one, torch.float32)(ids, use_cache=False).logits for one in (folder, path))
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-4 * float(own.abs().max()))
