"""Patches the modules of one model and its config, all or nothing: find, replace, try, choose formats, quantize."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from .._core import products
from .._core.devices import on_cpu
from .._core.memory import trim
from .._core.progress import DELAY, track
from . import budget
from .checks.probe import clear_caches
from .checks.trial import Trial, labelled
from .checks.verify import Verifier
from .decoder import Decoder, find_decoder, is_decoder
from .layers import interface
from .layers.attention import Attention
from .layers.compressed import compressed_layers, take_over
from .layers.interface import IMPLEMENTATION
from .layers.interface_attention import InterfaceAttention, calls_interface
from .layers.layer import link
from .layers.linear import Linear
from .layers.loop import Loop
from .layers.memory import align
from .layers.packed import packed_layers, take_over_packed
from .layers.packed_linear import PackedLinear, make_dense, noting_reads, pack
from .layers.quantized import Quantized, Reformatted
from .model import DecoderModel, Model
from .options import PACKED, bits_of
from .quantize import choose_weights, fuse_projections, groups_to_pack, layers_to_choose, quantize_module, row_of
from .replacement import Replacement
from .report import IN_PARTS, SKIPPED, PatchReport, Row
from .shares import local, tp_group_of_model
from .state import PatchedConfig, Selection, State, holders, replace_config, undo
from .structure import candidates, is_replaced_in_parts
from .swap import STATE, Patched, Unsupported, restore, swap
from .towers import patch_tower, towers_of

ATTENDING = (Attention, InterfaceAttention)


def apply(
    model: nn.Module,
    weights: str | None,
    strict: bool,
    selection: Selection,
    calibrate: Tensor | None = None,
    quantized: Sequence[str] = (),
) -> PatchReport:
    """Patch the model; if that fails, leave it exactly as it was, and raise or give the reason in the report.

    Args:
        model: The model.
        weights, strict, calibrate: As patch_model's.
        selection: What may be replaced.
        quantized: Names of linear layers that were loaded with quantized weights.
    """
    found = find_decoder(model)
    if found is None:
        return not_found(model, strict)
    compressed, packed = compressed_layers(model), packed_layers(model)
    with labelled(), caches_cleared():
        # This cannot be undone, but if patching fails, the model still computes the same.
        taken = [*take_over(model, compressed), *take_over_packed(model, packed)]
        patching = Patching(model, *found, selection, strict)
        with patching.undone_on_failure():
            patching.replace_modules(weights)
            if reason := patching.try_whole():
                return patching.undo_and_report(reason)
            patching.choose_formats(weights, calibrate)
        if weights == PACKED:
            patching.pack()
        patching.quantize([*quantized, *taken])
        return patching.report


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters; of a sharded one, of this rank's shard."""
    return sum(local(parameter).nbytes for parameter in module.parameters())


def not_found(model: nn.Module, strict: bool) -> PatchReport:
    """Report a model without a decoder that could be patched; raise if strict."""
    reason = (
        "it is no model of transformers with an embedding of tokens and layers; "
        'torch.compile(model, backend="infini") takes any model, and computes the norms and attention that it finds'
    )
    if strict:
        raise ValueError(f"torch_infini.patch_model: strict=True, but {type(model).__name__} cannot be: {reason}")
    return PatchReport("", type(model).__name__, (), reason=reason)


