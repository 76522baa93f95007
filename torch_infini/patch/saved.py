"""save_patched and load_patched: a patched model as a folder that transformers and torch_infini.LLM read as well.

Without integers the folder is one of transformers' own save_pretrained. Integers stand beside it in the same file, and
config.json names the quantizer (hugging_face.py). Nothing is made by the sizes of a config before the header of the
file with the tensors has the same.
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from . import apply
from .hugging_face import QuantizationConfig
from .quantized_linear import GROUP_SIZES, QuantizedLinear, WeightPlan, empty_buffers, install
from .shares import local
from .structure import is_decoder

CONFIG, TENSORS, DESCRIPTION, GENERATION = (
    "config.json",
    "model.safetensors",
    "torch_infini.json",
    "generation_config.json",
)
BUFFERS = "torch_infini.safetensors"  # what checkpoints of transformers leave out, such as rotary frequencies
FORMAT = 2  # of DESCRIPTION. 1 had all tensors in one file, and only load_patched read it
LOAD = "torch_infini.load_patched"
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
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")  # a list of modules is made for these
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
FEWEST_BYTES = 1 << 20  # that buffers may have which no file holds
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name it has, also buffers that a checkpoint leaves out."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named}


def shown(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


# Writing


def save(model: PreTrainedModel, folder: Path, tokenizer: Any = None) -> None:
    """Write config, tensors, description and tokenizer."""
    if not hasattr(transformers, type(model).__name__):
        raise ValueError(
            f"torch_infini.save_patched: model must be of a class of transformers, got {type(model).__name__}"
        )
    if any(local(parameter) is not parameter for parameter in model.parameters()):
        raise ValueError("torch_infini.save_patched: model must be whole, got one that ranks share")
    everything = all_tensors(model)
    for name, tensor in everything.items():
        if tensor.device.type == "meta":
            raise ValueError(f"torch_infini.save_patched: every tensor must have memory, got {name} on meta")
    state = apply.state_of(model)
    quantised = {
        name: {"format": module._infini_plan.format, "group": module._infini_plan.group}
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    options = {
        "dtype": shown(model.dtype),
        "quantised": quantised,
        "only": None if state.selection.only is None else list(state.selection.only),
        "skip": list(state.selection.skip),
    }
    kept = state_to_write(model)
    folder.mkdir(parents=True, exist_ok=True)
    if quantised:
        write_integers(model, folder, kept, options)
    else:
        model.save_pretrained(folder, state_dict=kept, max_shard_size="1000TB")
    with safe_open(folder / TENSORS, "pt") as written:
        converted = not set(written.keys()) <= everything.keys() | {f"{name}.weight" for name in quantised}
    buffers = {name: everything[name].contiguous().clone() for name in unkept_buffers(model)}
    save_file(buffers, folder / BUFFERS, metadata={"format": "pt"})
    description = {"format": FORMAT, "class": type(model).__name__, "converted": converted, **options}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    else:
        copy_tokenizer(getattr(model, "name_or_path", ""), folder)


def state_to_write(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's state; memory that two names have is copied for the second, unless transformers ties them itself."""
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


def write_integers(model: PreTrainedModel, folder: Path, state: dict[str, Tensor], options: dict[str, Any]) -> None:
    """What save_pretrained writes, and the quantizer's name in the config.

    A model has no weight beside integers. Empty ones are written: transformers without torch_infini warns of a
    quantizer that it does not know, and would go on with random weights, but it stops where shapes differ.
    """
    config = copy.deepcopy(model.config)
    config.architectures, config.dtype = [type(model).__name__], options["dtype"]
    config.quantization_config = QuantizationConfig(**options).to_dict()
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    places: dict[tuple[Any, ...], str] = {}
    tensors = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if places.setdefault(key, name) == name or not tensor.numel():  # else tied: from_pretrained ties it again
            # A part of a memory that several layers share would be refused.
            whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            tensors[name] = tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
    tensors |= {f"{name}.weight": torch.empty(0, dtype=model.dtype) for name in options["quantised"]}
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def unkept_buffers(model: nn.Module) -> list[str]:
    """The names of buffers that a checkpoint leaves out."""
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules(remove_duplicate=False)
        for key, buffer in module._buffers.items()
        if buffer is not None and key in module._non_persistent_buffers_set
    ]


