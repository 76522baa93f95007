"""Linear layers and embeddings sharded by tensor parallelism: this rank's product or rows, then one collective op.

transformers' style object (shares.py) says what the module's own forward does; unknown styles are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..._core.devices import backing_type
from ...distributed import TPGroup
from ...ops._registry import FLOATS
from ..checks.conditions import dense_last, needs_fallback
from ..parallel_forward import FORWARD, closure_of, parallel_forward
from ..shares import DTensor, LinearShard, Replicate, Shard, local, styles, tp_group_of
from ..swap import PLAN, Patched, Unsupported

linear = torch.ops.infini.linear.default
embedding = torch.ops.infini.embedding.default


def style_of(module: nn.Module) -> tuple[Any, TPGroup]:
    """Return how transformers shards the module, and its tensor-parallel group."""
    forward = parallel_forward(module)
    if forward is None:
        raise Unsupported("its forward was replaced on the instance")
    parts = closure_of(forward)
    style, mesh = parts.get("self"), parts.get("mesh")
    if style is None or mesh is None:
        raise Unsupported(f"transformers shards it by {forward.__qualname__.partition('.')[0]}, which is not supported")
    if backing_type(mesh.device_type) != "cpu":
        raise Unsupported(f"it is sharded on {mesh.device_type}, and tensor parallelism is supported on the CPU only")
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or len(parameter.placements) != 1:
            raise Unsupported(f"its {name} is not sharded along one dimension")
        if type(local(parameter)) is not Tensor or parameter.dtype not in FLOATS:
            raise Unsupported(f"its {name} is {str(parameter.dtype).removeprefix('torch.')} of an unsupported kind")
    if len({parameter.dtype for parameter in module.parameters()}) > 1:
        raise Unsupported("its parameters have several dtypes")
    return style, tp_group_of(mesh)


def unsupported_style(style: Any) -> Unsupported:
    layouts = [getattr(style, name, None) for name in ("input_layouts", "output_layouts")]
    shown = f" with input layout {layouts[0]} and output layout {layouts[1]}" if any(layouts) else ""
    return Unsupported(f"transformers shards it by {type(style).__name__}{shown}, which is not supported")


def shard_of(module: nn.Module) -> LinearShard:
    """Return how this rank computes its part of a linear layer."""
    if type(module) is not nn.Linear:
        forward, kind = parallel_forward(module), ""
        if forward is not None:
            kind = f", which transformers shards by {type(closure_of(forward).get('self')).__name__}"
        raise Unsupported(f"it is a {type(module).__name__}{kind}, not a torch.nn.Linear")
    style, tp_group = style_of(module)
    whole, apart = Replicate(), Shard(-1)
    inputs, outputs = getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)
    if type(style) is styles.ColwiseParallel and inputs == whole and outputs in (whole, apart):
        shard = LinearShard(tp_group, False, None, module.out_features if outputs == whole else 0)
        dimension = 0
    elif type(style) is styles.RowwiseParallel and inputs in (whole, apart) and outputs == whole:
        cut = tp_group.shard_rows(module.in_features)[:2] if inputs == whole else None
        shard = LinearShard(tp_group, True, cut, 0)
        dimension = 1
    else:
        raise unsupported_style(style)
    if not style.use_local_output:
        raise Unsupported(f"transformers' {type(style).__name__} returns DTensors here, which is not supported")
    check_shard(module.weight, dimension, tp_group)
    bias: Any = module.bias
    if bias is not None and local(bias).shape[0] != local(module.weight).shape[0]:
        raise Unsupported(f"its bias is sharded as {bias.placements[0]}, which is not supported")
    return shard


def check_shard(weight: Any, dimension: int, tp_group: TPGroup) -> None:
    """Raise Unsupported if this rank's shard of the weight is not the expected one, or a rank's shard is empty."""
    count = weight.shape[dimension]
    _, number, most = tp_group.shard_rows(count)
    if not weight.placements[0].is_shard(dimension) or local(weight).shape[dimension] != number:
        raise Unsupported(f"its weight is sharded as {weight.placements[0]}, which is not supported")
    if most * (tp_group.size - 1) >= count:
        raise Unsupported(
            f"its weight's dimension {dimension} of {count} leaves one of {tp_group.size} ranks with an empty shard"
        )


class ShardedLinear(Patched):
    """A linear layer with the weight sharded by rows or columns."""

    infini_ops = "linear, all_reduce or all_gather"

    @classmethod
    def ops(cls, plan: LinearShard) -> str:
        return f"linear{plan.collective}"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        return [shard_of(module)]

    def forward(self, input: Tensor) -> Tensor:
        if needs_fallback(self, input):
            return vars(self)[FORWARD](input)
        return self.product(dense_last(input))

    def product(self, x: Tensor) -> Tensor:
        """Compute forward for a caller that has already ruled out a fallback."""
        weight, bias = self.own()
        shard: LinearShard = self.__dict__[PLAN]
        return shard.apply(x, lambda x, bias: linear(x, weight, bias), bias)

    def own(self) -> tuple[Tensor, Tensor | None]:
        parameters = self._parameters
        return local(parameters["weight"]), local(parameters["bias"])


class ShardedEmbedding(Patched):
    """An embedding sharded by rows: one rank has the vector of a token, the others add zeros."""

    infini_ops = "embedding, all_reduce"
    num_embeddings: int

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if type(module) is not nn.Embedding:
            raise Unsupported(f"it is a {type(module).__name__}, not a torch.nn.Embedding")
        style, tp_group = style_of(module)
        if type(style) is not styles.EmbeddingParallel or style.shard_dim != 0 or not style.use_local_output:
            raise unsupported_style(style)
        if module.max_norm is not None:
            raise Unsupported("its max_norm is set, which writes to the weight")
        check_shard(module.weight, 0, tp_group)
        return [tp_group]

    def forward(self, input: Tensor) -> Tensor:
        weight = local(self._parameters["weight"])
        if needs_fallback(self, weight) or input.dtype not in (torch.int32, torch.int64):
            return vars(self)[FORWARD](input)
        tp_group: TPGroup = self.__dict__[PLAN]
        first = tp_group.shard_rows(self.num_embeddings)[0]
        return tp_group.all_reduce(embedding(input, weight, first, self.num_embeddings))
