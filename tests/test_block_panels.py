"""Blocks in panels of 16 rows: models hold them so where that is faster, files do not, and no row depends on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_infini
from support.checkpoint_writers import write_gguf
from torch_infini._core import library
from torch_infini.models import Llama
from torch_infini.nn import Linear
from torch_infini.ops._block_panels import NUMBERS
from torch_infini.ops._blocks import KINDS
from torch_infini.testing import threads_set_to
from torch_infini.testing.ops.linear_block_panels import inputs
from torch_infini.testing.ops.linear_blocks import random_weight
from torch_infini.weights import FORMATS, Integers, in_panels, out_of_panels

PREFERS = library.capability == "avx512_bf16"


@pytest.mark.parametrize("kind", NUMBERS.values())
def test_rows_alone_and_in_batches(kind: str) -> None:
    """The bits of a row are those of every number of rows: each part of up to eight, and tiles of more."""
    x, weight, number, _ = inputs(torch.bfloat16, 40, kind=kind, blocks=600 // KINDS[kind].elements + 1, panels=3)
    op = torch.ops.infini.linear_block_panels
    alone = torch.cat([op(row[None], weight, number) for row in x])
    for rows in (*range(2, 18), 23, 40):
        with threads_set_to(1 + rows % 2):
            assert torch.equal(op(x[:rows], weight, number), alone[:rows]), rows


def test_weights_are_not_rounded() -> None:
    """Where bfloat16 is multiplied in pairs, the only error is that of the result; linear_blocks rounds weights too."""
    if not PREFERS:
        pytest.skip("it takes AVX-512 BF16")
    x, weight, number, _ = inputs(torch.bfloat16, 64, kind="q4_k", blocks=8, panels=8)
    values = KINDS["q4_k"].values(random_weight(KINDS["q4_k"], 128, 2048)).flatten(1)
    exact = x.double() @ values.T
    error = (torch.ops.infini.linear_block_panels(x, weight, number) - exact).square().mean()
    rounding = (exact.bfloat16() - exact).square().mean()
    assert float(error) < 1.02 * float(rounding)


@pytest.mark.parametrize("kind", NUMBERS.values())
def test_formats(kind: str) -> None:
    """There and back is the same; values of any rows are those of the blocks; other weights stay as they are."""
    blocks = Integers(random_weight(KINDS[kind], 48, 3 * KINDS[kind].elements))
    k = 3 * KINDS[kind].elements
    format, integers = in_panels(kind, blocks, torch.bfloat16)
    assert format == (f"{kind}_panels" if PREFERS else kind)
    name, back = out_of_panels(format, integers)
    assert name == kind and torch.equal(back.weight, blocks.weight)
    values = FORMATS[kind].dequantize(blocks, 0, 48, k, torch.float32)
    for first, rows in ((0, 48), (5, 20), (17, 1), (47, 1), (30, 0)):
        some = FORMATS[format].dequantize(integers, first, rows, k, torch.float32)
        assert torch.equal(some, values[first : first + rows])
    for other in (
        in_panels(kind, blocks, torch.float32),
        in_panels(kind, Integers(blocks.weight[:40]), torch.bfloat16),
    ):
        assert other[0] == kind and other[1].weight.data_ptr() == blocks.weight.data_ptr()


def test_rows_that_fill_no_panel() -> None:
    with pytest.raises(ValueError, match=r"out_features must be a multiple of 16 for 'q4_k_panels', got 17"):
        Linear(512, 17, format="q4_k_panels")


def test_models_of_the_engine(tmp_path: Path) -> None:
    """A Llama in bfloat16 holds panels; in float32 rows, with the same values."""
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "model.gguf", lambda module: "Q4_K")
    model = Llama.from_pretrained(tmp_path / "model.gguf", dtype=torch.bfloat16, progress=False)
    layers = [layer for one in model.layers for layer in (one.attention.qkv, one.mlp.gate_up, one.mlp.down)]
    if library.capability == "avx512_amx":
        pytest.skip("with tiles weights are dense")
    assert {layer.format for layer in layers} == {"q4_k_panels" if PREFERS else "q4_k"}
    values = [layer.dense() for layer in layers]
    model.float()
    assert model.embed(torch.tensor([1, 2])).dtype == torch.float32
    assert {layer.format for layer in layers} == {"q4_k"}
    assert all(torch.equal(layer.dense().bfloat16(), value) for layer, value in zip(layers, values, strict=True))


def test_patched_models_and_their_files(tmp_path: Path) -> None:
    """save_patched writes rows, which any CPU multiplies; loading lays them out again."""
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    if library.capability == "avx512_amx":
        pytest.skip("with tiles weights are dense")
    write_gguf(tmp_path / "model.gguf", lambda module: "Q6_K")
    model: Any = torch_infini.load(tmp_path / "model.gguf", torch.bfloat16)
    name = "model.layers.0.mlp.down_proj"
    wanted = "q6_k_panels" if PREFERS else "q6_k"
    assert model.get_submodule(name).plan.format == wanted
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        logits = model(ids).logits
    torch_infini.save_patched(model, tmp_path / "saved")
    again: Any = torch_infini.load(tmp_path / "saved")
    assert again.get_submodule(name).plan.format == wanted
    with torch.no_grad():
        assert torch.equal(again(ids).logits, logits)
    stored = (tmp_path / "saved" / "config.json").read_text(encoding="utf-8")
    assert '"q6_k"' in stored and "panels" not in stored
    weight = model.get_submodule(name).weight
    model.float()
    assert model.get_submodule(name).plan.format == "q6_k"
    assert torch.equal(model.get_submodule(name).weight.bfloat16(), weight)
