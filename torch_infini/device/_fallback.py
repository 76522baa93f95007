"""The fallback: ops without an infini kernel run torch's kernel of the backing device, and are counted."""

from __future__ import annotations

from typing import Literal

import torch

from ._state import backing

_MODES = ("allow", "warn", "error")


class fallback:
    """Set what ops without an infini kernel do; in a `with` statement, for its body.

    Copies, views, new tensors and `item()` are implemented by the device and always allowed.

    Args:
        mode: "allow": torch's kernel runs, on the same memory. "warn": the same, with a warning at an op's first call.
            "error": the op raises NotImplementedError.

    Raises:
        ValueError: For another mode.
        RuntimeError: If the device is not enabled.
    """

    def __init__(self, mode: Literal["allow", "warn", "error"]) -> None:
        if mode not in _MODES:
            raise ValueError(f"torch_infini.device.fallback: mode must be one of {', '.join(_MODES)}, got {mode!r}")
        backing()
        self.before = torch.ops.infini_device.get_fallback()
        torch.ops.infini_device.set_fallback(_MODES.index(mode))

    def __enter__(self) -> fallback:
        return self

    def __exit__(self, *_: object) -> None:
        torch.ops.infini_device.set_fallback(self.before)


def fallback_report(clear: bool = False) -> dict[str, int]:
    """Return how often each op ran torch's kernel of the backing device, the most frequent first.

    Args:
        clear: Whether to reset the counts.

    Raises:
        RuntimeError: If the device is not enabled.
    """
    backing()
    lines = (line.split(" ") for line in torch.ops.infini_device.fallback_report(clear))
    counts = {name: int(calls) for name, calls in lines}
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
