"""load_served: loads a model that the engine serves, its tokenizer and its default sampling settings."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from .._core.dtypes import floating
from ..checkpoints import Activations, config_values, has_gguf_tokenizer, method_of, read_object
from ..distributed import TPGroup, init_tp_group
from ..models import Llama
from ..models.checkpoint import digest_of
from ..models.config import DEFAULTS
from ..models.folder import checked_config, model_folder
from ..weights import names
from .defaults import sampling_defaults, sampling_settings
from .encoder import Encoder
from .images import ImageReader
from .model import ServedModel, is_served_model
from .pooling import PoolingDefaults, pooling_defaults
from .runner import make_worker
from .speculation import SpeculativeConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NAME = "torch_infini.LLM"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Served(NamedTuple):
    """A loaded model, its tokenizer and its default sampling settings.

    Attributes:
        model: For the Engine.
        tokenizer: None: prompts are token ids.
        sampling: Fields of SamplingParams for requests without params.
        pooling: What the folder says of embeddings.
        images: Reads images for it.
    """

    model: ServedModel
    tokenizer: PreTrainedTokenizerBase | None
    sampling: dict[str, Any]
    pooling: PoolingDefaults = PoolingDefaults()
    images: ImageReader | None = None


def load_served(
    model: str | Path | nn.Module,
    tokenizer: str | Path | PreTrainedTokenizerBase | None,
    quantization: str | None,
    activations: Activations | None,
    dtype: torch.dtype | str | None,
    device: torch.device | str,
    tensor_parallel_size: int,
    generation_config: Literal["auto", "none"],
    progress: bool | None,
    runner: str = "auto",
    expert_parallel: bool = False,
    limit: int | None = None,
) -> Served:
    """Load a model; arguments and errors are those of LLM. `limit` is that of a prompt's images."""
    if generation_config not in ("auto", "none"):
        raise ValueError(f"{_NAME}: generation_config must be 'auto' or 'none', got {generation_config!r}")
    if not isinstance(model, (str, Path, nn.Module)) and not is_served_model(model):
        raise ValueError(
            f"{_NAME}: model must be a folder, a Decoder or a model of transformers, got {type(model).__name__}"
        )
    size = tensor_parallel_size
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{_NAME}: tensor_parallel_size must be an integer of at least 1, got {size!r}")
    if not isinstance(expert_parallel, bool):
        raise ValueError(f"{_NAME}: enable_expert_parallel must be True or False, got {expert_parallel!r}")
    if quantization is not None and not isinstance(quantization, str):
        raise ValueError(f"{_NAME}: quantization must be a name or None, got {quantization!r}")
    device_of(device)
    if runner not in ("auto", "generate", "pooling"):
        raise ValueError(f"{_NAME}: runner must be 'auto', 'generate' or 'pooling', got {runner!r}")
    given: Any = load_tokenizer(tokenizer_folder(tokenizer)) if isinstance(tokenizer, (str, Path)) else tokenizer
    processor = given if hasattr(given, "image_processor") else None
    if processor is not None:
        given = processor.tokenizer
    wants_defaults = generation_config == "auto"
    if not isinstance(model, (str, Path)):
        is_served = is_served_model(model)
        for name, value in (
            ("enable_expert_parallel", expert_parallel or None),
            ("dtype", floating(dtype)),
            ("tensor_parallel_size", size if size != 1 else None),
            ("quantization", quantization if is_served else None),
            ("activations", activations),
        ):
            if value is not None:
                raise ValueError(f"{_NAME}: {name} must be left out for a model that is loaded, got {value!r}")
        if is_served:
            return Served(model, given, {})  # type: ignore[arg-type]  # it has what a ServedModel has
        if quantization is not None and quantization not in names() and not quantization.startswith("auto:"):
            known = ", ".join(map(repr, names()))
            raise ValueError(f"{_NAME}: quantization must be one of {known} or 'auto:BITS', got {quantization!r}")
        source = Path(getattr(model, "name_or_path", "") or "-")
        if runner != "generate" and _is_encoder(model):
            from ..patch.encoder import encoder_of

            served: ServedModel = encoder_of(model, quantization)  # type: ignore[assignment]  # an Encoder
            settings: dict[str, Any] = {}
        else:
            served = _paged(model, quantization)
            settings = sampling_settings(model) if wants_defaults else {}
        found = given or (load_tokenizer(source) if source.exists() else None)
        pooling = pooling_defaults(source, isinstance(served, Encoder))
        return Served(served, found, settings, pooling, reader_of(served, source, processor, limit))
    folder = model_folder(model)
    sampling = sampling_defaults(folder) if wants_defaults else {}
    weights = _weights(folder, quantization)
    if runner != "generate" and _is_encoder(folder):
        if size != 1:
            raise ValueError(f"{_NAME}: tensor_parallel_size must be 1 for an encoder, got {size} for {folder}")
        from ..patch.encoder import load_encoder

        found = given or load_tokenizer(folder)
        encoder = load_encoder(folder, weights, floating(dtype), device, activations)
        return Served(encoder, found, {}, pooling_defaults(folder, True))  # type: ignore[arg-type]  # an Encoder
    pooling = pooling_defaults(folder)
    if not needs_transformers(folder):
        checked_config(folder)  # first, because the tokenizer's reader describes errors of a config less clearly
    tp_group = init_tp_group(size, device) if size != 1 else None
    found = given or load_tokenizer(folder)  # while workers start
    options = folder, weights, dtype, str(device), activations
    load = partial(load_model, expert_parallel=expert_parallel)
    read = partial(load, *options, tp_group=tp_group)
    if tp_group is None or tp_group.workers is None:
        served = read(progress=progress)
        return Served(served, found, sampling, pooling, reader_of(served, folder, processor, limit))
    tp_group.workers.make(make_worker, load, *options)
    with tp_group.workers.relay_errors():
        served = read(progress=progress)
        return Served(served, found, sampling, pooling, reader_of(served, folder, processor, limit))


