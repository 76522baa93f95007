"""NVFP4 folders of compressed-tensors and ModelOpt: values for any factor, every scale, older folders, faults."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_infini
from support.checkpoint_writers import NVFP4, compressed, config_of_compressed, modelopt, modelopt_fp8
from torch_infini.checkpoints import open_checkpoint
from torch_infini.checkpoints.formats.nvfp4 import NVFP4 as Format

safetensors = pytest.importorskip("safetensors.torch")

MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def folder_of(folder: Path, tensors: dict[str, Tensor], config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors.save_file({f"a.b.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    model = {"model_type": "llama", **({} if config is None else {"quantization_config": config})}
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def values(folder: Path) -> Tensor:
    with open_checkpoint(folder) as checkpoint:
        checkpoint.check()
        return checkpoint.weight("a.b", torch.float32).dense()


def test_every_scale() -> None:
    """Each code of E4M3 as a scale, negative ones and NaN too, and the order of a block's nibbles."""
    codes = torch.arange(256, dtype=torch.uint8)
    scales = codes.view(torch.float8_e4m3fn).float()
    blocks = torch.empty(1, 32, 76, dtype=torch.uint8)
    blocks[..., :4] = torch.frombuffer(bytearray(struct.pack("<f", 0.75)), dtype=torch.uint8)
    blocks[..., 4:12] = codes.view(32, 8)
    blocks[..., 12:] = torch.tensor([[i | (15 - i) << 4 for i in range(16)] * 4], dtype=torch.uint8)
    found = torch_infini.ops.embedding_blocks(torch.tensor([0]), blocks, "nvfp4", torch.float32)[0].view(256, 16)
    for i in range(256):
        expected = (LEVELS if i % 2 == 0 else LEVELS.flip(0)) * (scales[i] * 0.75)
        assert torch.equal(found[i].nan_to_num(99), expected.nan_to_num(99)), i


