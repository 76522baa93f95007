"""Linear layers and embeddings that ranks share: this rank's product or rows, then one collective op.

What transformers' own forward of such a module does is read off its style (shares.py); any other style is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed import TPGroup
from ..ops._registry import FLOATS
from .conditions import dense_last, must_step_aside
from .shares import DTensor, Replicate, Shard, Share, local, parts_of, ranks_of, styles
from .swap import FORWARD, PLAN, Patched, Refusal, shared_forward

linear = torch.ops.infini.linear.default
embedding = torch.ops.infini.embedding.default


def style_of(module: nn.Module) -> tuple[Any, TPGroup]:
    """How transformers shares the module, and among whom.

    Raises:
        Refusal: If it does not say, or its parameters are not what the ops take.
    """
    forward = shared_forward(module)
    if forward is None:
        raise Refusal("its forward was replaced on the instance")
    parts = parts_of(forward)
    style, mesh = parts.get("self"), parts.get("mesh")
    if style is None or mesh is None:
        raise Refusal(f"transformers shares it by {forward.__qualname__.partition('.')[0]}, which is not served")
    if mesh.device_type != "cpu":
        raise Refusal(f"ranks share it on {mesh.device_type}, and tensor parallelism is served on the CPU")
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or len(parameter.placements) != 1:
            raise Refusal(f"its {name} is not shared along one dimension")
        if type(local(parameter)) is not Tensor or parameter.dtype not in FLOATS:
            raise Refusal(f"its {name} is {str(parameter.dtype).removeprefix('torch.')} of a kind that is not served")
    if len({parameter.dtype for parameter in module.parameters()}) > 1:
        raise Refusal("its parameters have several dtypes")
    return style, ranks_of(mesh)


def unserved(style: Any) -> Refusal:
    layouts = [getattr(style, name, None) for name in ("input_layouts", "output_layouts")]
    shown = f" with {layouts[0]} going in and {layouts[1]} coming out" if any(layouts) else ""
    return Refusal(f"transformers shares it by {type(style).__name__}{shown}, which is not served")


def share_of(module: nn.Module) -> Share:
    """This rank's part of a linear layer.

    Raises:
        Refusal: If it is not a layer that the ops serve.
    """
    if type(module) is not nn.Linear:
        forward = shared_forward(module)
        kind = (
            "" if forward is None else f", which transformers shares by {type(parts_of(forward).get('self')).__name__}"
        )
        raise Refusal(f"it is a {type(module).__name__}{kind}, not a torch.nn.Linear")
    style, ranks = style_of(module)
    whole, apart = Replicate(), Shard(-1)
    inputs, outputs = getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)
    if type(style) is styles.ColwiseParallel and inputs == whole and outputs in (whole, apart):
        share = Share(ranks, False, None, module.out_features if outputs == whole else 0)
        dimension = 0
    elif type(style) is styles.RowwiseParallel and inputs in (whole, apart) and outputs == whole:
        cut = ranks.shard_rows(module.in_features)[:2] if inputs == whole else None
        share = Share(ranks, True, cut, 0)
        dimension = 1
    else:
        raise unserved(style)
    if not style.use_local_output:
        raise Refusal(f"transformers' {type(style).__name__} gives DTensors here, which are not served")
    must_be_shared(module.weight, dimension, ranks)
    if module.bias is not None and local(module.bias).shape[0] != local(module.weight).shape[0]:
        raise Refusal(f"its bias is shared as {module.bias.placements[0]}, which is not served")
    return share


def must_be_shared(weight: Any, dimension: int, ranks: TPGroup) -> None:
    """Refuse a weight whose part here is not the one that TPGroup counts on, or that leaves a rank with nothing."""
    count = weight.shape[dimension]
    _, number, most = ranks.shard_rows(count)
    if not weight.placements[0].is_shard(dimension) or local(weight).shape[dimension] != number:
        raise Refusal(f"its weight is shared as {weight.placements[0]}, which is not served")
    if most * (ranks.size - 1) >= count:
        raise Refusal(f"its weight's dimension {dimension} of {count} leaves one of {ranks.size} ranks with nothing")


class ShardedLinear(Patched):
    """A linear layer of which each rank has some rows or columns of the weight."""

    infini_ops = "linear, all_reduce or all_gather"

    @classmethod
    def ops(cls, plan: Share) -> str:
        return f"linear{plan.collective}"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        return [share_of(module)]

    def forward(self, input: Tensor) -> Tensor:
        if must_step_aside(self, input):
            return vars(self)[FORWARD](input)
        return self.product(dense_last(input))

    def product(self, x: Tensor) -> Tensor:
        """What forward gives where nothing asks it to step aside."""
        weight, bias = self.own()
        share: Share = self.__dict__[PLAN]
        return share.apply(x, lambda x, bias: linear(x, weight, bias), bias)

    def own(self) -> tuple[Tensor, Tensor | None]:
        """This rank's part of the weight and of the bias."""
        parameters = self._parameters
        return local(parameters["weight"]), local(parameters["bias"])


class ShardedEmbedding(Patched):
    """An embedding of which each rank has some rows: a token's vector is on one of them, and zeros on the others."""

    infini_ops = "embedding, all_reduce"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if type(module) is not nn.Embedding:
            raise Refusal(f"it is a {type(module).__name__}, not a torch.nn.Embedding")
        style, ranks = style_of(module)
        if type(style) is not styles.EmbeddingParallel or style.shard_dim != 0 or not style.use_local_output:
            raise unserved(style)
        if module.max_norm is not None:
            raise Refusal("its max_norm is set, which writes to the weight")
        must_be_shared(module.weight, 0, ranks)
        return [ranks]

    def forward(self, input: Tensor) -> Tensor:
        weight = local(self._parameters["weight"])
        if must_step_aside(self, weight) or input.dtype not in (torch.int32, torch.int64):
            return vars(self)[FORWARD](input)
        ranks: TPGroup = self.__dict__[PLAN]
        first = ranks.shard_rows(self.num_embeddings)[0]
        return ranks.all_reduce(embedding(input, weight, first, self.num_embeddings))
