"""bitsandbytes folders: states that the library writes, descriptions that contradict themselves, ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.checkpoint_writers import BNB4, CASES, block_layout
from torch_infini.checkpoints import open_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

Q = "model.layers.0.self_attn.q_proj"
STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"


def tiny(folder: Path, name: str = "bitsandbytes-nf4", n: int = 16, k: int = 128) -> Tensor:
    """Write a folder of one layer; return its values."""
    tensors, values = CASES[name].writer()("x", torch.randn(n, k))
    save_file({f"{Q}.{last}": tensor.contiguous() for last, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": CASES[name].config}))
    return values


@pytest.mark.parametrize("k", [64, 96, 130])
def test_rows_that_cut_blocks(k: int, tmp_path: Path) -> None:
    """Blocks of the flattened weight that lie across rows: dense, and the formula's values."""
    values = tiny(tmp_path, n=6, k=k)
    with open_checkpoint(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.dequantize(Q), values)
        weight = checkpoint.weight(Q, torch.float32)
        assert weight.format == (block_layout("nf4") if k == 64 else "dense")
        assert torch.equal(weight.dense(torch.float32), values.float())


@pytest.mark.parametrize("name", ["bitsandbytes-nf4", "bitsandbytes-nf4-128", "bitsandbytes-8"])
def test_parts(name: str, tmp_path: Path) -> None:
    """What ranks read, of rows and of columns."""
    values = tiny(tmp_path, name, 16, 256)
    with open_checkpoint(tmp_path) as checkpoint:
        for rows, columns in (
            (slice(4, 12), slice(0, 256)),
            (slice(0, 16), slice(128, 256)),
            (slice(8, 16), slice(64)),
        ):
            part = checkpoint.weight(Q, torch.float32, rows, columns).dense(torch.float32)
            assert torch.equal(part, values[rows, columns].float())


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_library_writes_it(kind: str, nested: bool, tmp_path: Path) -> None:
    """Values are those of bitsandbytes' own dequantization."""
    library: Any = pytest.importorskip("bitsandbytes")
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    if kind == "int8":
        codes, scales, _ = library.functional.int8_vectorwise_quant(weight.half())
        tensors = {"weight": codes, "SCB": scales}
        expected = codes.float() * scales[:, None] / 127
        config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    else:
        codes, state = library.functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        tensors = {"weight": codes, **{f"weight.{last}": t for last, t in state.as_dict(packed=True).items()}}
        expected = library.functional.dequantize_4bit(codes, state)
        config = {**BNB4, "bnb_4bit_quant_type": kind}
    save_file({f"{Q}.{last}": tensor.contiguous() for last, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with open_checkpoint(tmp_path) as checkpoint:
        checkpoint.check()
        found = checkpoint.weight(Q, torch.float32)
        assert found.format == {"nf4": block_layout("nf4"), "fp4": "dense", "int8": "int8"}[kind]
        assert torch.equal(checkpoint.dequantize(Q).float(), found.dense(torch.float32))
        if kind == "int8":  # rounded twice there
            assert torch.allclose(found.dense(torch.float32), expected, rtol=3e-7, atol=0)
        else:
            assert torch.equal(found.dense(torch.float32), expected)


def state_of(**changes: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        state = json.loads(bytes(tensors[STATE].tolist())) | changes
        tensors[STATE] = torch.tensor([*json.dumps(state).encode()]).byte()

    return change


def put(last: str, new: Callable[[Tensor], Tensor] | None) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        old = tensors.pop(f"{Q}.{last}")
        if new is not None:
            tensors[f"{Q}.{last}"] = new(old)

    return change


@pytest.mark.parametrize(
    "fault, says",
    [
        (state_of(shape=[16, 64]), r"weight must have shape \[512, 1\] \(bitsandbytes nf4, 16 x 64\), got \[1024, 1\]"),
        (state_of(shape=[16]), "must be the JSON of a quantized nf4 weight, got not enough values"),
        (state_of(quant_type="fp4"), "must be the JSON of a quantized nf4 weight, got {'quant_type': 'fp4'"),
        (state_of(blocksize=0), "must be the JSON of a quantized nf4 weight"),
        (state_of(blocksize=None), "must be the JSON of a quantized nf4 weight"),
        (state_of(blocksize=32), r"weight.absmax must have shape \[64\]"),
        (put(f"weight.{STATE.partition('.weight.')[2]}", lambda old: old[:-1].clone()), "must be the JSON of a quant"),
        (put(f"weight.{STATE.partition('.weight.')[2]}", None), "bitsandbytes__nf4 must have shape, blocksize and"),
        (put("weight.absmax", lambda old: old.float()), "weight.absmax must be uint8"),
        (put("weight.quant_map", None), "must have weight.quant_map"),
        (put("weight.nested_absmax", lambda old: old * torch.nan), "weight.nested_absmax must be finite"),
    ],
    ids=range(11),
)
def test_faults(fault: Callable[[dict[str, Tensor]], None], says: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    fault(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says) as raised, open_checkpoint(tmp_path) as checkpoint:
        checkpoint.check()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "entries, error, says",
    [
        (
            {"load_in_8bit": True},
            ValueError,
            "load_in_4bit in .* must be true where load_in_8bit is false, and the rev",
        ),
        ({"bnb_4bit_quant_type": "nf3"}, ValueError, "bnb_4bit_quant_type in .* must be 'nf4' or 'fp4', got 'nf3'"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, NotImplementedError, "a storage dtype other than uint8 is not supp"),
    ],
    ids=range(3),
)
def test_descriptions(entries: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    tiny(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": BNB4 | entries}))
    with pytest.raises(error, match=says):
        open_checkpoint(tmp_path)
