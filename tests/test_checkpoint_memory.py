"""Resident memory while a quantized checkpoint is loaded: at most the file and a tenth of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoint_writers import CASES, write_folder, write_gguf

# A process of its own. A small model is loaded first, for what imports and thread pools take.
MEASURE = """
import gc, re, sys
from pathlib import Path
import torch
from torch_infini._core.memory import trim
from torch_infini.models import Llama

def size(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
for path in sys.argv[1:]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = size("VmRSS")
    model = Llama.from_pretrained(path, dtype="float16", progress=False)
    print(size("VmHWM") - before)
    del model
    gc.collect()
    trim()
"""
LARGE = {"hidden_size": 1024, "intermediate_size": 2048}
TABLE = {"vocab_size": 65536, "tie_word_embeddings": True, "hidden_size": 512}  # most of the file
LAYERS = {"gptq": 40, "fp8-blocks": 16, "Q4_0": 36, "Q6_K": 24, "Q8_0": 16}  # as in large models, no layer is much


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    paths, sizes = [tmp_path / "first"], [0]
    write_folder(paths[0], CASES["gptq"])
    for name in ("gptq", "fp8-blocks"):
        paths.append(tmp_path / name)
        write_folder(paths[-1], CASES[name], **LARGE, num_hidden_layers=LAYERS[name])
        sizes.append((paths[-1] / "model.safetensors").stat().st_size)
    for kind in ("Q4_0", "Q6_K", "Q8_0"):
        paths.append(tmp_path / f"{kind}.gguf")
        write_gguf(paths[-1], lambda module, kind=kind: kind, **LARGE, num_hidden_layers=LAYERS[kind])
        sizes.append(paths[-1].stat().st_size)
    paths.append(tmp_path / "table.gguf")
    write_gguf(paths[-1], lambda module: "Q8_0", **TABLE)
    sizes.append(paths[-1].stat().st_size)
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for path, size, peak in list(zip(paths, sizes, map(int, done.stdout.split())))[1:]:
        assert peak <= 1.1 * size, f"{path.name}: {peak / size:.3f} of the file, {size} bytes"
        assert peak > 0.5 * size  # it is measured
        print(f"{path.name}: {peak / size:.3f} of {size} bytes")
