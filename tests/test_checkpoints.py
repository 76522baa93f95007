"""open_checkpoint on folders and files of every format: values by the formula, layouts without loss, and bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.checkpoint_writers import (
    AWQ_CONFIG,
    BLOCK_BYTES,
    BY_LIBRARY,
    CASES,
    GPTQ_CONFIG,
    INT4,
    INT4_KINDS,
    INT8,
    Written,
    awq,
    block_layout,
    compressed,
    config_of_compressed,
    gptq,
    layers_of,
    write_folder,
    write_gguf,
)
from torch_infini.checkpoints import Target, files_of, open_checkpoint, read_tensors, write_tensors

pytestmark = pytest.mark.usefixtures("one_thread")


def needs_library(name: str) -> None:
    if name in BY_LIBRARY:
        pytest.importorskip("compressed_tensors")


@pytest.mark.parametrize("name", CASES)
def test_values_and_layouts(name: str, tmp_path: Path) -> None:
    needs_library(name)
    case = CASES[name]
    model = write_folder(tmp_path / "model", case, shards=2)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        checkpoint.check()
        modules = dict(layers_of(model))
        assert checkpoint.layers.keys() == modules.keys()
        for layer, module in modules.items():
            values = checkpoint.dequantize(layer)
            assert torch.equal(values.float(), module.weight), layer
            weight = checkpoint.weight(layer, torch.float32)
            assert (weight.format, weight.group) == (case.layout, case.group if case.layout == "int4" else 0)
            for_cuda = checkpoint.weight(layer, torch.float32, device="cuda")
            assert for_cuda.group == case.group and (for_cuda.format == "int4") == (case.group > 0)
            assert for_cuda.format == (weight.format if case.group == 0 else "int4")
            assert torch.equal(for_cuda.dense(), values) or for_cuda.format == "dense"
            if weight.format == "dense":
                assert torch.equal(weight.weight, module.weight)
            else:
                assert torch.equal(weight.dense(), values)
            assert (weight.columns is not None) == ("act-order" in name)


@pytest.mark.parametrize("name", ["pack-quantized", "pack-quantized-zeros", "w8a16"])
def test_integers_are_not_copied(name: str, tmp_path: Path) -> None:
    needs_library(name)
    write_folder(tmp_path / "model", CASES[name])
    layer = "model.layers.1.mlp.down_proj"
    with open_checkpoint(tmp_path / "model") as checkpoint:
        stored = "weight" if name == "w8a16" else "weight_packed"
        with checkpoint.read(f"{layer}.{stored}") as (tensor,):
            weight = checkpoint.weight(layer, torch.bfloat16, device="cuda")
            assert weight.weight.data_ptr() == tensor.data_ptr()


# Weights that are flattened: not all parts of them are read alone. Nor are columns with act-order.
FLAT = ("bitsandbytes-nf4", "bitsandbytes-nf4-128", "bitsandbytes-fp4")


@pytest.mark.parametrize("name", [*CASES, "Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_parts_of_layers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows or columns of one of two ranks: the values of the whole layer there, of half of the bytes."""
    needs_library(name)
    path = tmp_path / "model"
    if name in CASES:
        write_folder(path, CASES[name])
    else:
        pytest.importorskip("gguf")
        path = tmp_path / "model.gguf"
        write_gguf(path, lambda module: name)
    taken: list[int] = []  # bytes that a format makes a weight of

    def counting(original: Any) -> Any:
        def weight(format: Any, tensors: dict[str, Tensor], n: int, k: int, target: Target) -> Any:
            taken.append(sum(tensor.nbytes for tensor in tensors.values()))
            return original(format, tensors, n, k, target)

        return weight

    with open_checkpoint(path) as checkpoint:
        layer = "model.layers.1.mlp.down_proj"
        kind = type(checkpoint.layers[layer].format)
        monkeypatch.setattr(kind, "weight", counting(kind.weight))
        n, k = checkpoint.layers[layer].n, checkpoint.layers[layer].k
        whole = checkpoint.weight(layer, torch.float32).dense()
        everything = slice(None)
        for first in (0, 1):
            rows, columns = (slice(first * size // 2, (first + 1) * size // 2) for size in (n, k))
            assert torch.equal(checkpoint.weight(layer, torch.float32, rows=rows).dense(), whole[rows])
            assert torch.equal(checkpoint.weight(layer, torch.float32, everything, columns).dense(), whole[:, columns])
        assert len(taken) == 5
        if name in FLAT or "act-order" in name:
            return
        assert all(0.5 * taken[0] <= part <= 0.53 * taken[0] for part in taken[1:]), taken
        # q has its rows in another order in GGUF files, and is cut at heads.
        q = "model.layers.1.self_attn.q_proj"
        taken.clear()
        queries = checkpoint.weight(q, torch.float32).dense()
        assert torch.equal(checkpoint.weight(q, torch.float32, rows=slice(128, 256)).dense(), queries[128:])
        assert taken[1] <= 0.53 * taken[0]
        names = checkpoint.layers[q].names.values()  # read twice in one place: in the file's memory
        with checkpoint.read(*names) as once, checkpoint.read(*names) as again:
            assert [tensor.data_ptr() for tensor in once] == [tensor.data_ptr() for tensor in again]
        # Where a word or a block is cut, all of the layer is read.
        odd = slice(4, 36)
        assert torch.equal(checkpoint.weight(layer, torch.float32, rows=odd).dense(), whole[odd])


def test_ranks_do_not_cut_groups(tmp_path: Path) -> None:
    write_folder(tmp_path, CASES["awq"])
    with open_checkpoint(tmp_path) as checkpoint:
        layer = "model.layers.0.self_attn.q_proj"
        with pytest.raises(ValueError, match=f"{layer}, awq: ranks must not cut the groups of 64 numbers, got 32 col"):
            checkpoint.weight(layer, torch.float32, columns=slice(0, 32), device="cuda")
        if CASES["awq"].layout != "int4":  # in blocks, a rank's part is dense then
            part = checkpoint.weight(layer, torch.float32, columns=slice(32, 64))
            assert part.format == "dense"
            assert torch.equal(part.weight, checkpoint.dequantize(layer).float()[:, 32:64])


def test_gptq_awq_by_the_op(tmp_path: Path) -> None:
    """The op dequantize_awq reads the same tensors."""
    write_folder(tmp_path / "model", CASES["awq"])
    layer = "model.layers.0.self_attn.k_proj"
    with (
        open_checkpoint(tmp_path / "model") as checkpoint,
        checkpoint.read(*(f"{layer}.{last}" for last in ("qweight", "scales", "qzeros"))) as tensors,
    ):
        expected = torch.ops.infini.dequantize_awq(*(tensor.clone() for tensor in tensors))
        assert torch.equal(checkpoint.dequantize(layer).half().t(), expected)


KINDS = (*BLOCK_BYTES, "F16", "BF16", "F32")


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_values(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = write_gguf(tmp_path / "model.gguf", lambda name: kind)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        for layer, module in [*layers_of(model), ("model.embed_tokens", model.model.embed_tokens)]:
            assert (layer in checkpoint.layers) == (kind in BLOCK_BYTES)
            if kind not in BLOCK_BYTES:
                with checkpoint.read(f"{layer}.weight") as (tensor,):
                    assert torch.equal(tensor.float(), module.weight)
                continue
            values = checkpoint.dequantize(layer)
            assert torch.equal(values.float(), module.weight), layer
            assert torch.equal(checkpoint.weight(layer, torch.float32).dense().float(), module.weight)
            assert checkpoint.weight(layer, torch.float32).format == block_layout(kind)
            for_cuda = checkpoint.weight(layer, torch.float32, device="cuda")
            assert (for_cuda.format, for_cuda.group) == (("int4", 32) if kind in INT4_KINDS else (kind.lower(), 0))
        assert checkpoint.tensors["model.norm.weight"].shape == (256,)


def test_gguf_int4_is_exact(tmp_path: Path) -> None:
    """Scales and zeros of int4 are exact in float32, not only the values rounded to it."""
    pytest.importorskip("gguf")
    for kind in INT4_KINDS:
        write_gguf(tmp_path / f"{kind}.gguf", lambda name, kind=kind: kind)
        with open_checkpoint(tmp_path / f"{kind}.gguf") as checkpoint:
            layer = "model.layers.1.mlp.up_proj"
            weight = checkpoint.weight(layer, torch.bfloat16, device="cuda")
            assert weight.format == "int4" and torch.equal(weight.dense(), checkpoint.dequantize(layer))


def test_small_and_odd_layers() -> None:
    """Rows that no whole word of zero points holds, and every act-order group of another size."""
    pytest.importorskip("compressed_tensors")
    from torch_infini.checkpoints.formats.compressed_tensors import PackQuantized
    from torch_infini.checkpoints.formats.gptq import GPTQ

    weight = torch.randn(13, 64, dtype=torch.float32)
    stored = compressed("pack-quantized", {**INT4, "symmetric": False, "group_size": 32})("x", weight)
    format = PackQuantized(4, 32, False)
    assert torch.equal(format.dequantize(stored.tensors, 13, 64).float(), stored.values.float())
    assert torch.equal(format.weight(stored.tensors, 13, 64, Target(torch.float32, False)).dense(), stored.values)
    for rows, whole_words in ((slice(0, 8), True), (slice(8, 13), True), (slice(4, 8), False), (slice(4, 13), False)):
        part = format.cut(stored.tensors, 13, 64, rows, slice(None))
        assert (part is not None) == whole_words
        if part is not None:
            values = format.dequantize(part, rows.stop - rows.start, 64)
            assert torch.equal(values.float(), stored.values[rows].float())
    one_word = format.cut(stored.tensors, 13, 64, slice(0, 8), slice(None))
    assert one_word is not None and format.cut(one_word, 8, 64, slice(4, 8), slice(None)) is None
    written = gptq(32, True)("x", torch.randn(8, 64))
    written.tensors["g_idx"] = torch.tensor([0] * 8 + [1] * 56)
    unequal = GPTQ(4, 32, True, 1, True)
    dense = unequal.weight(written.tensors, 8, 64, Target(torch.float64, False))
    assert dense.format == "dense"
    q = 8 + written.values / written.tensors["scales"].t().double().repeat_interleave(32, 1)
    expected = (q - 8) * written.tensors["scales"].t().double()[:, written.tensors["g_idx"]]
    torch.testing.assert_close(dense.weight, expected, rtol=1e-12, atol=0)


# ---- bad input ----


def tiny_folder(folder: Path, written: Written, config: dict[str, Any] | None, layer: str = "a.b") -> Path:
    """A folder with one layer."""
    folder.mkdir(exist_ok=True)
    entry = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **entry}))
    save_file({f"{layer}.{last}": tensor for last, tensor in written.tensors.items()}, folder / "model.safetensors")
    return folder


