"""What Ollama's clients ask about a model: its size, how its weights are kept, what it can do."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import torch
from torch import nn

from ...engine.model import ServedModel
from ...nn import Linear
from ..errors import ApiError
from ..reading import template_of
from ..service import Service
from ..tool_schemas import Function, Tool
from .answer import now

STARTED = now()
NEVER = "9999-12-31T23:59:59Z"  # the model stays loaded while the server runs
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Attributes of configs by the names that Ollama has for them; the context's length is the engine's.
SIZES = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
}
# Ollama's names of settings, where they differ.
RENAMED = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
PROBE = Tool(type="function", function=Function(name="probe"))


def model_name(service: Service, given: str) -> str:
    """Return the served name that a request means: NAME and NAME:latest are the same model, as in Ollama."""
    names = (*service.settings.model_names, *service.adapters)
    same = (given, given.removesuffix(":latest"), f"{given}:latest")
    return next((name for name in same if name in names), given)


def list_entry(service: Service, name: str) -> dict[str, Any]:
    """Return a model as GET /api/tags lists it.

    The name has no tag, because clients that find a model here may ask for it at routes of OpenAI's interface.
    """
    model = service.llm.engine.model
    digest = hashlib.sha256(repr((name, model.config, model.dtype)).encode()).hexdigest()
    named = {"name": name, "model": name, "modified_at": STARTED}
    return {**named, "size": bytes_of(model), "digest": digest, "details": details(model)}


def running_entry(service: Service, name: str) -> dict[str, Any]:
    """Return a model as GET /api/ps lists it."""
    entry = list_entry(service, name)
    del entry["modified_at"]
    on_device = 0 if service.llm.engine.model.device.type == "cpu" else entry["size"]
    return {**entry, "expires_at": NEVER, "size_vram": on_device, "context_length": service.max_model_len}


def describe(service: Service, name: str) -> dict[str, Any]:
    """Return a model as POST /api/show describes it."""
    model = service.llm.engine.model
    kind = model_type(model)
    sizes = {of: getattr(model.config, attribute, None) for of, attribute in SIZES.items()}
    settings = {RENAMED.get(setting, setting): value for setting, value in service.sampling.items()}
    return {
        "modelfile": f"FROM {name}\n",
        "parameters": "\n".join(f"{setting} {value}" for setting, value in settings.items()),
        "template": template_of(service.llm.engine.tokenizer, False),
        "details": details(model),
        "model_info": {
            "general.architecture": kind,
            "general.basename": name,
            "general.parameter_count": weight_counts(model).total(),
            f"{kind}.context_length": service.max_model_len,
            **{f"{kind}.{of}": size for of, size in sizes.items() if size is not None},
        },
        "capabilities": capabilities(service),
        "modified_at": STARTED,
    }


def capabilities(service: Service) -> list[str]:
    """Return what the model can do, by its chat template and the server's settings."""
    if service.llm.engine.is_encoder:
        return ["embedding"]
    try:
        takes_tools = service.reading([PROBE]).form is not None
    except ApiError:
        takes_tools = False
    reasons = service.reading([]).thinking is not None
    sees = not service.llm.engine.prompts.images.reason
    return ["completion", *["tools"] * takes_tools, *["thinking"] * reasons, *["vision"] * sees]


def details(model: ServedModel) -> dict[str, Any]:
    """Return the summary of a model that all descriptions have."""
    kind, counts = model_type(model), weight_counts(model)
    return {
        "parent_model": "",
        "format": "torch",
        "family": kind,
        "families": [kind],
        "parameter_size": short(counts.total()),
        "quantization_level": counts.most_common(1)[0][0],
    }


def model_type(model: ServedModel) -> str:
    return str(getattr(model.config, "model_type", "unknown"))


def short(count: int) -> str:
    """Return a number as 1.1B, 160M or 12K."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= unit:
            return f"{count / unit:.3g}{letter}"
    return str(count)


def module_of(model: ServedModel) -> nn.Module:
    """Return the module that has a model's weights."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    assert isinstance(module, nn.Module)
    return module


def ranks_of(model: ServedModel) -> int:
    return 1 if model.tp_group is None else model.tp_group.size


def bytes_of(model: ServedModel) -> int:
    """Return the bytes of a model's weights, of all ranks; each is taken to have as many as this one."""
    module = module_of(model)
    tensors = {id(tensor): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensors.values()) * ranks_of(model)


def weight_counts(model: ServedModel) -> Counter[str]:
    """Return the numbers of a model's weights by the format in which they are kept; ranks as in bytes_of."""
    dense = DTYPES.get(model.dtype, "F32")
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    for module in module_of(model).modules():
        own = {id(tensor): tensor.numel() for tensor in module.parameters(recurse=False)}
        if isinstance(module, Linear) and id(module.weight) not in seen:
            # Its tensors are packed, and scales are no weights.
            format = dense if module.format in ("dense", "packed") else module.format.upper()
            counts[format] += module.in_features * module.out_features
            counts[dense] += 0 if module.bias is None else module.bias.numel()
        elif not isinstance(module, Linear):
            counts[dense] += sum(count for tensor, count in own.items() if tensor not in seen)
        if (quantized := getattr(module, "weight_count", None)) is not None:  # of a layer that patch_model quantized
            counts[str(getattr(getattr(module, "plan", None), "format", "quantized")).upper()] += quantized
        seen.update(own)
    return Counter({format: count * ranks_of(model) for format, count in counts.items()})