def reader_of(model: ServedModel, folder: Path, processor: Any, limit: int | None) -> ImageReader:
    """Return what reads images for a model, from the files of its folder; `processor` replaces these."""
    reason = getattr(model, "without_images", f"{type(model).__name__} reads text alone")
    return ImageReader(folder, processor, limit, reason)


def load_draft(
    config: SpeculativeConfig, dtype: torch.dtype, device: torch.device | str, progress: bool | None = None
) -> ServedModel | None:
    """Load the draft model that a speculative_config names; None if it names none.

    Raises:
        FileNotFoundError, ValueError: As of LLM's model.
    """
    if config.model is None:
        return None
    folder = model_folder(config.model)
    return load_model(folder, _weights(folder, config.quantization), dtype, str(device), None, progress)


def load_model(
    folder: Path,
    weights: str | None,
    dtype: torch.dtype | str | None,
    device: str,
    activations: Activations | None,
    progress: bool | None = None,
    tp_group: TPGroup | None = None,
    expert_parallel: bool = False,
) -> ServedModel:
    """Load a decoder, into a Llama or through transformers; arguments as load_served's, and the ranks that share it."""
    if not needs_transformers(folder):
        if expert_parallel:
            raise ValueError(f"{_NAME}: enable_expert_parallel must be left out for a model without experts, got True")
        return Llama.from_pretrained(folder, weights or "dense", dtype, device, activations, progress, tp_group)
    from ..patch.paged import load_served_model

    if tp_group is not None:
        tp_group.must_agree("the checkpoint", digest_of(folder))
    return load_served_model(folder, weights, floating(dtype), device, activations, progress, tp_group, expert_parallel)


def _weights(folder: Path, quantization: str | None) -> str | None:
    """Return the format to quantize weights to; None if `quantization` is None or the checkpoint's own format.

    Raises:
        ValueError: For the name of a checkpoint format that is not the folder's.
    """
    if quantization is None or quantization in names() or quantization.startswith("auto:"):
        return quantization
    stored = method_of(folder)
    if quantization != stored:
        known = ", ".join(map(repr, names()))
        raise ValueError(
            f"{_NAME}: quantization must be one of {known}, or what the checkpoint is ({stored or 'not quantized'}), "
            f"got {quantization!r}"
        )
    return None


