"""Loads the parameters of model folders into an InferEngine or a model written in Python, or as a dict of tensors.

An engine reads the files itself, in parts; a model of infinicore.nn gets infinicore tensors through load_state_dict.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...checkpoints import files_of, read_header, read_object, read_tensors
from .. import infinicore
from .convert import as_dtype
from .inference import InferEngine

_NAME = "infinilm.modeling_utils"


def load_model_state_dict_by_file(model: Any, model_path: str | Path, dtype: Any = None) -> None:
    """Load the parameters of a model folder, one file at a time.

    Args:
        model: An InferEngine, or a model with state_dict() and load_state_dict() such as an infinicore.nn.Module.
        model_path: A Hugging Face folder on this machine.
        dtype: The dtype that parameters are converted to, torch's or infinicore's, or its name; for an engine it must
            be the engine's. None: the engine's, or the file's.

    Raises:
        FileNotFoundError: If files are missing.
        ValueError: If a file is corrupt or dtype is not the engine's; for an engine also if tensors are missing,
            unknown, or of another shape; nothing is loaded then.
        RuntimeError: For other models, if tensors are missing or unknown; nothing is loaded then.
    """
    _load(f"{_NAME}.load_model_state_dict_by_file", model, Path(model_path), dtype, whole_files=True)


def load_model_state_dict_by_tensor(model: Any, model_path: str | Path, dtype: Any = None) -> None:
    """Load the parameters of a model folder, one tensor at a time; otherwise like load_model_state_dict_by_file."""
    _load(f"{_NAME}.load_model_state_dict_by_tensor", model, Path(model_path), dtype, whole_files=False)


def get_model_state_dict(model_path: str | Path, device: Any = None, dtype: Any = None) -> dict[str, infinicore.Tensor]:
    """Read all tensors of a model folder.

    Args:
        model_path: A Hugging Face folder on this machine.
        device: An infinicore.device or its name; None: the CPU.
        dtype: The dtype that floating-point tensors are converted to; None: unchanged.

    Returns:
        infinicore tensors by name, including "lm_head.weight" if the config ties it to the embedding.

    Raises:
        FileNotFoundError, ValueError: As load_model_state_dict_by_file.
    """
    wanted = None if dtype is None else as_dtype(f"{_NAME}.get_model_state_dict", dtype)
    state: dict[str, infinicore.Tensor] = {}
    for file in files_of(Path(model_path)):
        for name, data in read_tensors(file, _NAME):
            tensor = infinicore.from_torch(_converted(data, wanted))
            state[name] = tensor if device is None else tensor.to(device)
    if _is_tied(Path(model_path), state):
        state["lm_head.weight"] = state[_EMBEDDING]
    return state


def check_parameters(model_keys: Iterable[str], already_loaded_keys: Iterable[str]) -> None:
    """Compare a model's names with those of the given tensors.

    Raises:
        RuntimeError: If they differ; the message lists all names.
    """
    expected, found = set(model_keys), set(already_loaded_keys)
    wrong = [
        f"{kind}: {', '.join(sorted(names))}"
        for kind, names in (("missing", expected - found), ("unexpected", found - expected))
        if names
    ]
    if wrong:
        raise RuntimeError(f"{_NAME}.check_parameters: the tensors must be the model's parameters; {'; '.join(wrong)}")


_EMBEDDING = "model.embed_tokens.weight"


def _load(where: str, model: Any, folder: Path, dtype: Any, whole_files: bool) -> None:
    wanted = None if dtype is None else as_dtype(where, dtype)
    if isinstance(model, InferEngine):
        own = model._rank.model.dtype
        if wanted not in (None, own):
            both = (str(one).removeprefix("torch.") for one in (own, wanted))
            raise ValueError(f"{where}: dtype must be that of the engine, {', got '.join(both)}")
        model._rank.load_folder(folder)
        return
    files = files_of(folder)
    devices = {name: tensor.device for name, tensor in model.state_dict().items()}
    held: set[str] = set()
    for file in files:
        held.update(name for name in read_header(file, _NAME) if not name.endswith(".rotary_emb.inv_freq"))
    tied = _is_tied(folder, held) and "lm_head.weight" in devices
    check_parameters(devices, held | {"lm_head.weight"} if tied else held)
    for file in files:
        state: dict[str, infinicore.Tensor] = {}
        for name, data in read_tensors(file, _NAME):
            if name not in devices:
                continue
            tensor = infinicore.from_torch(_converted(data, wanted))
            state[name] = tensor.to(devices[name])
            if tied and name == _EMBEDDING:
                state["lm_head.weight"] = tensor.to(devices["lm_head.weight"])
            if not whole_files:
                model.load_state_dict(state, strict=False)
                state = {}
        if state:
            model.load_state_dict(state, strict=False)


def _converted(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _is_tied(folder: Path, names: Iterable[str]) -> bool:
    """Return whether a checkpoint omits the head because it is the embedding."""
    path = folder / "config.json"
    held = set(names)
    ties = path.is_file() and bool(read_object(path).get("tie_word_embeddings", False))
    return ties and "lm_head.weight" not in held and _EMBEDDING in held
