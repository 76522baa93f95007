"""StateRows: which rows of a model's SequenceStates running sequences have, and which keep the state of a prefix.

A prefix is named by the identity of its last block (BlockManager), so that a kept state is found where blocks are.
"""

from __future__ import annotations

from collections import OrderedDict


class StateRows:
    """Hands out the rows 0 to sequences - 1 to sequences, and those after them to prefixes.

    Args:
        sequences: The most sequences at a time.
        prefixes: The most states of prefixes that are kept; the least recently used is dropped first.

    Attributes:
        copies: (from, to) of rows to copy before the next step, in order.
    """

    def __init__(self, sequences: int, prefixes: int) -> None:
        self.sequences, self.prefixes = sequences, prefixes
        self.copies: list[tuple[int, int]] = []
        self._kept: OrderedDict[int, int] = OrderedDict()  # identity of a prefix -> its row
        self.restart()

    def restart(self) -> None:
        """Free all rows, whose contents an interrupted step may have left in any state."""
        self._free = list(range(self.sequences))
        self.copies = []
        self.forget()

    def forget(self) -> None:
        """Drop the states of prefixes."""
        self._kept = OrderedDict()
        self._unused = list(range(self.sequences, self.sequences + self.prefixes))

    @property
    def free(self) -> int:
        """The number of rows without a sequence."""
        return len(self._free)

    def begin(self, identity: int | None) -> int:
        """Return a row for a sequence: one that begins with the prefix of this identity, or if None with nothing."""
        row = self._free.pop()
        if identity is not None:
            self._kept.move_to_end(identity)
            self.copies.append((self._kept[identity], row))
        return row

    def fork(self, row: int) -> int:
        """Return a row for a sequence that goes on as another one does."""
        new = self._free.pop()
        self.copies.append((row, new))
        return new

    def release(self, row: int) -> None:
        """Free a sequence's row."""
        self._free.append(row)

    def has(self, identity: int) -> bool:
        """Return whether the state of a prefix is kept."""
        return identity in self._kept

    def keep(self, identity: int, row: int) -> None:
        """Keep a sequence's state as that of the prefix that it has computed."""
        if not self.prefixes or identity in self._kept:
            return
        if not self._unused:
            self._unused.append(self._kept.popitem(last=False)[1])
        self._kept[identity] = self._unused.pop()
        self.copies.append((row, self._kept[identity]))
