"""save_patched: writes a patched model as a folder that transformers and torch_infini.LLM read as well.

Without quantized layers it is a folder of transformers' own save_pretrained. Quantized weights are in the same file,
and config.json names the quantizer (config.py).
"""

from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from ...checkpoints import read_header, write_tensors
from ...weights import out_of_panels
from ..layers.quantized import Quantized, Reformatted
from ..layers.quantized_linear import INTEGERS, QuantizedLinear, integers_of
from ..shares import local
from ..state import state_of
from .config import QuantizationConfig
from .folder import BUFFERS, DESCRIPTION, FORMAT, QUANTIZED, TENSORS, all_tensors, non_persistent_buffers, shown

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)


def save(model: Module, folder: Path) -> None:
    if not isinstance(model, PreTrainedModel) or not hasattr(transformers, type(model).__name__):
        raise ValueError(
            f"torch_infini.save_patched: model must be of a class of transformers, got {type(model).__name__}"
        )
    if any(local(parameter) is not parameter for parameter in model.parameters()):
        raise ValueError("torch_infini.save_patched: model must not be sharded, got one under tensor parallelism")
    everything = all_tensors(model)
    for name, tensor in everything.items():
        if tensor.device.type == "meta":
            raise ValueError(f"torch_infini.save_patched: every tensor must be allocated, got {name} on meta")
    for name, module in model.named_modules():
        if isinstance(module, Quantized) and not module.is_savable:
            raise ValueError(
                "torch_infini.save_patched: quantized layers must be of patch_model(weights=...), got "
                f"{name} of a checkpoint of another library: keep that checkpoint"
            )
    state = state_of(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Quantized)}
    formats = {name: one.plan.format for name, one in layers.items()}
    kept = state_to_write(model)
    for name, one in layers.items():
        if isinstance(one, QuantizedLinear):  # panels suit some CPUs alone
            formats[name], integers = out_of_panels(one.plan.format, integers_of(one._buffers))
            if formats[name] != one.plan.format:
                kept[f"{name}.{INTEGERS}"] = integers.weight
    quantized = {name: {"format": formats[name], "group": one.plan.group} for name, one in layers.items()}
    freed = [f"{name}.{parameter}" for name, module in layers.items() for parameter in module.freed]
    options = {
        "dtype": shown(model.dtype),
        QUANTIZED: quantized,
        "only": None if state.selection.only is None else list(state.selection.only),
        "skip": list(state.selection.skip),
    }
    folder.mkdir(parents=True, exist_ok=True)
    if quantized:
        write_quantized(model, folder, kept, freed, options)
    else:
        model.save_pretrained(folder, state_dict=kept, max_shard_size="1000TB")
    written = read_header(folder / TENSORS).keys()
    here = {f"{name}.{p}" for name, one in model.named_modules() if isinstance(one, Reformatted) for p in one.freed}
    converted = not written <= everything.keys() | here
    write_tensors(folder / BUFFERS, {name: everything[name].clone() for name in non_persistent_buffers(model)})
    description = {"format": FORMAT, "class": type(model).__name__, "converted": converted, **options}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")


def state_to_write(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state_dict; tensors that share memory are copied, except those that transformers ties itself."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*tied, *tied.values()}
    seen: set[tuple[Any, ...]] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        again = tensor.numel() > 0 and key in seen and name not in tied
        state[name] = tensor.clone() if again else tensor
        seen.add(key)
    return state


def write_quantized(
    model: PreTrainedModel, folder: Path, state: dict[str, Tensor], freed: list[str], options: dict[str, Any]
) -> None:
    """Write the files of save_pretrained, with the quantizer's name in the config.

    Freed weights are empty in the file: transformers without torch_infini only warns of an unknown quantizer and
    would continue with random weights, but it raises where shapes differ.
    """
    config = deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], options["dtype"]
    config.quantization_config = QuantizationConfig(**options).to_dict()
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    names: dict[tuple[Any, ...], str] = {}
    tensors = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if names.setdefault(key, name) == name or not tensor.numel():  # else from_pretrained ties it
            tensors[name] = tensor
    tensors |= {name: torch.empty(0, dtype=model.dtype) for name in freed}
    write_tensors(folder / TENSORS, tensors)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def save_tokenizer(model: Module, folder: Path, tokenizer: Any) -> None:
    """Save a tokenizer; None: copy the files of the folder that the model was loaded from, if it is on this machine."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
        return
    source: str = getattr(model, "name_or_path", "")
    if source and Path(source).is_dir() and Path(source).resolve() != folder.resolve():
        for name in TOKENIZER:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)
