"""Patches the modules of one model and its config, all or nothing, and undoes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin

from .. import _products
from . import interface
from .attention import Attention
from .layer import link
from .memory import align
from .mlp import GatedMLP
from .model import IMPLEMENTATION, Model
from .quantised import QuantisedLinear, join, layers_to_quantise, quantise
from .report import LEFT, PatchReport, Row
from .shares import local, ranks_of_model
from .stand_in import forget
from .structure import candidates, find_decoder
from .swap import PLAN, STATE, Patched, Refusal, restore, swap
from .trial import Trial, labelled
from .verify import Verifier


@dataclass(eq=False)
class State:
    """What the patched modules themselves do not know; it is copied and pickled with its model."""

    config: Any  # as it was found; other models may share it
    patched_config: Any  # the one in its place
    values: dict[str, Any]  # of both, before
    selection: Selection  # what patch_model was asked for
    report: PatchReport | None = None  # until all is done
    quantised: list[str] = field(default_factory=list)  # names of linear layers whose weights are gone


@dataclass(frozen=True)
class Selection:
    """Which modules may be replaced, by patterns of their names."""

    only: Sequence[str] | None
    skip: Sequence[str]

    def refusal(self, name: str) -> str | None:
        """Why the caller does not want this module replaced; None if it may be."""
        parents = [name[:i] for i, letter in enumerate(name) if letter == "."] + [name]
        for pattern in self.skip:
            if any(fnmatchcase(parent, pattern) for parent in parents):
                return f"skip={pattern!r}"
        if self.only is not None and not any(fnmatchcase(name, pattern) for pattern in self.only):
            return "it is not among `only`"
        return None


def apply(model: nn.Module, weights: str | None, strict: bool, selection: Selection) -> PatchReport:
    """Patch the model, or leave it exactly as it was: and raise, or say why in the report."""
    try:
        with labelled():
            return _apply(model, weights, strict, selection)
    finally:
        forget()


def products_of(model: nn.Module, rows: Sequence[Row]) -> str:
    """The dtype of the dense products that our ops compute now, and what computes them; empty if there are none."""
    dense = {op for row in rows if row.op != LEFT for op in row.op.split(", ")} & {"linear", "fused_linear"}
    dtype = next((p.dtype for p in model.parameters() if p.dtype in _products.DTYPES and p.is_cpu), None)
    return (
        f"{str(dtype).removeprefix('torch.')}: {_products.described(dtype, ('linear', 'matmul'))}"
        if dense and dtype
        else ""
    )


def _apply(model: nn.Module, weights: str | None, strict: bool, selection: Selection) -> PatchReport:
    found = find_decoder(model)
    if found is None:
        reason = "it has no decoder of the Llama family (embed_tokens, layers with self_attn and mlp, norm, rotary_emb)"
        if strict:
            raise ValueError(f"torch_infini.patch_model: strict=True, but {type(model).__name__} cannot be: {reason}")
        return PatchReport("", type(model).__name__, (), reason=reason)
    name, decoder = found
    interface.register()
    ranks = ranks_of_model(model)
    trial = Trial(model, decoder)
    config = decoder.config
    state = State(config, copy(config), dict(vars(config)), selection)
    try:
        for holder in holders(model, decoder):
            vars(holder)[STATE] = state
        replace_config(model, config, state.patched_config)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), eval_mode(model):
            rows = patch_modules(model, name, decoder, selection)
            chosen = choose_weights(model, decoder, weights, selection) if weights else ()
        family = getattr(config, "model_type", type(config).__name__)
        rows = merged(model, (*rows, *(row for row, _ in chosen)))
        report = state.report = PatchReport(family, type(model).__name__, rows, products=products_of(model, rows))
        if ranks is not None:
            kinds = [(row.name, row.op, row.reason) for row in rows]  # shares of numbers differ
            # Ranks that do not call the same collectives would wait for each other.
            ranks.must_agree("what patch_model does", sha256(repr(kinds).encode()).digest())
        if strict and report.left:
            shown = "; ".join(f"{row.name} ({row.reason})" for row in report.left[:3])
            more = f"; and {len(report.left) - 3} more" if len(report.left) > 3 else ""
            raise ValueError(f"torch_infini.patch_model: strict=True, but these would be left: {shown}{more}")
        served = all(isinstance(layer.self_attn, Attention) for layer in decoder.layers)
        # Attention that was left needs the masks of the implementation that it was made for.
        setattr(state.patched_config, IMPLEMENTATION, interface.NAME if served else state.values.get(IMPLEMENTATION))
        fault = trial.fault()
        if ranks is not None:
            ranks.must_agree("what patch_model finds at two tokens", sha256(repr(bool(fault)).encode()).digest())
        if fault and strict:
            raise ValueError(f"torch_infini.patch_model: strict=True, but {type(model).__name__} cannot be: {fault}")
        if fault:
            undo(model)
            return PatchReport(family, type(model).__name__, (), reason=fault)
        report = state.report = replace(report, untried=trial.untried)
    except BaseException:
        undo(model)
        raise
    # From here on there is no way back: a weight is freed when its integers are there.
    wanted = {row.name: format for row, format in chosen if row.op != LEFT}
    try:
        for name, format in wanted.items():
            quantise(model.get_submodule(name), format)
    finally:  # after an interrupt, too, the model works, and its report says what is done
        state.quantised = [name for name in wanted if isinstance(model.get_submodule(name), QuantisedLinear)]
        missed = {name for name in wanted if name not in state.quantised}
        rows = [replace(r, op=LEFT, reason="interrupted") if r.name in missed else r for r in report.rows]
        report = state.report = replace(report, rows=merged(model, rows))
    if wanted:
        join_products(decoder)
    served = {row.name for row in report.replaced}
    with torch.no_grad():
        align(m for n, m in model.named_modules() if n in served or n.rpartition(".")[0] in served)
    return report


def join_products(decoder: nn.Module) -> None:
    """One product for the quantised layers that share an input."""
    for module in decoder.modules():
        if isinstance(module, Attention | GatedMLP):
            join([module._modules[name] for name in vars(module)[PLAN].inputs])


def choose_weights(
    model: nn.Module, decoder: nn.Module, weights: str, selection: Selection
) -> tuple[tuple[Row, str], ...]:
    """(row, format) of every linear layer whose weight may become integers."""
    chosen = []
    for name, module, format in layers_to_quantise(model, decoder, weights):
        reason, op = selection.refusal(name), LEFT
        if reason is None:
            try:
                op = QuantisedLinear.ops(QuantisedLinear.plans(module, format)[0])
            except Refusal as refusal:
                reason = str(refusal)
        chosen.append((Row(name, type(module).__name__, op, reason or ""), format))
    return tuple(chosen)


def patch_modules(model: nn.Module, name: str, decoder: nn.Module, selection: Selection) -> tuple[Row, ...]:
    """Swap and check one module after the other, those inside before those around them; rows in the model's order."""
    verifier = Verifier(decoder)
    modules = dict(model.named_modules(remove_duplicate=False))
    rows: dict[str, Row] = {}
    for here, patch in candidates(model, name, decoder):
        module = modules[here]
        original = type(module).__name__
        reason, op = selection.refusal(here), patch.infini_ops
        # A module that stands in several places is patched once.
        if reason is None and not isinstance(module, Patched):
            try:
                plan = verifier.plan(module, patch)
                op = patch.ops(plan)
                swap(module, patch, plan)
            except Refusal as refusal:
                reason = str(refusal)
        rows[here] = Row(here, original, LEFT if reason else op, reason or "")
    link(list(decoder.layers), decoder.norm)
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            swap(module, Model, Model.plans(module)[0])
    return tuple(rows.values())