def needs_transformers(folder: Path) -> bool:
    """Return whether a checkpoint's model type is supported by transformers, but not by Llama.

    Raises:
        ImportError: Without transformers, for a model type that Llama does not support.
    """
    try:
        config = config_values(folder)
    except (ValueError, OSError, NotImplementedError):  # the next reader of the folder reports it
        return False
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in DEFAULTS:
        return False
    from ..patch import needs_transformers as checked_import

    with checked_import("LLM"):
        from ..patch.paged import is_causal
    return is_causal(config)


def _is_encoder(model: Path | nn.Module) -> bool:
    """Return whether a folder or a loaded model is an encoder of transformers."""
    if isinstance(model, Path) and not (model / "config.json").is_file():  # the next reader of the folder reports it
        return False
    try:
        config = read_object(model / "config.json") if isinstance(model, Path) else {}
        kind = config.get("model_type", "")
        if not isinstance(kind, str) or kind in DEFAULTS:
            return False
        from ..patch.encoder import is_encoder, is_encoder_config
    except (ValueError, OSError, ImportError):
        return False
    return is_encoder_config(config) if isinstance(model, Path) else is_encoder(model)


def _paged(model: nn.Module, quantization: str | None) -> ServedModel:
    """Wrap a model of transformers for the engine; patch it unless it is patched."""
    from ..patch import is_patched, patch_model, unpatch_model
    from ..patch.paged import check_model, serve

    check_model(model)
    was_patched = is_patched(model)
    if was_patched and quantization is not None:
        raise ValueError(f"{_NAME}: quantization must be left out for a model that is patched, got {quantization!r}")
    if not was_patched:
        patch_model(model, weights=quantization)
    try:
        return serve(model)
    except BaseException:
        if not was_patched and quantization is None and is_patched(model):
            unpatch_model(model)
        raise


def device_of(device: torch.device | str) -> torch.device:
    """Return the device of that name; ValueError for one that is not available."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"{_NAME}: device must be cpu, cuda, cuda:N, or infini once it is enabled, got {device!r}"
        ) from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"{_NAME}: device must be one that torch sees, got {device} of {torch.cuda.device_count()} GPUs"
        )
    return found


def tokenizer_folder(name: str | Path) -> Path:
    """Return the folder of a tokenizer: the path given, or that of the name in the hub's cache."""
    try:
        return model_folder(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{_NAME}: the tokenizer's folder must exist, got {name}") from error


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a model folder; None if there is none, ValueError if it cannot be read.

    transformers reads the tokenizers of GGUF files of few architectures; for others, warn and return None, so that
    prompts are token ids.
    """
    is_gguf = folder.is_file()
    if not (has_gguf_tokenizer(folder) if is_gguf else any((folder / name).is_file() for name in _TOKENIZER_FILES)):
        return None
    from transformers import AutoTokenizer

    path, file = (folder.parent, folder.name) if is_gguf else (folder, None)
    options: dict[str, Any] = {"gguf_file": file} if file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False, **options)
        legacy = path / "chat_template.json"  # of processors, before templates had a file that tokenizers read
        if tokenizer.chat_template is None and legacy.is_file():
            tokenizer.chat_template = read_object(legacy)["chat_template"]
        return tokenizer
    except Exception as error:  # broken files raise exceptions of any type in transformers and tokenizers
        if has_code(folder):
            raise ValueError(
                f"torch_infini.LLM: {folder} must hold a tokenizer of transformers' own classes, because code of a "
                "model folder (auto_map) is never run, got a custom one (load it yourself, and pass it as tokenizer=)"
            ) from error
        cause = " ".join(str(error).split()) or type(error).__name__
        if is_gguf:
            warnings.warn(
                f"{_NAME}: prompts must be token ids, because transformers cannot read the tokenizer of {folder} "
                f"({cause}); pass a folder that has it as tokenizer=",
                UserWarning,
                stacklevel=2,
            )
            return None
        raise ValueError(f"torch_infini.LLM: {folder} must hold a readable tokenizer, got: {cause}") from error


def has_code(folder: Path) -> bool:
    """Return whether a model folder has code of its own (auto_map)."""
    for name in ("tokenizer_config.json", "config.json"):
        try:
            if json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map"):
                return True
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
    return False