def opened(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        checkpoint.check()


PACKED = config_of_compressed("pack-quantized", INT4)
CONFIGS: list[tuple[dict[str, Any] | Any, str, type[Exception]]] = [
    ([1], "quantization_config in {} must be an object, got [1]", ValueError),
    (
        {},
        "quant_method in {} must be one of awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt, "
        "mxfp4, got None",
        ValueError,
    ),
    (
        {"quant_method": "quanto"},
        "must be one of awq, bitsandbytes, compressed-tensors, fbgemm_fp8, fp8, gptq, modelopt, mxfp4",
        ValueError,
    ),
    ({"quant_method": ["awq"]}, "fp8, gptq, modelopt, mxfp4, got ['awq']", ValueError),
    *(
        ({**AWQ_CONFIG, "bits": bits}, f"quantization_config.bits in {{}} must be 4, got {bits}", ValueError)
        for bits in (2, 3, 5)
    ),
    *(({**GPTQ_CONFIG, "bits": bits}, f"bits in {{}} must be 4 or 8, got {bits}", ValueError) for bits in (2, 3, 5)),
    *(
        (
            config_of_compressed("pack-quantized", {**INT4, "num_bits": bits}),
            f"config_groups.group_0.weights.num_bits in {{}} must be 4 or 8, got {bits}",
            ValueError,
        )
        for bits in (2, 3, 5)
    ),
    ({**AWQ_CONFIG, "version": "gemv"}, "version in {} must be 'gemm' or 'GEMM', got 'gemv'", ValueError),
    ({**AWQ_CONFIG, "zero_point": False}, "zero_point in {} must be True, got False", ValueError),
    ({**AWQ_CONFIG, "group_size": 0}, "group_size in {} must be a positive integer, or -1", ValueError),
    ({**AWQ_CONFIG, "group_size": "64"}, "group_size in {} must be a positive integer, or -1", ValueError),
    ({**GPTQ_CONFIG, "sym": 1}, "sym in {} must be True or False, got 1", ValueError),
    ({**GPTQ_CONFIG, "checkpoint_format": "marlin"}, "checkpoint_format in {} must be 'gptq'", ValueError),
    (
        {**GPTQ_CONFIG, "dynamic": {"-:a": {}}},
        "GPTQ with other settings for some layers is not supported",
        NotImplementedError,
    ),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size in {} must be two positive", ValueError),
    ({**PACKED, "format": "marlin-24"}, "format in {} must be one of pack-quantized,", ValueError),
    ({**PACKED, "config_groups": {}}, "config_groups in {} must be an object of groups, got {{}}", ValueError),
    ({**PACKED, "kv_cache_scheme": {"num_bits": 8}}, "a quantized cache of a checkpoint is not", NotImplementedError),
    ({**PACKED, "transform_config": {"x": 1}}, "a rotation of weights and activations is not", NotImplementedError),
    ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights", NotImplementedError),
    (
        config_of_compressed("int-quantized", INT8, input_activations={**INT8, "dynamic": False}),
        "int8 activations with a fixed scale is not supported",
        NotImplementedError,
    ),
    (
        config_of_compressed("pack-quantized", {**INT4, "type": "float"}),
        "weights.type in {} must go with format pack-quantized, got 'float'",
        ValueError,
    ),
]


@pytest.mark.parametrize("config, rule, kind", CONFIGS, ids=lambda value: repr(value)[:50])
def test_bad_descriptions(config: Any, rule: str, kind: type[Exception], tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, awq()("x", torch.randn(16, 128)), config)
    with pytest.raises(kind) as raised:
        opened(folder)
    assert rule.format(folder / "config.json") in str(raised.value)
    assert "\n" not in str(raised.value)


def without(last: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(last)


def put(last: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({last: change(tensors[last])})


def spoiled(value: float) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(value, dtype=tensor.dtype))


ORDERED = {**GPTQ_CONFIG, "desc_act": True}
TENSORS: list[tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], None], str]] = [
    ("awq", AWQ_CONFIG, without("scales"), "a.b must have scales, as awq has, got qweight, qzeros"),
    ("awq", AWQ_CONFIG, without("qweight"), "a.b must have qweight, as awq has, got qzeros, scales"),
    ("awq", AWQ_CONFIG, put("scales", spoiled(float("nan"))), "a.b.scales must be finite (awq), got nan at [1, 2]"),
    ("awq", AWQ_CONFIG, put("scales", spoiled(float("inf"))), "a.b.scales must be finite (awq), got inf at [1, 2]"),
    (
        "awq",
        AWQ_CONFIG,
        put("scales", lambda t: t[:1]),
        "a.b.scales must have shape [2, 16] (awq, 16 x 128), got [1, 16]",
    ),
    (
        "awq",
        AWQ_CONFIG,
        put("scales", lambda t: t.double()),
        "a.b.scales must be float16 or bfloat16 or float32 (awq), got",
    ),
    (
        "awq",
        {**AWQ_CONFIG, "group_size": 96},
        lambda t: None,
        "in_features must be a multiple of group_size, 96, got 128",
    ),
    (
        "gptq",
        {**GPTQ_CONFIG},
        put("qzeros", lambda t: t + 1),
        "qzeros must be 8 everywhere, because the config says sym: ",
    ),
    ("gptq", {**GPTQ_CONFIG, "checkpoint_format": "gptq_v2"}, lambda t: None, "qzeros must be 8 everywhere"),
    ("gptq", ORDERED, put("g_idx", lambda t: t + 1), "a.b.g_idx must be from 0 to 1 (gptq), got 1 to 2"),
    ("gptq", ORDERED, put("g_idx", lambda t: t - 1), "a.b.g_idx must be from 0 to 1 (gptq), got -1 to 0"),
    ("gptq", ORDERED, without("g_idx"), "a.b must have g_idx, as gptq has"),
    ("gptq", GPTQ_CONFIG, put("g_idx", lambda t: t.flip(0)), "g_idx must be row / group_size, because the config says"),
    ("gptq", {**GPTQ_CONFIG, "bits": 8}, lambda t: None, "qzeros must have shape"),
]


