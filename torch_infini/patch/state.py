"""The state of a patch, kept on the decoder and the models around it, and undo."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers import GenerationMixin

from .decoder import Decoder, find_decoder
from .layers import block_embedding
from .layers.block_embedding import BlockEmbedding
from .layers.interface import IMPLEMENTATION
from .layers.packed_linear import PackedLinear, make_dense
from .report import PatchReport
from .swap import STATE, Patched, restore


@dataclass(frozen=True)
class Selection:
    """Which modules may be replaced, by name patterns."""

    only: Sequence[str] | None
    skip: Sequence[str]

    def excludes(self, name: str) -> str | None:
        """Return why the caller excludes this module; None if it may be replaced."""
        parents = [name[:i] for i, letter in enumerate(name) if letter == "."] + [name]
        for pattern in self.skip:
            if any(fnmatchcase(parent, pattern) for parent in parents):
                return f"skip={pattern!r}"
        if self.only is not None and not any(fnmatchcase(name, pattern) for pattern in self.only):
            return "it is not among `only`"
        return None


@dataclass(eq=False)
class PatchedConfig:
    """A config of the model, and the copy that its modules have instead.

    Attributes:
        original: The config; other models may share it.
        patched: Its copy.
        values: Attributes of both before the patch.
    """

    original: Any
    patched: Any
    values: dict[str, Any]

    @classmethod
    def of(cls, config: Any) -> PatchedConfig:
        return cls(config, copy(config), dict(vars(config)))


@dataclass(eq=False)
class State:
    """State of one patch beyond its modules; copied and pickled with the model."""

    config: PatchedConfig  # the decoder's
    selection: Selection  # what patch_model was asked for
    towers: list[PatchedConfig] = field(default_factory=list)  # of towers whose attention is ours
    report: PatchReport | None = None  # None until patching is complete
    quantized: list[str] = field(default_factory=list)  # names of linear layers whose full-precision weights are freed


def holders(model: nn.Module, decoder: Decoder) -> list[nn.Module]:
    """Return the modules that hold the patch's state: the patched ones, not removable wrappers around them."""
    return [decoder.module, *(module for module in model.modules() if isinstance(module, GenerationMixin))]


def states_in(model: nn.Module) -> list[State]:
    """Return the states of the patches in a model or in what it wraps: one for each model inside."""
    found = {id(state): state for module in model.modules() if (state := vars(module).get(STATE)) is not None}
    return list(found.values())


def state_of(model: nn.Module) -> State:
    return states_in(model)[0]


def whole_state(model: nn.Module) -> State | None:
    """Return the state of a patch of the whole model; None if nothing or only a part is patched."""
    found = find_decoder(model)
    states = {id(vars(holder).get(STATE)) for holder in holders(model, found[1])} if found else set()
    return vars(found[1].module).get(STATE) if found and len(states) == 1 else None


def replace_config(model: nn.Module, old: Any, new: Any) -> None:
    for module in model.modules():
        if vars(module).get("config") is old:
            vars(module)["config"] = new


def undo(model: nn.Module) -> None:
    """Undo a patch, complete or partial; values set on the model's config meanwhile are kept."""
    for config in [config for state in states_in(model) for config in (state.config, *state.towers)]:
        for name, value in vars(config.patched).items():
            if name != IMPLEMENTATION and value is not config.values.get(name, STATE):
                vars(config.original)[name] = value
        replace_config(model, config.patched, config.original)
        # A wrapper that no longer contains the model may still hold the patched config.
        setattr(config.patched, IMPLEMENTATION, config.values.get(IMPLEMENTATION))
    for module in model.modules():
        vars(module).pop(STATE, None)
        if isinstance(module, PackedLinear):
            make_dense(module)
        if isinstance(module, BlockEmbedding):
            block_embedding.make_dense(module)
        if isinstance(module, Patched):
            restore(module)
