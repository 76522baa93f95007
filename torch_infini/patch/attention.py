"""Attention of a patched model: one product for q, k and v, their norms, rotary embedding in place, the model's cache.

Heads stay where the product put them, [B, S, heads, D]; rope and attention read and write slices of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .cache import append, give, growing_layer, needs_grad, reserve, static_layer
from .conditions import dense_last, must_step_aside, place_refusal, weights_refusal
from .interface import attend
from .linear import project, project_together
from .norm import RMSNorm, is_served, normalise_
from .sharded import ShardedLinear
from .stand_in import WIDTH, linear, norm_twin, random, twin
from .swap import PLAN, Patched, Probe, Refusal, Rotary

rope_ = torch.ops.infini.rope_.default
qkv_rope_cache = torch.ops.infini.qkv_rope_cache.default

READS = ("config", "head_dim", "scaling", "layer_idx", "is_causal")
NORM_NAMES = (("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"))
# Keyword arguments that say nothing to attention, and the values of others that ask for what is done anyway.
HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache_position", "output_hidden_states", "return_dict", "num_items_in_batch"}
)
NEUTRAL = {"output_attentions": False}


class PositionEmbeddings(tuple):
    """(cos, sin) as transformers has them, each half twice, and `half`: what rope needs, sliced once for all layers."""

    _half: tuple[Tensor, Tensor] | None = None  # accelerate rebuilds tuples, and drops attributes
    _tables: tuple[tuple[int, ...], tuple[Tensor, ...]] | None = None

    @property
    def half(self) -> tuple[Tensor, Tensor]:
        if self._half is None:
            self._half = halves(self)
        return self._half

    def tables(self, batch: int, length: int, old: int | Tensor, capacity: int) -> tuple[Tensor, ...]:
        """(cos, sin, their row for each token, its slot in a cache): for all layers whose caches are alike.

        Static caches count what is in them (old) in a tensor a layer, all alike: the first one's is asked.
        """
        key = (batch, length, -1 if isinstance(old, Tensor) else old, capacity)
        if self._tables is None or self._tables[0] != key:
            cos, sin = (x.flatten(0, 1) for x in self.half)
            tokens = torch.arange(length, device=cos.device)
            sequences = torch.arange(batch, device=cos.device)[:, None]
            rows = (tokens + sequences * length * (len(cos) > length)).flatten()
            slots = (tokens + old + sequences * capacity).flatten()
            self._tables = key, (cos, sin, rows, slots)
        return self._tables[1]


def halves(position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The first halves of cos and sin."""
    cos, sin = position_embeddings
    middle = cos.shape[-1] // 2
    return cos[..., :middle], sin[..., :middle]


class RotaryEmbedding(Patched):
    """cos and sin of the positions; the numbers are the original's."""

    infini_ops = "rope (sliced once for all layers)"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if reason := place_refusal(module):
            raise Refusal(reason)
        return [None]

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        position_embeddings = super().forward(*args, **kwargs)
        if torch.compiler.is_compiling():  # a slice costs nothing there
            return position_embeddings
        return PositionEmbeddings(position_embeddings)


class AttentionPlan(NamedTuple):
    """What an attention module computes.

    Attributes:
        inputs: The layers that make q, k and v: three, or one fused.
        heads: Heads of q, and of k and v each.
        norms: The norms of q and k, or none.
        norm_first: Whether they stand before the rotary embedding.
        rope: The layout of pairs: "half" or "interleaved"; "" where positions are not embedded.
        softcap: What the scores are capped by, 0 for nothing.
    """

    inputs: tuple[str, ...]
    heads: tuple[int, int]
    norms: tuple[str, str] | None
    norm_first: bool
    rope: str
    softcap: float


def columns(name: str, layer: Any, size: int) -> int | None:
    """How many columns a projection makes here; None if it does not tell."""
    width: int | None = getattr(layer, "out_features", None)
    if not isinstance(layer, ShardedLinear) or width is None or not vars(layer)[PLAN].apart:
        return width
    ranks = vars(layer)[PLAN].ranks.size
    if width % (ranks * size):
        raise Refusal(f"the {width // size} heads of its {name} do not divide among {ranks} ranks")
    return width // ranks


