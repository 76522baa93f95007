"""Attention over a KVCache: one product for q, k and v, one pass that rotates them and writes the cache, attention.

The ops are infini::linear, rms_norm (q and k norms), qkv_rope_cache, paged_attention and paged_attention_prefill.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .batch import Batch
from .cache import LayerCache
from .linear import Linear, rows_of
from .norm import RMSNorm
from .rotary import RotaryEmbedding


class Attention(nn.Module):
    """Causal self-attention with grouped heads.

    Args:
        size: Columns of x and y.
        heads: Query heads.
        kv_heads: Key heads, a divisor of heads.
        head_dim: Columns of a head.
        rotary: The rotation of q and k by their positions; layers share one.
        bias: Whether q, k and v have a bias.
        out_bias: Whether the output projection has a bias.
        qk_norm: The eps of RMSNorms over the heads of q and k before the rotation, as in Qwen3; None: no norms.
        window: The number of keys a query attends to, its own included; 0: all.
        format: The weights' format, as in Linear.
        dtype: The dtype of x.
        device: The weights' device.

    Attributes:
        qkv: Linear whose weight is q's, k's and v's, concatenated by rows.
        out: Linear.
        q_norm: RMSNorm, or None.
        k_norm: RMSNorm, or None.

    Source: Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models, 2023, arXiv:2305.13245; Beltagy et
    al., Longformer, 2020, arXiv:2004.05150 (the window).
    """

    def __init__(
        self,
        size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary: RotaryEmbedding,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: float | None = None,
        window: int = 0,
        format: str = "dense",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"torch_infini.nn.Attention: kv_heads must be a divisor of heads, {heads}, got {kv_heads}")
        self.heads, self.kv_heads, self.head_dim, self.window = heads, kv_heads, head_dim, window
        self.rotary = rotary
        self.qkv = Linear(size, (heads + 2 * kv_heads) * head_dim, bias, format, dtype, device)
        self.out = Linear(heads * head_dim, size, out_bias, format, dtype, device)
        self.q_norm = None if qk_norm is None else RMSNorm(head_dim, qk_norm, dtype, device)
        self.k_norm = None if qk_norm is None else RMSNorm(head_dim, qk_norm, dtype, device)

    def forward(self, x: Tensor, batch: Batch, cache: LayerCache, last: bool = False) -> Tensor:
        """Attend from new tokens to all of their sequences' tokens.

        Args:
            x: [tokens, size].
            batch: The sequences, positions and cache slots of the tokens.
            cache: Keys and values of this layer. Those of the new tokens are written first and then read back (rounded
                if they are int8), so that tokens see the same keys wherever a prompt is split.
            last: Compute only the last new token of each of the batch's n wanted sequences.

        Returns:
            [tokens, size], or [n, size] if `last`.
        """
        keys, values, *scales = cache
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            by_head = qkv.unflatten(1, (heads + 2 * kv_heads, self.head_dim))
            q, k, _ = by_head.split((heads, kv_heads, kv_heads), 1)
            self.q_norm(q, out=q)
            self.k_norm(k, out=k)
        q = qkv.new_empty(qkv.shape[0], heads, self.head_dim)
        rotary = self.rotary
        where = rotary.cos, rotary.sin, batch.positions, batch.slot_mapping
        torch.ops.infini.qkv_rope_cache.default(q, keys, values, qkv, *where, rotary.interleaved, *scales)
        y = attend(q, cache, batch, self.window, last)
        return self.out(y.flatten(1))

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, window={self.window}"


def attend(q: Tensor, cache: LayerCache, batch: Batch, window: int, last: bool = False) -> Tensor:
    """Attend from rotated queries [tokens, heads, head_dim] to the cache, in place; `last`: of last tokens only."""
    keys, values, *scales = cache
    tables, lens, starts = batch.block_tables, batch.seq_lens, batch.cum_seq_lens_q
    if last:
        q, starts = rows_of(q.flatten(1), batch.ends).view(-1, *q.shape[1:]), None
        if batch.wanted is not None:
            tables, lens = tables[batch.wanted], lens[batch.wanted]
    if starts is None:
        return torch.ops.infini.paged_attention.out(q, keys, values, tables, lens, None, None, window, *scales, out=q)
    return torch.ops.infini.paged_attention_prefill.out(
        q, keys, values, tables, lens, starts, None, None, window, *scales, out=q
    )
