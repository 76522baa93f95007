"""Lists the modules of a model that may be replaced, and by which patch.

What a module computes is checked numerically (verify.py), so that a similar module with another formula is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .decoder import Decoder
from .layers.attention import Attention, RotaryEmbedding
from .layers.experts import Experts, has_experts
from .layers.layer import DecoderLayer
from .layers.linear import Linear
from .layers.mlp import GatedMLP
from .layers.norm import RMSNorm, eps_name
from .layers.sharded import ShardedEmbedding, ShardedLinear
from .parallel_forward import parallel_forward
from .swap import Patched


def candidates(model: nn.Module, name: str, decoder: Decoder) -> Iterator[tuple[str, type[Patched]]]:
    """Yield (name, patch) of every module that may be replaced, children before parents."""
    prefix = f"{name}." if name else ""
    sharded = {
        name: ShardedEmbedding if isinstance(module, nn.Embedding) else ShardedLinear
        for name, module in model.named_modules()
        if parallel_forward(module) is not None and not eps_name(module)
    }
    yield from sharded.items()
    yield f"{prefix}rotary_emb", RotaryEmbedding
    for i, layer in enumerate(decoder.layers):
        here = f"{prefix}layers.{i}"
        for part, module in layer.named_modules():
            if eps_name(module) and part.rpartition(".")[0] in ("", "self_attn"):
                yield f"{here}.{part}", RMSNorm
        yield f"{here}.self_attn", Attention
        mlp = layer.get_submodule("mlp")
        experts = [part for part, module in mlp.named_modules() if has_experts(module)]
        experts = [part for part in experts if f"{here}.mlp.{part}" not in sharded]
        for part in experts:
            yield f"{here}.mlp.{part}", Experts
        for part, module in mlp.named_children() if experts else ():
            if "shared_expert" in part and "down_proj" in module._modules:
                yield f"{here}.mlp.{part}", GatedMLP
        if not experts:
            yield f"{here}.mlp", GatedMLP
        yield here, DecoderLayer
    yield f"{prefix}norm", RMSNorm
    for head, module in model.named_modules():
        if head.rpartition(".")[2] == "lm_head" and isinstance(module, nn.Linear) and head not in sharded:
            yield head, Linear