def merged(model: nn.Module, rows: Sequence[Row]) -> tuple[Row, ...]:
    """The last row of each module, in the model's order, each with the parameters that no row inside it has."""
    modules = dict(model.named_modules(remove_duplicate=False))
    last = {row.name: row for row in rows}
    seen: set[int] = set()
    for name in sorted(last, key=lambda name: -name.count(".")):  # those inside first
        parameters = size = 0
        for module in modules[name].modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen |= {id(p) for p in own}
            parameters += sum(local(p).numel() for p in own)
            size += sum(local(p).nbytes for p in own)
            if isinstance(module, QuantisedLinear):
                parameters += module.numbers
                size += sum(b.nbytes for b in module.buffers())
        last[name] = replace(last[name], parameters=parameters, bytes=size)
    return tuple(last[name] for name in modules if name in last)


def holders(model: nn.Module, decoder: nn.Module) -> list[nn.Module]:
    """The modules that know of the patch: what is patched itself, not what may be wrapped around it and taken off."""
    return [decoder, *(module for module in model.modules() if isinstance(module, GenerationMixin))]


def states_in(model: nn.Module) -> list[State]:
    """The states of the patches in a model, or in what it wraps: one, unless several models are in it."""
    found = {id(state): state for module in model.modules() if (state := vars(module).get(STATE)) is not None}
    return list(found.values())


def state_of(model: nn.Module) -> State:
    """The state of a patched model."""
    return states_in(model)[0]


def whole_state(model: nn.Module) -> State | None:
    """The state of the patch, if it holds all that would be patched; None if nothing is patched, or only a part."""
    found = find_decoder(model)
    states = {id(vars(holder).get(STATE)) for holder in holders(model, found[1])} if found else set()
    return vars(found[1]).get(STATE) if found and len(states) == 1 else None


def replace_config(model: nn.Module, old: Any, new: Any) -> None:
    """Let every module of the model that holds one config hold the other."""
    for module in model.modules():
        if vars(module).get("config") is old:
            vars(module)["config"] = new


def undo(model: nn.Module) -> None:
    """Take back a patch, or as much of it as there is; what was set on the model's config meanwhile stays set."""
    for state in states_in(model):
        for name, value in vars(state.patched_config).items():
            if name != IMPLEMENTATION and value is not state.values.get(name, STATE):
                vars(state.config)[name] = value
        replace_config(model, state.patched_config, state.config)
        # What was wrapped around the model, and is not part of it any more, may still hold the other one.
        setattr(state.patched_config, IMPLEMENTATION, state.values.get(IMPLEMENTATION))
    for module in model.modules():
        vars(module).pop(STATE, None)
        if isinstance(module, Patched):
            restore(module)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run the body with the model's dropout off."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
