"""The folder that save_patched writes: its files, and reading and checking their descriptions and headers.

Nothing is allocated by the sizes in a config before the header of the tensor file confirms them. Field names and
formats are in files on disk and must not change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..._core.dtypes import SAFETENSORS_DTYPES
from ...checkpoints import StoredLayer, TensorInfo, read_header, read_object, saved_layers
from ...weights import respelled
from ..layers.quantized import Reformatted

CONFIG, TENSORS, DESCRIPTION, GENERATION = (
    "config.json",
    "model.safetensors",
    "torch_infini.json",
    "generation_config.json",
)
BUFFERS = "torch_infini.safetensors"  # buffers that transformers does not save, such as rotary frequencies
FORMAT = 2  # of DESCRIPTION. Format 1 had all tensors in one file, and only load_patched read it
QUANTIZED = "quantized"  # field of the quantized layers
LOAD = "torch_infini.load_patched"
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # config fields: lengths of lists of modules
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer under all of its names, including non-persistent buffers."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def shown(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def non_persistent_buffers(model: nn.Module) -> list[str]:
    """Return the names of buffers that a state_dict leaves out."""
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules(remove_duplicate=False)
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set
        if not isinstance(module, Reformatted) or key not in module.unsaved
    ]


class FolderDescription(NamedTuple):
    """The contents of torch_infini.json, checked."""

    format: int
    cls: type[PreTrainedModel]
    dtype: torch.dtype
    quantized: dict[str, StoredLayer]
    aliases: dict[str, str]  # of format 1: for names of shared tensors, the name in the file
    converted: bool  # whether transformers stores tensors in another form than in the model
    only: list[str] | None
    skip: list[str]


def invalid(file: str, field: str, rule: str, got: object, where: str = LOAD) -> ValueError:
    """Return the error of a field of a file that breaks a rule."""
    text = got if isinstance(got, str) else repr(got)
    return ValueError(f"{where}: {field} in {file} must {rule}, got {text[:200]}")


@contextmanager
def as_value_error(file: str, rule: str) -> Iterator[None]:
    """Turn any error of the body into a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{LOAD}: {file} must {rule}, got {got}") from error


def file_of(folder: Path, file: str) -> Path:
    """Return the path of a file in the folder; FileNotFoundError without it."""
    if not (folder / file).is_file():
        raise FileNotFoundError(f"{LOAD}: folder must hold {file}, got {str(folder)!r} without it")
    return folder / file


def header_of(folder: Path, file: str) -> dict[str, TensorInfo]:
    """Return dtype and shape of the tensors in one of the folder's files."""
    header = {name: stored.info for name, stored in read_header(file_of(folder, file), LOAD).items()}
    for name, info in header.items():
        if info.dtype not in SAFETENSORS_DTYPES.values():
            raise invalid(file, name, f"be of one of the dtypes {', '.join(SAFETENSORS_DTYPES)}", shown(info.dtype))
    return header


def checked_patterns(value: Any, file: str, field: str, where: str = LOAD) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise invalid(file, field, "be a list of patterns", value, where)
    return value


def read_description(folder: Path) -> FolderDescription:
    """Read and check torch_infini.json.

    Raises:
        FileNotFoundError: If it is missing.
        ValueError: For a field that is missing, or not as save_patched writes it.
    """
    if not (folder / DESCRIPTION).is_file():
        raise FileNotFoundError(
            f"{LOAD}: folder must be one that save_patched wrote, got {str(folder)!r} without {DESCRIPTION}"
        )
    value = respelled(read_object(file_of(folder, DESCRIPTION), LOAD))
    format = value.get("format")
    if type(format) is not int or format not in (1, FORMAT):
        raise invalid(DESCRIPTION, "format", f"be 1 or {FORMAT}", format)
    for field in ("class", "dtype", QUANTIZED, "only", "skip", "aliases" if format == 1 else "converted"):
        if field not in value:
            raise ValueError(f"{LOAD}: {DESCRIPTION} must have the field {field}, got {', '.join(value)[:200]}")
    dtype = getattr(torch, value["dtype"], None) if isinstance(value["dtype"], str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype not in SAFETENSORS_DTYPES.values():
        raise invalid(DESCRIPTION, "dtype", "be float32, bfloat16, float16 or float64", value["dtype"])
    aliases = value.get("aliases", {}) if format == 1 else {}
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise invalid(DESCRIPTION, "aliases", "be an object of names", aliases)
    for name, target in aliases.items():
        if target in aliases:
            raise invalid(DESCRIPTION, f"aliases[{name!r}]", "name a tensor that is not an alias itself", target)
    converted = value.get("converted", False)
    if type(converted) is not bool:
        raise invalid(DESCRIPTION, "converted", "be true or false", converted)
    if converted and value[QUANTIZED]:
        raise invalid(DESCRIPTION, "converted", "be false with quantized layers", converted)
    return FolderDescription(
        format,
        class_of(value["class"]),
        dtype,
        saved_layers(value[QUANTIZED], DESCRIPTION, LOAD),
        aliases,
        converted,
        None if value["only"] is None else checked_patterns(value["only"], DESCRIPTION, "only"),
        checked_patterns(value["skip"], DESCRIPTION, "skip"),
    )


def class_of(name: Any) -> type[PreTrainedModel]:
    cls = None
    if isinstance(name, str):
        with as_value_error(DESCRIPTION, f"name a class that can be imported, {name!r}"):
            cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel) or getattr(cls, "config_class", None) is None:
        known = "" if cls is not None else ": a newer transformers may know it"
        raise ValueError(f"{LOAD}: class must be one of transformers' models, got {name!r}{known}")
    return cls


def read_config(folder: Path, description: FolderDescription, header: Mapping[str, TensorInfo]) -> Any:
    """Read config.json, with its numbers of modules limited by the contents of the file with the tensors."""
    values = read_object(file_of(folder, CONFIG), LOAD)
    config_class = description.cls.config_class
    assert config_class is not None  # class_of has checked it
    kind = config_class.model_type
    if values.get("model_type") != kind:
        raise invalid(CONFIG, "model_type", f"be {kind!r}, as of {description.cls.__name__}", values.get("model_type"))
    if "transformers_weights" in values:
        raise invalid(CONFIG, "transformers_weights", f"be absent, because {TENSORS} holds them", "it")
    limits = [(LAYERS, len(header), "tensors"), (EXPERTS, sum(math.prod(t.shape) for t in header.values()), "numbers")]
    for field, value in entries(values):
        for fields, limit, what in limits:
            if field in fields and isinstance(value, (int, float)) and value > limit:
                raise invalid(CONFIG, field, f"be at most {limit}, the number of {what} in {TENSORS}", value)
    quantization = values.pop("quantization_config", None)
    if description.format != 1 and description.quantized:
        layers = {name: layer._asdict() for name, layer in description.quantized.items()}
        expected = {QUANTIZED: layers, "only": description.only, "skip": description.skip}
        stored = respelled(quantization) if isinstance(quantization, dict) else quantization
        got = {name: stored.get(name) for name in expected} if isinstance(stored, dict) else stored
        if got != expected:
            raise invalid(CONFIG, "quantization_config", f"equal {DESCRIPTION} in {', '.join(expected)}", got)
    with as_value_error(CONFIG, f"describe a {description.cls.__name__}"):
        config = config_class.from_dict(values)
    config.name_or_path = str(folder)
    return config


def entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name, inner
            yield from entries(inner)