@pytest.mark.parametrize(
    "writer, config, change, rule", TENSORS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_tensors(
    writer: str, config: dict[str, Any], change: Callable[[dict[str, Tensor]], None], rule: str, tmp_path: Path
) -> None:
    written = {"awq": awq, "gptq": gptq}[writer]()("x", torch.randn(16, 128))
    opened(tiny_folder(tmp_path, written, AWQ_CONFIG if writer == "awq" else GPTQ_CONFIG))
    change(written.tensors)
    written.tensors.update({last: tensor.contiguous() for last, tensor in written.tensors.items()})
    folder = tiny_folder(tmp_path, written, config)
    with pytest.raises(ValueError) as raised:
        opened(folder)
    assert rule in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bad_tensors_of_compressed_tensors(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    written = compressed("pack-quantized", INT4)("x", torch.randn(16, 128))
    opened(tiny_folder(tmp_path, written, PACKED))
    del written.tensors["weight_scale"]
    with pytest.raises(ValueError, match=r"a.b must have weight_scale, as compressed-tensors pack-quantized has, got "):
        opened(tiny_folder(tmp_path, written, PACKED))
    written = compressed("pack-quantized", INT4)("x", torch.randn(16, 128))
    written.tensors["weight_shape"] = torch.tensor([16, 256])
    with pytest.raises(ValueError, match=r"a.b.weight_shape must be \[16, 128\] .*, got \[16, 256\]"):
        opened(tiny_folder(tmp_path, written, PACKED))
    written = compressed("pack-quantized", INT4)("x", torch.randn(16, 128))
    written.tensors["weight_zero_point"] = torch.zeros(2, 4, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"as compressed-tensors pack-quantized with these .* got weight_zero_point too"
    ):
        opened(tiny_folder(tmp_path, written, PACKED))
    other = config_of_compressed("pack-quantized", INT4)
    other["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    with pytest.raises(ValueError, match=r"config_groups in .* must have a target for a.b, which is quantized, got"):
        opened(tiny_folder(tmp_path, written, other))


def test_description_beside_the_config(tmp_path: Path) -> None:
    """Older folders of GPTQ and AWQ have a file of their own."""
    folder = tiny_folder(tmp_path, gptq()("x", torch.randn(16, 128)), None)
    with pytest.raises(
        ValueError, match="a folder with packed weights must have a quantization_config, got .* without"
    ):
        opened(folder)
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "sym": True}))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.layers["a.b"].format.name == "gptq"


