"""Lists the modules of a model that may be replaced, and by which patch.

What a module computes is checked numerically (verify.py), so that a similar module with another formula is left.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .decoder import Decoder
from .layers.attention import Attention, RotaryEmbedding
from .layers.experts import Experts, has_experts
from .layers.gated_norm import GatedNorm, GroupedGatedNorm, is_gated_norm
from .layers.grouped import GroupedLinear, is_grouped_linear
from .layers.interface_attention import InterfaceAttention, calls_interface, missing_feature
from .layers.layer import DecoderLayer
from .layers.layer_norm import LayerNorm, is_layer_norm
from .layers.linear import Linear, TransposedLinear
from .layers.linear_attention import (
    LinearAttention,
    RecurrentLayer,
    ShortConvolution,
    has_delta_rule,
    is_short_convolution,
)
from .layers.loop import Loop
from .layers.method_attention import MethodAttention, has_method
from .layers.mixture import InputScaledMixture, has_scaled_inputs
from .layers.mlp import SPARSITY, GatedMLP, SparseGatedMLP
from .layers.norm import GroupedRMSNorm, RMSNorm, WeightlessRMSNorm, eps_name, groups, is_weightless
from .layers.plain_attention import PlainAttention, is_plain_attention
from .layers.scale import Scale, is_scale
from .layers.sharded import ShardedEmbedding, ShardedLinear
from .layers.state_space import Mamba2Mixer, MambaMixer, is_mamba2_mixer, is_mamba_mixer, reads_weight
from .model import Model
from .parallel_forward import parallel_forward
from .ranks.hooks import combines_ranks
from .replacement import Replacement, replacements_of
from .swap import Patched, Unsupported

# Patched, and call what is in them.
KEEP_THEIR_PARTS = (
    InterfaceAttention,
    RecurrentLayer,
    InputScaledMixture,
    DecoderLayer,
    Loop,
    Model,
    Scale,
    Replacement,
)


class Unknown(Patched):
    """A module with weights that nothing here computes; never replaced, for the report alone."""

    infini_ops = ""

    @classmethod
    def plans(cls, module: nn.Module) -> Sequence[Any]:
        if "Attention" in type(module).__name__:
            raise Unsupported("it does not call transformers' attention interface")
        raise Unsupported(f"no op computes a {type(module).__name__}")


def candidates(model: nn.Module, name: str, decoder: Decoder) -> Iterator[tuple[str, type[Patched]]]:
    """Yield (name, patch) of every module that may be replaced, children before parents.

    The caller replaces a module before it asks for the next: what comes later depends on what was replaced. A module
    that comes again was left the first time.
    """
    yielded: set[str] = set()
    for here, patch in in_order(model, name, decoder):
        if patch is not Unknown or here not in yielded:  # what was left before has a reason that says more
            yield here, patch
        yielded.add(here)


def in_order(model: nn.Module, name: str, decoder: Decoder) -> Iterator[tuple[str, type[Patched]]]:
    """Yield the same, and for a module that was left perhaps Unknown too."""
    sharded = {
        name: ShardedEmbedding if isinstance(module, nn.Embedding) else ShardedLinear
        for name, module in model.named_modules()
        if parallel_forward(module) is not None and not eps_name(module)
    }
    yield from sharded.items()
    known: set[str] = set()
    inside = in_scope(model, name, decoder)
    for here, module in () if sharded else inside.items():
        for replacement in replacements_of(module):
            if not isinstance(module, Patched):
                yield here, replacement
    if decoder.is_llama:
        for here, patch in of_llama(name, decoder, sharded):
            known.add(here)
            if not isinstance(inside.get(here), Replacement):
                yield here, patch
    if not sharded:  # what else computes on shards is known to Llama's modules alone
        yield from of_any(model, inside, decoder, known)
    for here, module in model.named_modules():
        # The last: others are computed by the module around them, which calls those with hooks.
        alone = here.rpartition(".")[2] == "lm_head" or combines_ranks(module)
        if alone and type(module) is nn.Linear and here not in sharded:
            yield here, Linear


def of_any(
    model: nn.Module, inside: dict[str, nn.Module], decoder: Decoder, known: Container[str]
) -> Iterator[tuple[str, type[Patched]]]:
    """Yield what can be replaced by itself, in layers of any form: norms, MLPs, attention's function, linear layers.

    Args:
        model: The model.
        inside: Its modules in question, by name, children before parents.
        decoder: The decoder.
        known: The names of those that were yielded before.
    """
    for here, module in inside.items():
        if isinstance(module, Patched):
            continue
        if here not in known and eps_name(module) and takes_one(module):
            yield here, GroupedRMSNorm if groups(module) else RMSNorm
        elif is_weightless(module) and takes_one(module) and not is_layer_norm(module):
            yield here, WeightlessRMSNorm
        if not isinstance(module, Patched) and is_layer_norm(module):
            yield here, LayerNorm
        if here in known:
            continue
        if is_gated_norm(module):
            yield here, GatedNorm
            if not isinstance(module, Patched):
                yield here, GroupedGatedNorm
        elif has_delta_rule(module):
            yield here, LinearAttention
        elif is_short_convolution(module):
            yield here, ShortConvolution
        elif is_mamba_mixer(module):
            yield here, MambaMixer
        elif is_mamba2_mixer(module):
            yield here, Mamba2Mixer
        elif has_experts(module):
            yield here, Experts
        elif is_grouped_linear(module):
            yield here, GroupedLinear
        elif has_scaled_inputs(module):
            yield here, InputScaledMixture
        elif "down_proj" in module._modules and has_gate(module):
            yield here, GatedMLP
    own = [here for here, module in inside.items() if calls_interface(module) and not isinstance(module, Patched)]
    unable = [here for here in own if not is_able(InterfaceAttention, inside[here])]
    for here in unable or own:  # one config names the function of all of them
        if unable and here in known and not missing_feature(inside[here]):
            continue  # its own reason says more
        yield here, InterfaceAttention
    for here, module in inside.items():
        parents, own_name = parents_of(model, here), here.rpartition(".")[2]
        around = [type(part) for part in parents]
        if isinstance(module, Patched) or is_computed(model, here):
            continue
        if parents and reads_weight(parents[-1], own_name):
            continue
        if type(module) is nn.Linear:
            if here.rpartition(".")[0] not in known or is_able(Linear, module):
                yield here, Linear
        elif type(module) is Conv1D:
            yield here, TransposedLinear
        elif has_method(module):
            yield here, MethodAttention
        elif here not in known and attends(module) and is_plain_attention(module) and not calls_interface(module):
            yield here, PlainAttention
        elif any(issubclass(kind, RecurrentLayer) for kind in around):
            continue  # a convolution, whose weight it reads
        elif here not in known and not any("Router" in kind.__name__ for kind in around) and is_unknown(module):
            yield here, Scale if is_scale(module) else Unknown


def parents_of(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules that a name leads through, without the model and the module itself."""
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:i])) for i in range(1, len(parts))]


