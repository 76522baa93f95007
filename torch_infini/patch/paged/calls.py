"""PagedBackend: computes attention of a model's modules over a paged KV cache, for the tokens of one engine step.

Keys and values are first written to the cache, values padded to the width of keys; paged attention reads them there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...nn import Batch, KVCache, LayerCache, MixedKVCache, RotarySwitch
from ..layers.paged import ScoreTerms
from .rotation import RotationByRow
from .sites import Site, Unserved

_paged_caching = torch.ops.infini.paged_caching.default
_paged_attention = torch.ops.infini.paged_attention.default
_paged_attention_prefill = torch.ops.infini.paged_attention_prefill.default
_qkv_rope_cache = torch.ops.infini.qkv_rope_cache.default


class PagedBackend:
    """The AttentionBackend of one step.

    Args:
        sites: The attention modules, as find_sites returns them.
        batch: The step's tokens and their slots.
        cache: A result of the model's PagedModel.new_cache.
        switch: The model's RotarySwitch, or None.

    Attributes:
        positions: [tokens], the position of each token.
        rotation: How its tokens are rotated; None: all in one way.
    """

    fuses = True

    def __init__(
        self,
        sites: dict[nn.Module, Site],
        batch: Batch,
        cache: KVCache | MixedKVCache,
        switch: RotarySwitch | None = None,
    ) -> None:
        self._sites, self._batch, self._cache = sites, batch, cache
        self.rotation = None if switch is None else RotationByRow(switch, batch.positions)
        self.positions = batch.positions if self.rotation is None else self.rotation.positions
        self._rows: Tensor | None = None  # each token's row of cos and sin, which have one for each token

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: ScoreTerms
    ) -> Tensor:
        site = self._sites.get(module)
        if site is None or mask is not None:
            raise Unserved(f"{type(module).__name__} attends otherwise than in the model's first call")
        layer = self._cache.layer(site.layer)
        if site.v_dim < site.head_dim:
            v = nn.functional.pad(v, (0, site.head_dim - site.v_dim))
        keys, values, *scales = layer
        _paged_caching(keys, values, k.flatten(0, 1), v.flatten(0, 1), self._batch.slot_mapping, *scales)
        y = self._attend_blocks(q.flatten(0, 1), layer, site, scores).unsqueeze(0)
        return y if site.v_dim == site.head_dim else y[..., : site.v_dim]

    def attend_fused(
        self,
        module: nn.Module,
        qkv: Tensor,
        heads: int,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        scores: ScoreTerms,
    ) -> Tensor:
        site = self._sites[module]
        layer = self._cache.layer(site.layer)
        keys, values, *scales = layer
        tokens = qkv.shape[1]
        rows = self._rows
        if rows is None:
            rows = self._rows = torch.arange(tokens, device=qkv.device)
        q = qkv.new_empty(tokens, heads, site.head_dim)
        where = cos.flatten(0, 1), sin.flatten(0, 1), rows, self._batch.slot_mapping
        _qkv_rope_cache(q, keys, values, qkv.flatten(0, 1), *where, interleaved, *scales)
        return self._attend_blocks(q, layer, site, scores).unsqueeze(0)

    def _attend_blocks(self, q: Tensor, layer: LayerCache, site: Site, scores: ScoreTerms) -> Tensor:
        """Compute attention of q [tokens, H, D] over the cache's blocks."""
        keys, values, *scales = layer
        batch = self._batch
        args = q, keys, values, batch.block_tables, batch.seq_lens
        sinks = None if scores.sinks is None else scores.sinks.to(q.dtype)
        terms = None, scores.scale, site.window.size, *scales, scores.softcap, sinks
        if batch.cum_seq_lens_q is None:
            return _paged_attention(*args, *terms)
        return _paged_attention_prefill(*args, batch.cum_seq_lens_q, *terms)
