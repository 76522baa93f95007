"""Checks numerically what a module computes: its patched forward, under each plan, against its own.

Names and shapes only tell that a module looks like a known one, not that it computes the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ..decoder import Decoder
from ..swap import PLAN, Patched, Probe, ProbeCall, Unsupported, patched_class
from .conditions import needs_fallback
from .fingerprint import Fingerprints
from .probe import with_parameters

INDEX = "layer_idx"  # attribute of modules of a layer: the index of the layer
READ = "_infini_read"  # attribute of a probe module: whether its own forward read INDEX


class Verifier:
    """Checks plans for the modules of one decoder, one module of each fingerprint: equal layers are checked once."""

    def __init__(self, decoder: Decoder) -> None:
        # `embedding` is a copy: probe modules run on the CPU, and a forward may write to its module.
        self.original = decoder.rotary_emb
        self.embedding: nn.Module | None = None
        self.fingerprints = Fingerprints()
        self.positions: dict[tuple[Any, ...], Any] = {}
        self.verdicts: dict[Hashable, Verdict] = {}

    def rotary(self, hidden: Tensor, position_ids: Tensor) -> Any:
        """Return cos and sin as the decoder computes them (of the first layer type, if it has several)."""
        key = (hidden.dtype, len(hidden), *position_ids.flatten().tolist())
        if key not in self.positions:
            if self.original is None:
                raise Unsupported("its model has no rotary_emb beside the layers")
            if self.embedding is None:
                self.embedding = deepcopy(self.original).cpu()
            embedding = self.embedding
            original: Any = getattr(embedding, "infini_original", type(embedding))
            kinds = vars(embedding).get("rope_type")  # by layer type, without those that do not rotate
            kinds = list(kinds) if isinstance(kinds, dict) else getattr(embedding, "layer_types", ())
            more = [kinds[0]] if kinds and "layer_type" in inspect.signature(original.forward).parameters else []
            self.positions[key] = original.forward(embedding, hidden, position_ids, *more)
        return self.positions[key]

    def plan(self, module: nn.Module, patch: type[Patched]) -> Any:
        """Return the plan under which the patched forward computes the same as the module, or raise Unsupported."""
        return self.checked(module, patch, patch.plans(module))

    def checked(self, module: nn.Module, patch: type[Patched], plans: Sequence[Any]) -> Any:
        """The same for given plans; the module may be on meta, for its probe has weights of its own."""
        try:
            probe = patch.probe(module, self.rotary)
            if probe is None:
                return plans[0]
            key = (
                patch,
                self.fingerprints.of_module(probe.module, INDEX),
                self.fingerprints.of_value(plans),
            )
        except Unsupported:
            raise
        except Exception as error:
            raise unchecked(error) from error
        verdict = self.verdicts.get(key)
        with one_thread():
            if verdict is None:
                verdict = self.verdicts[key] = Verdict(probe, patch, plans)
            verdict.check_layer(vars(module).get(INDEX))
        return verdict.plan


class Verdict:
    """The plan of modules of one fingerprint, or why there is none.

    Layers differ in their index, which attention passes to its cache. Calls that read the index are repeated for each
    layer; the others cannot depend on it.
    """

    def __init__(self, probe: Probe, patch: type[Patched], plans: Sequence[Any]) -> None:
        self.module = probe.module
        self.patched = patched_class(patch, type(self.module))
        self.own = records_index(type(self.module))
        self.plans = list(plans)
        self.repeated: list[ProbeCall] = []
        self.layers = {vars(self.module).get(INDEX)}
        self.unsupported: Unsupported | None = None
        try:
            for call in probe.calls():
                vars(self.module)[READ] = False
                self.make(call)
                if vars(self.module)[READ]:
                    self.repeated.append(call)
        except Unsupported as reason:
            self.unsupported = reason

    @property
    def plan(self) -> Any:
        return self.plans[0]

    def check_layer(self, layer: Any) -> None:
        """Raise Unsupported if the plan does not hold at this layer."""
        if self.unsupported is not None:
            raise self.unsupported
        if layer in self.layers:
            return
        vars(self.module)[INDEX] = layer
        for call in self.repeated:
            self.make(call)
        self.layers.add(layer)

    def make(self, call: ProbeCall) -> None:
        """Make the call by the original forward and under each plan; keep the best plan if it is within tolerance."""
        small = self.module
        vars(small).update(call.attributes)
        try:
            with with_parameters(small, call.parameters, call.dtype):
                small.__class__ = self.own
                expected = first(call.run(small.forward))
                small.__class__ = self.patched
                if needs_fallback(small, expected):
                    raise Unsupported(
                        "hooks are registered for all modules: it cannot be checked against its own forward"
                    )
                errors = []
                for plan in self.plans:
                    vars(small)[PLAN] = plan
                    errors.append(distance(first(call.run(small.forward)), expected))
        except Exception as error:  # the original needs something that the probe module lacks
            if isinstance(error, Unsupported):
                raise
            raise unchecked(error) from error
        best = min(range(len(errors)), key=errors.__getitem__)
        if not errors[best] <= call.tolerance:
            raise Unsupported(f"its own forward gives a different result{call.when and ' ' + call.when}")
        self.plans = [self.plans[best]]


_recording: dict[type[nn.Module], type[nn.Module]] = {}


def records_index(own: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass whose instances record in READ that INDEX was read."""
    if own in _recording:
        return _recording[own]

    def read(self: nn.Module) -> Any:
        if INDEX not in vars(self):
            raise AttributeError(f"{own.__name__!r} object has no attribute {INDEX!r}")
        vars(self)[READ] = True
        return vars(self)[INDEX]

    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    _recording[own] = type(own.__name__, (own,), {**names, INDEX: property(read)})
    return _recording[own]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one thread: the work is too small to split."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def unchecked(error: Exception) -> Unsupported:
    return Unsupported(f"it cannot be checked against its own forward: {error}")


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error; infinity if shape, dtype or the positions of NaN and infinity differ."""
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