def copy_tokenizer(source: str, folder: Path) -> None:
    """Copy the tokenizer's files from the folder that a model was read from, if it was one on this machine."""
    if source and Path(source).is_dir() and Path(source).resolve() != folder.resolve():
        for name in TOKENIZER:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, folder / name)


# Reading: what a folder says


class Description(NamedTuple):
    """The contents of torch_infini.json, checked."""

    format: int
    cls: type[PreTrainedModel]
    dtype: torch.dtype
    quantised: dict[str, dict[str, Any]]
    aliases: dict[str, str]  # of format 1: names of tensors that are stored under another
    converted: bool  # whether transformers writes tensors in another form than the model has them
    only: list[str] | None
    skip: list[str]


class Stored(NamedTuple):
    """What a file's header says of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def wrong(file: str, field: str, rule: str, came: object, where: str = LOAD) -> ValueError:
    text = came if isinstance(came, str) else repr(came)
    return ValueError(f"{where}: {field} in {file} must {rule}, got {text[:200]}")


@contextmanager
def as_value_error(file: str, rule: str) -> Iterator[None]:
    """Whatever goes wrong in the body, say of which file."""
    try:
        yield
    except Exception as error:
        came = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ValueError(f"{LOAD}: {file} must {rule}, got {came}") from error


def read_object(folder: Path, file: str) -> dict[str, Any]:
    """The object in a JSON file of the folder."""
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(f"{LOAD}: folder must hold {file}, got {str(folder)!r} without it")
    with as_value_error(file, "be JSON"):
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{LOAD}: {file} must hold a JSON object, got {type(value).__name__}")
    return value


def read_header(folder: Path, file: str) -> dict[str, Stored]:
    """The tensors of a safetensors file of the folder; none is read."""
    path = folder / file
    if not path.is_file():
        raise FileNotFoundError(f"{LOAD}: folder must hold {file}, got {str(folder)!r} without it")
    header = {}
    with as_value_error(file, "be a whole safetensors file"), safe_open(path, "pt") as source:
        for name in source.keys():  # noqa: SIM118
            part = source.get_slice(name)
            header[name] = str(part.get_dtype()), tuple(part.get_shape())
    for name, (dtype, _) in header.items():
        if dtype not in DTYPES:
            raise wrong(file, name, f"be of one of the dtypes {', '.join(DTYPES)}", dtype)
    return {name: Stored(DTYPES[dtype], shape) for name, (dtype, shape) in header.items()}


def checked_layers(value: Any, file: str, where: str = LOAD) -> dict[str, dict[str, Any]]:
    """The entry `quantised`: {name: {"format": "int8" | "int4", "group": 0 | 64 | 32}}."""
    if not isinstance(value, dict):
        raise wrong(file, "quantised", "be an object of layers", value, where)
    for name, layer in value.items():
        if not isinstance(layer, dict) or layer.get("format") not in ("int8", "int4"):
            raise wrong(file, f"quantised[{name!r}]", "be an object with format 'int8' or 'int4'", layer, where)
        groups = (0,) if layer["format"] == "int8" else GROUP_SIZES
        if type(layer.get("group")) is not int or layer["group"] not in groups:
            rule = f"have group {' or '.join(map(str, groups))} for {layer['format']}"
            raise wrong(file, f"quantised[{name!r}]", rule, layer.get("group"), where)
    return value


def names_in(value: Any, file: str, field: str, where: str = LOAD) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise wrong(file, field, "be a list of patterns", value, where)
    return value


def read_description(folder: Path) -> Description:
    """torch_infini.json.

    Raises:
        FileNotFoundError: If it is not there.
        ValueError: For a field that is missing, or not what save_patched writes.
    """
    if not (folder / DESCRIPTION).is_file():
        raise FileNotFoundError(
            f"{LOAD}: folder must be one that save_patched wrote, got {str(folder)!r} without {DESCRIPTION}"
        )
    value = read_object(folder, DESCRIPTION)
    format = value.get("format")
    if type(format) is not int or format not in (1, FORMAT):
        raise wrong(DESCRIPTION, "format", f"be 1 or {FORMAT}", format)
    for field in ("class", "dtype", "quantised", "only", "skip", "aliases" if format == 1 else "converted"):
        if field not in value:
            raise ValueError(f"{LOAD}: {DESCRIPTION} must have the field {field}, got {', '.join(value)[:200]}")
    dtype = getattr(torch, value["dtype"], None) if isinstance(value["dtype"], str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype not in DTYPES.values():
        raise wrong(DESCRIPTION, "dtype", "be float32, bfloat16, float16 or float64", value["dtype"])
    aliases = value.get("aliases", {}) if format == 1 else {}
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise wrong(DESCRIPTION, "aliases", "be an object of names", aliases)
    for name, target in aliases.items():
        if target in aliases:
            raise wrong(DESCRIPTION, f"aliases[{name!r}]", "name a tensor that is no alias itself", target)
    converted = value.get("converted", False)
    if type(converted) is not bool:
        raise wrong(DESCRIPTION, "converted", "be true or false", converted)
    if converted and value["quantised"]:
        raise wrong(DESCRIPTION, "converted", "be false where layers are integers", converted)
    return Description(
        format,
        class_of(value["class"]),
        dtype,
        checked_layers(value["quantised"], DESCRIPTION),
        aliases,
        converted,
        None if value["only"] is None else names_in(value["only"], DESCRIPTION, "only"),
        names_in(value["skip"], DESCRIPTION, "skip"),
    )


def class_of(name: Any) -> type[PreTrainedModel]:
    """A model class of transformers by its name."""
    cls = None
    if isinstance(name, str):
        with as_value_error(DESCRIPTION, f"name a class that can be imported, {name!r}"):
            cls = getattr(transformers, name, None)
    if not isinstance(cls, type) or not issubclass(cls, PreTrainedModel) or getattr(cls, "config_class", None) is None:
        known = "" if cls is not None else ": a newer transformers may know it"
        raise ValueError(f"{LOAD}: class must be one of transformers' models, got {name!r}{known}")
    return cls


def read_config(folder: Path, description: Description, header: Mapping[str, Stored]) -> Any:
    """config.json as the class has it, its counts of modules bounded by what the file holds."""
    values = read_object(folder, CONFIG)
    kind = description.cls.config_class.model_type
    if values.get("model_type") != kind:
        raise wrong(CONFIG, "model_type", f"be {kind!r}, as of {description.cls.__name__}", values.get("model_type"))
    if "transformers_weights" in values:
        raise wrong(CONFIG, "transformers_weights", f"be left out, for {TENSORS} holds them", "it")
    limits = [(LAYERS, len(header), "tensors"), (EXPERTS, sum(math.prod(t.shape) for t in header.values()), "numbers")]
    for field, value in entries(values):
        for fields, limit, what in limits:
            if field in fields and isinstance(value, (int, float)) and value > limit:
                raise wrong(CONFIG, field, f"be at most {limit}, for {TENSORS} has no more {what}", value)
    quantization = values.pop("quantization_config", None)
    if description.format != 1 and description.quantised:
        expected = {name: getattr(description, name) for name in ("quantised", "only", "skip")}
        came = {name: quantization.get(name) for name in expected} if isinstance(quantization, dict) else quantization
        if came != expected:
            raise wrong(CONFIG, "quantization_config", f"have what {DESCRIPTION} has in {', '.join(expected)}", came)
    with as_value_error(CONFIG, f"describe a {description.cls.__name__}"):
        config = description.cls.config_class.from_dict(values)
    config.name_or_path = str(folder)
    return config


def entries(value: Any) -> Iterator[tuple[str, Any]]:
    """The entries of an object and of those in it."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name, inner
            yield from entries(inner)


