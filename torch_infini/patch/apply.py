"""Patches the modules of one model and its config, all or nothing, and undoes that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from .._core import products
from .._core.devices import on_cpu
from ..weights import served
from . import budget
from .checks.probe import clear_caches
from .checks.trial import Trial, labelled
from .checks.verify import Verifier
from .decoder import Decoder, find_decoder, is_decoder
from .layers import interface
from .layers.attention import Attention
from .layers.compressed import compressed_layers, take_over
from .layers.layer import link
from .layers.loop import Loop
from .layers.memory import align
from .layers.mlp import GatedMLP
from .layers.model import IMPLEMENTATION, Model
from .layers.quantized_linear import QuantizedLinear, fuse, layers_to_quantize, quantize_layer
from .layers.sharded import ShardedLinear
from .report import SKIPPED, Budget, PatchReport, Row
from .shares import local, ranks_of_model
from .structure import candidates
from .swap import PLAN, STATE, Patched, Unsupported, restore, swap


@dataclass(eq=False)
class State:
    """State of one patch beyond its modules; copied and pickled with the model."""

    config: Any  # the original; other models may share it
    patched_config: Any  # its replacement
    values: dict[str, Any]  # attributes of both before the patch
    selection: Selection  # what patch_model was asked for
    report: PatchReport | None = None  # None until patching is complete
    quantized: list[str] = field(default_factory=list)  # names of linear layers whose full-precision weights are freed


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


def apply(
    model: nn.Module, weights: str | None, strict: bool, selection: Selection, calibrate: Tensor | None = None
) -> PatchReport:
    """Patch the model, or leave it exactly as it was and raise, or give the reason in the report."""
    compressed = compressed_layers(model) if find_decoder(model) is not None else {}
    try:
        with labelled():
            # This cannot be undone, but leaves a model that computes the same where patching fails.
            taken = take_over(model, compressed)
            report = _apply(model, weights, strict, selection, calibrate)
            if taken and not report.reason:
                state = state_of(model)
                state.quantized = [*taken, *state.quantized]
                for decoder in (module for module in model.modules() if is_decoder(module)):
                    fuse_projections(decoder)
            return report
    finally:
        clear_caches()


def products_of(model: nn.Module, rows: Sequence[Row]) -> str:
    """Describe the dtype of the dense products and what computes them; empty if there are none."""
    dense = {op for row in rows if row.op != SKIPPED for op in row.op.split(", ")} & {"linear", "fused_linear"}
    dtype = next((p.dtype for p in model.parameters() if p.dtype in products.DTYPES and on_cpu(p)), None)
    if not dense or dtype is None:
        return ""
    return f"{str(dtype).removeprefix('torch.')}: {products.described(dtype, ('linear', 'matmul'))}"


def _apply(
    model: nn.Module, weights: str | None, strict: bool, selection: Selection, calibrate: Tensor | None
) -> PatchReport:
    found = find_decoder(model)
    if found is None:
        reason = (
            "it has no decoder of the Llama family (embed_tokens, layers with self_attn and mlp, norm, rotary_emb); "
            'torch.compile(model, backend="infini") takes any model, and computes the norms and attention that it finds'
        )
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
            layers = layers_to_choose(model, decoder, weights, selection) if weights else []
        family = getattr(config, "model_type", type(config).__name__)
        rows = merged(model, (*rows, *(row_of(layer) for layer in layers)))
        report = state.report = PatchReport(family, type(model).__name__, rows, products=products_of(model, rows))
        if ranks is not None:
            kinds = [(row.name, row.op, row.reason) for row in rows]  # parameter counts differ between ranks
            # Ranks that call different collectives would deadlock.
            ranks.must_agree("what patch_model does", sha256(repr(kinds).encode()).digest())
        if strict and report.left:
            shown = "; ".join(f"{row.name} ({row.reason})" for row in report.left[:3])
            more = f"; and {len(report.left) - 3} more" if len(report.left) > 3 else ""
            raise ValueError(f"torch_infini.patch_model: strict=True, but these would be left: {shown}{more}")
        attends = all(isinstance(layer.self_attn, Attention) for layer in decoder.layers)
        # Attention that was left needs the masks of the implementation that it was made for.
        setattr(state.patched_config, IMPLEMENTATION, interface.NAME if attends else state.values.get(IMPLEMENTATION))
        fault = trial.fault()
        if ranks is not None:
            ranks.must_agree("what patch_model finds at two tokens", sha256(repr(bool(fault)).encode()).digest())
        if fault and strict:
            raise ValueError(f"torch_infini.patch_model: strict=True, but {type(model).__name__} cannot be: {fault}")
        if fault:
            undo(model)
            return PatchReport(family, type(model).__name__, (), reason=fault)
        report = state.report = replace(report, untried=trial.untried)
        if (bits := budget.bits_of(weights)) is not None:
            with eval_mode(model):
                layers, spent = choose_weights(model, decoder, layers, bits, calibrate)
            rows = merged(model, (*report.rows, *(row_of(layer) for layer in layers)))
            report = state.report = replace(report, rows=rows, budget=spent)
    except BaseException:
        undo(model)
        raise
    # From here on nothing can be undone: each weight is freed once its integers exist.
    wanted = {layer.name: format for layer in layers if (format := next(iter(layer.formats), None)) is not None}
    try:
        for name, format in wanted.items():
            quantize_layer(model.get_submodule(name), format)
    finally:  # even after an interrupt the model works, and its report is accurate
        state.quantized = [name for name in wanted if isinstance(model.get_submodule(name), QuantizedLinear)]
        missed = {name for name in wanted if name not in state.quantized}
        rows = tuple(replace(r, op=SKIPPED, reason="interrupted") if r.name in missed else r for r in report.rows)
        report = state.report = replace(report, rows=merged(model, rows))
    if wanted:
        fuse_projections(decoder)
    replaced = {row.name for row in report.replaced}
    with torch.no_grad():
        align(m for n, m in model.named_modules() if n in replaced or n.rpartition(".")[0] in replaced)
    return report


def fuse_projections(decoder: Decoder) -> None:
    """Fuse the quantized layers that share an input into one product."""
    for module in decoder.modules():
        if isinstance(module, Attention | GatedMLP):
            fuse([module._modules[name] for name in vars(module)[PLAN].inputs])


def layers_to_choose(
    model: nn.Module, decoder: Decoder, weights: str, selection: Selection
) -> list[budget.QuantizableLayer]:
    """Return every linear layer that may be quantized, with the formats that it may have."""
    layers = []
    for name, module, format in layers_to_quantize(model, decoder, weights):
        formats, reason = {}, selection.excludes(name) or ""
        for one in () if reason else served() if budget.bits_of(weights) is not None else (format,):
            try:
                formats[one] = QuantizedLinear.plans(module, one)[0].format
            except Unsupported as unsupported:
                reason = str(unsupported)
        layers.append(budget.QuantizableLayer(name, module, formats, "" if formats else reason))
    return layers


def row_of(layer: budget.QuantizableLayer) -> Row:
    """The row of a layer in its first format."""
    format = next(iter(layer.formats), None)
    op = SKIPPED if format is None else QuantizedLinear.ops(QuantizedLinear.plans(layer.module, format)[0])
    return Row(layer.name, type(layer.module).__name__, op, layer.reason)


def choose_weights(
    model: nn.Module, decoder: Decoder, layers: Sequence[budget.QuantizableLayer], bits: float, calibrate: Tensor | None
) -> tuple[list[budget.QuantizableLayer], Budget | None]:
    """Return the layers with the one format that each gets of a mean number of bits."""
    able = [layer for layer in layers if layer.formats]
    if any(isinstance(layer.module, ShardedLinear) for layer in able):
        raise ValueError("torch_infini.patch_model: weights='auto:BITS' must be of a whole model, got sharded layers")
    if not able:
        return list(layers), None
    ids = budget.tokens_of(calibrate, decoder.embed_tokens.weight.shape[0])
    found, spent = budget.choose(model, decoder, able, groups_of(decoder, able), bits, ids)
    kept = []
    for layer in layers:
        formats = {name: format for name, format in layer.formats.items() if name == found[layer.name]}
        kept.append(layer._replace(formats=formats))
    return kept, spent


def groups_of(decoder: Decoder, layers: Sequence[budget.QuantizableLayer]) -> list[list[int]]:
    """Group layers with one input, which are fused; by their indices."""
    place = {id(layer.module): i for i, layer in enumerate(layers)}
    groups = []
    for module in decoder.modules():
        if isinstance(module, Attention | GatedMLP):
            inputs = [id(module._modules[name]) for name in vars(module)[PLAN].inputs]
            groups.append([place.pop(one) for one in inputs if one in place])
    return [*filter(None, groups), *([i] for i in place.values())]


def patch_modules(model: nn.Module, name: str, decoder: Decoder, selection: Selection) -> tuple[Row, ...]:
    """Check and swap modules one by one, children before parents; return a row for each, in the model's order."""
    verifier = Verifier(decoder)
    modules = dict(model.named_modules(remove_duplicate=False))
    rows: dict[str, Row] = {}
    for here, patch in candidates(model, name, decoder):
        module = modules[here]
        original = type(module).__name__
        reason, op = selection.excludes(here), patch.infini_ops
        # A module registered under several names is patched once.
        if reason is None and not isinstance(module, Patched):
            try:
                plan = verifier.plan(module, patch)
                op = patch.ops(plan)
                swap(module, patch, plan)
            except Unsupported as unsupported:
                reason = str(unsupported)
        rows[here] = Row(here, original, SKIPPED if reason else op, reason or "")
    link(list(decoder.layers), decoder.norm)
    if "forward" not in vars(decoder) and not isinstance(decoder, GenerationMixin | Patched):
        swap(decoder, Loop, None)
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            swap(module, Model, Model.plans(module)[0])
    return tuple(rows.values())


