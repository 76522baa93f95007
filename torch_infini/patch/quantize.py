"""Chooses the linear layers to quantize and their integer formats; fuses those that share an input."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..weights import served
from . import budget
from .decoder import Decoder
from .layers.attention import Attention
from .layers.mlp import GatedMLP
from .layers.quantized_linear import QuantizedLinear, fuse, layers_to_quantize
from .layers.sharded import ShardedLinear
from .report import SKIPPED, Budget, Row
from .state import Selection
from .swap import PLAN, Unsupported


def layers_to_choose(
    model: nn.Module, decoder: Decoder, weights: str, selection: Selection
) -> list[budget.QuantizableLayer]:
    """Return every linear layer that may be quantized, with the formats that it may have."""
    layers = []
    for name, module, format in layers_to_quantize(model, decoder, weights):
        formats, reason = {}, selection.excludes(name) or ""
        for one in () if reason else served() if budget.bits_of(weights) is not None else (format,):
            try:
                formats[one] = QuantizedLinear.plans(module, one)[0].format
            except Unsupported as unsupported:
                reason = str(unsupported)
        layers.append(budget.QuantizableLayer(name, module, formats, "" if formats else reason))
    return layers


def row_of(layer: budget.QuantizableLayer) -> Row:
    """Return the report's row for a layer in its first format."""
    format = next(iter(layer.formats), None)
    op = SKIPPED if format is None else QuantizedLinear.ops(QuantizedLinear.plans(layer.module, format)[0])
    return Row(layer.name, type(layer.module).__name__, op, layer.reason)


def choose_weights(
    model: nn.Module, decoder: Decoder, layers: Sequence[budget.QuantizableLayer], bits: float, calibrate: Tensor | None
) -> tuple[list[budget.QuantizableLayer], Budget | None]:
    """Return the layers with one format each, chosen for a mean number of bits a weight."""
    able = [layer for layer in layers if layer.formats]
    if any(isinstance(layer.module, ShardedLinear) for layer in able):
        raise ValueError("torch_infini.patch_model: weights='auto:BITS' must be of a whole model, got sharded layers")
    if not able:
        return list(layers), None
    ids = budget.tokens_of(calibrate, decoder.embed_tokens.weight.shape[0])
    found, spent = budget.choose(model, decoder, able, groups_of(decoder, able), bits, ids)
    kept = []
    for layer in layers:
        formats = {name: format for name, format in layer.formats.items() if name == found[layer.name]}
        kept.append(layer._replace(formats=formats))
    return kept, spent


def groups_of(decoder: Decoder, layers: Sequence[budget.QuantizableLayer]) -> list[list[int]]:
    """Group the indices of layers with the same input, which are fused."""
    index = {id(layer.module): i for i, layer in enumerate(layers)}
    groups = []
    for module in decoder.modules():
        if isinstance(module, Attention | GatedMLP):
            inputs = [id(module._modules[name]) for name in vars(module)[PLAN].inputs]
            groups.append([index.pop(one) for one in inputs if one in index])
    return [*filter(None, groups), *([i] for i in index.values())]


def fuse_projections(decoder: Decoder) -> None:
    """Fuse the quantized layers that share an input into one product."""
    for module in decoder.modules():
        if isinstance(module, Attention | GatedMLP):
            fuse([module._modules[name] for name in vars(module)[PLAN].inputs])
