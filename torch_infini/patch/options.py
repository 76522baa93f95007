"""What a caller asks of patch_model or of InfiniConfig, checked before anything is loaded or changed.

Needs no transformers. `where` is the function that messages name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..weights import names

PREFIX = "auto:"
PACKED = "packed"  # dense weights in panels: no format of torch_infini.weights, because nothing is quantized


def bits_of(weights: object, where: str = "torch_infini.patch_model") -> float | None:
    """Return BITS of "auto:BITS"; None for other values.

    Raises:
        ValueError: If BITS is not a positive number.
    """
    if not isinstance(weights, str) or not weights.startswith(PREFIX):
        return None
    try:
        bits = float(weights.removeprefix(PREFIX))
    except ValueError:
        bits = 0.0
    if not 0 < bits < float("inf"):
        raise ValueError(f"{where}: weights must have a number of bits after 'auto:', as 'auto:4.8', got {weights!r}")
    return bits


def check_weights(where: str, weights: object, calibrate: Tensor | None) -> None:
    """Check the name of a format, or "auto:BITS", and the token ids that go with the latter.

    Raises:
        TypeError: If calibrate is not a tensor.
        ValueError: For unknown weights, an invalid number of bits, a calibrate that is not token ids, or one without
            "auto:BITS".
    """
    if weights not in (None, *names(), PACKED) and not str(weights).startswith(PREFIX):
        known = ", ".join(map(repr, (None, *names(), PACKED, "auto:BITS")))
        raise ValueError(f"{where}: weights must be one of {known}, got {weights!r}")
    bits = bits_of(weights, where)
    if calibrate is None:
        return
    if not isinstance(calibrate, Tensor):
        raise TypeError(f"{where}: calibrate must be a torch.Tensor of token ids, got {type(calibrate).__name__}")
    if bits is None:
        raise ValueError(f"{where}: calibrate must be None unless weights is 'auto:BITS', got ids with {weights!r}")
    if calibrate.dim() != 1 or len(calibrate) < 2 or calibrate.dtype not in (torch.int64, torch.int32):
        kind = f"{str(calibrate.dtype).removeprefix('torch.')} {list(calibrate.shape)}"
        raise ValueError(f"{where}: calibrate must be [at least 2] token ids, int64 or int32, got {kind}")


def patterns(where: str, argument: str, value: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the patterns as a tuple; a single string is a TypeError, because each letter would become a pattern."""
    if value is None:
        return None
    whole = isinstance(value, Collection) and not isinstance(value, str)
    if not whole or not all(isinstance(pattern, str) for pattern in value):
        raise TypeError(f"{where}: {argument} must be a sequence of patterns, got {value!r}")
    return tuple(value)
