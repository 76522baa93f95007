"""torch_infini.weights: a format that is one file works in layers, the engine, patched models and their folders.

The file is written here and put beside the package's own; nothing else knows its name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import torch_infini
from support.tiny_llama import greedy, logits, tiny, tokens
from torch_infini import LLM, SamplingParams, weights
from torch_infini.models import Llama
from torch_infini.nn import Linear
from torch_infini.patch import load_patched, patch_model, save_patched
from torch_infini.weights import quantize

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

# Half the bytes of a row are of its even columns, a panel has 4 rows: neither an element nor a row stands alone.
FILE = """
import torch

from torch_infini.weights.format import Format, Integers, TensorSpec

PANEL = 4


class Halves(Format):
    name, serves, panel = "halves", "eight", PANEL

    def kinds(self, n, k, group, dtype):
        weight = TensorSpec((-(-n // PANEL), -(-k // 2), 2 * PANEL), torch.int8, 2, PANEL)
        return {"weight": weight, "scales": TensorSpec((n,), torch.float32)}

    def rows(self, of, n, k):
        panels, pairs, _ = of.weight.shape
        both = of.weight.view(panels, pairs, 2, PANEL)
        return both.permute(0, 3, 1, 2).reshape(panels * PANEL, pairs * 2)[:n, :k]

    def quantize(self, weight, to, first_row=0):
        m, k = weight.shape
        scales = weight.float().abs().amax(1) / 127
        q = (weight.float() / scales[:, None]).round().to(torch.int8)
        to.scales[first_row : first_row + m] = scales
        for row in range(m):
            panel, lane = divmod(first_row + row, PANEL)
            to.weight[panel].view(-1, 2, PANEL)[:, :, lane] = torch.nn.functional.pad(q[row], (0, k % 2)).view(-1, 2)

    def dequantize(self, of, first, rows, k, dtype):
        n = of.scales.shape[0]
        return (self.rows(of, n, k).float() * of.scales[:, None]).to(dtype)[first : first + rows]

    def product(self, x, by, bias, same_bits, out):
        y = torch.nn.functional.linear(x, self.dequantize(by, 0, by.scales.shape[0], x.shape[-1], x.dtype), bias)
        return y if out is None else out.copy_(y)

    def put(self, some, first, to, row, rows):
        if some.dim() == 1:
            return super().put(some, first, to, row, rows)
        for i in range(rows):
            (panel, lane), (panel_to, lane_to) = divmod(first + i, PANEL), divmod(row + i, PANEL)
            to[panel_to].view(-1, 2, PANEL)[:, :, lane_to] = some[panel].view(-1, 2, PANEL)[:, :, lane]


FORMAT = Halves()
"""


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats" / "halves.py").write_text(FILE)
    monkeypatch.setattr(weights, "__path__", [*weights.__path__, str(tmp_path / "formats")])
    found = weights._found()
    monkeypatch.setitem(weights.FORMATS, "halves", found["halves"])
    assert [name for name in found if name != "halves"] == [name for name in weights.FORMATS if name != "halves"]


def model_of(**changes: Any) -> Any:
    """Sizes that are no multiple of a panel, so that projections of one input share some."""
    sizes = {"hidden_size": 60, "head_dim": 10, "num_key_value_heads": 1, "intermediate_size": 91}
    return tiny(torch.float32, **{**sizes, **changes})


@pytest.mark.usefixtures("added")
def test_a_format_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "MULTIPLIES_INTEGERS", ())  # of the head's x, in the engine and in a patched model
    linear, weight, x = Linear(7, 10, True, "halves"), torch.randn(10, 7), torch.randn(3, 7)
    linear.load(weight[:3], 0)
    linear.load(weight[3:], 3)
    torch.nn.init.normal_(linear.bias)
    assert float((linear.dense() - weight).abs().max()) < 0.02
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, linear.dense(), linear.bias))
    assert torch.equal(linear.dense(slice(2, 5)), linear.dense()[2:5])

    model, ids = model_of(), tokens(1)
    original = logits(model, ids)
    model.save_pretrained(tmp_path / "whole")
    report = patch_model(model, weights="eight")
    assert not report.left and sum(row.op == "linear_halves" for row in report.rows) > 7
    expected = logits(model, ids)
    assert 0 < float((expected - original).norm() / original.norm()) < 0.05
    save_patched(model, tmp_path / "saved")
    stored = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]["quantized"]
    assert {layer["format"] for name, layer in stored.items() if name != "lm_head"} == {"halves"}
    assert torch.equal(logits(load_patched(tmp_path / "saved"), ids), expected)

    # A budget takes it for what it is, the largest, though its name is not the last.
    budgeted = model_of()
    spent = patch_model(budgeted, weights="auto:7").budget
    error = float((logits(budgeted, ids) - original).norm() / original.norm())
    assert spent is not None and spent.bits <= 7 and 0.4 < error / spent.error < 2.5

    # The engine: from the integers of the folder, and quantized while it reads.
    made = greedy(model, ids)[0, ids.shape[1] :].tolist()
    for folder, options in (("saved", {}), ("whole", {"quantization": "eight"})):
        llm = LLM(tmp_path / folder, progress=False, enforce_eager=True, **options)  # its product is of ATen's ops
        output = llm.generate(ids[0].tolist(), SamplingParams.greedy(max_tokens=12))[0]
        assert list(output.outputs[0].token_ids) == made
    read = Llama.from_pretrained(tmp_path / "saved", progress=False)
    written = load_file(tmp_path / "saved" / "model.safetensors")
    for name, slot in read.slots(torch_infini.models.checkpoint.stored_layers(tmp_path / "saved")).items():
        assert torch.equal(slot.read(), written[name]), name


def test_names() -> None:
    assert weights.served() == ("int4", "int8")
    for name in weights.served():  # without kernels of its own a device has the plain one
        assert weights.best(name, "cuda").name == weights.best(name, "meta").name == name
    exact = {"table4": "table4", "int4_groups": "int4", "w4a16": "w4a16"}
    exact |= {"group8": "group8", "int8_rows": "int8", "w8a16": "w8a16"}
    assert weights.names() == (*weights.served(), *exact)
    for name, format in exact.items():
        if weights.FORMATS[format].quantizes_on(torch.device("cpu")):
            assert weights.best(name, "cpu").name == format
    with pytest.raises(ValueError, match="'table4' must be quantized on the CPU, which .*, got cuda$"):
        weights.best("table4", "cuda")
    with pytest.raises(ValueError, match="^torch_infini.weights: weights must be one of int4, int8, .*, got 'int5'$"):
        weights.best("int5", "cpu")


def test_folder_of_another_format(tmp_path: Path) -> None:
    """Slots of one format onto a model of another would write beyond its tensors."""
    model = tiny(torch.float32)
    patch_model(model, weights="int8")
    save_patched(model, tmp_path)
    read = Llama.from_pretrained(tmp_path, progress=False)
    wrong = Llama(read.config, "table4" if weights.FORMATS["table4"].quantizes_on(torch.device("cpu")) else "int4")
    rule = f"the format of model.layers.0.self_attn.q_proj must be the checkpoint's, {read.head.format}, got"
    with pytest.raises(ValueError, match=rule):
        wrong.slots(torch_infini.models.checkpoint.stored_layers(tmp_path))


@pytest.mark.parametrize("name", ["table4", "group8"])
def test_devices(name: str) -> None:
    """The product is there on CUDA too; what quantizes says where it can."""
    format = weights.FORMATS[name]
    assert format.serves_on(torch.device("cuda")) and not format.quantizes_on(torch.device("cuda"))
    with pytest.raises(ValueError, match=f"format '{name}' must be on a device that has its kernels, got meta"):
        Linear(64, 16, format=name, device="meta")
    new = lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    weight = torch.zeros(16, 64)
    rule = (
        rf"^torch_infini.weights.{name}: weight must be quantized on the CPU \(then move the layer\), got one on meta$"
    )
    with pytest.raises(ValueError, match=rule):
        format.quantize(weight, format.empty(16, 64, 0, torch.float32, new))
    with pytest.raises(ValueError, match=rf"^torch_infini.weights: '{name}' must be quantized on the CPU, which"):
        weights.best(name, "cuda")


@pytest.mark.parametrize("name", ["int8_rows", "int4_groups"])
def test_one_format_alone(name: str, tmp_path: Path) -> None:
    """Asked for by its own name, in a patched model, its folder and the engine; the head is the best int8."""
    model = tiny(torch.float32, intermediate_size=128)
    model.save_pretrained(tmp_path / "whole")
    report = patch_model(model, weights=name, strict=True)
    format = weights.best(name, "cpu").name
    assert format == name.partition("_")[0] and any(row.op == f"linear_{format}" for row in report.rows)
    save_patched(model, tmp_path / "saved")
    for folder, options in (("whole", {"weights": name}), ("saved", {}), ("saved", {"weights": name})):
        read = Llama.from_pretrained(tmp_path / folder, progress=False, **options)
        assert {layer.mlp.down.format for layer in read.layers} == {format}
        assert read.head.format == weights.best("int8", "cpu").name