# Reading: models


def load(folder: Path) -> PreTrainedModel:
    """The model that `save` wrote, patched."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{LOAD}: folder must be one that save_patched wrote, got {str(folder)!r}, no folder")
    description = read_description(folder)
    header = read_header(folder, TENSORS)
    config = read_config(folder, description, header)
    model = without_memory(config, description)
    if description.converted:
        must_have_as_many_numbers(model, header)
        model = read_by_transformers(folder, description)
        finish(model, folder, {}, description.only, description.skip)
        return model
    extra = {} if description.format == 1 else read_header(folder, BUFFERS)
    fill(model, folder, description, header, extra)
    if (folder / GENERATION).exists():
        with as_value_error(GENERATION, "be one of transformers"):
            model.generation_config = GenerationConfig.from_pretrained(folder)
    finish(model, None, description.quantised, description.only, description.skip)
    return model


def without_memory(config: Any, description: Description) -> PreTrainedModel:
    """The model on the meta device, its layers of integers in place."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(description.dtype)
    try:
        with as_value_error(CONFIG, f"describe a {description.cls.__name__}"), torch.device("meta"):
            model = description.cls(config)
    finally:
        torch.set_default_dtype(before)
    install_all(model, description.quantised, description.dtype, DESCRIPTION, LOAD)
    return model


