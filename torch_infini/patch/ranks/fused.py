"""Cuts by heads of modules whose heads are rows of one layer: a fused qkv_proj, and the gated delta rule.

transformers' plans gather such a layer's results on every rank, which then computes all heads.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import nn

from ...distributed import TPGroup
from .cut import Cut, Range
from .linear import Cuts, keep_columns, keep_rows

_DELTA_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "key_dim", "value_dim", "conv_dim")
_DELTA_APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # as Qwen3.5's
_DELTA_BY_HEAD = ("in_proj_qkvz", "in_proj_ba")  # as Qwen3-Next's, whose rows are in the order of key heads


def has_fused_heads(module: nn.Module, tp_group: TPGroup) -> bool:
    """Return whether a module is attention with one layer for q, k and v, whose heads the ranks can share."""
    qkv, size = module._modules.get("qkv_proj"), getattr(module, "head_dim", None)
    heads = getattr(vars(module).get("config"), "num_attention_heads", None)
    kv_heads = vars(module).get("num_key_value_heads")
    if not isinstance(qkv, nn.Linear) or not isinstance(module._modules.get("o_proj"), nn.Linear):
        return False
    if not isinstance(size, int) or not isinstance(heads, int) or not isinstance(kv_heads, int):
        return False
    return (heads + 2 * kv_heads) * size == qkv.out_features and not (heads % tp_group.size or kv_heads % tp_group.size)


def cut_fused_heads(name: str, module: Any, tp_group: TPGroup, configs: dict[int, Any]) -> Cuts:
    """Leave attention some of its heads; its forward reads their number from the module and its config.

    Args:
        name: The module's.
        module: Of has_fused_heads.
        tp_group: The ranks.
        configs: By the id of a config its copy for this rank, for all modules of a model.
    """
    heads, kv_heads, size = module.config.num_attention_heads, module.num_key_value_heads, module.head_dim
    q = Range(*tp_group.shard(f"the heads of {name}", heads)).times(size)
    k = Range(*tp_group.shard(f"the key heads of {name}", kv_heads)).times(size).after(heads * size)
    yield from keep_rows(f"{name}.qkv_proj", module.qkv_proj, q, k, k.after(kv_heads * size))
    yield from keep_columns(f"{name}.o_proj", module.o_proj, tp_group)
    module.num_key_value_heads = kv_heads // tp_group.size
    whole = module.config
    if id(whole) not in configs:
        configs[id(whole)] = copy(whole)
        configs[id(whole)].num_attention_heads = heads // tp_group.size
    module.config = configs[id(whole)]


def has_delta_heads(module: nn.Module) -> bool:
    """Return whether a module is a gated delta rule of Qwen3-Next's form or Qwen3.5's."""
    own = vars(module)
    if not all(isinstance(own.get(name), int) for name in _DELTA_SIZES):
        return False
    layers = {name for name, child in module._modules.items() if isinstance(child, nn.Linear)}
    if layers not in ({*_DELTA_APART, "out_proj"}, {*_DELTA_BY_HEAD, "out_proj"}):
        return False
    return isinstance(module._modules.get("conv1d"), nn.Conv1d) and set(module._parameters) == {"A_log", "dt_bias"}


def cut_delta_rule(name: str, module: Any, tp_group: TPGroup) -> Cuts:
    """Leave a gated delta rule some of its key heads, and their value heads; all where the ranks do not divide them."""
    size, keys, values = tp_group.size, module.num_k_heads, module.num_v_heads
    if keys % size:
        return
    k_heads = Range(*tp_group.shard(f"the key heads of {name}", keys))
    v_heads = k_heads.times(values // keys)
    k, v = k_heads.times(module.head_k_dim), v_heads.times(module.head_v_dim)
    mixed = (k, k.after(module.key_dim), v.after(2 * module.key_dim))  # q, k and v
    if "in_proj_qkv" in module._modules:
        yield from keep_rows(f"{name}.in_proj_qkv", module.in_proj_qkv, *mixed)
        yield from keep_rows(f"{name}.in_proj_z", module.in_proj_z, v)
        for gate in ("in_proj_b", "in_proj_a"):
            yield from keep_rows(f"{name}.{gate}", module._modules[gate], v_heads)
    else:
        for layer in (module.in_proj_qkvz, module.in_proj_ba):
            rows = layer.out_features // keys  # of a key head
            key = next(key for key, child in module._modules.items() if child is layer)
            yield from keep_rows(f"{name}.{key}", layer, k_heads.times(rows))
    convolution = module.conv1d
    yield f"{name}.conv1d.weight", Cut(-3, mixed)
    if convolution.bias is not None:
        yield f"{name}.conv1d.bias", Cut(-1, mixed)
    for parameter in ("A_log", "dt_bias"):
        yield f"{name}.{parameter}", Cut(-1, (v_heads,))
    yield from keep_columns(f"{name}.out_proj", module.out_proj, tp_group)
    module.num_k_heads, module.num_v_heads = keys // size, values // size
    for attribute in ("key_dim", "value_dim", "conv_dim"):
        vars(module)[attribute] //= size
    convolution.in_channels = convolution.out_channels = convolution.groups = module.conv_dim
