"""Attention of a patched model: one product for q, k and v, their norms, rotary embedding in place, the model's cache.

The product keeps its layout [B, S, heads, D]; rope and attention read and write slices of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ...ops.rms_norm import ROUNDINGS
from ..checks.conditions import dense_last, unsupported_placement, unsupported_weights
from ..checks.probe import (
    HALF,
    LENGTHS,
    SIZES,
    WIDTH,
    linear,
    norm_probe,
    probe_module,
    random,
    scaled,
    tokens,
    with_nan,
)
from ..own_forward import CACHE, CACHE_NAMES, PAST, arguments_of, cache_of, forwards_of, with_parameter
from ..swap import PLAN, Parameters, Patched, Probe, ProbeCall, Rotary, Unsupported
from .cache import append, needs_grad, reserve, static_layer
from .interface import attend
from .linear import Product, fused_product, product_of, writable_product_of
from .norm import RMSNorm, is_served, normalize_
from .paged import CURRENT, AttentionBackend, ScoreTerms
from .sharded import ShardedLinear
from .ways import Dispatch, cached_dispatch, guards_of

rope_ = torch.ops.infini.rope_.default
qkv_rope_cache = torch.ops.infini.qkv_rope_cache.default

READS = ("config", "head_dim", "scaling", "layer_idx", "is_causal")
NORM_NAMES = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
# Keyword arguments that do not affect attention, and values of others that ask for the default.
HARMLESS = frozenset(
    {
        "position_ids",
        "use_cache",
        "cache_position",
        "output_hidden_states",
        "output_router_logits",
        "logits_to_keep",
        "return_dict",
        "num_items_in_batch",
    }
)
NEUTRAL = {"output_attentions": False}
ARGUMENTS = ("position_embeddings", "attention_mask")  # of a forward, between the hidden states and the cache


class PositionEmbeddings(tuple[Tensor, Tensor]):
    """(cos, sin) as in transformers, with duplicated halves, and values computed from them once for all layers.

    Attributes:
        half: The first halves, which rope reads.
        tables: A key and the result of `tables_for`; layers with equal caches share them.
    """

    # None if missing: accelerate rebuilds tuples without their attributes.
    half: tuple[Tensor, Tensor] | None = None
    tables: tuple[tuple[Any, ...], tuple[Tensor, ...]] | None = None


def tables_for(
    embeddings: PositionEmbeddings, batch: int, length: int, old: int | Tensor, capacity: int
) -> tuple[Tensor, ...]:
    """Return (cos, sin, table row of each token, cache slot of each token).

    Static caches count their tokens (old) in one tensor a layer; all are equal, so the first layer's is used.
    """
    cos, sin = embeddings.half or halves(embeddings)
    cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    tokens = torch.arange(length, device=cos.device)
    sequences = torch.arange(batch, device=cos.device)[:, None]
    rows = (tokens + sequences * length * (len(cos) > length)).flatten()
    slots = (tokens + old + sequences * capacity).flatten()
    return cos, sin, rows, slots


def halves(position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = position_embeddings
    middle = cos.shape[-1] // 2
    return cos[..., :middle], sin[..., :middle]


def causal_mask(length: int, total: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an additive mask [length, total]; the queries are the last `length` tokens."""
    return torch.full((length, total), torch.finfo(dtype).min, dtype=dtype, device="cpu").triu(1 + total - length)


def halves_of(result: Any) -> tuple[Tensor, Tensor] | None:
    """Return the halves of a rotary embedding's result; None unless it is two real tensors of equal shape.

    Some embeddings return complex numbers.
    """
    if type(result) is not tuple or len(result) != 2:
        return None
    cos, sin = result
    if not isinstance(cos, Tensor) or not isinstance(sin, Tensor) or cos.shape != sin.shape:
        return None
    if not cos.is_floating_point() or not sin.is_floating_point():
        return None
    middle = cos.shape[-1] // 2
    return cos[..., :middle], sin[..., :middle]