def install_all(
    model: PreTrainedModel, quantised: Mapping[str, Mapping[str, Any]], dtype: torch.dtype, file: str, where: str
) -> None:
    """Make plain linear layers layers of integers, which are still to be loaded.

    Raises:
        ValueError: For a name that is none of a linear layer's, or a group that does not divide its rows.
    """
    modules = dict(model.named_modules())
    for name, layer in quantised.items():
        module = modules.get(name)
        if type(module) is not nn.Linear:
            came = "no such module" if module is None else f"a {type(module).__name__}"
            raise wrong(file, f"quantised[{name!r}]", "name a torch.nn.Linear of the model", came, where)
        group = layer["group"]
        if group and module.in_features % group:
            rule = f"have a group that divides the layer's {module.in_features} columns"
            raise wrong(file, f"quantised[{name!r}]", rule, group, where)
        plan = WeightPlan(layer["format"], group, dtype)
        install(module, plan, empty_buffers(module, plan))
        module._is_hf_initialized = True  # from_pretrained would ask for a weight to initialize
    weights = {f"{name}.weight" for name in quantised}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name in weights & tied.keys():
        del tied[name]
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    model._keys_to_ignore_on_load_unexpected = {*ignored, *(f"^{re.escape(name)}$" for name in weights)}


def finish(
    model: PreTrainedModel,
    folder: Path | None,
    quantised: Mapping[str, Any],
    only: list[str] | None,
    skip: list[str],
) -> None:
    """Patch a model whose tensors are all there; buffers that its checkpoint leaves out come from the folder."""
    if folder is not None and (folder / BUFFERS).is_file():
        header, buffers = read_header(folder, BUFFERS), dict(model.named_buffers(remove_duplicate=False))
        for name, stored in header.items():
            if name not in buffers or buffers[name].shape != stored.shape:
                came = f"{list(stored.shape)}" if name in buffers else "no such buffer"
                raise wrong(BUFFERS, name, "have the shape of the model's buffer", came)
        with safe_open(folder / BUFFERS, "pt") as source:
            for name in header:
                parent, _, last = name.rpartition(".")
                old = model.get_submodule(parent)._buffers
                old[last] = source.get_tensor(name).to(old[last].device)  # type: ignore[union-attr]
    for name in quantised:
        vars(model.get_submodule(name)).pop("_is_hf_initialized", None)
    model.eval()
    report = apply.apply(model, None, False, apply.Selection(only, skip))
    if report.reason:
        raise ValueError(f"{LOAD}: {type(model).__name__} cannot be patched: {report.reason}")
    apply.state_of(model).quantised = list(quantised)
    for decoder in (module for module in model.modules() if is_decoder(module)):
        apply.fuse_projections(decoder)


