"""save_patched and load_patched: a patched model as a folder, its quantised weights as they are.

Loading makes the model without memory for its weights and fills in what the file has: no full-precision pass.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from . import apply
from .quantised import QuantisedLinear, WeightPlan, empty_buffers, install
from .shares import local
from .structure import is_decoder

TENSORS, DESCRIPTION = "model.safetensors", "torch_infini.json"
FORMAT = 1  # of DESCRIPTION; a reader refuses others


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name it has, also buffers that a checkpoint leaves out."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write config, tensors and description; a tensor with several names is written once."""
    if not hasattr(transformers, type(model).__name__):
        raise ValueError(
            f"torch_infini.save_patched: model must be of a class of transformers, got {type(model).__name__}"
        )
    if any(local(parameter) is not parameter for parameter in model.parameters()):
        raise ValueError("torch_infini.save_patched: model must be whole, got one that ranks share")
    state = vars(model)[apply.STATE]
    tensors, aliases, names = {}, {}, {}
    for name, tensor in all_tensors(model).items():
        if tensor.device.type == "meta":
            raise ValueError(f"torch_infini.save_patched: every tensor must have memory, got {name} on meta")
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in names:
            aliases[name] = names[key]
        else:
            names[key] = name
            tensors[name] = tensor.contiguous()
    quantised = {
        name: {"format": module._infini_plan.format, "group": module._infini_plan.group}
        for name, module in model.named_modules()
        if isinstance(module, QuantisedLinear)
    }
    description = {
        "format": FORMAT,
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantised": quantised,
        "aliases": aliases,
        "only": state.selection.only,
        "skip": state.selection.skip,
    }
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def load(folder: Path) -> PreTrainedModel:
    """The model that `save` wrote, patched."""
    description = json.loads((folder / DESCRIPTION).read_text())
    if description.get("format") != FORMAT:
        raise ValueError(
            f"torch_infini.load_patched: {DESCRIPTION} must have format {FORMAT}, got {description.get('format')}"
        )
    cls = getattr(transformers, description["class"], None)
    if cls is None:
        raise ValueError(
            f"torch_infini.load_patched: class must be one of transformers, got {description['class']!r}: "
            "a newer transformers may know it"
        )
    config: PretrainedConfig = cls.config_class.from_pretrained(folder)
    dtype = getattr(torch, description["dtype"])
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = cls(config)
    finally:
        torch.set_default_dtype(before)
    for name, stored in description["quantised"].items():
        module = model.get_submodule(name)
        plan = WeightPlan(stored["format"], stored["group"], dtype)
        install(module, plan, empty_buffers(module, plan))
    fill(model, folder / TENSORS, description["aliases"])
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.eval()
    report = apply.apply(model, None, False, apply.Selection(description["only"], description["skip"]))
    if report.reason:
        raise ValueError(f"torch_infini.load_patched: {type(model).__name__} cannot be patched: {report.reason}")
    vars(model)[apply.STATE].quantised = list(description["quantised"])
    for decoder in (module for module in model.modules() if is_decoder(module)):
        apply.join_products(decoder)
    return model


def fill(model: nn.Module, file: Path, aliases: dict[str, str]) -> None:
    """Give every parameter and buffer of the model the file's tensor of its name.

    Raises:
        ValueError: With the names that are missing, too many, or of another shape or dtype.
    """
    wanted = all_tensors(model)
    with safe_open(file, "pt") as source:
        have = set(source.keys())
        faults = [f"{name} is missing" for name in wanted if aliases.get(name, name) not in have]
        faults += [f"{name} is not the model's" for name in sorted(have - {aliases.get(name, name) for name in wanted})]
        if faults:
            raise ValueError(f"torch_infini.load_patched: {file.name} does not fit the model: {'; '.join(faults[:5])}")
        loaded = {name: source.get_tensor(name) for name in have}
    for name, empty in wanted.items():
        tensor = loaded[aliases.get(name, name)]
        if tensor.shape != empty.shape:
            faults.append(f"{name} has shape {list(tensor.shape)}, wanted {list(empty.shape)}")
        elif tensor.dtype != empty.dtype and not (tensor.is_floating_point() and empty.is_floating_point()):
            came, want = (str(t.dtype).removeprefix("torch.") for t in (tensor, empty))
            faults.append(f"{name} is {came}, wanted {want}")
    if faults:
        raise ValueError(f"torch_infini.load_patched: {file.name} does not fit the model: {'; '.join(faults[:5])}")
    parameters: dict[str, nn.Parameter] = {}
    for name in wanted:
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(parent)
        source_name = aliases.get(name, name)
        if last in module._parameters:
            if source_name not in parameters:
                parameters[source_name] = nn.Parameter(
                    loaded[source_name], requires_grad=loaded[source_name].is_floating_point()
                )
            module._parameters[last] = parameters[source_name]
        else:
            module._buffers[last] = loaded[source_name]