@pytest.mark.parametrize(
    "name", [3, None, "", "..", "../model.safetensors", "/model.safetensors", "a/model.safetensors"]
)
def test_an_index_names_files_of_its_folder(name: Any, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, awq()("x", torch.randn(16, 128)), AWQ_CONFIG)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    assert files_of(folder) == [folder / "model.safetensors"]
    index.write_text(json.dumps({"weight_map": {"x": "model.safetensors", "y": name}}))
    with pytest.raises(ValueError) as raised:
        files_of(folder)
    assert str(raised.value) == f"torch_infini.checkpoints: {index} must name files of its folder, got {name!r}"


def test_cut_off_files(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, awq()("x", torch.randn(16, 128)), AWQ_CONFIG)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(ValueError, match=r"model.safetensors must be a whole safetensors file, got"):
        opened(folder)
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gguf(path, lambda name: "Q4_0")
    whole = path.read_bytes()
    for size in (0, 3, 40, 2000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model.gguf must (be a whole GGUF file|hold all of)") as raised:
            opened(path)
        assert "\n" not in str(raised.value)


def test_bad_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "bert")
    for end in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        end()
    with pytest.raises(
        ValueError, match=r"general.architecture in .* must be one of afmoe, apertus, .*, starcoder2, got 'bert'"
    ):
        opened(tmp_path / "other.gguf")
    path = tmp_path / "model.gguf"
    write_gguf(path, lambda name: "Q8_0")
    data = bytearray(path.read_bytes())
    with open_checkpoint(path) as checkpoint, checkpoint.read("model.layers.1.mlp.down_proj.weight") as (tensor,):
        at = bytes(data).index(bytes(tensor.flatten()[:64].tolist()))
    data[at : at + 2] = b"\x00\x7e"  # NaN
    path.write_bytes(data)
    with (
        open_checkpoint(path) as checkpoint,
        pytest.raises(ValueError, match=r"layers.1.mlp.down_proj, gguf Q8_0: .*finite"),
    ):
        checkpoint.weight("model.layers.1.mlp.down_proj", torch.float32)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"GGUF files need the package gguf: run `pip install gguf`"):
        opened(path)


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(FileNotFoundError, match=r"somebody/model must be a folder, .*run `hf download somebody/model`"):
        open_checkpoint("somebody/model")
    snapshot = tmp_path / "hub" / "models--somebody--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    with pytest.raises(FileNotFoundError, match=r"must hold all of somebody/model: run `hf download somebody/model`"):
        open_checkpoint("somebody/model")
    tiny_folder(snapshot, awq()("x", torch.randn(16, 128)), AWQ_CONFIG)
    with open_checkpoint("somebody/model") as checkpoint:
        assert list(checkpoint.layers) == ["a.b"]
    for name in ("nowhere", "/no/where", "a/b/c", "./a"):
        with pytest.raises(FileNotFoundError, match="the folder must exist, got"):
            open_checkpoint(name)


def test_dense_folder(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(3, 5), "odd": torch.arange(3, dtype=torch.int8), "b": torch.randn(7).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.layers == {}
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
            n: tuple(t.shape) for n, t in tensors.items()
        }
        for name, tensor in load_file(tmp_path / "model.safetensors").items():
            with checkpoint.read(name) as (read,):
                assert torch.equal(read, tensor)
                kept = read
            assert torch.equal(kept, tensor)  # its pages come back


def test_tensors_of_a_file(tmp_path: Path) -> None:
    """Views are written as what they show; what was read stays when its file is written again."""
    x = torch.randn(6, 4)
    tensors = {
        "view": x[2:4],
        "turned": x.t(),
        "whole": x,
        "half": x.bfloat16(),
        "empty": torch.empty(0, 3),
        "one": x[0, 0],
    }
    path = tmp_path / "some.safetensors"
    write_tensors(path, tensors)
    read = dict(read_tensors(path))
    write_tensors(path, {"view": torch.zeros(1000)})
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"^a_caller: .*some.safetensors must be a whole safetensors file, got: "):
        dict(read_tensors(path, "a_caller"))
