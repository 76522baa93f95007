"""The gated MLP of a patched model: down_proj(act(gate_proj(x)) * up_proj(x)), also with gate and up fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ..checks.conditions import dense_last, unhooked, unsupported_weights
from ..checks.probe import (
    HALF,
    LENGTHS,
    SIZES,
    WIDTH,
    call_with,
    linear,
    probe_module,
    random,
    scaled,
    tokens,
    with_nan,
)
from ..swap import Patched, Probe, ProbeCall, Rotary, Unsupported
from .linear import Product, fused_product, product_of
from .ways import Dispatch, cached_dispatch, guards_of

ACTIVATION_NAMES = ("act_fn", "activation_fn")
# Activation classes, and the op that computes act(gate) * up.
GATES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.SiLU: torch.ops.infini.swiglu.default,
    type(ACT2FN["silu"]): torch.ops.infini.swiglu.default,
    type(ACT2FN["gelu_pytorch_tanh"]): torch.ops.infini.geglu.default,
}


@dataclass(frozen=True, eq=False)
class MLPDispatch(Dispatch):
    """How a gated MLP computes its submodules.

    Attributes:
        gated: The op for act(gate) * up; None if the activation has to be called.
        fused: Computes gate and up in one tensor, or returns None.
        inputs: Compute gate and up, each by itself.
        down: Computes down_proj.
    """

    gated: Callable[..., Tensor] | None
    fused: Callable[[Tensor], Tensor | None] | None
    inputs: tuple[Product, ...]
    down: Product


class MLPPlan(NamedTuple):
    """Names of the layers before the activation (one fused, or two) and of the activation.

    Attributes:
        deviations: Of SparseGatedMLP, the quantile in standard deviations above the mean.
    """

    inputs: tuple[str, ...]
    activation: str
    deviations: float = 0.0


class GatedMLP(Patched):
    """y = down_proj(act(gate_proj(x)) * up_proj(x))."""

    infini_ops = "fused_linear, swiglu, linear"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if any("experts" in name for name in module._modules):
            raise Unsupported("it is a mixture of experts, which runs as it is: no op computes experts yet")
        activation = next((name for name in ACTIVATION_NAMES if name in module._modules), None)
        if activation is None:
            raise Unsupported(f"it has no activation ({' or '.join(ACTIVATION_NAMES)})")
        inputs = ("gate_up_proj",) if "gate_up_proj" in module._modules else ("gate_proj", "up_proj")
        wanted = {*inputs, activation, "down_proj"}
        if module._modules.keys() != wanted or any(p is not None for p in module._parameters.values()):
            raise Unsupported(
                "its submodules are not those of a gated MLP: gate_proj and up_proj (or both in one), down_proj"
            )
        if type(module._modules[activation]) not in GATES:
            kind = type(module._modules[activation]).__name__
            raise Unsupported(f"its activation is {kind}, neither SiLU nor GELU by tanh")
        if reason := unsupported_weights(module, *inputs, "down_proj"):
            raise Unsupported(reason)
        return [MLPPlan(inputs, activation)]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        activation = cls.plans(module)[0].activation
        modules: dict[str, nn.Module | None] = {}
        for seed, (name, child) in enumerate(module._modules.items()):
            if name == activation:
                modules[name] = child
            elif name == "down_proj":
                modules[name] = linear(WIDTH, 24, seed)
            else:
                modules[name] = linear(48 if name == "gate_up_proj" else 24, WIDTH, seed)
        small = probe_module(module, modules=modules)
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[ProbeCall]:
        inputs = [name for name in small._modules if name in ("gate_up_proj", "gate_proj", "up_proj")]

        def call(
            when: str, x: Tensor, size: float = 1, inside: float = 1, dtype: torch.dtype = torch.float32
        ) -> ProbeCall:
            """Return a call with x of magnitude `size`, and gate and up of magnitude `inside`."""
            given = {name: scaled(small._modules[name], inside / size, inside) for name in inputs}
            return ProbeCall(when, call_with(size * x, dtype), HALF.get(dtype, 1e-4), given, dtype=dtype)

        few = random(2, 3, WIDTH)
        yield call("", few)
        for length in LENGTHS:
            yield call(f"for {tokens(length)}", random(1, length, WIDTH))
        for size in SIZES:
            yield call(f"for numbers of about {size:g}", few, size, size)
            yield call(f"for hidden states of about {size:g}", few, size)
        for dtype in HALF:
            yield call(f"in {str(dtype).removeprefix('torch.')}", few, dtype=dtype)
        yield call("for hidden states with NaN", with_nan(few))

    def forward(self, x: Tensor) -> Tensor:
        dispatch: MLPDispatch | None = cached_dispatch(self, x)
        return super().forward(x) if dispatch is None else self.compute(dispatch, dense_last(x))

    def make_dispatch(self) -> MLPDispatch:
        """Determine the dispatch, which `cached_dispatch` keeps."""
        plan: MLPPlan = self.__dict__["_infini_plan"]
        modules = self._modules
        act, inputs = modules[plan.activation], [modules[name] for name in plan.inputs]
        products = [product_of(module) for module in inputs]
        last = product_of(modules["down_proj"])
        return MLPDispatch(
            modules,
            tuple(guards_of(modules, (*plan.inputs, plan.activation, "down_proj"))),
            None not in products and last is not None,
            GATES.get(type(act)) if unhooked(act) else None,
            fused_product(inputs) if len(inputs) > 1 else products[0] or inputs[0],
            tuple(product or module for product, module in zip(products, inputs, strict=True)),
            last or modules["down_proj"],
        )

    def compute(self, dispatch: MLPDispatch, x: Tensor) -> Tensor:
        """Compute forward for a caller that has already ruled out a fallback."""
        gated = dispatch.gated
        if gated is None:
            return super().forward(x)
        both = None if dispatch.fused is None else dispatch.fused(x)
        if both is not None:
            y = gated(both)
        else:
            gate, up = dispatch.inputs
            y = gated(gate(x), up(x))
        return (dispatch if dispatch.closed else cached_dispatch(self, x) or dispatch).down(y)


SPARSITY = "activation_sparsity"  # attribute: the share of the gate's columns that become 0


class SparseGatedMLP(GatedMLP):
    """GatedMLP of Gemma 3n: of the gate only what is above a quantile, which mean and variance of its row estimate."""

    infini_ops = "linear, geglu"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        share = vars(module).get(SPARSITY)
        if type(share) is not float or not 0 < share < 1:
            raise Unsupported(f"its {SPARSITY} is {share!r}, not between 0 and 1")
        plans = super().plans(module)
        if len(plans[0].inputs) != 2:
            raise Unsupported("its gate and up are one layer, whose rows are not known to be separate")
        return [plan._replace(deviations=NormalDist().inv_cdf(share)) for plan in plans]

    def compute(self, dispatch: MLPDispatch, x: Tensor) -> Tensor:
        gated = dispatch.gated
        if gated is None:
            original: Tensor = super(GatedMLP, self).forward(x)
            return original
        to_gate, to_up = dispatch.inputs
        gate, up = to_gate(x), to_up(x)
        plan: MLPPlan = self.__dict__["_infini_plan"]
        spread, mean = torch.std_mean(gate, -1, correction=0, keepdim=True)
        y = gated(torch.relu(gate - (mean + spread * plan.deviations)), up)
        return (dispatch if dispatch.closed else cached_dispatch(self, x) or dispatch).down(y)
