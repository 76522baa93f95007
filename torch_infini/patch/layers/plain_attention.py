"""Attention that computes all in its own forward, as BERT's and BART's did before transformers' attention interface.

Attention to the tokens themselves is computed here; attention to an encoder's by the module's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache

from ..checks.conditions import needs_fallback, unsupported_placement
from ..checks.probe import HALF, LENGTHS, SIZES, linear, probe_module, random, scaled, tokens, with_nan
from ..own_forward import arguments_of, cache_name, original_of
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary, Unsupported
from .attention import causal_mask
from .cache import needs_grad
from .interface import attend
from .paged import CURRENT, ScoreTerms

PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
HEADS, SIZE = ("num_heads", "num_attention_heads"), ("head_dim", "attention_head_size")
WIDTHS = ("embed_dim", "all_head_size")  # attributes with the columns of all heads
_HEADS = 2  # of a probe module
# Arguments of forward: those that are used; those for which the original's forward runs, if one is given; the rest.
STATES, MASK = "hidden_states", "attention_mask"  # and the cache
RARE = frozenset({"key_value_states", "encoder_hidden_states", "encoder_attention_mask", "output_attentions"})
RARE |= {"attn_prompt", "pixel_values_present", "kwargs"}
HARMLESS = frozenset({"cache_position", "use_cache", "position_ids", "layer_head_mask", "head_mask"})


class PlainPlan(NamedTuple):
    """The names of the projections of q, k and v, of the last one ("": none), of the head size, of the arguments, and
    of the one that is the cache.
    """

    inputs: tuple[str, str, str]
    output: str
    size: str
    arguments: tuple[str, ...]
    cache: str


def name_of(module: nn.Module, names: Sequence[str]) -> str:
    """Return which of these attributes is a number."""
    return next((name for name in names if type(vars(module).get(name)) is int), "")


def is_plain_attention(module: nn.Module) -> bool:
    """Return whether a module has the projections and numbers of such attention, and no other parts."""
    inputs = next((names for names in PROJECTIONS if module._modules.keys() >= set(names)), ())
    others = [child for name, child in module._modules.items() if name not in (*inputs, "out_proj")]
    forward = original_of(module).forward
    return (
        bool(inputs and name_of(module, HEADS) and name_of(module, SIZE))
        and not any(parameter is not None for parameter in module._parameters.values())
        and all(isinstance(child, nn.Dropout) for child in others)
        and set(arguments_of(forward)) >= {STATES, MASK, cache_name(forward)}
    )


class PlainAttention(Patched):
    """softmax(q k^T / sqrt(D) + mask) v between the module's projections, with the model's own cache."""

    infini_ops = "attention"
    layer_idx: int

    @classmethod
    def plans(cls, module: Any) -> Sequence[Any]:
        if not is_plain_attention(module):
            raise Unsupported("it is not built like BERT's or BART's attention")
        if reason := unsupported_placement(module):
            raise Unsupported(reason)
        if getattr(getattr(module, "config", None), "output_attentions", False):
            raise Unsupported("config.output_attentions is set, but the kernel stores no attention weights")
        inputs = next(names for names in PROJECTIONS if module._modules.keys() >= set(names))
        output = "out_proj" if "out_proj" in module._modules else ""
        original = original_of(module)
        arguments, cache = tuple(arguments_of(original.forward)), cache_name(original.forward)
        if more := set(arguments) - {STATES, MASK, cache} - RARE - HARMLESS:
            raise Unsupported(f"its forward takes more than hidden states, mask and cache: {', '.join(sorted(more))}")
        return [PlainPlan(inputs, output, name_of(module, SIZE), arguments, cache)]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        plan: PlainPlan = cls.plans(module)[0]
        width = _HEADS * vars(module)[plan.size]
        modules: dict[str, nn.Module | None] = {}
        for seed, (name, child) in enumerate(module._modules.items()):
            modules[name] = child if isinstance(child, nn.Dropout) else linear(width, width, seed)
        small = probe_module(module, modules=modules)
        for name in (*HEADS, *WIDTHS):
            if name in vars(small):
                vars(small)[name] = _HEADS if name in HEADS else width
        return Probe(small, lambda: cls.calls(small, plan, width))

    @staticmethod
    def calls(small: nn.Module, plan: PlainPlan, width: int) -> Iterator[ProbeCall]:
        def call(
            when: str,
            lengths: tuple[int, ...] = (3,),
            size: float = 1.0,
            inside: float = 1.0,
            dtype: torch.dtype = torch.float32,
            change: Callable[[Tensor], Tensor] = lambda x: x,
            masked: bool = True,
            tolerance: float = 1e-4,
        ) -> ProbeCall:
            """Return a call with x of magnitude `size`, and q, k and v of `inside`; several lengths: one cache."""

            def run(forward: Callable[..., Any]) -> Any:
                cache, start, result = (DynamicCache() if len(lengths) > 1 else None), 0, None
                for length in lengths:
                    x = change(random(2, length, width)).mul(size).to(dtype, copy=True)
                    start += length
                    mask = causal_mask(length, start, dtype).expand(2, 1, length, start) if masked else None
                    result = forward(x, attention_mask=mask, **{plan.cache: cache})
                return result

            given = {name: scaled(small._modules[name], inside / size, inside) for name in plan.inputs}
            return ProbeCall(when, run, HALF.get(dtype, tolerance), given, dtype=dtype)

        yield call("")
        for length in LENGTHS:
            yield call(f"for {tokens(length)}", (length,))
        for size in SIZES:
            yield call(f"for hidden states of about {size:g}", size=size)
        yield call("for queries, keys and values of about 0.01", inside=1e-2)
        yield call("for scores of about 30", inside=30**0.5, tolerance=3e-3)
        for dtype in HALF:
            yield call(f"in {str(dtype).removeprefix('torch.')}", dtype=dtype)
        yield call("for hidden states with NaN", change=with_nan)
        yield call("with a cache", (4, 1))
        yield call("without a mask", masked=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        plan: PlainPlan = self.__dict__[PLAN]
        given = {**dict(zip(plan.arguments, args, strict=False)), **kwargs}
        x, mask, cache = (given.pop(name, None) for name in (STATES, MASK, plan.cache))
        asked = any(value is not None and value is not False for name, value in given.items() if name not in HARMLESS)
        if asked or x is None or needs_fallback(self, x) or self.training or needs_grad(cache):
            return super().forward(*args, **kwargs)
        size: int = self.__dict__[plan.size]
        q, k, v = (self._modules[name](x).view(*x.shape[:2], -1, size) for name in plan.inputs)
        backend = CURRENT.backend
        if backend is not None:
            y = backend.attend(self, q, k, v, mask, ScoreTerms(size**-0.5, causal=False))
        else:
            if cache is not None:
                own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
                k, v = (t.transpose(1, 2) for t in own.update(k.transpose(1, 2), v.transpose(1, 2), self.layer_idx))
            y = attend(q, k, v, mask, size**-0.5, False)
        y = y.reshape(*x.shape[:2], -1)
        return (self._modules[plan.output](y) if plan.output else y), None
