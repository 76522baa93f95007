"""TPGroup: the tensor-parallel group of a model, from the view of one rank; init_tp_group makes it.

Each rank holds a shard of the heads, of the MLP's columns and of the vocabulary; a layer's result is a partial sum.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .._core.devices import backing_type
from .groups import communicator
from .transport import MOST_RANKS
from .workers import Workers

_INIT = "torch_infini.distributed.init_tp_group"
_NAME = "torch_infini.distributed.TPGroup"


@dataclass(frozen=True)
class TPGroup:
    """The ranks of a model. All of them compute the same tokens at the same time.

    Attributes:
        rank: This process's rank, 0 to size - 1.
        size: The number of ranks.
        group: The group's number for torch.ops.infini.all_reduce (torch_infini.distributed.communicator).
        workers: The processes of the other ranks, if this process started them and must send them every call.

    Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism, 2019,
        arXiv:1909.08053.
    """

    rank: int
    size: int
    group: int
    workers: Workers | None = None

    def shard(self, what: str, count: int) -> tuple[int, int]:
        """Split `count` items evenly over the ranks.

        Args:
            what: The items' name, for the error.
            count: The number of items.

        Returns:
            (first, number) of this rank's shard.

        Raises:
            ValueError: If count is not a multiple of the number of ranks.
        """
        if count % self.size:
            raise ValueError(f"{_NAME}: {what} must be a multiple of the ranks, {self.size}, got {count}")
        number = count // self.size
        return self.rank * number, number

    def shard_or_replicate(self, what: str, count: int) -> tuple[int, int]:
        """Like shard, but if there are fewer items than ranks, replicate them: each rank then has one item."""
        if count < self.size:
            if self.size % count:
                raise ValueError(
                    f"{_NAME}: {what} must divide the ranks, {self.size}, or be a multiple of them, got {count}"
                )
            return self.rank * count // self.size, 1
        return self.shard(what, count)

    def shard_rows(self, count: int) -> tuple[int, int, int]:
        """Split the rows of a table; the last ranks may have fewer rows than the first, or none.

        Returns:
            (first, number, most): this rank's rows, and the number of rows of rank 0.
        """
        most = -(-count // self.size)
        first = min(self.rank * most, count)
        return first, min(most, count - first), most

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place. All ranks get the same bits."""
        return torch.ops.infini.all_reduce.out(x, self.group, out=x)

    def all_gather(self, x: Tensor, columns: int, out: Tensor | None = None) -> Tensor:
        """Concatenate the ranks' x [n, most] along the columns and keep the first `columns`.

        Returns:
            [n, columns], in `out` if it is given.
        """
        n, most = x.shape
        parts = torch.ops.infini.all_gather.default(x, self.group, self.size).view(self.size, n, most)
        y = x.new_empty(n, columns) if out is None else out
        for rank in range(self.size):
            first = rank * most
            if first < columns:
                part = parts[rank, :, : columns - first]
                torch.ops.infini.rearrange.out(part, out=y[:, first : first + part.shape[1]])
        return y

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        flags = torch.tensor([flag], dtype=torch.uint8)
        return bool(torch.ops.infini.all_reduce.default(flags, self.group, 2))  # the maximum

    def generator(self) -> torch.Generator:
        """Make a random generator with the same seed on all ranks; rank 0 draws the seed."""
        seed = torch.randint(2**62, (1,))
        return torch.Generator().manual_seed(int(torch.ops.infini.broadcast.default(seed, self.group, 0)))

    def must_agree(self, what: str, digest: bytes) -> None:
        """Compare 32 bytes with those of the other ranks.

        Raises:
            ValueError: On all ranks, naming those that differ from rank 0.
        """
        own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        gathered = torch.ops.infini.all_gather.default(own, self.group, self.size).view(self.size, -1)
        different = [rank for rank in range(self.size) if not torch.equal(gathered[rank], gathered[0])]
        if different:
            raise ValueError(
                f"{_NAME}: {what} must be the same on all ranks, got another one on rank "
                f"{', '.join(map(str, different))} than on rank 0"
            )


class _StartingTPGroup(TPGroup):
    """The group of rank 0 whose workers may still be starting; reading its number waits for them."""

    workers: Workers

    def __init__(self, size: int, workers: Workers) -> None:
        vars(self).update(rank=0, size=size, workers=workers)

    @cached_property
    def group(self) -> int:
        return self.workers.group


def init_tp_group(size: int, device: torch.device | str = "cpu") -> TPGroup:
    """Make the tensor-parallel group of a model.

    Args:
        size: The number of ranks.
        device: The device of this rank's shard; with CUDA the ranks must be torchrun's processes.

    Returns:
        Under torchrun with `size` processes, their group; all of them make the same calls. Otherwise this process is
        rank 0 and starts the other ranks as workers; all ranks together use this process's number of threads. Workers
        start in the background; the first collective waits for them, and raises RuntimeError if one fails to start.

    Raises:
        ValueError: For a size below 2, under torchrun a size other than its number of processes, or CUDA without
            torchrun.
        RuntimeError: If the ranks cannot connect.
    """
    if not isinstance(size, int) or size < 2:
        raise ValueError(f"{_INIT}: size must be an integer of at least 2, got {size!r}")
    if "TORCHELASTIC_RUN_ID" not in os.environ and not torch.distributed.is_initialized():
        if backing_type(device) != "cpu":
            raise ValueError(f"{_INIT}: device must be cpu where torchrun did not start the ranks, got {device}")
        if size > MOST_RANKS:
            raise ValueError(f"{_INIT}: size must be at most {MOST_RANKS}, the ranks of one machine, got {size}")
        return _StartingTPGroup(size, Workers(size))
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("infiniccl")
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if world != size:
        raise ValueError(f"{_INIT}: size must be the number of torch.distributed's processes, {world}, got {size}")
    return TPGroup(rank, size, communicator(None, device))
