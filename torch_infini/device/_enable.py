"""Registers device `infini` in torch, once a process: its library, its name, its module torch.infini, its methods."""

from __future__ import annotations

import os
from typing import Literal

import torch

from .. import _devices
from . import _load, inductor

VARIABLE = "TORCH_INFINI_DEVICE"
NAME = "infini"

_backing: Literal["cpu", "cuda"] | None = None


def is_enabled() -> bool:
    """Return whether device `infini` is registered in this process."""
    return _backing is not None


def backing() -> Literal["cpu", "cuda"]:
    """Return the device whose memory and kernels `infini` uses.

    Raises:
        RuntimeError: If the device is not enabled.
    """
    if _backing is None:
        raise RuntimeError("torch_infini.device is not enabled: call torch_infini.device.enable() first")
    return _backing


def enable(backing: Literal["cpu", "cuda"] | None = None) -> None:
    """Register device `infini`. Enabling it again with the same backing device does nothing.

    Args:
        backing: The device whose memory and kernels are used. None: what the variable TORCH_INFINI_DEVICE says; without
            it "cuda" where torch has a GPU, else "cpu".

    Raises:
        ValueError: For another value, also of the variable.
        RuntimeError: If another out-of-tree backend is registered, if `infini` is enabled with the other backing, or
            without a GPU for "cuda".
        ImportError: If the library for this release of torch is missing.
    """
    global _backing
    chosen = backing or os.environ.get(VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        origin = "backing" if backing else VARIABLE
        raise ValueError(f"torch_infini.device.enable: {origin} must be cpu or cuda, got {chosen!r}")
    if _backing is not None:
        if chosen != _backing and backing is not None:
            raise RuntimeError(
                f"torch_infini.device.enable: infini is enabled on {_backing} already, and cannot move to {chosen} in "
                "the same process"
            )
        return
    other = torch._C._get_privateuse1_backend_name()
    if other not in ("privateuseone", NAME):
        raise RuntimeError(
            f"torch_infini.device.enable: the out-of-tree backend {other!r} is registered in this process, and torch "
            f"has room for one: start the process without it (TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from "
            f"loading it by itself), or without {VARIABLE}"
        )
    _load.load()
    torch.ops.infini_device.start(chosen)
    torch.utils.rename_privateuse1_backend(NAME)
    from . import _dlpack, _sharing, torch_module

    torch._register_device_module(NAME, torch_module)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    _backing = "cuda" if chosen == "cuda" else "cpu"
    _devices.set_backing(_backing)
    inductor.register()
    _dlpack.install()
    _sharing.install()
