"""Registers device `infini` in torch, once a process: its library, its name, its module torch.infini, its methods."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Literal

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from .. import _devices
from . import _dlpack, _load, _state, inductor, torch_module

VARIABLE = "TORCH_INFINI_DEVICE"
NAME = "infini"

# What other modules of this package do then.
after_enabling: list[Callable[[], None]] = []


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
    chosen = backing or os.environ.get(VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "cuda"):
        origin = "backing" if backing else VARIABLE
        raise ValueError(f"torch_infini.device.enable: {origin} must be cpu or cuda, got {chosen!r}")
    if _state.enabled is not None:
        if chosen != _state.enabled and backing is not None:
            raise RuntimeError(
                f"torch_infini.device.enable: infini is enabled on {_state.enabled} already, and cannot move to "
                f"{chosen} in the same process"
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
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, torch_module)
    generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    _state.enabled = "cuda" if chosen == "cuda" else "cpu"
    _devices.set_backing(_state.enabled)
    inductor.register()
    _dlpack.install()
    atexit.register(_settle, os.getpid())
    for install in after_enabling:
        install()


def _settle(process: int) -> None:
    """Wait for autograd's threads at the end of the process; a child of fork() has none of its parent's."""
    if os.getpid() == process:
        with torch.inference_mode(False):
            torch.ops.infini_device.settle_autograd()
