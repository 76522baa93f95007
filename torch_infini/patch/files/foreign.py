"""load: reads a checkpoint by torch_infini.checkpoints into a patched model of transformers.

The model is made on the meta device; checkpoints.fill reads each tensor and each quantized layer into it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from ..._core.progress import DELAY, finish, track
from ...checkpoints import (
    DENSE,
    Activations,
    Checkpoint,
    Layer,
    LinearWeight,
    ModelExperts,
    Projection,
    Wanted,
    check_layers,
    fill,
    find,
    is_derived,
    join_experts,
    open_checkpoint,
)
from ...distributed import TPGroup
from ...weights import FORMATS, Integers, experts_in_panels
from ..apply import apply
from ..checks.verify import Verifier
from ..decoder import find_decoder
from ..layers import quantized_experts
from ..layers.experts import Experts, is_transposed, plans_of, weights_of
from ..layers.quantized_linear import install_weight
from ..options import PACKED
from ..ranks.cut import Cut, part_of
from ..ranks.split import split, tie_head
from ..state import Selection
from ..swap import Unsupported
from .folder import DESCRIPTION
from .load import load as load_ours
from .tables import put_table, tables_in_blocks

NAME = "torch_infini.load"
_building = threading.Lock()  # transformers sets the process's default dtype, among others, while it builds a model


def load(
    name: str | Path,
    dtype: torch.dtype | None = None,
    weights: str | None = None,
    activations: Activations | None = None,
    *,
    must_patch: bool = True,
    packs: bool = False,
    progress: bool | None = None,
    tp_group: TPGroup | None = None,
    expert_parallel: bool = False,
) -> PreTrainedModel:
    """Load a checkpoint, patched.

    Args:
        name: A folder, a .gguf file, or "owner/model" of the hub.
        dtype: The dtype of activations and dense weights; None: the checkpoint's.
        weights: As patch_model's, for a checkpoint that is not quantized.
        activations: As torch_infini.load's.
        must_patch: Raise if nothing of the model can be patched; False: return the model as it is.
        packs: Pack dense weights where that is possible, as weights="packed" does, also of a quantized checkpoint.
        progress: Whether to show a bar on stderr; None: if stderr is a terminal.
        tp_group: The ranks that share the model: each makes this call, and gets its part. None: it is whole.
        expert_parallel: As split's.

    Raises:
        ValueError: As torch_infini.load, or for weights that the checkpoint or the model cannot have.
    """
    path, otherwise = find(name), PACKED if packs else None
    if (path / DESCRIPTION).is_file():
        if tp_group is not None:
            raise ValueError(
                f"{NAME}: tensor_parallel_size must be 1 for a folder of save_patched, got {tp_group.size} for {path}"
            )
        for argument, value in (("weights", weights), ("activations", activations)):
            if value is not None:
                raise ValueError(
                    f"{NAME}: {argument} must be left out for a folder of save_patched, got {value!r} for {path}"
                )
        model = load_ours(path, otherwise)
        return model if dtype is None else model.to(dtype)  # type: ignore[arg-type]  # of transformers
    with open_checkpoint(path, activations) as checkpoint:
        if weights is not None and checkpoint.is_quantized:
            raise ValueError(
                f"{NAME}: weights must be left out for a checkpoint that is quantized, got {weights!r} for {path}"
            )
        if activations is not None and not checkpoint.is_quantized:
            raise ValueError(
                f"{NAME}: activations must be left out for a checkpoint that is not quantized, got {activations!r} for "
                f"{path}"
            )
        config = config_of(checkpoint.config, path)
        check_layers(NAME, path, checkpoint.tensors, layer_count(config))
        model = empty_model(config, path, dtype)
        if path.is_dir() and not checkpoint.is_quantized and get_model_conversion_mapping(model, add_legacy=False):
            model, quantized = converted_part(path, type(model), model.dtype, tp_group, expert_parallel), []
        else:
            if path.is_dir():
                checkpoint.rename(partial(name_in_class, get_model_conversion_mapping(model, add_legacy=False)))
                checkpoint.leave_out(is_ignored_by(model))  # such as layers that predict further tokens
            join_experts(checkpoint, model_experts(model), model.dtype)
            check(model, checkpoint)
            cuts = {} if tp_group is None else split(model, tp_group, expert_parallel)
            quantized = fill_model(model, checkpoint, cuts, progress)
        if tp_group is not None:
            tie_head(model)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.name_or_path = str(path)
    model.eval()
    report = apply(model, weights or otherwise, False, Selection(None, ()), quantized=quantized)
    if report.reason:
        if must_patch or weights is not None:
            raise ValueError(f"{NAME}: {type(model).__name__} cannot be patched: {report.reason}")
        return model
    return model


def converted(folder: Path, cls: type[PreTrainedModel], dtype: torch.dtype) -> PreTrainedModel:
    """Load a dense folder whose tensors transformers renames or joins (experts that are one tensor in the model).

    Raises:
        ValueError: For tensors that are missing, too many or of other shapes.
    """
    try:
        with _building:
            loaded: Any = cls.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
    except Exception as error:  # transformers and safetensors raise whatever broken files lead to
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{NAME}: {folder} must be a model that transformers loads, got: {cause}") from error
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    surplus = [name for name in info["unexpected_keys"] if not is_derived(name)]
    unlike = [str(one[0] if isinstance(one, tuple) else one) for one in info["mismatched_keys"]]
    kinds = (("missing", sorted(info["missing_keys"])), ("surplus", sorted(surplus)), ("of another shape", unlike))
    if wrong := "; ".join(f"{kind}: {', '.join(names[:10])}" for kind, names in kinds if names):
        raise ValueError(f"{NAME}: the tensors in {folder} must be those of its config.json, got {wrong}")
    return model


def converted_part(
    folder: Path, cls: type[PreTrainedModel], dtype: torch.dtype, tp_group: TPGroup | None, expert_parallel: bool
) -> PreTrainedModel:
    """Load what `converted` does, and split it, one rank after another: only one at a time has the whole model."""
    if tp_group is None:
        return converted(folder, cls, dtype)
    model: PreTrainedModel | None = None
    failure: ValueError | None = None
    for turn in range(tp_group.size):
        if turn == tp_group.rank:
            try:
                model = converted(folder, cls, dtype)
                split(model, tp_group, expert_parallel)
            except ValueError as error:
                failure = error  # raised after the others had their turns, because they wait for this rank
        tp_group.any(False)
    if failure is not None:
        raise failure
    assert model is not None
    return model


def config_of(values: Mapping[str, Any], path: Path, where: str = NAME) -> PreTrainedConfig:
    """Make the config of a causal model of transformers from a checkpoint's values; errors begin with `where`.

    Raises:
        ValueError: If transformers cannot make one.
    """
    values = {key: value for key, value in values.items() if key != "quantization_config"}
    try:
        return AutoConfig.for_model(values.pop("model_type", None), **values)
    except Exception as error:  # transformers raises whatever broken configs lead to
        raise not_of_transformers(path, where, error) from error


def layer_count(config: PreTrainedConfig) -> int:
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    return layers if type(layers) is int else 0


def empty_model(config: PreTrainedConfig, path: Path, dtype: torch.dtype | None, where: str = NAME) -> PreTrainedModel:
    """Return the model on the meta device, its buffers computed; dtype None: the config's.

    Raises:
        ValueError: If transformers cannot make a model of the config; the message begins with `where`.
    """
    named = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
    try:
        with _building, torch.device("meta"):
            made: Any = class_with_images(config)
            if made is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
                made = class_named(config.to_dict())
            wanted = named if dtype is None else dtype
            model: PreTrainedModel = (
                made._from_config(config, dtype=wanted)
                if made is not None
                else AutoModelForCausalLM.from_config(config, dtype=wanted, trust_remote_code=False)
            )
    except Exception as error:
        raise not_of_transformers(path, where, error) from error
    with torch.no_grad():
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = torch.empty_like(buffer, device="cpu")
            for key, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:  # of torch.normal, which takes no default device
                    module._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=False)
        with _building:
            model.initialize_weights()  # sets the buffers that no checkpoint has; parameters stay on meta
    return model


def class_with_images(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the class of a config whose model reads images beside text; None if there is none.

    Where transformers has a class for its text alone too, `architectures` decides.
    """
    found: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    if isinstance(found, tuple):
        found = found[0]
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and found is not None:
        return found if found.__name__ in (config.architectures or ()) else None
    return found


