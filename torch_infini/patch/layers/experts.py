"""The experts of a mixture of a patched model: gated MLPs in two tensors, of which each token uses a few.

The router, whatever it computes, and the block around them run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._core.devices import on_cpu
from ...ops.fused_experts import ACTIVATIONS
from ..checks.conditions import dense_last, needs_fallback, unhooked, unsupported_weights
from ..checks.probe import HALF, LENGTHS, PROBE_SEED, SIZES, WIDTH, frozen, probe_module, random, tokens, with_nan
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary, Unsupported
from .mlp import ACTIVATION_NAMES, GATES

fused_experts = torch.ops.infini.fused_experts.default

WEIGHTS = ("gate_up_proj", "down_proj")
_EXPERTS, _INNER, _CHOSEN = 4, 24, 2  # of a probe module


class ExpertsPlan(NamedTuple):
    """The number of the activation, as torch.ops.infini.fused_experts takes it, and the name of its module."""

    activation: int
    module: str


def has_experts(module: nn.Module) -> bool:
    """Return whether a module keeps the weights of several gated MLPs in two tensors."""
    weights = [module._parameters.get(name) for name in WEIGHTS]
    return isinstance(module, Experts) or all(weight is not None and weight.dim() == 3 for weight in weights)


class Experts(Patched):
    """y[t] = the sum of weights[t, j] * MLP_e(x[t]) over the chosen experts e = index[t, j]."""

    infini_ops = "fused_experts"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        plan = plan_of(module)
        if reason := unsupported_weights(module):
            raise Unsupported(reason)
        if not all(map(on_cpu, module.parameters())):
            raise Unsupported("the op for experts runs on the CPU alone")
        return [plan]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        _, hidden, inner = sizes(module)
        inner = WIDTH if inner == hidden else _INNER
        parameters = {
            "gate_up_proj": frozen(random(_EXPERTS, 2 * inner, WIDTH) / WIDTH**0.5),
            "down_proj": frozen(random(_EXPERTS, WIDTH, inner, seed=1) / inner**0.5),
        }
        small = probe_module(module, parameters, module._modules)
        vars(small)[PROBE_SEED] = 0
        # A forward may read its sizes from attributes.
        experts, *others = sizes(module)
        for name, value in vars(module).items():
            if type(value) is int and "num" in name:
                vars(small)[name] = _EXPERTS if value == experts else value
            elif type(value) is int and value in others:
                vars(small)[name] = (WIDTH, inner)[others.index(value)]
        return Probe(small, lambda: cls.calls(small))

    @staticmethod
    def calls(small: nn.Module) -> Iterator[ProbeCall]:
        def call(
            when: str, x: Tensor, size: float = 1, dtype: torch.dtype = torch.float32, wide: bool = False
        ) -> ProbeCall:
            """Return a call with x of magnitude `size`; wide: with weights in float32, whatever x is."""
            count = len(x)
            order = random(count, _EXPERTS, seed=2).argsort(1)[:, :_CHOSEN]
            weights = random(count, _CHOSEN, seed=3).softmax(1).to(torch.float32 if wide else dtype)
            given = {"": {"gate_up_proj": small.get_parameter("gate_up_proj") / size}} if size != 1 else {}
            run = lambda forward: forward((size * x).to(dtype, copy=True), order.clone(), weights.clone())
            return ProbeCall(when, run, HALF.get(dtype, 1e-4), given, dtype=dtype)

        few = random(5, WIDTH)
        yield call("", few)
        for length in LENGTHS:
            yield call(f"for {tokens(length)}", random(length, WIDTH))
        for size in SIZES:
            yield call(f"for hidden states of about {size:g}", few, size)
        for dtype in HALF:
            yield call(f"in {str(dtype).removeprefix('torch.')}", few, dtype=dtype)
            yield call(f"in {str(dtype).removeprefix('torch.')} with float32 weights", few, dtype=dtype, wide=True)
        yield call("for hidden states with NaN", with_nan(few[None])[0])

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 2 or kwargs or hidden_states.dim() != 2 or hidden_states.is_cuda:
            return self.forward_of_original(hidden_states, *args, **kwargs)
        if needs_fallback(self, hidden_states) or not unhooked(self._modules[self.experts_plan.module]):
            return self.forward_of_original(hidden_states, *args, **kwargs)
        return self.product(hidden_states, *args)

    def forward_of_original(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = super().forward(*args, **kwargs)
        return result

    def product(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute forward for a caller that has already ruled out the original's."""
        gate_up, down = map(self._parameters.__getitem__, WEIGHTS)
        plan: ExpertsPlan = self.__dict__[PLAN]  # each call of Python counts here
        return fused_experts(dense_last(x), gate_up, down, index, weights, plan.activation)

    @property
    def experts_plan(self) -> ExpertsPlan:
        plan: ExpertsPlan = self.__dict__[PLAN]
        return plan

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of experts, of columns of x, and of columns inside."""
        return sizes(self)


def plan_of(module: nn.Module) -> ExpertsPlan:
    """Return the plan by the module's structure, which Experts.probe checks; its weights may be on meta.

    Raises:
        Unsupported: For another structure.
    """
    if getattr(module, "_is_expert_parallel", False):
        raise Unsupported("its experts are divided among ranks")
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if sorted(names) != sorted(WEIGHTS):
        raise Unsupported(f"its experts have more than gate_up_proj and down_proj: {', '.join(names)}")
    activation = next((name for name in ACTIVATION_NAMES if name in module._modules), None)
    if activation is None or len(module._modules) > 1:
        raise Unsupported(f"it has no activation ({' or '.join(ACTIVATION_NAMES)}), or other submodules")
    kind = type(module._modules[activation])
    if kind not in GATES:
        raise Unsupported(f"its activation is {kind.__name__}, neither SiLU nor GELU by tanh")
    experts, hidden, inner = sizes(module)
    shape = tuple(module.get_parameter("gate_up_proj").shape)
    if shape != (experts, 2 * inner, hidden):
        raise Unsupported(
            f"its gate_up_proj has shape {list(shape)}, not [experts, 2 * inner, hidden] as its down_proj says"
        )
    op: Any = GATES[kind]
    return ExpertsPlan(ACTIVATIONS[op.name().removeprefix("infini::")], activation)


def sizes(module: nn.Module) -> tuple[int, int, int]:
    """Return (experts, hidden, inner) by the weight of the second product."""
    experts, hidden, inner = module.get_parameter("down_proj").shape
    return experts, hidden, inner
