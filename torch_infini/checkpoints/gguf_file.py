"""GGUF files: metadata converted to the values of a config.json, and tensors by the names of transformers.

The package gguf reads the metadata; tensors are memory-mapped.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .blocks import KINDS, Blocks, interleaved
from .description import QuantizedLayer, checked_layer
from .files import MappedFile
from .method import NAME
from .weight import TensorInfo

_DENSE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def name_of(name: str) -> str | None:
    """Return transformers' name of a GGUF tensor; None for one that is not known."""
    stem, _, last = name.rpartition(".")
    block = stem.split(".")
    if len(block) == 3 and block[0] == "blk" and block[1].isdigit():
        found = _NAMES.get(block[2])
        return found and f"model.layers.{block[1]}.{found}.{last}"
    found = _NAMES.get(stem)
    return found and f"{found}.{last}"


class GGUFFile:
    """The tensors of a GGUF file.

    Args:
        path: The file.
        infos: The package's descriptions of the tensors.
        heads: Heads of q and of k, if the file has their rows interleaved; else None.

    Raises:
        ValueError: For a tensor that is not known or ends beyond the file.
        NotImplementedError: For a type that is not supported.
    """

    def __init__(self, path: Path, infos: Any, heads: dict[str, int] | None) -> None:
        self._file = MappedFile(path)
        self._heads = heads or {}
        self.tensors: dict[str, TensorInfo] = {}
        self.kinds: dict[str, str] = {}  # of tensors in blocks
        self._places: dict[str, tuple[int, int]] = {}
        for info in infos:
            if info.name == _FREQUENCIES:
                continue
            name = name_of(info.name)
            if name is None:
                raise ValueError(f"{NAME}: tensors in {path} must be those of a llama, got {info.name}")
            kind, shape = info.tensor_type.name, tuple(int(size) for size in reversed(info.shape))
            begin, size = int(info.data_offset), int(info.n_bytes)
            if begin + size > self._file.size:
                raise ValueError(
                    f"{NAME}: {path} must hold all of {info.name}, {begin + size} bytes, got {self._file.size} bytes"
                )
            if kind in KINDS:
                self.kinds[name] = kind
                *rows, columns = shape
                self.tensors[name] = TensorInfo(
                    torch.uint8, (*rows, columns // KINDS[kind].elements * KINDS[kind].bytes)
                )
            elif kind in _DENSE:
                self.tensors[name] = TensorInfo(_DENSE[kind], shape)
            else:
                raise NotImplementedError(
                    f"{NAME}: {info.name} in {path} must be one of {', '.join([*KINDS, *_DENSE])}, got {kind}"
                )
            self._places[name] = begin, size

    def read(self, name: str) -> Tensor:
        tensor = self._file.tensor(self._places[name][0], self.tensors[name])
        head = 0 if name in self.kinds else self.head(name)  # Blocks reorders rows itself
        return tensor[interleaved(len(tensor), head)] if head else tensor

    def head(self, name: str) -> int:
        """Return the rows of a head if the file has them interleaved; 0 for other tensors."""
        heads = self._heads.get(".".join(name.split(".")[-2:-1]))
        return 0 if heads is None else self.tensors[name].shape[0] // heads

    def release(self, name: str) -> None:
        self._file.release(*self._places[name])

    def close(self) -> None:
        self._places.clear()


def open_reader(path: Path) -> Any:
    """Return the package's reader of a file; ImportError without the package, ValueError for a truncated file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError(f"{NAME}: GGUF files need the package gguf: run `pip install gguf`, got {path}") from error
    try:
        return GGUFReader(path)
    except Exception as error:  # numpy's, if the file is truncated
        raise not_whole(path, error) from error


def not_whole(path: Path, error: Exception) -> ValueError:
    cause = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"{NAME}: {path} must be a whole GGUF file, got: {cause}")


def has_tokenizer(path: Path) -> bool:
    """Return whether a GGUF file holds a tokenizer; errors as open_reader."""
    return "tokenizer.ggml.tokens" in open_reader(path).fields


def open_gguf(path: Path) -> tuple[dict[str, Any], GGUFFile, dict[str, QuantizedLayer]]:
    """Open a GGUF file.

    Returns:
        (config, tensors, quantized layers); the layers include the embedding if it is in blocks.

    Raises:
        ImportError: Without the package gguf.
        ValueError, NotImplementedError: As open_checkpoint.
    """
    reader = open_reader(path)
    try:
        fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        ids = {name: reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
        tokens = {f"{name}_token_id": int(field.contents()) for name, field in ids.items() if field is not None}
    except Exception as error:  # numpy's, if the file is truncated
        raise not_whole(path, error) from error
    infos = {info.name: info for info in reader.tensors}
    config = {**config_of(path, fields, infos), **tokens}
    heads = None
    if config["model_type"] == "llama":
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    file = GGUFFile(path, reader.tensors, heads)
    layers = {}
    for name, kind in file.kinds.items():
        layer, _, last = name.rpartition(".")
        if last != "weight" or len(file.tensors[name].shape) != 2:
            raise ValueError(f"{NAME}: {name} in {path} must not be quantized, got {kind}")
        layers[layer] = checked_layer(layer, Blocks(kind, file.head(name)), {"weight": file.tensors[name]})
    return config, file, layers


def config_of(path: Path, fields: dict[str, Any], infos: dict[str, Any]) -> dict[str, Any]:
    """Convert a GGUF file's metadata to the values of a config.json."""
    kind = fields.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"{NAME}: general.architecture in {path} must be one of {', '.join(_ARCHITECTURES)}, got {kind!r}"
        )

    def field(name: str, needed: bool = True) -> Any:
        value = fields.get(f"{kind}.{name}")
        if value is None and needed:
            raise ValueError(f"{NAME}: {path} must have {kind}.{name}, got a file without it")
        return value

    if "token_embd.weight" not in infos:
        raise ValueError(f"{NAME}: {path} must have the tensor token_embd.weight, got a file without it")
    heads = field("attention.head_count")
    config = {
        "model_type": kind,
        "architectures": [{"llama": "LlamaForCausalLM"}.get(kind, f"{kind.capitalize()}ForCausalLM")],
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", False) or heads,
        "head_dim": field("attention.key_length", False) or field("embedding_length") // heads,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "vocab_size": int(infos["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in infos,
        "attention_bias": "blk.0.attn_q.bias" in infos,
        "mlp_bias": "blk.0.ffn_up.bias" in infos,
    }
    theta = float(field("rope.freq_base", False) or 10000.0)
    config["rope_parameters"] = {"rope_theta": theta, **rope_scaling(path, field, infos, theta, config["head_dim"])}
    return config


def rope_scaling(path: Path, field: Any, infos: dict[str, Any], theta: float, head_dim: int) -> dict[str, Any]:
    """Return rope_type and its settings. Of Llama 3's settings a file has only the factors computed from them."""
    kind, factor = field("rope.scaling.type", False), field("rope.scaling.factor", False)
    if _FREQUENCIES in infos:
        factors = torch.tensor(infos[_FREQUENCIES].data, dtype=torch.float64)
        most = float(factors.max())
        expected = llama3_factors(theta, head_dim, most)
        if factors.shape != expected.shape or not torch.allclose(factors, expected, rtol=1e-5):
            raise NotImplementedError(f"{NAME}: {_FREQUENCIES} in {path} must be those of Llama 3, got others")
        return {"rope_type": "llama3", "factor": most, **_LLAMA3}
    if kind in (None, "none"):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        original = field("rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    raise NotImplementedError(f"{NAME}: rope.scaling.type in {path} must be none, linear or yarn, got {kind!r}")


def llama3_factors(theta: float, head_dim: int, factor: float) -> Tensor:
    """Return what Llama 3's rope divides each frequency by, [head_dim / 2] in float64."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high, original = _LLAMA3.values()
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
