"""Batch: what one forward pass computes, the tokens of one or more sequences and where their keys and values are kept.

Prefill, chunks of it, decode and mixtures of them are one layout: tokens of all sequences one behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """The inputs of a model's forward pass; all tensors are int64 on the model's device.

    Attributes:
        tokens: [tokens], token ids: the new tokens of each sequence, one sequence behind the other.
        positions: [tokens], the place of each token in its sequence, from 0.
        slot_mapping: [tokens], where the token's keys and values are written: block * block_size + row; below 0:
            nowhere.
        block_tables: [n, blocks], the cache's blocks of each of n sequences in order; entries behind its last key are
            not looked at.
        seq_lens: [n], keys of each sequence, those of its new tokens included.
        cum_seq_lens_q: [n + 1], from 0 to tokens: where each sequence's new tokens begin; None: one each.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cum_seq_lens_q: Tensor | None = None

    @property
    def ends(self) -> Tensor | None:
        """[n], the last new token of each sequence; None: every token is one."""
        return None if self.cum_seq_lens_q is None else self.cum_seq_lens_q[1:] - 1
