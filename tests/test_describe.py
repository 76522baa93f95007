"""torch_infini.describe: what it finds in models of known formulas, with and without weights, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torch_infini
from torch_infini.patch import is_patched
from torch_infini.testing.causal_types import build

pytest.importorskip("transformers")


def saved(kind: str, folder: Path) -> tuple[torch.nn.Module, Path]:
    model = build(kind)
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "olmo2", "qwen3_moe"])
def test_weights_are_not_needed(kind: str, tmp_path: Path) -> None:
    model, folder = saved(kind, tmp_path)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    found = torch_infini.describe(folder)
    assert found == torch_infini.describe(model)
    assert not is_patched(model)
    report = torch_infini.patch_model(model)
    assert torch_infini.describe(model) == found
    assert {row.name for row in report.left} == {row.name for row in found.left}


def test_llama() -> None:
    found = torch_infini.describe(build("llama"))
    attention = found.layers[0].attention
    assert attention is not None
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.v_dim) == (4, 2, 16, 16)
    assert (attention.scale, attention.window, attention.softcap, attention.sinks) == (0.25, 0, 0.0, False)
    assert (attention.rope, attention.norms) == ("half", ())
    assert len(set(found.layers)) == 1 and found.layers[0].known and found.layers[0].multiplier == 1
    assert found.layers[0].mlp is not None and found.layers[0].mlp.activation == "swiglu"
    assert found.norm is not None and found.norm.rounding == "llama"
    assert not found.left and not found.refusal


def test_gemma() -> None:
    """Windows by layer, a scale that is not of the head's size, caps, norms of 1 + w, four norms a layer."""
    two = torch_infini.describe(build("gemma2"))
    three = torch_infini.describe(build("gemma3_text"))
    for found in (two, three):
        windows = [layer.attention.window for layer in found.layers if layer.attention is not None]
        assert windows == [16, 0, 16, 0]
        assert [norm.rounding for norm in found.layers[0].norms] == ["gemma"] * 4
        assert found.layers[0].mlp is not None and found.layers[0].mlp.activation == "geglu"
    assert two.layers[0].attention is not None and two.layers[0].attention.softcap == 50
    assert three.layers[0].attention is not None and len(three.layers[0].attention.norms) == 2
    assert three.layers[0].attention.scale == 256**-0.5


def test_experts() -> None:
    found = torch_infini.describe(build("qwen2_moe"))
    assert str(found.layers[0].mlp) == "4 experts, swiglu of 32 columns, beside one for all: swiglu of 32 columns"
    assert not found.left


def test_what_is_not_known() -> None:
    found = torch_infini.describe(build("gpt_oss"))
    attention = found.layers[0].attention
    assert attention is not None and attention.sinks and attention.window == 16 and attention.rope == "unknown"
    assert "4 experts, swiglu_oai of 96 columns" in str(found)
    found = torch_infini.describe(build("apertus"))
    assert found.layers[0].mlp is None
    assert "mlp       not known" in str(found)


def test_quantized() -> None:
    """Weights that became integers count as what they were."""
    model = build("llama")
    found = torch_infini.describe(model)
    torch_infini.patch_model(model, weights="int8")
    assert torch_infini.describe(model) == found


def test_of_any_size(tmp_path: Path) -> None:
    """Of a model of 70 billion parameters without its weights: 280 GB if they were allocated."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = torch_infini.describe(tmp_path)
    assert found.parameters == 70_553_706_496
    assert "80 layers, hidden size 8192, 70.6 G parameters" in str(found)
    assert "64 heads of q over 8, 128 columns" in str(found)


def test_tied(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    found = torch_infini.describe(tmp_path)
    assert found.tied and found.parameters == 2_614_341_888
    assert "vocabulary  256000, the head is the embedding" in str(found)
    assert "layers 1, 3, ... 25:" in str(found)


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"torch_infini.describe: model must be .*, got int"):
        torch_infini.describe(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must have a decoder of the Llama family .*, got a Linear"):
        torch_infini.describe(torch.nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError):
        torch_infini.describe(tmp_path / "missing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 10**9}))
    with pytest.raises(ValueError, match=r"must have at most 1000 layers, got 1000000000"):
        torch_infini.describe(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing"}))
    with pytest.raises(ValueError, match=r"torch_infini.describe: the config of .* must be of a model of transformers"):
        torch_infini.describe(tmp_path)
    _, folder = saved("gpt2", tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"must have a decoder of the Llama family .*, got a GPT2LMHeadModel"):
        torch_infini.describe(folder)
