"""llama.cpp computes of our GGUF files what transformers computes of the models that they were written from.

So the tests' writer follows the converter's rules. Needs the environment that benchmarks/generate.py makes for it.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import support.gguf_architectures as writers
from support.gguf_architectures import CASES, write

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build" / "peers" / "llama_cpp" / "bin" / "python"
WORKER = ROOT / "tests" / "support" / "llama_cpp_logits.py"
IDS = torch.randint(5, 120, (1, 23), generator=torch.Generator().manual_seed(0))

pytestmark = [
    pytest.mark.full(beyond=0),
    pytest.mark.skipif(not PYTHON.is_file(), reason="benchmarks/generate.py has not made llama.cpp's environment"),
]

# ggml looks GELU up by float16, which experts amplify; the delta rule's roundings are in docs/families.md.
TOLERANCES = {
    # Its deviation of an MLP's columns, of which Gemma 3n keeps the largest, divides by n - 1.
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "phi2", "starcoder2"), 2e-3),
    "gemma4/experts": 2e-2,
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), 5e-5),
    # transformers has no time step below time_step_min, of which files say nothing.
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), 5e-3),
}
OTHERWISE = {
    "exaone4": "llama.cpp has windows in models of 64 layers alone",
    "gpt-oss": "llama.cpp rounds the range of yarn's correction to whole dimensions",
    "phi3/long": "the converter stores what llama.cpp scales cosines by, for this model's lengths",
    "deepseek2/v2": "llama.cpp takes models without q_lora_rank by their number of layers",
    "qwen3moe/fused": "llama.cpp takes it in some architectures alone",
}
# What llama.cpp takes as given: as many key heads as heads, one size of MLPs, of heads of v, the sizes of Gemma 3n's.
CHANGES = {
    "minicpm3": {"v_head_dim": 16},
    **dict.fromkeys(("dots1", "olmoe"), {"num_key_value_heads": 4}),
    "granitehybrid/dense": {"shared_intermediate_size": 96},
    "gemma3n": {
        "hidden_size_per_layer_input": 256,
        "laurel_rank": 64,
        "intermediate_size": [960] * 4,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.95] * 4,
    },
}


def fields_of_llama_cpp(name: str, fields: dict[str, Any], layers: int) -> dict[str, Any]:
    """Without the block behind the layers, of which the writer writes one tensor."""
    cut = {
        key: value[:layers] if isinstance(value, list) and len(value) > layers else value
        for key, value in fields.items()
    }
    return {key: value for key, value in cut.items() if key != "nextn_predict_layers"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in OTHERWISE])
def test_logits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_tokens(writer: Any, config: Any, more: dict[str, Any]) -> None:
        original(writer, config, fields_of_llama_cpp(name, more, config.num_hidden_layers))
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(config.vocab_size)

    original = writers._write_fields
    monkeypatch.setattr(writers, "_write_fields", without_tokens)
    monkeypatch.setitem(CASES, name, CASES[name]._replace(behind=0))
    path = tmp_path / "model.gguf"
    model = write(path, name, lambda key: "F32", **CHANGES.get(name, {}))
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits[0]
    arguments = [path, expected.shape[1], *IDS[0].tolist()]
    found = subprocess.run([PYTHON, WORKER, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr[-2000:]
    logits = torch.tensor(json.loads(found.stdout.splitlines()[-1]))
    assert float((logits - expected).abs().max() / expected.abs().max()) <= TOLERANCES.get(name, 1e-5)
