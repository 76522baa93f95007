"""Reads how transformers' tensor parallelism (`tp_plan="auto"`) shards a model, and combines the ranks' results.

transformers gives a sharded module another forward, on the instance, and DTensors for parameters. The DTensors stay in
place; torch.ops.infini's collectives combine the results of the ranks' shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .._core.devices import backing_type
from ..distributed import TPGroup
from .parallel_forward import closure_of, parallel_forward
from .ranks.hooks import all_gather

__all__ = ["DTensor", "LinearShard", "Replicate", "Shard", "local", "styles", "tp_group_of", "tp_group_of_model"]

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed import tensor_parallel as styles
except ImportError:  # torch without torch.distributed, or transformers before it sharded models by DTensors
    DTensor = Replicate = Shard = styles = None  # type: ignore[assignment, misc]


def local(x: Any) -> Any:
    """Return a parameter itself, or this rank's shard of a DTensor."""
    # to_local() creates a new view at every call, which takes as long as a small product.
    return x._local_tensor if DTensor is not None and isinstance(x, DTensor) else x


@dataclass(frozen=True)
class LinearShard:
    """This rank's part of a sharded linear layer.

    Attributes:
        tp_group: The tensor-parallel group.
        row_parallel: Row-parallel: each rank has some of the weight's columns, and results are all-reduced. Else
            column-parallel: each rank has some of its rows.
        cut: (first, number) of the columns of x that this rank multiplies, if x is not sharded already.
        gathered: The total columns of the all-gathered result; 0 if each rank keeps its own.

    Source: Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053.
    """

    tp_group: TPGroup
    row_parallel: bool
    cut: tuple[int, int] | None
    gathered: int

    @property
    def keeps_local(self) -> bool:
        """Whether each rank keeps its own result, for the next layer."""
        return not (self.row_parallel or self.gathered)

    @property
    def collective(self) -> str:
        """The collective after the product, for reports."""
        return "" if self.keeps_local else ", all_reduce" if self.row_parallel else ", all_gather"

    def apply(self, x: Tensor, multiply: Callable[[Tensor, Tensor | None], Tensor], bias: Tensor | None) -> Tensor:
        """Compute the layer's result by this rank's product and a collective.

        Args:
            x: [..., k], see `cut`.
            multiply: Computes the product [..., n] of x, plus a bias, in new memory.
            bias: Of this rank's columns; if row-parallel, of all columns, added after the all-reduce.
        """
        if not self.row_parallel:
            y = multiply(x, bias)
            return self.all_gather(y) if self.gathered else y
        if self.cut is not None:
            x = x.narrow(-1, *self.cut)
        y = self.tp_group.all_reduce(multiply(x, None))
        return y if bias is None else y.add_(bias)

    def all_gather(self, y: Tensor) -> Tensor:
        return all_gather(self.tp_group, y, self.gathered)


def tp_group_of(mesh: Any) -> TPGroup:
    """Return the group of a mesh of transformers. All ranks must make the first call together."""
    from ..distributed import communicator

    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return TPGroup(group.rank(), group.size(), communicator(group))


def tp_group_of_model(model: nn.Module) -> TPGroup | None:
    """Return the tensor-parallel group of a model sharded on the CPU; None for a model that is not sharded."""
    for module in model.modules():
        mesh = closure_of(forward).get("mesh") if (forward := parallel_forward(module)) is not None else None
        if mesh is not None and backing_type(mesh.device_type) == "cpu":
            return tp_group_of(mesh)
    return None
