"""Registers device `infini` in torch, once per process: its library, name, module torch.infini and methods."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from .._core import devices
from . import _dlpack, _load, _state, _vendor, inductor, torch_module

VARIABLE = "TORCH_INFINI_DEVICE"
NAME = "infini"

# Called by enable(); other modules of this package append.
after_enabling: list[Callable[[], object]] = []


def enable(backing: str | None = None) -> None:
    """Register device `infini`. Enabling it again with the same backing device does nothing.

    Args:
        backing: The device whose memory and kernels are used: "cpu", "cuda", the name of a vendor's infinirt device
            ("qy"), or the path of a vendor's library (docs/new-device.md). None: the variable TORCH_INFINI_DEVICE, or
            else "cuda" if torch has a GPU, "cpu" otherwise.

    Raises:
        ValueError: For any other value, also of the variable.
        RuntimeError: If another out-of-tree backend is registered, if `infini` is enabled with another backing or has
            no device for it, or if the host cannot access the memory of the vendor's device.
        ImportError: If the library for this release of torch is missing.
        OSError: If the vendor's library cannot be loaded.
    """
    chosen = backing or os.environ.get(VARIABLE) or ("cuda" if torch.cuda.is_available() else "cpu")
    origin = "backing" if backing else VARIABLE
    is_vendors = chosen in _vendor.NAMES[2:] or _vendor.is_library(chosen)
    if chosen not in ("cpu", "cuda") and not is_vendors:
        raise ValueError(
            f"torch_infini.device.enable: {origin} must be cpu or cuda, or a vendor's device of infinirt "
            f"({', '.join(_vendor.NAMES[2:])}) or the path of its library, got {chosen!r}"
        )
    if _state.enabled is not None:
        if chosen not in (_state.enabled, _state.chosen) and backing is not None:
            raise RuntimeError(
                f"torch_infini.device.enable: infini is enabled on {_state.chosen} already, and cannot move to "
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
    vendor = _vendor.find(chosen, origin) if is_vendors else None
    if vendor is None:
        torch.ops.infini_device.start(chosen, 0, 0)
    else:
        torch.ops.infini_device.start("cpu", vendor.number, vendor.compute_on)
        _state.vendor = vendor.name
    _state.chosen = chosen
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, torch_module)
    generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    _state.enabled = "cuda" if chosen == "cuda" else "cpu"
    devices.set_backing(_state.enabled, takes_any_memory=vendor is None)
    inductor.register()
    _dlpack.install()
    atexit.register(_settle, os.getpid())
    for install in after_enabling:
        install()


def _settle(process: int) -> None:
    """Wait for autograd's threads at the end of the process; a fork()'s child has none of its parent's."""
    if os.getpid() == process:
        with torch.inference_mode(False):
            torch.ops.infini_device.settle_autograd()
