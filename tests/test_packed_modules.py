"""Linear layers in the layouts of AutoAWQ, AutoGPTQ and GPTQModel, which patch_model takes over without these."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.checkpoint_writers import CASES, SIZES, gptq, layers_of
from torch_infini import patch_model
from torch_infini.__main__ import main
from torch_infini.testing.checkpoints import random_model

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.tensor([[5, 9, 13, 100, 31, 2, 7]])


class PackedLinear(nn.Module):
    """A layer with the buffers of those libraries; it multiplies in a dtype of its own, as AutoAWQ does in float16."""

    def __init__(
        self, stored: dict[str, Tensor], values: Tensor, bias: Tensor | None, computes_in: torch.dtype
    ) -> None:
        super().__init__()
        for name, tensor in stored.items():
            self.register_buffer(name, tensor.contiguous())
        self.register_buffer("bias", bias)
        self.values, self.computes_in = values, computes_in

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.computes_in).to(torch.float64) @ self.values.t()
        return (y if self.bias is None else y + self.bias).to(self.computes_in).to(x.dtype)


def packed(kind: str, computes_in: torch.dtype = torch.float32, name: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """Return a model with packed layers, and the dense one of the same values."""
    case = CASES[kind]
    model, dense = (random_model(name, **{**SIZES, **changes}).eval() for _ in range(2))
    write = case.writer()
    for layer, module in layers_of(dense):
        stored, values = write(layer, module.weight.data)
        module.weight.data = values.float()
        bias = None if module.bias is None else module.bias.data
        model.set_submodule(layer, PackedLinear(stored, values, bias, computes_in))
    model.config.quantization_config = case.config
    return model, dense


def difference(model: Any, dense: Any) -> float:
    with torch.no_grad():
        found, expected = (one(TOKENS).logits for one in (model, dense))
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq-v2", "gptq-act-order", "gptq-8", "gptq-8-groups"])
def test_logits(kind: str) -> None:
    """Those of the dense model; 4 bits stay 4 bits, and what no op multiplies becomes dense."""
    model, dense = packed(kind)
    report = patch_model(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules()), report
    assert difference(model, dense) <= 1e-5
    linear = model.model.layers[0].mlp.down_proj
    assert ("weight_integers" in linear._buffers) == (kind != "gptq-8-groups")
    if kind not in ("gptq-8", "gptq-8-groups"):
        assert linear.weight_integers.nbytes <= linear.weight.numel() * 0.6
    assert patch_model(model).already_patched
    assert difference(model, dense) <= 1e-5
    generated = [one.generate(TOKENS, max_new_tokens=8, do_sample=False, pad_token_id=0) for one in (model, dense)]
    assert torch.equal(*generated)


def test_biases_and_float16() -> None:
    """Biases are buffers there; a layer that computes in float16 computes in the model's dtype from now on."""
    model, dense = packed("awq", torch.float16, "llama-biases-tied")
    before = difference(model, dense)
    patch_model(model)
    assert difference(model, dense) <= 1e-5 < before


@pytest.mark.parametrize("kind, other", [("gptq", "gptq-v2"), ("gptq-v2", "gptq")])
def test_zero_points_of_the_other_version(kind: str, other: str) -> None:
    """GPTQModel changes those of version 1 into version 2's when it loads; the config still says 1."""
    model, dense = packed(kind)
    model.config.quantization_config = {**CASES[other].config, "sym": False}
    patch_model(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert difference(model, dense) <= 1e-5


def test_config_objects() -> None:
    """transformers has AwqConfig and GPTQConfig in the model's config."""
    for kind, config in (("awq", transformers.AwqConfig), ("gptq", transformers.GPTQConfig)):
        model, dense = packed(kind)
        model.config.quantization_config = config(bits=4, group_size=64)
        patch_model(model)
        assert "weight_integers" in model.model.layers[1].self_attn.o_proj._buffers
        assert difference(model, dense) <= 1e-5


def test_layers_that_stay(caplog: pytest.LogCaptureFixture) -> None:
    """One that computes something else, one that cannot be called here, and one with a hook: each with its reason."""
    model, _ = packed("gptq-v2")
    mlp, attention = model.model.layers[0].mlp, model.model.layers[1].self_attn
    mlp.down_proj.values = mlp.down_proj.values.roll(1, 0)
    attention.o_proj.values = torch.ones(3, 3)
    attention.q_proj.register_forward_hook(lambda *_: None)
    attention.k_proj.values = attention.k_proj.values[:-1]
    with caplog.at_level(logging.WARNING, "torch_infini"):
        patch_model(model)
    at = "model.layers.1.self_attn"
    for reason in (
        "model.layers.0.mlp.down_proj stays a PackedLinear: its product differs from that of its integers by 1",
        f"{at}.o_proj stays a PackedLinear: it cannot be called here: RuntimeError: ",
        f"{at}.q_proj stays a PackedLinear: it has hooks or a forward of its own",
        f"{at}.k_proj stays a PackedLinear: its product has the shape [3, ",
    ):
        assert f"torch_infini.patch_model: {reason}" in caplog.text
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 4
    assert "weight_integers" in model.model.layers[0].mlp.up_proj._buffers


def test_refused() -> None:
    """Before a layer is changed."""
    model, _ = packed("awq")
    model.model.layers[1].mlp.down_proj.scales[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"patch_model: model.layers.1.mlp.down_proj.scales must be finite \(awq\), got"
    ):
        patch_model(model)
    model.config.quantization_config = {**CASES["awq"].config, "bits": 3}
    with pytest.raises(ValueError, match="quantization_config.bits in the model's config must be 4, got 3"):
        patch_model(model)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 14


def test_other_modules() -> None:
    """Tensors of these names in a model that no such library has quantized are none of ours."""
    model, _ = packed("awq")
    del model.config.quantization_config
    patch_model(model)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 14


@pytest.mark.parametrize("kind", ["awq", "gptq"])
def test_commands(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What transformers loads with further packages alone: one sentence that names what reads it without them."""
    from support.checkpoint_writers import write_folder

    write_folder(tmp_path, CASES[kind])
    assert main(["quantize", str(tmp_path), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"MODEL must have weights in full precision, got {tmp_path}: Loading a" in error
    assert "(generate, serve and torch_infini.load read it as it is)" in error
    assert main(["demo", "--model", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "--model must be what transformers loads without further packages, got" in error
    assert "(generate, serve and torch_infini.load read it without them)" in error


def test_zero_points_matter() -> None:
    """The comparison of products tells the two versions apart, whatever the weight."""
    from torch_infini.checkpoints import TensorInfo
    from torch_infini.checkpoints import layers_of as stored_layers
    from torch_infini.patch.layers.packed import agreeing, valid_variants

    for seed in range(5):
        weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) + seed
        stored, values = gptq(64, False, 2)("a", weight)
        module = PackedLinear(stored, values, None, torch.float16)
        infos = {f"a.{name}": TensorInfo(t.dtype, tuple(t.shape)) for name, t in stored.items()}
        layer = stored_layers({**CASES["gptq"].config, "sym": False}, infos, "a test")["a"]
        found, _ = agreeing(module, list(valid_variants("a", module, layer)), torch.float32)
        assert found is not None and found.format.name == "gptq_v2"