def merged(model: nn.Module, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the last row of each module, in the model's order, with the parameters that no inner row counts."""
    modules = dict(model.named_modules(remove_duplicate=False))
    last = {row.name: row for row in rows}
    seen: set[int] = set()
    for name in sorted(last, key=lambda name: -name.count(".")):  # children first
        parameters = size = 0
        for module in modules[name].modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen |= {id(p) for p in own}
            parameters += sum(local(p).numel() for p in own)
            size += sum(local(p).nbytes for p in own)
            if isinstance(module, QuantizedLinear):
                parameters += module.numbers
                size += sum(b.nbytes for b in module.buffers())
        last[name] = replace(last[name], parameters=parameters, bytes=size)
    return tuple(last[name] for name in modules if name in last)


def holders(model: nn.Module, decoder: Decoder) -> list[nn.Module]:
    """Return the modules that hold the patch's state: the patched ones, not removable wrappers around them."""
    return [decoder, *(module for module in model.modules() if isinstance(module, GenerationMixin))]


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
    return vars(found[1]).get(STATE) if found and len(states) == 1 else None


def replace_config(model: nn.Module, old: Any, new: Any) -> None:
    for module in model.modules():
        if vars(module).get("config") is old:
            vars(module)["config"] = new


def undo(model: nn.Module) -> None:
    """Undo a patch, complete or partial; values set on the model's config meanwhile are kept."""
    for state in states_in(model):
        for name, value in vars(state.patched_config).items():
            if name != IMPLEMENTATION and value is not state.values.get(name, STATE):
                vars(state.config)[name] = value
        replace_config(model, state.patched_config, state.config)
        # A wrapper that no longer contains the model may still hold the patched config.
        setattr(state.patched_config, IMPLEMENTATION, state.values.get(IMPLEMENTATION))
    for module in model.modules():
        vars(module).pop(STATE, None)
        if isinstance(module, Patched):
            restore(module)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
