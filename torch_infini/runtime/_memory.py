"""Memory of the tensors that recorded calls make: tracked by weak references, and planned by lifetimes at the end.

program() and record() share this module.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_LONG = 32  # calls of a life from which a block is not noted in each
_ALIGNMENT = 64  # bytes: a cache line, and the alignment of torch's own memory


@dataclass(slots=True, unsafe_hash=True)
class StorageView:
    """A tensor in a block of memory that the recording made; it does not keep the block alive."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements
    conj: bool
    neg: bool

    def of(self, storage: torch.UntypedStorage, start: int) -> Tensor:
        """Make the tensor, if its block begins `start` bytes into a storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, start // self.dtype.itemsize + self.offset, self.shape, self.stride)
        if self.conj:
            torch._C._set_conj(tensor, True)
        if self.neg:
            torch._C._set_neg(tensor, True)
        return tensor


@dataclass
class _Block:
    """A storage that the recording made; it is alive as long as a tensor in it is held."""

    nbytes: int
    ref: StorageWeakRef

    def held(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)


class Blocks:
    """The storages that a recording makes, by number."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._keys: dict[int, int] = {}  # _storage_key() to a number; the weak reference keeps the address

    def add(self, tensor: Tensor) -> None:
        """Add the tensor's storage to those that the recording made."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._keys:
            self._keys[storage._cdata] = len(self._blocks)
            self._blocks.append(_Block(storage.nbytes(), StorageWeakRef(storage)))

    def describe(self, value: Any) -> Any:
        """Return the StorageView of a tensor that the recording made.

        Return a detached alias of any other tensor, so that later changes of the tensor object do not matter, and any
        other value unchanged.
        """
        if not isinstance(value, Tensor):
            return value
        block = self._keys.get(_storage_key(value))
        if block is None:
            return value.detach()
        offset = int(value.storage_offset())
        return StorageView(
            block, value.dtype, tuple(value.shape), value.stride(), offset, value.is_conj(), value.is_neg()
        )

    def nbytes(self, block: int) -> int:
        """Return the size of a block."""
        return self._blocks[block].nbytes

    def held(self, block: int) -> torch.UntypedStorage | None:
        """Return the storage of a block if it is still held."""
        return self._blocks[block].held()


class PlannedMemory:
    """Memory for the tensors of recorded calls.

    Blocks that are still held keep their memory; the others share one arena, each from the first call that uses it to
    the last.

    Attributes:
        arena_bytes: The size of the arena.
        held_bytes: The size of the blocks that are held.
    """

    def __init__(
        self,
        blocks: Blocks,
        calls: Iterable[Iterable[StorageView]],
        moves_held: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Plan the arena.

        Args:
            blocks: The blocks that were made.
            calls: The StorageViews that each call uses, in order.
            moves_held: Whether blocks that are held get memory in the arena too.
            device: The arena's device.
        """
        lives: dict[int, tuple[int, int]] = {}
        for when, views in enumerate(calls):
            for view in views:
                lives[view.block] = (lives.get(view.block, (when, when))[0], when)
        self._held = {} if moves_held else {i: s for i in lives if (s := blocks.held(i)) is not None}
        self.held_bytes = sum(map(blocks.nbytes, self._held))
        planned = {i: life for i, life in lives.items() if i not in self._held}
        self._offsets, self.arena_bytes = plan_memory({i: blocks.nbytes(i) for i in planned}, planned)
        self._arena = torch.empty(self.arena_bytes, dtype=torch.uint8, device=device).untyped_storage()
        self._tensors: dict[StorageView, Tensor] = {}

    def fill(self, block: int, storage: torch.UntypedStorage) -> None:
        """Copy a storage's contents to a block's memory."""
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        self.tensor(StorageView(block, torch.uint8, tuple(whole.shape), (1,), 0, False, False)).copy_(whole)

    def tensor(self, value: Any) -> Any:
        """Return the tensor that a StorageView describes; return any other value as it is."""
        if not isinstance(value, StorageView):
            return value
        if value not in self._tensors:
            held = self._held.get(value.block)
            where = (self._arena, self._offsets[value.block]) if held is None else (held, 0)
            self._tensors[value] = value.of(*where)
        return self._tensors[value]


def views_of(values: Any) -> list[StorageView]:
    """Return the StorageViews in tuples, lists and dicts."""
    if isinstance(values, StorageView):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [view for value in values for view in views_of(value)]


def plan_memory(sizes: dict[int, int], lives: dict[int, tuple[int, int]]) -> tuple[dict[int, int], int]:
    """Place blocks of memory so that none overlaps another during its lifetime; return offsets and the total size.

    The largest block is placed first, each at the lowest free offset. Sizes and offsets are in bytes.
    """
    offsets: dict[int, int] = {}
    total = 0
    # (offset, end) of the blocks placed so far, by each call of their lives and by the first one: beside a block are
    # those that are alive at its first call, and those that begin later in its life. A few that live long are looked
    # through one by one instead.
    alive: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    begun: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    long_lived: list[tuple[int, int, int, int]] = []  # (offset, end, first call, last call)
    for key in sorted(lives, key=lambda key: -sizes[key]):
        size = -(-sizes[key] // _ALIGNMENT) * _ALIGNMENT
        first, last = lives[key]
        offset = 0
        beside: Iterable[tuple[int, int]]
        beside = ((at, end) for at, end, begins, ends in long_lived if begins <= last and first <= ends)
        if short_lived := [*alive[first], *chain(*(begun.get(when, ()) for when in range(first + 1, last + 1)))]:
            beside = sorted([*beside, *short_lived])
        for other, end in beside:
            if offset + size <= other:
                break
            offset = max(offset, end)
        offsets[key] = offset
        total = max(total, offset + size)
        if last - first > _LONG:
            insort(long_lived, (offset, offset + size, first, last))
            continue
        begun[first].append((offset, offset + size))
        for when in range(first, last + 1):
            alive[when].append((offset, offset + size))
    return offsets, total


def _storage_key(tensor: Tensor) -> int:
    """Return a key that all views of one storage share."""
    return tensor.untyped_storage()._cdata
