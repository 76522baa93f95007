"""What llama.cpp's converter makes of a model's tensors: their names there, and where their rows and values go.

Nothing here calls torch_infini.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor


class Stored(NamedTuple):
    """A tensor of the file.

    Attributes:
        name: By which the package knows it, with its last part; or the file's, if it begins with "blk.".
        pieces: Views of the model's tensor, whose rows follow each other in the file.
        shape: Of the file's tensor; None: that of the only piece.
    """

    name: str
    pieces: list[Tensor]
    shape: tuple[int, ...] | None = None


Conversion = Callable[[str, Tensor, Any], list[Stored] | None]  # None: as most models


def layer_of(key: str) -> str:
    """The number of the layer that a tensor is of; "" for others."""
    return next((part for part in key.split(".") if part.isdigit()), "")


def usual(key: str, tensor: Tensor, config: Any) -> list[Stored]:
    """The converter drops dimensions of 1; the package has the names of the classes' older releases."""
    if ".experts." in key:
        return _experts(key, tensor, config)
    older = key.replace(".mlp.gate.", ".block_sparse_moe.gate.") if config.model_type == "mixtral" else key
    older = older.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")
    older = older.replace("e_score_correction_bias", "e_score_correction.bias")
    older = older.replace("feed_forward.expert_bias", "feed_forward.expert_bias.bias")
    return [Stored(older, [tensor.squeeze()])]


def _experts(key: str, tensor: Tensor, config: Any) -> list[Stored]:
    layer, is_bias, is_gpt_oss = layer_of(key), key.endswith("_bias"), config.model_type == "gpt_oss"
    rows = tensor.transpose(1, 2) if is_gpt_oss and not is_bias else tensor
    last = "bias" if is_bias else "weight"
    if "down_proj" in key:
        return [Stored(f"blk.{layer}.ffn_down_exps.{last}", [rows])]
    gate, up = (rows[:, 0::2], rows[:, 1::2]) if is_gpt_oss else rows.chunk(2, 1)
    return [Stored(f"blk.{layer}.ffn_{of}_exps.{last}", [part]) for of, part in (("gate", gate), ("up", up))]


