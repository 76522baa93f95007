"""The decoder layer of a patched model: residual additions are fused with norms, including the next layer's first norm.

LAYOUTS lists the positions of norms in a layer; norm.py handles the norms themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import Attention, causal_mask
from .cache import needs_grad
from .conditions import dense_last, needs_fallback, unsupported_placement, unwatched
from .mlp import GatedMLP
from .norm import (
    RMSNorm,
    add_and_normalize,
    eps_name,
    hand_over,
    is_served,
    may_hand_over,
    normalize,
    take_over,
)
from .probe import HALF, LENGTHS, SIZES, WIDTH, norm_probe, probe_module, random, tokens, with_nan
from .swap import Call, Patched, Probe, Rotary, Unsupported


class Layout(NamedTuple):
    """Names of a layer's norms; None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None


LAYOUTS = (
    # Llama, Mistral, Qwen, Phi-3, Granite, GLM, Gemma, ...
    Layout("input_layernorm", None, "post_attention_layernorm", None),
    # Gemma 2 and 3
    Layout("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    # GLM-4
    Layout("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    # OLMo 2 and 3, EXAONE 4
    Layout(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)
EMPTY = {"position_embeddings": None, "attention_mask": None}  # arguments of a layer in a probe
NEXT = "_infini_next"  # attribute of a patched layer: (the norm that its result is passed to,)


class LayerPlan(NamedTuple):
    """Positions of the norms, the factor of both branches before the residual additions, and the names of dropouts."""

    layout: Layout
    multiplier: float
    dropouts: tuple[str, ...]


class _Branch(nn.Module):
    """Replaces attention and MLP in a probe module: a simple nonlinear function."""

    size = 1.0  # magnitude of the results

    def __init__(self, seed: int, with_weights: bool) -> None:
        super().__init__()
        self.seed = seed
        self.with_weights = with_weights

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        weight = random(WIDTH, seed=self.seed).to(hidden_states.dtype)
        y = self.size * (torch.tanh(hidden_states * weight) + weight)
        return (y, None) if self.with_weights else y


class DecoderLayer(Patched):
    """x + attention(norm(x)), then + mlp(norm(...)), with norms as in the layer's layout."""

    infini_ops = "add_rms_norm"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        children = module._modules
        norms = {name for name, child in children.items() if child is not None and eps_name(child)}
        layout = next((layout for layout in LAYOUTS if norms == {name for name in layout if name}), None)
        if layout is None:
            raise Unsupported(f"its norms ({', '.join(sorted(norms)) or 'none'}) are in no known layout")
        more = {name for name in children.keys() - norms if not isinstance(children[name], nn.Dropout)}
        if more != {"self_attn", "mlp"}:
            raise Unsupported(f"its submodules are not self_attn, mlp and norms: {', '.join(sorted(more))}")
        for name in sorted(norms):
            if not isinstance(children[name], RMSNorm):
                raise Unsupported(f"its {name} was left unpatched")
        if "forward" in vars(module):
            raise Unsupported(unsupported_placement(module) or "")
        dropouts = tuple(name for name, child in children.items() if isinstance(child, nn.Dropout))
        return [LayerPlan(layout, float(getattr(module, "residual_multiplier", 1.0)), dropouts)]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        modules: dict[str, nn.Module | None] = {}
        for seed, (name, child) in enumerate(module._modules.items()):
            if name in ("self_attn", "mlp"):
                modules[name] = _Branch(seed, name == "self_attn")
            elif child is not None and eps_name(child):
                modules[name] = norm_probe(child, seed, WIDTH)
            else:
                modules[name] = child
        small = probe_module(module, modules=modules)
        vars(small).pop(NEXT, None)
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[Call]:
        branches = [child for child in small._modules.values() if isinstance(child, _Branch)]

        def call(
            when: str, x: Tensor, size: float = 1, inside: float = 1, dtype: torch.dtype = torch.float32, **more: Any
        ) -> Call:
            """Return a call with x of magnitude `size` and results of attention and MLP of magnitude `inside`."""

            def run(forward: Callable[..., Any]) -> Any:
                for branch in branches:
                    branch.size = inside
                return forward((size * x).to(dtype, copy=True), **{**EMPTY, **more})

            return Call(when, run, HALF.get(dtype, 1e-5), dtype=dtype)

        few = random(2, 3, WIDTH)
        yield call("", few)
        for length in LENGTHS:
            yield call(f"for {tokens(length)}", random(1, length, WIDTH))
        for size in SIZES:
            yield call(f"for numbers of about {size:g}", few, size, size)
            yield call(f"for hidden states of about {size:g}", few, size)
            yield call(f"for results of attention and MLP of about {size:g}", few, 1, size)
        for dtype in HALF:
            yield call(f"in {str(dtype).removeprefix('torch.')}", few, dtype=dtype)
        yield call("for numbers beyond the range of float16", few, 3e4, 3e4, torch.float16)
        yield call("for hidden states with NaN", with_nan(few))
        yield call("with an attention mask", few, attention_mask=causal_mask(3, 3).expand(2, 1, 3, 3))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        modules = self._modules
        (first, attended_by, second, last), multiplier, _ = self.__dict__["_infini_plan"]
        compiling = torch.compiler.is_compiling()
        fallback = needs_fallback(self, hidden_states) or needs_grad(kwargs.get("past_key_values"))
        if args or fallback or not self.serves(modules):
            return super().forward(hidden_states, *args, **kwargs)
        x = hidden_states = dense_last(hidden_states)
        if first is not None:
            norm = modules[first]
            known = None if compiling or self._forward_pre_hooks else take_over(hidden_states, norm)
            x = normalize(hidden_states, norm) if known is None else known
        x, _ = entry(modules["self_attn"], Attention)(hidden_states=x, **kwargs)
        if attended_by is not None:
            x = normalize(x, modules[attended_by])
        if multiplier != 1:
            x = x * multiplier
        if second is not None:
            x, stream = add_and_normalize(x, hidden_states, modules[second])
        else:
            x = stream = hidden_states + x
        x = entry(modules["mlp"], GatedMLP)(x)
        if last is not None:
            x = normalize(x, modules[last])
        if multiplier != 1:
            x = x * multiplier
        (following,) = self.__dict__.get(NEXT, (None,))
        if compiling or self._forward_hooks or not may_hand_over(stream) or not is_served(following):
            # Without a norm before the MLP, the stream was its input, which hooks may keep.
            return stream.add_(x) if second is not None else stream + x
        normed, stream = add_and_normalize(x, stream, following)
        hand_over(stream, following, normed)
        return stream

    def serves(self, modules: dict[str, Any]) -> bool:
        """Return whether the norms are patched and no dropout is active or watched."""
        plan: LayerPlan = self.__dict__["_infini_plan"]
        for name in plan.layout:
            if name is not None and not is_served(modules[name]):
                return False
        dropouts = [modules[name] for name in plan.dropouts]
        return not any((self.training and dropout.p) or not unwatched(dropout) for dropout in dropouts)


def entry(module: Any, patch: type[Attention | GatedMLP]) -> Callable[..., Any]:
    """Return the function to call for a module in a layer without fallback: its `compute` if it is patched."""
    direct = type(module).forward is patch.forward and unwatched(module) and module._compiled_call_impl is None
    return module.compute if direct else module


def link(layers: Sequence[nn.Module], norm: nn.Module) -> None:
    """Store in each patched layer which norm follows: the next layer's first, after the last layer the decoder's.

    In a tuple, so that nn.Module does not register it as a submodule.
    """
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        if not isinstance(layer, DecoderLayer):
            continue
        name = None
        if after is not None:
            name = vars(after)["_infini_plan"].layout.before_attention if isinstance(after, DecoderLayer) else None
        following = norm if after is None else after._modules[name] if name else None
        if isinstance(following, RMSNorm):
            vars(layer)[NEXT] = (following,)