def is_computed(model: nn.Module, name: str) -> bool:
    """Return whether a module is computed by one around it, or belongs to an adapter, which may be trained."""
    around = parents_of(model, name)
    whole = any(isinstance(part, Patched) and not isinstance(part, KEEP_THEIR_PARTS) for part in around)
    return whole or any("base_layer" in part._modules for part in around)


def in_scope(model: nn.Module, name: str, decoder: Decoder) -> dict[str, nn.Module]:
    """Return the modules of the decoder, and of a head beside it, children before parents.

    A vision tower is a model of its own, and is left.
    """
    found = {}
    heads = [
        child
        for child in model._modules.values()
        if child is not None
        and not isinstance(child, PreTrainedModel)
        and all(part is not decoder.module for part in child.modules())
        and not any(map(is_model, child.modules()))
    ]
    beside = [child for child in decoder.module.children() if not any(map(is_model, child.modules()))]
    roots = [*(beside if decoder.is_llama else [decoder.module]), *heads]
    ids = {id(part) for root in roots for part in root.modules()}
    for here, module in reversed(list(model.named_modules())):
        if id(module) in ids and here:
            found[here] = module
    return found


def is_model(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel)


def is_able(patch: type[Patched], module: nn.Module) -> bool:
    try:
        patch.plans(module)
    except Unsupported:
        return False
    return True


def takes_one(module: nn.Module) -> bool:
    """Return whether a module's forward takes one argument; a gated norm takes two."""
    return len(inspect.signature(type(module).forward).parameters) == 2  # and self


def has_projections(module: nn.Module) -> bool:
    """Return whether attention has Llama's projections, as Attention needs them."""
    return "o_proj" in module._modules and (
        "qkv_proj" in module._modules or module._modules.keys() >= {"q_proj", "k_proj", "v_proj"}
    )


def has_gate(module: nn.Module) -> bool:
    return bool(module._modules.keys() & {"gate_proj", "gate_up_proj"})


