"""Architecture, by which those of GGUF files register, and Metadata, by which they read a file's fields.

An architecture converts the fields to the values of a config.json and names the tensors as transformers does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .method import NAME
from .order import Order, halves

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
# Llama 3's settings of rope, and Llama 4's, without frequencies between those that are divided and those that are not.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA4 = {**_LLAMA3, "high_freq_factor": 1.0}
# GGUF's names of tensors without their last part, those of a block without "blk.N.", and transformers'.
NAMES = {
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
# For blocks with norms of what attention and the MLP give as well as of what they take (Gemma's).
SANDWICH_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# For blocks with norms of what attention and the MLP give alone (OLMo 2's).
POST_NAMES = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


class Metadata:
    """The fields and tensors of a file.

    Args:
        path: For errors.
        fields: By their names; those of the architecture begin with its name.
        infos: The package's descriptions of the tensors, by name.
    """

    def __init__(self, path: Path, fields: Mapping[str, Any], infos: Mapping[str, Any]) -> None:
        self.path, self.fields, self.infos = path, fields, infos
        self.architecture = fields.get("general.architecture")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the architecture; the default without it."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def __getitem__(self, name: str) -> Any:
        """Return a field of the architecture; ValueError without it."""
        value = self.get(name)
        if value is None:
            raise ValueError(f"{NAME}: {self.path} must have {self.architecture}.{name}, got a file without it")
        return value

    def size(self, name: str) -> int:
        """Return a field that is a size; ValueError for one that is not a positive integer."""
        value = self[name]
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{NAME}: {self.architecture}.{name} in {self.path} must be a positive integer, got {value!r}"
            )
        return value

    def __contains__(self, tensor: str) -> bool:
        return tensor in self.infos

    def rows(self, tensor: str) -> int:
        """Return the rows of a matrix; ValueError without it."""
        if tensor not in self.infos:
            raise ValueError(f"{NAME}: {self.path} must have the tensor {tensor}, got a file without it")
        return int(self.infos[tensor].shape[1])

    def values(self, tensor: str) -> Tensor:
        """Return a tensor of one dimension, in float64."""
        return torch.tensor(self.infos[tensor].data, dtype=torch.float64)

    @property
    def head_dim(self) -> int:
        return int(self.get("attention.key_length") or self.size("embedding_length") // self.heads)

    @property
    def heads(self) -> int:
        return self.size("attention.head_count")

    @property
    def layers(self) -> int:
        """The layers of the decoder; blocks behind them, which predict further tokens, are not loaded."""
        blocks, behind = self.size("block_count"), self.get("nextn_predict_layers", 0)
        if not isinstance(behind, int) or not 0 <= behind < blocks:
            raise ValueError(
                f"{NAME}: {self.architecture}.nextn_predict_layers in {self.path} must be a number below that of "
                f"blocks, {blocks}, got {behind!r}"
            )
        return blocks - behind

    def is_behind(self, tensor: str) -> bool:
        """Return whether a tensor is of a block behind the layers."""
        block = tensor.split(".", 2)
        is_extra = bool(self.get("nextn_predict_layers")) and block[0] == "blk" and block[1].isdigit()
        return is_extra and int(block[1]) >= self.layers


OrderOf = Callable[[Metadata, str, int], Order | None]


def in_order(m: Metadata, name: str, n: int) -> Order | None:
    """Return None: the file has the n rows, or columns, of a tensor in the model's order."""
    return None


