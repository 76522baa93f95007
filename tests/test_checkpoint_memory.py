"""Resident memory while a quantized checkpoint is loaded: at most the file and a tenth of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.checkpoint_writers import CASES, write_folder, write_gguf

# A process of its own. A small model is loaded first, for what imports and thread pools take.
MEASURE = """
import re, sys
from pathlib import Path
import torch
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
"""
LARGE = {"hidden_size": 1024, "intermediate_size": 2048}
LAYERS = {"gptq": 8, "gguf": 36}  # as in large models, no layer is much


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    paths, sizes = [tmp_path / "first"], [0]
    write_folder(paths[0], CASES["gptq"])
    paths += [tmp_path / "gptq", tmp_path / "model.gguf"]
    write_folder(paths[1], CASES["gptq"], **LARGE, num_hidden_layers=LAYERS["gptq"])
    write_gguf(paths[2], lambda module: "Q4_0", **LARGE, num_hidden_layers=LAYERS["gguf"])
    sizes += [(paths[1] / "model.safetensors").stat().st_size, paths[2].stat().st_size]
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    for path, size, peak in list(zip(paths, sizes, map(int, done.stdout.split())))[1:]:
        assert peak <= 1.1 * size, f"{path.name}: {peak / size:.3f} of the file, {size} bytes"
        assert peak > 0.5 * size  # it is measured
        print(f"{path.name}: {peak / size:.3f} of {size} bytes")
