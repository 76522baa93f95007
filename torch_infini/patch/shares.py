"""What transformers' tensor parallelism (`tp_plan="auto"`) leaves in a model, and how ranks put their parts together.

It gives a module that ranks share another forward, on the instance, and DTensors for parameters. The DTensors stay
where they are; what is computed with this rank's part of them is put together by torch.ops.infini's collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..distributed import TPGroup, communicator
from .swap import shared_forward

try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from transformers.distributed import tensor_parallel as styles
except ImportError:  # torch without torch.distributed, or transformers before it shared models by DTensors
    DTensor = Replicate = Shard = styles = None  # type: ignore[assignment, misc]


def local(x: Any) -> Any:
    """A parameter itself, or this rank's part of one that ranks share."""
    # to_local() makes a new view at every call, which takes as long as a small product.
    return x._local_tensor if DTensor is not None and isinstance(x, DTensor) else x


def parts_of(forward: Any) -> dict[str, Any]:
    """The variables that such a forward works with: `self`, its style, and `mesh`, the ranks, where it has them."""
    return dict(zip(forward.__code__.co_freevars, (cell.cell_contents for cell in forward.__closure__), strict=True))


def only_for_gradients(module: nn.Module) -> bool:
    """Whether the instance's forward does nothing but add up the ranks' gradients of the module's parameters."""
    forward = shared_forward(module)
    return forward is not None and forward.__qualname__.startswith("ReplicatedWithGradAllReduce.")


@dataclass(frozen=True)
class Share:
    """This rank's part of a linear layer's product.

    Attributes:
        ranks: Those that share the layer.
        adds: Each rank has some of the weight's columns, and the results are added up; else each has some of its rows.
        cut: The first and the number of x's columns that this rank multiplies, where it is given all of them.
        gathered: The columns of all ranks' results, which are put side by side; 0 where each rank keeps its own.

    Source: Shoeybi et al., Megatron-LM, 2019, arXiv:1909.08053.
    """

    ranks: TPGroup
    adds: bool
    cut: tuple[int, int] | None
    gathered: int

    @property
    def apart(self) -> bool:
        """Whether each rank keeps what it computes, for the next layer."""
        return not (self.adds or self.gathered)

    @property
    def collective(self) -> str:
        """For reports: what follows the product."""
        return "" if self.apart else ", all_reduce" if self.adds else ", all_gather"

    def apply(self, x: Tensor, multiply: Callable[[Tensor, Tensor | None], Tensor], bias: Tensor | None) -> Tensor:
        """The layer's result from this rank's: `multiply` takes x and what is added to each row of the product.

        Args:
            x: [..., k]; k as `cut` says.
            multiply: Gives [..., n] in memory of its own.
            bias: Of the columns that this rank makes; of all where ranks add up, once they have.
        """
        if not self.adds:
            y = multiply(x, bias)
            return self.side_by_side(y) if self.gathered else y
        if self.cut is not None:
            x = x.narrow(-1, *self.cut)
        y = self.ranks.all_reduce(multiply(x, None))
        return y if bias is None else y.add_(bias)

    def side_by_side(self, y: Tensor) -> Tensor:
        rows = y.reshape(-1, y.shape[-1])
        _, _, most = self.ranks.shard_rows(self.gathered)
        if rows.shape[1] < most:
            rows = nn.functional.pad(rows, (0, most - rows.shape[1]))
        return self.ranks.all_gather(rows, self.gathered).view(*y.shape[:-1], self.gathered)


def ranks_of(mesh: Any) -> TPGroup:
    """The ranks of a mesh of transformers'. All of them must call this, at the first time."""
    group = mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    return TPGroup(group.rank(), group.size(), communicator(group))


def ranks_of_model(model: nn.Module) -> TPGroup | None:
    """The ranks that share a model on the CPU; None for one that is whole."""
    for module in model.modules():
        mesh = parts_of(forward).get("mesh") if (forward := shared_forward(module)) is not None else None
        if mesh is not None and mesh.device_type == "cpu":
            return ranks_of(mesh)
    return None
