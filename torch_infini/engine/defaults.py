"""The sampling settings that a model brings itself, in the generation_config.json of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints import read_object
from .sampling_params import SamplingParams

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """Read a model's sampling settings: fields of SamplingParams, those that its folder gives.

    As vLLM does: temperature, top_k, top_p, min_p and repetition_penalty, whatever do_sample says; -1 of top_k is no
    limit. The end tokens are the config's (LlamaConfig.from_pretrained).

    Args:
        folder: Of the model; a file, or a folder without generation_config.json, gives none.

    Raises:
        ValueError: For a file that is not readable, or a value that SamplingParams refuses.
    """
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return {}
    given = read_object(path)
    try:
        return fields_of(given)
    except ValueError as error:
        rule = str(error).removeprefix("torch_infini.SamplingParams: ")
        raise ValueError(f'torch_infini.LLM: {path}: {rule} (generation_config="none" ignores it)') from None


def sampling_settings(model: Any) -> dict[str, Any]:
    """Read the sampling settings of a loaded model of transformers: what its generation_config says beside defaults.

    Raises:
        ValueError: For a value that SamplingParams refuses.
    """
    config = getattr(model, "generation_config", None)
    return {} if config is None else fields_of(config.to_diff_dict())


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingParams in a generation config; ValueError for a value that is refused."""
    fields = {name: given[name] for name in FIELDS if given.get(name) is not None}
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    SamplingParams(**fields)
    return fields
