"""PagedBackend: computes attention of a model's modules over a paged KV cache, for the tokens of one engine step.

Keys and values are first written to the cache, values padded to the width of keys; paged attention reads them there.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

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
        self._queries = queries_of(batch) if any(row.prompt.spans for row in batch.embedded) else None

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
        if self._queries is not None:
            return self._queries.attend(args, terms, site.window.size)
        if batch.cum_seq_lens_q is None:
            return _paged_attention(*args, *terms)
        return _paged_attention_prefill(*args, batch.cum_seq_lens_q, *terms)


class Queries(NamedTuple):
    """A batch whose tokens see later ones of their span, as sequences in which no token sees a later one.

    A token in a span is a sequence of its own, which ends with the span.

    Attributes:
        tables: [n] the row of the block tables of each sequence.
        lengths: [n] its keys.
        starts: [n + 1] its first query.
        within: (index of the token in the batch, row of the block tables, keys, keys behind the token) of each token in
            a span.
    """

    tables: Tensor
    lengths: Tensor
    starts: Tensor
    within: list[tuple[int, int, int, int]]

    def attend(self, args: tuple[Tensor, ...], terms: tuple[Any, ...], window: int) -> Tensor:
        """Compute attention of the batch; arguments of the op, and how many keys a token sees; 0: all."""
        q, keys, values, tables, _ = args
        y = _paged_attention_prefill(q, keys, values, tables[self.tables], self.lengths, self.starts, *terms)
        # What the op calls a window ends with the last key: one that is cut differs from token to token.
        cut: dict[int, list[tuple[int, int, int]]] = {}
        for token, row, length, behind in self.within:
            if 0 < window < length:
                cut.setdefault(window + behind, []).append((token, row, length))
        for size, tokens in cut.items():
            at, rows, lengths = (torch.tensor(numbers, device=q.device) for numbers in zip(*tokens, strict=True))
            mine = *terms[:2], size, *terms[3:]
            y[at] = _paged_attention(q[at], keys, values, tables[rows], lengths, *mine)
        return y


def queries_of(batch: Batch) -> Queries:
    """Return the queries of a batch in which tokens of prompts see later ones."""
    starts = torch.arange(len(batch.seq_lens) + 1) if batch.cum_seq_lens_q is None else batch.cum_seq_lens_q
    begin, lengths = starts.tolist(), batch.seq_lens.tolist()
    prompts = {row.first: row.prompt for row in batch.embedded}
    pieces: list[tuple[int, int, int]] = []  # row of the block tables, queries, keys
    within: list[tuple[int, int, int, int]] = []
    for row, length in enumerate(lengths):
        first, end = begin[row], begin[row + 1]
        place = length - (end - first)
        spans = prompts[first].spans if first in prompts else ()
        for a, b in [span for span in spans if place <= span[0] and span[1] <= length]:
            if a > place:
                pieces.append((row, a - place, a))
            for token in range(a, b):
                pieces.append((row, 1, b))
                within.append((first + token - (length - (end - first)), row, b, b - 1 - token))
            place = b
        if place < length:
            pieces.append((row, length - place, length))
    rows, counts, ends = zip(*pieces, strict=True)
    make = partial(torch.tensor, device=batch.tokens.device)
    return Queries(make(rows), make(ends), make([0, *accumulate(counts)]), within)
