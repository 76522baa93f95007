"""Finds out by numbers what a module computes: its patched forward, under each plan, against its own.

Names and shapes say that a module looks like one we know; only its numbers say that it computes the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .conditions import must_step_aside
from .fingerprint import Fingerprints
from .stand_in import having
from .swap import PLAN, Call, Patched, Probe, Refusal, patched_class

INDEX = "layer_idx"  # attribute of modules of a layer: its number
READ = "_infini_read"  # attribute of a twin: whether its own forward read that


class Verifier:
    """Tries plans on the modules of one decoder; one module of each fingerprint, so that many layers cost as one."""

    def __init__(self, decoder: nn.Module) -> None:
        # Probes are small and run on the CPU, wherever the model is; and a forward may write to its module.
        self.original = decoder.rotary_emb
        self.embedding: nn.Module | None = None
        self.fingerprints = Fingerprints()
        self.positions: dict[tuple[Any, ...], Any] = {}
        self.answers: dict[Hashable, Answer] = {}

    def rotary(self, hidden: Tensor, position_ids: Tensor) -> Any:
        """cos and sin as the decoder makes them (some have several kinds: any of them will do)."""
        key = (hidden.dtype, len(hidden), *position_ids.flatten().tolist())
        if key not in self.positions:
            if self.embedding is None:
                self.embedding = deepcopy(self.original).cpu()
            embedding = self.embedding
            original = getattr(embedding, "infini_original", type(embedding))
            kinds = getattr(embedding, "layer_types", ())
            more = [kinds[0]] if kinds and "layer_type" in inspect.signature(original.forward).parameters else []
            self.positions[key] = original.forward(embedding, hidden, position_ids, *more)
        return self.positions[key]

    def plan(self, module: nn.Module, patch: type[Patched]) -> Any:
        """The plan under which the patched forward computes what the module computes.

        Raises:
            Refusal: If there is none.
        """
        plans = patch.plans(module)
        try:
            probe = patch.probe(module, self.rotary)
            if probe is None:
                return plans[0]
            key = (patch, self.fingerprints.of_module(probe.twin, INDEX), self.fingerprints.of(plans))
        except Refusal:
            raise
        except Exception as error:
            raise unchecked(error) from error
        answer = self.answers.get(key)
        with one_thread():
            if answer is None:
                answer = self.answers[key] = self.choose(probe, patch, plans)
            answer.must_hold_for(vars(module).get(INDEX))
        return answer.plan

    def choose(self, probe: Probe, patch: type[Patched], plans: Sequence[Any]) -> Answer:
        """Make all calls of a probe."""
        return Answer(probe, patch, plans)


class Answer:
    """What was found out about modules of one fingerprint: the plan, or why there is none.

    They may stand at different layers, whose number attention passes to its cache. Calls that read the number are made
    once more for each; the others cannot depend on it.
    """

    def __init__(self, probe: Probe, patch: type[Patched], plans: Sequence[Any]) -> None:
        self.twin = probe.twin
        self.patched = patched_class(patch, type(self.twin))
        self.own = reports_index(type(self.twin))
        self.plans = list(plans)
        self.repeated: list[Call] = []
        self.layers = {vars(self.twin).get(INDEX)}
        self.refusal: Refusal | None = None
        try:
            for call in probe.calls():
                vars(self.twin)[READ] = False
                self.make(call)
                if vars(self.twin)[READ]:
                    self.repeated.append(call)
        except Refusal as reason:
            self.refusal = reason

    @property
    def plan(self) -> Any:
        return self.plans[0]

    def must_hold_for(self, layer: Any) -> None:
        """Raise Refusal if the module at this layer is not served."""
        if self.refusal is not None:
            raise self.refusal
        if layer in self.layers:
            return
        vars(self.twin)[INDEX] = layer
        for call in self.repeated:
            self.make(call)
        self.layers.add(layer)

    def make(self, call: Call) -> None:
        """Make the call by the module's own forward and under each plan, and keep the plan that comes nearest.

        Raises:
            Refusal: If none comes near enough.
        """
        small = self.twin
        vars(small).update(call.attributes)
        try:
            with having(small, call.parameters, call.dtype):
                small.__class__ = self.own
                expected = first(call.run(small.forward))
                small.__class__ = self.patched
                if must_step_aside(small, expected):
                    raise Refusal("hooks are registered for all modules: it cannot be checked against its own forward")
                errors = []
                for plan in self.plans:
                    vars(small)[PLAN] = plan
                    errors.append(distance(first(call.run(small.forward)), expected))
        except Exception as error:  # whatever the original needs that the probe lacks
            if isinstance(error, Refusal):
                raise
            raise unchecked(error) from error
        best = min(range(len(errors)), key=errors.__getitem__)
        if not errors[best] <= call.tolerance:
            raise Refusal(f"its own forward computes something else{call.when and ' ' + call.when}")
        self.plans = [self.plans[best]]


@cache
def reports_index(own: type[nn.Module]) -> type[nn.Module]:
    """A subclass whose instances note in READ that the number of their layer was read."""

    def read(self: nn.Module) -> Any:
        if INDEX not in vars(self):
            raise AttributeError(f"{own.__name__!r} object has no attribute {INDEX!r}")
        vars(self)[READ] = True
        return vars(self)[INDEX]

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (own,), {**names, INDEX: property(read)})


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one thread: what it computes is small, and threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def unchecked(error: Exception) -> Refusal:
    return Refusal(f"it cannot be checked against its own forward: {error}")


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def distance(actual: Tensor, expected: Tensor) -> float:
    """The relative error; infinity for another shape or dtype, or where other numbers are NaN or infinite."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    actual, expected = actual.double(), expected.double()
    finite = expected.isfinite()
    if not finite.all():
        if not torch.equal(actual.isfinite(), finite):
            return float("inf")
        actual, expected = actual[finite], expected[finite]
    error = float((actual - expected).norm())
    return error / float(expected.norm()) if error else 0.0
