"""PagedBackend: computes attention of a model's modules over a paged KV cache, for the tokens of one engine step.

Keys and values are first written to the cache, values padded to the width of keys; paged attention reads them there.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from ...nn import Batch, KVCache, LayerCache, MixedKVCache, RotarySwitch
from ..layers.paged import ScoreTerms
from .rotation import RotationByRow
from .sites import Site, Sites, Unserved

_paged_caching = torch.ops.infini.paged_caching.default
_paged_attention = torch.ops.infini.paged_attention.default
_paged_attention_prefill = torch.ops.infini.paged_attention_prefill.default
_causal_conv1d = torch.ops.infini.causal_conv1d.default
_gated_delta_rule = torch.ops.infini.gated_delta_rule.default
_ssd = torch.ops.infini.ssd.default
_selective_scan = torch.ops.infini.selective_scan.default
_qkv_rope_cache = torch.ops.infini.qkv_rope_cache.default


class PagedBackend:
    """The AttentionBackend of one step.

    Args:
        sites: As find_sites returns them.
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
        sites: Sites,
        batch: Batch,
        cache: KVCache | MixedKVCache,
        switch: RotarySwitch | None = None,
    ) -> None:
        self._sites, self._batch, self._cache = sites.attention, batch, cache
        tensors = [] if cache.states is None else cache.states.tensors
        ends = accumulate(map(len, sites.states.values()))
        self._states = {
            module: iter(tensors[end - len(shapes) : end])
            for (module, shapes), end in zip(sites.states.items(), ends, strict=True)
        }
        self._starts = batch.cum_seq_lens_q
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
        if site.writes:
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

    def convolve(self, module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        state, starts, rows = self._state(module)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        _causal_conv1d(out[0], x[0], weight, bias, state, starts, rows, silu)
        return out

    def delta_rule(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm: bool
    ) -> Tensor:
        state, *where = self._state(module)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        _gated_delta_rule(out[0], q[0], k[0], v[0], g[0], beta[0], state, *where, None, l2norm)
        return out

    def ssd(
        self,
        module: nn.Module,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        dt_bias: Tensor | None,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
    ) -> Tensor:
        state, *where = self._state(module)
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _ssd(out[0], x[0], dt[0], a, b[0], c[0], d, dt_bias, state, *where, dt_softplus, *dt_limit)
        return out

    def selective_scan(
        self,
        module: nn.Module,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        dt_bias: Tensor | None,
        z: Tensor | None,
        dt_softplus: bool,
    ) -> Tensor:
        state, *where = self._state(module)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        gate = None if z is None else z[0]
        _selective_scan(out[0], x[0], dt[0], a, b[0], c[0], d, dt_bias, gate, state, *where, dt_softplus)
        return out

    def _state(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state of the module's next call, where the tokens of each sequence begin, and their rows."""
        state, rows = next(self._states.get(module, iter(())), None), self._batch.states
        if state is None or rows is None:
            raise Unserved(f"{type(module).__name__} keeps other states than in the model's first call")
        if self._starts is None:
            self._starts = torch.arange(len(rows) + 1, device=rows.device)
        return state, self._starts, rows

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
