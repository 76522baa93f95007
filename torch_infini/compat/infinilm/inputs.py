"""InferEngine.Input, with both of InfiniLM's sets of argument names, and its conversion to a torch_infini.nn.Batch.

A static cache is one with a block per row; its rows may be of unequal length, followed by padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...nn import Batch
from .convert import as_tensor

WHERE = "infinilm.InferEngine.forward"


class Input:
    """The input of a forward pass. All tensors hold integers; each is infinicore's or torch's, or an object with one as
    `_underlying`. The result is of the kind of input_ids.

    There are two sets of names for lengths. A call with `past_sequence_lengths`, `total_sequence_lengths` or
    `input_offsets` uses the newer set: top_k then defaults to 1, and output_ids is [rows]. In the older set top_k
    defaults to 50, and output_ids is [rows, 1]. Of lengths that determine each other, one is enough. Positional
    arguments are the newer set's; those of the older set are keyword-only. All are attributes that can be read and set.

    Args:
        input_ids: Static cache: [rows, length]. Paged: [1, tokens], the new tokens of all rows, concatenated.
        position_ids: Of the same shape, or [tokens]: the position of each token in its sequence; None: derived from the
            lengths.
        past_sequence_lengths: [rows], tokens of each row in the cache; None: derived from position_ids.
        total_sequence_lengths: [rows], cached plus new tokens.
        input_offsets: [rows + 1], from 0: where each row's new tokens start.
        block_tables: [rows, blocks], for a paged cache: the blocks of each row in order, padded with -1.
        slot_mapping: [tokens], for a paged cache: block * block_size + row of each new token; None: derived from
            block_tables.
        cache_lengths: past_sequence_lengths, in the older set.
        input_lengths: [rows], new tokens of each row; None: for a static cache as many as input_ids has columns, for a
            paged one 1, or all for a single row.
        temperature: At least 0; a number, or one per row (likewise the next two); None: 1.0.
        top_k: Below 1: no limit; None: 50 or 1, see above.
        top_p: At least 0; 1 or more: no limit; None: 1.0.

    Raises:
        ValueError: For an argument with an unknown name.
    """

    def __init__(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        past_sequence_lengths: Any = None,
        total_sequence_lengths: Any = None,
        input_offsets: Any = None,
        block_tables: Any = None,
        slot_mapping: Any = None,
        *,
        cache_lengths: Any = None,
        input_lengths: Any = None,
        temperature: Any = None,
        top_k: Any = None,
        top_p: Any = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise ValueError(
                "infinilm.InferEngine.Input: arguments must be those of its documentation, got " + ", ".join(unknown)
            )
        self.input_ids, self.position_ids = input_ids, position_ids
        self.cache_lengths, self.input_lengths = cache_lengths, input_lengths
        self.past_sequence_lengths, self.total_sequence_lengths = past_sequence_lengths, total_sequence_lengths
        self.input_offsets, self.block_tables, self.slot_mapping = input_offsets, block_tables, slot_mapping
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p

    @property
    def names_newer_lengths(self) -> bool:
        """Whether the newer set of names is used."""
        newer = (self.past_sequence_lengths, self.total_sequence_lengths, self.input_offsets)
        return any(lengths is not None for lengths in newer)

    @property
    def temperature(self) -> Any:
        return self._temperature

    @temperature.setter
    def temperature(self, value: Any) -> None:
        self._temperature = 1.0 if value is None else value

    @property
    def top_k(self) -> Any:
        return (1 if self.names_newer_lengths else 50) if self._top_k is None else self._top_k

    @top_k.setter
    def top_k(self, value: Any) -> None:
        self._top_k = value

    @property
    def top_p(self) -> Any:
        return self._top_p

    @top_p.setter
    def top_p(self, value: Any) -> None:
        self._top_p = 1.0 if value is None else value


class Output:
    """The result of a forward pass.

    Attributes:
        output_ids: The next token of each row, int64 on the CPU: [rows, 1] or [rows], see Input. An infinicore.Tensor,
            or a torch.Tensor if input_ids is one. Can be set.
    """

    def __init__(self, output_ids: Any = None) -> None:
        self.output_ids = output_ids


def static_batch(input: Input, cached: Tensor, length: int, vocabulary: int, positions: int) -> Batch:
    """Convert an input for a static cache to a batch, on the CPU.

    Args:
        input: The first dimension of its tensors may be smaller than the cache's.
        cached: [rows], the number of tokens in each row of the cache.
        length: Tokens per row of the cache.
        vocabulary, positions: The model's sizes.

    Raises:
        TypeError, ValueError: For an input that does not fit.
    """
    for name in ("block_tables", "slot_mapping"):
        if getattr(input, name) is not None:
            _fail(name, "be None for a static cache", "one")
    ids = _tensor(input, "input_ids", None, None)
    if ids is None:
        _fail("input_ids", "be given", "None")
    rows, columns = ids.shape
    if not (1 <= rows <= len(cached) and columns >= 1):
        _fail("input_ids", f"have 1 to {len(cached)} rows (max_batch_size), none of them empty", list(ids.shape))
    places = _tensor(input, "position_ids", rows, columns)
    first = lambda new: None if places is None else places[:, 0]
    past, new, name = _lengths(input, rows, torch.full((rows,), columns), first)
    _hold(name, new, new <= columns, f"leave each row at most {columns} new tokens, the columns of input_ids")
    _hold(_past(input), past, past <= cached[:rows], "be at most the tokens that the cache has of that row")
    total = past + new
    _hold("total_sequence_lengths", total, total <= length, f"be at most max_cache_len, {length}")
    column = torch.arange(columns)
    real = column < new[:, None]
    at = past[:, None] + column
    places = at if places is None else places
    slots = torch.arange(rows)[:, None] * length + at
    tables = torch.arange(rows)[:, None]
    return _batch(ids[real], places[real], slots[real], tables, total, new, vocabulary, positions)


def paged_batch(input: Input, blocks: int, block_size: int, vocabulary: int, positions: int) -> Batch:
    """Convert an input for a paged cache of `blocks` blocks to a batch; otherwise like static_batch."""
    ids = _tensor(input, "input_ids", None, flat=True)
    if ids is None:
        _fail("input_ids", "be given", "None")
    tables = _tensor(input, "block_tables", None, None)
    if tables is None:
        _fail("block_tables", "be given for a paged cache", "None")
    rows, tokens = len(tables), len(ids)
    if rows < 1:
        _fail("block_tables", "have at least one row", list(tables.shape))
    places = _tensor(input, "position_ids", tokens, flat=True)
    usual = torch.tensor([tokens]) if rows == 1 else torch.ones(rows, dtype=torch.int64) if rows == tokens else None
    first = lambda new: None if places is None else places[(new.cumsum(0) - new).clamp(max=tokens - 1)]
    past, new, _ = _lengths(input, rows, usual, first, tokens)
    total = past + new
    room = tables.shape[1] * block_size
    _hold("total_sequence_lengths", total, total <= room, f"be at most {room}, what a row of block_tables has room for")
    used = torch.arange(tables.shape[1]) * block_size < total[:, None]
    _hold("block_tables", tables, ~used | (tables >= 0) & (tables < blocks), f"name blocks from 0 to {blocks - 1}")
    row = torch.arange(rows).repeat_interleave(new)
    at = torch.arange(tokens) - (new.cumsum(0) - new)[row] + past[row]
    slots = tables[row, at // block_size] * block_size + at % block_size
    given = _tensor(input, "slot_mapping", tokens, flat=True)
    if given is not None:
        last = blocks * block_size - 1
        _hold("slot_mapping", given, (given >= 0) & (given <= last), f"be slots of the cache, from 0 to {last}")
        _hold("slot_mapping", given, given == slots, "be where block_tables have each new token")
    if slots.unique().numel() < tokens:
        _fail("block_tables", "give each new token a slot of its own", "rows that share one")
    return _batch(ids, at if places is None else places, slots, tables, total, new, vocabulary, positions)


def _batch(
    ids: Tensor,
    places: Tensor,
    slots: Tensor,
    tables: Tensor,
    total: Tensor,
    new: Tensor,
    vocabulary: int,
    positions: int,
) -> Batch:
    _hold("input_ids", ids, (ids >= 0) & (ids < vocabulary), f"be tokens from 0 to {vocabulary - 1}")
    _hold("position_ids", places, (places >= 0) & (places < positions), f"be positions from 0 to {positions - 1}")
    starts = None if len(ids) == len(new) else torch.cat((new.new_zeros(1), new.cumsum(0)))
    return Batch(ids.contiguous(), places.contiguous(), slots.contiguous(), tables.contiguous(), total, starts)


def _lengths(
    input: Input,
    rows: int,
    usual: Tensor | None,
    first: Callable[[Tensor], Tensor | None],
    tokens: int | None = None,
) -> tuple[Tensor, Tensor, str]:
    """Compute the numbers of cached and new tokens of each row, and the name of the lengths they were derived from.

    Args:
        input: The input.
        rows: The number of rows.
        usual: The new tokens of each row if the input does not determine them.
        first: Maps the new tokens of each row to the first position of each row, or to None.
        tokens: The required sum of new tokens, or None.
    """
    past = _tensor(input, "cache_lengths", rows)
    newer = _tensor(input, "past_sequence_lengths", rows)
    if past is not None and newer is not None:
        _fail("past_sequence_lengths", "be None where cache_lengths are given", "both")
    past = newer if past is None else past
    total = _tensor(input, "total_sequence_lengths", rows)
    offsets = _tensor(input, "input_offsets", rows + 1)
    sources: dict[str, Tensor | None] = {"input_lengths": _tensor(input, "input_lengths", rows)}
    if offsets is not None:
        if offsets[0] != 0:
            _fail("input_offsets", "begin with 0", offsets[0].item())
        sources["input_offsets"] = offsets.diff()
    if total is not None and past is not None:
        sources["total_sequence_lengths"] = total - past
    said = {name: lengths for name, lengths in sources.items() if lengths is not None}
    if not said:
        if usual is None:
            _fail("input_offsets", "be given for more than one row (or input_lengths)", "None")
        said = {"input_lengths": usual}
    name, new = next(iter(said.items()))
    _hold(name, new, new >= 1, "leave each row at least one new token")
    for other, lengths in said.items():
        _hold(other, lengths, lengths == new, f"leave as many new tokens as {name}")
    if tokens is not None and new.sum() != tokens:
        _fail(name, f"add up to the {tokens} tokens of input_ids", new.sum().item())
    if past is None:
        past = first(new) if total is None else total - new
    if past is None:
        _fail(_past(input), "be given where position_ids are not", "None")
    _hold(_past(input), past, past >= 0, "be at least 0")
    return past, new, name


def _past(input: Input) -> str:
    """Return the input's name for cache_lengths."""
    return "past_sequence_lengths" if input.names_newer_lengths else "cache_lengths"


def _tensor(input: Input, name: str, *shape: int | None, flat: bool = False) -> Tensor | None:
    """Convert an argument to int64 on the CPU and check its shape (None: any size); flat: allow a leading 1."""
    value = getattr(input, name)
    if value is None:
        return None
    tensor = as_tensor(WHERE, name, value)
    if tensor.dtype not in (torch.int64, torch.int32):
        _fail(name, "be int64 or int32", str(tensor.dtype).removeprefix("torch."))
    found = tensor[0] if flat and tensor.dim() == 2 and len(tensor) == 1 else tensor
    if found.dim() != len(shape) or any(n not in (None, m) for n, m in zip(shape, found.shape, strict=True)):
        words = ", ".join("any" if n is None else str(n) for n in shape)
        _fail(name, f"have shape [{words}]", list(tensor.shape))
    if flat and found.numel() < 1:
        _fail(name, "have at least one token", list(tensor.shape))
    return found.to("cpu", torch.int64)


def _hold(name: str, values: Tensor, right: Tensor, rule: str) -> None:
    if not right.all():
        _fail(name, rule, values[~right][0].item())


def _fail(name: str, rule: str, got: object) -> NoReturn:
    raise ValueError(f"{WHERE}: {name} must {rule}, got {got}")