def head_counts(module: nn.Module, inputs: Sequence[str], size: int) -> tuple[int, int]:
    """(heads of q, heads of k and of v), from the widths of the projections."""
    widths = [columns(name, module._modules[name], size) for name in inputs]
    if any(width is None or width % size for width in widths):
        raise Refusal(f"{', '.join(inputs)} do not tell how many heads of {size} columns they make")
    if len(widths) == 3:
        if widths[1] != widths[2]:
            raise Refusal("its keys and values have different sizes")
        return widths[0] // size, widths[1] // size
    if isinstance(child := module._modules[inputs[0]], ShardedLinear) and not vars(child)[PLAN].gathered:
        raise Refusal(f"its {inputs[0]} is cut by ranks, not by heads")
    q = getattr(module.config, "num_attention_heads", 0)
    return q, (widths[0] // size - q) // 2


class Attention(Patched):
    """Projections, norms of q and k, rotary embedding in place, the model's own cache, attention."""

    infini_ops = "fused_linear, rope, attention, linear"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        return list(cls.possible(module))

    @classmethod
    def possible(cls, module: nn.Module) -> Iterator[AttentionPlan]:
        missing = [name for name in READS if not hasattr(module, name)]
        inputs = ("qkv_proj",) if "qkv_proj" in module._modules else ("q_proj", "k_proj", "v_proj")
        missing += [name for name in (*inputs, "o_proj") if name not in module._modules]
        if missing:
            raise Refusal(f"it lacks what attention has in the Llama family: {', '.join(missing)}")
        norms = next((pair for pair in NORM_NAMES if module._modules.keys() >= set(pair)), None)
        more = module._modules.keys() - {*inputs, "o_proj", *(norms or ())}
        more |= {name for name, p in module._parameters.items() if p is not None}
        if more:
            raise Refusal(f"it has parts that are not known: {', '.join(sorted(more))}")
        for name in norms or ():
            if not isinstance(module._modules[name], RMSNorm):
                raise Refusal(f"its {name} was left")
        if getattr(module.config, "output_attentions", False):
            raise Refusal("config.output_attentions is set, and the kernel stores no attention weights")
        if reason := weights_refusal(module, *inputs, "o_proj"):
            raise Refusal(reason)
        heads = head_counts(module, inputs, module.head_dim)
        cap = getattr(module, "attn_logit_softcapping", None) or 0.0
        for rope in ("half", "interleaved", ""):
            for norm_first in (True, False) if norms and rope else (True,):
                yield AttentionPlan(inputs, heads, norms, norm_first, rope, cap)

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        plan: AttentionPlan = cls.plans(module)[0]
        size, (q, kv) = module.head_dim, plan.heads
        widths = dict(
            zip(plan.inputs, (q * size, kv * size, kv * size) if len(plan.inputs) == 3 else ((q + 2 * kv) * size,))
        )
        modules = {}
        for seed, (name, child) in enumerate(module._modules.items()):
            if name in widths:
                modules[name] = linear(widths[name], WIDTH, True, seed)
            elif name == "o_proj":
                modules[name] = linear(WIDTH, q * size, True, seed)
            else:
                modules[name] = norm_twin(child, seed)
        mask = torch.full((3, 3), torch.finfo(torch.float32).min, device="cpu").triu(1).expand(2, 1, 3, 3)
        kwargs = {
            "hidden_states": random(2, 3, WIDTH),
            "position_embeddings": rotary(random(2, 3, WIDTH), torch.arange(3, device="cpu").unsqueeze(0)),
            "attention_mask": mask,
            # Far positions and all the same: they must have no effect but through cos and sin.
            "position_ids": torch.tensor([[0, 100_003, 50_000_017]], device="cpu"),
        }
        small = twin(module, modules=modules)
        vars(small)["config"] = config = copy(module.config)
        config._attn_implementation_internal = "eager"  # the one that knows all: SDPA has no cap
        return Probe(small, (), kwargs, 1e-4)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        aside = must_step_aside(self, hidden_states) or needs_grad(past_key_values)
        if aside:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        return self.compute(dense_last(hidden_states), position_embeddings, attention_mask, past_key_values, **kwargs)

    def compute(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """forward, for a caller that knows that nothing but the arguments asks to step aside."""
        if (
            (self.training and getattr(self, "attention_dropout", 0))
            or any(
                value is not None and value is not NEUTRAL.get(name)
                for name, value in kwargs.items()
                if name not in HARMLESS
            )
            or not (attention_mask is None or (isinstance(attention_mask, Tensor) and attention_mask.dim() == 4))
        ):
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        plan: AttentionPlan = self.__dict__["_infini_plan"]
        batch, length, _ = hidden_states.shape
        shape = (batch, length, -1, self.head_dim)
        q_heads, kv_heads = plan.heads
        inputs = [self._modules[name] for name in plan.inputs]
        fused = project(hidden_states, inputs[0]) if len(inputs) == 1 else project_together(hidden_states, *inputs)
        written = None
        in_one_pass = past_key_values is not None and plan.rope and (plan.norm_first or not plan.norms)
        if fused is not None and in_one_pass:
            written = self.rotate_into_cache(plan, fused, position_embeddings, past_key_values)
        if written is not None:
            q, k, v = written
        else:
            if fused is not None:
                fused = fused.view(shape)
                q, k, v = fused.split((q_heads, kv_heads, kv_heads), 2)
            else:
                q, k, v = (project(hidden_states, module).view(shape) for module in inputs)
            if plan.norms and plan.norm_first:
                self.normalise_heads(q, k, plan.norms)
            if plan.rope:
                self.rotate(plan, q, k, fused, position_embeddings)
            if plan.norms and not plan.norm_first:
                self.normalise_heads(q, k, plan.norms)
            if past_key_values is not None:
                k, v = append(past_key_values, self.layer_idx, k, v)
        y = attend(q, k, v, attention_mask, self.scaling, self.is_causal, plan.softcap)
        return project(y.view(batch, length, -1), self._modules["o_proj"]), None

    def rotate(self, plan: AttentionPlan, q: Tensor, k: Tensor, fused: Tensor | None, cos_and_sin: Any) -> None:
        """The rotary embedding of q and k in place, in one call where they lie side by side."""
        cos, sin = cos_and_sin.half if type(cos_and_sin) is PositionEmbeddings else halves(cos_and_sin)
        both = (q, k) if fused is None else (fused.narrow(2, 0, sum(plan.heads)),)
        for x in both:
            rope_(x, cos, sin, None, plan.rope == "interleaved")

    def rotate_into_cache(
        self, plan: AttentionPlan, fused: Tensor, cos_and_sin: Any, cache: Any
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rotate q into a tensor of its own, k into the cache, and write v there: in one pass over the fused product.

        (q, all keys, all values), or None for a cache of which that cannot be done. A cache [B, heads, T, D] is what
        the op calls a paged one, with a block for each sequence.
        """
        if type(cos_and_sin) is not PositionEmbeddings:
            return None
        batch, length, width = fused.shape
        heads, kv_heads = plan.heads
        size = self.head_dim
        growing, room = growing_layer(cache, self.layer_idx), None
        static = None if growing else static_layer(cache, self.layer_idx, fused, batch, kv_heads, size)
        if growing is not None:
            room = reserve(growing, fused, batch, length, kv_heads, size)
            if room is None:
                return None
            keys, values, old = room.keys, room.values, room.length
        elif static is not None:
            keys, values, old = static.keys, static.values, static.cumulative_length
        else:
            return None
        if plan.norms:
            q, k, _ = fused.view(batch, length, -1, size).split((heads, kv_heads, kv_heads), 2)
            self.normalise_heads(q, k, plan.norms)
        cos, sin, rows, slots = cos_and_sin.tables(batch, length, old, keys.shape[2])
        q = fused.new_empty((batch * length, heads, size))
        qkv = fused.view(batch * length, width)
        qkv_rope_cache(q, keys, values, qkv, cos, sin, rows, slots, plan.rope == "interleaved")
        if static is not None:
            static.cumulative_length.add_(length)
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        else:
            keys, values = give(growing, room, room.length + length)
        return q.view(batch, length, heads, size), keys, values

    def normalise_heads(self, q: Tensor, k: Tensor, names: tuple[str, str]) -> None:
        """The norms of q and k in place: of each head, or of all heads of a token as one row."""
        for x, name in zip((q, k), names):
            norm = self._modules[name]
            row = x if norm._parameters["weight"].numel() == x.shape[-1] else x.flatten(2)
            if is_served(norm):
                normalise_(row, norm)
            else:
                row.copy_(norm(row))
