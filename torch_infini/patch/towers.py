"""Towers: models inside a model that read images or sound. Their norms, gated MLPs and attention are replaced.

One layer of a tower is tried before and after, on numbers that have the form of its input. A tower whose input has
another form than those known here is left, and so is one that then computes anything else.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .checks.trial import rms, shown, tolerance, without_side_effects
from .checks.verify import Verifier
from .decoder import Decoder
from .layers.interface import IMPLEMENTATION, NAME
from .layers.interface_attention import InterfaceAttention, calls_interface
from .layers.layer_norm import LayerNorm, is_layer_norm
from .layers.mlp import GatedMLP
from .layers.norm import RMSNorm, eps_name
from .report import Row
from .state import PatchedConfig, Selection, State, replace_config
from .structure import has_gate, is_able, takes_one
from .swap import Patched, Unsupported, restore, swap

SIDE = 2  # merged patches of the image that is tried, in each direction


class Tower(NamedTuple):
    """A tower and its name in the model."""

    name: str
    module: PreTrainedModel


def towers_of(model: nn.Module, decoder: Decoder) -> list[Tower]:
    """Return the models beside the decoder, without those in them."""
    inside = {id(module) for module in decoder.module.modules()}
    found: list[Tower] = []
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or any(name.startswith(f"{one.name}.") for one in found):
            continue
        if id(module) not in inside and all(part is not decoder.module for part in module.modules()):
            found.append(Tower(name, module))
    return found


def patch_tower(tower: Tower, verifier: Verifier, state: State) -> tuple[list[Row], str]:
    """Replace what is computed alike in a tower.

    Args:
        tower: The tower.
        verifier: Checks its modules one by one.
        state: What may be replaced; the tower's config is added to it if a copy of it names our attention.

    Returns:
        A row for each module that was replaced, and why the tower was left, empty if it was not.
    """
    name, module = tower
    selection = state.selection
    before, reason, known = None, "its inputs are of no known form", iter(inputs_of(module))
    while before is None:
        try:
            if (inputs := next(known, None)) is None:
                break
            before = one_layer(module, inputs)
        except Exception as error:  # it has others, or a config of another form
            reason = f"an image of noise could not be tried: {shown(error)}"
    if before is None or inputs is None:
        return [], reason
    rows = []
    for here, part, patch in parts_of(name, module, selection):
        kind, op = type(part).__name__, swapped(part, patch, verifier)
        rows += [Row(f"{name}.{here}", kind, op)] if op else []
    attention = [(here, part) for here, part in module.named_modules() if calls_interface(part)]
    config = None
    if attention and all(  # one config names the function of all of them
        vars(part).get("config") is module.config
        and is_able(InterfaceAttention, part)
        and not excluded(selection, name, here)
        for here, part in attention
    ):
        rows += [Row(f"{name}.{here}", type(part).__name__, InterfaceAttention.infini_ops) for here, part in attention]
        for _, part in attention:
            swap(part, InterfaceAttention, None)
        config = PatchedConfig.of(module.config)
        state.towers.append(config)  # first, so that it is undone if this is interrupted
        replace_config(module, config.original, config.patched)
        setattr(config.patched, IMPLEMENTATION, NAME)
    if not rows:
        return [], ""
    try:
        reason = difference(before, one_layer(module, inputs))
    except Exception as error:
        reason = f"patched, its first layer does not run: {shown(error)}"
    if reason:
        for part in module.modules():
            if isinstance(part, Patched):
                restore(part)
        if config is not None:
            replace_config(module, config.patched, config.original)
            state.towers.remove(config)
        return [], reason
    return rows, ""


def parts_of(name: str, tower: nn.Module, selection: Selection) -> Iterator[tuple[str, nn.Module, type[Patched]]]:
    """Yield (name, module, patch) of the norms and MLPs that may be replaced, children before parents."""
    for here, module in reversed(list(tower.named_modules())):
        if excluded(selection, name, here):
            continue
        if is_layer_norm(module):
            yield here, module, LayerNorm
        elif eps_name(module) and takes_one(module):
            yield here, module, RMSNorm
        elif "down_proj" in module._modules and has_gate(module):
            yield here, module, GatedMLP


def swapped(module: nn.Module, patch: type[Patched], verifier: Verifier) -> str:
    """Replace a module if it computes what the patch does; return the ops that compute it now, empty if it was left."""
    try:
        plan = verifier.plan(module, patch)
    except Unsupported:
        return ""
    swap(module, patch, plan)
    return patch.ops(plan)


def excluded(selection: Selection, tower: str, name: str) -> bool:
    return selection.excludes(f"{tower}.{name}") is not None


def inputs_of(tower: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Yield random inputs that a tower which reads images may take: a small image, or patches of one."""
    names, config = list(inspect.signature(type(tower).forward).parameters)[1:], tower.config
    some = next((p for p in tower.parameters() if p.is_floating_point()), None)
    if some is None:
        return
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(some.device, some.dtype)

    def size_of(*entries: str, otherwise: int = 0) -> int:
        value = next((value for name in entries if (value := getattr(config, name, None)) is not None), otherwise)
        return int(value[0] if isinstance(value, (list, tuple)) else value)

    channels, patch = size_of("in_channels", "in_chans", "num_channels", otherwise=3), size_of("patch_size")
    side = SIDE * size_of("spatial_merge_size", "merge_kernel_size", "pooling_kernel_size", otherwise=1)
    count = side * side
    if "grid_thw" in names:
        more = {"grid_thw": torch.tensor([[1, side, side]], device=some.device)}
        if "merge_sizes" in names:
            more["merge_sizes"] = torch.ones(1, dtype=torch.int64, device=some.device)
        yield {names[0]: random(count, channels * size_of("temporal_patch_size", otherwise=1) * patch**2), **more}
        yield {names[0]: random(count, channels, patch, patch), **more}
    elif "pixel_position_ids" in names:
        where = torch.cartesian_prod(torch.arange(side), torch.arange(side)).to(some.device)
        yield {"pixel_values": random(1, count, channels * patch**2), "pixel_position_ids": where[None]}
    elif "spatial_shapes" in names:
        whole = torch.ones(1, count, dtype=torch.int64, device=some.device)
        shapes = torch.tensor([[side, side]], device=some.device)
        patches = random(1, count, channels * patch**2)
        yield {"pixel_values": patches, "pixel_attention_mask": whole, "spatial_shapes": shapes}
    elif "pixel_values" in names:
        if "interpolate_pos_encoding" in names and patch:
            image = random(1, channels, SIDE * patch, SIDE * patch)
            yield {"pixel_values": image, "interpolate_pos_encoding": True}
        if size := size_of("image_size"):
            yield {"pixel_values": random(1, channels, size, size)}


