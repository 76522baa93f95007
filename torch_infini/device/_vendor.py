"""A vendor's infinirt device that backs device `infini`: found by its name, or by the path of the vendor's library.

The host must be able to access its memory. docs/new-device.md says what a vendor writes.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

from .._core.library import PATH, RUNTIME

# In the order of infiniDevice_t (infinicore.h); the first two are torch's own backing devices.
NAMES = ("cpu", "nvidia", "cambricon", "ascend", "metax", "moore", "iluvatar", "kunlun", "hygon", "qy")
_libraries: list[ctypes.CDLL] = []  # kept loaded: their kernels are registered


class Vendor(NamedTuple):
    """A device type of infinirt with at least one device.

    Attributes:
        name: A name in NAMES.
        number: Its infiniDevice_t.
        compute_on: The address of the C function that makes ops use its kernels.
    """

    name: str
    number: int
    compute_on: int


def is_library(chosen: str) -> bool:
    """Return whether the value names a file instead of a device."""
    return os.sep in chosen or chosen.endswith(".so")


def _check(status: int, origin: str, chosen: str) -> None:
    if status:
        said = RUNTIME.infiniGetLastErrorMessage().decode()
        raise RuntimeError(f"torch_infini.device.enable: {origin} {chosen!r} cannot be used: {said}")


def _counts(origin: str, chosen: str) -> list[int]:
    counts = (ctypes.c_int * len(NAMES))()
    _check(RUNTIME.infinirtGetAllDeviceCount(counts), origin, chosen)
    return list(counts)


def find(chosen: str, origin: str) -> Vendor:
    """Return the vendor's device; if `chosen` is a path, load the library first.

    Args:
        chosen: A name in NAMES after the first two, or the path of a vendor's library.
        origin: Where `chosen` comes from, for messages.

    Raises:
        ValueError: For a path without a file, or a library that registers no device type, or several.
        OSError: For a file that cannot be loaded.
        RuntimeError: If there is no device of that type, or the host cannot access its memory.
    """
    before = _counts(origin, chosen)
    name = chosen
    if is_library(chosen):
        if not os.path.isfile(chosen):
            raise ValueError(f"torch_infini.device.enable: {origin} must be a library that exists, got {chosen!r}")
        _libraries.append(ctypes.CDLL(os.path.abspath(chosen)))
        brought = [NAMES[i] for i, count in enumerate(_counts(origin, chosen)) if count and not before[i]]
        if len(brought) != 1:
            raise ValueError(
                f"torch_infini.device.enable: {origin} must be a library that registers a backend of infinirt with at "
                f"least one device, got {chosen!r}, which brings {' and '.join(brought) or 'none'}"
            )
        name = brought[0]
    number = NAMES.index(name)
    if not _counts(origin, chosen)[number]:
        raise RuntimeError(
            f"torch_infini.device.enable: {origin} must be a device of this process, got {chosen!r}, of which infinirt "
            "finds none: give the path of the vendor's library"
        )
    accessible = ctypes.c_int()
    _check(RUNTIME.infinirtIsHostAccessible(number, 0, ctypes.byref(accessible)), origin, chosen)
    if not accessible.value:
        raise RuntimeError(
            f"torch_infini.device.enable: {origin} must be a device whose memory the host can use, got {chosen!r}; its "
            "backend says so by overriding is_host_accessible (csrc/infinirt/backend.h)"
        )
    function = ctypes.CDLL(str(PATH)).infiniTorchComputeOn
    return Vendor(name, number, ctypes.cast(function, ctypes.c_void_p).value or 0)
