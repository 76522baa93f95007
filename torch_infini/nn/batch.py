"""Batch: the input of a forward pass: tokens of one or more sequences, and where their keys and values are.

Prefill, chunked prefill, decode and mixtures of them have one layout: the tokens of all sequences, concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .embedded_prompt import EmbeddedRows


@dataclass(frozen=True)
class Batch:
    """The inputs of a model's forward pass; all tensors are int64 on the model's device.

    Attributes:
        tokens: [tokens], the ids of the new tokens of each sequence, concatenated.
        positions: [tokens], the position of each token in its sequence, from 0; of a model with a RotarySwitch the row
            that stands for it.
        slot_mapping: [tokens], the slot that each token's keys and values are written to, block * block_size + row;
            negative: not written.
        block_tables: [n, blocks], the cache blocks of each of n sequences in order; entries after the last key are not
            read.
        seq_lens: [n], the number of keys of each sequence, new tokens included.
        cum_seq_lens_q: [n + 1], from 0 to tokens, the index of each sequence's first new token; None: one token each.
        wanted: [m], the sequences whose results a model computes for `last`; None: all.
        adapters: [tokens], the slot of each token's adapter (lora.py), negative: none; None: no token has one.
        states: [n], the row of each sequence's state (SequenceStates), all different; None: the model keeps none.
        embedded: The rows that are tokens of prompts with images.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    cum_seq_lens_q: Tensor | None = None
    wanted: Tensor | None = None
    adapters: Tensor | None = None
    states: Tensor | None = None
    embedded: tuple[EmbeddedRows, ...] = ()

    @property
    def ends(self) -> Tensor | None:
        """[n] or [m], the index of the last new token of each wanted sequence; None: every token is wanted."""
        if self.cum_seq_lens_q is None:
            return self.wanted
        ends = self.cum_seq_lens_q[1:] - 1
        return ends if self.wanted is None else ends[self.wanted]