def one_layer(tower: PreTrainedModel, inputs: dict[str, Any]) -> Tensor:
    """Run a tower with the first of its layers alone."""
    lists = [
        (any(map(calls_interface, child.modules())), sum(p.numel() for p in child.parameters()), parent, name, child)
        for parent in tower.modules()
        for name, child in parent._modules.items()
        if isinstance(child, nn.ModuleList) and len(child)
    ]
    *_, parent, name, layers = max(lists, key=lambda one: one[:2])  # not what merges the results of some layers
    with without_side_effects(tower):
        parent._modules[name] = nn.ModuleList([layers[0]])
        try:
            output: Any = tower(**inputs)
        finally:
            parent._modules[name] = layers
    states: Tensor = output if isinstance(output, Tensor) else output[0]
    return states


def difference(before: Tensor, after: Tensor) -> str:
    """Describe how two results differ; empty if rounding explains it."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return f"patched, its first layer gives {list(after.shape)}, not {list(before.shape)}"
    finite = before.isfinite()
    error, explained = rms((after.float() - before.float())[finite]), tolerance(before.dtype, 1) * rms(before[finite])
    if not bool(after[finite].isfinite().all()) or error > explained:
        return (
            f"patched, its first layer differs by {error:.3g} (root mean square), and rounding explains {explained:.3g}"
        )
    return ""
