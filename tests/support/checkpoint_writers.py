"""Writers of quantized checkpoints for tests: AWQ, GPTQ and FP8 by their layouts, compressed-tensors and GGUF by the
formats' own libraries.

Each gives the values that it has stored, in float64, from its own integers and scales: nothing here calls
torch_infini.checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from torch_infini.ops._blocks.floats import NF4
from torch_infini.testing.checkpoints import random_model
from torch_infini.weights import BLOCKS, FORMATS

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "tie_word_embeddings": False}
_FP4 = (0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25)
FP4 = (*_FP4, *(-value for value in _FP4))  # bitsandbytes' FP4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Written(NamedTuple):
    """A layer as stored: tensors by the last part of their names, and the values [n, k] in float64."""

    tensors: dict[str, Tensor]
    values: Tensor


Writer = Callable[[str, Tensor], Written]


class Integers(NamedTuple):
    """Integers [n, k] from 0 to 2 ** bits - 1, zero points and scales [n, k / group]."""

    q: Tensor
    z: Tensor
    scales: Tensor


def quantized(
    weight: Tensor, group: int, bits: int = 4, symmetric: bool = False, dtype: torch.dtype = torch.float16
) -> Integers:
    most, groups = (1 << bits) - 1, weight.float().unflatten(1, (-1, weight.shape[1] if group < 0 else group))
    if symmetric:
        scales = (groups.abs().amax(-1) / (most // 2)).to(dtype)
        z = torch.full(scales.shape, most // 2 + 1)
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / most).to(dtype)
        z = (-low / scales.float()).round().clamp(0, most).long()
    q = (groups / scales.float()[..., None] + z[..., None]).round().clamp(0, most).long()
    return Integers(q.flatten(1), z, scales)


def values_of(integers: Integers, index: Tensor | None = None) -> Tensor:
    q, z, scales = integers
    if index is None:
        index = torch.arange(q.shape[1]) // (q.shape[1] // z.shape[1])
    return (q - z[:, index]).double() * scales.double()[:, index]


def packed(values: Tensor, bits: int = 4, order: tuple[int, ...] | None = None) -> Tensor:
    """Words of the integers of a row; element j of a word in the place order[j]."""
    per_word = 32 // bits
    parts = values.long().unflatten(1, (-1, per_word))
    shifts = bits * torch.tensor(order or range(per_word))
    words = (parts << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()


def awq(group: int = 64) -> Writer:
    def write(name: str, weight: Tensor) -> Written:
        integers = quantized(weight, group)
        tensors = {
            "qweight": packed(integers.q.t(), order=AWQ_ORDER),
            "qzeros": packed(integers.z.t(), order=AWQ_ORDER),
            "scales": integers.scales.t().contiguous(),
        }
        return Written(tensors, values_of(integers))

    return write


def gptq(group: int = 64, symmetric: bool = True, version: int = 1, act_order: bool = False, bits: int = 4) -> Writer:
    def write(name: str, weight: Tensor) -> Written:
        k = weight.shape[1]
        size = k if group < 0 else group
        index = torch.arange(k) // size
        if act_order:  # projections of one input have one order
            seed = sum(
                map(
                    ord, name.replace("q_proj", "x").replace("k_proj", "x").replace("v_proj", "x").replace("gate", "up")
                )
            )
            index = index[torch.randperm(k, generator=torch.Generator().manual_seed(seed))]
        order = index.argsort(stable=True)
        integers = quantized(weight[:, order], size, bits, symmetric)
        integers = integers._replace(q=torch.empty_like(integers.q).index_copy_(1, order, integers.q))
        if version == 1:
            z = integers.z.clamp(min=1)  # z - 1 is stored
            integers = integers._replace(z=z)
        tensors = {
            "qweight": packed(integers.q, bits).t().contiguous(),
            "qzeros": packed(integers.z.t() - int(version == 1), bits),
            "scales": integers.scales.t().contiguous(),
            "g_idx": index.int(),
        }
        return Written(tensors, values_of(integers, index))

    return write


def fp8_blocks(block: int = 128) -> Writer:
    def write(name: str, weight: Tensor) -> Written:
        n, k = weight.shape
        rows, columns = torch.arange(n) // block, torch.arange(k) // block
        most = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
        for i in range(most.shape[0]):
            for j in range(most.shape[1]):
                most[i, j] = weight[i * block : (i + 1) * block, j * block : (j + 1) * block].abs().max()
        scales = most / 448
        q = (weight.float() / scales[rows][:, columns]).to(torch.float8_e4m3fn)
        return Written({"weight": q, "weight_scale_inv": scales}, q.double() * scales.double()[rows][:, columns])

    return write


def bitsandbytes4(kind: str = "nf4", block: int = 64, nested: bool = True) -> Writer:
    """By the formulas: values of a table times a scale of a block of the flattened weight, or that scale likewise."""

    def nearest(values: Tensor, table: Tensor) -> Tensor:
        return (values[:, None] - table).abs().argmin(1).to(torch.uint8)

    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def write(name: str, weight: Tensor) -> Written:
        n, k = weight.shape
        blocks = weight.float().flatten().split(block)
        scales = torch.stack([one.abs().max() for one in blocks])
        state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "shape": [n, k], "dtype": "float32"}
        tensors = {"weight.quant_map": table.clone(), "weight.absmax": scales}
        if nested:
            offset, levels = scales.mean(), torch.linspace(-1, 1, 256)
            centred = (scales - offset).split(256)
            outer = torch.stack([one.abs().max() for one in centred])
            codes = torch.cat([nearest(one / most, levels) for one, most in zip(centred, outer, strict=True)])
            scales = levels[codes.long()] * outer.repeat_interleave(256)[: len(codes)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
            tensors |= {
                "weight.absmax": codes,
                "weight.nested_absmax": outer,
                "weight.nested_quant_map": levels.clone(),
            }
        q = torch.cat([nearest(one / most, table) for one, most in zip(blocks, scales, strict=True)])
        tensors["weight"] = (q[0::2] << 4 | q[1::2])[:, None]
        tensors[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor([*json.dumps(state).encode()]).byte()
        values = table.double()[q.long()] * scales.double().repeat_interleave(block)[: n * k]
        return Written(tensors, values.view(n, k))

    return write


def bitsandbytes8(name: str, weight: Tensor) -> Written:
    scales = weight.float().abs().amax(1)
    q = (weight.float() * 127 / scales[:, None]).round().to(torch.int8)
    tensors = {"weight": q, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Written(tensors, q.double() * (scales / 127).double()[:, None])


def fp8_rows(name: str, weight: Tensor) -> Written:
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    q = (weight.float() / scales).to(torch.float8_e4m3fn)
    return Written({"weight": q, "weight_scale": scales}, q.double() * scales.double())


def modelopt(name: str, weight: Tensor) -> Written:
    """NVFP4 as NVIDIA ModelOpt writes it, with a cache's scales."""
    factor = weight.float().abs().max() / (448 * 6)
    groups = weight.float().unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
    wide = (scales.float() * factor).clamp(min=1e-30)[..., None]
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    code = (levels - (groups / wide).abs()[..., None]).abs().argmin(-1)
    values = (levels[code] * groups.sign()).double() * wide.double()
    code = (code | (groups < 0).long() << 3).to(torch.uint8).flatten(1)
    tensors = {
        "weight": code[:, 0::2] | code[:, 1::2] << 4,
        "weight_scale": scales,
        "weight_scale_2": factor,
        "input_scale": torch.tensor(0.01),
    }
    scale = {"k_proj": "k_scale", "v_proj": "v_scale"}.get(name.rpartition(".")[2])
    return Written(tensors | ({scale: torch.tensor(1.0)} if scale else {}), values.flatten(1))


