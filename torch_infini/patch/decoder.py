"""Recognizes the decoder of a model of the Llama family, by the names of its modules and attributes.

Classes and import paths are not used: they change between releases of transformers.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from torch import nn

PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


class Decoder(nn.Module):
    """The type of a module that is_decoder accepts; for type checkers only, it has no instances."""

    config: Any
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module


def is_decoder(module: nn.Module) -> TypeGuard[Decoder]:
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


def find_decoder(model: nn.Module) -> tuple[str, Decoder] | None:
    """Return (name, decoder) of the decoder in a model, the name "" for the model itself; None if there is none."""
    return next(((name, module) for name, module in model.named_modules() if is_decoder(module)), None)
