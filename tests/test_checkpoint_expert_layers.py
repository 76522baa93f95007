"""Folders of mixtures whose experts are quantized linear layers, one for each: values, tokens, ranks, faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import torch_infini
from support.checkpoint_writers import CASES, layers_of
from support.gguf_architectures import Case as Shape
from support.gguf_architectures import small_model
from torch_infini import LLM, SamplingParams
from torch_infini.patch.layers.experts import Experts
from torch_infini.patch.layers.quantized_experts import QuantizedExperts

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(5, 120, (1, 23), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 256, "num_hidden_layers": 2}
# What experts become: a kind of block, or dense where fused_experts has none.
FORMATS = {
    **{"awq": "int4_64", "gptq-zeros": "int4_32", "pack-quantized": "int4_64", "nvfp4": "nvfp4", "mxfp4": "mxfp4"},
    **{"fp8-blocks": "fp8", "float-quantized": "fp8", "modelopt-nvfp4": "nvfp4", "bitsandbytes-nf4": "nf4"},
    **{"gptq-act-order": "dense", "gptq-8-groups": "dense", "w8a16": "dense"},
}
QUICK = ("awq", "fp8-blocks", "nvfp4", "gptq-act-order")
KINDS = {
    "qwen3_moe": {"norm_topk_prob": True, "num_experts_per_tok": 2},
    "deepseek_v3": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "llama4_text": {"num_experts_per_tok": 1, "intermediate_size_mlp": 256},
    "mixtral": {"num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
OLDER = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", ".mlp.": ".block_sparse_moe."}  # names of Mixtral's


def written(folder: Path, format: str, kind: str = "qwen3_moe", inner: int = 128) -> Any:
    """Write a folder; return the dense model with the stored values. inner: The columns inside an expert."""
    case = CASES[format]
    pytest.importorskip("compressed_tensors") if "compressed" in case.config["quant_method"] else None
    write = case.writer()
    model = small_model(
        Shape(kind, changes={**KINDS[kind], **SIZES, "intermediate_size": inner, "moe_intermediate_size": inner})
    )
    state: dict[str, Tensor] = {key: value.clone() for key, value in model.state_dict().items()}

    def store(name: str, weight: Tensor) -> Tensor:
        tensors, values = write(name, weight.contiguous())
        state.update({f"{name}.{last}": tensor.contiguous() for last, tensor in tensors.items()})
        return values.float()

    for name, module in layers_of(model):
        del state[f"{name}.weight"]
        module.weight.data = store(name, module.weight.data)
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        if parameter.dim() != 3:
            continue
        del state[name]
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        of_model = parameter.data.transpose(1, 2) if kind == "llama4_text" else parameter.data
        for expert, rows in enumerate(of_model):
            for part, own in zip(parts, rows.chunk(len(parts)), strict=True):
                own.copy_(store(f"{module}.{expert}.{part}", own))
    if kind == "mixtral":
        for name in list(state):
            new = name
            for part, old in OLDER.items():
                new = new.replace(part, old)
            state[new] = state.pop(name)
    config = model.config.to_dict() | {"quantization_config": case.config, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file(state, folder / "model.safetensors")
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found.float()


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize(
    "format", [pytest.param(one, marks=() if one in QUICK else pytest.mark.full) for one in FORMATS]
)
def test_formats(format: str, tmp_path: Path) -> None:
    """Logits of the dense model of the stored values, in the file's bits where there are blocks for them."""
    model = written(tmp_path, format)
    loaded = torch_infini.load(tmp_path, torch.float32)
    found = experts_of(loaded)
    assert len(found) == 2
    for one in found:
        kind = one.plan.format if isinstance(one, QuantizedExperts) else "dense"
        assert kind.removesuffix("_panels") == FORMATS[format]
    expected = logits(model)
    assert float((logits(loaded) - expected).norm() / expected.norm()) < 3e-6