def is_unknown(module: nn.Module) -> bool:
    """Return whether a module computes with weights of its own, or is attention that cannot be told what to call.

    Embeddings are read, not computed, and so is what a model itself begins with. A parameter of one element is a
    factor. A router has a row for each expert, experts beside it a bias for it, or for their sum; a head's bias is its
    last layer's too. Activations are torch's in any layer.
    """
    if isinstance(module, nn.Embedding | nn.Linear | PreTrainedModel):
        return False
    if re.search("Router|Activation", type(module).__name__):
        return False
    mixes = "experts" in module._modules or any(isinstance(child, GroupedLinear) for child in module.children())
    if mixes and all(p is None or p.dim() == 1 for p in module._parameters.values()):
        return False
    if list(module._parameters) == ["bias"] and isinstance(module._modules.get("decoder"), nn.Linear):
        return False
    below = {id(parameter) for child in module.children() for parameter in child.parameters()}
    own = [parameter for parameter in module._parameters.values() if parameter is not None and parameter.numel() > 1]
    return attends(module) or any(id(parameter) not in below for parameter in own)


def is_replaced_in_parts(module: nn.Module) -> bool:
    """Return whether a module that was left only calls modules that are replaced, and adds and multiplies results.

    Attention computes more than its parts.
    """
    if not module._modules or "forward" in vars(module) or computes_alone(module):
        return False
    replaced = False
    for child in module.children():
        if isinstance(child, Patched):
            replaced = True
        elif any(True for _ in child.parameters()) or computes_alone(child):
            if is_read(child):
                continue
            if not is_replaced_in_parts(child):
                return False
            replaced = True
    return replaced


def is_read(module: nn.Module) -> bool:
    """Return whether a module's weights are looked up, or choose experts."""
    return isinstance(module, nn.Embedding) or bool(re.search("Router|Gate$", type(module).__name__))


def computes_alone(module: nn.Module) -> bool:
    """Return whether a module computes with weights of its own, or attends."""
    own = any(parameter is not None and parameter.numel() > 1 for parameter in module._parameters.values())
    return own or attends(module)


def attends(module: nn.Module) -> bool:
    """Return whether a module is attention by its name and projections, and not a layer with attention in it."""
    inner = any("Attention" in type(child).__name__ for child in module.children())
    products = any(isinstance(child, nn.Linear | Conv1D) for child in module.children())
    return "Attention" in type(module).__name__ and products and not inner


def listed_experts(mlp: nn.Module) -> list[str]:
    """Return the names of a mixture's experts that are MLPs with a gate in a list, each called with its own tokens."""
    parts = mlp._modules.get("experts")
    if not isinstance(parts, nn.ModuleList) or not all("down_proj" in one._modules and has_gate(one) for one in parts):
        return []
    return [f"experts.{i}" for i in range(len(parts))]


def of_llama(name: str, decoder: Decoder, sharded: Container[str]) -> Iterator[tuple[str, type[Patched]]]:
    """Yield the modules of layers with self_attn and mlp, whose computation is known as a whole."""
    prefix = f"{name}." if name else ""
    if any(
        has_projections(layer.get_submodule("self_attn")) for layer in decoder.layers
    ):  # no other attention reads it
        yield f"{prefix}rotary_emb", RotaryEmbedding
    for i, layer in enumerate(decoder.layers):
        here = f"{prefix}layers.{i}"
        for part, module in layer.named_modules():
            if eps_name(module) and part.rpartition(".")[0] in ("", "self_attn"):
                yield f"{here}.{part}", RMSNorm
        yield f"{here}.self_attn", Attention
        mlp = layer.get_submodule("mlp")
        experts = [part for part, module in mlp.named_modules() if has_experts(module)]
        experts = [part for part in experts if f"{here}.mlp.{part}" not in sharded]
        for part in experts:
            yield f"{here}.mlp.{part}", Experts
        listed = [part for part in listed_experts(mlp) if f"{here}.mlp.{part}" not in sharded]
        for part in listed:
            yield f"{here}.mlp.{part}", GatedMLP
        for part, module in mlp.named_children() if experts or listed else ():
            if "shared_expert" in part and "down_proj" in module._modules:
                yield f"{here}.mlp.{part}", GatedMLP
        if not experts and not listed and (has_gate(mlp) or any("experts" in part for part in mlp._modules)):
            yield f"{here}.mlp", SparseGatedMLP if vars(mlp).get(SPARSITY) else GatedMLP
        if any(eps_name(child) and not is_layer_norm(child) for child in layer.children()):
            yield here, DecoderLayer  # which fuses norms with the additions before them
    if decoder.norm is not None and not is_weightless(decoder.norm):
        yield f"{prefix}norm", RMSNorm
