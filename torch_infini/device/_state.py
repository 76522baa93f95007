"""Whether device `infini` is enabled in this process, and on which backing device."""

from __future__ import annotations

from typing import Literal

enabled: Literal["cpu", "cuda"] | None = None
chosen: str | None = None  # the argument of enable()
vendor: str | None = None


def is_enabled() -> bool:
    """Return whether device `infini` is registered in this process."""
    return enabled is not None


def backing() -> Literal["cpu", "cuda"]:
    """Return the device whose tensors share memory with those on `infini`; "cpu" also for a vendor's device.

    Raises:
        RuntimeError: If the device is not enabled.
    """
    if enabled is None:
        raise RuntimeError("torch_infini.device is not enabled: call torch_infini.device.enable() first")
    return enabled


def vendor_device() -> str | None:
    """Return the name of the vendor's device whose memory and kernels `infini` uses, "qy"; None without one.

    Raises:
        RuntimeError: If the device is not enabled.
    """
    backing()
    return vendor
