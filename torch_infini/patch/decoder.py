"""Finds the decoder of a model: the Llama family's by the names of its parts, any other by its embedding and layers.

Classes and import paths are not used: they change between releases of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


@dataclass(frozen=True, eq=False)
class Decoder:
    """The stack of layers in a model, an encoder's too.

    Attributes:
        module: The module that holds it.
        config: The module's config.
        embed_tokens: The embedding of the tokens.
        layers: The layers.
        norm: The last norm; None outside of the Llama family.
        rotary_emb: The module that computes cos and sin; None outside of the Llama family.
    """

    module: nn.Module
    config: Any
    embed_tokens: nn.Embedding
    layers: Sequence[nn.Module]
    norm: nn.Module | None = None
    rotary_emb: nn.Module | None = None

    @property
    def is_llama(self) -> bool:
        """Whether its layers have self_attn and mlp, and its parts the names of Llama's."""
        return self.rotary_emb is not None


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


def find_llama(model: nn.Module) -> tuple[str, Decoder] | None:
    """Return (name, decoder) of the Llama family's decoder in a model, the name "" for the model itself, or None."""
    for name, module in model.named_modules():
        if is_decoder(module):
            parts: Any = module
            return name, Decoder(
                module, parts.config, parts.embed_tokens, list(parts.layers), parts.norm, parts.rotary_emb
            )
    return None


def find_decoder(model: nn.Module) -> tuple[str, Decoder] | None:
    """The same for any model of transformers that takes tokens: the innermost module with its embedding and layers.

    Of an encoder and a decoder, the module that has both.
    """
    found = find_llama(model)
    if found is not None:
        return found
    for name, module in reversed(list(model.named_modules())):
        embedding = embedding_of(module)
        if embedding is None or not hasattr(module, "config") or not layers_of(module):
            continue
        for outer, pair in model.named_modules():
            if pair._modules.keys() >= {"encoder", "decoder"} and any(part is module for part in pair.modules()):
                both = [*layers_of(pair.get_submodule("encoder")), *layers_of(pair.get_submodule("decoder"))]
                return outer, Decoder(pair, getattr(pair, "config", module.config), embedding, both)
        return name, Decoder(module, module.config, embedding, layers_of(module))
    return None


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the modules of the largest list in a module, by its parameters."""
    lists = [child for child in module.modules() if isinstance(child, nn.ModuleList)]
    return list(max(lists, key=lambda one: sum(parameter.numel() for parameter in one.parameters()), default=()))


class Table(NamedTuple):
    """What is known of an embedding's table without reading it, which may make a copy (layers/block_embedding.py)."""

    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device


def table_of(embedding: nn.Embedding) -> Table:
    """Return the sizes of an embedding's table, and where and in which dtype its rows are."""
    weight = embedding._parameters.get("weight")
    if weight is not None:
        return Table(weight.shape[0], weight.shape[1], weight.dtype, weight.device)
    plan: Any = embedding.plan  # of a BlockEmbedding
    device = next(embedding.buffers()).device
    return Table(embedding.num_embeddings, embedding.embedding_dim, plan.dtype, device)


def embedding_of(module: Any) -> nn.Embedding | None:
    """Return the embedding of tokens that a model of transformers names."""
    if not hasattr(module, "get_input_embeddings"):
        return None
    try:
        embedding = module.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        return None
    if isinstance(embedding, nn.ModuleList) and len(embedding):
        embedding = embedding[0]  # of several streams of tokens
    return embedding if isinstance(embedding, nn.Embedding) else None