def modelopt_fp8(name: str, weight: Tensor) -> Written:
    scale = weight.float().abs().max() / 448
    q = (weight.float() / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": q, "weight_scale": scale, "input_scale": torch.tensor(0.01)}
    return Written(tensors, q.double() * scale.double())


def compressed(format: str, weights: dict[str, Any]) -> Writer:
    """By compressed_tensors' own compressors."""
    from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-untyped]
    from compressed_tensors.quantization import (  # type: ignore[import-untyped]
        QuantizationArgs,
        QuantizationScheme,
    )

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor = BaseCompressor.get_value_from_registry(format)

    def write(name: str, weight: Tensor) -> Written:
        n, k = weight.shape
        group, bits, kind = weights.get("group_size") or k, weights["num_bits"], weights["type"]
        state = {"weight": weight}
        if kind == "float" and bits == 4 and group == 16:
            # Powers of two, so that the library's division is exact: tests have others.
            state["weight_global_scale"] = (448 * 6 / weight.float().abs().max()).log2().floor().exp2()[None]
            scales = weight.float().unflatten(1, (-1, 16)).abs().amax(-1) / 6 * state["weight_global_scale"]
            state["weight_scale"] = scales.to(torch.float8_e4m3fn).float()
        elif kind == "float" and bits == 4:
            exponents = (weight.float().unflatten(1, (-1, 32)).abs().amax(-1) / 6).log2().ceil()
            state["weight_scale"] = exponents.exp2()
        elif kind == "float" and weights["strategy"] == "block":
            height, width = weights["block_structure"]
            state["weight_scale"] = (
                weight.float().unflatten(0, (-1, height)).unflatten(2, (-1, width)).abs().amax((1, 3)) / 448
            )
        elif kind == "float":
            state["weight_scale"] = weight.float().abs().amax(1, keepdim=True) / 448
        else:
            integers = quantized(weight, group, bits, weights["symmetric"], torch.bfloat16)
            state["weight_scale"] = integers.scales
            if not weights["symmetric"]:
                state["weight_zero_point"] = (integers.z - (1 << bits - 1)).to(torch.int8)
        state = compressor.compress(state, scheme)
        back = compressor.decompress({key: value.clone() for key, value in state.items()} | wide(state), scheme)
        return Written(state, back["weight"].double())

    def wide(state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Scales in float64: the library's own formula without rounding."""
        scale = state["weight_scale"]
        return {"weight_scale": scale.double()} if scale.is_floating_point() else {}

    return write


def layers_of(model: Any) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            yield name, module


def config_of_compressed(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}},
        "ignore": ["lm_head"],
    }


