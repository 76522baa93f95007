"""Model folders through infinilm: models.llama, auto_config, modeling_utils and configuration_utils."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.infinilm_models import GREEDY, NEW, PROMPTS, by_row, infini, loaded, saved
from torch_infini.compat import infinicore
from torch_infini.compat.infinilm import configuration_utils, modeling_utils
from torch_infini.compat.infinilm.auto_config import AutoConfig
from torch_infini.compat.infinilm.infer_engine import InferEngine
from torch_infini.compat.infinilm.models.llama import AutoLlamaModel, LlamaForCausalLM
from torch_infini.demo import MODEL
from torch_infini.testing.checkpoints import SMALL, random_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    return saved("llama", tmp_path_factory.mktemp("llama"))


def test_auto_llama_model(llama: tuple[Path, list[list[int]]]) -> None:
    folder, expected = llama
    for backend in ("cpp", "python"):
        model = AutoLlamaModel.from_pretrained(str(folder), device=infinicore.device("cpu"), backend=backend)
        assert isinstance(model, LlamaForCausalLM) and by_row(model.generate(infini(PROMPTS), GREEDY)) == expected
    with pytest.raises(ValueError, match="backend must be 'cpp' or 'python', got 'rust'"):
        AutoLlamaModel.from_pretrained(folder, backend="rust")
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder))
    modeling_utils.load_model_state_dict_by_file(model, folder)
    assert by_row(model.generate(infini(PROMPTS), GREEDY)) == expected
    half = AutoLlamaModel.from_pretrained(folder, dtype=infinicore.float16)
    assert half.dtype == infinicore.float16 and len(half.generate(infini(PROMPTS), GREEDY)) == NEW


def test_parameters_come_after_the_engine(llama: tuple[Path, list[list[int]]]) -> None:
    """Without any there are random ones and one warning, as benchmarks want that skip loading."""
    folder, expected = llama
    engine = InferEngine(folder)
    with pytest.warns(UserWarning, match=r"InferEngine\.generate: no parameter has been loaded") as warned:
        rows = [by_row(engine.generate(infini(PROMPTS), GREEDY)) for _ in range(2)]
    assert len(warned) == 1 and rows[0] == rows[1] != expected
    modeling_utils.load_model_state_dict_by_file(engine, folder)
    assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == expected
    config = AutoConfig.from_pretrained(folder)
    other = LlamaForCausalLM(config, dtype="bfloat16")
    assert (other.dtype, config.dtype) == (infinicore.bfloat16, infinicore.float32)
    other.load_param("model.norm.weight", torch.ones(SMALL["hidden_size"]))
    with pytest.raises(RuntimeError, match=r"all parameters must have been loaded, got none for lm_head\.weight"):
        other.generate(infini(PROMPTS), GREEDY)


def test_an_unknown_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    for door in (AutoConfig.from_pretrained, InferEngine, AutoLlamaModel.from_pretrained):
        with pytest.raises(ValueError, match="model_type must be one of llama, mistral, qwen2, qwen3, got 'gpt2'"):
            door(tmp_path)


def test_a_folder_in_several_files(llama: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    """Into an engine and into a module, in both ways; and as a dict of tensors for load_param and load_state_dict."""
    folder, expected = llama
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    weight_map = {}
    for i in range(3):
        part = names[i::3]
        save_file({name: tensors[name] for name in part}, tmp_path / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    state = modeling_utils.get_model_state_dict(tmp_path, device=infinicore.device("cpu"), dtype=infinicore.float32)
    assert state.keys() == tensors.keys()
    engines = [InferEngine(tmp_path) for _ in range(4)]
    modeling_utils.load_model_state_dict_by_file(engines[0], tmp_path)
    modeling_utils.load_model_state_dict_by_tensor(engines[1], tmp_path, dtype=torch.float32)
    for name, tensor in state.items():
        engines[2].load_param(name, tensor._underlying)
    assert engines[3].load_state_dict(state, strict=True) == ([], [])
    for engine in engines:
        assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == expected
    for load in (modeling_utils.load_model_state_dict_by_file, modeling_utils.load_model_state_dict_by_tensor):
        module = Holder(tensors)
        load(module, tmp_path)
        assert all(torch.equal(torch.from_dlpack(module.kept[name]), tensors[name]) for name in names)


class Holder:
    """As much of an infinicore.nn.Module as is loaded into."""

    def __init__(self, like: dict[str, Tensor]) -> None:
        self.kept = {name: infinicore.from_torch(torch.zeros_like(tensor)) for name, tensor in like.items()}

    def state_dict(self) -> dict[str, infinicore.Tensor]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[str, infinicore.Tensor], strict: bool = True) -> None:
        assert not strict
        for name, tensor in state.items():
            self.kept[name].copy_(tensor)


def test_a_tied_head(tmp_path: Path) -> None:
    random_model("llama-biases-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors
    state = modeling_utils.get_model_state_dict(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(torch.from_dlpack(state["lm_head.weight"]), embedding.bfloat16())
    module = Holder(tensors | {"lm_head.weight": embedding})
    modeling_utils.load_model_state_dict_by_file(module, tmp_path, dtype=infinicore.float32)
    assert torch.equal(torch.from_dlpack(module.kept["lm_head.weight"]), embedding)


def test_what_loading_refuses(llama: tuple[Path, list[list[int]]], tmp_path: Path) -> None:
    folder, expected = llama
    tensors = load_file(folder / "model.safetensors")
    engine = loaded(folder)
    with pytest.raises(ValueError, match="dtype must be that of the engine, float32, got bfloat16"):
        modeling_utils.load_model_state_dict_by_file(engine, folder, dtype=infinicore.bfloat16)
    with pytest.raises(FileNotFoundError, match="must hold safetensors files"):
        modeling_utils.load_model_state_dict_by_file(engine, tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    changed = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file({**changed, "model.extra": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight; surplus: model\.extra"):
        modeling_utils.load_model_state_dict_by_file(engine, tmp_path)
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight; surplus: model\.extra"):
        InferEngine(tmp_path)
    with pytest.raises(RuntimeError, match=r"missing: model\.norm\.weight; unexpected: model\.extra"):
        modeling_utils.load_model_state_dict_by_file(module := Holder(tensors), tmp_path)
    assert not any(torch.from_dlpack(tensor).any() for tensor in module.kept.values())
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 12)
    for model in (engine, module):
        with pytest.raises(ValueError, match="must be a whole safetensors file"):
            modeling_utils.load_model_state_dict_by_tensor(model, tmp_path)
    modeling_utils.check_parameters(tensors, list(tensors))
    with pytest.raises(RuntimeError, match=r"check_parameters: .*; missing: b, c; unexpected: d"):
        modeling_utils.check_parameters(["a", "c", "b"], {"a": 1, "d": 2})
    # An engine's own names.
    for strict in (None, True):
        with pytest.raises(RuntimeError, match="unknown: model.extra"):
            engine.load_state_dict({"model.extra": torch.ones(2)}, strict)
    with pytest.raises(RuntimeError, match="missing: model.norm.weight"):
        engine.load_state_dict({**changed}, strict=True)
    assert engine.load_state_dict(changed) == (["model.norm.weight"], [])
    assert engine.load_state_dict({"model.extra": 0}, strict=False)[1] == ["model.extra"]
    with pytest.raises(ValueError, match=r"model\.norm\.weight must have shape \[64\], got \[3\]"):
        engine.load_state_dict({"model.norm.weight": torch.ones(3)})
    assert by_row(engine.generate(infini(PROMPTS), GREEDY)) == expected  # nothing has changed


class Config(configuration_utils.PretrainedConfig):
    model_type = "made-up"

    def __init__(self, hidden_size: int = 8, tie_word_embeddings: bool = False, **kwargs: Any) -> None:
        self.hidden_size = hidden_size
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


def test_pretrained_config(tmp_path: Path) -> None:
    config = Config(hidden_size=16, torch_dtype="bfloat16", eos_token_id=[2, 3], extra={"a": 1})
    assert (config.hidden_size, config.dtype, config.torch_dtype) == (16, torch.bfloat16, torch.bfloat16)
    assert (config.eos_token_id, config.pad_token_id, config.tie_word_embeddings) == ([2, 3], None, False)
    config.save_pretrained(tmp_path / "made")
    again = Config.from_pretrained(tmp_path / "made", hidden_size=4)
    assert again.name_or_path == "" and again != config
    again.update({"hidden_size": 16})
    assert again == config and again.to_dict()["extra"] == {"a": 1} and again.model_type == "made-up"
    again.extra["a"] = 2
    assert config.extra == {"a": 1} and again != config
    with pytest.raises(FileNotFoundError, match="must have a config.json"):
        Config.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="dtype must be torch's or the name of one, got 'int9'"):
        Config(dtype="int9")
    plain = configuration_utils.PretrainedConfig.from_pretrained(MODEL)
    written = json.loads((Path(MODEL) / "config.json").read_text())
    assert (plain.model_type, plain.hidden_size) == (written["model_type"], written["hidden_size"])
    five = configuration_utils.PretrainedConfig(rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert five.rope_theta == 5e5
