"""serve, load_served_model: models of transformers for the engine, over its paged cache or else with their own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from ...checkpoints import Activations
from ...distributed import TPGroup
from ..files.foreign import class_named, load
from ..layers.packed_linear import packs_weights
from .causal_model import NAME
from .model import PagedModel
from .own_cache import OwnCacheModel
from .sites import Unserved

_logger = logging.getLogger("torch_infini")


def is_causal(config: Mapping[str, Any]) -> bool:
    """Return whether transformers has a model that continues texts of a config's model_type, or of its architectures.

    Those that read images too are among them.
    """
    kind = config.get("model_type")
    known = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return known or class_named(config) is not None


def load_served_model(
    folder: Path,
    weights: str | None,
    dtype: torch.dtype | None,
    device: torch.device | str,
    activations: Activations | None = None,
    progress: bool | None = None,
    tp_group: TPGroup | None = None,
    expert_parallel: bool = False,
) -> PagedModel | OwnCacheModel:
    """Load a checkpoint of a model of transformers, patched where possible, for the engine.

    Args:
        folder: A folder or .gguf file.
        weights: As patch_model's; None: dense ones are packed where that is faster.
        dtype: The dtype of activations and dense weights; None: the checkpoint's.
        device: The model's device.
        activations: As torch_infini.load's.
        progress: Whether to show a bar on stderr; None: if stderr is a terminal.
        tp_group: The ranks that share the model: each makes this call, and gets its part. None: it is whole.
        expert_parallel: Whether a rank has some experts of a mixture as a whole, and not some columns of each.

    Raises:
        ValueError: As PagedModel, for a checkpoint that contradicts itself, or weights that it cannot have.
    """
    packs = weights is None and packs_weights(device)
    options: dict[str, Any] = {"must_patch": False, "packs": packs, "progress": progress}
    options |= {"tp_group": tp_group, "expert_parallel": expert_parallel}
    model = load(folder, dtype, weights, activations, **options)
    return serve(model.to(device), tp_group)  # type: ignore[arg-type]  # of transformers


def serve(model: nn.Module, tp_group: TPGroup | None = None) -> PagedModel | OwnCacheModel:
    """Wrap a causal language model of transformers for the engine.

    A warning says why a model does not run over the engine's cache.

    Args:
        model: As PagedModel's.
        tp_group: Likewise.

    Raises:
        ValueError: If neither serves it, with the reasons of both.
    """
    try:
        return PagedModel(model, tp_group)
    except ValueError as error:
        if not isinstance(error.__cause__, Unserved):
            raise
        refused = error
    reason = str(refused.__cause__)
    try:
        served = OwnCacheModel(model, reason, tp_group)
    except ValueError as error:
        if str(error.__cause__) in reason:
            raise refused from error
        raise ValueError(f"{refused}; and with transformers' own cache: {error.__cause__}") from error
    _logger.log(
        logging.WARNING if tp_group is None or tp_group.rank == 0 else logging.DEBUG,
        "%s: %s runs %s, one sequence at a time, because %s",
        NAME,
        type(model).__name__,
        "with transformers' own cache" if served.has_cache else "without a cache, all tokens in each step",
        reason,
    )
    return served
