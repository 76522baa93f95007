"""The default sampling settings of a model, from the generation_config.json of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints import read_object
from .sampling_params import SamplingParams

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_defaults(folder: str | Path) -> dict[str, Any]:
    """Read a model's default sampling settings, as fields of SamplingParams.

    As in vLLM: temperature, top_k, top_p, min_p and repetition_penalty, whatever do_sample says; a top_k of -1 means no
    limit. End-of-sequence tokens come from the model's config (LlamaConfig.from_pretrained).

    Args:
        folder: The model's. The result is empty for a file, and for a folder without generation_config.json.

    Raises:
        ValueError: For a file that is not readable, or a value that SamplingParams rejects.
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
    """Read the sampling settings of a loaded transformers model: generation_config without transformers' defaults.

    Raises:
        ValueError: For a value that SamplingParams rejects.
    """
    config = getattr(model, "generation_config", None)
    return {} if config is None else fields_of(config.to_diff_dict())


def fields_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of SamplingParams in a generation config; ValueError for a value that it rejects."""
    fields = {name: given[name] for name in FIELDS if given.get(name) is not None}
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    SamplingParams(**fields)
    return fields