class RotaryEmbedding(Patched):
    """cos and sin of the positions, computed by the original forward."""

    infini_ops = "rope (sliced once for all layers)"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if reason := unsupported_placement(module):
            raise Unsupported(reason)
        return [None]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> None:
        result = rotary(random(2, 3, WIDTH), torch.arange(3, device="cpu").unsqueeze(0))
        if halves_of(result) is None:
            raise Unsupported("its forward does not return cos and sin")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        position_embeddings = super().forward(*args, **kwargs)
        # While compiling, a slice costs nothing.
        half = None if torch.compiler.is_compiling() else halves_of(position_embeddings)
        if half is None:
            return position_embeddings
        embeddings = PositionEmbeddings(position_embeddings)
        embeddings.half = half
        return embeddings


class AttentionPlan(NamedTuple):
    """What an attention module computes.

    Attributes:
        inputs: The layers that compute q, k and v: three, or one fused.
        heads: Heads of q, and of k and v each.
        norms: The norms of q and k, or none.
        norm_first: Whether the norms come before the rotary embedding.
        rope: The layout of pairs: "half" or "interleaved"; "" for no rotary embedding.
        softcap: The cap of the scores; 0: none.
    """

    inputs: tuple[str, ...]
    heads: tuple[int, int]
    norms: tuple[str, str] | None
    norm_first: bool
    rope: str
    softcap: float

    @property
    def qkv(self) -> tuple[int, int, int]:
        """Heads of q, of k and of v."""
        return *self.heads, self.heads[1]


@dataclass(frozen=True, eq=False)
class AttentionDispatch(Dispatch):
    """How an attention module computes its submodules.

    Attributes:
        norms_served: Whether the norms of q and k, if there are any, need not be called.
        fused: Computes q, k and v in one new tensor, or returns None.
        q_and_k: Compute q and k in new tensors.
        v: Computes v.
        output: Computes o_proj.
    """

    norms_served: bool
    fused: Callable[[Tensor], Tensor | None] | None
    q_and_k: tuple[Product, ...]
    v: Product
    output: Product


def columns(name: str, layer: Any, size: int) -> int | None:
    """Return how many columns a projection has on this rank; None if unknown."""
    width: int | None = getattr(layer, "out_features", None)
    if not isinstance(layer, ShardedLinear) or width is None or not vars(layer)[PLAN].keeps_local:
        return width
    ranks = vars(layer)[PLAN].tp_group.size
    if width % (ranks * size):
        raise Unsupported(f"the {width // size} heads of its {name} cannot be divided among {ranks} ranks")
    return width // ranks


