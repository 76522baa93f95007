"""The decoder layer of a patched model: residual additions are fused with norms, including the next layer's first norm.

LAYOUTS lists the positions of norms in a layer; norm.py handles the norms themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks.conditions import dense_last, unhooked, unsupported_placement
from ..checks.probe import HALF, LENGTHS, SIZES, WIDTH, linear, norm_probe, probe_module, random, tokens, with_nan
from ..own_forward import PAST, cache_of
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary, Unsupported
from .attention import Attention, AttentionDispatch, causal_mask
from .cache import needs_grad
from .mlp import GATES, GatedMLP, MLPDispatch
from .norm import (
    HANDOVER,
    NormTerms,
    RMSNorm,
    add_rms_norm,
    eps_name,
    is_served,
    normalize,
    terms_of,
)
from .ways import Dispatch, cached_dispatch, guards_of


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
    # Apertus
    Layout("attention_layernorm", None, "feedforward_layernorm", None),
    # VaultGemma
    Layout("input_layernorm", None, "pre_feedforward_layernorm", None),
    # AFMoE
    Layout("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    # HyperCLOVA X
    Layout("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
)
# Gemma 4's third branch: x + norm(projection(act(gate(x)) * input)); its input is an argument of the layer.
GATE, ACTIVATION, PROJECTION, INPUT_NORM = PER_LAYER = (
    "per_layer_input_gate",
    "act_fn",
    "per_layer_projection",
    "post_per_layer_input_norm",
)
INPUT, INPUT_WIDTH = "per_layer_input", 8  # the argument, and its columns in a probe
SCALE = "layer_scalar"
EMPTY = {"position_embeddings": None, "attention_mask": None}  # arguments of a layer in a probe
NEXT = "_infini_next"  # attribute of a patched layer: (the norm that its result is passed to,)


class LayerPlan(NamedTuple):
    """How a layer combines its parts.

    Attributes:
        layout: Positions of the norms.
        multiplier: The factor of both branches before the residual additions.
        dropouts: The names of dropouts.
        has_input: Whether a third branch follows: a product with an input of the layer's own (PER_LAYER).
        scales: Whether the result is multiplied by a buffer of one element (SCALE).
        takes_pair: Whether the MLP may return its router's scores beside its result, as in gpt-oss.
        cache: The argument that is the cache.
    """

    layout: Layout
    multiplier: float
    dropouts: tuple[str, ...]
    has_input: bool = False
    scales: bool = False
    takes_pair: bool = False
    cache: str = PAST


@dataclass(frozen=True, eq=False)
class LayerDispatch(Dispatch):
    """How a layer computes its submodules.

    Attributes:
        norms_served: Whether norms and dropouts need not be called; else the original forward runs.
        dropouts: The layer's dropouts, which do nothing outside of training.
        attention: The dispatch of self_attn; None if it has to be called.
        mlp: The dispatch of mlp; None if it has to be called.
        second: The norm before the MLP, if there is one, to be fused with the residual addition.
        following: The norm of the layer's result; None if there is none that may be computed here.
    """

    norms_served: bool
    dropouts: tuple[Any, ...]
    attention: AttentionDispatch | None
    mlp: MLPDispatch | None
    second: NormTerms | None
    following: NormTerms | None


class _Branch(nn.Module):
    """Replaces attention and MLP in a probe module: a simple nonlinear function."""

    size = 1.0  # magnitude of the results

    def __init__(self, seed: int, returns_pair: bool) -> None:
        super().__init__()
        self.seed = seed
        self.returns_pair = returns_pair

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        weight = random(WIDTH, seed=self.seed).to(hidden_states.dtype)
        y = self.size * (torch.tanh(hidden_states * weight) + weight)
        return (y, None) if self.returns_pair else y


class DecoderLayer(Patched):
    """x + attention(norm(x)), then + mlp(norm(...)), with norms as in the layer's layout."""

    infini_ops = "add_rms_norm"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        children = module._modules
        norms = {name for name, child in children.items() if child is not None and eps_name(child)}
        has_input, scales = children.keys() >= set(PER_LAYER), SCALE in module._buffers
        if has_input:
            norms.discard(INPUT_NORM)
        layout = next((layout for layout in LAYOUTS if norms == {name for name in layout if name}), None)
        if layout is None:
            raise Unsupported(f"its norms ({', '.join(sorted(norms)) or 'none'}) are in no known layout")
        parts = children.keys() - norms - (set(PER_LAYER) if has_input else set())
        more = {name for name in parts if not isinstance(children[name], nn.Dropout)}
        if more != {"self_attn", "mlp"}:
            raise Unsupported(f"its submodules are not self_attn, mlp and norms: {', '.join(sorted(more))}")
        for name in sorted({*norms, INPUT_NORM} if has_input else norms):
            norm = children[name]
            if not isinstance(norm, RMSNorm):
                state = f"is a {type(norm).__name__}" if isinstance(norm, Patched) else "was left unpatched"
                raise Unsupported(f"its {name} {state}")
        if "forward" in vars(module):
            raise Unsupported(unsupported_placement(module) or "")
        dropouts = tuple(name for name, child in children.items() if isinstance(child, nn.Dropout))
        if has_input and type(children[ACTIVATION]) not in GATES:
            raise Unsupported(f"its activation is {type(children[ACTIVATION]).__name__}, neither SiLU nor GELU by tanh")
        multiplier = float(getattr(module, "residual_multiplier", 1.0))
        # The attention gets what the layer was called with, under the same names.
        names = [cache_of(part) for part in (module, module.get_submodule("self_attn"))]
        if all(names) and names[0] != names[1]:
            raise Unsupported(f"its argument {names[0]} is {names[1]} of its attention")
        cache = names[0] or names[1] or PAST
        return [LayerPlan(layout, multiplier, dropouts, has_input, scales, unpacks_mlp(module), cache)]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        small = small_layer(module, unpacks_mlp(module))
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[ProbeCall]:
        branches = [child for child in small._modules.values() if isinstance(child, _Branch)]

        def call(
            when: str, x: Tensor, size: float = 1, inside: float = 1, dtype: torch.dtype = torch.float32, **more: Any
        ) -> ProbeCall:
            """Return a call with x of magnitude `size` and results of attention and MLP of magnitude `inside`."""

            def run(forward: Callable[..., Any]) -> Any:
                for branch in branches:
                    branch.size = inside
                if GATE in small._modules:
                    more[INPUT] = random(*x.shape[:2], INPUT_WIDTH).to(dtype, copy=True)
                return forward((size * x).to(dtype, copy=True), **{**EMPTY, **more})

            return ProbeCall(when, run, HALF.get(dtype, 1e-5), dtype=dtype)

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
        plan: LayerPlan = self.__dict__[PLAN]
        (first, attended_by, second, last), multiplier = plan.layout, plan.multiplier
        compiling = torch.compiler.is_compiling()
        handed = HANDOVER
        if not compiling and self._forward_pre_hooks:  # they may have written to the norm
            handed.result = handed.normed = None
        dispatch: LayerDispatch | None = cached_dispatch(self, hidden_states)
        if plan.has_input and len(args) == 1 and INPUT not in kwargs:
            kwargs = {**kwargs, INPUT: args[0]}
            args = args[1:]
        if args or dispatch is None or (torch.is_grad_enabled() and needs_grad(kwargs.get(plan.cache))):
            return super().forward(hidden_states, *args, **kwargs)
        if not dispatch.norms_served or (self.training and any(dropout.p for dropout in dispatch.dropouts)):
            return super().forward(hidden_states, *args, **kwargs)
        more: Tensor | None = kwargs.pop(INPUT, None) if plan.has_input else None
        x = hidden_states = hidden_states if hidden_states.is_contiguous() else dense_last(hidden_states)
        if first is not None:
            norm = modules[first]
            if (
                not compiling
                and handed.result is hidden_states
                and handed.norm is norm
                and handed.version == hidden_states._version
            ):
                assert handed.normed is not None
                x, handed.result, handed.normed = handed.normed, None, None
            else:
                x = normalize(hidden_states, norm)
        if dispatch.attention is None:
            x, _ = modules["self_attn"](hidden_states=x, **kwargs)
        else:
            x, _ = modules["self_attn"].compute(dispatch.attention, x, **kwargs)
        if not dispatch.closed:
            dispatch = cached_dispatch(self, x) or dispatch
        if attended_by is not None:
            x = normalize(x, modules[attended_by])
        if multiplier != 1:
            x = x * multiplier
        if dispatch.second is not None:
            weights, own, eps, rounding = dispatch.second
            x, stream = add_rms_norm(x, hidden_states, weights["weight"], own[eps], rounding)
        else:
            x = stream = hidden_states + x
        x = modules["mlp"](x) if dispatch.mlp is None else modules["mlp"].compute(dispatch.mlp, x)
        if plan.takes_pair and isinstance(x, tuple):
            x = x[0]
        if not dispatch.closed:
            dispatch = cached_dispatch(self, x) or dispatch
        if last is not None:
            x = normalize(x, modules[last])
        if multiplier != 1:
            x = x * multiplier
        if plan.has_input or plan.scales:
            stream = stream.add_(x) if second is not None else stream + x
            return self.finish(plan, stream, more)
        following = dispatch.following
        if compiling or self._forward_hooks or following is None or not handed.calls or stream.is_inference():
            # Without a norm before the MLP, the stream was its input, which hooks may keep.
            return stream.add_(x) if second is not None else stream + x
        weights, own, eps, rounding = following
        normed, result = add_rms_norm(x, stream, weights["weight"], own[eps], rounding)
        (handed.norm,) = self.__dict__[NEXT]
        handed.result, handed.normed, handed.version = result, normed, result._version
        return result

    def finish(self, plan: LayerPlan, x: Tensor, given: Tensor | None) -> Tensor:
        """Compute what follows the MLP's branch; x is overwritten."""
        if plan.has_input:
            modules = self._modules
            gate, act = modules[GATE](x), modules[ACTIVATION]
            y = GATES[type(act)](gate, dense_last(given)) if unhooked(act) and given is not None else act(gate) * given
            x = x.add_(modules[INPUT_NORM](modules[PROJECTION](y)))
        return x.mul_(self._buffers[SCALE]) if plan.scales else x

    def make_dispatch(self) -> LayerDispatch:
        """Determine the dispatch, which `cached_dispatch` keeps."""
        plan: LayerPlan = self.__dict__[PLAN]
        modules = self._modules
        norms = [name for name in plan.layout if name is not None]
        attention, mlp = modules["self_attn"], modules["mlp"]
        # Patched modules without hooks are computed without a module call.
        attention_dispatch = attention.make_dispatch() if computes(attention, Attention) else None
        mlp_dispatch = mlp.make_dispatch() if computes(mlp, GatedMLP) else None
        (following,) = self.__dict__.get(NEXT, (None,))
        after = {"": following} if following is not None else {}
        inside = [dispatch for dispatch in (attention_dispatch, mlp_dispatch) if dispatch is not None]
        dropouts = [modules[name] for name in plan.dropouts]
        return LayerDispatch(
            modules,
            (
                *guards_of(modules, ("self_attn", "mlp", *norms, *plan.dropouts)),
                *guards_of(after, after),
                *(guard for dispatch in inside for guard in dispatch.guards),
            ),
            len(inside) == 2 and all(dispatch.closed for dispatch in inside),
            all(is_served(modules[name]) for name in norms) and all(unhooked(dropout) for dropout in dropouts),
            tuple(dropouts),
            attention_dispatch,
            mlp_dispatch,
            terms_of(modules[plan.layout.before_mlp]) if plan.layout.before_mlp else None,
            terms_of(following) if is_served(following) else None,
        )