def interleaved(m: Metadata, name: str, n: int) -> Order | None:
    """Return the order of q's and k's rows in files of LLaMA's kind, which rotate neighbours."""
    kv = m.get("attention.head_count_kv") or m.heads
    heads = {"q_proj": m.heads, "k_proj": max(kv) if isinstance(kv, list) else kv}.get(last_module(name))
    return None if heads is None else halves(n // heads)


def last_module(name: str) -> str:
    """Return the name of the module whose tensor it is, without those that it is in."""
    return ".".join(name.split(".")[-2:-1])


def as_stored(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor in full precision: the file has the model's values."""
    return tensor


def expansion(m: Metadata) -> int:
    """Return the columns inside a Mamba for each of the model's; ValueError if they are no multiple."""
    hidden, inner = m.size("embedding_length"), m.size("ssm.inner_size")
    if inner % hidden:
        raise ValueError(
            f"{NAME}: {m.architecture}.ssm.inner_size in {m.path} must be a multiple of embedding_length, {hidden}, "
            f"got {inner}"
        )
    return inner // hidden


def without_fields(m: Metadata) -> Mapping[str, Tensor]:
    """Return nothing: all tensors of the model are tensors of the file."""
    return {}


def without_one(name: str, tensor: Tensor) -> Tensor:
    """Return the weight of a norm that has 1 added in the file; other tensors as they are."""
    return tensor.float() - 1 if tensor.dim() == 1 and name.endswith("norm.weight") else tensor


def log_of_decay(tensor: Tensor) -> Tensor:
    """Return A_log of a state's decay -exp(A_log), which files have; ValueError for one that is not negative."""
    decay = tensor.float()
    if not bool((decay < 0).all()):
        raise ValueError(f"the decay of a state must be negative, got {float(decay.max())}")
    return (-decay).log()


class Part(NamedTuple):
    """A tensor of a file that is a part of one of the model's: the name of that, its place, and how many there are."""

    whole: str
    place: int
    total: int


class Joined(NamedTuple):
    """A tensor that a file has as several.

    Attributes:
        names: Those of the file, without "blk.N.".
        join: Computes the model's tensor from them, in full precision, in the order of `names`. None: their rows follow
            each other; blocks of one kind stay blocks.
        others: Names of the same that files of other models of the architecture have.
    """

    names: tuple[str, ...]
    join: Callable[[Metadata, list[Tensor]], Tensor] | None = None
    others: tuple[tuple[str, ...], ...] = ()

    def of(self, m: Metadata, parts: list[Tensor]) -> Tensor:
        """Return the model's tensor."""
        return torch.cat(parts) if self.join is None else self.join(m, parts)


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        name: The value of general.architecture.
        config: Returns the values of config.json, model_type among them.
        names: Names of tensors beside NAMES, or in their place; with their last part, or without.
        rows: Returns the order of a tensor's rows in the file, by transformers' name and their number.
        columns: The same of its columns.
        values: Converts a tensor in full precision, by transformers' name, to the model's values.
        joined: Tensors that the file has as several, by transformers' name in the layer.
        parts: Tensors of experts that are stored in parts: their names, and the names of the parts. gate and up may be
            one tensor in a file.
        interleaved_parts: Whether rows of the parts alternate; else one part follows the other.
        transposed_experts: Whether the model's own experts are [experts, k, n].
        added: Dimensions of 1 that the file's tensors lack, by the end of transformers' name.
        flat: Ends of names of tensors that have one dimension in the model.
        stacked: Tensors of the file that are several of the model's, one for each first index: transformers' name, with
            {} for that.
        from_fields: Returns the tensors that files have as fields, by transformers' name.
        layers: The name of the list of layers in the model.
    """

    name: str
    config: Callable[[Metadata], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    rows: OrderOf = in_order
    columns: OrderOf = in_order
    values: Callable[[str, Tensor], Tensor] = as_stored
    joined: Mapping[str, Joined] = field(default_factory=lambda: MappingProxyType({}))
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    interleaved_parts: bool = False
    transposed_experts: bool = False
    added: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    flat: tuple[str, ...] = ()
    stacked: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    from_fields: Callable[[Metadata], Mapping[str, Tensor]] = without_fields
    layers: str = "model.layers"

    def name_of(self, name: str) -> str | None:
        """Return transformers' name of a tensor; None for one that is not known."""
        block = name.split(".", 2)
        if block[0] == "blk" and len(block) == 3 and block[1].isdigit():
            found = self._found(block[2])
            return found and f"{self.layers}.{block[1]}.{found}"
        return self._found(name)

    def _found(self, name: str) -> str | None:
        if name in self.names:
            return self.names[name]
        stem, _, last = name.rpartition(".")
        found = self.names.get(stem) or NAMES.get(stem)
        return found and f"{found}.{last}"

    def part_of(self, name: str) -> Part | None:
        """Return what a tensor of the file is a part of; None for whole ones."""
        block = name.split(".", 2)
        if block[0] != "blk" or len(block) != 3:
            return None
        joined = [(whole, names) for whole, one in self.joined.items() for names in (one.names, *one.others)]
        fused = [(whole, (_FUSED,)) for whole, names in self.parts.items() if len(names) == 2]
        for whole, names in (*self.parts.items(), *fused, *joined):
            if block[2] in names:
                return Part(f"{self.layers}.{block[1]}.{whole}", names.index(block[2]), len(names))
        return None

    def joined_as(self, name: str) -> Joined | None:
        """Return how a tensor of the model is joined, by its name; None for others."""
        return self.joined.get(name.split(".", 3)[-1])


_FUSED = "ffn_gate_up_exps.weight"  # gate and up of experts


def parts_of_experts(name: str) -> dict[str, tuple[str, ...]]:
    """Return `parts` of experts with gate, up and down; `name`: transformers' of their module in a layer."""
    return {
        f"{name}.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
        f"{name}.down_proj": ("ffn_down_exps.weight",),
    }


EXPERTS = parts_of_experts("mlp.experts")  # of most mixtures


def sizes(m: Metadata) -> dict[str, Any]:
    """Return the values that the configs of all decoders have."""
    heads = m.heads
    return {
        "hidden_size": m.size("embedding_length"),
        "intermediate_size": m.size("feed_forward_length"),
        "num_hidden_layers": m.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": m.get("attention.head_count_kv") or heads,
        "max_position_embeddings": m.size("context_length"),
        "vocab_size": m.rows("token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in m,
    }


def decoder(m: Metadata, model_type: str) -> dict[str, Any]:
    """Return the values of a decoder with RMSNorm, rotary embeddings and a gated MLP."""
    return {
        "model_type": model_type,
        **sizes(m),
        "head_dim": m.head_dim,
        "rms_norm_eps": m["attention.layer_norm_rms_epsilon"],
        "attention_bias": "blk.0.attn_q.bias" in m,
        "mlp_bias": "blk.0.ffn_up.bias" in m,
        "rope_parameters": rope(m),
    }


def experts(m: Metadata) -> dict[str, Any]:
    """Return the numbers of experts, by the names of most configs."""
    return {
        "num_experts": m.size("expert_count"),
        "num_local_experts": m.size("expert_count"),
        "num_experts_per_tok": m.size("expert_used_count"),
    }


def with_expert_length(m: Metadata) -> Metadata:
    """Return the metadata with an MLP's length where a file has only that of experts: some configs ask for it."""
    fields = dict(m.fields)
    length = m.get("expert_feed_forward_length") or m.size("feed_forward_length")
    for name in ("feed_forward_length", "expert_feed_forward_length"):
        fields.setdefault(f"{m.architecture}.{name}", length)
    return Metadata(m.path, fields, m.infos)


def shared_experts(name: str) -> dict[str, str]:
    """Return the names of the MLP that computes every token beside a mixture; `name`: transformers' of that MLP."""
    return {f"ffn_{part}_shexp": f"{name}.{part}_proj" for part in ("gate", "up", "down")}


def by_layer(m: Metadata, name: str, default: Any = None) -> list[Any]:
    """Return a field that is one value or one for each layer, as a list for each layer."""
    value = m.get(name, default)
    values = value if isinstance(value, list) else [value] * m.layers
    if len(values) != m.layers:
        raise ValueError(
            f"{NAME}: {m.architecture}.{name} in {m.path} must have an entry for each of {m.layers} layers, "
            f"got {len(values)}"
        )
    return values


def shared_kv_layers(m: Metadata) -> int:
    """Return how many of the last layers have the keys and values of earlier ones."""
    shared = m.get("attention.shared_kv_layers", 0)
    if not isinstance(shared, int) or not 0 <= shared < m.layers:
        raise ValueError(
            f"{NAME}: {m.architecture}.attention.shared_kv_layers in {m.path} must be a number below that of layers, "
            f"{m.layers}, got {shared!r}"
        )
    return shared


# Gemma's inputs of each layer, from an embedding of their own.
PER_LAYER_NAMES = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


def present(m: Metadata, **names: str) -> dict[str, Any]:
    """Return the values of the fields that the file has, by the config's names."""
    return {entry: m.get(name) for entry, name in names.items() if m.get(name) is not None}


def rope(m: Metadata, partial: bool = False) -> dict[str, Any]:
    """Return rope_parameters; partial: with the share of a head that is rotated."""
    theta = float(m.get("rope.freq_base") or 10000.0)
    found = {"rope_theta": theta, **rope_scaling(m, theta)}
    if partial:
        found["partial_rotary_factor"] = m.get("rope.dimension_count", m.head_dim) / m.head_dim
    return found


def rope_scaling(m: Metadata, theta: float) -> dict[str, Any]:
    """Return rope_type and its settings. Of Llama 3's and 4's a file has only the factors computed from them."""
    kind, factor = m.get("rope.scaling.type"), m.get("rope.scaling.factor")
    if FREQUENCIES in m:
        factors = m.values(FREQUENCIES)
        most = float(factors.max())
        for settings in (_LLAMA3, _LLAMA4):
            expected = llama3_factors(theta, m.head_dim, most, settings)
            if factors.shape == expected.shape and torch.allclose(factors, expected, rtol=1e-5):
                return {"rope_type": "llama3", "factor": most, **settings}
        raise NotImplementedError(f"{NAME}: {FREQUENCIES} in {m.path} must be those of Llama 3 or 4, got others")
    if LONG in m and SHORT in m:
        return {
            "rope_type": "longrope",
            "long_factor": m.values(LONG).tolist(),
            "short_factor": m.values(SHORT).tolist(),
            "original_max_position_embeddings": m["rope.scaling.original_context_length"],
        }
    if kind in (None, "none"):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(m["rope.scaling.factor"])}
    if kind == "yarn":
        original = m["rope.scaling.original_context_length"]
        more = present(m, beta_fast="rope.scaling.yarn_beta_fast", beta_slow="rope.scaling.yarn_beta_slow")
        return {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original, **more}
    raise NotImplementedError(f"{NAME}: rope.scaling.type in {m.path} must be none, linear or yarn, got {kind!r}")


def llama3_factors(
    theta: float, head_dim: int, factor: float, settings: Mapping[str, float] = MappingProxyType(_LLAMA3)
) -> Tensor:
    """Return what Llama 3's rope divides each frequency by, [head_dim / 2] in float64."""
    wavelengths = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    low, high, original = settings.values()
    smooth = ((original / wavelengths - low) / max(high - low, 1e-300)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
