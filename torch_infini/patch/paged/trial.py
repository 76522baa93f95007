"""The trial of a model for the engine: some tokens in parts, as the engine computes them, compared with one call."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...nn import Batch, KVCache, MixedKVCache
from ..checks.probe import HALF
from ..checks.trial import rms
from .config import vocabulary_of
from .sites import Unserved

_BLOCK = 4  # tokens of a block in the trial


class Tried(Protocol):
    """What the trial needs of a served model.

    Attributes:
        model: The model of transformers.
    """

    model: nn.Module

    def __call__(self, batch: Batch, cache: Any, last: bool = False, out: Tensor | None = None) -> Tensor:
        """As ServedModel's."""

    def new_cache(
        self, blocks: int, block_size: int, dtype: torch.dtype | None = None, sequences: int = 1
    ) -> KVCache | MixedKVCache:
        """As ServedModel's."""


def compare(served: Tried, tokens: Tensor, logits: Tensor) -> None:
    """Compute tokens in parts.

    Args:
        served: A model.
        tokens: [S], a result of trial_tokens.
        logits: [S, vocabulary], of one ordinary call of the model.

    Raises:
        Unserved: If their logits are not those given.
    """
    try:
        found = in_parts(served, tokens)
    except Unserved:
        raise
    except Exception as failure:  # a forward that needs other arguments may raise anything
        cause = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        raise Unserved(f"its forward needs more than tokens and positions: {cause}") from failure
    if found.shape != logits.shape:
        raise Unserved(f"its logits in parts are {list(found.shape)}, and {list(logits.shape)} in one call")
    # The effect of what the cache holds: the same tokens after other text.
    other = tokens.clone()
    other[: len(other) // 2] = other[: len(other) // 2].flip(0)
    with torch.no_grad():
        behind = served.model(input_ids=other[None], use_cache=False).logits[0]
    later = slice(len(tokens) // 2 + 1, None)
    effect = rms((behind - logits)[later].float())
    error, size = rms((found - logits).float()), rms(logits.float())
    # The error may be half of that effect; but rounding alone explains some share of the logits' size.
    rounding = rounding_of(logits)
    if not error <= max(min(effect / 2, 4 * rounding * size), rounding * size):
        raise Unserved(
            f"the logits of {len(tokens)} tokens in parts differ from those in one call by {error:.3g} (root mean "
            f"square; other text before them changes them by {effect:.3g}): it keeps states other than keys and "
            "values, or its positions follow from a mask"
        )


def rounding_of(logits: Tensor) -> float:
    """Return the share of the logits' size that rounding alone explains."""
    return HALF.get(logits.dtype, 4e-5) / 4


def in_parts(model: Tried, tokens: Tensor) -> Tensor:
    """Compute tokens as an engine does: in two chunks, the second beside another sequence, and then one by one."""
    total = len(tokens)
    blocks = -(-total // _BLOCK)
    cache = model.new_cache(2 * blocks, _BLOCK, sequences=2)
    order = torch.arange(2 * blocks, device=tokens.device).view(blocks, 2).t().contiguous()  # blocks of two sequences
    first, second = total // 3, 2 * total // 3

    def step(*chunks: tuple[int, int, int]) -> Tensor:
        """Compute chunks (sequence, first token, end)."""
        numbers = torch.cat([torch.arange(start, end) for _, start, end in chunks]).to(tokens.device)
        rows = torch.tensor([row for row, start, end in chunks for _ in range(start, end)], device=tokens.device)
        slots = order[rows, numbers // _BLOCK] * _BLOCK + numbers % _BLOCK
        lengths = torch.tensor([end for _, _, end in chunks], device=tokens.device)
        counts = torch.tensor([0, *(end - start for _, start, end in chunks)], device=tokens.device).cumsum(0)
        table = order[[row for row, _, _ in chunks]]
        starts = None if all(end - start == 1 for _, start, end in chunks) else counts
        states = torch.tensor([row for row, _, _ in chunks], device=tokens.device)
        batch = Batch(tokens[numbers], numbers, slots, table, lengths, starts, states=states)
        return model(batch, cache)

    # The other sequence has the same tokens, and its chunks come first.
    parts = [step((0, 0, first)), step((1, 0, 2), (0, first, second))[2:]]
    parts += [step((1, i - second + 2, i - second + 3), (0, i, i + 1))[1:] for i in range(second, total)]
    return torch.cat(parts)


def trial_tokens(model: Any) -> Tensor:
    """Return ids for a causal language model: more than a short convolution looks back, no placeholders of images."""
    vocabulary = vocabulary_of(model)
    low, high = (5, min(vocabulary, 500)) if vocabulary > 20 else (0, vocabulary)
    return torch.randint(low, high, (15,), generator=torch.Generator("cpu").manual_seed(0))
