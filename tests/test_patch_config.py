"""InfiniConfig: from_pretrained quantizes and patches; save_pretrained writes integers, and they come back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.fresh_python import run_python

transformers: Any = pytest.importorskip("transformers", minversion="5")

import torch_infini  # noqa: E402
from torch_infini import InfiniConfig, is_patched, patch_model  # noqa: E402
from torch_infini.testing.checkpoints import random_model  # noqa: E402

IDS = torch.arange(3, 12)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("qwen3")
    random_model("qwen3").save_pretrained(path)
    return path


def load(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False, **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


@pytest.mark.parametrize(
    "weights, dtype", [("int8", torch.bfloat16), ("int4", torch.float32), ("auto:6", torch.float32)]
)
def test_loads_as_patch_model_quantizes(folder: Path, weights: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The same bits as from_pretrained followed by patch_model, before and after a round through save_pretrained."""
    expected = load(folder, dtype=dtype)
    patch_model(expected, weights=weights, skip=["*.layers.0.mlp.down_proj"])
    given = InfiniConfig(weights, skip=["*.layers.0.mlp.down_proj"])
    model = load(folder, dtype=dtype, quantization_config=given)
    assert is_patched(model) and not model.training and model.dtype == dtype
    assert not hasattr(model.config, "quantization_config")
    assert torch.equal(logits(model), logits(expected))
    assert patch_model(model).rows == patch_model(expected).rows
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "torch_infini" and stored["skip"] == ["*.layers.0.mlp.down_proj"]
    again = load(tmp_path, dtype=dtype)
    assert is_patched(again) and torch.equal(logits(again), logits(model))
    prompt = {"prompt_token_ids": IDS[0].tolist()}
    settings = torch_infini.SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    (served,) = torch_infini.LLM(str(tmp_path), cache_bytes=1 << 20).generate([prompt], settings, use_tqdm=False)
    assert served.outputs[0].token_ids == model.generate(IDS, max_new_tokens=4, do_sample=False)[0, 9:].tolist()


def test_options(folder: Path) -> None:
    ids = torch.arange(5, 40)
    model = load(folder, quantization_config=InfiniConfig("auto:8", only=["*.mlp", "*.mlp.*"], calibrate=ids))
    report = patch_model(model)
    assert report.budget is not None and report.budget.bits <= 8
    assert {row.name.split(".")[-1] for row in report.replaced} <= {"mlp", "gate_proj", "up_proj", "down_proj"}
    as_dict = {"quant_method": "torch_infini", "weights": "int8"}
    assert torch.equal(
        logits(load(folder, quantization_config=as_dict)), logits(load(folder, quantization_config=InfiniConfig()))
    )
    config = InfiniConfig("auto:8", calibrate=ids, strict=True)
    assert json.loads(config.to_json_string())["calibrate"] == ids.tolist() and "auto:8" in repr(config)


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        (("int2",), {}, ValueError, "torch_infini.InfiniConfig: weights must be one of None, 'int4', .*, got 'int2'"),
        ((None,), {}, ValueError, "InfiniConfig: weights must be the name of a format, or 'auto:BITS', got None"),
        (("auto:x",), {}, ValueError, "InfiniConfig: weights must have a number of bits after 'auto:', .*'auto:x'"),
        (("int8",), {"skip": "lm_head"}, TypeError, "InfiniConfig: skip must be a sequence of patterns, got 'lm_head'"),
        (("int8",), {"calibrate": IDS[0]}, ValueError, "InfiniConfig: calibrate must be None unless weights is"),
        (("auto:5",), {"calibrate": [1]}, TypeError, "InfiniConfig: calibrate must be a torch.Tensor of token ids"),
    ],
)
def test_refused_arguments(arguments: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        InfiniConfig(*arguments, **options)


def test_refused_models(folder: Path, tmp_path: Path) -> None:
    """A model that cannot be quantized is an error: the caller asked for integers."""
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="from_pretrained: GPT2LMHeadModel cannot be quantized: it has no torch.nn.Linear"
    ):
        load(tmp_path, quantization_config=InfiniConfig(skip=["lm_head"]))
    with pytest.raises(ValueError, match="every pattern of skip must match the name of a module"):
        load(folder, quantization_config=InfiniConfig(skip=["nothing"]))


@pytest.mark.parametrize("given", [{"state_dict": {"a": IDS}}, {"push_to_hub": True}, {"variant": "fp16"}])
def test_refused_arguments_of_save_pretrained(given: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    model = load(folder, quantization_config=InfiniConfig())
    (name,) = given
    with pytest.raises(ValueError, match=f"save_pretrained: {name} must not be given for quantized weights"):
        model.save_pretrained(tmp_path, **given)
    model.save_pretrained(tmp_path / "other", is_main_process=False)
    assert not list(tmp_path.iterdir())


def test_without_transformers() -> None:
    code = (
        "import sys\n"
        "sys.modules['transformers'] = None\n"
        "import torch_infini\n"
        "assert 'InfiniConfig' in dir(torch_infini)\n"
        "try: torch_infini.InfiniConfig\n"
        "except ImportError as error: print(error)\n"
    )
    assert run_python(code, check=True).stdout.startswith("torch_infini.InfiniConfig needs transformers: run `pip")
