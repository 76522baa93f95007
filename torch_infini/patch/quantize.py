"""Chooses the layers and experts to quantize, and their formats, or those to pack; fuses layers that share an input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor, nn

from ..weights import served
from . import budget
from .decoder import Decoder, table_of
from .layers.attention import Attention
from .layers.experts import Experts
from .layers.linear import Linear
from .layers.mlp import GatedMLP, SparseGatedMLP
from .layers.packed_linear import PackedLinear, StaysDense
from .layers.quantized import Reformatted
from .layers.quantized_experts import QuantizedExperts, quantize_experts
from .layers.quantized_linear import QuantizedLinear, fuse, quantize_layer
from .layers.sharded import ShardedLinear
from .layers.state_space import reads_weight
from .options import PACKED, bits_of
from .report import SKIPPED, Budget, Row
from .state import Selection
from .swap import PLAN, Unsupported


def layers_to_choose(
    model: nn.Module, decoder: Decoder, weights: str, selection: Selection
) -> list[budget.QuantizableLayer]:
    """Return every module that may be quantized, with the formats that it may have."""
    if weights == PACKED:
        return layers_to_pack(model, decoder, selection)
    layers = []
    for name, module, format in layers_to_quantize(model, decoder, weights):
        formats, reason = {}, selection.excludes(name) or ""
        for one in () if reason else served() if bits_of(weights) is not None else (format,):
            try:
                formats[one] = kind_of(module).plans(module, one)[0].format
            except Unsupported as unsupported:
                reason = str(unsupported)
        layers.append(budget.QuantizableLayer(name, module, formats, "" if formats else reason))
    return layers


def layers_to_pack(model: nn.Module, decoder: Decoder, selection: Selection) -> list[budget.QuantizableLayer]:
    """Return the linear layers that layers_to_quantize finds, packed where they can be.

    Experts stay as they are. A weight that another module has too, as a head that is tied to the embedding, would have
    a copy in rows in any case.
    """
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    layers = []
    for name, module, _ in layers_to_quantize(model, decoder, PACKED):
        if isinstance(module, Experts):
            continue
        formats, op, reason = {}, SKIPPED, selection.excludes(name) or ""
        try:
            if not reason:
                PackedLinear.plans(module)
                if users[id(module._parameters["weight"])] > 1:
                    raise StaysDense("its weight stays in rows, because another module has it too")
                formats = {PACKED: PACKED}
        except Unsupported as unsupported:
            reason = str(unsupported)
            op = Linear.infini_ops if isinstance(unsupported, StaysDense) else SKIPPED
        layers.append(budget.QuantizableLayer(name, module, formats, reason, op))
    return layers


def layers_to_quantize(model: nn.Module, decoder: Decoder, format: str) -> list[tuple[str, nn.Module, str]]:
    """Return (name, module, format) of the decoder's projections and experts, and of the head, int8 for int4.

    An error in the head affects every logit, and the head is a small part of most models.
    """
    inside = {id(module) for layer in decoder.layers for module in layer.modules()}
    # The layers that an adapter adds are left: they are small, and may be trained.
    adapters = {
        id(part)
        for module in model.modules()
        if "base_layer" in module._modules
        for name, child in module.named_children()
        if name != "base_layer"
        for part in child.modules()
    }
    read = {
        id(part)
        for module in model.modules()
        for name, part in module.named_children()
        if isinstance(part, nn.Linear) and reads_weight(module, name)
    }
    found: list[tuple[str, nn.Module, str]] = []
    for name, module in model.named_modules():
        if (
            not isinstance(module, nn.Linear | Experts)
            or isinstance(module, Reformatted)
            or id(module) in adapters | read
        ):
            continue
        if id(module) in inside:
            found.append((name, module, format))
        elif name.rpartition(".")[2] == "lm_head":
            found.append((name, module, "int8"))
    return found


def kind_of(module: nn.Module) -> type[QuantizedExperts | QuantizedLinear]:
    """Return the patch that computes a module with integer weights."""
    return QuantizedExperts if isinstance(module, Experts) else QuantizedLinear


def quantize_module(module: nn.Module, format: str) -> None:
    """Quantize the weights of a linear layer or of experts."""
    (quantize_experts if isinstance(module, Experts) else quantize_layer)(module, format)


def row_of(layer: budget.QuantizableLayer) -> Row:
    """Return the report's row for a layer in its first format."""
    format = next(iter(layer.formats), None)
    kind = kind_of(layer.module)
    if format is None:
        op = layer.op
    else:
        op = PackedLinear.infini_ops if format == PACKED else kind.ops(kind.plans(layer.module, format)[0])
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
    ids = budget.tokens_of(calibrate, table_of(decoder.embed_tokens).rows)
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
    for module in decoder.module.modules():
        if isinstance(module, Attention | GatedMLP):
            inputs = [id(module._modules[name]) for name in vars(module)[PLAN].inputs]
            groups.append([index.pop(one) for one in inputs if one in index])
    return [*filter(None, groups), *([i] for i in index.values())]


def groups_to_pack(model: nn.Module, modules: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Group layers with one input, if one product computes them all; others are alone."""
    left = {id(module): module for module in modules}
    groups = []
    for module in model.modules():
        if isinstance(module, Attention | GatedMLP) and not isinstance(module, SparseGatedMLP):
            inputs = [module._modules[name] for name in vars(module)[PLAN].inputs]
            if len({id(one) for one in inputs} & left.keys()) == len(inputs) > 1:
                groups.append([left.pop(id(one)) for one in inputs])
    return [*groups, *([module] for module in left.values())]


def fuse_projections(decoder: nn.Module) -> None:
    """Fuse the quantized layers that share an input into one product."""
    for module in decoder.modules():
        if isinstance(module, Attention | GatedMLP):
            fuse([module._modules[name] for name in vars(module)[PLAN].inputs])
