"""PretrainedConfig: the entries of a config.json as attributes, for models written in Python.

InferEngine takes a LlamaConfig instead, which AutoConfig reads.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from ...checkpoints import read_object

_Config = TypeVar("_Config", bound="PretrainedConfig")
_NAME = "infinilm.configuration_utils.PretrainedConfig"


class PretrainedConfig:
    """A model's settings. Subclasses take their own entries as arguments and pass on the others as `**kwargs`.

    Args:
        **kwargs: Entries of a config.json. dtype (or torch_dtype) is a torch dtype or its name.

    Attributes:
        model_type: The class's model type.
        All entries; those of transformers' base class that callers read exist with its defaults.
    """

    model_type: str = ""

    def __init__(self, **kwargs: Any) -> None:
        values = dict(kwargs)
        dtype = values.pop("torch_dtype", None)
        dtype = values.pop("dtype", None) or dtype
        values.pop("model_type", None)
        if "model_type" in kwargs and not type(self).model_type:
            self.model_type = kwargs["model_type"]
        for name, default in _DEFAULTS.items():
            setattr(self, name, values.pop(name, default))
        self.dtype = _dtype(dtype)
        parameters = values.get("rope_parameters")
        if isinstance(parameters, Mapping) and "rope_theta" in parameters:  # the form of transformers 5
            values.setdefault("rope_theta", parameters["rope_theta"])
        for name, value in values.items():
            setattr(self, name, value)

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """dtype under the name of transformers 4."""
        return self.dtype

    @torch_dtype.setter
    def torch_dtype(self, value: torch.dtype | str | None) -> None:
        self.dtype = _dtype(value)

    @classmethod
    def from_dict(cls: type[_Config], config_dict: Mapping[str, Any], **kwargs: Any) -> _Config:
        """Make a config from the entries of a config.json, with these changes."""
        return cls(**{**config_dict, **kwargs})

    @classmethod
    def from_json_file(cls: type[_Config], json_file: str | Path) -> _Config:
        """Read a file; ValueError if it is not a JSON object."""
        return cls.from_dict(read_object(Path(json_file)))

    @classmethod
    def from_pretrained(cls: type[_Config], pretrained_model_name_or_path: str | Path, **kwargs: Any) -> _Config:
        """Read the config.json of a model folder on this machine, with these changes.

        Raises:
            FileNotFoundError: If there is no config.json.
            ValueError: If it is not a JSON object.
        """
        path = Path(pretrained_model_name_or_path) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{_NAME}: a model folder must have a config.json, got {path.parent} without one")
        return cls.from_dict({"name_or_path": str(pretrained_model_name_or_path), **read_object(path)}, **kwargs)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write config.json to a folder, which is created if necessary."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(self.to_json_string(), encoding="utf-8")

    def update(self, config_dict: Mapping[str, Any]) -> None:
        """Set attributes."""
        for name, value in config_dict.items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as entries of a config.json: a copy, with the dtype's name."""
        values = {name: copy.deepcopy(value) for name, value in vars(self).items() if not name.startswith("_")}
        values["dtype"] = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        return values | {"model_type": self.model_type}

    def to_json_string(self) -> str:
        """Return to_dict() as JSON."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PretrainedConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # attributes may be set

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"


_DEFAULTS: dict[str, Any] = {
    "name_or_path": "",
    "architectures": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": True,
    "use_cache": True,
}


def _dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    found = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{_NAME}: dtype must be torch's or the name of one, got {value!r}")
    return found
