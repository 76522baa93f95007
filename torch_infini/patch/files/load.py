"""load_patched: reads a folder of save_patched as a patched model.

The functions that prepare and finish a model also serve from_pretrained of transformers (hugging_face.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from ...checkpoints import StoredLayer, TensorInfo, Wanted, check_tensors, read_tensors
from ...weights import FORMATS
from ..apply import apply
from ..checks.verify import Verifier
from ..decoder import find_decoder
from ..layers import quantized_experts, quantized_linear
from ..layers.experts import Experts, has_experts, plans_of
from ..layers.quantized import Quantized
from ..state import Selection
from ..swap import Unsupported
from .folder import (
    BUFFERS,
    CONFIG,
    DESCRIPTION,
    GENERATION,
    LOAD,
    QUANTIZED,
    TENSORS,
    FolderDescription,
    all_tensors,
    as_value_error,
    header_of,
    invalid,
    read_config,
    read_description,
)

SMALL_BYTES = 1 << 20  # buffers up to this size are allowed without a tensor in the files


def load(folder: Path, weights: str | None = None) -> PreTrainedModel:
    """Load a model that `save` wrote, patched; weights: None, or "packed" for those that are not quantized."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{LOAD}: folder must be one that save_patched wrote, got {str(folder)!r}, no folder")
    description = read_description(folder)
    header = header_of(folder, TENSORS)
    config = read_config(folder, description, header)
    model = on_meta(config, description)
    if description.converted:
        check_size(model, header)
        model = load_by_transformers(folder, description)
        finish(model, folder, {}, description.only, description.skip, weights)
        return model
    extra = {} if description.format == 1 else header_of(folder, BUFFERS)
    fill(model, folder, description, header, extra)
    if (folder / GENERATION).exists():
        with as_value_error(GENERATION, "be one of transformers"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    finish(model, None, description.quantized, description.only, description.skip, weights)
    return model


def on_meta(config: Any, description: FolderDescription) -> PreTrainedModel:
    """Return the model on the meta device, with quantized layers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(description.dtype)
    try:
        with as_value_error(CONFIG, f"describe a {description.cls.__name__}"), torch.device("meta"):
            model = description.cls(config)
    finally:
        torch.set_default_dtype(before)
    install_all(model, description.quantized, description.dtype, DESCRIPTION, LOAD)
    return model


def install_all(
    model: PreTrainedModel, quantized: Mapping[str, StoredLayer], dtype: torch.dtype, file: str, where: str
) -> None:
    """Turn linear layers and experts into quantized ones on the meta device, to be loaded later.

    Raises:
        ValueError: For a name that is not of a linear layer or of experts, or a group that does not divide its columns.
    """
    modules = dict(model.named_modules())
    for name, layer in quantized.items():
        module = modules.get(name)
        field = f"{QUANTIZED}[{name!r}]"
        if module is not None and has_experts(module):
            install_experts(model, module, layer, dtype, file, field, where)
        elif type(module) is nn.Linear:
            if layer.group and module.in_features % layer.group:
                rule = f"have a group that divides the layer's {module.in_features} columns"
                raise invalid(file, field, rule, layer.group, where)
            plan = quantized_linear.WeightPlan(layer.format, layer.group, dtype)
            quantized_linear.install(module, plan, quantized_linear.empty_buffers(module, plan))
        else:
            got = "no such module" if module is None else f"a {type(module).__name__}"
            raise invalid(file, field, "name a torch.nn.Linear of the model, or its experts", got, where)
        vars(module)["_is_hf_initialized"] = True  # else from_pretrained would initialize the weight
    weights = freed_weights(model)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name in weights & tied.keys():
        del tied[name]
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*ignored, *(f"^{re.escape(name)}$" for name in weights)}


def install_experts(
    model: PreTrainedModel, module: nn.Module, layer: StoredLayer, dtype: torch.dtype, file: str, field: str, where: str
) -> None:
    """Turn experts on the meta device into quantized ones, if they compute what the op does."""
    if not FORMATS[layer.format].serves_experts or layer.group:
        able = ", ".join(sorted(one.name for one in FORMATS.values() if one.serves_experts))
        raise invalid(file, field, f"have one of the formats of experts, {able}, with group 0", tuple(layer), where)
    found = find_decoder(model)
    try:
        if found is None:
            raise Unsupported("the model has no decoder")
        experts = Verifier(found[1]).checked(module, Experts, plans_of(module))
    except Unsupported as reason:
        raise invalid(file, field, "name experts that can be patched", str(reason), where) from None
    plan = quantized_experts.QuantizedExpertsPlan(layer.format, layer.group, dtype, experts)
    quantized_experts.install(module, plan, quantized_experts.empty_buffers(module, plan))


def freed_weights(model: nn.Module) -> set[str]:
    """Return the names of the original's weights that quantized modules no longer have."""
    return {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if isinstance(module, Quantized)
        for parameter in module.freed
    }


def finish(
    model: PreTrainedModel,
    folder: Path | None,
    quantized: Mapping[str, Any],
    only: list[str] | None,
    skip: list[str],
    weights: str | None = None,
) -> None:
    """Patch a loaded model; non-persistent buffers are read from the folder."""
    if folder is not None and (folder / BUFFERS).is_file():
        header, buffers = header_of(folder, BUFFERS), dict(model.named_buffers(remove_duplicate=False))
        for name, stored in header.items():
            if name not in buffers or buffers[name].shape != stored.shape:
                got = f"{list(stored.shape)}" if name in buffers else "no such buffer"
                raise invalid(BUFFERS, name, "have the shape of the model's buffer", got)
        for name, tensor in read_tensors(folder / BUFFERS, LOAD):
            parent, _, last = name.rpartition(".")
            model.get_submodule(parent)._buffers[last] = tensor.to(buffers[name].device)
    for name in quantized:
        module = model.get_submodule(name)
        vars(module).pop("_is_hf_initialized", None)
        if isinstance(module, quantized_linear.QuantizedLinear):
            module.lay_out()
    model.eval()
    report = apply(model, weights, False, Selection(only, skip), quantized=list(quantized))
    if report.reason:
        raise ValueError(f"{LOAD}: {type(model).__name__} cannot be patched: {report.reason}")


def check_size(model: nn.Module, header: Mapping[str, TensorInfo]) -> None:
    """Check that the file has as many elements as the model; for files with transformers' own names and shapes."""
    wanted = sum({id(p): p.numel() for p in model.parameters()}.values())
    found = sum(math.prod(tensor.shape) for tensor in header.values())
    if wanted != found:
        raise ValueError(f"{LOAD}: {TENSORS} must hold {wanted} numbers, as the model of {CONFIG} has, got {found}")
    check_buffers(model, header)


def check_buffers(model: nn.Module, header: Mapping[str, TensorInfo]) -> None:
    """Raise for buffers that are in no file and larger than all tensors in the files."""
    limit = max(SMALL_BYTES, sum(math.prod(t.shape) * t.dtype.itemsize for t in header.values()))
    for name, buffer in model.named_buffers():
        if buffer.nbytes > limit:
            raise invalid(CONFIG, f"the size of {name}", f"be at most {limit} bytes", buffer.nbytes)


def load_by_transformers(folder: Path, description: FolderDescription) -> PreTrainedModel:
    with as_value_error(TENSORS, f"hold the tensors of a {description.cls.__name__}"):
        loaded: Any = description.cls.from_pretrained(
            folder,
            dtype=description.dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    info = loaded[1]
    faults = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    faults += [f"{name} is not the model's" for name in sorted(info["unexpected_keys"])]
    if faults:
        raise ValueError(f"{LOAD}: {TENSORS} does not fit the model: {'; '.join(faults[:5])}")
    return model


def fill(
    model: PreTrainedModel,
    folder: Path,
    description: FolderDescription,
    header: dict[str, TensorInfo],
    extra: dict[str, TensorInfo],
) -> None:
    """Load every parameter and buffer of the model from the files.

    Raises:
        ValueError: With the names that are missing, unexpected, or of another shape or dtype.
    """
    wanted = all_tensors(model)
    empty = freed_weights(model)  # save.py explains them
    header = {name: stored for name, stored in header.items() if name not in empty or stored.shape != (0,)}
    source_of = stored_names(model, description, header)
    tensors = {
        source_of(name): Wanted(tuple(like.shape), None if like.is_floating_point() else like.dtype)
        for name, like in wanted.items()
    }
    check_tensors(LOAD, folder, header | extra, tensors, lambda name: False)
    loaded = {name: tensor for name, tensor in read_tensors(folder / TENSORS, LOAD) if name in header}
    if extra:
        loaded |= read_tensors(folder / BUFFERS, LOAD)
    parameters: dict[str, nn.Parameter] = {}
    for name in wanted:
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(parent)
        source_name = source_of(name)
        if last in module._parameters:
            if source_name not in parameters:
                parameters[source_name] = nn.Parameter(
                    loaded[source_name], requires_grad=loaded[source_name].is_floating_point()
                )
            module._parameters[last] = parameters[source_name]
        else:
            module._buffers[last] = loaded[source_name]


def stored_names(
    model: nn.Module, description: FolderDescription, header: Mapping[str, TensorInfo]
) -> Callable[[str], str]:
    """Return a function from a tensor's name in the model to its name in the file; tied parameters share one."""
    if description.format == 1:
        return lambda name: description.aliases.get(name, name)
    stored: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in header:
            stored.setdefault(id(parameter), name)
    named = dict(model.named_parameters(remove_duplicate=False))
    source = {name: name if name in header else stored.get(id(p), name) for name, p in named.items()}
    return lambda name: source.get(name, name)
