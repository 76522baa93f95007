"""The description of a quantized checkpoint: quantization_config of config.json, parsed into a StoredFormat per layer.

Unknown, contradictory and unsupported descriptions raise here, before a weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from .experts import ExpertsFormat, StoredExperts
from .formats import METHODS
from .method import NAME, Fields, Method, Reader
from .weight import StoredFormat, TensorInfo

OURS = "torch_infini"  # quant_method of save_patched, whose tensors torch_infini.models reads itself
_OF_ACTIVATIONS = (
    "input_",
    "output_",
)  # of scales that are not used: activations stay as they are


class QuantizedLayer(NamedTuple):
    """A quantized linear layer, of out_features n and in_features k.

    Attributes:
        names: The names of its tensors by their last part, as the StoredFormat calls them.
    """

    format: StoredFormat
    n: int
    k: int
    names: Mapping[str, str]


def shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def method_named(config: Any, where: str) -> tuple[Fields, Method]:
    """Return the fields of quantization_config, and its method; ValueError for one that is unknown."""
    fields = Fields(config, where)
    if fields["quant_method"] not in [*METHODS]:
        raise fields.fault("quant_method", f"be one of {', '.join(METHODS)}", fields["quant_method"])
    return fields, METHODS[fields["quant_method"]]


def experts_of(config: Any, tensors: Mapping[str, TensorInfo], where: str) -> dict[str, StoredExperts]:
    """Return the quantized experts of a checkpoint, by the names of the model's tensors; arguments as of layers_of.

    Raises:
        ValueError: For a config that is unknown, or tensors that contradict the format.
    """
    _, method = method_named(config, where)
    return {} if method.experts is None else found_experts(method.experts, tensors)


def found_experts(format: ExpertsFormat, tensors: Mapping[str, TensorInfo]) -> dict[str, StoredExperts]:
    """Return the experts that are stored in a format; ValueError for parts that are missing or contradict it."""
    first, found = format.parts[0], {}
    for name in sorted(tensors):
        if not name.endswith(first):
            continue
        of = name.removesuffix(first)
        for part in format.parts:
            if of + part not in tensors:
                raise ValueError(f"{NAME}: {of} must have {of + part}, as {format.name} has, got {name} alone")
        infos = {part: tensors[of + part] for part in format.parts}
        sizes = format.size(infos)
        if sizes is None:
            got = list(infos[first].shape)
            raise ValueError(f"{NAME}: {name} must have the dimensions of {format.name}, got shape {got}")
        for part, rule in format.expected(*sizes).items():
            info, at = infos[part], f"{of}{part}"
            if info.shape != rule.shape:
                wanted = list(rule.shape)
                raise ValueError(f"{NAME}: {at} must have shape {wanted} ({format.name}), got {list(info.shape)}")
            if info.dtype != rule.dtype:
                raise ValueError(f"{NAME}: {at} must be {shown(rule.dtype)} ({format.name}), got {shown(info.dtype)}")
        found[of] = StoredExperts(format, *sizes, {part: of + part for part in format.parts})
    return found


def layers_of(
    config: Any, tensors: Mapping[str, TensorInfo], where: str, read: Reader | None = None
) -> dict[str, QuantizedLayer]:
    """Return the quantized layers of a checkpoint, by name; there may be none beside quantized experts.

    Args:
        config: The entry quantization_config.
        tensors: All tensors of the checkpoint.
        where: The file of the config, for errors.
        read: Returns one of the tensors; None: methods that need it are refused.

    Raises:
        ValueError: For a config that is unknown or contradicts itself, or tensors that contradict it.
        NotImplementedError: For a variant that is not supported.
    """
    fields, method = method_named(config, where)
    if method.parse_reading is not None:
        if read is None:
            raise fields.unsupported("quant_method", f"{method.name} outside of a folder")
        format_of = method.parse_reading(fields, read)
    else:
        assert method.parse is not None
        format_of = method.parse(fields)
    found: dict[str, dict[str, TensorInfo]] = {}  # by the layer's name and the last part
    quantized = set()
    for name, info in tensors.items():
        layer, last = method.split(name)
        found.setdefault(layer, {})[last] = info
        if last in method.markers or (last == "weight" and info.dtype in (torch.float8_e4m3fn, torch.int8)):
            quantized.add(layer)
    experts = () if method.experts is None else found_experts(method.experts, tensors)
    if not quantized and not experts:
        markers = (*method.markers, *(() if method.experts is None else method.experts.parts[:1]))
        raise ValueError(
            f"{NAME}: a checkpoint of quant_method {method.name!r} must have layers with "
            f"{' or '.join(markers)}, got {len(tensors)} tensors without them in {where}"
        )
    return {name: checked_layer(name, format_of(name), found[name]) for name in sorted(quantized)}


def checked_layer(name: str, format: StoredFormat, tensors: Mapping[str, TensorInfo]) -> QuantizedLayer:
    """Return a layer whose tensors have the dtypes and shapes of its format; ValueError for the first that has not.

    Args:
        name: The layer's name.
        format: Its format.
        tensors: Its tensors, by the last part of their names.
    """
    found = {last: info for last, info in tensors.items() if last != "bias"}
    shapes = {last: info.shape for last, info in found.items()}
    try:
        n, k = format.size(shapes)
    except KeyError as missing:
        raise ValueError(
            f"{NAME}: {name} must have {missing.args[0]}, as {format.name} has, got {', '.join(sorted(found))}"
        ) from None
    except ValueError:
        raise ValueError(
            f"{NAME}: the weight of {name} must have 2 dimensions, as {format.name} has, got shapes {shapes}"
        ) from None
    try:
        expected = format.expected(n, k)
    except ValueError as error:
        raise ValueError(f"{NAME}: {name}, {format.name}: {error}") from None
    for last, rule in expected.items():
        if last not in found:
            if rule.optional:
                continue
            raise ValueError(f"{NAME}: {name} must have {last}, as {format.name} has, got {', '.join(sorted(found))}")
        info = found[last]
        if rule.layout(info.shape) is None:
            allowed = " or ".join(str([dim.entries for dim in dims]) for dims in rule.layouts)
            raise ValueError(
                f"{NAME}: {name}.{last} must have shape {allowed} ({format.name}, {n} x {k}), got {list(info.shape)}"
            )
        if info.dtype not in rule.dtypes:
            dtypes = " or ".join(shown(dtype) for dtype in rule.dtypes)
            raise ValueError(f"{NAME}: {name}.{last} must be {dtypes} ({format.name}), got {shown(info.dtype)}")
    for last in found:
        if last not in expected and not last.startswith(_OF_ACTIVATIONS):
            raise ValueError(
                f"{NAME}: {name} must have {', '.join(expected)} alone, as {format.name} with these settings has, got "
                f"{last} too: the description contradicts the tensors"
            )
    return QuantizedLayer(format, n, k, {last: f"{name}.{last}" for last in expected if last in found})