def must_have_as_many_numbers(model: nn.Module, header: Mapping[str, Stored]) -> None:
    """Where names and shapes are transformers' own in the file: all in all, there is as much as the model wants."""
    wanted = sum({id(p): p.numel() for p in model.parameters()}.values())
    found = sum(math.prod(tensor.shape) for tensor in header.values())
    if wanted != found:
        raise ValueError(
            f"{LOAD}: {TENSORS} must hold the {wanted} numbers that the model of {CONFIG} has, got {found}"
        )
    must_be_small(model, header)


def must_be_small(model: nn.Module, header: Mapping[str, Stored]) -> None:
    """Refuse buffers that no file holds and that would take more than what a file holds."""
    limit = max(FEWEST_BYTES, sum(math.prod(t.shape) * t.dtype.itemsize for t in header.values()))
    for name, buffer in model.named_buffers():
        if buffer.nbytes > limit:
            raise wrong(CONFIG, f"the size of {name}", f"be at most {limit} bytes", buffer.nbytes)


def read_by_transformers(folder: Path, description: Description) -> PreTrainedModel:
    with as_value_error(TENSORS, f"hold the tensors of a {description.cls.__name__}"):
        model, info = description.cls.from_pretrained(
            folder,
            dtype=description.dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    faults = [f"{name} is missing" for name in sorted(info["missing_keys"])]
    faults += [f"{name} is not the model's" for name in sorted(info["unexpected_keys"])]
    if faults:
        raise unfit(TENSORS, faults)
    return model


def unfit(file: str, faults: list[str]) -> ValueError:
    return ValueError(f"{LOAD}: {file} does not fit the model: {'; '.join(faults[:5])}")


def fill(
    model: PreTrainedModel,
    folder: Path,
    description: Description,
    header: dict[str, Stored],
    extra: dict[str, Stored],
) -> None:
    """Give every parameter and buffer of the model the files' tensor of its name.

    Raises:
        ValueError: With the names that are missing, too many, or of another shape or dtype.
    """
    wanted = all_tensors(model)
    empty = {f"{name}.weight" for name in description.quantised}  # for others than us
    header = {name: stored for name, stored in header.items() if name not in empty or stored.shape != (0,)}
    source_of = description_of_sources(model, description, header)
    where = {source_of(name): TENSORS for name in wanted}
    if description.format != 1:
        where |= dict.fromkeys(unkept_buffers(model), BUFFERS)
    files = {TENSORS: header, BUFFERS: extra}
    for file, have in files.items():
        mine = [name for name in wanted if where[source_of(name)] == file]
        names = {source_of(name) for name in mine}
        faults = [f"{name} is missing" for name in mine if source_of(name) not in have]
        faults += [f"{name} is not the model's" for name in sorted(have.keys() - names)]
        for name in mine if not faults else ():
            stored, like = have[source_of(name)], wanted[name]
            if stored.shape != tuple(like.shape):
                faults.append(f"{name} has shape {list(stored.shape)}, wanted {list(like.shape)}")
            elif stored.dtype != like.dtype and not (stored.dtype.is_floating_point and like.is_floating_point()):
                faults.append(f"{name} is {shown(stored.dtype)}, wanted {shown(like.dtype)}")
        if faults:
            raise unfit(file, faults)
    loaded: dict[str, Tensor] = {}
    for file, have in files.items():
        if have:
            with as_value_error(file, "be a whole safetensors file"), safe_open(folder / file, "pt") as source:
                loaded |= {name: source.get_tensor(name) for name in have}
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


def description_of_sources(
    model: nn.Module, description: Description, header: Mapping[str, Stored]
) -> Callable[[str], str]:
    """Under which name a file has a tensor of the model: of tied parameters it has one."""
    if description.format == 1:
        return lambda name: description.aliases.get(name, name)
    stored: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in header:
            stored.setdefault(id(parameter), name)
    named = dict(model.named_parameters(remove_duplicate=False))
    source = {name: name if name in header else stored.get(id(p), name) for name, p in named.items()}
    return lambda name: source.get(name, name)