def small_layer(module: nn.Module, mlp_returns_pair: bool) -> nn.Module:
    """Return a probe module of a layer."""
    modules: dict[str, nn.Module | None] = {}
    for seed, (name, child) in enumerate(module._modules.items()):
        if name in ("self_attn", "mlp"):
            modules[name] = _Branch(seed, mlp_returns_pair or name == "self_attn")
        elif child is not None and eps_name(child):
            modules[name] = norm_probe(child, seed, WIDTH)
        elif name in (GATE, PROJECTION):
            sizes = (INPUT_WIDTH, WIDTH) if name == GATE else (WIDTH, INPUT_WIDTH)
            modules[name] = linear(*sizes, seed)
        else:
            modules[name] = child
    small = probe_module(module, modules=modules)
    if SCALE in module._buffers:
        small._buffers[SCALE] = torch.full((1,), 0.75, dtype=torch.float32, device="cpu")
    vars(small).pop(NEXT, None)
    return small


def unpacks_mlp(module: nn.Module) -> bool:
    """Return whether the layer's own forward takes a pair from its MLP: one that adds a pair to a tensor raises."""
    try:
        with torch.no_grad():
            small_layer(module, True).forward(random(1, 3, WIDTH), **EMPTY)
    except Exception:  # whatever a forward does with what it does not expect; the probe's calls tell the rest
        return False
    return True


def computes(module: Any, patch: type[Attention | GatedMLP]) -> bool:
    """Return whether a module in a layer without fallback need not be called, because its `compute` does the same."""
    forward = getattr(type(module), "infini_forward", patch.forward)
    return isinstance(module, patch) and type(module).forward is forward and unhooked(module)


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
