"""The mixture of Llama 4: experts whose inputs are scaled by the router, and an MLP that computes every token.

The original computes every expert for every token, most of them of zeros; here those that the router chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..checks.conditions import needs_fallback, unhooked
from ..checks.probe import HALF, LENGTHS, PROBE_SEED, WIDTH, frozen, probe_module, random, tokens, with_nan
from ..swap import PLAN, Patched, Probe, ProbeCall, Rotary, Unsupported, patched_class
from .experts import Experts, has_experts, is_dense, resize, sizes, small_experts

PARTS = ("experts", "router", "shared_expert")
_EXPERTS = 5  # of a probe module, at least


class MixturePlan(NamedTuple):
    """The number of experts that a token is sent to."""

    top_k: int


class _Shared(nn.Module):
    """Replaces the MLP that computes every token in a probe module: a simple nonlinear function."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.tanh(hidden_states)


class InputScaledMixture(Patched):
    """y = shared_expert(x) + the sum of MLP_e(x * score_e) over the chosen experts e; returned with the logits."""

    infini_ops = "fused_experts"

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if module._modules.keys() != set(PARTS) or any(p is not None for p in module._parameters.values()):
            raise Unsupported(f"its submodules are not {', '.join(PARTS)}: {', '.join(module._modules)}")
        top_k = vars(module).get("top_k")
        if type(top_k) is not int:
            raise Unsupported("it has no top_k, the number of experts for a token")
        if not isinstance(module._modules["experts"], Experts):
            raise Unsupported("its experts were left unpatched")
        return [MixturePlan(top_k)]

    @classmethod
    def probe(cls, module: nn.Module, rotary: Rotary) -> Probe:
        experts, router = module._modules["experts"], module._modules["router"]
        assert isinstance(experts, Experts) and router is not None
        old, count = experts.sizes, max(_EXPERTS, vars(module)["top_k"] + 1)
        own = small_experts(experts, count)
        own.__class__ = patched_class(Experts, experts.infini_original)  # also of quantized ones
        vars(own)[PLAN] = experts.experts_plan
        small_router = probe_module(router, {"weight": frozen(random(count, WIDTH, seed=7) / WIDTH**0.5), "bias": None})
        vars(small_router)[PROBE_SEED] = 7
        modules = {"experts": own, "router": small_router, "shared_expert": _Shared()}
        small = probe_module(module, modules=modules)
        new = sizes(own)
        resize(small_router, router, old, new)
        resize(small, module, old, new)
        return Probe(small, cls.calls)

    @staticmethod
    def calls() -> Iterator[ProbeCall]:
        def call(when: str, x: Tensor, dtype: torch.dtype = torch.float32) -> ProbeCall:
            return ProbeCall(when, lambda forward: forward(x.to(dtype, copy=True)), HALF.get(dtype, 1e-4), dtype=dtype)

        few = random(2, 3, WIDTH)
        yield call("", few)
        for length in LENGTHS:
            yield call(f"for {tokens(length)}", random(1, length, WIDTH))
        for size in (1e-2, 30.0):
            yield call(f"for hidden states of about {size:g}", size * few)
        for dtype in HALF:
            yield call(f"in {str(dtype).removeprefix('torch.')}", few, dtype)
        yield call("for hidden states with NaN", with_nan(few))

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        modules = self._modules
        experts = modules["experts"]
        if args or kwargs or needs_fallback(self, hidden_states) or not unhooked(experts):
            return super().forward(hidden_states, *args, **kwargs)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if not isinstance(experts, Experts) or not experts.is_computed(x):
            return super().forward(hidden_states)
        plan: MixturePlan = self.__dict__[PLAN]
        scores, logits = modules["router"](x)  # 0 for experts that were not chosen
        chosen, index = scores.topk(plan.top_k, -1)
        return modules["shared_expert"](x) + experts.product(x, index, chosen, weights_on_input=True), logits


def has_scaled_inputs(module: nn.Module) -> bool:
    """Return whether a module looks like a mixture whose router scales the inputs of all experts."""
    experts = module._modules.get("experts")
    return module._modules.keys() == set(PARTS) and experts is not None and has_experts(experts) and is_dense(experts)