class Case(NamedTuple):
    """A format: the writer of a layer, the entry quantization_config, and the layout that layers must get where there
    is no kernel for a kind of block, or the kind.
    """

    writer: Callable[[], Writer]
    config: dict[str, Any]
    exact_layout: str
    group: int = 0

    @property
    def layout(self) -> str:
        kind = f"int4_{self.group}" if self.exact_layout == "int4" else self.exact_layout
        return block_layout(kind) if kind in BLOCKS else kind


INT4_KINDS = ("Q4_0", "Q4_1", "Q4_K")  # which become int4 where linear_blocks has no kernel


def block_layout(kind: str) -> str:
    """Return the LinearWeight.format of a layer in blocks of this kind, for activations in float32."""
    if FORMATS[kind.lower()].serves_on(torch.device("cpu")):
        return kind.lower()
    return "int4" if kind in INT4_KINDS or kind.startswith("int4") else "dense"


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def of_library(format: str, weights: dict[str, Any], layout: str, group: int = 0, **more: Any) -> Case:
    return Case(lambda: compressed(format, weights), config_of_compressed(format, weights, **more), layout, group)


BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}

CASES: dict[str, Case] = {
    "awq": Case(awq, AWQ_CONFIG, "int4", 64),
    "awq-128": Case(lambda: awq(128), {**AWQ_CONFIG, "group_size": 128}, "int4", 128),
    "awq-rows": Case(lambda: awq(-1), {**AWQ_CONFIG, "group_size": -1}, "int4", 128),
    "gptq": Case(gptq, GPTQ_CONFIG, "int4", 64),
    "gptq-zeros": Case(lambda: gptq(32, False), {**GPTQ_CONFIG, "sym": False, "group_size": 32}, "int4", 32),
    "gptq-v2": Case(
        lambda: gptq(64, False, 2), {**GPTQ_CONFIG, "sym": False, "checkpoint_format": "gptq_v2"}, "int4", 64
    ),
    "gptq-act-order": Case(
        lambda: gptq(64, False, act_order=True), {**GPTQ_CONFIG, "sym": False, "desc_act": True}, "int4", 64
    ),
    "gptq-8": Case(lambda: gptq(-1, bits=8), {**GPTQ_CONFIG, "bits": 8, "group_size": -1}, "int8"),
    "gptq-8-groups": Case(lambda: gptq(64, False, bits=8), {**GPTQ_CONFIG, "bits": 8, "sym": False}, "dense"),
    "gptq-16": Case(lambda: gptq(16), {**GPTQ_CONFIG, "group_size": 16}, "dense"),
    "fp8-blocks": Case(fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "fp8": Case(lambda: fp8_rows, {"quant_method": "fp8"}, "fp8"),
    "fbgemm": Case(lambda: fp8_rows, {"quant_method": "fbgemm_fp8"}, "fp8"),
    "pack-quantized": of_library("pack-quantized", INT4, "int4", 64),
    "pack-quantized-zeros": of_library("pack-quantized", {**INT4, "symmetric": False}, "int4", 64),
    "pack-quantized-8": of_library("pack-quantized", {**INT8, "strategy": "channel"}, "int8"),
    "w8a16": of_library("int-quantized", INT8, "int8"),
    "w8a8": of_library("int-quantized", INT8, "int8", input_activations=DYNAMIC),
    "float-quantized": of_library("float-quantized", FP8, "fp8"),
    "float-quantized-blocks": of_library(
        "float-quantized", {**FP8, "strategy": "block", "block_structure": [128, 128]}, "fp8"
    ),
    "mxfp4": of_library(
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
        "mxfp4",
    ),
    "nvfp4": of_library("nvfp4-pack-quantized", NVFP4, "nvfp4"),
    "modelopt-nvfp4": Case(lambda: modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    "modelopt-fp8": Case(lambda: modelopt_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
}
CASES |= {
    "bitsandbytes-nf4": Case(bitsandbytes4, BNB4, "nf4"),
    "bitsandbytes-nf4-128": Case(lambda: bitsandbytes4("nf4", 128, False), BNB4, "nf4"),
    "bitsandbytes-fp4": Case(lambda: bitsandbytes4("fp4"), {**BNB4, "bnb_4bit_quant_type": "fp4"}, "dense"),
    "bitsandbytes-8": Case(lambda: bitsandbytes8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
}
BY_LIBRARY = ("pack-quantized", "pack-quantized-zeros", "pack-quantized-8", "w8a16", "w8a8") + (
    "float-quantized",
    "float-quantized-blocks",
    "mxfp4",
    "nvfp4",
)


def write_folder(
    folder: Path, case: Case, shards: int = 1, name: str = "llama", given: Any = None, **changes: Any
) -> Any:
    """Write a folder of a random_model, or of a given one, which is changed.

    Returns:
        The dense model in float32 with the stored values rounded once.
    """
    folder.mkdir(exist_ok=True)
    model = random_model(name, **{**SIZES, **changes}) if given is None else given
    tensors = {key: value.clone() for key, value in model.state_dict().items()}
    write = case.writer()
    for layer, module in layers_of(model):
        del tensors[f"{layer}.weight"]
        stored, values = write(layer, module.weight.data)
        tensors |= {f"{layer}.{last}": tensor.contiguous() for last, tensor in stored.items()}
        module.weight.data = values.float()
    config = model.config.to_dict() | {"quantization_config": case.config, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return model
    places = {key: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, key in enumerate(names)}
    for file in set(places.values()):
        save_file({key: tensors[key] for key in names if places[key] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return model


# ---- GGUF ----

BLOCK_BYTES = {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34)} | {
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ4_NL": (32, 18),
    "MXFP4": (32, 17),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "IQ4_XS": (256, 136),
}
# Float16 scales of the kinds that the package cannot write, by offset, and their sizes beside each other: a second one
# is of what is subtracted, the middle of the codes.
HALVES = {
    "Q2_K": {80: 20.0, 82: 30.0},
    "Q3_K": {108: 6.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 0.2},
    "IQ4_NL": {0: 1.0},
    "IQ4_XS": {0: 0.2},
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_blocks(kind: str, weight: Tensor) -> tuple[Any, Tensor]:
    """(bytes as numpy, values in float32) by the package. It has no writer of the K kinds: those are random bytes."""
    import gguf
    import numpy as np

    kind_ = gguf.GGMLQuantizationType[kind]
    if kind in HALVES:
        elements, size = BLOCK_BYTES[kind]
        blocks = torch.randint(0, 256, (weight.shape[0], weight.shape[1] // elements, size), dtype=torch.uint8)
        for at, factor in HALVES[kind].items():
            scales = (torch.rand(blocks.shape[:2]) * 0.1 + 0.95) * factor * 2e-4
            blocks[..., at : at + 2] = scales.half()[..., None].view(torch.uint8)
        data = blocks.flatten(1).numpy()
    elif kind == "BF16":
        data = weight.bfloat16().view(torch.uint8).numpy()
    else:
        data = gguf.quants.quantize(np.ascontiguousarray(weight.float().numpy()), kind_)
    return data, torch.from_numpy(gguf.quants.dequantize(data, kind_).copy())


def write_gguf(path: Path, kinds: Callable[[str], str], name: str = "llama", **changes: Any) -> Any:
    """Write a GGUF file by the package; returns the dense model in float32 with the stored values.

    Args:
        kinds: The type of each matrix by its module's name.
    """
    import gguf

    model = random_model(name, **{**SIZES, **changes})
    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if kind != "qwen2" else config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, tensor in model.state_dict().items():
        stem, _, last = key.rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        parts = stem.split(".", 3)
        mapped = GGUF_NAMES[stem] if stem in GGUF_NAMES else f"blk.{parts[2]}.{GGUF_NAMES[parts[3]]}"
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            stem.rpartition(".")[2]
        )
        rows = torch.arange(tensor.shape[0])
        if kind == "llama" and heads:  # row r of a head goes behind row r - half
            rows = rows.view(heads, 2, -1).transpose(1, 2).flatten()
        if tensor.dim() == 1:
            writer.add_tensor(f"{mapped}.{last}", tensor[rows].float().numpy())
            continue
        type_ = kinds(stem)
        data, values = gguf_blocks(type_, tensor[rows])
        writer.add_tensor(f"{mapped}.{last}", data, raw_dtype=gguf.GGMLQuantizationType[type_])
        tensor.copy_(torch.empty_like(tensor).index_copy_(0, rows, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
