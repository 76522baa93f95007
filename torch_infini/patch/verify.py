"""Finds out by numbers what a module computes: its patched forward, under each plan, against its own.

Names and shapes say that a module looks like one we know; only its numbers say that it computes the same.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

from torch import Tensor, nn

from .conditions import must_step_aside
from .swap import PLAN, Patched, Refusal, patched_class


def likeness(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules that compute the same formula: class, attributes, shapes, and those of their submodules."""
    plain = {name: value for name, value in vars(module).items() if isinstance(value, bool | int | float | str)}
    plain.pop("layer_idx", None)
    shapes = tuple((name, p.shape) for name, p in module._parameters.items() if p is not None)
    children = tuple((name, likeness(child)) for name, child in module._modules.items() if child is not None)
    return (type(module), tuple(sorted(plain.items())), shapes, children)


class Verifier:
    """Tries plans on the modules of one decoder; one module of each likeness, so that many layers cost as one."""

    def __init__(self, decoder: nn.Module) -> None:
        # Probes are small and run on the CPU, wherever the model is.
        self.embedding = decoder.rotary_emb
        if any(buffer.is_cuda for buffer in self.embedding.buffers()):
            self.embedding = deepcopy(self.embedding).cpu()
        self.answers: dict[tuple[Any, ...], Any] = {}

    def rotary(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin as the decoder makes them (some have several kinds: any of them will do)."""
        embedding = self.embedding
        original = getattr(embedding, "infini_original", type(embedding))
        kinds = getattr(embedding, "layer_types", ())
        more = [kinds[0]] if kinds and "layer_type" in inspect.signature(original.forward).parameters else []
        return original.forward(embedding, hidden, position_ids, *more)

    def plan(self, module: nn.Module, patch: type[Patched]) -> Any:
        """The plan under which the patched forward computes what the module computes.

        Raises:
            Refusal: If there is none.
        """
        plans = patch.plans(module)
        key = (patch, likeness(module), tuple(plans))
        if key not in self.answers:
            try:
                self.answers[key] = self.choose(module, patch, plans)
            except Refusal as reason:
                self.answers[key] = reason
        if isinstance(self.answers[key], Refusal):
            raise self.answers[key]
        return self.answers[key]

    def choose(self, module: nn.Module, patch: type[Patched], plans: Any) -> Any:
        try:
            probe = patch.probe(module, self.rotary)
            if probe is None:
                return plans[0]
            twin, args, kwargs = probe.twin, probe.args, probe.kwargs
            expected = first(type(twin).forward(twin, *args, **kwargs))
            twin.__class__ = patched_class(patch, type(twin))
            errors = []
            for plan in plans:
                vars(twin)[PLAN] = plan
                if must_step_aside(twin, expected):
                    raise Refusal("hooks are registered for all modules: it cannot be checked against its own forward")
                errors.append(distance(first(twin.forward(*args, **kwargs)), expected))
        except Exception as error:  # whatever the original needs that the probe lacks
            if isinstance(error, Refusal):
                raise
            raise Refusal(f"it cannot be checked against its own forward: {error}") from error
        best = min(range(len(plans)), key=errors.__getitem__)
        if not errors[best] <= probe.tolerance:
            raise Refusal("its own forward computes something else")
        return plans[best]


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def distance(actual: Tensor, expected: Tensor) -> float:
    """The relative error; infinity for another shape or dtype."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    return float((actual.float() - expected.float()).norm() / expected.float().norm())
