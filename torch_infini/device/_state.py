"""Whether device `infini` is enabled in this process, and on which backing device."""

from __future__ import annotations

from typing import Literal

enabled: Literal["cpu", "cuda"] | None = None


def is_enabled() -> bool:
    """Return whether device `infini` is registered in this process."""
    return enabled is not None


def backing() -> Literal["cpu", "cuda"]:
    """Return the device whose memory and kernels `infini` uses.

    Raises:
        RuntimeError: If the device is not enabled.
    """
    if enabled is None:
        raise RuntimeError("torch_infini.device is not enabled: call torch_infini.device.enable() first")
    return enabled