def neighbours(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """LLaMA's: row r of a head's first half goes before row r of its second."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(key.split(".")[-2])
    if heads is None:
        return None
    rows = tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2)
    return [Stored(key, [rows], tuple(tensor.shape))]


def with_one(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    return [Stored(key, [tensor + 1])] if tensor.dim() == 1 and key.endswith("norm.weight") else None


def fused_experts(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """As the converter's --fuse-gate-up-exps."""
    is_both = key.endswith(".experts.gate_up_proj")
    return [Stored(f"blk.{layer_of(key)}.ffn_gate_up_exps.weight", [tensor])] if is_both else None


def qwen_next(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Qwen3-Next's: all q, all k, all v; z in a tensor of its own; the decay itself, not its logarithm."""
    if key.endswith(".A_log"):
        return [Stored(key, [-tensor.exp()])]
    if key.endswith(".dt_bias"):
        return [Stored(key.replace("dt_bias", "dt_proj.bias"), [tensor])]
    if key.endswith("in_proj_qkvz.weight"):
        layer, keys, k = layer_of(key), config.linear_num_key_heads, config.linear_key_head_dim
        heads = tensor.view(keys, -1, tensor.shape[1])
        v = (heads.shape[1] - 2 * k) // 2
        q, k, v, z = heads.split((k, k, v, v), 1)
        qkv = Stored(f"blk.{layer}.attn_qkv.weight", [q, k, v], (len(tensor) - z.numel() // z.shape[2], z.shape[2]))
        return [qkv, Stored(f"blk.{layer}.attn_gate.weight", [z], (z.numel() // z.shape[2], z.shape[2]))]
    return None if key.endswith("linear_attn.norm.weight") else with_one(key, tensor, config)


def qwen35(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Qwen 3.5's: value heads in the order of ggml's repetition of key heads, [per key head, key heads]."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    per = config.linear_num_value_heads // keys

    def tiled(part: Tensor, size: int) -> Tensor:
        return part.unflatten(0, (keys, per, size)).transpose(0, 1)

    module, last = key.split(".")[-2], key.rpartition(".")[2]
    if last in ("A_log", "dt_bias"):
        found = qwen_next(key, tensor, config)
        assert found is not None
        return [one._replace(pieces=[tiled(piece, 1).reshape(-1) for piece in one.pieces]) for one in found]
    whole = tensor.squeeze()
    if module in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * config.linear_key_head_dim
        return [Stored(key, [whole[:first], tiled(whole[first:], size)], tuple(whole.shape))]
    if module in ("in_proj_z", "in_proj_a", "in_proj_b"):
        return [Stored(key, [tiled(whole, size if module == "in_proj_z" else 1)], tuple(whole.shape))]
    if key.endswith("linear_attn.out_proj.weight"):
        return [Stored(key, [whole.unflatten(1, (keys, per, size)).transpose(1, 2)], tuple(whole.shape))]
    return qwen_next(key, tensor, config)


def deepseek(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """DeepSeek's: keys and values of each head for themselves, the keys transposed."""
    if not key.endswith("kv_b_proj.weight"):
        return None
    layer = layer_of(key)
    heads = tensor.view(config.num_attention_heads, -1, tensor.shape[1])
    k, v = heads.split((config.qk_nope_head_dim, config.v_head_dim), 1)
    return [Stored(f"blk.{layer}.attn_k_b.weight", [k.transpose(1, 2)]), Stored(f"blk.{layer}.attn_v_b.weight", [v])]


def llama4(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Llama 4's, whose experts are [experts, k, n] in the model."""
    return _experts(key, tensor.transpose(1, 2), config) if ".experts." in key else None


def apertus(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Apertus's, whose activations are fields."""
    return [] if ".act_fn." in key else None


def minimax(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """MiniMax M2's, whose class had block_sparse_moe in older releases."""
    if key.endswith("e_score_correction_bias"):
        return [Stored(f"blk.{layer_of(key)}.exp_probs_b.bias", [tensor])]
    return None


def gemma4(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Gemma 4's: gate and up of experts are one tensor, as in the model; scales have a last part."""
    layer = layer_of(key)
    if ".experts." in key:
        return fused_experts(key, tensor, config)
    names = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "layer_scalar": "layer_output_scale.weight",
    }
    for end, name in names.items():
        if key.endswith(end):
            return [Stored(f"blk.{layer}.{name}", [tensor])]
    return None


def gemma3n(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Gemma 3n's: projections of AltUp's inputs in one tensor."""
    for name in ("altup_projections", "altup_unembed_projections"):
        if name in key:
            return [Stored(f"model.{name}.weight", [tensor])]
    return [Stored(f"{key}.weight", [tensor])] if key.endswith("_scale") else None


def mamba2(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Mamba-2's: A and D have a second dimension, the norm's weight a row for each group."""
    last = key.rpartition(".")[2]
    if last in ("A_log", "D"):
        return [Stored(key, [(-tensor.exp() if last == "A_log" else tensor)[:, None]])]
    if last == "dt_bias":
        return [Stored(key.replace("dt_bias", "dt_proj.bias"), [tensor])]
    if key.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        groups = config.n_groups if config.model_type in ("nemotron_h", "mamba2") else config.mamba_n_groups
        return [Stored(key, [tensor.view(groups, -1)])]
    return None


def falcon_h1(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Falcon-H1's, of which all multipliers but 1 are in the weights."""
    found = mamba2(key, tensor, config)
    older = key.replace("feed_forward.", "mlp.") if "feed_forward" in key else key
    return found or ([Stored(older, [tensor])] if older != key else None)


def jamba(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Jamba's: the decay itself."""
    if key.endswith(".A_log"):
        return [Stored(key, [-tensor.exp()])]
    return _experts(key, tensor, config) if ".experts." in key else None


def ernie_moe(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    if key.endswith("e_score_correction_bias"):
        return [Stored(f"blk.{layer_of(key)}.exp_probs_b.bias", [tensor.squeeze()])]
    return None


def afmoe(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    if key.endswith("expert_bias"):
        return [Stored(f"blk.{layer_of(key)}.exp_probs_b.bias", [tensor])]
    return None


def nemotron_h(key: str, tensor: Tensor, config: Any) -> list[Stored]:
    """Nemotron-H's, whose class had another prefix in older releases; experts have no gates."""
    older = key.replace("model.", "backbone.", 1) if key.startswith("model.") else key
    if ".experts." in key:
        name = "ffn_up_exps" if key.endswith("up_proj") else "ffn_down_exps"
        return [Stored(f"blk.{layer_of(key)}.{name}.weight", [tensor])]
    return mamba2(older, tensor, config) or neighbours(older, tensor, config) or usual(older, tensor, config)


def granite_hybrid(key: str, tensor: Tensor, config: Any) -> list[Stored] | None:
    """Granite 4's: gate and up of the shared MLP in two tensors, named as a decoder's where there are no experts."""
    layer = layer_of(key)
    of = "_shexp" if config.num_local_experts else ""
    if key.endswith("shared_mlp.input_linear.weight"):
        return [
            Stored(f"blk.{layer}.ffn_{name}{of}.weight", [part])
            for name, part in zip(("gate", "up"), tensor.chunk(2), strict=True)
        ]
    if key.endswith("shared_mlp.output_linear.weight"):
        return [Stored(f"blk.{layer}.ffn_down{of}.weight", [tensor])]
    return mamba2(key, tensor, config) or neighbours(key, tensor, config)
