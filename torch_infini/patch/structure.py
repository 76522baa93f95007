"""Recognizes decoders of the Llama family, and lists their modules that may be replaced.

This uses names of modules and attributes, not classes or import paths, which change between releases. What a module
computes is checked numerically (verify.py), so that a similar module with another formula is left.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .attention import Attention, RotaryEmbedding
from .layer import DecoderLayer
from .linear import Linear
from .mlp import GatedMLP
from .norm import RMSNorm, eps_name
from .parallel_forward import parallel_forward
from .sharded import ShardedEmbedding, ShardedLinear
from .swap import Patched

PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


def is_decoder(module: nn.Module) -> bool:
    """Return whether the module has an embedding, layers with attention and MLP, a norm and a rotary embedding."""
    modules = module._modules
    if not hasattr(module, "config") or any(modules.get(name) is None for name in PARTS):
        return False
    layers = modules["layers"]
    return (
        isinstance(layers, nn.ModuleList)
        and len(layers) > 0
        and all(layer._modules.keys() >= {"self_attn", "mlp"} for layer in layers)
    )


def find_decoder(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return (name, decoder) of the decoder in a model, the name "" for the model itself; None if there is none."""
    return next(((name, module) for name, module in model.named_modules() if is_decoder(module)), None)


def candidates(model: nn.Module, name: str, decoder: nn.Module) -> Iterator[tuple[str, type[Patched]]]:
    """Yield (name, patch) of every module that may be replaced, children before parents."""
    prefix = f"{name}." if name else ""
    shared = {
        name: ShardedEmbedding if isinstance(module, nn.Embedding) else ShardedLinear
        for name, module in model.named_modules()
        if parallel_forward(module) is not None and not eps_name(module)
    }
    yield from shared.items()
    yield f"{prefix}rotary_emb", RotaryEmbedding
    for i, layer in enumerate(decoder._modules["layers"]):
        here = f"{prefix}layers.{i}"
        for part, module in layer.named_modules():
            if eps_name(module) and part.rpartition(".")[0] in ("", "self_attn"):
                yield f"{here}.{part}", RMSNorm
        yield f"{here}.self_attn", Attention
        yield f"{here}.mlp", GatedMLP
        yield here, DecoderLayer
    yield f"{prefix}norm", RMSNorm
    for head, module in model.named_modules():
        if head.rpartition(".")[2] == "lm_head" and isinstance(module, nn.Linear) and head not in shared:
            yield head, Linear
