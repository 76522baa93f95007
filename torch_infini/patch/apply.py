"""Patches the modules of one model and its config, all or nothing, and undoes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import interface
from .families import FAMILIES, Family
from .modules import Attention
from .report import LEFT, PatchReport, Row, pattern
from .swap import Patched, restore, swap
from .verify import Verifier

STATE = "_infini_patch"  # attribute of a patched model
IMPLEMENTATION = "_attn_implementation_internal"  # where a config of transformers keeps the attention's name


@dataclass(eq=False)
class State:
    """What the patched modules themselves do not know; it is copied and pickled with its model."""

    config: Any  # as it was found; other models may share it
    patched_config: Any  # the one in its place
    values: dict[str, Any]  # of both, before
    report: PatchReport | None = None  # until all is done


def find_family(model: Any) -> tuple[Family, str, nn.Module]:
    """(family, prefix of the decoder's names, decoder); TypeError for a model that the table does not know."""
    for family in FAMILIES:
        found = family.find_decoder(model) if isinstance(model, nn.Module) else None
        if found is not None:
            return family, *found
    known = " or ".join(f"a {family.name} of transformers ({', '.join(family.models)})" for family in FAMILIES)
    raise TypeError(f"torch_infini.patch_model: model must be {known}, got {type(model).__name__}")


def apply(model: nn.Module, strict: bool) -> PatchReport:
    """Patch the model, or leave it exactly as it was and raise."""
    family, prefix, decoder = find_family(model)
    interface.register()
    config = decoder.config
    state = State(config, copy(config), dict(vars(config)))
    try:
        vars(model)[STATE] = state
        replace_config(model, config, state.patched_config)
        # Masks that come as None are causal for SDPA, but not for every implementation.
        setattr(state.patched_config, IMPLEMENTATION, "sdpa")
        with torch.no_grad(), torch.autocast("cpu", enabled=False), eval_mode(model):
            rows = patch_modules(model, family, prefix, decoder)
        report = state.report = PatchReport(family.name, type(model).__name__, rows)
        if strict and report.left:
            shown = "; ".join(f"{row.name} ({row.reason})" for row in report.left[:3])
            more = f"; and {len(report.left) - 3} more" if len(report.left) > 3 else ""
            raise ValueError(f"torch_infini.patch_model: strict=True, but these would be left: {shown}{more}")
        attention = {name for name, patch in family.rules if issubclass(patch, Attention)}
        left = any(pattern(row.name.removeprefix(prefix)) in attention for row in report.left)
        # Attention that was left needs the masks of the implementation that it was made for.
        setattr(state.patched_config, IMPLEMENTATION, state.values.get(IMPLEMENTATION) if left else interface.NAME)
    except BaseException:
        undo(model)
        raise
    return report


def patch_modules(model: nn.Module, family: Family, prefix: str, decoder: nn.Module) -> tuple[Row, ...]:
    """Swap and check one module after the other, those inside before those around them; rows in the model's order."""
    verifier = Verifier(decoder)
    rules = [(f"{prefix}{name}", patch) for name, patch in family.rules] + [family.head]
    modules = list(model.named_modules(remove_duplicate=False))
    rows: dict[str, Row] = {}
    for wanted, patch in rules:
        for name, module in modules:
            if pattern(name) == wanted:
                original = type(module).__name__
                # A module that stands in several places is patched once.
                reason = None if isinstance(module, Patched) else patch_module(module, patch, verifier)
                rows[name] = Row(name, original, LEFT if reason else patch.infini_ops, reason or "")
    return tuple(rows[name] for name, _ in modules if name in rows)


def patch_module(module: nn.Module, patch: type[Patched], verifier: Verifier) -> str | None:
    """Patch one module, or leave it and say why."""
    reason = patch.refusal(module)
    if reason is None:
        swap(module, patch)
        reason = verifier.refusal(module)
        if reason is not None:
            restore(module)
    return reason


def replace_config(model: nn.Module, old: Any, new: Any) -> None:
    """Let every module of the model that holds one config hold the other."""
    for module in model.modules():
        if vars(module).get("config") is old:
            vars(module)["config"] = new


def undo(model: nn.Module) -> None:
    """Take back a patch, or as much of it as there is; what was set on the model's config meanwhile stays set."""
    state: State = vars(model).pop(STATE)
    for name, value in vars(state.patched_config).items():
        if name != IMPLEMENTATION and value is not state.values.get(name, STATE):
            vars(state.config)[name] = value
    replace_config(model, state.patched_config, state.config)
    for module in model.modules():
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