class Patching:
    """One model while it is being patched: the steps of `apply`, in order.

    Args:
        model: The model.
        name: The decoder's name in it.
        decoder: The decoder.
        selection: What patch_model was asked for.
        strict: Whether to raise where something would be left.

    Attributes:
        report: What was done so far.
        layers: The linear layers to quantize or to pack.
    """

    def __init__(self, model: nn.Module, name: str, decoder: Decoder, selection: Selection, strict: bool) -> None:
        interface.register()
        self.model, self.name, self.decoder, self.strict = model, name, decoder, strict
        config = decoder.config
        self.family: str = getattr(config, "model_type", type(config).__name__)
        self.tp_group = tp_group_of_model(model)
        self.trial = Trial(model, decoder)
        self.state = State(PatchedConfig.of(config), selection)
        self.report = PatchReport(self.family, type(model).__name__, ())
        self.layers: list[budget.QuantizableLayer] = []

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            undo(self.model)
            raise

    def replace_modules(self, weights: str | None) -> None:
        """Check and replace modules one by one, and report them; nothing is quantized yet."""
        model, decoder, state = self.model, self.decoder, self.state
        for holder in holders(model, decoder):
            vars(holder)[STATE] = state
        replace_config(model, state.config.original, state.config.patched)
        with torch.no_grad(), torch.autocast("cpu", enabled=False), eval_mode(model):
            rows = patch_modules(model, self.name, decoder, state.selection)
            if not self.attends():
                rows = self.without_interface(
                    rows, "other attention of the model keeps its function, and they share one"
                )
            self.layers = layers_to_choose(model, decoder, weights, state.selection) if weights else []
        rows = merged(model, (*rows, *map(row_of, self.layers), *self.patch_towers()))
        self.set_report(replace(self.report, rows=rows, products=products_of(model, rows)))
        # Parameter counts differ between ranks; ranks that call different collectives would deadlock.
        self.must_agree("what patch_model does", [(row.name, row.op, row.reason) for row in rows])
        if self.strict and (left := self.report.left):
            shown = "; ".join(f"{row.name} ({row.reason})" for row in left[:3])
            more = f"; and {len(left) - 3} more" if len(left) > 3 else ""
            raise ValueError(f"torch_infini.patch_model: strict=True, but these would be left: {shown}{more}")
        self.choose_attention()

    def patch_towers(self) -> list[Row]:
        """Replace what is computed alike in the models beside the decoder; return a row for each module."""
        rows: list[Row] = []
        left, verifier = [], Verifier(self.decoder)
        untried = "its model is shared by ranks" if self.tp_group is not None else self.trial.untried
        for tower in towers_of(self.model, self.decoder):
            replaced, reason = ([], untried) if untried else patch_tower(tower, verifier, self.state)
            rows += replaced
            left += [(tower.name, reason)] if reason else []
        self.set_report(replace(self.report, towers_left=tuple(left)))
        return rows

    def attends(self) -> bool:
        """Return whether there is attention, and every module that calls the config's function is replaced."""
        modules = list(self.decoder.module.modules())
        attending = any(isinstance(module, ATTENDING) for module in modules)
        return attending and all(isinstance(module, ATTENDING) for module in modules if calls_interface(module))

    def choose_attention(self) -> None:
        """Let the config name our attention function where it serves all."""
        # Attention that was left needs the masks of its own implementation.
        config = self.state.config
        name = interface.NAME if self.attends() else config.values.get(IMPLEMENTATION)
        setattr(config.patched, IMPLEMENTATION, name)

    def try_whole(self) -> str:
        """Run two tokens through the whole model; return what is wrong with it, empty if nothing is."""
        fault = self.trial.fault()
        if fault and any(isinstance(module, InterfaceAttention) for module in self.decoder.module.modules()):
            self.set_report(replace(self.report, rows=self.without_interface(self.report.rows, fault)))
            self.choose_attention()
            fault = self.trial.fault()
        self.must_agree("what patch_model finds at two tokens", bool(fault))
        if fault and self.strict:
            kind = type(self.model).__name__
            raise ValueError(f"torch_infini.patch_model: strict=True, but {kind} cannot be: {fault}")
        if not fault:
            self.set_report(replace(self.report, untried=self.trial.untried))
        return fault

    def without_interface(self, rows: tuple[Row, ...], reason: str) -> tuple[Row, ...]:
        """Leave the decoder's attention that keeps its own forward, and say so in the rows."""
        inside = {id(one) for one in self.decoder.module.modules() if isinstance(one, InterfaceAttention)}
        modules = {name: one for name, one in self.model.named_modules() if id(one) in inside}
        for module in modules.values():
            restore(module)
        return tuple(replace(row, op=SKIPPED, reason=reason) if row.name in modules else row for row in rows)

    def undo_and_report(self, reason: str) -> PatchReport:
        undo(self.model)
        return PatchReport(self.family, type(self.model).__name__, (), reason=reason)

    def choose_formats(self, weights: str | None, calibrate: Tensor | None) -> None:
        """Choose the format of each layer if weights is "auto:BITS"."""
        if (bits := bits_of(weights)) is None:
            return
        with eval_mode(self.model):
            self.layers, spent = choose_weights(self.model, self.decoder, self.layers, bits, calibrate)
        rows = merged(self.model, (*self.report.rows, *map(row_of, self.layers)))
        self.set_report(replace(self.report, rows=rows, budget=spent))

    def pack(self) -> None:
        """Store the weights of the layers in panels. After an interrupt the model works, and its report is accurate."""
        model, wanted = self.model, [one for one in self.layers if one.formats]
        groups = groups_to_pack(model, [one.module for one in wanted])
        reasons: dict[str, str] = {}
        sizes = [sum(weight_bytes(module) for module in group) for group in groups]
        try:
            for group in track(groups, "packing", sizes, unit="B", delay=DELAY):
                pack(group)
                trim()  # the rows' memory, so that the peak stays low
            reasons = self.unpack_read()
        finally:
            missed = {one.name for one in wanted if not isinstance(one.module, PackedLinear)}
            rows = tuple(
                replace(row, op=Linear.infini_ops, reason=reasons.get(row.name, "interrupted"))
                if row.name in missed
                else row
                for row in self.report.rows
            )
            self.layers = []
            self.set_report(replace(self.report, rows=merged(model, rows)))

    def unpack_read(self) -> dict[str, str]:
        """Make layers dense whose weight the model's forward reads itself, as for its dtype, for that makes a copy.

        Two tokens through the packed model show them. If it does not compute the same, all layers become dense.

        Returns:
            The reasons, by the layers' names.
        """
        with noting_reads() as read:
            fault = self.trial.fault()
        ids = {id(module) for module in read}
        why = fault or "its weight stays in rows, because the model's forward reads it"
        reasons = {}
        for name, module in self.model.named_modules():
            if isinstance(module, PackedLinear) and (fault or id(module) in ids):
                make_dense(module)
                reasons[name] = why
        return reasons

    def quantize(self, taken: list[str]) -> None:
        """Quantize the layers, and align the weights that stay. This cannot be undone.

        Args:
            taken: Names of the layers that already have quantized weights.
        """
        model = self.model
        wanted = {one.name: format for one in self.layers if (format := next(iter(one.formats), None)) is not None}
        try:
            sizes = [weight_bytes(model.get_submodule(name)) for name in wanted]
            for name, format in track(wanted.items(), "quantizing", sizes, unit="B", delay=DELAY):
                quantize_module(model.get_submodule(name), format)
        finally:  # even after an interrupt the model works, and its report is accurate
            done = [name for name in wanted if isinstance(model.get_submodule(name), Quantized)]
            self.state.quantized = [*taken, *done]
            missed = wanted.keys() - set(done)
            rows = tuple(
                replace(row, op=SKIPPED, reason="interrupted") if row.name in missed else row
                for row in self.report.rows
            )
            self.set_report(replace(self.report, rows=merged(model, rows)))
        for decoder in (module for module in model.modules() if is_decoder(module)):
            if wanted or taken:
                fuse_projections(decoder)
        replaced = {row.name for row in self.report.replaced}
        with torch.no_grad():
            align(m for n, m in model.named_modules() if n in replaced or n.rpartition(".")[0] in replaced)

    def set_report(self, report: PatchReport) -> None:
        self.report = self.state.report = report

    def must_agree(self, what: str, value: object) -> None:
        """Raise ValueError if the ranks of a sharded model have different values."""
        if self.tp_group is not None:
            self.tp_group.must_agree(what, sha256(repr(value).encode()).digest())


