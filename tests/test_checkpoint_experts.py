"""Folders with quantized experts, as gpt-oss has them in MXFP4: values, the engine, modules without an op, faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file

import torch_infini
from torch_infini import LLM, SamplingParams
from torch_infini.checkpoints import open_checkpoint
from torch_infini.patch.files import foreign
from torch_infini.patch.layers.quantized_experts import QuantizedExperts
from torch_infini.patch.swap import Unsupported
from torch_infini.testing.causal_types import build

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
IDS = torch.randint(5, 120, (1, 23), generator=torch.Generator().manual_seed(0))
EXPERTS = "model.layers.1.mlp.experts"


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def written(folder: Path) -> Any:
    """Write a folder of gpt-oss in MXFP4; return the model with the same values."""
    model, generator = build("gpt_oss"), torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            state[name] = parameter.clone()
            continue
        experts, k, n = parameter.shape
        blocks = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(118, 124, (experts, n, k // 32), dtype=torch.uint8, generator=generator)
        state[f"{name}_blocks"], state[f"{name}_scales"] = blocks, scales
        elements = torch.stack((FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]), -1).flatten(-2)
        parameter.copy_((elements * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2))
    save_file(state, folder / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["GptOssForCausalLM"]}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    return model


def test_values(tmp_path: Path) -> None:
    """Blocks hold the stored values exactly, which are those that transformers reads; logits are the dense model's."""
    model = written(tmp_path)
    loaded: Any = torch_infini.load(tmp_path)
    found, own = loaded.get_submodule(EXPERTS), model.get_submodule(EXPERTS)
    assert isinstance(found, QuantizedExperts) and found.plan.format == "mxfp4" and not found.is_savable
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(getattr(found, name), getattr(own, name))
    blocks = sum(buffer.nbytes for buffer in found._buffers.values())
    assert blocks == sum(own.get_parameter(name).numel() for name in ("gate_up_proj", "down_proj")) * 17 // 32
    expected = logits(model)
    assert float((logits(loaded) - expected).norm() / expected.norm()) < 2e-6
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.is_quantized and not checkpoint.layers and len(checkpoint.experts) == 8


@pytest.mark.full
def test_transformers_reads_the_same(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = written(tmp_path)
    settings = transformers.Mxfp4Config(dequantize=True)
    own = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings, dtype=torch.bfloat16, trust_remote_code=False
    )
    for name in ("gate_up_proj", "down_proj"):
        read = own.get_submodule(EXPERTS).get_parameter(name)
        assert torch.equal(read.float(), model.get_submodule(EXPERTS).get_parameter(name))


def test_engine(tmp_path: Path) -> None:
    model = written(tmp_path)
    llm = LLM(str(tmp_path), block_size=4, chunk_size=8, cache_blocks=40)
    (output,) = llm.generate([IDS[0].tolist()], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    assert llm.engine.model.is_recordable
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([IDS[0].tolist() + list(output.token_ids)]), use_cache=False).logits
    assert list(output.token_ids) == scores[0, 22:-1].argmax(-1).tolist()


def test_experts_that_no_op_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dequantized, and run as they are."""
    model = written(tmp_path)

    def unsupported(module: Any) -> Any:
        raise Unsupported("a reason")

    monkeypatch.setattr(foreign, "plans_of", unsupported)
    loaded: Any = torch_infini.load(tmp_path)
    found, own = loaded.get_submodule(EXPERTS), model.get_submodule(EXPERTS)
    assert not isinstance(found, QuantizedExperts)
    assert all(torch.equal(found.get_parameter(name), parameter) for name, parameter in own.named_parameters())
    expected = logits(model)
    assert float((logits(loaded) - expected).norm() / expected.norm()) < 2e-6


def without_scales(state: dict[str, Tensor]) -> None:
    del state[f"{EXPERTS}.down_proj_scales"]


def other_shape(state: dict[str, Tensor]) -> None:
    state[f"{EXPERTS}.down_proj_scales"] = state[f"{EXPERTS}.down_proj_scales"][:, :-1].contiguous()


def other_dtype(state: dict[str, Tensor]) -> None:
    state[f"{EXPERTS}.down_proj_blocks"] = state[f"{EXPERTS}.down_proj_blocks"].view(torch.int8)


def flat(state: dict[str, Tensor]) -> None:
    state[f"{EXPERTS}.down_proj_blocks"] = state[f"{EXPERTS}.down_proj_blocks"].flatten(2)


def nan(state: dict[str, Tensor]) -> None:
    state[f"{EXPERTS}.gate_up_proj_scales"][1, 2, 0] = 255


def none_quantized(state: dict[str, Tensor]) -> None:
    for name in [name for name in state if name.endswith(("_blocks", "_scales"))]:
        del state[name]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (without_scales, "down_proj must have .*down_proj_scales, as mxfp4 has, got .*down_proj_blocks alone"),
        (other_shape, r"down_proj_scales must have shape \[4, 64, 3\] \(mxfp4\), got \[4, 63, 3\]"),
        (other_dtype, r"down_proj_blocks must be uint8 \(mxfp4\), got int8"),
        (flat, r"down_proj_blocks must have the dimensions of mxfp4, got shape \[4, 64, 48\]"),
        (nan, r"gate_up_proj_scales must be finite \(mxfp4\), got NaN \(255 as an exponent\)"),
        (none_quantized, "a checkpoint of quant_method 'mxfp4' must have layers with _blocks, got"),
    ],
)
def test_faults(tmp_path: Path, fault: Callable[[dict[str, Tensor]], None], says: str) -> None:
    written(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    fault(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        torch_infini.load(tmp_path)


def test_weights_must_be_left_out(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(ValueError, match="weights must be left out for a checkpoint that is quantized"):
        foreign.load(tmp_path, weights="int8")