def head_counts(module: Any, inputs: Sequence[str], size: int) -> tuple[int, int]:
    """Return (heads of q, heads of k and of v), from the widths of the projections."""
    found = [columns(name, module._modules[name], size) for name in inputs]
    widths = [width for width in found if width is not None and width % size == 0]
    if len(widths) < len(inputs):
        raise Unsupported(f"the widths of {', '.join(inputs)} are unknown or not multiples of the head size {size}")
    if len(widths) == 3:
        if widths[1] != widths[2]:
            raise Unsupported("its keys and values have different sizes")
        return widths[0] // size, widths[1] // size
    if isinstance(child := module._modules[inputs[0]], ShardedLinear) and not vars(child)[PLAN].gathered:
        raise Unsupported(f"its {inputs[0]} is sharded by ranks, not by heads")
    q = getattr(module.config, "num_attention_heads", 0)
    return q, (widths[0] // size - q) // 2


class Attention(Patched):
    """Projections, norms of q and k, rotary embedding in place, the model's own cache, attention."""

    infini_ops = "fused_linear, rope, attention, linear"
    head_dim: int
    layer_idx: int
    scaling: float
    is_causal: bool
    infini_arguments: ClassVar[tuple[str, ...]]  # ARGUMENTS and the cache's, as the original's forward takes them
    infini_forward: ClassVar[Callable[..., Any]]  # forward, with the original's name of the cache

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "infini_original" not in vars(cls):
            return
        name, taken = cache_of(cls.infini_original), arguments_of(forwards_of(cls.infini_original)[-1])
        cls.infini_arguments = (*(each for each in ARGUMENTS if each in taken), *([name] if name else []))
        if name == CACHE:
            own: Any = cls  # whose methods are assigned
            own.forward, own.compute = (
                with_parameter(own.forward, PAST, CACHE),
                with_parameter(own.compute, PAST, CACHE),
            )
        cls.infini_forward = cls.forward

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        return list(cls.possible(module))

    @classmethod
    def possible(cls, module: Any) -> Iterator[AttentionPlan]:
        missing = [name for name in READS if not hasattr(module, name)]
        inputs = ("qkv_proj",) if "qkv_proj" in module._modules else ("q_proj", "k_proj", "v_proj")
        missing += [name for name in (*inputs, "o_proj") if name not in module._modules]
        if missing:
            raise Unsupported(f"it lacks attributes or submodules of Llama attention: {', '.join(missing)}")
        if not cache_of(module):
            known, got = " or ".join(CACHE_NAMES), ", ".join(arguments_of(forwards_of(module)[-1]))
            raise Unsupported(f"its forward must have an argument {known}, got ({got})")
        norms = next((pair for pair in NORM_NAMES if module._modules.keys() >= set(pair)), None)
        more = module._modules.keys() - {*inputs, "o_proj", *(norms or ())}
        more |= {name for name, p in module._parameters.items() if p is not None}
        if more:
            raise Unsupported(f"it has unknown parameters or submodules: {', '.join(sorted(more))}")
        for name in norms or ():
            if not isinstance(module._modules[name], RMSNorm):
                raise Unsupported(f"its {name} was left unpatched")
        if getattr(module.config, "output_attentions", False):
            raise Unsupported("config.output_attentions is set, but the kernel stores no attention weights")
        if reason := unsupported_weights(module, *inputs, "o_proj"):
            raise Unsupported(reason)
        heads = head_counts(module, inputs, module.head_dim)
        cap = getattr(module, "attn_logit_softcapping", None) or 0.0
        for rope in ("half", "interleaved", ""):
            for norm_first in (True, False) if norms and rope else (True,):
                yield AttentionPlan(inputs, heads, norms, norm_first, rope, cap)

    @classmethod
    def probe(cls, module: Any, rotary: Rotary) -> Probe:
        plan: AttentionPlan = cls.plans(module)[0]
        size, q = module.head_dim, plan.heads[0]
        whole: Sequence[int] = [sum(plan.qkv)] if len(plan.inputs) == 1 else plan.qkv
        widths = {name: heads * size for name, heads in zip(plan.inputs, whole, strict=True)}
        modules: dict[str, nn.Module] = {}
        for seed, (name, child) in enumerate(module._modules.items()):
            if name in widths:
                modules[name] = linear(widths[name], WIDTH, seed)
            elif name == "o_proj":
                modules[name] = linear(WIDTH, q * size, seed)
            else:
                modules[name] = norm_probe(child, seed)
        small = probe_module(module, modules=modules)
        return Probe(small, lambda: cls.calls(small, plan, rotary))

    @staticmethod
    def calls(small: Any, plan: AttentionPlan, rotary: Rotary) -> Iterator[ProbeCall]:
        config, name = small.config, cache_of(small)
        configs = {kind: copy(config) for kind in ("eager", "sdpa")}
        for kind, other in configs.items():
            other._attn_implementation_internal = kind

        def inner(x: float, q: float, k: float, v: float) -> Parameters:
            """Return parameters that give q, k and v these magnitudes, also after norms, for x of magnitude `x`."""
            parts = [
                torch.full((heads * small.head_dim,), float(size), dtype=torch.float32, device="cpu")
                for heads, size in zip(plan.qkv, (q, k, v))
            ]
            parts = [torch.cat(parts)] if len(plan.inputs) == 1 else parts
            given = {
                name: scaled(small._modules[name], size / x, size)
                for name, size in zip(plan.inputs, parts, strict=True)
            }
            for name, size in zip(plan.norms or (), (q, k)):
                norm = small._modules[name]
                offset = 1 if vars(norm)[PLAN].rounding == ROUNDINGS["gemma"] else 0
                given[name] = {"weight": (norm._parameters["weight"] + offset) * size - offset}
            return given

        def call(
            when: str,
            batch: int = 2,
            lengths: tuple[int, ...] = (3,),
            sizes: tuple[float, ...] = (1, 1, 1, 1),
            tolerance: float = 1e-4,
            dtype: torch.dtype = torch.float32,
            change: Callable[[Tensor], Tensor] = lambda x: x,
            masked: bool = True,
            **more: Any,
        ) -> ProbeCall:
            """Return one call; with several lengths, one forward for each, on one cache."""

            def run(forward: Callable[..., Any]) -> Any:
                cache, start = (DynamicCache() if len(lengths) > 1 else None), 0
                for length in lengths:
                    positions = torch.arange(start, start + length, device="cpu").unsqueeze(0)
                    x = change(random(batch, length, WIDTH)).mul(sizes[0]).to(dtype, copy=True)
                    start += length
                    mask = causal_mask(length, start, dtype).expand(batch, 1, length, start) if masked else None
                    arguments = {
                        "hidden_states": x,
                        "position_embeddings": rotary(x, positions),
                        "attention_mask": mask,
                        "position_ids": positions,
                    }
                    result = forward(**{**arguments, **more}, **({} if cache is None else {name: cache}))
                return result

            attributes = {"config": configs["eager" if masked else "sdpa"]}
            return ProbeCall(when, run, HALF.get(dtype, tolerance), inner(*sizes), attributes, dtype)

        # Far positions: they may have no effect except through cos and sin.
        yield call("", position_ids=torch.tensor([[0, 100_003, 50_000_017]], device="cpu"))
        for length in LENGTHS:
            yield call(f"for {tokens(length)}", 1, (length,))
        for size in SIZES:
            yield call(f"for hidden states of about {size:g}", sizes=(size, 1, 1, 1))
            if size < 1:
                yield call(f"for numbers of about {size:g}", sizes=(size, size, size, size))
                continue
            # Scores stay of about 1, so that the softmax is as exact as for small numbers.
            yield call(f"for queries and values of about {size:g}", sizes=(size, size, 1 / size, size))
            yield call(f"for keys of about {size:g}", sizes=(1, 1 / size, size, 1))
        for size in (30.0, 1e3, 1e4):
            # Rounding of large scores moves the softmax where two are close; a clamp makes many equal.
            root = size**0.5
            yield call(f"for scores of about {size:g}", 1, (40,), (1, root, root, 1), min(0.1, 1e-4 * size))
        for dtype in HALF:
            yield call(f"in {str(dtype).removeprefix('torch.')}", dtype=dtype)
        yield call("for hidden states with NaN", change=with_nan)
        yield call("with a cache", lengths=(4, 1))
        # Without a mask, eager attention is not causal; SDPA, which has no softcap, is.
        if not plan.softcap and config._attn_implementation not in ("eager", None):
            yield call("without a mask", masked=False)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        dispatch: AttentionDispatch | None = cached_dispatch(self, hidden_states)
        if dispatch is None or needs_grad(past_key_values):
            return self.by_original(hidden_states, position_embeddings, attention_mask, past_key_values, kwargs)
        x = dense_last(hidden_states)
        return self.compute(dispatch, x, position_embeddings, attention_mask, past_key_values, **kwargs)

    def by_original(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None,
        attention_mask: Tensor | None,
        cache: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the original's forward with arguments by its names."""
        values = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
        given = {name: values.get(name, cache) for name in self.infini_arguments}
        if cache is None and PAST in kwargs:  # the older name, which the original translates
            del given[CACHE]
        return super().forward(hidden_states, **given, **kwargs)

    def make_dispatch(self) -> AttentionDispatch:
        """Determine the dispatch, which `cached_dispatch` keeps."""
        plan: AttentionPlan = self.__dict__[PLAN]
        modules = self._modules
        names, norms = plan.inputs, plan.norms or ()
        inputs = [modules[name] for name in names]
        last = product_of(modules["o_proj"])
        return AttentionDispatch(
            modules,
            tuple(guards_of(modules, (*names, *norms, "o_proj"))),
            last is not None and all(product_of(module) is not None for module in inputs),
            all(is_served(modules[name]) for name in norms),
            fused_product(inputs) if len(inputs) > 1 else writable_product_of(inputs[0]),
            # In new tensors, because norms and rope write to q and k.
            tuple(writable_product_of(module) for module in inputs[:2]),
            product_of(inputs[-1]) or inputs[-1],
            last or modules["o_proj"],
        )

    def compute(
        self,
        dispatch: AttentionDispatch,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute forward for a caller that has already ruled out a fallback, except for these arguments."""
        # Hooks on the norms of q and k must see the original's shapes.
        served = dispatch.norms_served and not (self.training and getattr(self, "attention_dropout", False))
        for name, value in kwargs.items():
            if value is not None and name not in HARMLESS and value is not NEUTRAL.get(name):
                served = False
        if not served or not (
            attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 4)
        ):
            return self.by_original(hidden_states, position_embeddings, attention_mask, past_key_values, kwargs)
        plan: AttentionPlan = self.__dict__[PLAN]
        batch, length, _ = hidden_states.shape
        fused = None if dispatch.fused is None else dispatch.fused(hidden_states)
        backend = CURRENT.backend
        if backend is not None:
            y = self.attend_for(backend, plan, dispatch, hidden_states, fused, position_embeddings, attention_mask)
        else:
            written = None
            if fused is not None and past_key_values is not None and plan.rope and (plan.norm_first or not plan.norms):
                written = self.rotate_into_cache(plan, fused, position_embeddings, past_key_values)
            if written is not None:
                q, k, v = written
            else:
                q, k, v = self.project(plan, dispatch, hidden_states, fused, position_embeddings)
                if past_key_values is not None:
                    k, v = append(past_key_values, self.layer_idx, k, v)
            y = attend(q, k, v, attention_mask, self.scaling, self.is_causal, plan.softcap)
        if not dispatch.closed:
            dispatch = cached_dispatch(self, hidden_states) or dispatch
        return dispatch.output(y.view(batch, length, -1)), None

    def project(
        self,
        plan: AttentionPlan,
        dispatch: AttentionDispatch,
        hidden_states: Tensor,
        fused: Tensor | None,
        position_embeddings: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v [B, S, heads, D] with their norms and rotation; `fused`: their product, if there is one."""
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q_heads, kv_heads = plan.heads
        if fused is not None:
            fused = fused.view(shape)
            q, k, v = fused.split((q_heads, kv_heads, kv_heads), 2)
        else:
            to_q, to_k = dispatch.q_and_k
            q, k = to_q(hidden_states).view(shape), to_k(hidden_states).view(shape)
            v = dispatch.v(hidden_states).view(shape)
        if plan.norms and plan.norm_first:
            self.normalize_heads(q, k, plan.norms)
        if plan.rope:
            self.rotate(plan, q, k, fused, position_embeddings)
        if plan.norms and not plan.norm_first:
            self.normalize_heads(q, k, plan.norms)
        return q, k, v

    def attend_for(
        self,
        backend: AttentionBackend,
        plan: AttentionPlan,
        dispatch: AttentionDispatch,
        hidden_states: Tensor,
        fused: Tensor | None,
        position_embeddings: Any,
        mask: Tensor | None,
    ) -> Tensor:
        """Let an AttentionBackend compute attention; from the fused product in one pass if it can."""
        scores = ScoreTerms(self.scaling, plan.softcap, None, self.is_causal)
        if backend.fuses and mask is None and fused is not None and plan.rope and (plan.norm_first or not plan.norms):
            if plan.norms:
                q, k, _ = fused.unflatten(2, (-1, self.head_dim)).split(plan.qkv, 2)
                self.normalize_heads(q, k, plan.norms)
            half = position_embeddings.half if type(position_embeddings) is PositionEmbeddings else None
            cos, sin = half or halves(position_embeddings)
            return backend.attend_fused(self, fused, plan.heads[0], cos, sin, plan.rope == "interleaved", scores)
        q, k, v = self.project(plan, dispatch, hidden_states, fused, position_embeddings)
        return backend.attend(self, q, k, v, mask, scores)

    def rotate(self, plan: AttentionPlan, q: Tensor, k: Tensor, fused: Tensor | None, cos_and_sin: Any) -> None:
        """Apply the rotary embedding to q and k in place, in one call where they are adjacent in memory."""
        half = cos_and_sin.half if type(cos_and_sin) is PositionEmbeddings else None
        cos, sin = half or halves(cos_and_sin)
        both = (q, k) if fused is None else (fused.narrow(2, 0, sum(plan.heads)),)
        for x in both:
            rope_(x, cos, sin, None, plan.rope == "interleaved")

    def rotate_into_cache(
        self, plan: AttentionPlan, fused: Tensor, cos_and_sin: Any, cache: Any
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rotate q into a new tensor and k into the cache, and copy v to the cache, in one pass over the fused product.

        Returns (q, all keys, all values), or None for a cache that does not allow it. For the op, a cache
        [B, heads, T, D] is a paged cache with one block for each sequence.
        """
        if type(cos_and_sin) is not PositionEmbeddings:
            return None
        batch, length, width = fused.shape
        heads, kv_heads = plan.heads
        size = self.head_dim
        grown, static = reserve(cache, self.layer_idx, fused, batch, length, kv_heads, size), None
        keys: Tensor | None
        values: Tensor | None
        old: int | Tensor
        if grown is not None:
            keys, values, old = grown.keys, grown.values, grown.length
        else:
            static = static_layer(cache, self.layer_idx, fused, batch, kv_heads, size)
            if static is None:
                return None
            keys, values, old = static.keys, static.values, static.cumulative_length
        assert keys is not None and values is not None
        if plan.norms:
            q, k, _ = fused.view(batch, length, -1, size).split((heads, kv_heads, kv_heads), 2)
            self.normalize_heads(q, k, plan.norms)
        tables = cos_and_sin.tables
        key = (batch, length, -1 if static is not None else old, keys.shape[2])
        if tables is None or tables[0] != key:
            tables = cos_and_sin.tables = key, tables_for(cos_and_sin, batch, length, old, keys.shape[2])
        cos, sin, rows, slots = tables[1]
        q = fused.new_empty((batch * length, heads, size))
        qkv = fused.view(batch * length, width)
        qkv_rope_cache(q, keys, values, qkv, cos, sin, rows, slots, plan.rope == "interleaved")
        if grown is not None:
            keys, values = grown.commit(length)
        elif static is not None:
            static.cumulative_length.add_(length)
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        return q.view(batch, length, heads, size), keys, values

    def normalize_heads(self, q: Tensor, k: Tensor, names: tuple[str, str]) -> None:
        """Apply the norms of q and k in place: to each head, or to all heads of a token as one row."""
        for x, name in zip((q, k), names):
            norm = self._modules[name]
            normalize_(x if norm._parameters["weight"].numel() == x.shape[-1] else x.flatten(2), norm)