@pytest.mark.parametrize("factor", [1.0, 0.3, 5123.7, 1e-6])
def test_values_of_compressed_tensors(factor: float, tmp_path: Path) -> None:
    """By the formula to a unit in the last place of the scale; its own decompression rounds to bfloat16."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-untyped]
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # type: ignore[import-untyped]

    written = compressed("nvfp4-pack-quantized", NVFP4)("a.b", torch.randn(24, 256))
    tensors = written.tensors | {"weight_global_scale": torch.tensor([factor])}
    found = values(folder_of(tmp_path, tensors, config_of_compressed("nvfp4-pack-quantized", NVFP4)))
    packed, scales = tensors["weight_packed"], tensors["weight_scale"].double().repeat_interleave(16, 1)
    q = LEVELS.double()[torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()]
    expected = q * (scales / tensors["weight_global_scale"].double())
    torch.testing.assert_close(found, expected, rtol=2**-22, atol=0)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**NVFP4))
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    own = compressor.decompress(dict(tensors), scheme)["weight"]
    torch.testing.assert_close(found, own.double(), rtol=2**-6, atol=0)


def test_the_file_of_its_own(tmp_path: Path) -> None:
    written = modelopt("a.b", torch.randn(16, 128))
    folder = folder_of(tmp_path, written.tensors, None)
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(config))
    assert torch.equal(values(folder), written.values)


def test_layers_with_their_own(tmp_path: Path) -> None:
    """NVFP4 and FP8 in one folder."""
    first, second = modelopt("a.b", torch.randn(16, 128)), modelopt_fp8("a.c", torch.randn(32, 128))
    tensors = {
        f"a.{layer}.{name}": t for layer, one in (("b", first), ("c", second)) for name, t in one.tensors.items()
    }
    layers = {"a.b": {"quant_algo": "NVFP4", "group_size": 16}, "a.c": {"quant_algo": "FP8"}}
    config = {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    safetensors.save_file(tensors, folder_of(tmp_path, {}, config) / "model.safetensors")
    assert torch.equal(values(tmp_path), first.values)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.weight("a.c", torch.float32).dense(), second.values)


def test_columns_that_fill_no_block(tmp_path: Path) -> None:
    """They are dequantized."""
    written = modelopt("a.b", torch.randn(16, 144))
    folder = folder_of(tmp_path, written.tensors, MODELOPT)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.weight("a.b", torch.float32).format == "dense"
    assert torch.equal(values(folder), written.values.float().double())


@pytest.mark.parametrize(
    "change, rule",
    [
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo in .* must be 'NVFP4' or 'FP8' or 'MIXED_PRECISION', got 'W4A8_AWQ'"),
        ({"quant_algo": None}, "quant_algo in .* must be 'NVFP4' or 'FP8' or 'MIXED_PRECISION', got None"),
        ({"group_size": 32}, "group_size in .* must be 16 for NVFP4, got 32"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers in .* must be an object, got None"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "INT4"}}},
            "quantized_layers.a.b.quant_algo in .* must be 'NVFP4' or 'FP8', got 'INT4'",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.c": {"quant_algo": "FP8"}}},
            r"quantized_layers in .* must have a.b, whose weight is quantized, got \['a.c'\]",
        ),
        ({"quantization": 3}, r"quantization_config.quantization in .* must be an object, got 3"),
    ],
)
def test_bad_descriptions(change: dict[str, Any], rule: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, modelopt("a.b", torch.randn(16, 128)).tensors, MODELOPT | change)
    with pytest.raises(ValueError, match=rule):
        values(folder)


@pytest.mark.parametrize(
    "name, change, rule",
    [
        ("weight_scale_2", lambda t: t * float("inf"), r"a.b.weight_scale_2 must be finite .*, got inf"),
        (
            "weight_scale",
            lambda t: t.view(torch.uint8).fill_(127).view(t.dtype),
            "weight_scale must be finite .*, got nan",
        ),
        ("weight_scale", lambda t: t[:, :7].contiguous(), r"weight_scale must have shape \[16, 8\] .*, got \[16, 7\]"),
        ("weight_scale", lambda t: t.float(), "weight_scale must be float8_e4m3fn .*, got float32"),
        ("weight", lambda t: t[:, :60].contiguous(), "in_features must be a multiple of group_size, 16, got 120"),
        ("weight_scale_2", None, "a.b must have weight_scale_2, as modelopt NVFP4 has"),
        ("pre_quant_scale", lambda t: torch.ones(128), "pre_quant_scale"),
    ],
)
def test_bad_tensors(name: str, change: Any, rule: str, tmp_path: Path) -> None:
    tensors = dict(modelopt("a.b", torch.randn(16, 128)).tensors)
    old = tensors.pop(name, torch.zeros(()))
    if change is not None:
        tensors[name] = change(old)
    with pytest.raises(ValueError, match=rule):
        values(folder_of(tmp_path, tensors, MODELOPT))


def test_a_factor_of_zero(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    written = compressed("nvfp4-pack-quantized", NVFP4)("a.b", torch.randn(16, 128))
    tensors = written.tensors | {"weight_global_scale": torch.zeros(1)}
    with pytest.raises(ValueError, match="a.b.weight_global_scale must not be 0 .*, got 0"):
        values(folder_of(tmp_path, tensors, config_of_compressed("nvfp4-pack-quantized", NVFP4)))
    groups = config_of_compressed("nvfp4-pack-quantized", {**NVFP4, "group_size": 32})
    with pytest.raises(ValueError, match="weights.group_size in .* must be 16 for NVFP4, got 32"):
        values(folder_of(tmp_path, written.tensors, groups))


def test_memory(tmp_path: Path) -> None:
    """At most the file and 10 %: a float32 for 128 elements is 0.25 bits each, of 4.5."""
    written = modelopt("a.b", torch.randn(64, 1024))
    folder = folder_of(tmp_path, written.tensors, MODELOPT)
    with open_checkpoint(folder) as checkpoint:
        weight = checkpoint.weight("a.b", torch.float32)
    assert weight.format in ("nvfp4", "dense")
    if weight.format == "nvfp4":
        assert weight.weight.nbytes <= 1.1 * sum(tensor.nbytes for tensor in written.tensors.values())
    assert Format().size({"weight_packed": (3, 8)}) == (3, 16)