def products_of(model: nn.Module, rows: Sequence[Row]) -> str:
    """Describe the dtype of the dense products and what computes them; empty if there are none."""
    dense = {op for row in rows for op in row.op.split(", ")} & {"linear", "fused_linear"}
    dtype = next((p.dtype for p in model.parameters() if p.dtype in products.DTYPES and on_cpu(p)), None)
    if not dense or dtype is None:
        return ""
    return f"{str(dtype).removeprefix('torch.')}: {products.described(dtype, ('linear', 'matmul'))}"


def patch_modules(model: nn.Module, name: str, decoder: Decoder, selection: Selection) -> tuple[Row, ...]:
    """Check and swap modules one by one, children before parents; return a row for each, in the model's order."""
    verifier = Verifier(decoder)
    modules = dict(model.named_modules(remove_duplicate=False))
    rows: dict[str, Row] = {}
    own: dict[str, str] = {}  # why a user's replacement was not taken, before the reason of the next patch that was not
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
                if issubclass(patch, Replacement):
                    reason = own[here] = "; ".join(filter(None, (own.get(here), f"{patch.__name__}: {unsupported}")))
                else:
                    reason = "; ".join(filter(None, (own.get(here), str(unsupported))))
        rows[here] = Row(here, original, SKIPPED if reason else op, reason or "")
    for here, row in rows.items():
        if row.op == SKIPPED and selection.excludes(here) is None and is_replaced_in_parts(modules[here]):
            rows[here] = replace(row, op=IN_PARTS)
    if decoder.norm is not None:
        link(list(decoder.layers), decoder.norm)
        whole = decoder.module
        if "forward" not in vars(whole) and not isinstance(whole, GenerationMixin | Patched):
            loop = DecoderModel if isinstance(whole, PreTrainedModel) else Loop
            swap(whole, loop, loop.plans(whole)[0])
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not isinstance(module, Patched) and holds(module, decoder):
            swap(module, Model, Model.plans(module)[0])
    return tuple(rows.values())


def holds(model: nn.Module, decoder: Decoder) -> bool:
    return any(module is decoder.module for module in model.modules())


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
            if isinstance(module, Reformatted):
                parameters += module.weight_count
                size += module.weight_bytes
        last[name] = replace(last[name], parameters=parameters, bytes=size)
    return tuple(last[name] for name in modules if name in last)


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


@contextmanager
def caches_cleared() -> Iterator[None]:
    """Clear the probes' caches after the body."""
    try:
        yield
    finally:
        clear_caches()
