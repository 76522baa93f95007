"""Attention that keeps its own forward, and calls infini::attention through transformers' attention interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..checks.conditions import unsupported_placement
from ..own_forward import code_of
from ..swap import Patched, Unsupported

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the global of transformers by which a forward finds the function
REPLACED = ("sdpa", "eager", "infini", None)  # implementations that take the same masks


def calls_interface(module: nn.Module) -> bool:
    """Return whether a module's own forward calls the attention function that its config names."""
    code = code_of(getattr(type(module), "forward", None))
    return code is not None and INTERFACE in code.co_names


def missing_feature(module: nn.Module) -> str:
    """Return what the module has that infini::attention lacks; empty if nothing is known."""
    if "compressor" in module._modules:  # DeepSeek-V4's: its forward joins numbers to the mask, and ours is of bool
        return "it joins a bias of compressed keys to the mask"
    values, keys = vars(module).get("v_head_dim"), vars(module).get("qk_head_dim")
    if values is not None and keys is not None and values > keys:
        return "its values are wider than its keys"
    return ""


class InterfaceAttention(Patched):
    """Attention with its own forward; the config names the function (interface.py)."""

    infini_ops = "attention"

    @classmethod
    def plans(cls, module: Any) -> Sequence[Any]:
        if reason := missing_feature(module) or unsupported_placement(module):
            raise Unsupported(reason)
        config = getattr(module, "config", None)
        if getattr(config, "output_attentions", False):
            raise Unsupported("config.output_attentions is set, but the kernel stores no attention weights")
        implementation = getattr(config, "_attn_implementation", None)
        if implementation not in REPLACED:
            raise Unsupported(f"its attention implementation is {implementation}")
        return [None]
