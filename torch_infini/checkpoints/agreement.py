"""Checks that a checkpoint has the tensors of a model, for every reader, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from .weight import TensorInfo

_SHOWN = 10  # tensors of each kind that an error names


class Wanted(NamedTuple):
    """What a model expects of a tensor of a checkpoint.

    Attributes:
        shape: The shape of the whole tensor.
        dtype: The dtype of integers, which are loaded as they are; None: any floating dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


def check_tensors(
    where: str,
    path: Path,
    found: Mapping[str, TensorInfo],
    wanted: Mapping[str, Wanted],
    optional: Callable[[str], bool],
) -> None:
    """Compare the names, shapes and dtypes of a checkpoint's tensors with those of a model.

    Args:
        where: The caller, which the error begins with.
        path: The checkpoint, which the error names.
        found: The checkpoint's tensors; a quantized layer has only its weight here (Checkpoint.dequantized).
        wanted: The model's tensors.
        optional: Returns whether the checkpoint may have a tensor that the model does not have.

    Raises:
        ValueError: For tensors that are missing, surplus, of another shape or dtype; the message names the first ten of
            each kind.
    """
    missing = sorted(name for name in wanted if name not in found)
    surplus = sorted(name for name in found if name not in wanted and not optional(name))
    wrong = [f"{kind}: {_listed(names, ', ')}" for kind, names in (("missing", missing), ("surplus", surplus)) if names]
    faults = (_fault(name, found[name], want) for name, want in wanted.items() if name in found)
    different = [fault for fault in faults if fault is not None]
    if different:
        wrong.append(_listed(different, "; "))
    if wrong:
        raise ValueError(
            f"{where}: the tensors in {path} must be those of its {_config_of(path)}, got " + "; ".join(wrong)
        )


def check_layers(where: str, path: Path, found: Mapping[str, TensorInfo], layers: int) -> None:
    """Compare a config's number of layers with the number of tensors, before a model of the config is made.

    Raises:
        ValueError: For more layers than tensors.
    """
    if layers > len(found):
        raise ValueError(
            f"{where}: num_hidden_layers must be at most the number of tensors in {path}, {len(found)}, got {layers} "
            f"in its {_config_of(path)}"
        )


def is_derived(name: str) -> bool:
    """Return whether older releases of transformers stored a tensor of this name, though the config determines it."""
    return name.endswith((".rotary_emb.inv_freq", ".masked_bias", ".attn.bias"))


def _config_of(path: Path) -> str:
    return "metadata" if path.is_file() else "config.json"  # a GGUF file, or a folder


def _fault(name: str, info: TensorInfo, want: Wanted) -> str | None:
    if info.shape != want.shape:
        return f"{name} must have shape {list(want.shape)}, got {list(info.shape)}"
    got = str(info.dtype).removeprefix("torch.")
    if want.dtype is not None and info.dtype != want.dtype:
        return f"{name} must be {str(want.dtype).removeprefix('torch.')}, got {got}"
    if want.dtype is None and not (info.dtype.is_floating_point and info.dtype.itemsize > 1):
        # Dtypes of eight bits need scales.
        return f"{name} must be of a floating dtype of 16 bits or more, got {got}"
    return None


def _listed(texts: Iterable[str], between: str) -> str:
    texts = list(texts)
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return between.join(texts[:_SHOWN]) + more
