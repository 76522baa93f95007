"""torch_infini.integrations.torchao: quantize_ with our configs, eager, compiled, exported, saved and in transformers.

Skipped where torchao is not installed (pip install 'torch_infini[torchao]').
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao", reason="torchao is not installed")

from torchao.core.config import config_from_dict, config_to_dict
from torchao.quantization import quantize_

from torch_infini import weights
from torch_infini.integrations.torchao import InfiniInt4Config, InfiniInt8Config, InfiniTensor

CONFIGS = [InfiniInt8Config(), InfiniInt8Config("int8_rows"), InfiniInt4Config(), InfiniInt4Config("int4_groups")]
by_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{type(config).__name__}-{config.format}")


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128, bias=False), nn.ReLU(), nn.Linear(128, 64)).to(dtype).eval()


def quantized(config: Any, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    made = model(dtype)
    quantize_(made, config)
    return made


def x_of(dtype: torch.dtype = torch.bfloat16, rows: int = 5) -> Tensor:
    return torch.randn(rows, 256, generator=torch.Generator().manual_seed(1)).to(dtype)


@by_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_products_are_those_of_the_format(config: Any, dtype: torch.dtype) -> None:
    made, plain, x = quantized(config, dtype), model(dtype), x_of(dtype)
    for number in (0, 2):
        layer, full = made[number], plain[number].weight
        assert isinstance(layer, nn.Linear) and isinstance(layer.weight, InfiniTensor)
        assert layer.weight.shape == full.shape and layer.weight.dtype == dtype
        form = weights.best(config.format, "cpu")
        assert layer.weight.format_name == form.name
        error = (layer.weight.dequantize() - full).float().norm() / full.float().norm()
        assert error < (0.02 if isinstance(config, InfiniInt8Config) else 0.12)
        given = x if number == 0 else torch.relu(made[0](x))
        expected = form.product(given, layer.weight.integers(), layer.bias, True, None)
        assert torch.equal(layer(given), expected)


@by_config
@torch.no_grad()
def test_compiled_and_exported(config: Any) -> None:
    made, x = quantized(config), x_of()
    expected = made(x)
    for backend in ("inductor", "infini"):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(made, backend=backend, fullgraph=True)(x), expected), backend
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(made, (x,), dynamic_shapes=({0: rows},))
    assert torch.equal(exported.module()(x), expected)
    more = x_of(rows=9)
    assert torch.equal(exported.module()(more), made(more))


@by_config
@torch.no_grad()
def test_saved_copied_and_moved(config: Any) -> None:
    made, x = quantized(config), x_of()
    expected = made(x)
    file = io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    loaded = model()
    loaded.load_state_dict(torch.load(file, weights_only=True), assign=True)
    assert torch.equal(loaded(x), expected)
    other = quantized(config)
    other[0].weight.qdata.zero_()
    assert not torch.equal(other(x), expected)
    other.load_state_dict(made.state_dict())  # copies into what is there
    assert torch.equal(other(x), expected)
    half = copy.deepcopy(made).half()
    assert half[0].weight.dtype == torch.float16 and half(x.half()).dtype == torch.float16
    torch.testing.assert_close(half(x.half()).float(), expected.float(), rtol=0.05, atol=0.05)
    assert made[0].weight.dtype == torch.bfloat16


def test_a_filter_and_other_modules() -> None:
    made = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64), "c": nn.Embedding(8, 64)})
    quantize_(made, InfiniInt8Config(), filter_fn=lambda module, name: name == "a")
    assert [isinstance(one.weight, InfiniTensor) for one in made.values()] == [True, False, False]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"InfiniInt8Config: format must be one of int8, .*, got 'int4'"):
        InfiniInt8Config("int4")
    with pytest.raises(ValueError, match=r"InfiniInt4Config: format must be one of int4, .*, got 'nf4'"):
        InfiniInt4Config("nf4")
    made = quantized(InfiniInt8Config())
    with pytest.raises(TypeError, match=r"weight must be dense, of float32, bfloat16 or float16, got InfiniTensor"):
        quantize_(made, InfiniInt8Config())
    with pytest.raises(TypeError, match=r"weight must be dense, .* got torch\.float64"):
        quantize_(nn.Linear(64, 64).double(), InfiniInt8Config())
    with pytest.raises(ValueError, match=r"weight must have values, got one on meta: load the model before"):
        quantize_(nn.Linear(64, 64, device="meta"), InfiniInt8Config())
    broken = nn.Linear(64, 64)
    with torch.no_grad():
        broken.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"NaN"):
        quantize_(broken, InfiniInt8Config())
    with pytest.raises(RuntimeError, match=r"x must not require a gradient"):
        made(x_of().requires_grad_())
    with pytest.raises(TypeError, match=r"dtype must be float32, bfloat16 or float16, got torch\.float64"):
        made.double()
    with pytest.raises(NotImplementedError):
        _ = made[0].weight + 1


def test_configs_survive_a_checkpoint() -> None:
    for config in CONFIGS:
        assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize("config", [InfiniInt8Config(), InfiniInt4Config()], ids=lambda config: config.format)
def test_transformers(config: Any, tmp_path: Path) -> None:
    """from_pretrained quantizes, save_pretrained writes the integers, and from_pretrained reads them."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 128}
    made = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    torch.manual_seed(0)
    full, ids = transformers.LlamaForCausalLM(made).to(torch.bfloat16), torch.arange(10)[None]
    full.save_pretrained(tmp_path / "full")
    asked = transformers.TorchAoConfig(config)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "full", dtype=torch.bfloat16, quantization_config=asked, trust_remote_code=False)
    assert isinstance(model.model.layers[1].mlp.up_proj.weight, InfiniTensor)
    model.save_pretrained(tmp_path / "quantized")
    again = load(tmp_path / "quantized", dtype=torch.bfloat16, trust_remote_code=False)
    assert isinstance(again.model.layers[1].mlp.up_proj.weight, InfiniTensor)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert not torch.equal(model(ids).logits, full(ids).logits)
