"""all_reduce, broadcast, all_gather, reduce_scatter: collectives between the ranks of a process group.

The kernels are libinfiniccl's, csrc/infiniccl; csrc/torch/collectives_torch.cpp calls them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._registry import OpSpec, like_first


def all_reduce(x: Tensor, group: int = 0, op: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Reduce a tensor over the ranks of a group; every rank gets the result.

    y[i] = reduction over all ranks r of x_r[i], in the order of the ranks; half types in float32, rounded once. The
    bits are the same on all ranks and from run to run. All ranks must make the same calls in the same order. The
    in-place form is torch.ops.infini.all_reduce_.

    Args:
        x: Any shape, the same on all ranks; float64, float32, bfloat16, float16, bool or an integer of 8 to 64 bits.
            Contiguous; other strides cost a copy.
        group: A number from torch_infini.distributed.communicator; 0: this process alone.
        op: 0 sum, 1 product, 2 max, 3 min, 4 mean (floating-point dtypes only).
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: For an unsupported argument, a rank that does not call within the group's timeout or has died, or
            ranks whose calls differ.

    Equivalent to:
        >>> y = x.clone()  # between several ranks: torch.distributed.all_reduce(y)

    Source: the AllReduce of the Infini C interface, csrc/include/infiniccl.h.
    """
    call = torch.ops.infini.all_reduce
    return call.default(x, group, op) if out is None else call.out(x, group, op, out=out)


def broadcast(x: Tensor, group: int = 0, root: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Copy one rank's tensor to all ranks of a group.

    y = x of rank root. The in-place form is torch.ops.infini.broadcast_.

    Args:
        x: The shape and dtype of rank root's x; on other ranks only these matter. Dtypes as in all_reduce. Contiguous;
            other strides cost a copy.
        group: A number from torch_infini.distributed.communicator; 0: this process alone.
        root: A rank, numbered within the group.
        out: Written and returned instead of a new tensor; may be x itself.

    Returns:
        The shape and dtype of x, contiguous.

    Raises:
        RuntimeError: As all_reduce.

    Equivalent to:
        >>> y = x.clone()  # between several ranks: torch.distributed.broadcast(y, 0)

    Source: infinicclBroadcast, csrc/include/infiniccl.h.
    """
    op = torch.ops.infini.broadcast
    return op.default(x, group, root) if out is None else op.out(x, group, root, out=out)


def all_gather(x: Tensor, group: int = 0, group_size: int = 1, *, out: Tensor | None = None) -> Tensor:
    """Concatenate the tensors of a group's ranks along the first dimension, on every rank.

    y[r * n : (r + 1) * n] = x of rank r.

    Args:
        x: [n, ...], the same shape on all ranks; dtypes as in all_reduce. Contiguous; other strides cost a copy.
        group: A number from torch_infini.distributed.communicator; 0: this process alone.
        group_size: The number of ranks in the group, from which compilers know the result's shape.
        out: Written and returned instead of a new tensor; must not share memory with x.

    Returns:
        [group_size * n, ...] of x's dtype, contiguous.

    Raises:
        RuntimeError: As all_reduce.

    Equivalent to:
        >>> y = torch.cat([x] * group_size)  # between several ranks: torch.distributed.all_gather_into_tensor(y, x)

    Source: infinicclAllGather, csrc/include/infiniccl.h.
    """
    op = torch.ops.infini.all_gather
    return op.default(x, group, group_size) if out is None else op.out(x, group, group_size, out=out)


def reduce_scatter(x: Tensor, group: int = 0, group_size: int = 1, op: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Reduce a tensor over the ranks of a group; each rank gets its part along the first dimension.

    y = reduction over all ranks r of x_r[rank * n : (rank + 1) * n], in the order of the ranks, computed as in
    all_reduce.

    Args:
        x: [group_size * n, ...], the same shape on all ranks; dtypes as in all_reduce. Contiguous; other strides cost a
            copy.
        group: A number from torch_infini.distributed.communicator; 0: this process alone.
        group_size: The number of ranks in the group, from which compilers know the result's shape.
        op: 0 sum, 1 product, 2 max, 3 min, 4 mean (floating-point dtypes only).
        out: Written and returned instead of a new tensor; must not share memory with x.

    Returns:
        [n, ...] of x's dtype, contiguous.

    Raises:
        RuntimeError: As all_reduce, or for a first dimension that group_size does not divide.

    Equivalent to:
        >>> y = x.chunk(group_size)[0].clone()  # between several ranks: torch.distributed.reduce_scatter_tensor(y, x)

    Source: infinicclReduceScatter, csrc/include/infiniccl.h.
    """
    call = torch.ops.infini.reduce_scatter
    return call.default(x, group, group_size, op) if out is None else call.out(x, group, group_size, op, out=out)


def fake_all_gather(x: Tensor, group: int = 0, group_size: int = 1) -> Tensor:
    return x.new_empty((group_size * x.shape[0], *x.shape[1:]))


def fake_reduce_scatter(x: Tensor, group: int = 0, group_size: int = 1, op: int = 0) -> Tensor:
    return x.new_empty((x.shape[0] // group_size, *x.shape[1:]))


SPECS = (
    OpSpec(all_reduce, fake=like_first, inplace="x"),
    OpSpec(broadcast, fake=like_first, inplace="x"),
    OpSpec(all_gather, fake=fake_all_gather),
    OpSpec(reduce_scatter, fake=fake_reduce_scatter),
)
