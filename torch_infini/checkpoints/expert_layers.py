"""Experts that a checkpoint has as quantized linear layers, one for each expert and product: FP8, AWQ, GPTQ, NVFP4.

Models have the weights of all experts in one tensor; here the layers become such a tensor, in blocks or dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from ..weights import BLOCKS
from .description import QuantizedLayer
from .experts import DENSE, ExpertsFormat, StoredExperts
from .method import NAME
from .reader import Checkpoint
from .weight import LinearWeight, Target, TensorInfo

# Of experts: the parts of a product by the end of the model's tensor, as checkpoints call them.
PARTS = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",),),
    "down_proj": (("down_proj",), ("w2",)),
}


class ModelExperts(NamedTuple):
    """A module of a model with the weights of experts.

    Attributes:
        tensors: The names of the weights.
        experts: The number of experts.
        transposed: As ExpertsFormat's.
    """

    tensors: Sequence[str]
    experts: int
    transposed: bool


class LayersOfExperts(ExpertsFormat):
    """The layers of one product, of which those of an expert follow each other along the rows.

    Args:
        layers: The layers of each expert, by their own names; all of one have the same k, and experts are alike.
        kind: What all of them become: a kind of block, or DENSE. `blocks` sets DENSE where one of them cannot be
            that kind.
        dtype: Of dense weights.
        transposed: As ExpertsFormat's.
    """

    def __init__(
        self, layers: Sequence[Mapping[str, QuantizedLayer]], kind: str, dtype: torch.dtype, transposed: bool
    ) -> None:
        self.name, self.kind, self.parts, self.transposed = next(_named(layers))[1].format.name, kind, (), transposed
        self._layers, self._target = layers, _target(dtype)

    def size(self, infos: Mapping[str, TensorInfo]) -> tuple[int, int, int] | None:
        first = [*self._layers[0].values()]
        return len(self._layers), sum(layer.n for layer in first), first[0].k

    def expected(self, experts: int, n: int, k: int) -> dict[str, TensorInfo]:
        return {}  # the layers were checked one by one

    def check(self, tensors: Mapping[str, Tensor]) -> tuple[str, str, str] | None:
        for prefix, layer in _named(self._layers):
            own = {last: tensors[prefix + last] for last in layer.format.checked_tensors() if last in layer.names}
            fault = layer.format.check(own, layer.n, layer.k)
            if fault is not None:
                return f": {prefix}{fault[0]}", fault[1], fault[2]
        return None

    def blocks(self, tensors: Mapping[str, Tensor]) -> Tensor:
        experts, n, k = self.size({}) or (0, 0, 0)
        found: Tensor | None = None
        row = 0
        for prefix, layer in _named(self._layers):
            own = {last: tensors[prefix + last] for last in layer.names}
            weight = layer.format.weight(own, layer.n, layer.k, self._target)
            if self.kind not in (DENSE, kind_of(weight)):
                self.kind = DENSE  # such as scales of one expert alone that float16 cannot hold
                return self.blocks(tensors)
            values = weight.dense(self._target.dtype) if self.kind == DENSE else weight.weight
            if found is None:
                found = torch.empty(experts, n, *values.shape[1:], dtype=values.dtype)
            found.flatten(0, 1)[row : row + layer.n] = values
            row += layer.n
        assert found is not None
        return found


def kind_of(weight: LinearWeight) -> str:
    """Return the kind of block that a weight has for fused_experts; DENSE if it has none, or columns in an order."""
    return weight.format if weight.format in BLOCKS and weight.columns is None else DENSE


def _target(dtype: torch.dtype) -> Target:
    """Return the target of weights for fused_experts, which multiplies blocks on any CPU."""
    return Target(dtype, takes_blocks=True, prefers_blocks=True)


def _named(layers: Sequence[Mapping[str, QuantizedLayer]]) -> Iterator[tuple[str, QuantizedLayer]]:
    """Yield the layers in order, with what their tensors' names begin with."""
    for expert, parts in enumerate(layers):
        for part, layer in parts.items():
            yield f"{expert}.{part}.", layer


def join_experts(checkpoint: Checkpoint, modules: Mapping[str, ModelExperts], dtype: torch.dtype) -> None:
    """Make the layers of experts in an open checkpoint tensors of all experts, as the model has them.

    Args:
        checkpoint: Its `layers` lose those of experts, and its `experts` get them.
        modules: The model's modules, by name.
        dtype: The dtype of weights that stay dense.

    Raises:
        ValueError: For experts that are missing, or unlike each other.
        NotImplementedError: For experts that are not quantized.
    """
    found: dict[str, StoredExperts] = {}
    for module, own in modules.items():
        for tensor in own.tensors:
            for parts in PARTS.get(tensor, ()):
                name = f"{module}.0.{parts[0]}"
                if name in checkpoint.layers:
                    found[f"{module}.{tensor}"] = _joined(checkpoint, module, own, parts, dtype)
                elif f"{name}.weight" in checkpoint.tensors:
                    raise NotImplementedError(
                        f"{NAME}: experts of a quantized checkpoint must be quantized too, got {name}.weight in "
                        f"{checkpoint.path}, which is not"
                    )
    checkpoint.experts = {**checkpoint.experts, **found}


def _joined(
    checkpoint: Checkpoint, module: str, own: ModelExperts, parts: Sequence[str], dtype: torch.dtype
) -> StoredExperts:
    there = next(i for i in count() if not any(f"{module}.{i}.{part}" in checkpoint.layers for part in parts))
    if there != own.experts:
        raise ValueError(f"{NAME}: {module} must have {own.experts} experts, as the config has, got {there} {parts[0]}")
    layers = [
        {part: layer for part in parts if (layer := checkpoint.layers.pop(f"{module}.{expert}.{part}", None))}
        for expert in range(own.experts)
    ]
    for expert, found in enumerate(layers):
        for part in parts:
            name = f"{module}.{expert}.{part}"
            if part not in found:
                raise ValueError(f"{NAME}: {name} must be quantized, as others beside it are, got one that is not")
            layer, like, k = found[part], layers[0][part], layers[0][parts[0]].k
            if (layer.n, layer.k, layer.format.name) != (like.n, k, like.format.name):
                raise ValueError(
                    f"{NAME}: {name} must be {like.n} x {k} in {like.format.name}, as the first expert, got "
                    f"{layer.n} x {layer.k} in {layer.format.name}"
                )
    first = layers[0][parts[0]]
    with checkpoint.read(*first.names.values()) as tensors:
        weight = first.format.weight(dict(zip(first.names, tensors, strict=True)), first.n, first.k, _target(dtype))
    stored = {f"{prefix}{last}": tensor for prefix, layer in _named(layers) for last, tensor in layer.names.items()}
    format = LayersOfExperts(layers, kind_of(weight), dtype, own.transposed)
    return StoredExperts(format, own.experts, sum(layer.n for layer in layers[0].values()), first.k, stored)