@pytest.mark.parametrize("kind", [pytest.param(one, marks=pytest.mark.full) for one in KINDS])
def test_engine(kind: str, tmp_path: Path) -> None:
    """Greedy tokens of the dense model, alone, beside others and on two ranks."""
    model = written(tmp_path, "fp8-blocks", kind, inner=256)
    prompts, settings = [IDS[0].tolist(), [7, 8, 9]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for ranks in (1, 2):
        llm = LLM(tmp_path, dtype="float32", cache_blocks=40, progress=False, tensor_parallel_size=ranks)
        for prompt, output in zip(prompts, llm.generate(prompts, settings), strict=True):
            tokens = list(output.token_ids)
            with torch.no_grad():
                scores = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits
            assert tokens == scores[0, len(prompt) - 1 : -1].argmax(-1).tolist()
        del llm


def without(*ends: str) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        for name in [name for name in state if any(end in name for end in ends)]:
            del state[name]

    return change


def dense(state: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj"
    without(f"{name}.")(state)
    state[f"{name}.weight"] = torch.zeros(128, 256)


def narrow(state: dict[str, Tensor]) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj"
    state[f"{name}.weight"] = state[f"{name}.weight"][:64].contiguous()


def infinite(state: dict[str, Tensor]) -> None:
    state["model.layers.1.mlp.experts.3.down_proj.weight_scale_inv"].fill_(float("inf"))


@pytest.mark.parametrize(
    "change, says",
    [
        (without("layers.1.mlp.experts.3."), "mlp.experts must have 4 experts, as the config has, got 3 gate_proj"),
        (
            without("layers.1.mlp.experts.2.up_proj."),
            "experts.2.up_proj must be quantized, as others beside it are, got one that is not",
        ),
        (dense, "experts.2.up_proj must be quantized, as others beside it are, got one that is not"),
        (narrow, "experts.2.up_proj must be 128 x 256 in fp8 in blocks, as the first expert, got 64 x 256 in fp8 in"),
        (infinite, "experts.down_proj: 3.down_proj.weight_scale_inv must be finite .*, got inf"),
    ],
)
def test_faults(change: Callable[[dict[str, Tensor]], None], says: str, tmp_path: Path) -> None:
    written(tmp_path, "fp8-blocks")
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        torch_infini.load(tmp_path, torch.float32)


def test_an_expert_that_is_no_block(tmp_path: Path) -> None:
    """A scale of one expert alone is too small for float16, as blocks have it: that product is dense, the other not."""
    model = written(tmp_path, "pack-quantized")
    state, name = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.experts.3.down_proj"
    state = {key: value.float() if key.endswith("weight_scale") else value for key, value in state.items()}
    state[f"{name}.weight_scale"][5] = 1e-9
    save_file(state, tmp_path / "model.safetensors")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.experts.down_proj")[3, 5] = 0  # nearly
    loaded = torch_infini.load(tmp_path, torch.float32)
    first, second = experts_of(loaded)
    assert isinstance(first, QuantizedExperts) and not isinstance(second, QuantizedExperts)
    expected = logits(model)
    assert float((logits(loaded) - expected).norm() / expected.norm()) < 3e-6


def test_layers_behind_the_last(tmp_path: Path) -> None:
    """Layers that predict further tokens, quantized too, which transformers' class does not read."""
    model = written(tmp_path, "fp8-blocks", "glm4_moe")
    state = load_file(tmp_path / "model.safetensors")
    behind = {name.replace(".layers.1.", ".layers.92."): t.clone() for name, t in state.items() if ".layers.1." in name}
    assert any(name.endswith("experts.0.up_proj.weight_scale_inv") for name in behind)
    save_file(state | behind, tmp_path / "model.safetensors")
    expected = logits(model)
    found = logits(torch_infini.load(tmp_path, torch.float32))
    assert float((found - expected).norm() / expected.norm()) < 3e-6


def test_experts_that_are_not_quantized(tmp_path: Path) -> None:
    written(tmp_path, "fp8-blocks")
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if ".layers.1.mlp.experts." in name and name.endswith(".weight")]:
        state[name] = state[name].float()
        del state[f"{name}_scale_inv"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        NotImplementedError, match="must be quantized too, got model.layers.1.mlp.experts.0.gate_proj.w"
    ):
        torch_infini.load(tmp_path, torch.float32)


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    """A file has names of an older release and of this one."""
    written(tmp_path, "fp8-blocks", "mixtral")
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.0.mlp.gate.weight"] = state["model.layers.0.block_sparse_moe.gate.weight"].clone()
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match="tensors of .* must have names of their own, got .*gate.weight and .*gate.wei"
    ):
        torch_infini.load(tmp_path, torch.float32)
