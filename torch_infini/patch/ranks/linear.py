"""keep_rows, keep_columns: leave a linear layer this rank's part of its outputs or inputs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ...distributed import TPGroup
from .cut import Cut, Part, Range, set_part
from .hooks import Sum, Take

Cuts = Iterator[tuple[str, Cut]]  # of parameters, by name


def keep_rows(name: str, module: nn.Linear, *rows: Range) -> Cuts:
    """Leave a layer of this name these outputs."""
    n, k = module.out_features, module.in_features
    set_part(module, Part(rows, Range(0, k), (n, k)))
    yield f"{name}.weight", Cut(-2, rows)
    if module.bias is not None:
        yield f"{name}.bias", Cut(-1, rows)


def keep_columns(name: str, module: nn.Linear, tp_group: TPGroup, takes: bool = False) -> Cuts:
    """Leave a layer some of its inputs, and sum its results over the ranks; `takes`: it is called with all inputs."""
    n, k = module.out_features, module.in_features
    own = Range(*tp_group.shard(f"the columns of {name}", k))
    if takes:
        module.register_forward_pre_hook(Take(*own))
    module.register_forward_hook(Sum(tp_group))
    set_part(module, Part((Range(0, n),), own, (n, k)))
    yield f"{name}.weight", Cut(-1, (own,))
    if module.bias is not None and tp_group.rank:
        yield f"{name}.bias", Cut(-1, ())
