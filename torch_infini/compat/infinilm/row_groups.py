"""The loop of InferEngine.generate: groups of rows that fit into the cache together are computed by forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .convert import as_torch


@dataclass(eq=False)
class PromptRow:
    """A prompt and its new tokens.

    Attributes:
        tokens: The prompt's tokens, then the new ones.
        prompt: The number of prompt tokens.
        end: The most tokens that the row may have.
        seed: The seed of its random numbers; None: InfiniLM's fixed number.
        ended: Whether it is complete.
    """

    tokens: list[int]
    end: int
    seed: int | None = None
    ended: bool = False
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def new(self) -> list[int]:
        return self.tokens[self.prompt :]

    def append(self, token: int, ends: Sequence[int]) -> None:
        self.tokens.append(token)
        self.ended = token in ends or len(self.tokens) == self.end


@dataclass
class Times:
    """Seconds and new tokens of the first pass of each group, and of the later passes."""

    prefill: float = 0.0
    decode: float = 0.0
    decoded: int = 0
    steps: int = 0

    def line(self, rows: Sequence[PromptRow]) -> str:
        prompt = sum(row.prompt for row in rows)
        line = f"generate: {len(rows)} rows; prefill {prompt} tokens in {self.prefill * 1e3:.2f} ms"
        line += f" ({prompt / self.prefill:.1f} tokens/s)"
        if self.steps:
            line += f"; decode {self.decoded} tokens in {self.decode * 1e3:.2f} ms"
            line += f" ({self.decoded / self.decode:.1f} tokens/s, {self.decode * 1e3 / self.steps:.2f} ms a step)"
        return line


def groups(rows: Sequence[PromptRow], blocks: int, block_size: int | None) -> Iterator[Sequence[PromptRow]]:
    """Yield groups of rows in order, as many rows at a time as fit into the cache.

    Args:
        rows: Each must fit into the cache alone.
        blocks: The blocks of a paged cache, or the rows of a static one.
        block_size: For a paged cache; None: static.
    """
    start = used = 0
    for i, row in enumerate(rows):
        needed = 1 if block_size is None else -(-row.end // block_size)
        if used + needed > blocks:
            yield rows[start:i]
            start, used = i, 0
        used += needed
    if rows:
        yield rows[start:]


def complete(
    rows: Sequence[PromptRow],
    block_size: int | None,
    forward: Callable[..., Any],
    kind: Callable[[Tensor], Any],
    ends: Sequence[int],
    times: Times,
) -> None:
    """Append the new tokens of a group, all rows in each pass.

    A row that has ended stays in the batch, because a static cache holds it at its index: its last token is computed
    again, and the result is dropped.

    Args:
        rows: The group; it uses the cache's rows or blocks from the first one on.
        block_size: As in groups.
        forward: InferEngine.forward, without its settings.
        kind: Converts input_ids to the kind that hooks get.
        ends: Tokens that end a row.
        times: The times of the passes are added to it.
    """
    tables = {} if block_size is None else {"block_tables": _tables(rows, block_size)}
    past = [0] * len(rows)
    while not all(row.ended for row in rows):
        start, is_prefill = time.perf_counter(), past[0] == 0
        fed = [row.tokens[n:] for row, n in zip(rows, past, strict=True)]
        lengths = [len(row.tokens) for row in rows]
        more = dict(tables)
        if block_size is None:
            width = max(map(len, fed))
            ids = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in fed])
        else:
            ids = torch.tensor([sum(fed, [])])
            more["input_offsets"] = torch.tensor([0, *map(len, fed)]).cumsum(0)
        seeds = [row.seed for row in rows]
        found = forward(
            kind(ids),
            past_kv_lengths=torch.tensor(past),
            total_kv_lengths=torch.tensor(lengths),
            seed=None if None in seeds else seeds,
            **more,
        )
        appended = sum(not row.ended for row in rows)
        for row, token in zip(rows, as_torch(found).tolist(), strict=True):
            if not row.ended:
                row.append(token, ends)
        past = [len(row.tokens) - 1 for row in rows]
        seconds = time.perf_counter() - start
        if is_prefill:
            times.prefill += seconds
        else:
            times.decode, times.decoded, times.steps = times.decode + seconds, times.decoded + appended, times.steps + 1


def _tables(rows: Sequence[PromptRow], block_size: int) -> Tensor:
    """Return the blocks of each row's tokens, from block 0 on: [rows, blocks], padded with -1."""
    counts = torch.tensor([-(-row.end // block_size) for row in rows])
    column = torch.arange(int(counts.max()))
    return torch.where(column < counts[:, None], (counts.cumsum(0) - counts)[:, None] + column, -1)