def class_named(config: Mapping[str, Any]) -> type[PreTrainedModel] | None:
    """Return the causal class of transformers that a config's `architectures` names; None if it names none.

    Such a class may belong to the part of a model alone, whose own model_type AutoModelForCausalLM does not know.
    """
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    found = getattr(transformers, name, None) if isinstance(name, str) and name.endswith("ForCausalLM") else None
    is_causal = isinstance(found, type) and issubclass(found, PreTrainedModel) and issubclass(found, GenerationMixin)
    return found if is_causal else None


def not_of_transformers(path: Path, where: str, error: Exception) -> ValueError:
    """Return the error of a config from which transformers cannot make a model."""
    cause = " ".join(str(error).split())[:300] or type(error).__name__
    return ValueError(f"{where}: the config of {path} must be of a model of transformers, got: {cause}")


def is_ignored_by(model: nn.Module) -> Callable[[str], bool]:
    """Return whether a model's class says that it does not read a tensor of this name."""
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return lambda name: any(pattern.search(name) for pattern in ignored)


def check(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Compare names and shapes of the checkpoint with the model's, and check the values of scales.

    Raises:
        ValueError: If they differ; the message names the tensors.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    found = checkpoint.dequantized
    parameters = model.named_parameters(remove_duplicate=False)
    wanted = {name: Wanted(tuple(p.shape)) for name, p in parameters if name in found or name not in tied}
    buffers, is_ignored = {name for name, _ in model.named_buffers()}, is_ignored_by(model)

    def optional(name: str) -> bool:
        return name in buffers or is_ignored(name)

    checkpoint.check_model(NAME, wanted, optional)
    modules = dict(model.named_modules())
    for name in checkpoint.layers:
        module = modules.get(name)
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise ValueError(
                f"{NAME}: {name} in {checkpoint.path} must be a linear layer of the model, got {type(module).__name__}"
            )


def name_in_class(mapping: Sequence[Any], name: str) -> str:
    """Return what transformers' class calls a tensor, whose name in a file may be that of an older release.

    Args:
        mapping: Of the model, by transformers; its renamings count.
        name: In the file.
    """
    for one in mapping:
        if type(one) is WeightRenaming:
            name = one.rename_source_key(name)[0]
    return name


def model_experts(model: nn.Module) -> dict[str, ModelExperts]:
    """Return the modules whose weights have a dimension of experts, and nothing else, by name."""
    found = {}
    for name, module in model.named_modules():
        names = weights_of(module)
        if module._parameters.keys() == set(names) and all(module.get_parameter(one).dim() == 3 for one in names):
            found[name] = ModelExperts(names, len(module.get_parameter(names[0])), is_transposed(module))
    return found


class _Tensor:
    """A tensor of the model, or of this rank's part of it: the Destination that checkpoints.fill loads."""

    def __init__(self, tensor: Tensor, cut: Cut | None = None) -> None:
        self.tensor, self.first_row = tensor, 0
        self.rows = len(tensor) if tensor.dim() else 1
        self.part = cut

    def cut(self, tensor: Tensor) -> Tensor:
        return tensor if self.part is None else self.part.of(tensor)

    def load(self, some: Tensor, first: int) -> None:
        (self.tensor[first : first + len(some)] if some.dim() else self.tensor).copy_(some)


def fill_model(
    model: PreTrainedModel, checkpoint: Checkpoint, cuts: Mapping[str, Cut], progress: bool | None = None
) -> list[str]:
    """Read every tensor into the model; return the names of the layers that are quantized.

    Args:
        model: On meta, whole or split.
        checkpoint: Of the whole model.
        cuts: What `split` returned; empty: it is whole.
        progress: As load's.
    """
    dtype, quantized = model.dtype, []

    def put(name: str, module: nn.Linear, weights: list[LinearWeight | None]) -> None:
        found = [weight for weight in weights if weight is not None]
        if install_weight(module, owned_copy(found[0]) if len(found) == 1 else stacked(found), dtype):
            quantized.append(name)

    def destinations() -> dict[str, _Tensor]:
        found = checkpoint.dequantized
        for name, parameter in list(model.named_parameters()):
            if parameter.is_meta and name in found:
                tensors[name] = torch.empty_like(parameter, device="cpu")
                parent, _, last = name.rpartition(".")
                model.get_submodule(parent)._parameters[last] = nn.Parameter(tensors[name], requires_grad=False)
        return {name: _Tensor(tensor, cuts.get(name)) for name, tensor in tensors.items() if name in found}

    def projections(name: str, module: nn.Module) -> list[Projection]:
        part = part_of(module)
        if part is None:
            return [Projection(name, slice(None), slice(None))]
        return [Projection(name, rows.span, part.columns.span) for rows in part.rows]

    tensors = dict(model.named_buffers())
    modules = {name: model.get_submodule(name) for name in checkpoint.layers}
    # A subclass that computes more than a product (Llama 4's router) gets dense weights.
    linears = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    }
    layers = [Layer(projections(name, module), partial(put, name, module)) for name, module in linears.items()]
    tables = tables_in_blocks(model, checkpoint, modules)
    layers += [Layer(projections(name, one.module), partial(put_table, model, one)) for name, one in tables.items()]
    quantized += [head for one in tables.values() for head in one.heads]
    # As `destinations` will have them: those of the linear layers are no longer on meta then.
    others = [name for name in tensors if name in checkpoint.dequantized]
    others += [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_meta and name in checkpoint.dequantized
        if name.removesuffix(".weight") not in (linears.keys() | tables.keys())
        if name not in checkpoint.experts
    ]
    sizes = [
        checkpoint.stored_bytes(name if name in checkpoint.tensors else name.removesuffix(".weight"))
        for name in [*checkpoint.experts, *linears, *tables, *others]
    ]
    steps = chain(fill_experts(model, checkpoint, cuts, quantized), fill(checkpoint, dtype, layers, destinations))
    finish(track(steps, "loading", sizes, progress, "B", DELAY))
    if tables:
        model.tie_weights(recompute_mapping=False)  # without the heads of tables in blocks
    else:
        model.tie_weights()
    return quantized


