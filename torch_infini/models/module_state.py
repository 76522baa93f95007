"""describe: a model's parameters and buffers as spans of memory and a description in JSON; restore: the inverse.

Formats of linear layers need no code here: a Linear is described by its plain attributes and its tensors.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nn import Embedding, Linear, MergedLinear
from .config import LlamaConfig

ALIGNMENT = 64  # bytes: a cache line, and a vector of AVX-512
_OF_MODULES = frozenset(vars(nn.Module()))


class Span(NamedTuple):
    """Memory that tensors share: its address and size in bytes, and its offset in the stored data."""

    address: int
    size: int
    begin: int


def describe(model: nn.Module) -> tuple[dict[str, Any], list[Span]]:
    """Describe a model on the CPU, whose `config` is a LlamaConfig, for restore.

    Returns:
        (description, spans): values for JSON, and the memory of all tensors, which the model keeps alive.

    Raises:
        TypeError: For an attribute of a linear layer, or a field of the config, that is not plain.
    """
    tensors: dict[int, Tensor] = {}
    modules = _described(model, tensors)
    spans = _spans(list(tensors.values()))
    config: Any = model.config
    description = {
        "config": {field.name: _plain(getattr(config, field.name)) for field in fields(config)},
        "dtype": _plain(model.dtype),
        "modules": modules,
        "spans": [(span.begin, span.size) for span in spans.values()],
        "tensors": [_record(tensor, spans) for tensor in tensors.values()],
    }
    return description, list(spans.values())


def config_of(description: Mapping[str, Any]) -> tuple[LlamaConfig, torch.dtype]:
    """Return the config and the dtype of a described model."""
    config = {name: _value(value) for name, value in description["config"].items()}
    return LlamaConfig(**config), _value(description["dtype"])


def restore(model: nn.Module, description: Mapping[str, Any], memory: mmap.mmap, first: int) -> None:
    """Replace a model's tensors and linear layers by the described ones, without copying their memory.

    Args:
        model: A model of the same config.
        description: As describe returned it.
        memory: Holds the spans from the byte `first` on.
        first: A multiple of ALIGNMENT.
    """
    storages = [
        torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=first + begin).untyped_storage()
        for begin, size in description["spans"]
    ]
    _restore(model, description["modules"], [_tensor(record, storages) for record in description["tensors"]])
    model.eval()


def _described(module: nn.Module, tensors: dict[int, Tensor]) -> dict[str, Any]:
    def numbered(named: Mapping[str, Tensor | None]) -> dict[str, int]:
        found = {name: tensor for name, tensor in named.items() if tensor is not None}
        for tensor in found.values():
            tensors.setdefault(id(tensor), tensor)
        return {name: list(tensors).index(id(tensor)) for name, tensor in found.items()}

    described: dict[str, Any] = {
        "parameters": numbered(module._parameters),
        "buffers": numbered(module._buffers),
        "children": {name: _described(child, tensors) for name, child in module.named_children()},
    }
    if isinstance(module, Embedding):
        described["format"] = module.format
    if isinstance(module, Linear):
        own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        described["linear"] = {name: _plain(value) for name, value in own.items()}
    elif isinstance(module, MergedLinear):
        described["merged"] = True
    return described


def _restore(module: nn.Module, described: Mapping[str, Any], tensors: list[Tensor]) -> None:
    for name, child in described["children"].items():
        if "linear" in child or "merged" in child:
            setattr(module, name, _linear(child, tensors))
        else:
            _restore(getattr(module, name), child, tensors)
    if isinstance(module, Embedding):
        module.format = described.get("format", "dense")
    for name, index in described["parameters"].items():
        setattr(module, name, tensors[index])
    for name, index in described["buffers"].items():
        if name in module._buffers:
            setattr(module, name, tensors[index])
        else:
            module.register_buffer(name, tensors[index])


def _linear(described: Mapping[str, Any], tensors: list[Tensor]) -> Linear | MergedLinear:
    made: Linear | MergedLinear
    if "merged" in described:
        parts = [_linear(part, tensors) for part in described["children"]["parts"]["children"].values()]
        made = MergedLinear([part for part in parts if isinstance(part, Linear)])
    else:
        made = Linear(0, 0, device="meta")
        vars(made).update((name, _value(value)) for name, value in described["linear"].items())
    _restore(made, {**described, "children": {}}, tensors)
    return made


def _spans(tensors: list[Tensor]) -> dict[int, Span]:
    """Return the memory of the tensors by address of their storages; of each storage, the part that tensors use."""
    used: dict[int, tuple[int, int]] = {}
    for tensor in tensors:
        if tensor.numel():
            at, size = tensor.untyped_storage().data_ptr(), tensor.element_size()
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            first = int(tensor.storage_offset()) * size
            end = first + (sum((count - 1) * stride for count, stride in steps) + 1) * size
            begin, other = used.get(at, (first, end))
            used[at] = min(begin, first), max(other, end)
    spans: dict[int, Span] = {}
    total = 0
    for at, (first, end) in used.items():
        first -= first % ALIGNMENT  # so that elements of every size stay aligned
        spans[at] = Span(at + first, end - first, total)
        total += -(-(end - first) // ALIGNMENT) * ALIGNMENT
    return spans


def _record(tensor: Tensor, spans: dict[int, Span]) -> dict[str, Any]:
    record = {
        "dtype": _plain(tensor.dtype),
        "shape": list(tensor.shape),
        "strides": tensor.stride(),
        "parameter": isinstance(tensor, nn.Parameter),
        "requires_grad": tensor.requires_grad,
    }
    if tensor.numel():
        at = tensor.untyped_storage().data_ptr()
        record["span"] = list(spans).index(at)
        record["offset"] = (tensor.data_ptr() - spans[at].address) // tensor.element_size()
    return record


def _tensor(record: Mapping[str, Any], storages: list[torch.UntypedStorage]) -> Tensor:
    tensor = torch.empty(0, dtype=_value(record["dtype"]))
    if "span" in record:
        tensor.set_(storages[record["span"]], record["offset"], record["shape"], record["strides"])
    else:
        tensor = tensor.new_empty(record["shape"])
    return nn.Parameter(tensor, record["requires_grad"]) if record["parameter"] else tensor


def _plain(value: object) -> Any:
    """Convert a value for JSON; _value is the inverse."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        return {"mapping": {str(name): _plain(inner) for name, inner in value.items()}}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_plain(inner) for inner in value]}
    raise TypeError(f"attributes must be numbers, strings, dtypes, or lists of them, got {type(value).__name__}")


def _value(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "mapping":
        return {name: _value(value) for name, value in inner.items()}
    values = [_value(value) for value in inner]
    return tuple(values) if kind == "tuple" else values
