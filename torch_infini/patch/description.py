"""describe: finds how a causal language model computes, by structure and numerical trials, as patch_model does.

Of a folder or file only the config is read: the modules are made without weights, and small copies of them are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoints import find, open_checkpoint, read_object
from ..ops.fused_experts import ACTIVATIONS
from ..ops.rms_norm import ROUNDINGS
from .apply import Patching, eval_mode, merged, patch_modules
from .checks.trial import without_side_effects
from .decoder import Decoder, find_llama, table_of
from .files.foreign import config_of, empty_model, layer_count
from .layers.attention import Attention
from .layers.experts import Experts
from .layers.layer import DecoderLayer
from .layers.layer_norm import LayerNorm
from .layers.mlp import GATES, GatedMLP
from .layers.norm import RMSNorm
from .layers.quantized import Reformatted
from .paged.sites import Site, Unserved, find_sites
from .report import IN_PARTS, SKIPPED, Row, pattern, shortened
from .state import Selection, states_in, undo
from .swap import PLAN

_NAME = "torch_infini.describe"
_LAYERS = 1000  # more are a mistake in a config, and each takes a millisecond
_TOKENS = torch.arange(5, 20)[None]  # of the call that shows which keys are seen
_NORMS = {number: name for name, number in ROUNDINGS.items()}
_ROUNDED = {
    "once": "rounded once",
    "llama": "rounded before the weight is multiplied",
    "gemma": "times 1 + weight, rounded once",
    "layer_norm": "mean 0 and variance 1, rounded once",
}


@dataclass(frozen=True)
class NormDescription:
    """An RMSNorm or a LayerNorm.

    Attributes:
        name: The module's name in its layer.
        eps: Added to the mean of squares, or to the variance.
        rounding: "once", "llama" or "gemma", as in torch_infini.ops.rms_norm; "layer_norm" for a LayerNorm.
    """

    name: str
    eps: float
    rounding: str


@dataclass(frozen=True)
class AttentionDescription:
    """Attention of one layer.

    Attributes:
        kv_heads: Heads of k and v.
        head_dim: Columns of a head of q and k.
        v_dim: Columns of a head of v.
        scale: Factor of the scores.
        softcap: Scores s become softcap * tanh(s / softcap); 0: no cap.
        sinks: Whether each head has a score without a value.
        window: How many keys a query sees, the newest; 0: all.
        heads: Heads of q; 0 if the module is not known.
        rope: The layout of rotated pairs, "half" or "interleaved"; "" for none, "unknown" if the module is not known.
        norms: The norms of q and k, before the rotation unless `norms_last`; empty: none.
        norms_last: Whether the norms come after the rotation.
    """

    kv_heads: int
    head_dim: int
    v_dim: int
    scale: float
    softcap: float
    sinks: bool
    window: int
    heads: int = 0
    rope: str = "unknown"
    norms: tuple[NormDescription, ...] = ()
    norms_last: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads} heads of q over {self.kv_heads}" if self.heads else f"{self.kv_heads} heads of k"
        columns = f"{self.head_dim} columns" + (f" (v: {self.v_dim})" if self.v_dim != self.head_dim else "")
        parts = [f"{heads}, {columns}, scale {self.scale:.4g}"]
        parts += [f"the newest {self.window} keys"] if self.window else ["all keys"]
        parts += [f"scores capped at {self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] if self.sinks else []
        if self.rope != "unknown":
            parts.append(f"rope of {self.rope} pairs" if self.rope else "no rope")
        if self.norms:
            parts.append(f"norms of q and k {'after' if self.norms_last else 'before'} rope")
        return ", ".join(parts)


@dataclass(frozen=True)
class MLPDescription:
    """A gated MLP: down(act(gate(x)) * up(x)).

    Attributes:
        activation: The op of act(gate) * up: "swiglu" or "geglu".
        columns: Columns of gate, and of up.
        fused: Whether gate and up are one layer.
    """

    activation: str
    columns: int
    fused: bool

    def __str__(self) -> str:
        return f"{self.activation} of {self.columns} columns" + (", gate and up in one layer" if self.fused else "")


@dataclass(frozen=True)
class ExpertsDescription:
    """A mixture of experts: gated MLPs of which a router chooses some for each token.

    Attributes:
        experts: How many.
        activation: As MLPDescription's.
        columns: As MLPDescription's, of each.
        shared: Of a gated MLP that all tokens take, None where there is none, or it is not known.
    """

    experts: int
    activation: str
    columns: int
    shared: MLPDescription | None

    def __str__(self) -> str:
        shared = f", beside one for all: {self.shared}" if self.shared else ""
        return f"{self.experts} experts, {self.activation} of {self.columns} columns{shared}"


@dataclass(frozen=True)
class LayerDescription:
    """One layer; attention or mlp is None if it is not known.

    Attributes:
        attention: Its attention.
        mlp: Its MLP.
        norms: Its norms, in the order of the modules.
        multiplier: Factor of both branches before they are added to the residual stream.
        known: Whether the layer as a whole computes x + attention(norm(x)), then + mlp(norm(..)), with these norms.
    """

    attention: AttentionDescription | None
    mlp: MLPDescription | ExpertsDescription | None
    norms: tuple[NormDescription, ...]
    multiplier: float
    known: bool

    def lines(self) -> Iterator[tuple[str, str]]:
        yield "attention", str(self.attention or "not known")
        yield "mlp", str(self.mlp or "not known")
        kinds = sorted({(norm.eps, norm.rounding) for norm in self.norms})
        rules = "; ".join(f"eps {eps:g}, {_ROUNDED[rounding]}" for eps, rounding in kinds)
        yield "norms", f"{', '.join(norm.name for norm in self.norms)}: {rules}" if self.norms else "not known"
        if self.multiplier != 1:
            yield "residual", f"branches times {self.multiplier:g}"


@dataclass(frozen=True)
class Description:
    """How a decoder computes; print it.

    Attributes:
        model_class, model_type: The model's class and type in transformers.
        vocabulary: Rows of the embedding.
        hidden_size: Columns of the residual stream.
        positions: The longest sequence that the config names; 0: it names none.
        parameters: The number of parameters.
        tied: Whether the head is the embedding.
        rope: The config's rope_parameters.
        layers: One description per layer.
        norm: The final norm; None if it is not known.
        left: The modules that patch_model leaves, with reasons.
        refusal: Why the engine cannot serve the model: which keys its attention sees is not known. If empty, the engine
            still tries a few tokens before it serves.
    """

    model_class: str
    model_type: str
    vocabulary: int
    hidden_size: int
    positions: int
    parameters: int
    tied: bool
    rope: dict[str, Any]
    layers: tuple[LayerDescription, ...]
    norm: NormDescription | None
    left: tuple[Row, ...]
    refusal: str

    def __str__(self) -> str:
        head = "the head is the embedding" if self.tied else "a head of its own"
        lines = [
            f"{self.model_class} ({self.model_type}): {len(self.layers)} layers, hidden size {self.hidden_size}, "
            f"{shortened(self.parameters).rstrip()} parameters",
            f"  vocabulary  {self.vocabulary}, {head}",
            f"  positions   {self.positions or 'no limit named'}",
            *(f"  rope        {line}" for line in _rope_lines(self.rope)),
        ]
        for kind in dict.fromkeys(self.layers):
            which = [i for i, layer in enumerate(self.layers) if layer == kind]
            lines.append(f"  layers {_ranges(which)}:" if len(which) < len(self.layers) else "  every layer:")
            lines += [f"    {name:<10}{text}" for name, text in kind.lines()]
        if self.norm is not None:
            lines.append(f"  last norm   eps {self.norm.eps:g}, {_ROUNDED[self.norm.rounding]}")
        for text in dict.fromkeys(f"{pattern(row.name)}: {row.reason}" for row in self.left):
            lines.append(f"  left        {text}")
        if self.refusal:
            lines.append(f"  not served  {self.refusal}")
        return "\n".join(lines)


def describe(model: nn.Module | str | Path) -> Description:
    """See torch_infini.describe."""
    if isinstance(model, nn.Module):
        return _of_loaded(model, *_decoder_of(model))
    path = find(model)
    if path.is_dir():
        values = read_object(path / "config.json", _NAME)
    else:
        with open_checkpoint(path) as checkpoint:
            values = checkpoint.config
    config = config_of(values, path, _NAME)
    if (layers := layer_count(config)) > _LAYERS:
        raise ValueError(f"{_NAME}: the config of {path} must have at most {_LAYERS} layers, got {layers}")
    empty = empty_model(config, path, None, _NAME).eval()
    return _of_empty(empty, *_decoder_of(empty))


def _decoder_of(model: nn.Module) -> tuple[str, Decoder]:
    found = find_llama(model)
    if found is None:
        raise ValueError(
            f"{_NAME}: the model must have a decoder of the Llama family (embed_tokens, layers with self_attn and mlp, "
            f"norm, rotary_emb), got a {type(model).__name__}"
        )
    return found


def _of_loaded(model: nn.Module, name: str, decoder: Decoder) -> Description:
    """Describe a model with weights; patch it for that time if it is not patched."""
    if states := states_in(model):
        rows = states[0].report.rows if states[0].report else ()
        return _read(model, decoder, rows)
    patching = Patching(model, name, decoder, Selection(None, ()), False)
    with patching.undone_on_failure():
        patching.replace_modules(None)
        found = _read(model, decoder, patching.report.rows)
    undo(model)
    return found


def _of_empty(model: PreTrainedModel, name: str, decoder: Decoder) -> Description:
    """Describe a model on the meta device, which cannot be used afterwards."""
    with torch.no_grad(), eval_mode(model):
        # Zeros without memory, because modules on meta are not patched.
        for module in model.modules():
            for key, weight in module._parameters.items():
                if weight is not None:
                    plain = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
                    module._parameters[key] = nn.Parameter(plain, requires_grad=False)
        model.tie_weights()
        rows = merged(model, patch_modules(model, name, decoder, Selection(None, ())))
        parameters = _count(model)  # before the move to meta, which unties weights
        nn.Module.to(model, "meta")
        return replace(_read(model, decoder, rows), parameters=parameters)


class _Identity(nn.Module):
    """Replaces an MLP that cannot run on the meta device."""

    def __init__(self, with_scores: bool) -> None:
        super().__init__()
        self.with_scores = with_scores

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, None]:
        return (x, None) if self.with_scores else x


@contextmanager
def _without_mlps(decoder: Decoder, with_scores: bool) -> Iterator[None]:
    """Run the body with MLPs that return their input."""
    kept = [layer._modules["mlp"] for layer in decoder.layers]
    try:
        for layer in decoder.layers:
            layer._modules["mlp"] = _Identity(with_scores)
        yield
    finally:
        for layer, mlp in zip(decoder.layers, kept, strict=True):
            layer._modules["mlp"] = mlp


def _sites(model: nn.Module, decoder: Decoder, positions: int) -> tuple[dict[nn.Module, Site], str]:
    """Find which keys each attention module sees; or the reason why that cannot be found."""
    table = table_of(decoder.embed_tokens)
    tokens = (_TOKENS % table.rows).to(table.device)
    # On meta a router cannot choose experts; which keys attention sees does not depend on MLPs.
    contexts: list[AbstractContextManager[None]] = [
        nullcontext(),
        _without_mlps(decoder, False),
        _without_mlps(decoder, True),
    ]
    reason = ""
    with without_side_effects(model):
        for context in contexts if table.device.type == "meta" else contexts[:1]:
            try:
                with context:
                    return find_sites(model, tokens, positions)[0].attention, ""
            except Unserved as unserved:
                reason = reason or str(unserved)
    return {}, reason


def _read(model: nn.Module, decoder: Decoder, rows: Sequence[Row]) -> Description:
    """Read the description of a patched model off its modules."""
    config = decoder.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = int(getattr(text, "max_position_embeddings", None) or 0)
    sites, refusal = _sites(model, decoder, positions or 1 << 17)
    table = table_of(decoder.embed_tokens)
    head = next((m for n, m in model.named_modules() if n.rpartition(".")[2] == "lm_head"), None)
    return Description(
        type(model).__name__,
        str(getattr(text, "model_type", "")),
        table.rows,
        table.columns,
        positions,
        _count(model),
        bool(getattr(text, "tie_word_embeddings", False)) and head is not None,
        dict(getattr(text, "rope_parameters", None) or {}),
        tuple(_layer(layer, sites) for layer in decoder.layers),
        _norm("norm", decoder.norm) if decoder.norm is not None else None,
        tuple(row for row in rows if row.op in (SKIPPED, IN_PARTS)),
        refusal,
    )


def _count(model: nn.Module) -> int:
    freed = sum(module.weight_count for module in model.modules() if isinstance(module, Reformatted))
    return freed + sum({id(p): p.numel() for p in model.parameters()}.values())


def _norm(name: str, module: nn.Module) -> NormDescription | None:
    if isinstance(module, LayerNorm):
        return NormDescription(name, module.eps_value, "layer_norm")
    if not isinstance(module, RMSNorm):
        return None
    plan = vars(module)[PLAN]
    return NormDescription(name, vars(module)[plan.eps], _NORMS[plan.rounding])


def _layer(layer: nn.Module, sites: dict[nn.Module, Site]) -> LayerDescription:
    norms = tuple(filter(None, (_norm(name, child) for name, child in layer.named_children())))
    known = isinstance(layer, DecoderLayer)
    multiplier = vars(layer)[PLAN].multiplier if known else 1.0
    inside = {module: site for module in layer.modules() if (site := sites.get(module)) is not None}
    attention = _attention(layer.self_attn, next(iter(inside.values()), None))  # type: ignore[arg-type]
    return LayerDescription(attention, _mlp(layer.mlp), norms, multiplier, known)  # type: ignore[arg-type]


def _attention(module: nn.Module, site: Site | None) -> AttentionDescription | None:
    """Describe attention by its recorded call and, if the module is patched, by its plan."""
    if site is None:
        return None
    found = AttentionDescription(
        site.kv_heads,
        site.head_dim,
        site.v_dim,
        site.scores.scale,
        site.scores.softcap,
        site.scores.sinks is not None,
        site.window.size,
    )
    if not isinstance(module, Attention):
        return found
    plan = vars(module)[PLAN]
    norms = tuple(filter(None, (_norm(name, module._modules[name]) for name in plan.norms or ())))
    return replace(found, heads=plan.heads[0], rope=plan.rope, norms=norms, norms_last=not plan.norm_first)


def _mlp(module: nn.Module) -> MLPDescription | ExpertsDescription | None:
    experts = next((child for child in module.modules() if isinstance(child, Experts)), None)
    if experts is not None:
        shared = next((found for child in module.children() if (found := _gated(child)) is not None), None)
        number, _, columns = experts.sizes
        name = next(name for name, of in ACTIVATIONS.items() if of == experts.experts_plan.activation)
        return ExpertsDescription(number, name, columns, shared)
    return _gated(module)


def _gated(module: nn.Module) -> MLPDescription | None:
    if not isinstance(module, GatedMLP):
        return None
    plan = vars(module)[PLAN]
    op: Any = GATES[type(module._modules[plan.activation])]
    return MLPDescription(
        op.name().removeprefix("infini::"), module._modules["down_proj"].in_features, len(plan.inputs) == 1
    )


def _rope_lines(rope: dict[str, Any]) -> list[str]:
    """Format the rope parameters: one line, or a line for each layer type if these differ."""
    if rope and all(isinstance(value, dict) for value in rope.values()):
        return [f"{kind}: {line}" for kind, value in rope.items() for line in _rope_lines(value)]
    return [", ".join(f"{name.removeprefix('rope_')} {value}" for name, value in rope.items())] if rope else []


def _ranges(numbers: Sequence[int]) -> str:
    """Format 0, 1, 2, 5 as "0-2, 5", and every third number as "0, 3, ... 27"."""
    steps = {b - a for a, b in zip(numbers, numbers[1:])}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