def fill_experts(
    model: PreTrainedModel, checkpoint: Checkpoint, cuts: Mapping[str, Cut], quantized: list[str]
) -> Iterator[None]:
    """Read quantized experts into the model: in blocks where the op takes the module, else dequantized.

    Appends the names of the modules in blocks to `quantized`; yields after each tensor.
    """

    def own_blocks(name: str) -> Tensor:
        blocks, cut, stored = checkpoint.blocks(name), cuts.get(name), checkpoint.experts[name]
        if cut is None:
            return blocks
        return cut.of_blocks(blocks, stored.k // blocks.shape[2], stored.format.transposed)

    dtype, decoder = model.dtype, find_decoder(model)
    by_module: dict[str, dict[str, str]] = {}
    for name in checkpoint.experts:
        parent, _, last = name.rpartition(".")
        by_module.setdefault(parent, {})[last] = name
    verifier = None if decoder is None else Verifier(decoder[1])
    for module_name, names in by_module.items():
        module, plan = model.get_submodule(module_name), None
        if verifier is not None and names.keys() == set(weights_of(module)):
            with suppress(Unsupported):
                plan = verifier.checked(module, Experts, plans_of(module))
        blocks = {}
        for last, name in names.items():
            blocks[last] = own_blocks(name)
            yield
        kinds = {last: checkpoint.experts[name].format.kind for last, name in names.items()}
        if plan is not None and DENSE not in kinds.values():
            buffers, formats = {}, {}
            for last, kind in kinds.items():
                formats[last], panels = experts_in_panels(kind, blocks.pop(last), dtype)
                buffers[quantized_experts.integers_name(last)] = panels
            first, down = weights_of(module)
            storage = quantized_experts.QuantizedExpertsPlan(formats[first], 0, dtype, plan, formats[down])
            quantized_experts.install(module, storage, buffers)
            quantized.append(module_name)
            continue
        for last, name in names.items():
            weight = torch.empty_like(module.get_parameter(last), device="cpu")
            rows = weight.transpose(1, 2) if checkpoint.experts[name].format.transposed else weight
            for own, stored in zip(rows, blocks.pop(last), strict=True):
                if kinds[last] == DENSE:
                    own.copy_(stored)
                    continue
                n, k = own.shape
                own.copy_(FORMATS[kinds[last]].dequantize(Integers(stored, None, None), 0, n, k, dtype))
            module._parameters[last] = nn.Parameter(weight, requires_grad=False)


def stacked(weights: Sequence[LinearWeight]) -> LinearWeight:
    """Return weights of the same columns and format as one, with the rows of all in order."""

    def of_all(name: str) -> Any:
        tensors = [getattr(weight, name) for weight in weights]
        return None if tensors[0] is None else torch.cat(tensors)

    return weights[0]._replace(**{name: of_all(name) for name in ("weight", "scales", "zeros")})


def owned_copy(weight: LinearWeight) -> LinearWeight:
    """Copy a weight out of the mapped file, which may be closed and is not aligned."""

    def copied(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.clone(memory_format=torch.contiguous_format)

    tensors = {name: getattr(weight, name) for name in ("weight", "scales", "zeros", "columns")}
    return weight._replace(**{name: copied(tensor) for name, tensor in tensors.items()})
